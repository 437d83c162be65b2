"""Supported row formats, recognized by their columns. docs/how-to/row-formats.md shows examples."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...checkpoints.storage.messages import brief, did_you_mean
from ..cleaning.cleaner import CALL_ROLE, role_of
from ..conversations import THOUGHT_KEYS, ContextText, Dialogue, with_thought
from .files import Row

_CHATS = ("conversations", "conversation", "messages")
_QUESTIONS = ("prompt", "question", "user_query", "human_prompt", "query", "input")
_ANSWERS = ("response", "completion", "answer", "output", "chatgpt_response", "chosen")
_REFERENCES = ("reference", "references", "answers")
_CONTEXT = ("input", "context")  # texts that follow a question
_SYSTEM = ("system", "system_prompt")
_IDS = ("conversation_id", "id", "conversation_hash", "question_id", "prompt_id")
_LEARNED = (
    *("weight", "loss_weight", "loss", "loss_mask", "step_loss_mask"),
    *("train", "training", "trainable", "train_on_turn"),
)
"""Message keys whose value is 0 or false if an answer is not supervised."""
_KEYS = {"from", "value", "role", "content", "text", "tool_calls", CALL_ROLE, *THOUGHT_KEYS, *_LEARNED}
_TEXT_PARTS, _THOUGHT_PARTS = ("text", "input_text", "output_text"), ("thinking", "reasoning")
_SHOWN = 12

# (columns of the messages or question, columns of the answer). The first match is used, because UltraChat has both
# `prompt` and `messages`, and Alpaca has both `text` and `instruction`.
_FORMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_CHATS, ()),
    (("instruction",), _ANSWERS),
    (_QUESTIONS, _ANSWERS),
    (("turns",), ()),
    (("chosen",), ()),
    (("prompt", "question", "instruction", "goal", "user_query", "human_prompt"), ()),
    (("text",), ()),
)
_COLUMNS = {*(name for form in _FORMS for names in form for name in names), *_CONTEXT, *_SYSTEM, "tools"}


def usable_columns(present: Sequence[str]) -> Sequence[str]:
    """Return the supported columns; all columns if the row format is unknown (for the error message)."""
    if _find_form(present) is None:
        return present
    return [name for name in present if name in {*_COLUMNS, *_IDS, *_REFERENCES, "category"}]


def _find_form(present: Collection[str]) -> tuple[str, str | None] | None:
    """Return the names of the question (or messages) and answer columns of the first matching row format."""
    for questions, answers in _FORMS:
        question = next((name for name in questions if name in present), None)
        answer = next((name for name in answers if name in present and name != question), None)
        if question is not None and (answer is not None or not answers):
            return question, answer
    return None


def read_dialogue(row: Row) -> Dialogue:
    """Convert a row to a dialogue. A string is a prompt, and a list of messages is a conversation.

    Raises:
        ValueError: The row format is unknown. The message contains the location of the row.
    """
    if isinstance(row.value, str):
        return Dialogue(row.name, (("user", row.value),), "one prompt per row")
    if _is_message_list(row.value):
        pairs = tuple(_message_list(row, "the row", row.value))
        return Dialogue(row.name, pairs, "one list of messages per row", notes=_notes(row.value))
    if not isinstance(row.value, Mapping):
        raise ValueError(f"{row.location}: expected an object, found {type(row.value).__name__}")
    columns: Mapping[str, Any] = row.value
    # In a table of mixed formats, the columns of the other formats are null.
    form = _find_form([name for name, value in columns.items() if value is not None]) or _find_form(columns)
    if form is None:
        raise _no_form(row)
    question, answer = form
    if question in _CHATS and isinstance(columns[question], str):  # JSON, in tables without nested columns
        with suppress(ValueError, RecursionError):
            columns = {**columns, question: json.loads(columns[question])}
            row = replace(row, value=columns)
    used, tools = [question, *([answer] if answer else [])], ""
    if question == "text":
        messages: list[tuple[Any, Any]] = [("text", columns[question])]
    else:
        context = []
        if question not in _CHATS and isinstance(columns[question], str):
            context = [name for name in _CONTEXT if isinstance(columns.get(name), str) and name not in used]
        used += context
        messages = list(_messages(row, question, answer, context))
        system = next((name for name in _SYSTEM if columns.get(name)), None)
        # A system message in the conversation has precedence over the column.
        if system is not None and not any(role_of(role) == "system" for role, _ in messages):
            messages.insert(0, ("system", columns[system]))
            used.append(system)
        tools = _tools(row, columns.get("tools"))
        used += ["tools"] if columns.get("tools") is not None else []
    references = tuple(text for name in _REFERENCES for text in _texts(columns.get(name)))
    if sum(role == "user" for role, _ in messages) > 1:  # MT-bench has a reference for each of its two questions
        references = references[:1]
    category = columns.get("category")
    return Dialogue(
        next((str(value) for value in map(columns.get, _IDS) if value is not None and str(value).strip()), row.name),
        tuple(messages),
        " + ".join(used),
        category if isinstance(category, str) else "",
        references,
        tools,
        _notes(columns[question]) if question in _CHATS else (),
    )


def _no_form(row: Row) -> ValueError:
    names = [str(name) for name in row.value]
    near = next(filter(None, (did_you_mean(name, _COLUMNS, cutoff=0.75) for name in names)), "")
    columns = ", ".join(name[:40] for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    known = "; ".join(" + ".join(" or ".join(names) for names in form if names) for form in _FORMS)
    return ValueError(f"{row.location}: the columns {columns or '(none)'} match no known format.{near} Known: {known}")


def _messages(row: Row, question: str, answer: str | None, context: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the (role, content) pairs of a row. A plain question is followed by the text of the `context` columns."""
    value = row.value[question]
    if question in (*_CHATS, "chosen"):
        yield from () if value is None else _message_list(row, question, value)
        return
    if question == "turns" and not isinstance(value, (str, list)):
        raise ValueError(f"{row.location}: `turns` must be a list of questions, found {type(value).__name__}")
    answers = [] if answer is None else [("assistant", row.value[answer])]
    if answer is not None and _is_message_list(row.value[answer]):
        answers = _message_list(row, answer, row.value[answer])
        if role_of(answers[0][0]) != "assistant":  # it starts with the question
            yield from answers
            return
    if _is_message_list(value):  # prompt and completion as lists of messages
        yield from _message_list(row, question, value)
    elif isinstance(value, list) and question in ("turns", "prompt"):
        yield from (("user", text) for text in value)
    else:
        texts = [text for text in (row.value[name] for name in context) if text.strip()]
        yield "user", "\n\n".join([value, *texts]) if texts else value
    yield from answers


def _tools(row: Row, value: Any) -> str:
    """Return the tool definitions as a JSON list, or "" if there are none."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value.strip() or "[]")
    if value and not _is_message_list(value):
        raise ValueError(f"{row.location}: `tools` must be a list of objects or its JSON text, found {brief(value)}")
    return json.dumps(value, ensure_ascii=False) if value else ""


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _message_list(row: Row, column: str, value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{row.location}: `{column}` must be a list of messages, found {type(value).__name__}")
    pairs: list[tuple[Any, Any]] = []
    for number, message in enumerate(value, start=1):
        fields = message if isinstance(message, Mapping) else {}
        if "from" in fields and "value" in fields:
            pairs.append((fields["from"], _mark_context(fields, _content(fields["value"]))))
        elif "role" in fields and {"content", "text", "tool_calls", CALL_ROLE} & set(fields):
            content = _mark_context(fields, _content(fields.get("content", fields.get("text"))))
            calls = fields.get("tool_calls")
            calls = calls if isinstance(calls, list) else [call for call in [fields.get(CALL_ROLE)] if call]
            if content or not calls:
                pairs.append((fields["role"], content))
            pairs += [(CALL_ROLE, _call(call)) for call in calls]
        else:
            names = ", ".join(map(str, list(fields)[:_SHOWN])) if fields else type(message).__name__
            raise ValueError(
                f"{row.location}: message {number} of `{column}` must be {{from, value}} or {{role, content}}, "
                f"found {names}"
            )
    return pairs


def _mark_context(message: Mapping[str, Any], content: Any) -> Any:
    """Prepend the reasoning to the content of a message, and mark the content if it is not supervised."""
    if isinstance(content, str):
        content = with_thought(message, content)
    is_context = any(message.get(key) in (0, False) and message[key] is not None for key in _LEARNED)
    return ContextText(content) if is_context and isinstance(content, str) else content


def _notes(messages: Any) -> tuple[str, ...]:
    """Describe unusual message keys: reasoning, ignored keys, and weights other than 0 and 1."""
    notes = dict[str, None]()
    for message in messages if isinstance(messages, list) else ():
        for key, value in message.items() if isinstance(message, Mapping) else ():
            if key in _LEARNED and value not in (0, 1, None):
                notes[f"`{key}` of messages is neither 0 nor 1, treated as 1"] = None
            elif key in THOUGHT_KEYS and value:
                notes["reasoning converted to <think>"] = None
            elif key not in _KEYS and value not in (None, "", [], {}):
                notes[f"ignored key `{key}` of messages"] = None
    return tuple(notes)


def _call(call: Any) -> Any:
    """Convert a tool call to JSON text. OpenAI stores the arguments as a JSON string."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return call
    arguments = function.get("arguments")
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _content(content: Any) -> Any:
    """Join content that is a list of text parts. Other content is returned unchanged."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    known = [(part.get("type"), _content(part.get("thinking", part.get("text")))) for part in content]
    if not known or any(kind not in _TEXT_PARTS + _THOUGHT_PARTS or not isinstance(text, str) for kind, text in known):
        return content
    texts = "\n".join(text for kind, text in known if kind in _TEXT_PARTS)
    return with_thought({"thinking": "\n".join(text for kind, text in known if kind in _THOUGHT_PARTS)}, texts)


def _texts(value: Any) -> tuple[str, ...]:
    """Return reference answers from a string, nested lists of strings, or the SQuAD format {text: [...]}."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    return tuple(text for part in value for text in _texts(part)) if isinstance(value, list) else ()

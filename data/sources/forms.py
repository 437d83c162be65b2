"""Row forms: which columns hold who said what. data/README.md shows a row of each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...checkpoints.storage.messages import brief, did_you_mean
from ..cleaning.cleaner import CALL_ROLE, role_of
from ..conversations import Dialogue
from .files import Row
from .trees import FLAT, best_path

_MESSAGES = ("conversations", "conversation", "messages")
_QUESTIONS = ("prompt", "question", "user_query", "human_prompt", "query", "input")
_ANSWERS = ("response", "completion", "answer", "output", "chatgpt_response", "chosen")
_REFERENCES = ("reference", "references", "answers")
_BESIDE = ("input", "context")  # texts that go with a question
_SYSTEM = ("system", "system_prompt")
_TREE_IDS = ("message_tree_id", "message_id")
_AROUND = (*_BESIDE, *_SYSTEM, "history", "tools")
_IDS = ("conversation_id", "id", "conversation_hash", "question_id", "prompt_id", "qid", *_TREE_IDS)
_TEXT_PARTS = ("text", "input_text", "output_text")
_SPOKEN = re.compile(r"\n\n(Human|Assistant): ?")  # as Anthropic writes conversations
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_SHOWN = 12
Renames = Mapping[str, str | None]
"""Columns by their names in the source, and what they are called here; None: not read."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One of `question` must be among the columns, and one of `answer` where there are any; `more` may be."""

    question: tuple[str, ...]
    answer: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def columns(self, present: Collection[str]) -> tuple[str, ...] | None:
        """The columns this form takes: question, answer, more; None where it does not fit."""
        found = [next((name for name in names if name in present), None) for names in (self.question, self.answer)]
        if found[0] is None or (self.answer and found[1] is None):
            return None
        more = (name for name in self.more if name in present and name not in found)
        return tuple(name for name in (*found, *more) if name is not None)


# the first that fits counts: UltraChat has `prompt` beside `messages`, Alpaca has `text` beside `instruction`
_FORMS = (
    _Form(_MESSAGES, (), (*_SYSTEM, "tools")),
    _Form(("instruction",), _ANSWERS, _AROUND),
    _Form(_QUESTIONS, _ANSWERS, _AROUND),
    _Form(("turns",), (), (*_REFERENCES, *_SYSTEM)),
    _Form(("chosen",), (), (*_SYSTEM, "tools")),
    _Form(("replies",), (), FLAT[2:]),
    _Form(("prompt", "question", "instruction", "goal", "qtext", "user_query", "human_prompt"), (),
          (*_AROUND, *_REFERENCES)),
    _Form(("text",)),
)  # fmt: skip
_COLUMNS = dict.fromkeys(name for form in _FORMS for name in (*form.question, *form.answer, *form.more))
_USED = {*_IDS, *_REFERENCES, "category"}


@lru_cache(maxsize=1024)
def _taken(present: tuple[str, ...]) -> tuple[str, ...] | None:
    """The columns that the first form that fits takes. The rows of a corpus have few sets of columns among them."""
    return next((taken for form in _FORMS if (taken := form.columns(present)) is not None), None)


@lru_cache(maxsize=1024)
def _named(present: tuple[str, ...]) -> dict[str, str]:
    """Columns by their names in lower case; what is written so counts."""
    return {name.lower(): name for name in sorted(present, key=lambda name: name == name.lower())}


def check_renames(renames: Renames) -> None:
    """Raises ValueError for a name that is none of ours, with the nearest."""
    known = [*_COLUMNS, *_USED]
    for theirs, ours in renames.items():
        if ours is not None and ours not in known:
            listed = ", ".join(sorted({*known}))
            raise ValueError(f"columns: {theirs!r} cannot be {ours!r}.{did_you_mean(ours, known)} Known: {listed}")


def usable_columns(present: Sequence[str]) -> Sequence[str]:
    """The columns that a form or an id can take; all of them where they fit no form, so that an error can name them."""
    if _taken(tuple(_named(tuple(present)))) is None:
        return present
    return [name for name in present if name.lower() in {*_COLUMNS, *_USED, *FLAT}]


def read_dialogue(row: Row) -> Dialogue:
    """The messages of a row, by the form of its columns; a row that is a text alone is a prompt, a list of
    messages is a conversation. ValueError, with its location, for what has no form."""
    if isinstance(row.value, str):
        return Dialogue(row.name, (("user", row.value),), "a prompt a row")
    if _is_message_list(row.value):
        return Dialogue(row.name, tuple(_message_list(row, "the row", row.value)), "a list of messages a row")
    if not isinstance(row.value, Mapping):
        raise ValueError(f"{row.location}: expected an object, found {type(row.value).__name__}")
    named = _named(tuple(map(str, row.value)))
    columns = {ours: row.value.get(theirs) for ours, theirs in named.items()}
    taken = _form(row, columns)
    messages = tuple(_messages(row, columns, taken))
    if not isinstance(columns[taken[0]], str | None):  # which no text can be joined to
        taken = (taken[0], *(name for name in taken[1:] if name not in _BESIDE))
    system = next((columns[name] for name in _SYSTEM if name in taken and columns[name]), None)
    if any(role_of(role) == "system" for role, _ in messages):  # the conversation's own counts
        taken = tuple(name for name in taken if name not in _SYSTEM)
    elif system is not None:
        messages = (("system", system), *messages)
    category = columns.get("category")
    references = tuple(text for name in _REFERENCES for text in _texts(columns.get(name)))
    if sum(role == "user" for role, _ in messages) > 1:  # MT-bench has a reference for each of its two questions
        references = references[:1]
    return Dialogue(
        str(next((columns[name] for name in _IDS if columns.get(name) is not None), row.name)),
        messages,
        " + ".join(taken),
        category if isinstance(category, str) else "",
        references,
        _tools(row, columns["tools"]) if "tools" in taken else "",
        tuple(named[name] for name in columns if name not in (*taken, *_USED) and columns[name] not in _EMPTY),
    )


def _form(row: Row, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that are read. A table of mixed forms fills those of the others with null."""
    filled = tuple(name for name, value in columns.items() if value is not None)
    taken = _taken(filled) or _taken(tuple(columns))
    if taken is not None:
        return taken
    names = [str(name) for name in row.value]
    near = next(filter(None, (did_you_mean(name, _COLUMNS) for name in names)), "")
    shown = ", ".join(name[:40] for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    sides = ([" or ".join(side) for side in (form.question, form.answer) if side] for form in _FORMS)
    known = "; ".join(map(" + ".join, sides))
    raise ValueError(
        f"{row.location}: the columns {shown or '(none)'} fit no known form.{near} Known: {known}. Other names: "
        "`columns: {theirs: ours}`"
    )


def _messages(row: Row, columns: Mapping[str, Any], taken: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """All but the system text of a column of its own."""
    question, value = taken[0], columns[taken[0]]
    if question == "chosen" and isinstance(value, str) and (parts := _SPOKEN.split(value))[1:]:
        yield from zip(parts[1::2], parts[2::2], strict=True)
        return
    if question in (*_MESSAGES, "chosen"):
        yield from () if value is None else _message_list(row, question, value)
        return
    if question == "text":
        yield "text", value
        return
    if question == "replies" or (isinstance(value, Mapping) and "replies" in value):
        yield from _message_list(row, question, best_path(columns if question == "replies" else value))
        return
    if question == "turns" and not isinstance(value, (str, list)):
        raise ValueError(f"{row.location}: `turns` must be a list of questions, found {type(value).__name__}")
    name = next((name for name in taken[1:] if name in _ANSWERS), None)
    answers = [("assistant", columns[name])] if name is not None else []
    if name is not None and _is_message_list(columns[name]):
        answers = _message_list(row, name, columns[name])
        if role_of(answers[0][0]) != "assistant":  # it begins with the question
            yield from answers
            return
    if "history" in taken:
        yield from _history(row, columns["history"])
    if _is_message_list(value):  # prompt and completion as lists of messages
        yield from _message_list(row, question, value)
    elif isinstance(value, list) and question in ("turns", "prompt"):
        yield from (("user", text) for text in value)
    else:
        beside = [columns[name] for name in _BESIDE if name in taken[1:]]
        texts = [text for text in beside if isinstance(text, str) and text.strip()]
        yield "user", "\n\n".join([value, *texts]) if isinstance(value, str) else value
    yield from answers


def _history(row: Row, value: Any) -> list[tuple[Any, Any]]:
    """Earlier turns: pairs of question and answer, the texts by turns, or messages."""
    if value is None or value == "":
        return []
    if _is_message_list(value):
        return _message_list(row, "history", value)
    if not isinstance(value, list):
        raise ValueError(f"{row.location}: `history` must be a list of turns, found {type(value).__name__}")
    texts = [text for turn in value for text in (turn if isinstance(turn, list) else [turn])]
    return [(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def _tools(row: Row, value: Any) -> str:
    """Tools as JSON: a list, which may come as the text of one; empty where there are none."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value.strip() or "[]")
    if value and not _is_message_list(value):
        raise ValueError(f"{row.location}: `tools` must be a list of objects, or JSON of one, found {brief(value)}")
    return json.dumps(value, ensure_ascii=False) if value else ""


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _message_list(row: Row, column: str, value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{row.location}: `{column}` must be a list of messages, found {type(value).__name__}")
    pairs: list[tuple[Any, Any]] = []
    for number, message in enumerate(value, start=1):
        found = {str(key).lower(): entry for key, entry in message.items()} if isinstance(message, Mapping) else {}
        if "from" in found and "value" in found:
            pairs.append((found["from"], _content(found["value"])))
        elif "role" in found:  # a tool call has a role and no content
            content, calls = _content(found.get("content", found.get("text"))), found.get("tool_calls")
            calls = calls if isinstance(calls, list) else [call for call in [found.get(CALL_ROLE)] if call]
            if content or not calls:
                pairs.append((found["role"], content))
            pairs += [(CALL_ROLE, _call(call)) for call in calls]
        else:
            shown = ", ".join(map(str, list(found)[:_SHOWN])) if found else type(message).__name__
            raise ValueError(
                f"{row.location}: message {number} of `{column}` must be {{from, value}} or {{role, content}}, "
                f"found {shown}"
            )
    return pairs


def _call(call: Any) -> Any:
    """A tool call as text: its name and its arguments, which OpenAI writes as JSON in a text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return call
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _content(content: Any) -> Any:
    """The text of a list of text parts; anything else stays as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    known = [text for text in texts if isinstance(text, str)]
    return "\n".join(known) if len(known) == len(content) else content


def _texts(value: Any) -> tuple[str, ...]:
    """The texts of a reference: one, a list of them, or a list of lists; SQuAD's {text: [...]}."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    return tuple(text for part in value for text in _texts(part)) if isinstance(value, list) else ()

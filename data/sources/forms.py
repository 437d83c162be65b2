"""Forms of rows: which columns hold the messages. data/README.md shows a row of each form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ...checkpoints.storage.messages import brief, did_you_mean
from ..cleaning.cleaner import CALL_ROLE, role_of
from ..conversations import Dialogue
from .files import Row

_MESSAGES = ("conversations", "conversation", "messages")
_QUESTIONS = ("prompt", "question", "user_query", "human_prompt", "query", "input")
_ANSWERS = ("response", "completion", "answer", "output", "chatgpt_response", "chosen")
_REFERENCES = ("reference", "references", "answers")
_CONTEXT = ("input", "context")  # texts that follow a question
_SYSTEM = ("system", "system_prompt")
_TREE_IDS = ("message_tree_id", "message_id")
_AROUND = (*_CONTEXT, *_SYSTEM, "history", "tools")
_IDS = ("conversation_id", "id", "conversation_hash", "question_id", "prompt_id", "qid", *_TREE_IDS)
_TEXT_PARTS = ("text", "input_text", "output_text")
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")  # Anthropic's notation
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_SHOWN = 12
_TREE = ("message_id", "parent_id", "role", "text", "rank", "deleted")
"""Columns of a tree with a message a row: a first one without a parent, then its replies."""
Renames = Mapping[str, str | None]
"""Known name of each renamed column of a source; None: the column is not read."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of rows with one of the columns `question`, one of `answer` (if not empty) and any of `more`."""

    question: tuple[str, ...]
    answer: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def columns(self, present: Collection[str]) -> tuple[str, ...] | None:
        """Return the columns that are read: question, answer, more; None where the form does not fit."""
        found = [next((name for name in names if name in present), None) for names in (self.question, self.answer)]
        if found[0] is None or (self.answer and found[1] is None):
            return None
        more = (name for name in self.more if name in present and name not in found)
        return tuple(name for name in (*found, *more) if name is not None)


# the first that fits is used: UltraChat has `prompt` and `messages`, Alpaca has `text` and `instruction`
_FORMS = (
    _Form(_MESSAGES, (), (*_SYSTEM, "tools")),
    _Form(("instruction",), _ANSWERS, _AROUND),
    _Form(_QUESTIONS, _ANSWERS, _AROUND),
    _Form(("turns",), (), (*_REFERENCES, *_SYSTEM)),
    _Form(("chosen",), (), (*_SYSTEM, "tools")),
    _Form(("replies",), (), _TREE[2:]),
    _Form(("prompt", "question", "instruction", "goal", "qtext", "user_query", "human_prompt"), (),
          (*_AROUND, *_REFERENCES)),
    _Form(("text",)),
)  # fmt: skip
_COLUMNS = dict.fromkeys(name for form in _FORMS for name in (*form.question, *form.answer, *form.more))
_USED = {*_IDS, *_REFERENCES, "category"}


@lru_cache(maxsize=1024)
def _columns_read(present: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the columns that are read by the first form that fits; a corpus has few sets of columns."""
    return next((taken for form in _FORMS if (taken := form.columns(present)) is not None), None)


@lru_cache(maxsize=1024)
def _by_lower_case(present: tuple[str, ...]) -> dict[str, str]:
    """Return the columns by their names in lower case; a name in lower case has precedence."""
    return {name.lower(): name for name in sorted(present, key=lambda name: name == name.lower())}


def check_renames(renames: Renames) -> None:
    """Raise ValueError for an unknown name, with the nearest known one."""
    known = sorted({*_COLUMNS, *_USED})
    for column, name in renames.items():
        if name is not None and name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"columns: {column!r} cannot be {name!r}.{near} Known: {', '.join(known)}")


def usable_columns(present: Sequence[str]) -> Sequence[str]:
    """Return the columns that can be read; all of them if they fit no form, for the error message."""
    if _columns_read(tuple(_by_lower_case(tuple(present)))) is None:
        return present
    return [name for name in present if name.lower() in {*_COLUMNS, *_USED, *_TREE}]


def read_dialogue(row: Row) -> Dialogue:
    """Return the dialogue of a row; a text is a prompt, a list of messages a conversation.

    Raises:
        ValueError: The row has no known form; the message has its location.
    """
    if isinstance(row.value, str):
        return Dialogue(row.name, (("user", row.value),), "a prompt a row")
    if _is_message_list(row.value):
        return Dialogue(row.name, tuple(_message_list(row, "the row", row.value)), "a list of messages a row")
    if not isinstance(row.value, Mapping):
        raise ValueError(f"{row.location}: expected an object, found {type(row.value).__name__}")
    named = _by_lower_case(tuple(map(str, row.value)))
    columns = {ours: row.value.get(theirs) for ours, theirs in named.items()}
    taken = _form(row, columns)
    messages = tuple(_messages(row, columns, taken))
    if not isinstance(columns[taken[0]], str | None):  # no text can be joined to it
        taken = (taken[0], *(name for name in taken[1:] if name not in _CONTEXT))
    system = next((columns[name] for name in _SYSTEM if name in taken and columns[name]), None)
    if any(role_of(role) == "system" for role, _ in messages):  # the conversation's own has precedence
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
    """Return the columns that are read. A table of mixed forms fills those of the others with null."""
    filled = tuple(name for name, value in columns.items() if value is not None)
    taken = _columns_read(filled) or _columns_read(tuple(columns))
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
    """Yield (role, content) pairs, without the text of a system column."""
    question, value = taken[0], columns[taken[0]]
    if question == "chosen" and isinstance(value, str) and (parts := _SPEAKER.split(value))[1:]:
        yield from zip(parts[1::2], parts[2::2], strict=True)
        return
    if question in (*_MESSAGES, "chosen"):
        yield from () if value is None else _message_list(row, question, value)
        return
    if question == "text":
        yield "text", value
        return
    if question == "replies" or (isinstance(value, Mapping) and "replies" in value):
        yield from _message_list(row, question, _best_path(columns if question == "replies" else value))
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
        beside = [columns[name] for name in _CONTEXT if name in taken[1:]]
        texts = [text for text in beside if isinstance(text, str) and text.strip()]
        yield "user", "\n\n".join([value, *texts]) if isinstance(value, str) else value
    yield from answers


def _history(row: Row, value: Any) -> list[tuple[Any, Any]]:
    """Return the earlier turns, written as pairs of question and answer, as alternating texts or as messages."""
    if value is None or value == "":
        return []
    if _is_message_list(value):
        return _message_list(row, "history", value)
    if not isinstance(value, list):
        raise ValueError(f"{row.location}: `history` must be a list of turns, found {type(value).__name__}")
    texts = [text for turn in value for text in (turn if isinstance(turn, list) else [turn])]
    return [(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def _tools(row: Row, value: Any) -> str:
    """Return the tools as JSON of a list; "" where there are none."""
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
    """Return a tool call as text; OpenAI writes the arguments as JSON in a string."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return call
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _content(content: Any) -> Any:
    """Return the text of a list of text parts; anything else unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS]
    known = [text for text in texts if isinstance(text, str)]
    return "\n".join(known) if len(known) == len(content) else content


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a reference: a text, nested lists of texts, or SQuAD's {text: [...]}."""
    if isinstance(value, Mapping):
        value = value.get("text")
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    return tuple(text for part in value for text in _texts(part)) if isinstance(value, list) else ()


def _best_path(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages of a tree along the replies with the lowest rank, or the first ones without ranks."""
    path, replies = [root], root.get("replies")
    while isinstance(replies, list) and (left := [one for one in replies if isinstance(one, Mapping)]):
        path.append(min(left, key=lambda one: one["rank"] if isinstance(one.get("rank"), int | float) else math.inf))
        replies = path[-1].get("replies")
    return path


def is_tree_message(value: Any) -> bool:
    """Return whether a row is one message of a tree, as in OpenAssistant's tables."""
    return isinstance(value, Mapping) and set(_TREE[:4]) <= value.keys()


def assemble_trees(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield a row for each tree: its first message, with nested `replies`, without deleted messages.

    Raises:
        ValueError: A message does not follow its parent in the same tree.
    """
    tree: Row | None = None
    replies: dict[Any, list[Any]] = {}
    for row in rows:
        if not is_tree_message(row.value):
            raise ValueError(f"{row.location}: expected {', '.join(_TREE[:4])}, as in the rows before")
        message, parent = {**row.value, "replies": []}, row.value["parent_id"]
        if parent is None:
            if tree is not None:
                yield tree
            tree, replies = replace(row, value=message), {}
        elif parent not in replies:
            raise ValueError(
                f"{row.location}: parent_id {parent} is no message_id of the {len(replies)} messages before it in its "
                "tree; a tree's messages must be consecutive, parents first"
            )
        elif not message.get("deleted"):
            replies[parent].append(message)
        replies[row.value["message_id"]] = message["replies"]
    if tree is not None:
        yield tree

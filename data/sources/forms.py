"""Row forms: which columns hold who said what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...checkpoints.storage.messages import did_you_mean
from ..conversations import Dialogue
from .files import Row

_MESSAGES = ("conversations", "conversation", "messages")
_ANSWERS = ("response", "completion", "answer", "output", "chatgpt_response")
_REFERENCES = ("reference", "references", "answers")
_IDS = ("conversation_id", "id", "conversation_hash", "question_id", "prompt_id", "qId", "ID")
_SHOWN = 12


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
        return tuple(name for name in (*found, *(name for name in self.more if name in present)) if name is not None)


# the first that fits counts: UltraChat has `prompt` beside `messages`, Alpaca has `text` beside `instruction`
_FORMS = (
    _Form(_MESSAGES),
    _Form(("instruction",), _ANSWERS, ("input",)),
    _Form(("prompt", "question", "user_query", "human_prompt"), _ANSWERS),
    _Form(("turns",), (), _REFERENCES),
    _Form(("prompt", "question", "instruction", "goal", "qText", "user_query", "human_prompt"), (),
          ("input", *_REFERENCES)),
    _Form(("text",)),
)  # fmt: skip
_COLUMNS = {name for form in _FORMS for name in (*form.question, *form.answer, *form.more)}
_KEPT = {*_COLUMNS, *_IDS, "category"}


@lru_cache(maxsize=1024)
def _taken(present: tuple[str, ...]) -> tuple[str, ...] | None:
    """The columns that the first form that fits takes. The rows of a corpus have few sets of columns among them."""
    return next((taken for form in _FORMS if (taken := form.columns(present)) is not None), None)


def usable_columns(present: Sequence[str]) -> Sequence[str]:
    """The columns that a form or an id can take; all of them where they fit no form, so that an error can name them."""
    return [name for name in present if name in _KEPT] if _taken(tuple(present)) is not None else present


def read_dialogue(row: Row) -> Dialogue:
    """The messages of a row, by the form of its columns; a row that is a text alone is a prompt, a list of
    messages is a conversation. ValueError, with its location, for what has no form."""
    if isinstance(row.value, str):
        return Dialogue(row.name, (("user", row.value),), "a prompt a row", number=row.number)
    if _is_message_list(row.value):
        messages = _message_list(row, "the row", row.value)
        return Dialogue(row.name, messages, "a list of messages a row", number=row.number)
    if not isinstance(row.value, Mapping):
        raise ValueError(f"{row.location}: expected an object, found {type(row.value).__name__}")
    columns: Mapping[str, Any] = row.value
    taken = _form(row, columns)
    messages = _messages(row, columns, taken)
    identity = next((columns[name] for name in _IDS if columns.get(name) is not None), row.name)
    category = columns.get("category")
    references = tuple(text for name in _REFERENCES for text in _texts(columns.get(name)))
    if sum(role == "user" for role, _ in messages) > 1:  # MT-bench has a reference for each of its two questions
        references = references[:1]
    known = category if isinstance(category, str) else ""
    return Dialogue(str(identity), messages, " + ".join(taken), known, references, row.number)


def _form(row: Row, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that are read. A table of mixed forms fills those of the others with null."""
    filled = tuple(name for name, value in columns.items() if value is not None)
    taken = _taken(filled) or _taken(tuple(columns))
    if taken is not None:
        return taken
    names = [str(name) for name in columns]
    near = next(filter(None, (did_you_mean(name, _COLUMNS) for name in names)), "")
    shown = ", ".join(name[:40] for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    sides = ([" or ".join(side) for side in (form.question, form.answer) if side] for form in _FORMS)
    known = "; ".join(map(" + ".join, sides))
    raise ValueError(f"{row.location}: the columns {shown or '(none)'} fit no known form.{near} Known: {known}")


def _messages(row: Row, columns: Mapping[str, Any], taken: Sequence[str]) -> tuple[tuple[Any, Any], ...]:
    question, value = taken[0], columns[taken[0]]
    if question in _MESSAGES:
        return () if value is None else _message_list(row, question, value)
    if question == "text":
        return (("text", value),)
    if question == "turns" and not isinstance(value, (str, list)):
        raise ValueError(f"{row.location}: `turns` must be a list of questions, found {type(value).__name__}")
    if _is_message_list(value):  # prompt and completion as lists of messages
        asked = _message_list(row, question, value)
    elif isinstance(value, list) and question in ("turns", "prompt"):
        asked = tuple(("user", text) for text in value)
    else:
        asked = (("user", _with_input(value, columns.get("input") if "input" in taken else None)),)
    answer = next((name for name in taken[1:] if name in _ANSWERS), None)
    if answer is None:
        return asked
    if _is_message_list(columns[answer]):
        return asked + _message_list(row, answer, columns[answer])
    return (*asked, ("assistant", columns[answer]))


def _with_input(question: Any, extra: Any) -> Any:
    if isinstance(question, str) and isinstance(extra, str) and extra.strip():
        return f"{question}\n\n{extra}"
    return question


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _message_list(row: Row, column: str, value: Any) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, list):
        raise ValueError(f"{row.location}: `{column}` must be a list of messages, found {type(value).__name__}")
    pairs = []
    for number, message in enumerate(value, start=1):
        found = message if isinstance(message, Mapping) else {}
        if "from" in found and "value" in found:
            pairs.append((found["from"], _content(found["value"])))
        elif "role" in found:  # a tool call has a role and no content
            pairs.append((found["role"], _content(found.get("content"))))
        else:
            shown = ", ".join(map(str, list(found)[:_SHOWN])) if found else type(message).__name__
            raise ValueError(
                f"{row.location}: message {number} of `{column}` must be {{from, value}} or {{role, content}}, "
                f"found {shown}"
            )
    return tuple(pairs)


def _content(content: Any) -> Any:
    """The text of a list of text parts; anything else stays as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    return "\n".join(known) if len(known) == len(content) else content


def _texts(value: Any) -> tuple[str, ...]:
    """The texts of a reference: one, a list of them, or a list of lists."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    return tuple(text for part in value for text in _texts(part)) if isinstance(value, list) else ()

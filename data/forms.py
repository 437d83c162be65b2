"""Row forms: which columns hold who said what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .conversations import Dialogue
from .files import Row

FORMS = (
    "conversations [{from, value}]",
    "conversation or messages [{role, content}]",
    "prompt + response",
    "instruction (+ input) + output or response",
)


def read_dialogue(row: Row) -> Dialogue:
    """The messages of a row, by the form that its columns have (see `FORMS`).

    Raises:
        ValueError: the row is no object, or its columns fit no form.
    """
    identity, messages = _messages(row)
    return Dialogue(identity, tuple(messages), row.place)


def _messages(row: Row) -> tuple[str, list[tuple[str, Any]]]:
    """The row's id and its (role as written, content as written) pairs.

    Raises:
        ValueError: the row is no object, or its columns fit no form.
    """
    if not isinstance(row.value, Mapping):
        raise ValueError(f"{row.place}: expected an object, found {type(row.value).__name__}")
    columns: Mapping[str, Any] = row.value
    identity = next((columns[name] for name in ("conversation_id", "id") if columns.get(name) is not None), row.name)
    for column in ("conversations", "conversation", "messages"):
        if column in columns:
            return str(identity), _message_list(row, column, columns[column])
    if "prompt" in columns and "response" in columns:
        return str(identity), [("user", columns["prompt"]), ("assistant", columns["response"])]
    answer = next((name for name in ("output", "response") if name in columns), None)
    if "instruction" in columns and answer is not None:
        question = columns["instruction"]
        if isinstance(question, str) and isinstance(extra := columns.get("input"), str) and extra.strip():
            question = f"{question}\n\n{extra}"
        return str(identity), [("user", question), ("assistant", columns[answer])]
    raise ValueError(
        f"{row.place}: the columns {', '.join(map(str, columns)) or '(none)'} fit no known form; known forms are "
        + "; ".join(FORMS)
    )


def _message_list(row: Row, column: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{row.place}: `{column}` must be a list of messages, found {type(value).__name__}")
    pairs = []
    for number, message in enumerate(value, start=1):
        found = message if isinstance(message, Mapping) else {}
        if "from" in found and "value" in found:
            pairs.append((found["from"], found["value"]))
        elif "role" in found:  # a tool call has a role and no content
            pairs.append((found["role"], found.get("content")))
        else:
            shown = ", ".join(map(str, found)) if found else type(message).__name__
            raise ValueError(
                f"{row.place}: message {number} of `{column}` must be {{from, value}} or {{role, content}}, "
                f"found {shown}"
            )
    return pairs

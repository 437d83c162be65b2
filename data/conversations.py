"""Conversations in: local files or a hub dataset, whatever their row form, as one clean stream.

Every row that does not survive is counted under a named reason, so that the counts of a report add up.
Nothing here needs more than the standard library until a parquet file or a hub id is read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import Row, open_source

USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "assistant", "chatgpt", "bing", "bard")
ROLES: dict[str, str] = {
    **dict.fromkeys(USER_ROLES, "user"),
    **dict.fromkeys(ASSISTANT_ROLES, "assistant"),
    "system": "system",
}

FORMS = (
    "conversations [{from, value}]",
    "conversation or messages [{role, content}]",
    "prompt + response",
    "instruction (+ input) + output or response",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `role` is "system", "user" or "assistant"."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that alternate user, assistant, …, end with an assistant turn, and may begin with one system turn."""

    id: str
    turns: tuple[Turn, ...]


@dataclass(slots=True)
class CorpusReport:
    """What became of every row: `rows == kept + sum(dropped.values())`.

    `changed` counts kept conversations by what was cut from them (one conversation can appear under several
    reasons), `unmapped_roles` counts the dropped conversations by the first role the table does not know.
    """

    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    unmapped_roles: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "changed": dict(sorted(self.changed.items())),
            "unmapped_roles": dict(sorted(self.unmapped_roles.items())),
        }

    def summary(self) -> str:
        """One line: `987 of 1000 rows kept; dropped 13 (8 no whole exchange, …); changed …`."""
        parts = [f"{self.kept} of {self.rows} rows kept"]
        for word, counts in (("dropped", self.dropped), ("changed", self.changed), ("unmapped", self.unmapped_roles)):
            if counts:
                reasons = ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
                parts.append(
                    f"{word} {sum(counts.values())} ({reasons})" if word == "dropped" else f"{word}: {reasons}"
                )
        return "; ".join(parts)


def read_conversations(
    source: str,
    *,
    split: str = "train",
    revision: str | None = None,
    file: str | None = None,
    limit: int | None = None,
    report: CorpusReport | None = None,
) -> Iterator[Conversation]:
    """Stream the conversations of a local file or folder, or of a hub dataset.

    `source` is a .json (one list), .jsonl or .parquet file, a folder of them (read in sorted order), or else a hub
    id; `split`, `revision` and `file` (a data file in the repository) apply to the hub alone. At most `limit`
    conversations are yielded. `report` is filled while the iterator is consumed.

    The row's form is found from its columns (see `FORMS`). Leading assistant turns and trailing user turns are cut;
    an empty message goes together with its question or answer; a conversation that does not alternate after that,
    or that has a role the table `ROLES` does not know, is dropped and counted.

    Raises:
        ValueError: no such file (with the nearest name) or unreachable hub; a file that does not parse; a row that
            is not an object or fits no form. The message names file, row and what was expected.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}, expected 0 or more")
    rows = open_source(source, split=split, revision=revision, file=file)
    return _conversations(rows, limit, report if report is not None else CorpusReport())


def write_conversations(conversations: Iterable[Conversation], path: str | os.PathLike[str]) -> int:
    """Write JSON lines `{"id": …, "messages": [{"role": …, "content": …}]}`, whole or not at all.

    Returns the number of conversations written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with temporary.open("w", encoding="utf-8") as out:
            for conversation in conversations:
                messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
                out.write(json.dumps({"id": conversation.id, "messages": messages}, ensure_ascii=False) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _conversations(rows: Iterable[Row], limit: int | None, report: CorpusReport) -> Iterator[Conversation]:
    if limit == 0:
        return
    for row in rows:
        report.rows += 1
        identity, messages = _messages(row)
        changes: list[str] = []
        turns = _clean(messages, changes, report)
        if turns is None:
            continue
        report.kept += 1
        report.changed.update(changes)
        yield Conversation(identity, turns)
        if report.kept == limit:
            return


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


def _clean(messages: list[tuple[str, Any]], changes: list[str], report: CorpusReport) -> tuple[Turn, ...] | None:
    """Alternating whole exchanges, or None after counting why there are none; `changes` receives what was cut."""
    turns: list[Turn] = []
    for written_role, content in messages:
        role = ROLES.get(written_role) if isinstance(written_role, str) else None
        if role is None:
            report.dropped["unmapped role"] += 1
            report.unmapped_roles[str(written_role)] += 1
            return None
        if content is not None and not isinstance(content, str):
            report.dropped["content is not text"] += 1
            return None
        text = content or ""
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # half an emoji: no UTF-8 exists for it
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            _note(changes, "broken characters replaced")
        turns.append(Turn(role, text))

    system: list[Turn] = []
    if turns and turns[0].role == "system":
        system, turns = turns[:1], turns[1:]
        if not system[0].text.strip():
            system = []
            _note(changes, "empty messages cut")
    turns = _trim(turns, changes)
    if any(not turn.text.strip() for turn in turns):
        turns = _trim(_without_empty(turns), changes)
        _note(changes, "empty messages cut")
    if not _alternates(turns):
        report.dropped["roles do not alternate"] += 1
        return None
    if not turns:
        report.dropped["no whole exchange"] += 1
        return None
    return (*system, *turns)


def _trim(turns: list[Turn], changes: list[str]) -> list[Turn]:
    """Cut leading assistant turns (nothing asked for them) and trailing user turns (nothing answers them)."""
    start, end = 0, len(turns)
    while start < end and turns[start].role == "assistant":
        start += 1
    while end > start and turns[end - 1].role == "user":
        end -= 1
    if start:
        _note(changes, "leading assistant turns cut")
    if end < len(turns):
        _note(changes, "trailing user turns cut")
    return turns[start:end]


def _without_empty(turns: list[Turn]) -> list[Turn]:
    """Drop empty messages so that alternation stays right.

    Where the turns alternate, an empty message takes its partner with it (an answer to nothing, or a question
    without an answer, teaches nonsense). Where they do not, the empty message itself may be what is too much.
    """
    if not _alternates(turns):
        return [turn for turn in turns if turn.text.strip()]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [turn for pair in pairs if all(message.text.strip() for message in pair) for turn in pair]


def _alternates(turns: list[Turn]) -> bool:
    """True for user, assistant, user, assistant, … with an even count."""
    expected = ("user", "assistant")
    return len(turns) % 2 == 0 and all(turn.role == expected[i % 2] for i, turn in enumerate(turns))


def _note(changes: list[str], reason: str) -> None:
    if reason not in changes:
        changes.append(reason)

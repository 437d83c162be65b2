"""What a conversation is, what became of a corpus's rows, and conversations written to a file."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.storage.atomic import atomic_file

_NEW_OBJECTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `role` is "system", "user" or "assistant"."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that alternate user, assistant, …, end with an assistant turn, and may begin with one system turn.

    A row of bare text is one assistant turn alone: everything in it is to be learned.
    """

    id: str
    turns: tuple[Turn, ...]
    tools: str = ""
    """What it may call, as JSON of a list ("[]": it calls, of what is not said), shown by the tokenizer's own chat
    template; "" where it calls nothing."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A row as it was written, before any cleaning.

    `messages` are (role, content) pairs of whatever stood there; a row of bare text is one message of the role
    "text". `form` names the columns that they were read from, `unused` those that hold something and were not.
    """

    id: str
    messages: tuple[tuple[Any, Any], ...]
    form: str
    category: str = ""
    references: tuple[str, ...] = ()
    tools: str = ""
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to decode an answer to: `turns` are [system], user; `follow_ups` are asked after the model's own
    answers; `references` are right or other people's answers, where the source has any."""

    id: str
    turns: tuple[Turn, ...]
    category: str = ""
    follow_ups: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


@dataclass(slots=True)
class CorpusReport:
    """What became of every row and of every exchange (a question directly before an answer):
    `rows == kept + sum(dropped.values())` and `exchanges == exchanges_kept + sum(exchanges_lost.values())`.

    `changed` counts kept conversations by what was cut from them or rewritten, `unmapped_roles` conversations by the
    first role the table does not know, `unused_columns` rows by the columns that hold something and are not read.
    """

    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    unmapped_roles: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0
    exchanges_kept: int = 0
    exchanges_lost: Counter[str] = field(default_factory=Counter)
    unused_columns: Counter[str] = field(default_factory=Counter)

    def merge(self, other: CorpusReport) -> None:
        """Add the counts of another part of the corpus (another rank, another worker)."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: dict(sorted(value.items())) if isinstance(value, Counter) else value for name, value in values}

    def summary(self) -> str:
        """One line: `987 of 1000 rows kept; dropped 13 (8 no whole exchange, …); exchanges lost 40 (…); changed: …`."""
        parts = [f"{self.kept} of {self.rows} rows kept"]
        for word, counts in (("dropped", self.dropped), ("exchanges lost", self.exchanges_lost)):
            if counts:
                parts.append(f"{word} {sum(counts.values())} ({_reasons(counts)})")
        named = {"changed": self.changed, "unmapped": self.unmapped_roles}
        parts += [f"{word}: {_reasons(counts)}" for word, counts in named.items() if counts]
        if self.unused_columns:
            listed = ", ".join(f"{name} ({rows} rows)" for name, rows in self.unused_columns.most_common())
            parts.append(f"columns not used: {listed}")
        return "; ".join(parts)

    def nothing_kept(self) -> str:
        """Why no row is left, and what can be done about each reason."""
        advice = {REMEDIES[word] for reason in self.dropped for word in REMEDIES if reason.startswith(word)}
        return "; ".join([self.summary() if self.rows else "there are no rows", *sorted(advice)])


REMEDIES = {
    "unmapped role": "`clean: {roles: {NAME: user}}` (or assistant, system) says what a role is, `unknown_roles: cut` "
    "cuts it with its exchange, `template: tokenizer` takes tools' calls and results",
    "roles do not alternate": "`clean: {non_alternating: merge}` joins neighbouring messages of one role",
    "only questions": "these are prompts: `draftsmith regenerate` has a target answer them, `draftsmith evaluate "
    "--prompts FILE` decodes them; if there are answers, `columns: {NAME: output}` names their column",
    "no whole exchange": "a question or its answer is missing or blank; `columns: {NAME: output}` names other columns",
    "content is not text": "images and other parts are not read: keep the texts alone",
    "HTML": "`clean: {html: markdown}` converts it",
    "too few exchanges": "`clean: {min_exchanges: 1}` keeps these",
    "too few characters": "`clean: {min_characters: 0}` keeps these",
    "language": "`clean: {languages: []}` keeps these",
    "broken": "without `skip_broken` the first such row is shown",
}
"""By how a reason for dropping begins: what can be done about it."""


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def encodable(text: str) -> str:
    """Half an emoji has no UTF-8: what cannot be encoded becomes the replacement character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def tool_text(tag: str, text: str) -> str:
    """A tool's call or result in its tags, as Hermes and Qwen write them."""
    return text if text.lstrip().startswith(f"<{tag}>") else f"<{tag}>\n{text}\n</{tag}>"


def write_conversations(conversations: Iterable[Conversation], path: str | os.PathLike[str]) -> int:
    """Write JSON lines `{"id": …, "messages": [{"role": …, "content": …}]}`, with `tools` where there are any, whole or
    not at all; returns how many."""
    count = 0
    with atomic_file(Path(path)) as out:
        for conversation in conversations:
            messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns]
            row = {"id": conversation.id, "messages": messages}
            row |= {"tools": json.loads(conversation.tools)} if conversation.tools else {}
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect garbage rarely: rows are freed by their reference counts."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

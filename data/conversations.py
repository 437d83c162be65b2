"""Data classes for conversations, evaluation prompts and row counts, and a writer for conversation files."""

import gc
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.storage.atomic import atomic_file

_NEW_OBJECTS = 1_000_000
_TOOLS = "Train on tool calls with `template: tokenizer`; `regenerate` skips such conversations"
_REMEDIES = (
    *((f"unmapped role {role}", _TOOLS) for role in ("function_call", "tool", "function", "observation", "ipython")),
    (
        "unmapped role",
        "Map a role with `clean: {roles: {NAME: user}}`, or remove its messages with `unknown_roles: cut`",
    ),
    ("roles do not alternate", "Merge adjacent messages of one role with `clean: {non_alternating: merge}`"),
    ("system message after", "Move the system message before the first question, or remove it"),
    ("only questions", "Generate the answers of rows without answers with `draftsmith regenerate`"),
    ("content is not text", "Only text is supported; remove images and other parts"),
)
"""Prefixes of reasons for dropping rows, with remedies. The first match is used."""
_ANY_REMEDY = "See the recipe section `clean`, and docs/how-to/row-formats.md for the supported columns"


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of the role "system", "user" or "assistant"."""

    role: str
    text: str
    is_learned: bool = True
    """Whether an answer is supervised. Unsupervised answers are used as context only."""


class ContextText(str):
    """Text of an answer that the source file marks as unsupervised."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation with turns [system], user, assistant, …, assistant. Plain text is stored as one assistant turn."""

    id: str
    turns: tuple[Turn, ...]
    tools: str = ""
    """Tool definitions as a JSON list: "[]" if they are unknown, and "" if there are no tool calls."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Row of a corpus before cleaning.

    `messages` are (role, content) pairs. Plain text is a single message with the role "text". `form` names the columns
    that contain the messages.
    """

    id: str
    messages: tuple[tuple[Any, Any], ...]
    form: str
    category: str = ""
    references: tuple[str, ...] = ()
    tools: str = ""
    notes: tuple[str, ...] = ()
    """Notes on unusual message keys, which the report counts."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Follow-up question, with the recorded answer to the previous question ("" if there is none)."""

    answer: str
    question: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Evaluation prompt with the turns [system], user, …, user, and optional follow-up questions and references."""

    id: str
    turns: tuple[Turn, ...]
    category: str = ""
    follow_ups: tuple[FollowUp, ...] = ()
    references: tuple[str, ...] = ()

    def follow_up(self, number: int, answer: str) -> "Prompt":
        """Return the prompt for the next question, which contains `answer`. Its id ends with `#number`."""
        first, *later = self.follow_ups
        turns = (*self.turns, Turn("assistant", answer), Turn("user", first.question))
        name = f"{self.id.rpartition('#')[0] if number > 2 else self.id}#{number}"
        return Prompt(name, turns, self.category, tuple(later), first.references)


@dataclass(slots=True)
class CorpusReport:
    """Row counts of a corpus, for which `rows == kept + sum(dropped.values())`.

    `forms` counts rows for each row format, `dropped` counts dropped rows for each reason, and `changed` counts kept
    conversations for each kind of change.
    """

    rows: int = 0
    kept: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def merge(self, other: "CorpusReport") -> None:
        """Add the counts of another report."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a JSON-serialisable dictionary."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: dict(sorted(value.items())) if isinstance(value, Counter) else value for name, value in values}

    def summary(self) -> str:
        """Format the counts: `987 of 1000 rows kept (messages); dropped 13 (8 no complete exchange, …); changed: …`."""
        parts = [f"{self.kept} of {self.rows} rows kept ({', '.join(self.forms) or 'no rows'})"]
        if self.dropped:
            parts.append(f"dropped {self.dropped.total()} ({_reasons(self.dropped)})")
        if self.changed:
            parts.append(f"changed: {_reasons(self.changed)}")
        return "; ".join(parts)

    def explain_empty(self) -> str:
        """Explain why no row was kept, and suggest a remedy."""
        return f"{self.summary()}. {self.advice() or _ANY_REMEDY}"

    def advice(self) -> str:
        """Return remedies for dropped rows, or an empty string if no remedy is known."""
        remedies = (next((text for start, text in _REMEDIES if key.startswith(start)), "") for key in self.dropped)
        return ". ".join(dict.fromkeys(filter(None, remedies)))


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode (lone surrogates) with the replacement character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Message keys that contain the reasoning of an answer."""


def with_thought(message: Mapping[str, Any], answer: str) -> str:
    """Prepend the reasoning of a message, if any, to its answer as a <think> block."""
    thought = next((message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str) and message[key]), "")
    return f"<think>\n{thought.strip()}\n</think>\n\n{answer}" if thought else answer


def tool_text(tag: str, text: str) -> str:
    """Wrap a tool call or tool result in tags, in the format of Hermes and Qwen."""
    return text if text.lstrip().startswith(f"<{tag}>") else f"<{tag}>\n{text}\n</{tag}>"


def write_conversations(conversations: Iterable[Conversation], path: str | os.PathLike[str]) -> int:
    """Write conversations atomically as JSONL rows `{"id": …, "messages": […]}`, and return the number of rows."""
    count = 0
    with atomic_file(Path(path)) as out:
        for conversation in conversations:
            messages = [
                {"role": turn.role, "content": turn.text} | ({} if turn.is_learned else {"weight": 0})
                for turn in conversation.turns
            ]
            row = {"id": conversation.id, "messages": messages}
            row |= {"tools": json.loads(conversation.tools)} if conversation.tools else {}
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Run the garbage collector less often within the context, to process many rows faster."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

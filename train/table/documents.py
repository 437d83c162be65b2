"""From conversations to counts of neighbouring tokens: what is counted of each.

Letters: T tokens, D documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ...data.conversations import Conversation, Turn
from ...data.rendering.encoding import After, PieceEncoder, special_strings
from ...data.rendering.render import Renderer
from ...data.rendering.templates import Template

_TOKENS_AT_A_TIME = 1 << 18
_TOKENS_PER_MB = 1 << 14
_BATCH_CHARACTERS = 1 << 19
_BATCHES_AHEAD = 3
_THREADS = 2

Numbered = tuple[int, Conversation]


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Documents that follow each other: `tokens_T` int32, `starts_D` int64 where each begins; the conversations up to
    number `position` - 1 are in it or before it."""

    tokens_T: np.ndarray
    starts_D: np.ndarray
    position: int


def token_documents(
    numbered: Iterable[Numbered],
    tokenizer: Any,
    template: Template,
    *,
    pairs: str = "documents",
    roles: Sequence[str] = (),
    last_turn_only: bool = False,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """What is counted of each conversation: its number, and ids int32 [T] within which neighbours are pairs.

    `documents` is the whole rendered conversation, never split. `answers` is each stretch that is trained on, with the
    one token before it. `messages` is the words of the messages of `roles` (none: of user and assistant), each by
    itself, as they are tokenised where the template puts them.

    Raises:
        ValueError: turns that are not [system], user, assistant, …; a special token that the tokenizer lacks.
    """
    if pairs == "messages":
        yield from _messages(numbered, tokenizer, template, frozenset(roles or ("user", "assistant")))
        return
    waiting: deque[Numbered] = deque()

    def conversations() -> Iterator[Conversation]:
        for entry in numbered:
            waiting.append(entry)
            yield entry[1]

    for rendered in Renderer(template, tokenizer, None, last_turn_only=last_turn_only)(conversations()):
        number, conversation = waiting.popleft()
        assert rendered.conversation is conversation, "nothing is split or left out where blocks have no length"
        if pairs == "documents":
            yield number, [rendered.ids]
        else:
            yield number, [rendered.ids[max(0, start - 1) : end] for start, end in rendered.spans]


def pack_documents(documents: Iterable[tuple[int, list[np.ndarray]]], memory_mb: float = 512) -> Iterator[PackedTokens]:
    """Whole conversations' documents, so many at a time that they take a small part of the memory for counts."""
    tokens = max(1, min(_TOKENS_AT_A_TIME, int(_TOKENS_PER_MB * memory_mb)))
    parts: list[np.ndarray] = []
    starts: list[int] = []
    size = position = 0
    for number, arrays in documents:
        for ids in arrays:
            starts.append(size)
            parts.append(ids)
            size += len(ids)
        position = number + 1
        if size >= tokens:
            yield PackedTokens(np.concatenate(parts), np.array(starts, dtype=np.int64), position)
            parts, starts, size = [], [], 0
    if parts:
        yield PackedTokens(np.concatenate(parts), np.array(starts, dtype=np.int64), position)


def _messages(
    numbered: Iterable[Numbered], tokenizer: Any, template: Template, roles: frozenset[str]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Threads tokenise the next batches while one is counted."""
    encoder, contexts = PieceEncoder(tokenizer, own=True), _Contexts(template, tokenizer)
    waiting: deque[tuple[_Batch, Future[tuple[np.ndarray, np.ndarray]]]] = deque()

    def encoded() -> Iterator[tuple[int, list[np.ndarray]]]:
        batch, future = waiting.popleft()
        ids, starts = future.result()
        pieces = iter(np.split(ids, starts[1:-1]) if batch.texts else [])
        for number, count in batch.counts:
            yield number, list(islice(pieces, count))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer") as threads:
        for batch in _message_batches(numbered, contexts, roles):
            waiting.append((batch, threads.submit(encoder.encode, batch.texts, batch.contexts)))
            if len(waiting) > _BATCHES_AHEAD:
                yield from encoded()
        while waiting:
            yield from encoded()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Numbers of conversations with how many of their messages are wanted, the texts, and what stands before each."""

    counts: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    contexts: list[After] = field(default_factory=list)


def _message_batches(numbered: Iterable[Numbered], contexts: _Contexts, roles: frozenset[str]) -> Iterator[_Batch]:
    batch, characters = _Batch(), 0
    for number, conversation in numbered:
        before = len(batch.texts)
        for text, after in contexts.messages(conversation.turns, roles):
            batch.texts.append(text)
            batch.contexts.append(after)
            characters += len(text)
        batch.counts.append((number, len(batch.texts) - before))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = _Batch(), 0
    if batch.counts:
        yield batch


class _Contexts:
    """What a template puts before each message of a conversation."""

    def __init__(self, template: Template, tokenizer: Any) -> None:
        self._tokens = {"{bos}": tokenizer.bos_token or "", "{eos}": tokenizer.eos_token or ""}
        self._specials = tuple(special_strings(tokenizer))
        self._first = self._after(template.start, After.NOTHING)
        self._next = self._after(template.end + template.after + template.next, After.SPECIAL)
        self._answer = self._after(template.middle, After.TEXT)
        self._system = self._after(template.system[0], After.NOTHING) if template.system else self._first
        self._strips = template.strips

    def messages(self, turns: Sequence[Turn], roles: frozenset[str]) -> Iterator[tuple[str, After]]:
        """Texts of the wanted messages with what stands before them. Of bare text the one turn begins the document."""
        asked = False
        for turn in turns:
            question = turn.role != "assistant"
            if turn.role == "system":
                after = self._system
            elif question:
                after = self._next if asked else self._first
                asked = True
            else:
                after = self._answer if asked else self._first
            if turn.role in roles:
                yield turn.text.strip() if self._strips[0 if question else 1] else turn.text, after

    def _after(self, text: str, empty: After) -> After:
        for name, token in self._tokens.items():
            text = text.replace(name, token)
        if not text:
            return empty
        if text.endswith(" "):
            return After.SPACE
        return After.SPECIAL if self._specials and text.endswith(self._specials) else After.TEXT

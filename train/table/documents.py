"""From conversations to counts of neighbouring tokens: what is counted of each.

Letters: T tokens, D documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ...data.conversations import Conversation, Turn
from ...data.rendering.encoding import After, PieceEncoder
from ...data.rendering.render import Layout, Renderer
from ...data.rendering.templates import Template

_TOKENS_AT_A_TIME = 1 << 18
_TOKENS_PER_MB = 1 << 14
_CONVERSATIONS_AT_A_TIME = 256

Numbered = tuple[int, Conversation]


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
    itself, as they are tokenised where the template puts them. Raises ValueError: turns that are not [system], user,
    assistant, …; a special token that the tokenizer lacks.
    """
    if pairs == "messages":
        yield from _messages(iter(numbered), tokenizer, template, frozenset(roles or ("user", "assistant")))
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


def pack_documents(
    documents: Iterable[tuple[int, list[np.ndarray]]], memory_mb: float = 512
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Documents of whole conversations end to end, so many that they take a small part of the memory for counts: tokens
    int32 [T], where each document begins int64 [D], and the number of the first conversation that is not among them."""
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
            yield np.concatenate(parts), np.array(starts, dtype=np.int64), position
            parts, starts, size = [], [], 0
    if parts:
        yield np.concatenate(parts), np.array(starts, dtype=np.int64), position


def _messages(
    numbered: Iterator[Numbered], tokenizer: Any, template: Template, roles: frozenset[str]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    layout = Layout(template, PieceEncoder(tokenizer, own=True))
    while some := list(islice(numbered, _CONVERSATIONS_AT_A_TIME)):
        wanted = [list(_wanted(layout, conversation.turns, roles)) for _, conversation in some]
        pieces = [piece for messages in wanted for piece in messages]
        ids, starts = layout.encoder.encode([text for text, _ in pieces], [after for _, after in pieces])
        encoded = iter(np.split(ids, starts[1:-1]) if pieces else [])
        for (number, _), messages in zip(some, wanted, strict=True):
            yield number, list(islice(encoded, len(messages)))


def _wanted(layout: Layout, turns: Sequence[Turn], roles: frozenset[str]) -> Iterator[tuple[str, After]]:
    """Texts of the wanted messages with what the template puts before them; of bare text, the one turn is the first."""
    system, asked = layout.template.system, False
    for turn in turns:
        question = turn.role != "assistant"
        if turn.role == "system":
            lead = layout.start if system is None else layout.lead(system[0])
        elif question:
            lead, asked = layout.next if asked else layout.start, True
        else:
            lead = layout.answer if asked else layout.start
        if turn.role in roles:
            after = lead.after if not lead.tail else After.SPACE if lead.tail.endswith(" ") else After.TEXT
            yield turn.text.strip() if layout.template.strips[0 if question else 1] else turn.text, after

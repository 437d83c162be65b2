"""Conversion of conversations to the token documents that a bigram table counts.

Shape letters: T tokens, D documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...data.conversations import Conversation
from ...data.rendering.render import Renderer
from ...data.rendering.templates import Template

_TOKENS_AT_A_TIME = 1 << 18
_TOKENS_PER_MB = 1 << 14


def token_documents(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    template: Template,
    *,
    pairs: str = "documents",
    last_turn_only: bool = False,
) -> Iterator[list[np.ndarray]]:
    """Yield the documents of each conversation as token ids, int32 [T], for counting pairs of adjacent tokens.

    `pairs` is `documents` for whole conversations without the template's default system prompt, or `answers` for each
    supervised span with the token before it. With `last_turn_only`, only the last answer is supervised.

    Raises ValueError if the turns of a conversation are not [system], user, assistant, …
    """
    if pairs == "documents":  # the default system prompt would distort the counts
        template = replace(template, start=template.next)
    # Without a block length, each conversation gives one complete document.
    for rendered in Renderer(template, tokenizer, None, last_turn_only=last_turn_only)(conversations):
        if pairs == "documents":
            yield [rendered.ids]
        else:
            yield [rendered.ids[max(0, start - 1) : end] for start, end in rendered.spans]


def pack_documents(
    documents: Iterable[list[np.ndarray]], first: int, memory_mb: float
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Concatenate the documents of conversations, numbered from `first`, into batches for `PairCounter.add`.

    Yields tokens int32 [T], starts of the documents int64 [D], and the number of the first conversation after the
    batch. A batch uses only a small part of `memory_mb`.
    """
    tokens = max(1, min(_TOKENS_AT_A_TIME, int(_TOKENS_PER_MB * memory_mb)))
    parts: list[np.ndarray] = []
    starts: list[int] = []
    size = 0
    for position, arrays in enumerate(documents, first + 1):
        for ids in arrays:
            starts.append(size)
            parts.append(ids)
            size += len(ids)
        if size >= tokens:
            yield np.concatenate(parts), np.array(starts, dtype=np.int64), position
            parts, starts, size = [], [], 0
    if parts:
        yield np.concatenate(parts), np.array(starts, dtype=np.int64), position

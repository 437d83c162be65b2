"""Counting a bigram table over prepared blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..checkpoints.table import BigramTable

if TYPE_CHECKING:
    from ..data.prepared import PreparedData
    from ..data.stream import StreamedData


def count_table(
    data: PreparedData | StreamedData, vocab_size: int, progress: Callable[[int, int], None] | None = None
) -> BigramTable:
    """Which token follows which within the documents of `data`, trained on or not; padding is not counted.

    `progress(documents, tokens)` is called after each document.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    return BigramTable.from_documents(data.iter_documents(), vocab_size, progress=progress)

"""Pruning: a smaller table derived from the whole counts, which stay as they are.

Letters: V vocabulary, E entries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .counts import BigramCounts, seen_once_and_twice

_BYTES_PER_ENTRY = 8
_BYTES_PER_TOKEN = 32  # row_ptr, unigram, left and right
_HEADER = 2048  # more than the header and its metadata need


def pruned(table: BigramCounts, min_count: int, top: int, megabytes: float | None) -> dict[str, Any]:
    """The parts of a table that holds fewer of the pairs, with the marginals of the whole counts: of those seen at
    least `min_count` times the `top` of each row by their counts, of equal ones the lower tokens (0: all), and of these
    those with which `table.safetensors` has at most so many `megabytes` (10⁶ bytes), by the least count.

    Raises ValueError: a table that is pruned already; a negative condition; conditions that no pair meets.
    """
    if table.pruning is not None:
        kept = f"{table.entries} of {table.pruning['entries']} entries"
        raise ValueError(f"this table is pruned already, to {kept}: prune the whole counts")
    if min_count < 1 or top < 0:
        raise ValueError(f"min_count must be at least 1 and top at least 0, got {min_count} and {top}")
    count_E = table.count.numpy()
    keep_E = count_E >= min_count
    if top:
        _keep_top(table, keep_E, top)
    threshold = min_count
    if megabytes is not None:
        threshold = max(min_count, _threshold(count_E[keep_E], table.vocab_size, megabytes))
        keep_E &= count_E >= threshold
    if table.entries and not keep_E.any():
        raise ValueError(
            f"this leaves none of {table.entries} entries: the highest count is {count_E.max()}, and pairs are kept "
            f"from a count of {threshold} on"
        )
    row_ptr = np.searchsorted(np.flatnonzero(keep_E), table.row_ptr.numpy())
    once, twice = seen_once_and_twice(table)
    asked = {"min_count": min_count, "top": top, "megabytes": megabytes, "threshold": threshold}
    whole = {"pairs": table.pairs, "entries": table.entries, "seen_once": once, "seen_twice": twice}
    return {
        "row_ptr": torch.from_numpy(row_ptr),
        "col": torch.from_numpy(table.col.numpy()[keep_E]),
        "count": torch.from_numpy(count_E[keep_E]),
        "unigram": table.unigram,
        "left": table.left_counts(),
        "right": table.right_counts(),
        "pruning": asked | whole,
    }


def check_size(vocab_size: int, megabytes: float) -> int:
    """How many entries a file of so many megabytes has room for, which can be told before anything is counted."""
    if not math.isfinite(megabytes):
        raise ValueError(f"megabytes must be a size, got {megabytes}")
    fixed = _HEADER + _BYTES_PER_TOKEN * vocab_size
    room = int((megabytes * 1e6 - fixed) // _BYTES_PER_ENTRY)
    if room < 1:
        least = (fixed + _BYTES_PER_ENTRY) / 1e6
        with_one = f"a table of {vocab_size} tokens takes {least:.6g} megabytes with a single pair and all margins"
        raise ValueError(f"{with_one}; megabytes is {megabytes}")
    return room


def _keep_top(table: BigramCounts, keep_E: NDArray[np.bool_], top: int) -> None:
    """Take out of `keep_E` what is not among the highest counts of its row."""
    count_E, row_ptr = table.count.numpy(), table.row_ptr.numpy()
    for first, end in table.chunks():
        start, stop = int(row_ptr[first]), int(row_ptr[end])
        rows_E = table.rows_of(first, end).numpy()
        # Stable: of equal counts in a row the lower columns come first.
        order_E = np.argsort(((rows_E - first) << 32) - count_E[start:stop], kind="stable")
        rank_E = np.arange(start, stop) - row_ptr[rows_E]  # sorted by row, as the entries are
        keep_E[start:stop][order_E[rank_E >= top]] = False


def _threshold(count_E: NDArray[np.int32], vocab_size: int, megabytes: float) -> int:
    """The least count at which the entries of at least so much fit the file."""
    room = check_size(vocab_size, megabytes)
    if len(count_E) <= room:
        return 1
    return int(np.partition(count_E, len(count_E) - 1 - room)[len(count_E) - 1 - room]) + 1

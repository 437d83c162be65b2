"""Counts of neighbouring tokens, and their sums: what a bigram table is, apart from what is asked of it.

Letters: V vocabulary, E entries (pairs held).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import check_csr, check_marginals
from .runs import Ints

CHUNK = 1 << 20


class BigramCounts:
    """Counts of neighbouring tokens as a sparse V x V matrix, row by row (CSR).

    Attributes:
        vocab_size: V.
        row_ptr: int64 [V + 1]; row x holds the entries row_ptr[x] .. row_ptr[x + 1] - 1.
        col: int32 [E]; the right token of each entry, ascending within a row.
        count: int32 [E]; how often the pair was seen, at least 1.
        unigram: int64 [V]; how often each token was seen, alone or in a pair.
        pairs: the sum of all counts, n of eq. (5); of a pruned table, those of the whole counts.
        pruning: what was done to a pruned table; None: these are the whole counts.
    """

    def __init__(
        self,
        row_ptr: Tensor,
        col: Tensor,
        count: Tensor,
        unigram: Tensor,
        left: Tensor | None = None,
        right: Tensor | None = None,
        pruning: dict[str, Any] | None = None,
    ) -> None:
        """`left`, `right` and `pruning` are those of a pruned table, whose marginals are of the whole counts."""
        check_csr(*(part.numpy() for part in (row_ptr, col, count, unigram)))
        self.vocab_size = len(unigram)
        self.row_ptr, self.col, self.count, self.unigram = row_ptr, col, count, unigram
        self.pruning, self._left, self._right = pruning, left, right
        self._kept_left: Tensor | None = None
        self._kept_right: Tensor | None = None
        self._kept = int(self.kept_left().sum())
        self.pairs = self._kept
        if pruning is not None:
            if left is None or right is None:
                raise ValueError("a pruned table needs the sums of the whole counts' rows and columns, left and right")
            check_marginals(self.kept_left(), left, right, pruning)
            self.pairs = pruning["pairs"]

    @property
    def entries(self) -> int:
        """E, the pairs held."""
        return len(self.col)

    @property
    def mass(self) -> float:
        """The share of all pairs, each as often as it was seen, that the entries hold: 1 unless pruned."""
        return self._kept / self.pairs if self.pairs else 1.0

    def left_counts(self) -> Tensor:
        """int64 [V]: how often each token is the left of a pair, in the whole counts."""
        return self.kept_left() if self._left is None else self._left

    def right_counts(self) -> Tensor:
        """int64 [V]: how often each token is the right of a pair, in the whole counts."""
        return self.kept_right() if self._right is None else self._right

    def kept_left(self) -> Tensor:
        """int64 [V]: row sums of the entries; less than `left_counts` in a pruned table alone."""
        if self._kept_left is None:
            sums_V, row_ptr = np.zeros(self.vocab_size, dtype=np.int64), self.row_ptr.numpy()
            rows_R = np.flatnonzero(np.diff(row_ptr))
            if len(rows_R):
                sums_V[rows_R] = np.add.reduceat(self.count.numpy(), row_ptr[rows_R], dtype=np.int64)
            self._kept_left = torch.from_numpy(sums_V)
        return self._kept_left

    def kept_right(self) -> Tensor:
        """int64 [V]: column sums of the entries."""
        if self._kept_right is None:
            sums_V = np.zeros(self.vocab_size, dtype=np.int64)
            for start in range(0, self.entries, CHUNK):
                part = slice(start, start + CHUNK)
                # Sums of doubles are exact here: a chunk of int32 stays below 2⁵³.
                sums_V += np.bincount(self.col[part], self.count[part], self.vocab_size).astype(np.int64)
            self._kept_right = torch.from_numpy(sums_V)
        return self._kept_right

    def widest_row(self) -> int:
        """The largest number of entries in a row."""
        return int(self.row_ptr.diff().max())

    def chunks(self, entries: int = CHUNK) -> list[tuple[int, int]]:
        """Ranges of rows, first and end, that cover the table with about so many entries each (a row is not split)."""
        return row_ranges(self.row_ptr.numpy(), entries)

    def rows_of(self, first: int, end: int) -> Tensor:
        """int64: the left token of each entry of the rows from `first` to `end` - 1."""
        return torch.repeat_interleave(torch.arange(first, end), self.row_ptr[first : end + 1].diff())


def row_ranges(row_ptr: Ints, entries: int) -> list[tuple[int, int]]:
    """Ranges of rows, first and end, that cover all with about so many entries each."""
    size = len(row_ptr) - 1
    inner = np.unique(np.searchsorted(row_ptr, np.arange(entries, int(row_ptr[-1]), entries)))
    bounds = [0, *inner[inner < size].tolist(), size]
    return list(pairwise(bounds))

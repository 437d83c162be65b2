"""Counts of neighbouring tokens, and their sums: what a bigram table is, apart from what is asked of it.

Letters: V vocabulary, E entries (pairs held).
"""

from __future__ import annotations

import json
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..storage.atomic import read_consistent
from ..storage.names import TABLE_FILE
from .checks import check_csr, check_marginals, read_arrays
from .runs import Ints

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 20


class BigramCounts:
    """Counts of neighbouring tokens as a sparse V x V matrix, row by row (CSR): as arrays, which take no torch.

    Attributes:
        vocab_size: V.
        row_ptr: int64 [V + 1]; row x holds the entries row_ptr[x] .. row_ptr[x + 1] - 1.
        col: int32 [E]; the right token of each entry, ascending within a row.
        count: int32 [E]; how often the pair was seen, at least 1.
        unigram: int64 [V]; how often each token was seen, alone or in a pair.
        pairs: the sum of all counts, n of eq. (5); of a pruned table, those of the whole counts.
        pruning: what was done to a pruned table; None: these are the whole counts.
    """

    @staticmethod
    def _made(array: Any) -> Any:
        """An array in the form of the counts."""
        return array

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
        check_csr(*map(np.asarray, (row_ptr, col, count, unigram)))
        self.vocab_size = len(unigram)
        self.row_ptr, self.col, self.count, self.unigram = row_ptr, col, count, unigram
        self.pruning, self._left, self._right = pruning, left, right
        self._kept = int(self.kept_left.sum())
        self.pairs = self._kept
        if pruning is not None:
            if left is None or right is None:
                raise ValueError("a pruned table needs the sums of the whole counts' rows and columns, left and right")
            check_marginals(np.asarray(self.kept_left), np.asarray(left), np.asarray(right), pruning)
            self.pairs = pruning["pairs"]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the table in a folder. Entries stay in the file, mapped, and are read as they are asked for. Raises
        ValueError: no such file, not a table, or one that contradicts itself: the file is named, and both sides."""
        return read_consistent(Path(directory), lambda: cls.read(Path(directory) / TABLE_FILE))

    @classmethod
    def read(cls, path: Path, prefix: str = "") -> Self:
        """`load` of a file, in which the names of tensors and metadata may begin with a prefix."""
        metadata, arrays = read_arrays(path, prefix)
        pruning, vocab_size = metadata.get("pruning"), metadata.get("vocab_size")
        parts = {name: cls._made(array) for name, array in arrays.items()}
        try:
            counts = cls(**parts, pruning=None if pruning is None else json.loads(pruning))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error
        if vocab_size != str(counts.vocab_size):
            raise ValueError(
                f"{path}: its metadata has {vocab_size} tokens, its unigram counts are {counts.vocab_size}"
            )
        return counts

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
        return self.kept_left if self._left is None else self._left

    def right_counts(self) -> Tensor:
        """int64 [V]: how often each token is the right of a pair, in the whole counts."""
        return self.kept_right if self._right is None else self._right

    @cached_property
    def kept_left(self) -> Tensor:
        """int64 [V]: row sums of the entries; less than `left_counts` in a pruned table alone."""
        sums_V, row_ptr = np.zeros(self.vocab_size, dtype=np.int64), np.asarray(self.row_ptr)
        rows_R = np.flatnonzero(np.diff(row_ptr))
        if len(rows_R):
            sums_V[rows_R] = np.add.reduceat(np.asarray(self.count), row_ptr[rows_R], dtype=np.int64)
        return self._made(sums_V)

    @cached_property
    def kept_right(self) -> Tensor:
        """int64 [V]: column sums of the entries."""
        sums_V = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, self.entries, CHUNK):
            part = slice(start, start + CHUNK)
            # Sums of doubles are exact here: a chunk of int32 stays below 2⁵³.
            sums_V += np.bincount(self.col[part], self.count[part], self.vocab_size).astype(np.int64)
        return self._made(sums_V)

    def widest_row(self) -> int:
        """The largest number of entries in a row."""
        return int(np.diff(np.asarray(self.row_ptr)).max())

    def chunks(self, entries: int = CHUNK) -> list[tuple[int, int]]:
        """Ranges of rows, first and end, that cover the table with about so many entries each (a row is not split)."""
        return row_ranges(np.asarray(self.row_ptr), entries)

    def rows_of(self, first: int, end: int) -> Tensor:
        """int64: the left token of each entry of the rows from `first` to `end` - 1."""
        return self._made(np.repeat(np.arange(first, end), np.diff(np.asarray(self.row_ptr[first : end + 1]))))


def default_discount(table: BigramCounts) -> float:
    """n₁ / (n₁ + 2 n₂), of the pairs seen once and twice in the whole counts; 0.5 where there are none of either."""
    once, twice = seen_once_and_twice(table)
    return once / (once + 2 * twice) if once and twice else 0.5


def seen_once_and_twice(table: BigramCounts) -> tuple[int, int]:
    """How many pairs of the whole counts were seen once, and how many twice."""
    if table.pruning is not None:
        return table.pruning["seen_once"], table.pruning["seen_twice"]
    count_E = np.asarray(table.count)
    return int(np.count_nonzero(count_E == 1)), int(np.count_nonzero(count_E == 2))


def row_ranges(row_ptr: Ints, entries: int) -> list[tuple[int, int]]:
    """Ranges of rows, first and end, that cover all with about so many entries each."""
    size = len(row_ptr) - 1
    inner = np.unique(np.searchsorted(row_ptr, np.arange(entries, int(row_ptr[-1]), entries)))
    bounds = [0, *inner[inner < size].tolist(), size]
    return list(pairwise(bounds))

"""Bigram tables: exact counts of neighbouring tokens and the correlation r that SLiM prunes trees with.

Shape letters: V vocabulary, E entries (distinct pairs), X any shape, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ..storage.atomic import read_consistent
from ..storage.names import TABLE_FILE
from ..storage.safe_read import UNREADABLE
from .file import check_counts, write_table
from .runs import Run, check_documents, key_dtype
from .texts import TextStore
from .views import Correlation, NextToken, SortedKeys

__all__ = ["TABLE_FILE", "TENSORS", "BigramTable", "check_add_k"]

TENSORS = {"row_ptr": torch.int64, "col": torch.int32, "count": torch.int32, "unigram": torch.int64}
"""Names and types of the tensors of `table.safetensors`."""
CHUNK = 1 << 20


class BigramTable:
    """Counts of neighbouring tokens as a sparse V x V matrix in compressed rows (CSR).

    Args:
        row_ptr: int64 [V + 1]; row x holds the entries row_ptr[x] .. row_ptr[x + 1] - 1.
        col: int32 [E]; right token of each entry, ascending within a row.
        count: int32 [E]; number of times that the pair was seen, at least 1.
        unigram: int64 [V]; number of times that each token was seen, in a pair or not.

    Raises:
        ValueError: The tensors contradict each other.
    """

    device = torch.device("cpu")
    """Device of `look_up`. The counts themselves stay on the CPU."""
    texts: TextStore | None = None
    """Part of the counted texts, for suffix decoding."""

    def __init__(self, row_ptr: Tensor, col: Tensor, count: Tensor, unigram: Tensor) -> None:
        _check_csr(*map(np.asarray, (row_ptr, col, count, unigram)))
        self.vocab_size, self.entries = len(unigram), len(col)
        self.row_ptr, self.col, self.count, self.unigram = row_ptr, col, count, unigram
        self.pairs = int(self.left_counts.sum())

    @classmethod
    def load(cls, directory: Path) -> BigramTable:
        """Load the table in a directory and the texts beside it; the entries stay memory-mapped.

        Raises:
            ValueError: A file is missing, damaged or contradicts itself.
        """
        table = read_consistent(Path(directory), lambda: cls.read(Path(directory) / TABLE_FILE))
        table.texts = TextStore.load(directory, table.vocab_size)
        return table

    @classmethod
    def read(cls, path: Path, prefix: str = "") -> BigramTable:
        """Read a table from a safetensors file in which its names begin with `prefix`."""
        if not path.is_file():
            raise ValueError(f"there is no table at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                tensors = {name: file.get_tensor(prefix + name) for name in TENSORS if prefix + name in names}
                vocab_size = (file.metadata() or {}).get(f"{prefix}vocab_size")
        except UNREADABLE as error:
            held = f"{path.stat().st_size} bytes"
            raise ValueError(f"{path} ({held}) is not a safetensors file, or not the whole of one: {error}") from error
        if missing := sorted(TENSORS.keys() - tensors):
            raise ValueError(f"{path} is not a table: it lacks {', '.join(missing)}")
        for name, tensor in tensors.items():
            if tensor.dtype != TENSORS[name] or tensor.ndim != 1:
                stored = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{path}: {name} is {stored}, expected one dimension of {TENSORS[name]}")
        try:
            table = cls(**tensors)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if vocab_size != str(table.vocab_size):
            raise ValueError(f"{path}: its metadata has {vocab_size} tokens, its unigram counts {table.vocab_size}")
        return table

    @classmethod
    def from_documents(cls, documents: Iterable[NDArray[Any]], vocab_size: int) -> BigramTable:
        """Count the pairs of neighbours within each document (integers [T]), in memory."""
        key_dtype(vocab_size)
        arrays = [np.zeros(0, dtype=np.int64)]
        for number, document in enumerate(documents):
            check_documents(np.asarray(document), np.zeros(1, dtype=np.int64), vocab_size, number)
            arrays.append(np.asarray(document).astype(np.int64))
        keys_T = np.concatenate([ids_T[:-1] * vocab_size + ids_T[1:] for ids_T in arrays])
        keys_E, count_E = np.unique(keys_T, return_counts=True)
        if len(keys_E):
            check_counts(keys_E, count_E, vocab_size)
        row_ptr = np.searchsorted(keys_E, np.arange(vocab_size + 1) * vocab_size)
        unigram_V = np.bincount(np.concatenate(arrays), minlength=vocab_size)
        parts = row_ptr, (keys_E % vocab_size).astype(np.int32), count_E.astype(np.int32), unigram_V
        return cls(*map(torch.from_numpy, parts))

    def save(self, directory: Path) -> None:
        """Write `table.safetensors` and the texts into a directory."""
        if self.texts is not None:
            self.texts.save(directory)
        parts = (self._run(first, end) for first, end in self.chunks())
        write_table(Path(directory) / TABLE_FILE, self.vocab_size, parts, self.unigram.numpy())

    @cached_property
    def left_counts(self) -> Tensor:
        """int64 [V]: number of pairs that each token is the left of."""
        sums_V, row_ptr = np.zeros(self.vocab_size, dtype=np.int64), self.row_ptr.numpy()
        rows_R = np.flatnonzero(np.diff(row_ptr))
        if len(rows_R):
            sums_V[rows_R] = np.add.reduceat(self.count.numpy(), row_ptr[rows_R], dtype=np.int64)
        return torch.from_numpy(sums_V)

    @cached_property
    def right_counts(self) -> Tensor:
        """int64 [V]: number of pairs that each token is the right of."""
        sums_V = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, self.entries, CHUNK):
            part = slice(start, start + CHUNK)
            # Sums of doubles are exact here: a chunk of int32 stays below 2⁵³.
            sums_V += np.bincount(self.col[part], self.count[part], self.vocab_size).astype(np.int64)
        return torch.from_numpy(sums_V)

    def widest_row(self) -> int:
        """Return the largest number of entries in a row."""
        return int(self.row_ptr.diff().max())

    def chunks(self) -> list[tuple[int, int]]:
        """Return ranges of whole rows (first, end) with about `CHUNK` entries each."""
        inner = np.unique(np.searchsorted(self.row_ptr.numpy(), np.arange(CHUNK, self.entries, CHUNK)))
        return list(pairwise([0, *inner[inner < self.vocab_size].tolist(), self.vocab_size]))

    def rows_of(self, first: int, end: int) -> Tensor:
        """Return the left token of each entry of the rows from `first` to `end` - 1, int64."""
        return torch.from_numpy(np.repeat(np.arange(first, end), np.diff(self.row_ptr[first : end + 1].numpy())))

    def _run(self, first: int, end: int) -> Run:
        start, stop = int(self.row_ptr[first]), int(self.row_ptr[end])
        keys_E = self.rows_of(first, end) * self.vocab_size + self.col[start:stop]
        return keys_E.numpy().astype(key_dtype(self.vocab_size)), self.count[start:stop].numpy()

    def to(self, device: torch.device | str) -> BigramTable:
        """Return a table over the same counts whose lookup runs on `device`."""
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if device == self.device:
            return self
        other = BigramTable.__new__(BigramTable)
        other.__dict__.update(self.__dict__, _views=self._views, device=device)
        return other

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor, add_k: float = 0.0) -> Tensor:
        """Return log r(x, y) of token pairs, r = p(x, y) / (p(x, ·) p(·, y)) with p = n(x, y) / n.

        The natural logarithm, float32 of the broadcast shape. Source: SLiM, section 3.3, eq. (5), with the marginals
        of the pair counts. With `add_k` p(y | x) is (n(x, y) + k) / (n(x, ·) + k V).

        Args:
            x_X: Left tokens, int64, on this table's device. They must be in the vocabulary.
            y_X: Right tokens, likewise.
            log_unseen: log r of pairs without an entry, no dimensions; not used with `add_k`.
            add_k: Number added to each count; 0 for no smoothing.
        """
        return self.correlation(add_k).look_up(x_X, y_X, log_unseen)

    def correlation(self, add_k: float = 0.0) -> Correlation:
        """Return the lookup structure of `look_up`, built by the first call."""
        check_add_k(add_k)
        keys = self._view((self.device, "keys"), lambda: SortedKeys(self, self.device))
        return self._view((self.device, "correlation", add_k), lambda: Correlation(self, keys, self.device, add_k))

    def distributions(self, device: torch.device | str, prior: float, add_k: float = 0.0) -> NextToken:
        """Return the next-token distributions of the table on a device, built by the first call."""
        check_add_k(add_k)
        device = torch.device(device)
        return self._view((device, "next", prior, add_k), lambda: NextToken(self, device, prior, add_k))

    @cached_property
    def _views(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def _view(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._views:
            self._views[key] = make()
        return self._views[key]


def check_add_k(add_k: float) -> None:
    """Raise ValueError unless `add_k` is a finite number of at least 0."""
    if not 0 <= add_k < math.inf:
        raise ValueError(f"add_k must be a finite number of at least 0, got {add_k}")


def _check_csr(row_ptr: NDArray[Any], col_E: NDArray[Any], count_E: NDArray[Any], unigram_V: NDArray[Any]) -> None:
    vocab_size, entries = len(unigram_V), len(col_E)
    if not vocab_size or len(row_ptr) != vocab_size + 1:
        raise ValueError(f"row_ptr has {len(row_ptr)} entries for {vocab_size} tokens, expected {vocab_size + 1}")
    if len(count_E) != entries:
        raise ValueError(f"there are {len(count_E)} counts for {entries} columns")
    ends = (int(row_ptr[0]), int(row_ptr[-1]))
    if ends != (0, entries) or int(np.diff(row_ptr).min()) < 0:
        raise ValueError(f"row_ptr runs from {ends[0]} to {ends[1]}, expected to ascend from 0 to {entries}")
    if int(unigram_V.min()) < 0:
        raise ValueError(f"unigram holds {int(unigram_V.min())}, expected at least 0")
    for start in range(0, entries, CHUNK):
        col_P = col_E[start : start + CHUNK + 1]  # with one more column, where there is one
        low, high, least = int(col_P.min()), int(col_P.max()), int(count_E[start : start + CHUNK].min())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"col holds token {low if low < 0 else high}, the vocabulary has {vocab_size} tokens")
        if least < 1:
            raise ValueError(f"count holds {least}, expected at least 1")
        # Falls can only be at the beginnings of rows, so that there are few of them to look up.
        falls = np.flatnonzero(col_P[1:] <= col_P[:-1]) + (start + 1)
        inside = falls[row_ptr[np.searchsorted(row_ptr, falls)] != falls]
        if len(inside):
            row = int(np.searchsorted(row_ptr, inside[0], side="right")) - 1
            both = f"{int(col_E[inside[0] - 1])} and {int(col_E[inside[0]])}"
            raise ValueError(f"columns do not ascend in row {row}: {both} follow")

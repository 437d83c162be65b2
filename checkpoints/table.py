"""Bigram tables: which token follows which, counted exactly, and the correlation that SLiM prunes trees with.

Letters: V vocabulary, E entries (pairs seen at least once), X any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TABLE_FILE = "table.safetensors"
MAX_COUNT = 2**31 - 1
_DTYPES = {"row_ptr": torch.int64, "col": torch.int32, "count": torch.int32, "unigram": torch.int64}
_NO_PAIR = 2**63 - 1

Ints = NDArray[np.int64]


class BigramTable:
    """Counts of neighbouring tokens as a sparse V x V matrix, row by row (CSR).

    Attributes:
        vocab_size: V.
        row_ptr: int64 [V + 1]; row x holds the entries row_ptr[x] .. row_ptr[x + 1] - 1.
        col: int32 [E]; the right token of each entry, ascending within a row.
        count: int32 [E]; how often the pair was seen, at least 1.
        unigram: int64 [V]; how often each token was seen, alone or in a pair.
        pairs: the sum of all counts, n of eq. (5).
        device: where `log_correlation` works. The counts themselves stay on the CPU.
    """

    def __init__(self, row_ptr: Tensor, col: Tensor, count: Tensor, unigram: Tensor) -> None:
        self.vocab_size = len(unigram)
        self.row_ptr, self.col, self.count, self.unigram = row_ptr, col, count, unigram
        self.pairs = int(count.sum(dtype=torch.int64))
        self.device = torch.device("cpu")
        self._lookup: tuple[Tensor, Tensor] | None = None
        _check_csr(row_ptr, col, count, unigram)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[np.ndarray],
        vocab_size: int,
        budget_tokens: int = 1 << 23,
        progress: Callable[[int, int], None] | None = None,
    ) -> BigramTable:
        """Count the pairs of neighbours within each document; never one that reaches from a document into the next.

        Args:
            documents: one-dimensional integer arrays of token ids; may be a stream.
            budget_tokens: tokens that are sorted at a time. Memory is about 32 bytes a token of it, and 64 bytes a
                pair of the table.
            progress: called with the documents and tokens counted so far.

        Raises:
            ValueError: a token outside the vocabulary; a pair seen more often than an int32 can hold.
        """
        if not 1 <= vocab_size <= MAX_COUNT:
            raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {MAX_COUNT}")
        if budget_tokens < 2:
            raise ValueError(f"budget_tokens is {budget_tokens}, expected at least 2: a pair is two tokens")
        counter = _PairCounter(vocab_size, budget_tokens)
        number = 0
        for number, document in enumerate(documents, 1):
            counter.add(np.asarray(document), number - 1)
            if progress is not None:
                progress(number, counter.tokens)
        return cls._from_keys(*counter.finish(), counter.unigram)

    @classmethod
    def _from_keys(cls, keys_E: Ints, counts_E: Ints, unigram_V: Ints) -> BigramTable:
        vocab_size = len(unigram_V)
        if len(counts_E) and counts_E.max() > MAX_COUNT:
            worst = counts_E.argmax()
            left, right = divmod(int(keys_E[worst]), vocab_size)
            raise ValueError(
                f"the pair ({left}, {right}) was seen {counts_E[worst]} times; a table holds counts up to {MAX_COUNT}"
            )
        rows_E, cols_E = np.divmod(keys_E, vocab_size)
        row_ptr = np.zeros(vocab_size + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows_E, minlength=vocab_size), out=row_ptr[1:])
        arrays = (row_ptr, cols_E.astype(np.int32), counts_E.astype(np.int32), unigram_V)
        return cls(*(torch.from_numpy(array) for array in arrays))

    @staticmethod
    def merge(first: BigramTable, second: BigramTable) -> BigramTable:
        """The table of both tables' documents together.

        Raises:
            ValueError: different vocabularies; a pair seen more often than an int32 can hold.
        """
        if first.vocab_size != second.vocab_size:
            raise ValueError(
                f"tables of different vocabularies cannot be merged: {first.vocab_size} and {second.vocab_size} tokens"
            )
        sides = [(table._keys().numpy(), table.count.numpy().astype(np.int64)) for table in (first, second)]
        return BigramTable._from_keys(*_merge_runs(*sides), (first.unigram + second.unigram).numpy())

    def left_counts(self) -> Tensor:
        """int64 [V]: how often each token is the left of a pair (row sums)."""
        cumulated = torch.cat((torch.zeros(1, dtype=torch.int64), self.count.cumsum(0, dtype=torch.int64)))
        return cumulated[self.row_ptr[1:]] - cumulated[self.row_ptr[:-1]]

    def right_counts(self) -> Tensor:
        """int64 [V]: how often each token is the right of a pair (column sums)."""
        sums_V = torch.zeros(self.vocab_size, dtype=torch.int64)
        return sums_V.index_add_(0, self.col, self.count.long())

    def to(self, device: torch.device | str) -> BigramTable:
        """This table with its look-up on `device`: itself if it is there, else another over the same counts."""
        device = torch.device(device)
        if device == self.device:
            return self
        other = BigramTable.__new__(BigramTable)
        other.__dict__.update(self.__dict__)
        keys, log_r = self._tensors()
        other._lookup = (keys.to(device), log_r.to(device))
        other.device = other._lookup[0].device
        return other

    def log_correlation(self, x_X: Tensor, y_X: Tensor, unseen: float) -> Tensor:
        """log r(x, y) of token pairs, r = p(x, y) / (p(x, ·) p(·, y)) with p = n(x, y) / n over pairs.

        Source: SLiM, section 3.3, eq. (5); both marginals are those of the pair counts, so r has mean 1 under their
        product.

        Args:
            x_X: int64, the left tokens, on this table's device.
            y_X: int64, the right tokens; broadcast against `x_X`.
            unseen: r of a pair that was never seen, at least 0; 0 gives −inf.

        Returns:
            float32 of the broadcast shape, natural logarithms.

        Raises:
            ValueError: a negative `unseen`; a token outside the vocabulary (on CPU only: looking would stop the host).
        """
        if not unseen >= 0:
            raise ValueError(f"unseen is a correlation: expected at least 0, got {unseen}")
        if self.device.type == "cpu":
            _check_range(x_X, self.vocab_size)
            _check_range(y_X, self.vocab_size)
        log_unseen = torch.tensor(math.log(unseen) if unseen else -math.inf, device=self.device)
        return self.look_up(x_X, y_X, log_unseen)

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor) -> Tensor:
        """`log_correlation` of tokens that are known to be in the vocabulary; `log_unseen` has no dimensions."""
        keys_E, log_r_E = self._tensors()
        wanted_X = x_X * self.vocab_size + y_X
        place_X = torch.searchsorted(keys_E, wanted_X)
        return torch.where(keys_E.take(place_X) == wanted_X, log_r_E.take(place_X), log_unseen)

    def distributions(self, device: torch.device | str, prior: float) -> NextToken:
        """What follows a token, as a drafter: smoothed distributions on a device."""
        return NextToken(self, torch.device(device), prior)

    def _keys(self) -> Tensor:
        """int64 [E]: x V + y of each entry, ascending."""
        rows_E = torch.repeat_interleave(torch.arange(self.vocab_size), self.row_ptr.diff())
        return rows_E * self.vocab_size + self.col

    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Sorted keys and log r, each with one entry more at the end, so that every search ends on an entry."""
        if self._lookup is None:
            keys_E = self._keys()
            left_V, right_V = self.left_counts().double().log(), self.right_counts().double().log()
            log_r_E = self.count.double().log() - left_V[keys_E // self.vocab_size] - right_V[self.col.long()]
            log_r_E += math.log(max(self.pairs, 1))
            end = torch.tensor([_NO_PAIR])
            self._lookup = (torch.cat((keys_E, end)), torch.cat((log_r_E.float(), torch.zeros(1))))
        return self._lookup

    def save(self, directory: Path) -> None:
        """Write `table.safetensors` into a folder."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(self, name).contiguous() for name in _DTYPES}
        save_file(tensors, directory / TABLE_FILE, metadata={"format": "pt", "vocab_size": str(self.vocab_size)})

    @classmethod
    def load(cls, directory: Path) -> BigramTable:
        """Read what `save` wrote.

        Raises:
            ValueError: no such file, not a table, or one that contradicts itself: the file is named, and both sides.
        """
        path = Path(directory) / TABLE_FILE
        if not path.is_file():
            raise ValueError(f"there is no table at {path}")
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                names = set(opened.keys())
                tensors = {name: opened.get_tensor(name) for name in _DTYPES if name in names}
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        missing = [name for name in _DTYPES if name not in tensors]
        if missing:
            raise ValueError(f"{path} is not a table: it lacks {', '.join(missing)}")
        for name, dtype in _DTYPES.items():
            if tensors[name].dtype != dtype or tensors[name].dim() != 1:
                shape = f"{tensors[name].dtype} {list(tensors[name].shape)}"
                raise ValueError(f"{path}: {name} is {shape}, expected one dimension of {dtype}")
        try:
            table = cls(**tensors)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if metadata.get("vocab_size") != str(table.vocab_size):
            said = metadata.get("vocab_size")
            raise ValueError(f"{path}: its metadata says {said} tokens, its unigram counts are {table.vocab_size}")
        return table


class NextToken:
    """Distributions over the next token: q(y | x) = (n(x, y) + c u(y)) / (n(x, ·) + c), with c the prior's weight.

    u is the unigram distribution with one observation added to every token, so that no token is impossible and a token
    that was never seen on the left is followed by u. Rows are gathered in padded form: nothing waits for the host.

    Attributes:
        unigram_V: float32 [V], u.
    """

    def __init__(self, table: BigramTable, device: torch.device, prior: float) -> None:
        counts_V = table.unigram.double() + 1
        self.unigram_V = (counts_V / counts_V.sum()).float().to(device)
        self._prior = prior
        self._row_ptr, self._col, self._count = (part.to(device) for part in (table.row_ptr, table.col, table.count))
        self._left_V = table.left_counts().float().to(device)
        widest = int(table.row_ptr.diff().max()) if table.vocab_size else 0
        self._place_W = torch.arange(widest, device=device)

    def after(self, x_X: Tensor) -> Tensor:
        """float32 [..., V]: the distribution after each of the tokens, int64 [...]."""
        start_X1, end_X1 = self._row_ptr[x_X][..., None], self._row_ptr[x_X + 1][..., None]
        entry_XW = start_X1 + self._place_W
        inside_XW = entry_XW < end_X1
        entry_XW = torch.where(inside_XW, entry_XW, 0)
        mass_XV = (self._prior * self.unigram_V).expand(*x_X.shape, -1).clone()
        if len(self._col):
            counts_XW = torch.where(inside_XW, self._count[entry_XW], 0).float()
            mass_XV.scatter_add_(-1, self._col[entry_XW].long(), counts_XW)
        return mass_XV / (self._left_V[x_X][..., None] + self._prior)


class _PairCounter:
    """Collects documents up to a budget, sorts their pairs, and keeps sorted runs that are merged as they grow."""

    def __init__(self, vocab_size: int, budget_tokens: int) -> None:
        self.vocab_size, self.tokens = vocab_size, 0
        self.unigram: Ints = np.zeros(vocab_size, dtype=np.int64)
        self._budget, self._waiting = budget_tokens, 0
        self._keys: list[Ints] = []
        self._runs: list[tuple[Ints, Ints]] = []

    def add(self, ids_T: np.ndarray, number: int) -> None:
        if ids_T.ndim != 1 or (ids_T.dtype.kind not in "iu" and ids_T.size):
            raise ValueError(
                f"document {number} is {ids_T.dtype} {list(ids_T.shape)}, expected one dimension of integers"
            )
        self.tokens += len(ids_T)
        for start in range(0, max(len(ids_T) - 1, 1), self._budget):
            # Slices of a long document share a token, so that no pair is lost; it is counted with the first of them.
            self._add_slice(ids_T[start : start + self._budget + 1].astype(np.int64), number, skip=int(start > 0))

    def _add_slice(self, ids_T: Ints, number: int, skip: int) -> None:
        if not len(ids_T):
            return
        low, high = int(ids_T.min()), int(ids_T.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"document {number} holds token {wrong}; the vocabulary has {self.vocab_size} tokens")
        self._keys.append(ids_T[:-1] * self.vocab_size + ids_T[1:])
        self._waiting += len(ids_T)
        # Counting few tokens one by one costs less than a pass over the whole vocabulary.
        if len(ids_T) * 16 < self.vocab_size:
            np.add.at(self.unigram, ids_T[skip:], 1)
        else:
            self.unigram += np.bincount(ids_T[skip:], minlength=self.vocab_size)
        if self._waiting >= self._budget:
            self._flush()

    def _flush(self) -> None:
        keys = np.concatenate(self._keys)
        self._keys, self._waiting = [], 0
        self._runs.append(_run_length(np.sort(keys), np.ones(1, dtype=np.int64)))
        while len(self._runs) > 1 and 2 * len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            self._runs.append(_merge_runs(self._runs.pop(), self._runs.pop()))

    def finish(self) -> tuple[Ints, Ints]:
        """Sorted keys and counts of all pairs."""
        if self._keys:
            self._flush()
        while len(self._runs) > 1:
            self._runs.append(_merge_runs(self._runs.pop(), self._runs.pop()))
        empty = np.zeros(0, dtype=np.int64)
        return self._runs[0] if self._runs else (empty, empty)


def _run_length(sorted_keys: Ints, weights: Ints) -> tuple[Ints, Ints]:
    """Distinct keys and the sum of each one's weights (one weight: the same for all)."""
    if not len(sorted_keys):
        return sorted_keys, sorted_keys
    starts = np.concatenate(([0], np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1))
    if len(weights) == 1:
        return sorted_keys[starts], np.diff(starts, append=len(sorted_keys)) * weights[0]
    return sorted_keys[starts], np.add.reduceat(weights, starts)


def _merge_runs(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    keys, counts = (np.concatenate(sides) for sides in zip(first, second, strict=True))
    order = np.argsort(keys, kind="stable")  # two ascending runs: one pass
    return _run_length(keys[order], counts[order])


def _check_range(ids_X: Tensor, vocab_size: int) -> None:
    if not ids_X.numel():
        return
    low, high = (int(edge) for edge in ids_X.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token {low if low < 0 else high} is outside the table's vocabulary of {vocab_size} tokens")


def _check_csr(row_ptr: Tensor, col: Tensor, count: Tensor, unigram: Tensor) -> None:
    vocab_size, entries = len(unigram), len(col)
    if len(row_ptr) != vocab_size + 1:
        raise ValueError(f"row_ptr has {len(row_ptr)} entries for {vocab_size} tokens, expected {vocab_size + 1}")
    if len(count) != entries:
        raise ValueError(f"there are {len(count)} counts for {entries} columns")
    ends = (int(row_ptr[0]), int(row_ptr[-1]))
    if ends != (0, entries):
        raise ValueError(f"row_ptr runs from {ends[0]} to {ends[1]}, expected 0 to {entries}")
    steps = row_ptr.diff()
    if entries and int(steps.min()) < 0:
        row = int(steps.argmin())
        raise ValueError(f"row_ptr falls from {int(row_ptr[row])} to {int(row_ptr[row + 1])} at row {row}")
    if entries and not 0 <= int(col.min()) <= int(col.max()) < vocab_size:
        wrong = int(col.min()) if int(col.min()) < 0 else int(col.max())
        raise ValueError(f"col holds token {wrong}, the vocabulary has {vocab_size} tokens")
    if entries and int(count.min()) < 1:
        raise ValueError(f"count holds {int(count.min())}, expected at least 1")
    first_of_row = torch.zeros(entries, dtype=torch.bool)
    first_of_row[row_ptr[:-1][row_ptr[:-1] < entries]] = True
    if entries and bool(((col.diff() <= 0) & ~first_of_row[1:]).any()):
        raise ValueError("columns do not ascend within each row")

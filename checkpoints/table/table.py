"""Bigram tables: exact counts of adjacent token pairs, and the correlation r that SLiM uses for tree pruning.

Shape letters: V vocabulary, E entries (distinct pairs), X any shape, T tokens, R rows (a flattened X), W widest row.
"""

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

from ..storage.names import TABLE_FILE
from ..storage.safe_read import UNREADABLE
from .file import check_counts, write_table
from .runs import check_documents, key_dtype
from .texts import TextStore

__all__ = ["TABLE_FILE", "TENSORS", "BigramTable", "check_add_k"]

TENSORS = {"row_ptr": torch.int64, "col": torch.int32, "count": torch.int32, "unigram": torch.int64}
"""Names and dtypes of the tensors of `table.safetensors`."""
CHUNK = 1 << 20
_NARROW_VOCAB = 2**16 - 1  # so that x · V + y − 2³¹ fits int32, and the largest int32 is left for the sentinel


class BigramTable:
    """Counts of adjacent token pairs as a sparse V x V matrix in CSR format.

    Args:
        row_ptr: int64 [V + 1]; row x holds the entries row_ptr[x] .. row_ptr[x + 1] - 1.
        col: int32 [E]; right token of each entry, ascending within a row.
        count: int32 [E]; count of the pair, at least 1.
        unigram: int64 [V]; count of each token, including tokens that do not occur in a pair.

    Raises ValueError if the tensors are inconsistent.
    """

    device = torch.device("cpu")
    """Device on which `look_up` runs. The counts stay on the CPU."""
    texts: TextStore | None = None
    """Datastore for suffix decoding, sampled from the counted documents; None if there is none."""

    def __init__(self, row_ptr: Tensor, col: Tensor, count: Tensor, unigram: Tensor) -> None:
        _check_csr(*map(np.asarray, (row_ptr, col, count, unigram)))
        self.vocab_size, self.entries = len(unigram), len(col)
        self.row_ptr, self.col, self.count, self.unigram = row_ptr, col, count, unigram
        self.pairs = int(self.left_counts.sum())

    @classmethod
    def load(cls, directory: Path) -> "BigramTable":
        """Load a table and its datastore from a directory. The counts stay memory-mapped.

        Raises ValueError if a file is missing, damaged or inconsistent.
        """
        table = cls.read(Path(directory) / TABLE_FILE)
        table.texts = TextStore.load(directory, table.vocab_size)
        return table

    @classmethod
    def read(cls, path: Path, prefix: str = "") -> "BigramTable":
        """Read a table from a safetensors file whose tensor names start with `prefix`."""
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                tensors = {name: file.get_tensor(prefix + name) for name in TENSORS if prefix + name in names}
                vocab_size = (file.metadata() or {}).get(f"{prefix}vocab_size")
        except UNREADABLE as error:
            size = f"{path.stat().st_size} bytes"
            raise ValueError(f"{path} ({size}) is not a complete safetensors file: {error}") from error
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
            raise ValueError(f"{path}: the metadata has {vocab_size} tokens, the unigrams {table.vocab_size}")
        return table

    @classmethod
    def from_documents(cls, documents: Iterable[NDArray[Any]], vocab_size: int) -> "BigramTable":
        """Create a table by counting the adjacent token pairs within each document (integers [T]), in memory."""
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
        """Write `table.safetensors` and, if there is one, the datastore `texts` to a directory."""
        if self.texts is not None:
            self.texts.save(directory)
        keys_E = (self.rows_of(0, self.vocab_size) * self.vocab_size + self.col).numpy()
        run = (keys_E.astype(key_dtype(self.vocab_size)), self.count.numpy())
        write_table(Path(directory) / TABLE_FILE, self.vocab_size, [run], self.unigram.numpy())

    @cached_property
    def left_counts(self) -> Tensor:
        """Number of pairs in which each token is the left one, int64 [V]."""
        sums_V, row_ptr = np.zeros(self.vocab_size, dtype=np.int64), self.row_ptr.numpy()
        rows_R = np.flatnonzero(np.diff(row_ptr))
        if len(rows_R):
            sums_V[rows_R] = np.add.reduceat(self.count.numpy(), row_ptr[rows_R], dtype=np.int64)
        return torch.from_numpy(sums_V)

    @cached_property
    def right_counts(self) -> Tensor:
        """Number of pairs in which each token is the right one, int64 [V]."""
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
        """Split the rows into ranges (first, end) with about `CHUNK` entries each."""
        inner = np.unique(np.searchsorted(self.row_ptr.numpy(), np.arange(CHUNK, self.entries, CHUNK)))
        return list(pairwise([0, *inner[inner < self.vocab_size].tolist(), self.vocab_size]))

    def rows_of(self, first: int, end: int) -> Tensor:
        """Return the left token of each entry in the rows `first` to `end` - 1, int64."""
        return torch.from_numpy(np.repeat(np.arange(first, end), np.diff(self.row_ptr[first : end + 1].numpy())))

    def to(self, device: torch.device | str) -> "BigramTable":
        """Return a table with the same counts, whose lookups run on `device`. The counts are not copied."""
        device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if device == self.device:
            return self
        other = BigramTable.__new__(BigramTable)
        other.__dict__.update(self.__dict__, _views=self._views, device=device)
        return other

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor, add_k: float = 0.0) -> Tensor:
        """Compute the correlation log r of token pairs, r = p(x, y) / (p(x, ·) p(·, y)), where p are pair frequencies.

        The result is the natural logarithm, float32 of the broadcast shape. Source: SLiM, section 3.3, eq. (5), with
        the marginals of the pair counts n. With k = `add_k`, p(y | x) is (n(x, y) + k) / (n(x, ·) + k V).

        Args:
            x_X: Left tokens, int64, on this table's device. They must be in the vocabulary.
            y_X: Right tokens, int64, on the same device.
            log_unseen: log r of pairs without an entry, a scalar; ignored with `add_k`.
            add_k: Number added to each count; 0 for no smoothing.
        """
        return self.correlation(add_k).look_up(x_X, y_X, log_unseen)

    def correlation(self, add_k: float = 0.0) -> "Correlation":
        """Return the `Correlation` of the table, which is built on the first call for the given `add_k`."""
        check_add_k(add_k)
        return self._view((self.device, "correlation", add_k), lambda: Correlation(self, self.device, add_k))

    def distributions(self, device: torch.device | str, prior: float, add_k: float = 0.0) -> "NextToken":
        """Return the next-token distributions on a device. For `prior` and `add_k`, see `NextToken`."""
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
    if (int(row_ptr[0]), int(row_ptr[-1])) != (0, entries) or int(np.diff(row_ptr).min()) < 0:
        raise ValueError(f"row_ptr does not ascend from 0 to {entries}")
    ranges = (("unigram", unigram_V, 0, None), ("col", col_E, 0, vocab_size - 1), ("count", count_E, 1, None))
    for name, values, least, most in ranges:
        if len(values) and (int(values.min()) < least or (most is not None and int(values.max()) > most)):
            expected = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"{name} must be {expected}, got {int(values.min())} to {int(values.max())}")
    # Columns may decrease only at row starts, so that few positions must be checked.
    falls = np.flatnonzero(col_E[1:] <= col_E[:-1]) + 1
    inside = falls[row_ptr[np.searchsorted(row_ptr, falls)] != falls]
    if len(inside):
        row = int(np.searchsorted(row_ptr, inside[0], side="right")) - 1
        raise ValueError(f"columns do not ascend in row {row}")


def _pseudo_counts(table: BigramTable, prior: float, add_k: float) -> tuple[float, Tensor]:
    """Return the number of pseudo-counts per row and their distribution over tokens, float64 [V].

    If `add_k` is not 0, each token has `add_k` pseudo-counts. Otherwise there are `prior` in total, distributed like
    the unigram counts plus one.
    """
    vocab = table.vocab_size
    if add_k:
        return add_k * vocab, torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    counts_V = table.unigram.double() + 1
    return prior, counts_V / counts_V.sum()


class Correlation:
    """Lookup of log p(y | x) − log p(y) for token pairs (x, y), by binary search in the sorted keys of the pairs.

    p(y) is the share of pairs whose right token is y, where a count of 0 is replaced by 1. Keys are x · V + y, or x · V
    + y − 2³¹ if that fits in 32 bits, because smaller keys make the memory-bound search faster.
    """

    def __init__(self, table: BigramTable, device: torch.device, add_k: float) -> None:
        is_small = table.vocab_size <= _NARROW_VOCAB
        self._dtype = torch.int32 if is_small else torch.int64
        self._offset, self._vocab_size = 2**31 if is_small else 0, table.vocab_size
        self._left_V: Tensor | None = None
        self._right_V: Tensor | None = None
        weight, spread_V = _pseudo_counts(table, 0.0, add_k)
        log_p_V = (table.right_counts.clamp(min=1).double() / max(table.pairs, 1)).log()
        log_scale_V = (1 / (table.left_counts.double() + weight)).log()
        if add_k:
            self._left_V = (torch.full_like(log_p_V, weight).log() + log_scale_V).float().to(device)
            self._right_V = (spread_V.log() - log_p_V).float().to(device)
        log_r_E, keys_E = torch.zeros(table.entries + 1), torch.empty(table.entries + 1, dtype=self._dtype)
        keys_E[-1] = torch.iinfo(self._dtype).max  # sentinel, so that every search finds an entry
        for first, end in table.chunks():
            start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
            x_E, y_E = table.rows_of(first, end), table.col[start:stop].long()
            keys_E[start:stop] = self._keys(x_E, y_E)
            mass_E = table.count[start:stop].double() + weight * spread_V[y_E]
            log_r_E[start:stop] = mass_E.log_() + log_scale_V[x_E] - log_p_V[y_E]
        self._keys_E, self._log_r_E = keys_E.to(device), log_r_E.to(device)

    def _keys(self, x_X: Tensor, y_X: Tensor) -> Tensor:
        return (x_X * self._vocab_size - self._offset).to(self._dtype) + y_X.to(self._dtype)

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor) -> Tensor:
        """Compute log p(y | x) − log p(y) of token pairs, float32 of the broadcast shape; see `BigramTable.look_up`."""
        wanted_X = self._keys(x_X, y_X)
        place_X = torch.searchsorted(self._keys_E, wanted_X)
        if self._left_V is not None and self._right_V is not None:
            log_unseen = self._left_V.take(x_X) + self._right_V.take(y_X)
        return torch.where(self._keys_E.take(place_X) == wanted_X, self._log_r_E.take(place_X), log_unseen)


class NextToken:
    """Next-token distributions p(y | x) = (n(x, y) + c u(y)) / (n(x, ·) + c), where n are the counts of the table.

    c is `prior`, and u is the unigram distribution after adding one to each count (`unigram_V`, float32 [V]). If
    `add_k` is not 0, c u(y) is `add_k` for every token y. All probabilities are positive.
    """

    def __init__(self, table: BigramTable, device: torch.device, prior: float, add_k: float = 0.0) -> None:
        self._table, self._device, self._widest = table, device, table.widest_row()
        self._weight, spread_V = _pseudo_counts(table, prior, add_k)
        scale_V = 1 / (table.left_counts.double() + self._weight)
        self.unigram_V = _pseudo_counts(table, 1.0, 0.0)[1].float().to(device)
        self._base_V = (self._weight * scale_V).float().to(device)
        self._spread_V, self._scale_V = (part_V.float().to(device) for part_V in (spread_V, scale_V))
        self._row_ptr, self._col, self._count = (part.to(device) for part in (table.row_ptr, table.col, table.count))
        self._exact_spread_V = spread_V
        self._best_V: Tensor | None = None

    def after(self, x_X: Tensor) -> Tensor:
        """Return the next-token distribution after each token, float32 [..., V]."""
        x_R = x_X.flatten()
        mass_RV = torch.outer(self._base_V[x_R], self._spread_V)
        if x_R.device.type == "cpu":
            self._add_slices(mass_RV, x_R)
        else:
            self._add_padded(mass_RV, x_R)
        return mass_RV.view(*x_X.shape, -1)

    def _add_slices(self, mass_RV: Tensor, x_R: Tensor) -> None:
        starts, ends = self._row_ptr[x_R].tolist(), self._row_ptr[x_R + 1].tolist()
        for mass_V, start, end, scale in zip(mass_RV, starts, ends, self._scale_V[x_R].tolist(), strict=True):
            mass_V.index_add_(0, self._col[start:end], self._count[start:end].float(), alpha=scale)

    def _add_padded(self, mass_RV: Tensor, x_R: Tensor) -> None:
        if not self._widest:
            return
        start_R1, end_R1 = self._row_ptr[x_R][:, None], self._row_ptr[x_R + 1][:, None]
        entry_RW = start_R1 + torch.arange(self._widest, device=x_R.device)
        inside_RW = entry_RW < end_R1
        entry_RW = torch.where(inside_RW, entry_RW, 0)
        share_RW = self._count[entry_RW].float() * self._scale_V[x_R][:, None]
        mass_RV.scatter_add_(1, self._col[entry_RW].long(), torch.where(inside_RW, share_RW, 0.0))

    def most_likely(self, x_X: Tensor) -> Tensor:
        """Return the most probable next token after each token, int64 [...]; ties go to the lowest id.

        The first call computes the result for the whole vocabulary, so that later calls are a single gather.
        """
        if self._best_V is None:
            self._best_V = self._compute_best().to(self._device)
        return self._best_V[x_X]

    def _compute_best(self) -> Tensor:
        table, spread_V = self._table, self._weight * self._exact_spread_V.numpy()
        general = int(spread_V.argmax())
        best_V = np.full(table.vocab_size, general)
        row_ptr, col_E, count_E = table.row_ptr.numpy(), table.col.numpy(), table.count.numpy()
        for first, end in table.chunks():
            start, stop = int(row_ptr[first]), int(row_ptr[end])
            rows_R = first + np.flatnonzero(np.diff(row_ptr[first : end + 1]))
            if not len(rows_R):
                continue
            y_E = col_E[start:stop]
            mass_E = count_E[start:stop] + spread_V[y_E]
            starts_R = row_ptr[rows_R] - start
            most_R = np.maximum.reduceat(mass_E, starts_R)
            is_most_E = mass_E == np.repeat(most_R, np.diff(starts_R, append=stop - start))
            y_R = np.minimum.reduceat(np.where(is_most_E, y_E, table.vocab_size), starts_R)
            better_R = (most_R > spread_V[general]) | ((most_R == spread_V[general]) & (y_R < general))
            best_V[rows_R] = np.where(better_R, y_R, general)
        return torch.from_numpy(best_V)

"""Lookup structures over a bigram table for decoding: correlations and next-token distributions.

Shape letters: V vocabulary, E entries, X any shape, R rows (a flattened X), W the widest row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .table import BigramTable

_NARROW_VOCAB = 2**16 - 1  # x V + y − 2³¹ fits 31 bits and a sign, and leaves one number free for the end


class SortedKeys:
    """Sorted keys of a table's pairs for binary search: x V + y, or x V + y − 2³¹ in 32 bits where that fits.

    Smaller keys make the search faster, which is bound by memory.
    """

    def __init__(self, table: BigramTable, device: torch.device) -> None:
        narrow = table.vocab_size <= _NARROW_VOCAB
        self._dtype = torch.int32 if narrow else torch.int64
        self._offset, self._vocab_size = 2**31 if narrow else 0, table.vocab_size
        keys_E = torch.empty(table.entries + 1, dtype=self._dtype)
        keys_E[-1] = torch.iinfo(self._dtype).max  # so that every search ends on an entry
        for first, end in table.chunks():
            start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
            keys_E[start:stop] = self._keys(table.rows_of(first, end), table.col[start:stop])
        self._keys_E = keys_E.to(device)

    def _keys(self, x_X: Tensor, y_X: Tensor) -> Tensor:
        return (x_X * self._vocab_size - self._offset).to(self._dtype) + y_X.to(self._dtype)

    def find(self, x_X: Tensor, y_X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each pair among the entries, int64, and whether the pair has an entry."""
        wanted_X = self._keys(x_X, y_X)
        place_X = torch.searchsorted(self._keys_E, wanted_X)
        return place_X, self._keys_E.take(place_X) == wanted_X


def _pseudo_counts(table: BigramTable, prior: float, add_k: float) -> tuple[float, Tensor]:
    """Return the number of pseudo-counts of each row and their distribution over tokens, float64 [V].

    With `add_k` k of each token; else `prior` of the unigram distribution with one observation of each token added.
    """
    vocab = table.vocab_size
    if add_k:
        return add_k * vocab, torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    counts_V = table.unigram.double() + 1
    return prior, counts_V / counts_V.sum()


class Correlation:
    """Lookup of log r, r = p(y | x) / p(y), see `BigramTable.look_up`.

    p(y) is the marginal of the pair counts, in which a token that was never on the right counts as seen once.
    """

    def __init__(self, table: BigramTable, keys: SortedKeys, device: torch.device, add_k: float) -> None:
        self._keys, self._left_V, self._right_V = keys, None, None
        weight, spread_V = _pseudo_counts(table, 0.0, add_k)
        log_p_V = (table.right_counts.clamp(min=1).double() / max(table.pairs, 1)).log()
        log_scale_V = (1 / (table.left_counts.double() + weight)).log()
        if add_k:
            self._left_V = (torch.full_like(log_p_V, weight).log() + log_scale_V).float().to(device)
            self._right_V = (spread_V.log() - log_p_V).float().to(device)
        log_r_E = torch.zeros(table.entries + 1)
        for first, end in table.chunks():
            start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
            x_E, y_E = table.rows_of(first, end), table.col[start:stop].long()
            mass_E = table.count[start:stop].double() + weight * spread_V[y_E]
            log_r_E[start:stop] = mass_E.log_() + log_scale_V[x_E] - log_p_V[y_E]
        self._log_r_E = log_r_E.to(device)

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor) -> Tensor:
        """Return log r of pairs, float32 of the broadcast shape."""
        place_X, seen_X = self._keys.find(x_X, y_X)
        if self._left_V is not None and self._right_V is not None:
            log_unseen = self._left_V.take(x_X) + self._right_V.take(y_X)
        return torch.where(seen_X, self._log_r_E.take(place_X), log_unseen)


class NextToken:
    """Distributions over the next token, p(y | x) = (n(x, y) + c u(y)) / (n(x, ·) + c).

    c is `prior` and u the unigram distribution with one observation added to every token (`unigram_V`, float32 [V]);
    with `add_k` c u(y) is k. No token is impossible.
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
        """Return the distribution after each of the tokens, float32 [..., V]."""
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
        """Return the most likely token after each of the tokens, int64 [...]; the lowest of equals.

        The first call computes it for all tokens, so that a greedy draft costs one gather per token.
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

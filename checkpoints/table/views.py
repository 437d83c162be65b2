"""What decoding asks of a bigram table, in the form in which it is fast: correlations, and distributions of the next.

Letters: V vocabulary, E entries, X any shape, R rows (a flattened X), W the widest row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .counts import BigramCounts
from .smoothing import Smoothed

_NARROW_VOCAB = 2**16 - 1  # x V + y − 2³¹ fits 31 bits and a sign, and leaves one number free for the end


class SortedKeys:
    """The pairs of a table as sorted numbers, to be searched: x V + y, or x V + y − 2³¹ in 32 bits where that fits,
    since a search is as slow as the memory that it reads."""

    def __init__(self, table: BigramCounts, device: torch.device) -> None:
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
        """Each pair's place among the entries, int64, and whether it is there."""
        wanted_X = self._keys(x_X, y_X)
        place_X = torch.searchsorted(self._keys_E, wanted_X)
        return place_X, self._keys_E.take(place_X) == wanted_X


class Correlation:
    """log r of pairs, r = p(y | x) / p(y), from counts as they are or smoothed; p(y) is the marginal of the pair
    counts, in which a token that was never seen on the right is taken as seen once."""

    def __init__(
        self, table: BigramCounts, keys: SortedKeys, device: torch.device, smoothing: str, strength: float
    ) -> None:
        self._keys, self._left_V, self._right_V = keys, None, None
        smoothed = Smoothed.of(table, smoothing, strength)
        log_p_V = (table.right_counts().clamp(min=1).double() / max(table.pairs, 1)).log()
        spread_V = smoothed.spread_V
        weight_V, log_scale_V = torch.zeros_like(smoothed.weight_V), smoothed.scale_V.log()
        if smoothing != "none":
            weight_V = smoothed.weight_V
            self._left_V = (weight_V.log() + log_scale_V).float().to(device)
            some_V = torch.where(table.right_counts() > 0, spread_V, smoothed.spread_once)
            self._right_V = (some_V.log() - log_p_V).float().to(device)
        log_r_E = torch.zeros(table.entries + 1)
        for first, end in table.chunks():
            start, stop = int(table.row_ptr[first]), int(table.row_ptr[end])
            x_E, y_E = table.rows_of(first, end), table.col[start:stop].long()
            mass_E = table.count[start:stop].double() - smoothed.discount + weight_V[x_E] * spread_V[y_E]
            log_r_E[start:stop] = mass_E.log_() + log_scale_V[x_E] - log_p_V[y_E]
        self._log_r_E = log_r_E.to(device)

    def look_up(self, x_X: Tensor, y_X: Tensor, log_unseen: Tensor) -> Tensor:
        """float32 of the broadcast shape; `log_unseen` has no dimensions, and is not read where there is smoothing."""
        place_X, seen_X = self._keys.find(x_X, y_X)
        if self._left_V is not None and self._right_V is not None:
            log_unseen = self._left_V.take(x_X) + self._right_V.take(y_X)
        return torch.where(seen_X, self._log_r_E.take(place_X), log_unseen)


class NextToken:
    """Distributions over the next token, p(y | x), as `Smoothed` says.

    With smoothing "none" they are (n(x, y) + c u(y)) / (n(x, ·) + c), c the prior's weight, u the unigram distribution
    with one observation added to every token: no token is impossible, and one that was never seen on the left is
    followed by u (`unigram_V`, float32 [V]).
    """

    def __init__(
        self, table: BigramCounts, device: torch.device, prior: float, smoothing: str = "none", strength: float = 0.0
    ) -> None:
        self._table, self._device, self._widest = table, device, table.widest_row()
        self._smoothed = Smoothed.of(table, smoothing, strength, prior)
        self.unigram_V = Smoothed.of(table, "none", 0.0, 1.0).spread_V.float().to(device)
        self._base_V = (self._smoothed.weight_V * self._smoothed.scale_V).float().to(device)
        self._spread_V, self._scale_V = (
            part_V.float().to(device) for part_V in (self._smoothed.spread_V, self._smoothed.scale_V)
        )
        self._row_ptr, self._col, self._count = (part.to(device) for part in (table.row_ptr, table.col, table.count))
        self._best_V: Tensor | None = None

    def after(self, x_X: Tensor) -> Tensor:
        """float32 [..., V]: the distribution after each of the tokens, int64 [...]."""
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
            kept = self._count[start:end].float() - self._smoothed.discount
            mass_V.index_add_(0, self._col[start:end], kept, alpha=scale)

    def _add_padded(self, mass_RV: Tensor, x_R: Tensor) -> None:
        if not self._widest:
            return
        start_R1, end_R1 = self._row_ptr[x_R][:, None], self._row_ptr[x_R + 1][:, None]
        entry_RW = start_R1 + torch.arange(self._widest, device=x_R.device)
        inside_RW = entry_RW < end_R1
        entry_RW = torch.where(inside_RW, entry_RW, 0)
        kept_RW = (self._count[entry_RW].float() - self._smoothed.discount) * self._scale_V[x_R][:, None]
        mass_RV.scatter_add_(1, self._col[entry_RW].long(), torch.where(inside_RW, kept_RW, 0.0))

    def most_likely(self, x_X: Tensor) -> Tensor:
        """int64 [...]: the likeliest token after each of the tokens, the lowest of equals; worked out for all at once
        when it is asked for first, so that a greedy draft costs one gather a token."""
        if self._best_V is None:
            self._best_V = _most_likely(self._table, self._smoothed).to(self._device)
        return self._best_V[x_X]


def _most_likely(table: BigramCounts, smoothed: Smoothed) -> Tensor:
    """int64 [V]: the likeliest of a row's entries, or where it is likelier, the likeliest of what is spread."""
    weight_V, spread_V = smoothed.weight_V.numpy(), smoothed.spread_V.numpy()
    general = int(spread_V.argmax())
    best_V = np.full(table.vocab_size, general)
    row_ptr, col_E, count_E = table.row_ptr.numpy(), table.col.numpy(), table.count.numpy()
    for first, end in table.chunks():
        start, stop = int(row_ptr[first]), int(row_ptr[end])
        rows_R = first + np.flatnonzero(np.diff(row_ptr[first : end + 1]))
        if not len(rows_R):
            continue
        x_E, y_E = table.rows_of(first, end).numpy(), col_E[start:stop]
        mass_E = count_E[start:stop] - smoothed.discount + weight_V[x_E] * spread_V[y_E]
        starts_R = row_ptr[rows_R] - start
        most_R = np.maximum.reduceat(mass_E, starts_R)
        is_most_E = mass_E == np.repeat(most_R, np.diff(starts_R, append=stop - start))
        y_R = np.minimum.reduceat(np.where(is_most_E, y_E, table.vocab_size), starts_R)
        other_R = weight_V[rows_R] * spread_V[general]
        better_R = (most_R > other_R) | ((most_R == other_R) & (y_R < general))
        best_V[rows_R] = np.where(better_R, y_R, general)
    return torch.from_numpy(best_V)

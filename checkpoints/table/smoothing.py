"""Smoothing of bigram counts: what the pairs that a table does not hold are worth, derived from its counts.

Letters: V vocabulary, E entries, x a left token, y a right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..storage.messages import did_you_mean
from .counts import BigramCounts, default_discount

SMOOTHINGS = ("none", "add-k", "kneser-ney")
DEFAULT_K = 0.01


@dataclass(frozen=True)
class Smoothed:
    """p(y | x) = (max(n(x, y) − d, 0) + w(x) u(y)) s(x): counts, 0 of pairs that the table does not hold, less a
    discount, and mass spread over all tokens. All kinds of smoothing have this form."""

    discount: float
    """d, at most 1: no entry falls below 0."""
    weight_V: Tensor
    """float64, w: the mass of x that is spread."""
    spread_V: Tensor
    """float64, u: where it is spread to; sums to one."""
    scale_V: Tensor
    """float64, s: so that p(· | x) sums to one."""
    spread_once: float
    """u of a token that was seen on the right a single time."""

    @classmethod
    def of(cls, table: BigramCounts, smoothing: str, strength: float, prior: float = 0.0) -> Smoothed:
        """The parameters for a table. The mass of the pairs that a pruned table does not hold is spread as well.
        - "none": w = `prior`, u the unigram counts with one added to each.
        - "add-k": (n + k) / (n(x, ·) + k V). Lidstone's rule; `strength` is k.
        - "kneser-ney": interpolated absolute discounting (Kneser and Ney, ICASSP 1995; Chen and Goodman, 1998, section
          2.7): max(n − d, 0) / n(x, ·) + λ(x) u(y). u(y) is what was taken from the pairs that end in y, over all that
          was taken. In a whole table that is N₁₊(· y) / E, the share of distinct pairs that end in y; in either, the
          right-hand marginal of p is that of the counts. `strength` is d, by default n₁ / (n₁ + 2 n₂) of the whole
          counts (Ney, Essen and Kneser, 1994), or 0.5 where none was seen once or none twice. A row that was never
          seen is u.
        """
        vocab = table.vocab_size
        left_V, kept_V = table.left_counts().double(), table.kept_left.double()
        lost_V = left_V - kept_V
        uniform_V = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
        if smoothing == "none":
            counts_V = table.unigram.double() + 1
            spread_V = counts_V / counts_V.sum()
            return cls(0.0, prior + lost_V, spread_V, 1 / (left_V + prior), 2 / float(counts_V.sum()))
        if smoothing == "add-k":
            total = (strength or DEFAULT_K) * vocab
            return cls(0.0, total + lost_V, uniform_V, 1 / (left_V + total), 1 / vocab)
        assert smoothing == "kneser-ney", smoothing
        d = strength or default_discount(table)
        entries_V = table.row_ptr.diff().double()
        ending_V = torch.from_numpy(np.bincount(table.col.numpy(), minlength=vocab))  # entries by right token
        taken_V = table.right_counts().double() - table.kept_right.double() + d * ending_V.double()
        taken = float(taken_V.sum())
        spread_V = taken_V / taken if taken else uniform_V
        unseen_V = left_V == 0
        return cls(
            d,
            torch.where(unseen_V, 1.0, lost_V + d * entries_V),
            spread_V,
            1 / torch.where(unseen_V, 1.0, left_V),
            d / taken if taken else 1 / vocab,
        )


def check_smoothing(smoothing: str, strength: float) -> None:
    """Refuse what `Smoothed.of` does not know."""
    if smoothing not in SMOOTHINGS:
        near = did_you_mean(smoothing, SMOOTHINGS)
        raise ValueError(f"unknown smoothing {smoothing!r}.{near} Known: {', '.join(SMOOTHINGS)}")
    limit = {"none": 0.0, "add-k": float("inf"), "kneser-ney": 1.0}[smoothing]
    if not 0 <= strength <= limit or strength == float("inf"):
        raise ValueError(f"the strength of {smoothing!r} is from 0 (its default) to {limit:g}, got {strength}")

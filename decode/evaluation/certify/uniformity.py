"""Does a text follow the distributions it should have been drawn from? Exact tests of one text, token by token.

Let p be the distribution that a token y should follow given everything before it, and F its running sum in any order of
the vocabulary that is fixed before y is drawn. With V uniform on [0, 1), u = F(before y) + V p(y) is uniform on [0, 1),
and the u of successive tokens are independent: Rosenblatt's transform (1952), made continuous by V. This holds if and
only if the text follows p. Which steps wrote the tokens must play no part: of a correct method only all tokens together
follow p.

Shape letters: X tokens of the text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import chi2, norm
from torch import Tensor

TESTS = ("bins", "kolmogorov-smirnov", "neighbours", "next neighbours", "two apart", "rows", "favoured")
_PER_CELL = 50  # expected counts below which the chi-square approximation is not trusted far out in its tail
_MOST_BINS = 50
_MOST_SIDES = 8


class Result(NamedTuple):
    """One test of one hypothesis."""

    test: str
    statistic: float
    p_value: float


@dataclass
class Evidence:
    """What one order of the vocabulary says about texts, in the order in which rows were asked for."""

    rows: list[np.ndarray] = field(default_factory=list)
    """float64 [3, tokens] each. Of a token its u; its excess, 1{y in S} - p(S) for the set S of favoured tokens: mean
    0 if the text follows p; and p(S) (1 - p(S)), the variance of that."""

    def first(self, tokens: int) -> Evidence:
        """The first so many tokens, row after row: what rows do must not decide how much is looked at."""
        kept, left = Evidence(), tokens
        for row in self.rows:
            if left <= 0:
                break
            kept.rows.append(row[:, :left])
            left -= row.shape[1]
        return kept

    @property
    def uniforms(self) -> list[np.ndarray]:
        return [row[0] for row in self.rows]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.uniforms))

    @property
    def total_excess(self) -> float:
        return float(sum(row[1].sum() for row in self.rows))

    @property
    def total_variance(self) -> float:
        return float(sum(row[2].sum() for row in self.rows))

    @property
    def bias(self) -> float:
        """Mean share of probability that moved to the favoured tokens; at most the mean total variation from p."""
        return self.total_excess / max(1, self.tokens)


def transform(probs_XV: Tensor, scores_XV: Tensor, token_X: Tensor, uniform_X: Tensor) -> Tensor:
    """[X] float64: u of each token, the vocabulary ordered by descending score, and by number where scores are equal.

    Args:
        probs_XV: float64, the distributions that the tokens should follow; each sums to 1.
        scores_XV: any numbers that were known before the tokens.
        uniform_X: float64 in [0, 1), drawn for this alone.
    """
    own_X1 = token_X[:, None]
    score_X1 = scores_XV.gather(1, own_X1)
    numbers_V = torch.arange(probs_XV.shape[1], device=probs_XV.device)
    before_XV = (scores_XV > score_X1) | ((scores_XV == score_X1) & (numbers_V < own_X1))
    below_X = (probs_XV * before_XV).sum(1)
    return (below_X + uniform_X * probs_XV.gather(1, own_X1)[:, 0]).clamp(0, 1)


def favour(probs_XV: Tensor, favoured_XV: Tensor, token_X: Tensor) -> tuple[Tensor, Tensor]:
    """[X] float64 each: 1{y in S} - p(S) and p(S) (1 - p(S)) for sets S of tokens, given as truth values [X, V]."""
    share_X = (probs_XV * favoured_XV).sum(1).clamp(0, 1)
    inside_X = favoured_XV.gather(1, token_X[:, None])[:, 0].double()
    return inside_X - share_X, share_X * (1 - share_X)


def uniformity_tests(evidence: Evidence, rng: np.random.Generator) -> list[Result]:
    """All of `TESTS`, for the hypothesis that the text follows p; each p-value is valid by itself.

    - bins: chi-square of u over equal bins. kolmogorov-smirnov: the largest distance D of their distribution function
      from the diagonal, p ≤ 2 exp(-2 n D²) (Massart 1990, exact for every n).
    - neighbours: chi-square of pairs of successive u of a row over a grid, the first and second, third and fourth …
      next neighbours: the second and third … two apart: the first and third, second and fourth … rows: tokens at one
      position of two neighbouring rows. Neither draws nor rows may share their random numbers.
    - favoured: the sum of `excess`, p ≤ 2 exp(-v h(s / v)) with h(x) = (1 + x) log(1 + x) - x and v the summed variance
      (Freedman 1975): the most sensitive to a bias towards the favoured tokens.

    Args:
        rng: fills in the partner of a row's last token where it has none: leaving it out would favour texts that
            continue.
    """
    uniform_X = np.concatenate([*evidence.uniforms, np.zeros(0)])
    count = len(uniform_X)
    if not count:
        return [Result(test, 0.0, 1.0) for test in TESTS]
    sorted_X, place_X = np.sort(uniform_X), np.arange(count)
    distance = float(max((sorted_X - place_X / count).max(), ((place_X + 1) / count - sorted_X).max()))
    bins = min(_MOST_BINS, count // _PER_CELL)
    apart = (("neighbours", 0, 1), ("next neighbours", 1, 1), ("two apart", 0, 2))
    beside = [
        np.stack((first[: len(second)], second[: len(first)]))
        for first, second in zip(evidence.uniforms[::2], evidence.uniforms[1::2], strict=False)
    ]
    return [
        _chi_square("bins", np.histogram(uniform_X, bins=bins, range=(0, 1))[0] if bins > 1 else None),
        Result("kolmogorov-smirnov", distance, min(1.0, 2 * math.exp(-2 * count * distance**2))),
        *(_grid(test, [_pairs(row[first:], lag, rng) for row in evidence.uniforms]) for test, first, lag in apart),
        _grid("rows", beside),
        Result("favoured", evidence.bias, martingale_p(evidence.total_excess, evidence.total_variance)),
    ]


def _pairs(row: np.ndarray, lag: int, rng: np.random.Generator) -> np.ndarray:
    """[2, pairs] a row's u that lie so far apart, none of them twice."""
    row = np.append(row, rng.random(-len(row) % (2 * lag)))
    return row.reshape(-1, 2, lag).transpose(1, 0, 2).reshape(2, -1)


def _grid(name: str, pairs: Sequence[np.ndarray]) -> Result:
    both = np.concatenate([*pairs, np.zeros((2, 0))], 1)
    sides = min(_MOST_SIDES, math.isqrt(both.shape[1] // _PER_CELL))
    if sides < 2:
        return Result(name, 0.0, 1.0)
    return _chi_square(name, np.histogram2d(both[0], both[1], bins=sides, range=((0, 1), (0, 1)))[0])


def _chi_square(name: str, counts: np.ndarray | None) -> Result:
    """Of equal cells; where there are too few tokens for two of them, nothing can be said."""
    if counts is None:
        return Result(name, 0.0, 1.0)
    wanted = counts.sum() / counts.size
    statistic = float(((counts - wanted) ** 2).sum() / wanted)
    return Result(name, statistic, float(chi2.sf(statistic, counts.size - 1)))


def martingale_p(total: float, variance: float) -> float:
    """Bound on the probability that a sum of steps of at most 1 with this summed variance strays as far as `total`."""
    size = abs(total)
    if size < 1e-9:
        return 1.0
    if variance <= 0:
        return 0.0 if size > 1e-3 else 1.0  # what cannot vary has strayed: more than rounding is a fault
    ratio = size / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + ratio) * math.log1p(ratio) - ratio)))


def critical_total(variance: float, level: float) -> float:
    """The sum at which `martingale_p` falls to `level`."""
    low, high = 0.0, 1.0
    while martingale_p(high, variance) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if martingale_p(middle, variance) > level else (low, middle)
    return high


def detectable_bias(tokens: int, level: float, power: float, variance: float = 0.25) -> float:
    """The smallest bias that `tokens` tokens find with probability `power` in the test `favoured` at `level`; 1: none.

    A bias of b moves, averaged over contexts, probability b to the favoured tokens.

    Args:
        variance: mean of p(S) (1 - p(S)); before anything is known 1/4, the most it can be.
    """
    need = critical_total(tokens * variance, level) if tokens else math.inf
    sigmas = float(norm.ppf(power))
    bias = 0.0
    for _ in range(50):  # the bias adds to what the sum varies by, at most b a token
        bias = min(1.0, (need + sigmas * math.sqrt(tokens * min(0.25, variance + bias))) / max(1, tokens))
    return bias

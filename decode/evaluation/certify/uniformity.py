"""Statistical tests of whether output tokens follow the distributions from which they should be sampled.

Let p be the distribution that a token y should follow given all tokens before it, and F its cumulative sum in any order
of the vocabulary that is fixed before y is drawn. With V uniform on [0, 1), u = F(before y) + V p(y) is uniform on [0,
1), and the u of successive tokens are independent (Rosenblatt's transform, 1952, made continuous by V). This holds if
and only if the text follows p. Tokens must not be grouped by decoding step: even for a correct method, only the text as
a whole follows p.

Shape letters: X tokens of the text, V vocabulary, L continuations, D dimensions of a grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import chi2, chisquare, norm
from torch import Tensor

TESTS = ("bins", "kolmogorov-smirnov", "neighbours", "next neighbours", "two apart", "rows", "favoured")
_PER_CELL = 50  # Below this expected count the chi-square approximation fails in its tail.
_PER_CONTINUATION = 20  # Continuations with a smaller expected count are merged.
_MAX_BINS, _MAX_SIDES = 50, 8
_MAX_LAG = 256
"""Maximum distance between rows that are compared with each other."""


class Result(NamedTuple):
    """Result of one statistical test."""

    test: str
    statistic: float
    p_value: float


@dataclass
class Evidence:
    """Test statistics of all generated tokens, computed with one order of the vocabulary."""

    rows: list[np.ndarray] = field(default_factory=list)
    """Test statistics of each row, float64 [3, tokens]: u; the excess 1{y in S} - p(S), where S is the set of favoured
    tokens; and the variance of the excess, p(S) (1 - p(S))."""

    def first(self, tokens: int) -> "Evidence":
        """Return the evidence of the first `tokens` tokens. Tests require a sample size that is fixed in advance."""
        evidence = Evidence()
        for row in self.rows:
            if tokens <= 0:
                break
            evidence.rows.append(row[:, :tokens])
            tokens -= row.shape[1]
        return evidence

    @property
    def joined(self) -> np.ndarray:
        """Return the statistics [3, X] of all rows."""
        return np.concatenate([*self.rows, np.zeros((3, 0))], 1)

    @property
    def bias(self) -> float:
        """Return the mean probability shifted to favoured tokens, a lower bound of the total variation distance."""
        excess_X = self.joined[1]
        return float(excess_X.sum()) / max(1, len(excess_X))


def transform(probs_XV: Tensor, scores_XV: Tensor, token_X: Tensor, uniform_X: Tensor) -> Tensor:
    """Compute u of each token (see the module docstring), float64 [X], with the vocabulary in descending score order.

    Args:
        probs_XV: Distributions that the tokens should follow, float64. Each sums to 1.
        scores_XV: Scores that order the vocabulary (ties: by token id). They must not depend on the tokens.
        token_X: Token ids.
        uniform_X: Uniform random numbers in [0, 1), float64, which must not be used for anything else.
    """
    token_X1 = token_X[:, None]
    score_X1 = scores_XV.gather(1, token_X1)
    ids_V = torch.arange(probs_XV.shape[1], device=probs_XV.device)
    before_XV = (scores_XV > score_X1) | ((scores_XV == score_X1) & (ids_V < token_X1))
    below_X = (probs_XV * before_XV).sum(1)
    return (below_X + uniform_X * probs_XV.gather(1, token_X1)[:, 0]).clamp(0, 1)


def favoured_excess(probs_XV: Tensor, favoured_XV: Tensor, token_X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the excess 1{y in S} - p(S) of each token y, and its variance. `favoured_XV` masks the favoured set S."""
    share_X = (probs_XV * favoured_XV).sum(1).clamp(0, 1)
    inside_X = favoured_XV.gather(1, token_X[:, None])[:, 0].double()
    return inside_X - share_X, share_X * (1 - share_X)


def uniformity_tests(evidence: Evidence, rng: np.random.Generator) -> list[Result]:
    """Run every test in `TESTS` of the hypothesis that tokens follow the target's distribution.

    P-values are not corrected. u is the random number that a token corresponds to; see `Evidence`.

    - bins: chi-square test of u over equal bins.
    - kolmogorov-smirnov: largest distance D between the distribution function of u and the diagonal,
      p ≤ 2 exp(-2 n D²) (Massart 1990, valid for every n).
    - neighbours, next neighbours, two apart: chi-square tests over a grid for the u of pairs of tokens: (1, 2), (3, 4),
      …; (2, 3), (4, 5), …; and (1, 3), (2, 4), …. They detect random numbers that are used for several tokens.
    - rows: sums of products of centred u at the same position of two rows, for each distance between rows up to
      `_MAX_LAG`. The smallest p-value is multiplied by the number of distances. Detects rows that share random numbers.
    - favoured: sum s of the excess, p ≤ 2 exp(-v h(s / v)) with h(x) = (1 + x) log(1 + x) - x and summed variance v
      (Freedman 1975). This test is the most sensitive to a bias towards the favoured tokens.

    Args:
        evidence: Test statistics of the tokens.
        rng: Generator of values for the missing partner of a row's last token, if its pair is incomplete. Omitting such
            tokens would favour texts that continue.
    """
    uniform_X, excess_X, variance_X = evidence.joined
    uniforms, sorted_X, index_X = [row[0] for row in evidence.rows], np.sort(uniform_X), np.arange(len(uniform_X))
    count = max(1, len(uniform_X))
    distance = max((sorted_X - index_X / count).max(initial=0), ((index_X + 1) / count - sorted_X).max(initial=0))
    lags = (("neighbours", 0, 1), ("next neighbours", 1, 1), ("two apart", 0, 2))
    return [
        _test_cells("bins", [uniform_X[None]], _MAX_BINS),
        Result("kolmogorov-smirnov", float(distance), min(1.0, 2 * math.exp(-2 * count * distance**2))),
        *(
            _test_cells(test, [_pairs(row[first:], lag, rng) for row in uniforms], _MAX_SIDES)
            for test, first, lag in lags
        ),
        test_rows(uniforms),
        Result("favoured", evidence.bias, martingale_p(float(excess_X.sum()), float(variance_X.sum()))),
    ]


def _pairs(row: np.ndarray, lag: int, rng: np.random.Generator) -> np.ndarray:
    """Return disjoint pairs of a row's values of u at distance `lag`, [2, pairs]. `rng` draws missing values."""
    row = np.append(row, rng.random(-len(row) % (2 * lag)))
    return row.reshape(-1, 2, lag).transpose(1, 0, 2).reshape(2, -1)


def _test_cells(test: str, pieces: Sequence[np.ndarray], max_sides: int) -> Result:
    """Run a chi-square test of whether points ([D, n] per piece) are uniform on a grid, `max_sides` cells per side."""
    points_DX = np.concatenate([*pieces, np.zeros((len(pieces[0]) if pieces else 2, 0))], 1)
    dimensions, count = points_DX.shape
    bins = min(max_sides, int((count // _PER_CELL) ** (1 / dimensions)))
    if bins < 2:
        return Result(test, 0.0, 1.0)
    statistic, p_value = chisquare(np.histogramdd(points_DX.T, bins, [(0, 1)] * dimensions)[0], axis=None)
    return Result(test, float(statistic), float(p_value))


def test_rows(rows: Sequence[np.ndarray]) -> Result:
    """Test whether rows are independent, by correlations of u (see the module docstring) at each lag between rows.

    With x = 2 u - 1, which lies in [-1, 1] and has mean 0, the products x_r x_{r+d} of rows r and r + d are martingale
    differences whose variance is x_r² / 3 given the earlier rows (Freedman 1975).
    """
    count, length = len(rows), max(map(len, rows), default=0)
    x_RT, exists_RT = np.zeros((count, length)), np.zeros((count, length))
    for number, row in enumerate(rows):
        x_RT[number, : len(row)], exists_RT[number, : len(row)] = 2 * row - 1, 1
    lags = range(1, min(count, _MAX_LAG + 1))
    p_values = [
        martingale_p(float((x_RT[lag:] * x_RT[:-lag]).sum()), float((exists_RT[lag:] * x_RT[:-lag] ** 2).sum()) / 3)
        for lag in lags
    ]
    smallest = int(np.argmin(p_values)) if p_values else 0
    return Result("rows", 1.0 + smallest, min(1.0, min(p_values, default=1.0) * max(1, len(lags))))


def joint_test(laws: Sequence[np.ndarray], outcomes: Sequence[Sequence[int]]) -> Result:
    """Run a chi-square test of whether the `outcomes` (indices) of each prompt follow its probabilities in `laws`."""
    statistic, freedom = 0.0, 0
    for law_L, outcome in zip(laws, outcomes, strict=True):
        observed_L, expected_L = np.bincount(outcome, minlength=len(law_L)), law_L / law_L.sum() * len(outcome)
        rare_L = expected_L < _PER_CONTINUATION
        observed, expected = (np.append(row[~rare_L], row[rare_L].sum()) for row in (observed_L, expected_L))
        is_common = expected >= _PER_CONTINUATION
        statistic += float(((observed[is_common] - expected[is_common]) ** 2 / expected[is_common]).sum())
        freedom += max(0, int(is_common.sum()) - 1)
    return Result("joint law", statistic, float(chi2.sf(statistic, freedom)) if freedom else 1.0)


def martingale_p(total: float, variance: float) -> float:
    """Bound the p-value of a sum of martingale differences in [-1, 1] with this total and variance (Freedman 1975)."""
    size = abs(total)
    if size < 1e-9:
        return 1.0
    if variance <= 0:
        return 0.0 if size > 1e-3 else 1.0  # Without variance, any deviation beyond rounding is a fault.
    ratio = size / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + ratio) * math.log1p(ratio) - ratio)))


def detectable_bias(tokens: int, level: float, power: float, variance: float = 0.25) -> float:
    """Return the smallest bias that the test `favoured` detects with probability `power`, or 1 if it detects none.

    A bias of b means that probability b is shifted to the favoured tokens, on average over contexts.

    Args:
        tokens: Number of tokens tested.
        level: P-value below which the test rejects.
        power: Probability of detection.
        variance: Mean of p(S) (1 - p(S)), at most 1/4, where p(S) is the probability of the favoured tokens.
    """
    if not tokens:
        return 1.0
    high = 1.0
    while martingale_p(high, tokens * variance) > level:
        high *= 2
    critical = brentq(lambda total: martingale_p(total, tokens * variance) - level, 0.0, high)
    sigmas, bias = float(norm.ppf(power)), 0.0
    for _ in range(50):  # The bias itself adds at most b per token to the variance of the sum.
        bias = min(1.0, (critical + sigmas * math.sqrt(tokens * min(0.25, variance + bias))) / tokens)
    return bias

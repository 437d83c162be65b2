"""What as many tokens again would bring: a saturating power law through the evaluations of a run.

Letters: E exponents, X evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FEWEST_POINTS = 4
_EXPONENTS = np.geomspace(0.02, 3.0, 500)


@dataclass(frozen=True)
class Curve:
    """y(x) = limit − drop · x^(−exponent), x in tokens trained on; what scaling curves of loss look like (Kaplan et al.
    2020, arXiv 2001.08361, section 3) turned upside down."""

    now: float
    """y at the last point."""
    gain: float
    """How much y rises with as many tokens again."""
    error: float
    """Root mean square of what the curve leaves unexplained, in y's unit."""
    points: int


def fit_curve(tokens: Sequence[int], values: Sequence[float]) -> Curve | None:
    """The curve through (tokens, values), by least squares over a grid of exponents; it never falls. None with fewer
    than four points after the start."""
    kept = [(x, y) for x, y in zip(tokens, values, strict=True) if x > 0]
    if len(kept) < _FEWEST_POINTS:
        return None
    x, y = np.array(kept, dtype=np.float64).T
    falling_EX = -((x / x[-1]) ** -_EXPONENTS[:, None])
    mean_E1 = falling_EX.mean(1, keepdims=True)
    drop_E = np.maximum(0.0, (falling_EX - mean_E1) @ y / np.square(falling_EX - mean_E1).sum(1))
    limit_E = y.mean() - drop_E * mean_E1[:, 0]
    error_E = np.sqrt(np.square(limit_E[:, None] + drop_E[:, None] * falling_EX - y).mean(1))
    best = int(error_E.argmin())
    limit, drop, exponent, error = (float(each[best]) for each in (limit_E, drop_E, _EXPONENTS, error_E))
    return Curve(limit - drop, drop * (1 - 2**-exponent), error, len(kept))

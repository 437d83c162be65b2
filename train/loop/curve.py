"""What as many tokens again would bring: a saturating power law through the evaluations of a run."""

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

    limit: float
    drop: float
    exponent: float
    error: float
    """Root mean square of what the curve leaves unexplained, in y's unit."""
    points: int
    tokens: int
    """Of the last point."""

    def at(self, tokens: float) -> float:
        """y after so many tokens."""
        return float(self.limit - self.drop * tokens**-self.exponent)

    def doubled(self) -> float:
        """How much y rises with as many tokens again."""
        return self.at(2 * self.tokens) - self.at(self.tokens)


def fit_curve(tokens: Sequence[int], values: Sequence[float]) -> Curve | None:
    """The curve through (tokens, values), by least squares over a grid of exponents; it never falls. None with fewer
    than four points after the start."""
    kept = [(x, y) for x, y in zip(tokens, values, strict=True) if x > 0]
    if len(kept) < _FEWEST_POINTS:
        return None
    x, y = np.array(kept, dtype=np.float64).T
    best: tuple[float, float, float, float] | None = None
    for exponent in _EXPONENTS:
        falling = -((x / x[-1]) ** -exponent)
        centred = falling - falling.mean()
        drop = max(0.0, float(centred @ y / (centred @ centred)))
        limit = float(y.mean() - drop * falling.mean())
        error = float(np.sqrt(np.mean((limit + drop * falling - y) ** 2)))
        if best is None or error < best[0]:
            best = (error, limit, float(drop * x[-1] ** exponent), float(exponent))
    assert best is not None
    error, limit, drop, exponent = best
    return Curve(limit, drop, exponent, error, len(kept), int(x[-1]))

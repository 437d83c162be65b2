"""Intervals: by bootstrap over whole prompts, and of proportions the exact ones.

Shape letters: P prompts, G groups, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
FEWEST = 3
"""Prompts that an interval needs."""
Floats = NDArray[np.float64]


def resample_weights(prompts: int, seed: int | Sequence[int] = 0, draws: int = RESAMPLES) -> Floats:
    """[R, P] how often each prompt is in each resample; the same for the same seed, so that measures are paired."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=draws).astype(np.float64)


def resampled_ratios(over_PG: Floats, under_PG: Floats, seed: int = 0) -> Floats | None:
    """[R, G] Σ over / Σ under of each resample, nan where nothing was drawn; None for too few prompts."""
    if len(over_PG) < FEWEST:
        return None
    weight_RP = resample_weights(len(over_PG), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((weight_RP @ over_PG) / (weight_RP @ under_PG))


def percentile_interval(values_R: Floats | None, level: float = 0.95) -> tuple[float, float] | None:
    """The middle share of resampled numbers; None where a tenth of them or more are not finite."""
    if values_R is None:
        return None
    finite_R = values_R[np.isfinite(values_R)]
    if len(finite_R) < 0.9 * len(values_R):
        return None
    low, high = np.quantile(finite_R, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)

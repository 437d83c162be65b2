"""Bootstrap confidence intervals over prompts.

Shape letters: P prompts, G groups, R resamples.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
MIN_PROMPTS = 3
"""Minimum number of prompts for a confidence interval."""
Floats = NDArray[np.float64]


def resample_weights(prompts: int, seed: int | Sequence[int] = 0, draws: int = RESAMPLES) -> Floats:
    """Return how often each of P prompts occurs in each of R = `draws` bootstrap resamples, float64 [R, P]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=draws).astype(np.float64)


def resampled_ratios(over_PG: Floats, under_PG: Floats, seed: int = 0) -> Floats | None:
    """Return sum(over_PG) / sum(under_PG) in each bootstrap resample of prompts, [R, G]; None for too few prompts."""
    if len(over_PG) < MIN_PROMPTS:
        return None
    weight_RP = resample_weights(len(over_PG), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((weight_RP @ over_PG) / (weight_RP @ under_PG))


def percentile_interval(values_R: Floats | None, level: float = 0.95) -> tuple[float, float] | None:
    """Return the percentile interval of resampled values, [R] or [R, 1]; None if over 10 % of them are not finite."""
    if values_R is None:
        return None
    finite_R = values_R[np.isfinite(values_R)]
    if len(finite_R) < 0.9 * len(values_R):
        return None
    low, high = np.quantile(finite_R, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)

"""The curve that says what more training would bring."""

from __future__ import annotations

import numpy as np
import pytest
from draftsmith.train.loop.curve import fit_curve


@pytest.mark.parametrize(("limit", "drop", "exponent"), [(2.5, 40.0, 0.4), (1.2, 300.0, 0.9), (4.0, 5.0, 0.1)])
def test_a_power_law_is_found_again(limit: float, drop: float, exponent: float):
    tokens = [0, 10_000, 20_000, 50_000, 100_000, 200_000]
    values = [1.0] + [limit - drop * x**-exponent for x in tokens[1:]]  # the start lies on no curve
    curve = fit_curve(tokens, values)
    assert curve is not None
    assert curve.error < 1e-3
    assert curve.now == pytest.approx(values[-1], abs=1e-3)
    expected = drop * (200_000**-exponent - 400_000**-exponent)
    assert curve.gain == pytest.approx(expected, rel=0.05)


def test_noise_is_told_from_the_curve_and_a_fall_promises_nothing():
    rng = np.random.default_rng(0)
    tokens = np.arange(1, 21) * 5_000
    values = 2 - 50 * tokens**-0.5 + rng.normal(0, 0.02, 20)
    curve = fit_curve(tokens.tolist(), values.tolist())
    assert curve is not None
    assert 0.01 < curve.error < 0.03
    falling = fit_curve([1, 2, 3, 4], [2.0, 1.9, 1.8, 1.7])
    assert falling is not None
    assert falling.gain == 0


def test_few_points_say_nothing():
    assert fit_curve([0, 1, 2, 3], [1.0, 1.1, 1.2, 1.3]) is None

"""Closed forms of the papers against simulation, brute force and each other.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from draftsmith.decode.theory import closed_forms as theory

EPSILONS = (0.0, 0.02, 0.1, 0.4, 1.0)


def pairs(count: int, vocab: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.dirichlet(np.full(vocab, 0.5)), rng.dirichlet(np.full(vocab, 0.7))) for _ in range(count)]


@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_expected_tokens_are_those_of_coin_tosses(alpha: float, gamma: int) -> None:
    """By enumeration of where the first refusal stands; 1 is no exception."""
    chances = [alpha**place * (1 - alpha) for place in range(gamma)] + [alpha**gamma]
    tokens = sum(chance * (place + 1) for place, chance in enumerate(chances))
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=1e-12)
    assert theory.walltime_improvement(alpha, gamma, 0.25) == pytest.approx(tokens / (1 + gamma / 4))


def test_the_slides_numbers() -> None:
    """T5-small for English to German at temperature 0: α = 0.75, γ = 7 gave 3.4x, which no cost at all would exceed."""
    assert theory.walltime_improvement(0.75, 7, 0.0) == pytest.approx((1 - 0.75**8) / 0.25)
    assert 3.4 < theory.walltime_improvement(0.75, 7, 0.0) < 3.7
    assert theory.best_gamma(0.9, 0.02) > theory.best_gamma(0.6, 0.02)
    assert theory.best_gamma(0.3, 0.5) == 0  # drafting is not worth it where c > α
    assert theory.best_gamma(0.6, 0.5) > 0


@pytest.mark.parametrize(("alpha", "cost"), list(itertools.product((0.5, 0.8, 0.95), (0.01, 0.1))))
def test_the_best_gamma_is_the_best_of_all(alpha: float, cost: float) -> None:
    best = theory.best_gamma(alpha, cost)
    speeds = [theory.walltime_improvement(alpha, gamma, cost) for gamma in range(65)]
    assert speeds[best] == max(speeds)
    assert theory.oracle_improvement(alpha, cost) > max(speeds)


def test_the_oracle_is_the_mean_of_runs_of_accepted_tokens() -> None:
    alpha, cost = 0.8, 0.1
    runs = np.random.default_rng(0).geometric(1 - alpha, 400_000) - 1
    assert theory.oracle_improvement(alpha, cost) == pytest.approx((1 + runs).sum() / (1 + cost * runs).sum(), rel=5e-3)


def test_candidates_raise_acceptance_and_one_is_speculative_sampling() -> None:
    for p, q in pairs(50, 6, 0):
        rates = [float(theory.candidate_acceptance(p, q, k)) for k in range(1, 9)]
        assert rates[0] == pytest.approx(float(theory.acceptance(p, q)))
        assert rates[0] == pytest.approx(1 - float(theory.total_variation(p, q)))
        assert all(more >= fewer - 1e-12 for fewer, more in itertools.pairwise(rates))
        for k, rate in enumerate(rates, 1):
            assert rate >= theory.naive_acceptance(p, q, k) - 1e-12
            found = theory.k_seq(p, q, k)
            assert 1 <= found.rho <= k
            assert found.acceptance <= 1 + 1e-12
        assert theory.k_seq(p, q, 1).acceptance == pytest.approx(rates[0])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_candidates_give_and_what_refusals_leave_is_the_target(k: int) -> None:
    """All sequences of draws are enumerated, and each is tried candidate by candidate."""
    for p, q in pairs(5, 4, k):
        accepted, refused = np.zeros_like(p), np.zeros_like(p)
        for draws in itertools.product(range(4), repeat=k):
            weight, left = q[list(draws)].prod(), p
            for x in draws:
                chance = min(1, left[x] / q[x])
                accepted[x] += weight * chance
                weight *= 1 - chance
                rest = np.maximum(left - q, 0)
                left = rest / rest.sum()
            refused += weight * left
        mass, after = theory.refusals(p, q, k)
        np.testing.assert_allclose(refused, mass * after, atol=1e-12)
        np.testing.assert_allclose(accepted + mass * after, p, atol=1e-12)
        assert accepted.sum() == pytest.approx(float(theory.candidate_acceptance(p, q, k)))


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_over_acceptance_is_on_the_pareto_line(epsilon: float) -> None:
    for p, q in pairs(30, 6, 4):
        found = theory.over_acceptance(p, q, epsilon)
        variation = float(theory.total_variation(p, q))
        assert found.loss == pytest.approx(theory.smallest_bias(variation, found.rejection), abs=1e-12)
        assert theory.total_variation(found.optimal_V, p) == pytest.approx(found.loss, abs=1e-12)
        assert theory.total_variation(found.simple_V, p) >= found.loss - 1e-12
        assert found.optimal_V.sum() == pytest.approx(1)
        assert found.simple_V.sum() == pytest.approx(1)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        theory.expected_tokens(1.5, 2)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        theory.expected_tokens(0.5, -1)
    with pytest.raises(ValueError, match=r"at least 0, got -0\.1"):
        theory.walltime_improvement(0.5, 1, -0.1)
    with pytest.raises(ValueError, match="epsilon"):
        theory.over_acceptance(np.ones(2) / 2, np.ones(2) / 2, 2.0)
    assert theory.acceleration(50, 16.41) == pytest.approx(3.05, abs=5e-3)  # the paper's example
    assert theory.acceleration(5, 0) == float("inf")

"""Tests of uniformity accept texts that follow their distributions, and detect biases with the stated power.

Shape letters: X tokens, V vocabulary.
"""

import math

import numpy as np
import pytest
import torch
from draftsmith.decode.evaluation.certify.uniformity import (
    TESTS,
    Evidence,
    detectable_bias,
    favoured_excess,
    martingale_p,
    transform,
    uniformity_tests,
)

VOCAB = 12


def contexts(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return distributions [X, V] of a target and of a drafter that disagrees with it."""
    rng = np.random.default_rng(seed)
    target_XV, draft_XV = (rng.dirichlet(np.full(VOCAB, 0.5), tokens) for _ in range(2))
    return torch.from_numpy(target_XV), torch.from_numpy(draft_XV)


def draw(probs_XV: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    cdf_XV = probs_XV.cumsum(1)
    uniform_X1 = torch.from_numpy(rng.random(len(cdf_XV)))[:, None] * cdf_XV[:, -1:]
    return torch.searchsorted(cdf_XV, uniform_X1)[:, 0]


def evidence_of(
    target_XV: torch.Tensor, draft_XV: torch.Tensor, token_X: torch.Tensor, rng: np.random.Generator, row: int = 16
) -> Evidence:
    """Return the uniformity evidence of tokens in rows of `row` tokens, ordered by draft / target probability."""
    uniform_X = torch.from_numpy(rng.random(len(token_X)))
    u_X = transform(target_XV, draft_XV / target_XV, token_X, uniform_X)
    parts = (u_X, *favoured_excess(target_XV, draft_XV > target_XV, token_X))
    cuts = range(row, len(token_X), row)
    return Evidence(np.split(torch.stack(parts).numpy(), cuts, 1))


def without_favour(uniforms: list[np.ndarray]) -> Evidence:
    return Evidence([np.stack([row, np.zeros(len(row)), np.zeros(len(row))]) for row in uniforms])


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 1), (7, 2), (33, 5), (5, 40)])
def test_the_transform_equals_a_plain_implementation(tokens: int, vocab: int) -> None:
    rng = np.random.default_rng(tokens)
    probs_XV = rng.dirichlet(np.ones(vocab), tokens)
    scores_XV = rng.integers(0, 3, (tokens, vocab)).astype(float)  # with many equal scores
    token_X, uniform_X = rng.integers(0, vocab, tokens), rng.random(tokens)
    expected = []
    for probs_V, scores_V, token, uniform in zip(probs_XV, scores_XV, token_X, uniform_X, strict=True):
        order = sorted(range(vocab), key=lambda number: (-scores_V[number], number))
        before = sum(probs_V[number] for number in order[: order.index(token)])
        expected.append(before + uniform * probs_V[token])
    inputs = (torch.from_numpy(values) for values in (probs_XV, scores_XV, token_X, uniform_X))
    assert transform(*inputs).numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_p_values_of_correct_texts_are_rarely_small() -> None:
    rng = np.random.default_rng(0)
    runs, rejections = 300, dict.fromkeys(TESTS, 0)
    for seed in range(runs):
        target_XV, draft_XV = contexts(1600, seed)
        evidence = evidence_of(target_XV, draft_XV, draw(target_XV, rng), rng)
        for result in uniformity_tests(evidence, rng):
            assert result.p_value > 1e-6
            rejections[result.test] += result.p_value < 0.05
    # more than 33 rejections in 300 runs at level 5 % have probability 1e-5
    assert max(rejections.values()) <= 33, rejections
    # the chi-square tests are not conservative: fewer than 2 rejections are as unlikely
    assert min(rejections[test] for test in ("bins", "neighbours")) >= 2, rejections


@pytest.mark.parametrize("power", [0.8, 0.99])
def test_the_detectable_bias_is_found_with_its_stated_power(power: float) -> None:
    tokens, level, runs = 4000, 1e-6, 100
    rng = np.random.default_rng(1)
    target_XV, draft_XV = contexts(tokens, 1)
    variance = float(favoured_excess(target_XV, draft_XV > target_XV, draw(target_XV, rng))[1].mean())
    bias = detectable_bias(tokens, level, power, variance)
    distance = float((draft_XV - target_XV).clamp(min=0).sum(1).mean())
    biased_XV = target_XV + bias / distance * (draft_XV - target_XV)
    detected, estimates = 0, []
    for _ in range(runs):
        evidence = evidence_of(target_XV, draft_XV, draw(biased_XV, rng), rng)
        detected += uniformity_tests(evidence, rng)[-1].p_value < level
        estimates.append(evidence.bias)
    assert detected / runs >= power - 3 * math.sqrt(power * (1 - power) / runs)
    assert np.mean(estimates) == pytest.approx(bias, abs=4 * math.sqrt(variance / tokens / runs))


def test_shared_random_numbers_are_found() -> None:
    """Each token by itself follows its distribution, but two of them jointly do not."""
    rng = np.random.default_rng(3)
    rows = list(rng.random((100, 16)))
    repeated = [np.repeat(row[:8], 2) for row in rows]
    twins = [rows[number - number % 2] for number in range(100)]
    for uniforms, test in ((repeated, "neighbours"), (twins, "rows")):
        results = {result.test: result.p_value for result in uniformity_tests(without_favour(uniforms), rng)}
        assert results[test] < 1e-20
        assert results["bins"] > 1e-6
    honest = {result.test: result.p_value for result in uniformity_tests(without_favour(rows), rng)}
    assert min(honest.values()) > 1e-4


def test_the_ends_of_rows_do_not_bias_pairs() -> None:
    """Rows end with a token of probability 0.3. The pairs of successive tokens remain uniform."""
    rng = np.random.default_rng(4)
    rows = []
    for _ in range(6000):
        row = rng.random(24)
        ends = np.flatnonzero(row < 0.3)
        rows.append(row[: ends[0] + 1] if len(ends) else row)
    evidence = without_favour(rows)
    assert min(result.p_value for result in uniformity_tests(evidence, rng)) > 1e-4
    some = evidence.first(1001)
    assert some.joined[0] == pytest.approx(np.concatenate(rows)[:1001])


def test_the_martingale_bound_holds() -> None:
    rng = np.random.default_rng(5)
    for share, count in ((0.5, 400), (0.02, 400), (0.3, 30)):
        sums = rng.binomial(count, share, 200_000) - count * share
        variance = count * share * (1 - share)
        for sigmas in (2.0, 3.0, 4.0):
            total = sigmas * math.sqrt(variance)
            assert (np.abs(sums) >= total).mean() <= martingale_p(total, variance)
    assert martingale_p(0.0, 5.0) == 1.0
    assert martingale_p(0.5, 0.0) == 0.0
    assert martingale_p(1e-7, 0.0) == 1.0


def test_no_tokens_give_no_evidence() -> None:
    assert detectable_bias(0, 1e-8, 0.99) == 1.0
    assert {result.p_value for result in uniformity_tests(Evidence(), np.random.default_rng(6))} == {1.0}

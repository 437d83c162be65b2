"""Rejection rates and the cost of over-acceptance: the papers' formulas compared with the engine and its verifiers.

Rejections follow theorems 1 to 4 of Yin et al. 2024, "A theoretical perspective for speculative decoding". The theorems
assume free drafts of unbounded length. Here `gamma` equals the number of tokens, so that a step ends by a rejection or
with the text; rejections of tokens beyond the limit are not counted. The models are Markov chains with a different
table at every position, for which dynamic programming computes the formulas exactly. The acceptance of several
candidates follows appendices A and C of the multi-candidate paper, and SpecTr.

The mean over independent rows lies within three standard errors of its expectation with a probability of 99.7 %. A
correct method would thus fail such a comparison for 0.3 % of the seeds; the seeds are fixed. The tests also assert that
wrong formulas are far away. With a tolerance of five standard errors, the probability is one in two million.

Shape letters: B batch, G grid, T positions, V vocabulary. In tables [T, V, V] the last two indices are the previous and
the next token. In formulas, p is the target's distribution and q is the drafter's, as in the verifiers.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from draftsmith.decode.engine import Limits, Proposal, Verifier, generate
from draftsmith.decode.methods import Method, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from helpers import closed_forms as theory

VOCAB, TOKENS, ROWS = 8, 50, 2000
BATCH_TOKENS = 30  # fewer, since trees of several drafts are large
START = VOCAB - 1  # the first token of all texts
SAMPLING = Sampling(1.0)
MakeMarkov = Callable[[torch.Tensor], LanguageModel]
MakeStream = Callable[[int, int], Rng]


def random_tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables [T, V, V] of a target and of a drafter.

    The target prefers high tokens, after which the drafter is wrong more often, and the drafter prefers low tokens.
    Prefixes of the two chains therefore have different distributions, which give different expectations.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [1.2 * torch.randn(TOKENS, VOCAB, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)]
    lean_V = torch.linspace(-0.8, 0.8, VOCAB, dtype=torch.float64)
    target_TVV, other_TVV = (draws[0] + lean_V).softmax(-1), (draws[1] - lean_V).softmax(-1)
    weight_V1 = torch.linspace(0.1, 0.9, VOCAB, dtype=torch.float64)[:, None]
    return target_TVV, torch.lerp(target_TVV, other_TVV, weight_V1)


def naive_acceptance(target_XV: np.ndarray, draft_XV: np.ndarray, candidates: int) -> np.ndarray:
    """Return Σ p (1 - (1 - q)^k): the probability that a token from p is among k candidates (appendix C)."""
    return np.asarray((target_XV * (1 - (1 - draft_XV) ** candidates)).sum(-1))


def rejections(
    target_TVV: np.ndarray, draft_TVV: np.ndarray, start: int, weights_TVV: np.ndarray | None = None
) -> float:
    """Return E[N_rej] = Σₙ E TV(pₙ, qₙ) of T tokens of a Markov chain (arXiv 2411.00841, theorem 1).

    Drafts are free and unbounded: a step ends by a rejection or with the text, which begins with `start`. The formula
    is correct if the target's chain weights the prefixes, which is the default.
    """
    prefix_V = np.eye(target_TVV.shape[-1])[start]
    total = 0.0
    weights_TVV = target_TVV if weights_TVV is None else weights_TVV
    for target_VV, draft_VV, weights_VV in zip(target_TVV, draft_TVV, weights_TVV, strict=True):
        total += float(prefix_V @ theory.total_variation(target_VV, draft_VV))
        prefix_V = prefix_V @ weights_VV
    return total


def batch_rejections(
    target_TVV: np.ndarray, draft_TVV: np.ndarray, start: int, drafts: int, first: float = 1.0
) -> float:
    """Return E[N_rej] of batch speculative decoding: Σₙ E TV(pₙ, qₙ) - Σₙ Σ f(x₁..ₙ₋₁) [TV(pₙ, qₙ) - Πₘ TV(pₙᵐ, qₙ)].

    f(x₁..ₙ) is the probability that the prefix is x₁..ₙ and that its last token replaced a rejected one. In a Markov
    chain f only depends on the last token. The output is unbiased, so that prefixes have the target's probability. If
    the last token was not a replacement, there is one candidate, which is rejected with probability TV(p, q) and
    replaced by a sample from [p - q]+. Otherwise all M candidates are rejected with probability Π TV(pᵐ, q) and
    replaced by a sample from pᴹ⁺¹. Source: arXiv 2411.00841, theorem 3 (second part) and Algorithm 4.

    Args:
        drafts: Number of drafts M.
        first: f of the empty prefix; 1 if there are M drafts at the start too.
    """
    prefix_V = np.eye(target_TVV.shape[-1])[start]
    replaced_V = first * prefix_V
    total = 0.0
    for target_VV, draft_VV in zip(target_TVV, draft_TVV, strict=True):
        one_V, after_one_VV = theory.refusals(target_VV, draft_VV, 1)
        all_V, after_all_VV = theory.refusals(target_VV, draft_VV, drafts)
        total += float(prefix_V @ one_V - replaced_V @ (one_V - all_V))
        replaced_V, prefix_V = (
            (replaced_V * all_V) @ after_all_VV + ((prefix_V - replaced_V) * one_V) @ after_one_VV,
            prefix_V @ target_VV,
        )
    return total


def expected_rejections(*tables: torch.Tensor) -> float:
    target_TVV, draft_TVV, weights_TVV = (table_TVV.numpy() for table_TVV in tables)
    return rejections(target_TVV, draft_TVV, START, weights_TVV)


def expected_batch_rejections(
    target_TVV: torch.Tensor, draft_TVV: torch.Tensor, drafts: int, first: float = 1.0
) -> float:
    return batch_rejections(target_TVV.numpy(), draft_TVV.numpy(), START, drafts, first)


def count_rejections(
    target: LanguageModel, method: Method, rng: Rng, rows: int, tokens: int = TOKENS
) -> tuple[float, float, np.ndarray]:
    """Return the mean number of rejections per text, its standard error, and the frequency of each last token."""
    counts_B, steps_B, last_B = np.zeros(rows), np.zeros(rows), np.zeros(rows, dtype=np.int64)
    for step in generate(target, *method, [[START]] * rows, Limits(tokens), SAMPLING, rng):
        kept_B = np.array([len(ids) for ids in step.new_ids])
        counts_B += step.active & step.rejected & (kept_B == step.accepted + 1)  # not those beyond the limit
        steps_B += step.active
        last_B[step.active] = [ids[-1] for ids in step.new_ids if ids]
    assert np.isin(steps_B - counts_B, (0, 1)).all()  # only the last step may end without a rejection
    return float(counts_B.mean()), float(counts_B.std(ddof=1) / rows**0.5), np.bincount(last_B, minlength=VOCAB)


@pytest.mark.parametrize("seed", [0, 1])
def test_speculative_rejections_are_the_sum_of_total_variations(
    make_markov: MakeMarkov, make_stream: MakeStream, seed: int
) -> None:
    """An expectation over prefixes of the drafter's chain would be off by ten standard errors."""
    target_TVV, draft_TVV = random_tables(seed)
    method = build_method("speculative", Parts(make_markov(draft_TVV)), SAMPLING, gamma=TOKENS)
    mean, error, _ = count_rejections(make_markov(target_TVV), method, make_stream(seed, ROWS), ROWS)
    expected = expected_rejections(target_TVV, draft_TVV, target_TVV)
    assert 10 < expected < 25  # neither very few nor almost only rejections
    assert abs(mean - expected) < 3 * error
    assert abs(expected_rejections(target_TVV, draft_TVV, draft_TVV) - expected) > 10 * error


def test_expected_rejections_equal_enumeration() -> None:
    target_TVV, draft_TVV = (table_TVV[:4, :4, :4] for table_TVV in random_tables(3))
    target_TVV, draft_TVV = ((table / table.sum(-1, keepdim=True)).numpy() for table in (target_TVV, draft_TVV))
    total = 0.0
    for length in range(4):
        for prefix in itertools.product(range(4), repeat=length):
            last, chance = 3, 1.0
            for position, token in enumerate(prefix):
                chance, last = chance * target_TVV[position, last, token], token
            total += chance * total_variation(target_TVV[length, last], draft_TVV[length, last])
    assert rejections(target_TVV, draft_TVV, 3) == pytest.approx(total)


@pytest.mark.parametrize("drafts", [1, 2, 4, 8])
def test_batch_speculative_rejections(make_markov: MakeMarkov, make_stream: MakeStream, drafts: int) -> None:
    """The formula for any other number of drafts would be off by at least five standard errors."""
    target_TVV, draft_TVV = (table_TVV[:BATCH_TOKENS] for table_TVV in random_tables(0))
    parts = Parts(make_markov(draft_TVV))
    method = build_method("batch-speculative", parts, SAMPLING, gamma=BATCH_TOKENS, num_drafts=drafts)
    rows = ROWS if drafts < 8 else ROWS // 2
    mean, error, _ = count_rejections(make_markov(target_TVV), method, make_stream(drafts, rows), rows, BATCH_TOKENS)
    expected = expected_batch_rejections(target_TVV, draft_TVV, drafts)
    assert abs(mean - expected) < 3 * error
    wrong = [expected_batch_rejections(target_TVV, draft_TVV, value) for value in (1, 2, 4, 8) if value != drafts]
    assert min(abs(value - expected) for value in wrong) > 5 * error


EPSILONS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
GRID = 20_000


class Fixed(Rng):
    """`Rng` that returns the same predefined numbers at every call."""

    def __init__(self, uniform_BU: torch.Tensor) -> None:
        self._uniform_BU = uniform_BU

    def uniform(self, *shape: int) -> torch.Tensor:
        assert shape == self._uniform_BU.shape[1:]
        return self._uniform_BU


def one_step(verifier: Verifier, target_V: torch.Tensor, draft_V: torch.Tensor) -> tuple[float, np.ndarray]:
    """Return the probability of a rejection and the output distribution with one draft token.

    Every draft token is verified with each of GRID evenly spaced random numbers for the acceptance. Then every draft
    token is rejected, with each of these numbers for the replacement. All probabilities are exact to within 1 / GRID.
    """
    even_G = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    token_B, even_B = torch.arange(VOCAB).repeat_interleave(GRID), even_G.repeat(VOCAB)
    tokens_BN = torch.stack((torch.zeros_like(token_B), token_B), 1)
    proposal = Proposal(Tree.chain(1), tokens_BN, draft_V.float().expand(len(token_B), 1, -1))
    target_BNV = target_V.float().expand(len(token_B), 2, -1)
    accepting = verifier.verify(proposal, target_BNV, Fixed(torch.stack((even_B, even_B), 1)))
    refusing = verifier.verify(proposal, target_BNV, Fixed(torch.stack((torch.ones_like(even_B), even_B), 1)))
    accept_V = accepting.accepted_B.view(VOCAB, GRID).double().mean(1)
    output_V = draft_V * accept_V
    for token in range(VOCAB):
        if accept_V[token] < 1:
            instead_G = refusing.next_B.view(VOCAB, GRID)[token]
            output_V += draft_V[token] * (1 - accept_V[token]) * torch.bincount(instead_G, minlength=VOCAB) / GRID
    return float(draft_V @ (1 - accept_V)), output_V.numpy()


def total_variation(first_V: np.ndarray, second_V: np.ndarray) -> float:
    return float(theory.total_variation(first_V, second_V))


@pytest.mark.parametrize("seed", range(3))
def test_over_acceptance_lies_on_the_pareto_line_or_above_it(make_markov: MakeMarkov, seed: int) -> None:
    """Formulas 4 and 5 are evaluated by enumeration, without sampling.

    Decoding-OPT has the smallest bias that any distribution after a rejection can give; rejections and bias sum to
    TV(p, q). Decoding-UNO accepts with the same probabilities but lies above this line unless nothing is rejected.
    """
    target_TVV, draft_TVV = random_tables(seed)
    target_V, draft_V = target_TVV[0, 3], draft_TVV[0, 3]
    p, q, tolerance = target_V.numpy(), draft_V.numpy(), VOCAB / GRID
    others = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), 200)
    above = []
    for epsilon in EPSILONS:
        b, rejection, loss, best, mixture = theory.over_acceptance(p, q, epsilon)
        built = [
            build_method(name, Parts(make_markov(draft_TVV)), SAMPLING, gamma=1, epsilon=epsilon)
            for name in ("relaxed-opt", "relaxed-uno")
        ]
        (rejected, optimal), (rejected_too, simple) = (one_step(method.verifier, target_V, draft_V) for method in built)
        assert rejected == rejected_too == pytest.approx(rejection, abs=tolerance)
        assert total_variation(optimal, p) == pytest.approx(loss, abs=tolerance)
        assert rejected + total_variation(optimal, p) == pytest.approx(total_variation(p, q), abs=tolerance)
        assert total_variation(optimal, best) < tolerance
        assert total_variation(simple, mixture) < tolerance
        assert all(total_variation(b * q + rejection * other, p) > loss - 1e-12 for other in others)
        above.append(rejected_too + total_variation(simple, p) - total_variation(p, q))
        assert above[-1] > -tolerance
    assert above[0] > 0.02  # sampling replacements from the target is biased even without over-acceptance
    assert above[-1] == pytest.approx(0, abs=tolerance)  # nothing is rejected at ε = 1


def random_distributions(count: int, vocab: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of flat and sharp distributions p and q, some similar and some different."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        p, other = rng.dirichlet(np.full(vocab, (0.1, 0.5, 2.0)[number % 3]), 2)
        mix = rng.uniform() if number % 2 else 1.0
        yield p, (1 - mix) * p + mix * other


def refused(p: np.ndarray, q: np.ndarray, k: int) -> np.ndarray:
    """Return the probability that k candidates, drawn with replacement, are rejected and x follows (appendix A)."""
    mass, left = theory.refusals(p, q, k)
    return mass * left


def level_counts(
    make_markov: MakeMarkov, make_stream: MakeStream, name: str, p: np.ndarray, q: np.ndarray, **options: object
) -> list[int]:
    """Return how many of 40,000 rows reach each level in one step; all levels have the same p and q."""
    rows = 40_000
    target, drafter = (make_markov(torch.from_numpy(table).expand(1, len(table), -1)) for table in (p, q))
    method = build_method(name, Parts(drafter), SAMPLING, **options)
    step = next(generate(target, *method, [[0]] * rows, Limits(9), SAMPLING, make_stream(7, rows)))
    return [int((step.accepted >= level).sum()) for level in range(int(step.accepted.max()) + 1)]


def assert_share(part: int, total: int, expected: float) -> None:
    """Assert that a share is within five standard errors of its expectation."""
    assert abs(part - total * expected) <= 5 * (total * expected * (1 - expected)) ** 0.5 + 1e-9


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_acceptance_equals_the_formulas(make_markov: MakeMarkov, make_stream: MakeStream, seed: int) -> None:
    p, q = list(random_distributions(6, 7, seed))[2 + seed]
    acceptances = {
        "naive-multi-candidate": lambda k: naive_acceptance(p, q, k),
        "multi-candidate": lambda k: 1 - refused(p, q, k).sum(),
    }
    for name, acceptance in acceptances.items():
        counts = level_counts(make_markov, make_stream, name, p, q, k_config="4x2x1", replacement=True)
        assert len(counts) == 4
        for k, (total, part) in zip((4, 2, 1), itertools.pairwise(counts), strict=True):
            assert_share(part, total, acceptance(k))
    assert abs(acceptances["multi-candidate"](4) - acceptances["naive-multi-candidate"](4)) > 0.03  # 12 standard errors


def k_seq(p: np.ndarray, q: np.ndarray, chains: int) -> tuple[float, float]:
    """Return ρ of SpecTr's k-SEQ and its acceptance probability.

    Bisection solves 1 - (1 - β)^k = ρβ with β = Σ min(q, p/ρ) (Sun et al. 2023, Algorithm 2 and theorem 2).
    """
    low, high = 1.0, float(chains)
    for _ in range(60):
        rho = (low + high) / 2
        beta = np.minimum(q, p / rho).sum()
        low, high = (low, rho) if rho * beta >= 1 - (1 - beta) ** chains else (rho, high)
    return high, float(1 - (1 - np.minimum(q, p / high).sum()) ** chains)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_seq_acceptance_equals_the_formula(make_markov: MakeMarkov, make_stream: MakeStream, k: int) -> None:
    p, q = list(random_distributions(6, 7, seed=1))[2]
    total, part = level_counts(make_markov, make_stream, "spectr", p, q, gamma=1, num_drafts=k)
    assert_share(part, total, k_seq(p, q, k)[1])


# Tests of the closed forms.


def pairs(count: int, vocab: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.dirichlet(np.full(vocab, 0.5)), rng.dirichlet(np.full(vocab, 0.7))) for _ in range(count)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_multi_candidate_sampling_gives_the_target(k: int) -> None:
    """The expected values come from an enumeration of all sequences of draws."""
    for p, q in pairs(5, 4, k):
        accepted, residual = np.zeros_like(p), np.zeros_like(p)
        for draws in itertools.product(range(4), repeat=k):
            weight, remaining = q[list(draws)].prod(), p
            for x in draws:
                chance = min(1, remaining[x] / q[x])
                accepted[x] += weight * chance
                weight *= 1 - chance
                rest = np.maximum(remaining - q, 0)
                remaining = rest / rest.sum()
            residual += weight * remaining
        mass, after = theory.refusals(p, q, k)
        np.testing.assert_allclose(residual, mass * after, atol=1e-12)
        np.testing.assert_allclose(accepted + mass * after, p, atol=1e-12)
        assert accepted.sum() == pytest.approx(1 - float(theory.refusals(p, q, k)[0]))

"""The exact distribution of verified chains, for every draft of five tokens from a vocabulary of three.

A verifier is a function of the draft and of its random numbers. The threshold of one number is determined by bisection
to 2^-40 with all other numbers fixed, and so are the probabilities of the next token. The output, continued by the
target, must have the target's probability for all 3^6 texts and three pairs of models, which form one batch.

Shape letters: P pairs of models, E drafts, B = P E rows, K depth, V vocabulary, X texts.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from draftsmith.decode.engine import Proposal, Verifier
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.verifiers.lossless import ExactBlock, ExactChain
from draftsmith.decode.warpers import Sampling, warp
from torch import Tensor

PAIRS, VOCAB, DEPTH = 3, 3, 5
ALMOST = 1 - 2**-50
DRAFTS_EK = torch.tensor(list(itertools.product(range(VOCAB), repeat=DEPTH)))
Models = tuple[Tensor, Tensor]
"""Next-token distributions of target and drafter after each token, [P, V, V]; texts start after token 0."""
SAMPLINGS = [Sampling(0.5), Sampling(1.0), Sampling(2.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.7)]


class GivenRng(Rng):
    """`Rng` that returns predefined random numbers."""

    def __init__(self, uniform_BU: Tensor) -> None:
        self._uniform_BU = uniform_BU

    def uniform(self, *shape: int) -> Tensor:
        assert shape == self._uniform_BU.shape[1:]
        return self._uniform_BU


def bisected(passes: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """Find by bisection the random number [B] below which each row passes."""
    low_B, high_B = torch.zeros(rows).double(), torch.ones(rows).double()
    for _ in range(40):
        middle_B = (low_B + high_B) / 2
        passed_B = passes(middle_B)
        low_B, high_B = torch.where(passed_B, middle_B, low_B), torch.where(passed_B, high_B, middle_B)
    return high_B


def law(rule: Verifier, models: Models) -> Tensor:
    """Return the exact distribution [P, X] of the first DEPTH + 1 tokens that a verifier gives for each model pair."""
    target_PVV, draft_PVV = models
    rows = PAIRS * len(DRAFTS_EK)
    drafts_BK = DRAFTS_EK.repeat(PAIRS, 1)
    tokens_BN = torch.nn.functional.pad(drafts_BK, (1, 0))
    pair_B = torch.arange(PAIRS).repeat_interleave(len(DRAFTS_EK))
    draft_BKV = draft_PVV[pair_B[:, None], tokens_BN[:, :-1]]
    target_BNV = target_PVV[pair_B[:, None], tokens_BN]
    proposal = Proposal(Tree.chain(DEPTH), tokens_BN, draft_BKV)

    def forced_numbers(level: int, number_B: Tensor, last_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Verify with random numbers that force acceptance before `level` and, if possible, rejection after it."""
        uniform_BU = torch.full((rows, DEPTH + 1), ALMOST).double()
        uniform_BU[:, :level], uniform_BU[:, -1] = 0.0, 0.0 if last_B is None else last_B
        if level < DEPTH:
            uniform_BU[:, level] = number_B
        verdict = rule.verify(proposal, target_BNV, GivenRng(uniform_BU))
        return verdict.accepted_B, verdict.next_B

    fails_B = torch.full((rows,), ALMOST).double()
    thresholds = [
        bisected(lambda u_B, level=level: forced_numbers(level, u_B)[0] > level, rows) for level in range(DEPTH)
    ]
    pass_BK = torch.stack(thresholds, 1)
    found_PX = torch.zeros(PAIRS, VOCAB ** (DEPTH + 1)).double()
    drawn_B = draft_BKV.gather(2, drafts_BK[..., None])[..., 0].prod(1)
    for count in range(DEPTH + 1):
        if isinstance(rule, ExactBlock):  # accepts up to the last level that passes
            chance_B = (1 - pass_BK[:, count:]).prod(1) * (pass_BK[:, count - 1] if count else 1)
        else:  # accepts up to the first level that fails
            chance_B = pass_BK[:, :count].prod(1) * (1 - pass_BK[:, count] if count < DEPTH else 1)
        chance_B = chance_B * drawn_B
        possible_B = forced_numbers(count, fails_B)[0] == count
        assert chance_B[~possible_B].sum() < 1e-9
        below = [
            bisected(lambda u_B, token=token, count=count: forced_numbers(count, fails_B, u_B)[1] <= token, rows)
            for token in range(VOCAB - 1)
        ]
        cdf_BV = torch.stack((*below, torch.ones(rows).double()), 1)
        next_BV = torch.diff(cdf_BV, dim=1, prepend=torch.zeros(rows, 1).double())
        text_BX = (chance_B * possible_B)[:, None] * next_BV
        prefix_B = (drafts_BK[:, :count] * VOCAB ** torch.arange(count - 1, -1, -1)).sum(1)
        for _ in range(DEPTH - count):  # the target's own continuation
            last_X = torch.arange(text_BX.shape[1]) % VOCAB
            text_BX = (text_BX[..., None] * target_PVV[pair_B][:, last_X]).flatten(1)
        places_BX = prefix_B[:, None] * text_BX.shape[1] + torch.arange(text_BX.shape[1])
        found_PX.view(-1).index_add_(0, (pair_B[:, None] * found_PX.shape[1] + places_BX).flatten(), text_BX.flatten())
    return found_PX


def target_law(target_PVV: Tensor) -> Tensor:
    """Return the distribution [P, X] of the first DEPTH + 1 tokens of each pair's target."""
    texts_XT = torch.tensor(list(itertools.product(range(VOCAB), repeat=DEPTH + 1)))
    before_XT = torch.nn.functional.pad(texts_XT, (1, 0))[:, :-1]
    return target_PVV[:, before_XT, texts_XT].prod(2)


def models_of(sampling: Sampling, kind: str) -> Models:
    logits_2PVV = 2 * torch.randn(2, PAIRS, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)).double()
    if kind == "the same":
        logits_2PVV[1] = logits_2PVV[0]
    if kind == "hardly overlapping":
        logits_2PVV[1] = -3 * logits_2PVV[0]
    target_PVV, draft_PVV = (warp(logits_PVV, sampling).double() for logits_PVV in logits_2PVV)
    return target_PVV, draft_PVV


@pytest.mark.parametrize("kind", ["different", "the same", "hardly overlapping"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rule", [ExactChain, ExactBlock])
def test_the_output_has_the_targets_distribution(rule: type[Verifier], sampling: Sampling, kind: str) -> None:
    models = models_of(sampling, kind)
    torch.testing.assert_close(law(rule(), models), target_law(models[0]), atol=1e-6, rtol=0)


class WrongResidual(ExactChain):
    """Verifier that samples the token after a rejection from the target's p instead of the residual [p - q]+."""

    def residual_distribution(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return target_BV


def test_a_wrong_residual_is_detected() -> None:
    models = models_of(Sampling(1.0), "different")
    assert (law(WrongResidual(), models) - target_law(models[0])).abs().max() > 1e-3

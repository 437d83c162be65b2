"""The joint distribution of three tokens under every lossless sampling method is the target's.

A chi-square test over all 8^3 outcomes. Each test is wrong about a correct method with probability `FALSE_ALARM`; the
last test shows that a method with a wrong residual is found out with the same threshold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from draftsmith.decode.engine import Limits, Proposal, Verdict, generate
from draftsmith.decode.methods import Method, Parts, build_method
from draftsmith.decode.models import wrap_model
from draftsmith.decode.proposers import DraftTree
from draftsmith.decode.rng import Rng
from draftsmith.decode.verifiers import ExactChain
from draftsmith.decode.warpers import Sampling, warp
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

VOCAB = 7
ROWS = 12_000
FALSE_ALARM = 1e-6
PROMPT = [3, 1, 4]
TOKENS = 3
SAMPLINGS = [
    Sampling(0.7),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_k=3),
    Sampling(1.2, top_p=0.8),
    Sampling(0.9, top_k=5, top_p=0.9),
]
METHODS = [
    ("autoregressive", {}),
    ("speculative", {"gamma": 2}),
    ("speculative", {"gamma": 4}),
    ("multi-candidate", {"k_config": "3x2", "replacement": True}),
    ("multi-candidate", {"k_config": "3x2", "replacement": False}),
    ("multi-candidate", {"k_config": "4x1x2", "replacement": False}),
]


def exact_distribution(model: LlamaForCausalLM, sampling: Sampling) -> torch.Tensor:
    """The target's warped probability of each of the V^3 continuations, float64."""
    paths = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    ids = torch.cat((torch.tensor(PROMPT).expand(len(paths), -1), paths), 1)
    with torch.inference_mode():
        probs = warp(model(ids).logits, sampling).double()
    places = torch.arange(len(PROMPT) - 1, len(PROMPT) - 1 + TOKENS)
    return probs[:, places].gather(2, paths[:, :, None])[..., 0].prod(1)


def p_value(method: Method, target: LlamaForCausalLM, sampling: Sampling, seed: int) -> float:
    """Of the hypothesis that the method's samples follow the target's distribution."""
    scorer = wrap_model(target, check=False)
    output: list[list[int]] = [[] for _ in range(ROWS)]
    rng = Rng.for_rows(seed, ROWS)
    for step in generate(scorer, *method, [PROMPT] * ROWS, Limits(TOKENS), sampling, rng):
        for row, new in zip(output, step.new_ids, strict=True):
            row += new
    outcomes = torch.tensor(output) @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount(outcomes, minlength=VOCAB**TOKENS).double()
    expected = exact_distribution(target, sampling) * ROWS
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    rare = expected < 5  # outcomes too rare for the chi-square approximation are counted together
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    keep = wanted > 0
    return float(chisquare(observed[keep].numpy(), wanted[keep].numpy() * ROWS / wanted.sum().item()).pvalue)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(("name", "options"), METHODS, ids=lambda value: str(value))
def test_three_tokens_follow_the_target(
    make_llama: Callable[..., LlamaForCausalLM], name: str, options: dict[str, object], sampling: Sampling
) -> None:
    target = make_llama(VOCAB, seed=0, num_hidden_layers=1)
    drafter = make_llama(VOCAB, seed=1, num_hidden_layers=1)
    parts = Parts(drafter=wrap_model(drafter, check=False))
    assert p_value(build_method(name, parts, sampling, **options), target, sampling, seed=11) > FALSE_ALARM


class WrongResidual(ExactChain):
    """Draws the token after a rejection from p instead of [p - q]+."""

    def verify(self, proposal: Proposal, target_probs_BNV: torch.Tensor, rng: Rng) -> Verdict:
        assert proposal.draft_probs_BMV is not None
        verdict = super().verify(proposal, target_probs_BNV, rng)
        at_B11 = verdict.accepted_B[:, None, None].expand(-1, 1, VOCAB)
        verdict.next_B = torch.multinomial(target_probs_BNV.gather(1, at_B11)[:, 0], 1)[:, 0]
        return verdict


def test_the_test_finds_a_wrong_residual(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    target = make_llama(VOCAB, seed=0, num_hidden_layers=1)
    drafter = wrap_model(make_llama(VOCAB, seed=1, num_hidden_layers=1), check=False)
    torch.manual_seed(0)
    method = Method(DraftTree(drafter, (1, 1)), WrongResidual())
    assert p_value(method, target, Sampling(1.0), seed=11) < FALSE_ALARM


def test_hardly_overlapping_supports(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Two tokens each that mostly differ, by top_k or by a temperature at which all others underflow to 0."""
    target = make_llama(VOCAB, seed=0, sharpness=3.0, num_hidden_layers=1)
    drafter = make_llama(VOCAB, seed=9, sharpness=3.0, num_hidden_layers=1)
    parts = Parts(drafter=wrap_model(drafter, check=False))
    for sampling, replacement in itertools.product((Sampling(1.0, top_k=2), Sampling(0.05)), (True, False)):
        method = build_method("multi-candidate", parts, sampling, k_config="4x3", replacement=replacement)
        assert p_value(method, target, sampling, seed=3) > FALSE_ALARM

"""Findings of certificates: near-ties, tokens outside the support, lengths, rounding and lossy methods.

Shape letters: B batch, N tree nodes, T tokens, V vocabulary, X new tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.decode.engine import Context, Limits, Proposal, Verdict
from draftsmith.decode.evaluation.certify.certify import Certificate, Plan, certify_method, within_rounding
from draftsmith.decode.evaluation.certify.rescoring import measure_rounding, teacher_force
from draftsmith.decode.evaluation.measure import Entry
from draftsmith.decode.methods import Method, Parts
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.draft_vocabulary import keep_tokens
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.draft_tree import NoDraft
from draftsmith.decode.rng import Rng
from draftsmith.decode.verifiers.lossless import GreedyMatch, Sample
from draftsmith.decode.verifiers.verdicts import nothing_accepted
from draftsmith.decode.warpers import Sampling, warp
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

VOCAB = 24
PROMPTS = [[3, 1, 4, 1], [5], [9, 2, 6, 5, 3, 5, 8]]
LIMITS = Limits(20)
GREEDY, PLAIN = Sampling(), Sampling(1.0)
MakeLlama = Callable[..., LlamaForCausalLM]


def certify(
    target: LanguageModel,
    name: str = "autoregressive",
    sampling: Sampling = GREEDY,
    parts: Parts | None = None,
    **settings: Any,
) -> Certificate:
    plan = settings.pop("plan", Plan(tokens=2400, batch=3))
    options, limits = settings.pop("options", {}), settings.pop("limits", LIMITS)
    entry = Entry(name, name, options, sampling)
    return certify_method(target, parts or Parts(), entry, PROMPTS, limits, plan, **settings)


class SecondOfTwins(GreedyMatch):
    """Verifier that selects token 6 whenever token 5 is the most likely one."""

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        best_B = target_BNV[:, 0].argmax(-1)
        return nothing_accepted(torch.where(best_B == 5, 6, best_B))


def test_near_ties_are_listed_and_larger_differences_are_faults(make_llama: MakeLlama) -> None:
    """Tokens 5 and 6 have equal logits first, and clearly different ones later."""
    model = make_llama(VOCAB, sharpness=1.5)
    with torch.no_grad():
        model.lm_head.weight[5] += 1.0 * model.lm_head.weight.mean(0) + 0.4 * torch.randn(32).sign()
        model.lm_head.weight[6] = model.lm_head.weight[5]
    target = wrap_model(model, check=False)
    exact = certify(target)
    assert exact.verdict == "lossless"
    assert exact.near_ties == 0
    assert exact.undecided is not None
    assert exact.undecided > 0
    tied = certify(target, method=Method(NoDraft(), SecondOfTwins()))
    assert tied.verdict == "lossless"
    assert tied.near_ties > 0
    assert tied.faults == 0
    for finding in tied.findings:
        assert (finding.kind, finding.token, finding.expected) == ("near-tie", 6, 5)
        assert finding.margin is not None
        assert finding.margin <= tied.rounding.near_tie
    with torch.no_grad():
        model.lm_head.weight[6] *= 1 - 1e-3
    moved = certify(wrap_model(model, check=False), method=Method(NoDraft(), SecondOfTwins()))
    assert moved.verdict == "not lossless"
    (fault,) = [finding for finding in moved.findings if finding.kind == "token"][:1]
    assert fault.margin is not None
    assert fault.margin > moved.rounding.near_tie


@pytest.mark.parametrize(
    ("sampling", "token", "is_within"),
    [
        (Sampling(1.0, top_k=2), 2, True),  # tied with the second token
        (Sampling(1.0, top_k=2), 3, False),
        (Sampling(1.0, top_p=0.6), 2, True),  # the tokens before it have a mass of nearly 0.6
        (Sampling(1.0, top_p=0.6), 3, False),
        (Sampling(1.0, top_k=2, top_p=0.9), 3, False),
        (Sampling(1.0), 3, False),  # the support contains all tokens
    ],
    ids=str,
)
def test_the_edge_of_the_support(sampling: Sampling, token: int, is_within: bool) -> None:
    logits_V = torch.tensor([0.3, 0.3, 0.3, 0.1]).log()
    logits_V[1] += 2e-6
    if sampling.top_k == 0:
        logits_V = torch.tensor([0.3, 0.3 + 2e-7, 0.3, 0.1]).log()
    assert warp(logits_V, Sampling(1.0)).sum() == pytest.approx(1.0)
    assert within_rounding(logits_V, token, sampling, 1e-5) == is_within


class Unwarped(Sample):
    """Verifier that samples without top-k and top-p."""

    score_type = "unwarped"


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.7)], ids=str)
def test_a_token_outside_the_support_is_a_fault_immediately(make_llama: MakeLlama, sampling: Sampling) -> None:
    target = wrap_model(make_llama(VOCAB, sharpness=1.5), check=False)
    certificate = certify(target, sampling=sampling, method=Method(NoDraft(), Unwarped()))
    assert certificate.is_suspect
    assert certificate.tokens < certificate.planned
    assert certificate.tokens < 100
    assert {finding.kind for finding in certificate.findings} == {"outside"}
    assert certify(target, sampling=sampling).verdict == "lossless"


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=str)
def test_lengths_of_texts_are_checked(
    make_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    target = wrap_model(make_llama(VOCAB, sharpness=1.5), check=False)
    stops = tuple(range(12))
    limits = Limits(20, stops)
    assert not certify(target, limits=limits, sampling=sampling).is_suspect
    append = Context._append

    def deaf(self: Context, row: int, ids: list[int]) -> list[int]:
        self._stop_ids = frozenset()
        return append(self, row, ids)

    monkeypatch.setattr(Context, "_append", deaf)
    certificate = certify(target, limits=limits, sampling=sampling)
    assert certificate.is_suspect
    assert "length" in {finding.kind for finding in certificate.findings}


def test_lossy_methods_are_measured_without_verdict(make_llama: MakeLlama) -> None:
    target, drafter = (wrap_model(make_llama(VOCAB, seed=seed, sharpness=1.5), check=False) for seed in (0, 1))
    for sampling in (GREEDY, PLAIN):
        certificate = certify(target, "mjsd", sampling, Parts(drafter), options={"gamma": 3, "num_beams": 2})
        assert certificate.verdict == "not claimed"
        assert not certificate.is_suspect
        assert certificate.bias["estimate"] > 0.05
        assert certificate.tokens >= (60 if sampling.greedy else 2400)
    low, high = certificate.bias["interval"]
    assert low < certificate.bias["estimate"] < high
    mild = certify(target, "relaxed-opt", PLAIN, Parts(drafter), options={"epsilon": 0.002})
    assert mild.bias["estimate"] < certificate.bias["estimate"] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_measured_and_bounded(make_llama: MakeLlama, dtype: torch.dtype) -> None:
    target = wrap_model(make_llama(VOCAB, sharpness=1.5).to(dtype), check=False)
    rounding = measure_rounding(target, PROMPTS, PLAIN)
    largest = 10.0
    assert rounding.dtype == str(dtype).removeprefix("torch.")
    assert rounding.tokens == 3 * 64
    assert rounding.near_tie >= rounding.spread
    assert torch.finfo(dtype).eps < rounding.near_tie < torch.finfo(dtype).eps ** 0.5 * largest
    assert rounding.total_variation < 30 * torch.finfo(dtype).eps
    drafter = wrap_model(make_llama(VOCAB, seed=1, sharpness=1.5).to(dtype), check=False)
    assert not certify(target, "multi-candidate", GREEDY, Parts(drafter), options={"k_config": "3x2"}).is_suspect
    assert not certify(target, "speculative", PLAIN, Parts(drafter), options={"gamma": 3}).is_suspect


def test_excluded_tokens_do_not_widen_the_near_ties(make_llama: MakeLlama) -> None:
    model = make_llama(VOCAB, sharpness=1.5)
    full = measure_rounding(wrap_model(model, check=False), PROMPTS, PLAIN)
    keep_tokens(model, torch.arange(VOCAB - 1))
    rounding = measure_rounding(wrap_model(model, check=False), PROMPTS, PLAIN)
    assert 0 < rounding.spread < 10 * full.spread
    assert rounding.near_tie < 10 * full.near_tie


def test_teacher_forcing_equals_a_forward_of_each_text(make_llama: MakeLlama) -> None:
    model = make_llama(VOCAB)
    outputs = [[7, 7, 1], [], [2, 3, 4, 5, 6]]
    scorer = wrap_model(model, check=False)
    reading = teacher_force(scorer, PROMPTS, outputs)
    hidden_XD, before_XD, last = [], [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            hidden_TD = model.model(torch.tensor([prompt + output])).last_hidden_state[0]
        for index in range(len(output)):
            position = len(prompt) - 1 + index
            hidden_XD.append(hidden_TD[position])
            before_XD.append(hidden_TD[position - 1] if position else torch.zeros(32))
            last.append((prompt + output)[position])
    assert torch.allclose(reading.hidden_XD, torch.stack(hidden_XD), atol=1e-5)
    assert torch.allclose(reading.before_XD, torch.stack(before_XD), atol=1e-5)
    assert reading.last_X.tolist() == last
    assert reading.prefixes == PROMPTS
    single = teacher_force(scorer, [[5]], [[1, 2]])
    assert not single.before_XD[0].any()


def test_encoder_decoders_are_certified() -> None:
    def build(seed: int) -> LanguageModel:
        torch.manual_seed(seed)
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0)).eval()
        return wrap_model(model, check=False)

    certificate = certify(build(0), "speculative", PLAIN, Parts(build(1)), options={"gamma": 2})
    assert certificate.verdict == "lossless", certificate
    assert certify(build(0), reference=build(1)).verdict == "not lossless"


def test_certificates_do_not_depend_on_the_batch(make_llama: MakeLlama) -> None:
    target, drafter = (wrap_model(make_llama(VOCAB, seed=seed, sharpness=1.5), check=False) for seed in (0, 1))
    statistics = []
    for batch in (1, 7):
        plan = Plan(tokens=500, batch=batch, seed=3)
        certificate = certify(target, "speculative", PLAIN, Parts(drafter), plan=plan, limits=Limits(20, (0, 1)))
        assert certificate.verdict == "too little text"
        assert certificate.power["tokens"] == 500
        statistics.append([test["statistic"] for test in certificate.tests] + [certificate.bias["estimate"]])
    assert statistics[0] == pytest.approx(statistics[1], abs=1e-4)

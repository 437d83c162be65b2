"""Every lossless method is certified, and no method with a planted fault is certified."""

import dataclasses
from typing import Any

import pytest
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.certify.certify import Certificate, Plan, certify_method
from draftsmith.decode.evaluation.certify.stress import SmallPair, make_small_pair, stress_method
from draftsmith.decode.evaluation.measure import Entry
from draftsmith.decode.methods import METHODS, build_method
from draftsmith.decode.warpers import Sampling
from helpers.planted import FAULTS, Fault

VOCAB = 24
GREEDY, PLAIN, WARPED = Sampling(), Sampling(1.0), Sampling(0.7, top_k=12, top_p=0.9)
LIMITS = Limits(24, (0,))
PLAN = Plan(tokens=4_000, level=1e-6, batch=64, seed=7)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "speculative": ("speculative", {"gamma": 3}),
    "speculative, at once": ("speculative", {"gamma": 3, "parallel": True}),
    "speculative, blocks": ("speculative", {"gamma": 3, "verification": "block"}),
    "dynamic-tree": ("dynamic-tree", {"max_nodes": 5, "max_depth": 3, "min_prob": 0.05}),
    "suffix-drafter": (
        "suffix",
        {"fallback": "drafter", "max_nodes": 6, "max_depth": 4, "min_prob": 0.05, "confidence_threshold": 0.5},
    ),
    "unigram": ("unigram", {"gamma": 2}),
    "bigram": ("bigram", {"gamma": 3}),
    "prompt-lookup": ("prompt-lookup", {"gamma": 3, "max_ngram": 1}),
    "suffix": ("suffix", {"min_prob": 0.05}),
    "suffix-heads": ("suffix", {"fallback": "heads", "min_prob": 0.05, "datastore": "table"}),
    "multi-candidate, replaced": ("multi-candidate", {"k_config": "3x2x1", "replacement": True}),
    "multi-candidate": ("multi-candidate", {"k_config": "4x2x1", "replacement": False}),
    "multi-candidate, batch": ("multi-candidate", {"k_config": "2x2", "replacement": False, "attention": "batch"}),
    "naive-multi-candidate": ("naive-multi-candidate", {"k_config": "4x2x1"}),
    "batch-speculative": ("batch-speculative", {"gamma": 3, "num_drafts": 3}),
    "spectr": ("spectr", {"gamma": 3, "num_drafts": 3}),
    "specinfer": ("specinfer", {"gamma": 3, "num_drafts": 2}),
    "adaptive": ("adaptive", {"gamma": 3, "confidence_threshold": 0.1}),
    "bpd": ("bpd", {}),
    "medusa": ("medusa", {"tree": "4x2x1"}),
    "slim-ss": ("slim-ss", {"num_candidates": 4}),
    "slim-s": ("slim-s", {"num_candidates": 4, "num_sequences": 8}),
    "slim-l": ("slim-l", {"num_candidates": 5, "num_sequences": 12}),
}


@pytest.fixture(scope="module")
def pair() -> SmallPair:
    """Return a small random pair with a larger vocabulary than by default."""
    return make_small_pair(VOCAB, 3)


def certify(pair: SmallPair, case: str, sampling: Sampling) -> Certificate:
    name, options = CASES[case]
    limits = dataclasses.replace(LIMITS, max_new_tokens=40) if sampling.greedy else LIMITS
    plan = dataclasses.replace(PLAN, batch=5) if sampling.greedy else PLAN
    entry = Entry(case, name, options, sampling)
    return certify_method(pair.target, pair.parts, entry, pair.prompts[:16], limits, plan, reference=pair.judge)


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(PLAIN, marks=pytest.mark.slow), WARPED], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_lossless_methods_are_certified(pair: SmallPair, case: str, sampling: Sampling) -> None:
    certificate = certify(pair, case, sampling)
    assert certificate.claimed
    assert certificate.verdict == "lossless", certificate
    assert certificate.faults == 0
    min_tokens = 200 if sampling.greedy else PLAN.tokens
    assert certificate.tokens >= min_tokens
    assert 0 < certificate.power["detectable_bias_80"] < certificate.power["detectable_bias_99"] < 0.12
    if not sampling.greedy:
        assert len(certificate.tests) == 7 * (2 if case == "autoregressive" else 3) + 1
        low, high = certificate.bias["interval"]
        assert low - 0.02 < 0 < high + 0.02


def test_every_lossless_method_has_a_certificate_test(pair: SmallPair) -> None:
    lossless = {name for name in METHODS if build_method(name, pair.parts, PLAIN).verifier.lossless}
    assert lossless == {name for name, _ in CASES.values()}


QUICK = (0, 14, 28, 37, 51, 57, 60, 64, 75, 84)  # one per class except "replacement", each detected in a second or two


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=" ".join(fault[:3]), marks=[] if number in QUICK else pytest.mark.slow)
        for number, fault in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """At this significance level, a correct method would fail about one certificate in a million."""
    make_small_pair()
    fault.plant(monkeypatch)
    entry = Entry(fault.method, fault.method, fault.options, PLAIN)
    assert any(certificate.is_suspect for certificate in stress_method(entry, Plan(level=1e-7)))


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)


def test_planted_faults_cover_all_classes() -> None:
    assert len(FAULTS) >= 60
    assert {fault.kind for fault in FAULTS} - {FAULTS[number].kind for number in QUICK} == {"replacement"}

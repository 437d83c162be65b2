"""A certificate is given to every method that calls itself lossless, and to none in which a bug was planted.

Shape letters: B batch, N tree nodes, M nodes with children, K depth, V vocabulary, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Context, Limits, Proposal, Step, Verdict, Verifier, generate
from draftsmith.decode.evaluation.certify.certify import Certificate, Plan, certify_method
from draftsmith.decode.evaluation.certify.rescoring import read_back
from draftsmith.decode.evaluation.measure import Entry
from draftsmith.decode.methods import METHODS, Method, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng, categorical
from draftsmith.decode.verifiers import lossless as verifiers
from draftsmith.decode.verifiers.lossless import MultiCandidate
from draftsmith.decode.warpers import Sampling
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 24
SHARPNESS = 2.0
GREEDY, PLAIN, WARPED = Sampling(), Sampling(1.0), Sampling(0.7, top_k=12, top_p=0.9)
COLD = Sampling(0.5)
PROMPTS = [np.random.default_rng(length).integers(1, VOCAB, length).tolist() for length in range(1, 17)]
STOP = 0
LIMITS = Limits(24, (STOP,))
PLAN = Plan(tokens=4_000, level=1e-6, batch=64, seed=7)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "speculative": ("speculative", {"gamma": 3}),
    "unigram": ("unigram", {"gamma": 2}),
    "bigram": ("bigram", {"gamma": 3}),
    "prompt-lookup": ("prompt-lookup", {"gamma": 3, "ngram": 1}),
    "multi-candidate, replaced": ("multi-candidate", {"k_config": "3x2x1", "replacement": True}),
    "multi-candidate": ("multi-candidate", {"k_config": "4x2x1", "replacement": False}),
    "multi-candidate, batch": ("multi-candidate", {"k_config": "2x2", "replacement": False, "attention": "batch"}),
    "naive-multi-candidate": ("naive-multi-candidate", {"k_config": "4x2x1"}),
    "batch-speculative": ("batch-speculative", {"gamma": 3, "drafts": 3}),
    "spectr": ("spectr", {"gamma": 3, "drafts": 3}),
    "specinfer": ("specinfer", {"gamma": 3, "drafts": 2}),
    "adaptive": ("adaptive", {"gamma": 3, "threshold": 0.1}),
    "bpd": ("bpd", {}),
    "medusa": ("medusa", {"tree": "4x2x1"}),
    "slim-ss": ("slim-ss", {"candidates": 4}),
    "slim-s": ("slim-s", {"candidates": 4, "sequences": 8}),
    "slim-l": ("slim-l", {"candidates": 5, "sequences": 12}),
}
RESIDUAL = ("speculative", "unigram", "bigram", "prompt-lookup", "adaptive", "specinfer")
BRANCHING = ("multi-candidate, replaced", "multi-candidate", "batch-speculative")
TREES = (*BRANCHING, "multi-candidate, batch", "naive-multi-candidate", "medusa", "slim-s", "slim-l")
DRAFTED = tuple(case for case in CASES if case != "autoregressive")


@pytest.fixture(scope="module")
def world() -> tuple[LanguageModel, Parts]:
    """A target, and parts that are right about it now and then: what is never accepted cannot go wrong.

    Drafters are the target with other noise added to the weights; table and heads come from texts that it wrote.
    """
    target = wrap_model(llama(0, 0.0), check=False)
    drafters = [wrap_model(llama(seed, 0.12), check=False) for seed in (1, 2)]
    texts = sample_texts(target)
    table = BigramTable.from_documents([np.array(text) for text in texts], VOCAB)
    return target, Parts(drafters[0], FittedHeads(target, texts, 3), table, (drafters[1],))


def llama(seed: int, noise: float) -> LlamaForCausalLM:
    """A random model of two layers; models of different seeds differ by the noise alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, **sizes, num_key_value_heads=2, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval()
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                size = SHARPNESS * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, size, generator=common)
                parameter += torch.randn(parameter.shape, generator=own) * size * noise
    return model


def sample_texts(target: LanguageModel) -> list[list[int]]:
    """What the target writes after each prompt, several times."""
    prompts = PROMPTS * 8
    texts = [list(prompt) for prompt in prompts]
    method = build_method("autoregressive", Parts(), COLD)
    for step in generate(target, *method, prompts, Limits(40), COLD, Rng.for_rows(99, len(prompts))):
        for text, new in zip(texts, step.new_ids, strict=True):
            text += new
    return texts


class FittedHeads(torch.nn.Module):
    """Heads by least squares: head k says what stands k + 2 places after the token that a state was read from."""

    def __init__(self, target: LanguageModel, texts: list[list[int]], num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        with torch.inference_mode():
            states = read_back(target, [text[:1] for text in texts], [text[1:] for text in texts]).hidden_XD
        weights, ends = [], np.cumsum([len(text) - 1 for text in texts])
        for head in range(num_heads):
            # state i of a text predicts its token i + 1; the head speaks of token i + 2 + head
            rows = [
                i for end, text in zip(ends, texts, strict=True) for i in range(end - len(text) + 1, end - 1 - head)
            ]
            wanted = [token for text in texts for token in text[2 + head :]]
            one_hot = torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).float()
            known = states[rows]
            gram = known.T @ known + torch.eye(known.shape[1])
            weights.append(10 * torch.linalg.solve(gram, known.T @ one_hot).T)
        self.weight_KVD = torch.stack(weights)

    def forward(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("kvd,...d->...kv", self.weight_KVD, hidden_XD)


def certify(
    world: tuple[LanguageModel, Parts],
    case: str,
    sampling: Sampling,
    change: Callable[[Method], Method] = lambda method: method,
    prompts: list[list[int]] = PROMPTS,
) -> Certificate:
    target, parts = world
    name, options = CASES[case]
    method = change(build_method(name, parts, sampling, **options))
    limits = dataclasses.replace(LIMITS, max_new_tokens=40) if sampling.greedy else LIMITS
    plan = dataclasses.replace(PLAN, batch=5) if sampling.greedy else PLAN
    return certify_method(target, parts, Entry(case, name, options, sampling), prompts, limits, plan, method=method)


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(PLAIN, marks=pytest.mark.slow), WARPED], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_lossless_methods_are_certified(world: tuple[LanguageModel, Parts], case: str, sampling: Sampling) -> None:
    certificate = certify(world, case, sampling)
    assert certificate.claimed
    assert certificate.verdict == "lossless", certificate
    assert certificate.faults == 0
    assert not certificate.early
    wanted = 200 if sampling.greedy else PLAN.tokens
    assert certificate.tokens >= wanted
    assert 0 < certificate.power["found_80"] < certificate.power["found_99"] < 0.12
    if not sampling.greedy:
        assert len(certificate.tests) == 5 * (1 if case == "autoregressive" else 2)
        low, high = certificate.bias["interval"]
        assert low - 0.02 < 0 < high + 0.02


def test_every_lossless_method_has_a_certificate_test(world: tuple[LanguageModel, Parts]) -> None:
    lossless = {name for name in METHODS if build_method(name, world[1], PLAIN).verifier.lossless}
    assert lossless == {name for name, _ in CASES.values()}
    assert {CASES[case][0] for case, *_ in PLANTED} == lossless


class Wrapped(Verifier):
    """A verifier with a bug in what it is given, or in what it gives."""

    lossless = True

    def __init__(self, inner: Verifier) -> None:
        self.inner, self.judges = inner, inner.judges

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        return self.inner.verify(proposal, target_BNV, rng)


class RowsMixedUp(Wrapped):
    """Each row is judged by its neighbour's distributions."""

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        return super().verify(proposal, target_BNV.roll(1, 0), rng)


class ParentsLogits(Wrapped):
    """Reads the logits of the node before instead of a node's own."""

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        before = (torch.arange(target_BNV.shape[1]) - 1).clamp(min=0)
        return super().verify(proposal, target_BNV[:, before], rng)


class OneTooMany(Wrapped):
    """Accepts one more child of the path's last node, whatever was said about it."""

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        verdict = super().verify(proposal, target_BNV, rng)
        rows, depth = verdict.path_BK.shape
        path_BK, accepted_B = verdict.path_BK.clone(), verdict.accepted_B.clone()
        parents_BN = proposal.tree.parents_BN.expand(rows, -1)
        for row in range(rows):
            count = int(accepted_B[row])
            last = int(path_BK[row, count - 1]) if count else 0
            children = torch.nonzero(parents_BN[row] == last)[:, 0]
            valid = proposal.valid_BN is None or len(children) == 0 or bool(proposal.valid_BN[row, children[0]])
            if count < depth and len(children) and valid:
                path_BK[row, count] = children[0]
                accepted_B[row] += 1
        return dataclasses.replace(verdict, path_BK=path_BK, accepted_B=accepted_B)


class BonusFromTheRoot(Wrapped):
    """Draws the token after the path from the root's distribution."""

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        verdict = super().verify(proposal, target_BNV, rng)
        root_BV = target_BNV[:, 0]
        drawn_B = root_BV.argmax(-1) if self.judges == "logits" else categorical(root_BV, rng.uniform())
        return dataclasses.replace(verdict, next_B=torch.where(verdict.accepted_B > 0, drawn_B, verdict.next_B))


class NoResidual(MultiCandidate):
    """Draws from p where all candidates were refused."""

    def _left(self, proposal: Proposal, target_BNV: torch.Tensor, node_B: torch.Tensor, *rest: Any) -> torch.Tensor:
        return verifiers.at(target_BNV, node_B)


Patch = pytest.MonkeyPatch
Change = Callable[[Method], Method]


def wrong(verifier: Callable[[Verifier], Verifier]) -> Callable[[Patch], Change]:
    """Puts another verifier around, or in the place of, a method's own."""
    return lambda patch: lambda method: Method(method.proposer, verifier(method.verifier))


def wrong_residual(patch: Patch) -> Change:
    """After a refusal p itself instead of [p - q]+."""
    patch.setattr(verifiers, "residual", lambda target_BV, draft_BV: target_BV)
    return lambda method: method


def wrong_rest(patch: Patch) -> Change:
    """k-SEQ draws from p where it has refused all."""
    patch.setattr(verifiers, "normalise", lambda left_BV, target_BV: target_BV)
    return lambda method: method


def wrong_rho(patch: Patch) -> Change:
    """k-SEQ with ρ = 1."""
    patch.setattr(verifiers, "k_seq_rho", lambda target_BV, *_: torch.ones_like(target_BV[:, :1]))
    return lambda method: method


def stale_kv(patch: Patch) -> Change:
    """Accepted branches are not moved to the front of the target's cache."""
    begin = Context.__init__

    def changed(self: Context, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        patch.setattr(self.cache, "move_to_front", lambda path_BK: None, raising=False)

    patch.setattr(Context, "__init__", changed)
    return lambda method: method


def rollback(off: int) -> Callable[[Patch], Change]:
    """After a step the target's cache holds one token more, or less, than was committed."""

    class Shifted(KVCache):
        def set_lengths(self, lengths: list[int]) -> None:
            self._set([max(0, length + off) for length in lengths])

    def plant(patch: Patch) -> Change:
        commit = Context.commit

        def changed(self: Context, *args: Any) -> Step:
            self.cache.__class__ = Shifted
            step = commit(self, *args)
            self.cache.__class__ = KVCache
            return step

        def last_ids(self: Context, count: int) -> torch.Tensor:
            places = torch.tensor(self.lengths)[:, None] - count + torch.arange(count)
            return self.ids_BS.gather(1, places)

        patch.setattr(Context, "commit", changed)
        patch.setattr(Context, "last_ids", last_ids)
        return lambda method: method

    return plant


PLANTED: list[tuple[str, str, Sampling, Callable[[Patch], Change]]] = [
    *((case, "wrong residual", COLD, wrong_residual) for case in RESIDUAL),
    ("spectr", "wrong rest", COLD, wrong_rest),
    ("spectr", "rho = 1", COLD, wrong_rho),
    *((case, "no residual", COLD, wrong(lambda own: NoResidual(own.replacement))) for case in BRANCHING),
    ("multi-candidate", "not renormalised", COLD, wrong(lambda own: MultiCandidate(replacement=True))),
    *((case, "one too many", GREEDY, wrong(OneTooMany)) for case in DRAFTED),
    *((case, "bonus from the root", GREEDY, wrong(BonusFromTheRoot)) for case in DRAFTED),
    *((case, "logits of the wrong node", GREEDY, wrong(ParentsLogits)) for case in DRAFTED),
    *((case, "rows mixed up", GREEDY, wrong(RowsMixedUp)) for case in CASES),
    *((case, "stale KV", COLD, stale_kv) for case in TREES),
    # at temperature 0 draws with replacement are a chain: nothing is moved
    *(
        (case, "stale KV", GREEDY, stale_kv)
        for case in TREES
        if case not in ("multi-candidate, replaced", "batch-speculative")
    ),
    *((case, "one token kept too many", sampling, rollback(1)) for case in CASES for sampling in (GREEDY, COLD)),
    *((case, "one token kept too few", GREEDY, rollback(-1)) for case in CASES),
]


@pytest.mark.parametrize(
    ("case", "bug", "sampling", "plant"),
    [pytest.param(*row, id=f"{row[0]}: {row[1]} T={row[2].temperature:g}") for row in PLANTED],
)
def test_a_planted_bug_is_found(
    world: tuple[LanguageModel, Parts],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    bug: str,
    sampling: Sampling,
    plant: Callable[[Patch], Change],
) -> None:
    # where a drafter is behind by more than a prompt is long, a wrong rollback ends in an error instead
    prompts = PROMPTS[6:] if bug.startswith("one token kept") else PROMPTS
    certificate = certify(world, case, sampling, plant(monkeypatch), prompts)
    assert certificate.failed, (bug, certificate)

"""The joint distribution of three tokens equals the target's under every lossless method.

The tests are chi-square tests over all 7^3 outcomes. A correct method fails a test with probability `FALSE_ALARM`. The
last tests show that the same threshold detects a wrong residual, a mismatch of replacement and a wrong ρ.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.table.texts import TextStore
from draftsmith.decode.engine import Chains, Limits, Proposal, Verifier, generate
from draftsmith.decode.methods import METHODS, Method, Parts, build_method, method_config
from draftsmith.decode.models.dflash import DFlashDrafter, block_drafter
from draftsmith.decode.models.draft_vocabulary import keep_tokens
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.draft_tree import DraftTree
from draftsmith.decode.rng import Rng, categorical
from draftsmith.decode.tree import Tree
from draftsmith.decode.verifiers import lossless as verifiers
from draftsmith.decode.verifiers.lossless import ExactBlock, ExactChain, MultiCandidate, Traversal
from draftsmith.decode.warpers import Sampling, warp
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

VOCAB = 7
ROWS = 6_000
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 4}
FALSE_ALARM = 1e-6
PROMPT = [3, 1, 4, 1]
TOKENS = 3
SAMPLINGS = [
    Sampling(0.5),
    Sampling(1.0),
    Sampling(2.0),
    Sampling(1.0, top_k=3),
    Sampling(1.2, top_p=0.8),
    Sampling(0.9, top_k=5, top_p=0.9),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("speculative", {"gamma": 1}),
    ("speculative", {"gamma": 3}),
    ("speculative", {"gamma": 1, "verification": "block"}),
    ("speculative", {"gamma": 3, "verification": "block"}),
    ("speculative", {"gamma": 3, "parallel": True}),
    ("speculative", {"gamma": 2, "verification": "block", "parallel": True}),
    ("adaptive", {"gamma": 3, "policy": "confidence", "confidence_threshold": 0.4, "verification": "block"}),
    ("unigram", {"gamma": 2}),
    ("bigram", {"gamma": 3}),
    ("prompt-lookup", {"gamma": 3}),
    ("prompt-lookup", {"gamma": 3, "min_ngram": 2}),
    ("suffix", {"max_nodes": 3, "max_depth": 3, "min_prob": 0.05, "datastore": "table"}),
    ("suffix", {"max_nodes": 6, "max_depth": 2, "min_prob": 0.1}),
    (
        "suffix",
        {
            "fallback": "drafter",
            "max_nodes": 5,
            "max_depth": 3,
            "min_prob": 0.03,
            "draft_depth": 2,
            "confidence_threshold": 0.3,
        },
    ),
    (
        "suffix",
        {
            "fallback": "drafter",
            "max_nodes": 6,
            "max_depth": 3,
            "min_prob": 0.05,
            "draft_depth": 3,
            "confidence_threshold": 0.9,
            "datastore": "table",
        },
    ),
    ("suffix", {"fallback": "heads", "max_nodes": 5, "max_depth": 3, "min_prob": 0.02, "datastore": "table"}),
    ("suffix", {"fallback": "heads", "max_nodes": 2, "max_depth": 2, "min_prob": 0.2, "num_candidates": 2}),
    ("multi-candidate", {"k_config": "4x2x2", "replacement": True}),
    ("multi-candidate", {"k_config": "4x2x2", "replacement": False}),
    ("multi-candidate", {"k_config": "1x3", "replacement": False}),
    ("multi-candidate", {"k_config": "3x1x2", "replacement": False, "attention": "batch"}),
    ("multi-candidate", {"k_config": "4x2x2", "replacement": True, "verification": "traversal"}),
    ("multi-candidate", {"k_config": "4x2x2", "replacement": False, "verification": "traversal"}),
    ("multi-candidate", {"k_config": "1x3", "replacement": False, "verification": "traversal"}),
    ("naive-multi-candidate", {"k_config": "4x2x1"}),
    ("naive-multi-candidate", {"k_config": "3x3", "replacement": True}),
    ("batch-speculative", {"gamma": 3, "num_drafts": 4}),
    ("spectr", {"gamma": 3, "num_drafts": 2}),
    ("spectr", {"gamma": 2, "num_drafts": 4}),
    ("specinfer", {"gamma": 3, "num_drafts": 1}),
    ("specinfer", {"gamma": 2, "num_drafts": 2}),
    ("dynamic-tree", {"max_nodes": 4, "max_depth": 3, "width": 2, "min_prob": 0.05}),
    ("dynamic-tree", {"max_nodes": 6, "max_depth": 2, "width": 3, "min_prob": 0.1, "expand_prob": 0.3}),
    ("adaptive", {"gamma": 3, "policy": "confidence", "confidence_threshold": 0.4}),
    ("adaptive", {"gamma": 3, "policy": "oracle", "draft_cost": 0.3}),
    ("bpd", {}),
    ("medusa", {"tree": "3x2x1"}),
    ("medusa", {"tree": "0, 2, 0.1, 0.1.0, 2.0"}),
    ("slim-ss", {"num_candidates": 4}),
    ("slim-s", {"num_candidates": "4x2x3x1", "num_sequences": 6}),
    ("slim-l", {"num_candidates": 4, "unseen_correlation": 0.0}),
    ("slim-s", {"num_candidates": 3, "num_sequences": 6, "min_prob": 0.1}),
]


MakeStream = Callable[[int, int], Rng]


def exact_distribution(model: LlamaForCausalLM, sampling: Sampling) -> torch.Tensor:
    """Return the warped target probability of each of the V^3 continuations, float64."""
    paths = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    ids = torch.cat((torch.tensor(PROMPT).expand(len(paths), -1), paths), 1)
    with torch.inference_mode():
        probs = warp(model(ids).logits, sampling).double()
    positions = torch.arange(len(PROMPT) - 1, len(PROMPT) - 1 + TOKENS)
    return probs[:, positions].gather(2, paths[:, :, None])[..., 0].prod(1)


def p_value(
    method: Method, target: LlamaForCausalLM, sampling: Sampling, rng: Rng, aux_layers: Sequence[int] = ()
) -> float:
    """Return the p-value of the hypothesis that the method's samples follow the target's distribution."""
    scorer = wrap_model(target, check=False, aux_layers=aux_layers)
    output: list[list[int]] = [[] for _ in range(ROWS)]
    for step in generate(scorer, *method, [PROMPT] * ROWS, Limits(TOKENS), sampling, rng):
        for row, new in zip(output, step.new_ids, strict=True):
            row += new
    outcomes = torch.tensor(output) @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts = torch.bincount(outcomes, minlength=VOCAB**TOKENS).double()
    expected = exact_distribution(target, sampling) * ROWS
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    rare = expected < 5  # outcomes too rare for the chi-square approximation are merged
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    merged = torch.cat((expected[~rare], expected[rare].sum()[None]))
    keep = merged > 0
    return float(chisquare(observed[keep].numpy(), merged[keep].numpy() * ROWS / merged.sum().item()).pvalue)


@pytest.fixture
def pair(
    make_llama: Callable[..., LlamaForCausalLM], make_heads: Callable[..., torch.nn.Module]
) -> tuple[LlamaForCausalLM, Parts]:
    """Return a target and its draft artifacts, which all disagree with it."""
    target, *drafters = (make_llama(VOCAB, seed=seed, sharpness=1.5, **SMALL) for seed in range(3))
    drafters[0].config.pard_token = 5
    text = np.random.default_rng(0).integers(0, VOCAB, 40)
    table = BigramTable.from_documents([text], VOCAB)
    table.texts = TextStore.from_documents([text.astype(np.int32)])
    first, second = (wrap_model(model, check=False) for model in drafters)
    return target, Parts(first, make_heads(4, 16, VOCAB), table, (second,))


# Each case runs with one sampling and each sampling with a sixth of the cases; `make slow` runs all combinations.
@pytest.mark.parametrize(
    ("name", "options", "sampling"),
    [
        pytest.param(*case, sampling, marks=[pytest.mark.slow] if (row + column) % len(SAMPLINGS) else [])
        for row, case in enumerate(CASES)
        for column, sampling in enumerate(SAMPLINGS)
    ],
    ids=lambda value: str(value),
)
def test_three_tokens_follow_the_target(
    pair: tuple[LlamaForCausalLM, Parts],
    make_stream: MakeStream,
    name: str,
    options: dict[str, Any],
    sampling: Sampling,
) -> None:
    target, parts = pair
    method = build_method(name, parts, sampling, **options)
    assert method.verifier.lossless
    assert p_value(method, target, sampling, make_stream(11, ROWS)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("name", "options", "sampling"),
    [
        pytest.param(*case, sampling, marks=[pytest.mark.slow] if (row + column) % 2 else [])
        for row, case in enumerate(
            case for case in CASES if method_config(*case).needs == ("drafter",) and "parallel" not in case[1]
        )
        for column, sampling in enumerate((Sampling(1.0), Sampling(1.2, top_p=0.8)))
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["eagle", pytest.param("dflash", marks=pytest.mark.slow)])
def test_drafters_that_read_the_targets_states_are_exact(
    make_llama: Callable[..., LlamaForCausalLM],
    request: pytest.FixtureRequest,
    make_stream: MakeStream,
    name: str,
    options: dict[str, Any],
    sampling: Sampling,
    kind: str,
) -> None:
    """EAGLE-3 heads and DFlash drafters draft from the states of each row's committed tokens."""
    target = make_llama(VOCAB, sharpness=1.5, **SMALL | {"num_hidden_layers": 2})
    heads = request.getfixturevalue(f"make_{kind}")(target, torch.tensor([0, 1, 2, 4, 6]))
    wrap = EagleDrafter if kind == "eagle" else DFlashDrafter
    parts = Parts(wrap(heads), more_drafters=(wrap(heads),))
    method = build_method(name, parts, sampling, **options)
    assert p_value(method, target, sampling, make_stream(12, ROWS), heads.layers) > FALSE_ALARM


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speculative", {"gamma": 3}),
        ("speculative", {"gamma": 3, "verification": "block"}),
        ("multi-candidate", {"k_config": "2x2"}),
        ("dynamic-tree", {"max_depth": 3}),
        ("adaptive", {"gamma": 3, "policy": "confidence-head", "token_cost": 0.2}),
    ],
    ids=str,
)
def test_block_drafters_are_exact(
    make_llama: Callable[..., LlamaForCausalLM],
    request: pytest.FixtureRequest,
    make_stream: MakeStream,
    name: str,
    options: dict[str, Any],
) -> None:
    target = make_llama(VOCAB, sharpness=1.5, **SMALL | {"num_hidden_layers": 2})
    kind = "make_dspark" if "policy" in options else "make_dflash"
    heads, sampling = request.getfixturevalue(kind)(target), Sampling(1.0)
    method = build_method(name, Parts(block_drafter(heads)), sampling, **options)
    assert p_value(method, target, sampling, make_stream(13, ROWS), heads.layers) > FALSE_ALARM


def test_block_verification_accepts_as_many_tokens_as_its_formula(make_stream: MakeStream) -> None:
    """The mean accepted length of three draft tokens is Σᵢ E pᵢ, pᵢ = min(1, pᵢ₋₁ p/q), within five standard errors.
    Token verification accepts fewer tokens, Σᵢ E Πⱼ min(1, p/q). p and q are target and draft probabilities."""
    rows, vocab, depth = 200_000, 3, 3
    stream = torch.Generator().manual_seed(4)
    target_KV, draft_KV = torch.rand(2, depth + 1, vocab, generator=stream).softmax(-1).pow(3)
    target_KV, draft_KV = (probs_KV / probs_KV.sum(-1, keepdim=True) for probs_KV in (target_KV, draft_KV))
    drawn_BK = torch.stack([torch.multinomial(q_V, rows, True, generator=stream) for q_V in draft_KV[:depth]], 1)
    tokens_BN = torch.nn.functional.pad(drawn_BK, (1, 0))
    proposal = Proposal(Tree.chain(depth), tokens_BN, draft_KV[:depth].expand(rows, -1, -1))
    target_BNV = target_KV.expand(rows, -1, -1)
    rules = (Traversal(), ExactBlock(), ExactChain())
    lengths = [rule.verify(proposal, target_BNV, make_stream(1, rows)).accepted_B for rule in rules]
    ratio_XK = torch.tensor(list(itertools.product(range(vocab), repeat=depth)))
    chance_X = torch.stack([draft_KV[level, ratio_XK[:, level]] for level in range(depth)]).prod(0)
    block_X, token_wise_X = torch.ones_like(chance_X), torch.ones_like(chance_X)
    expected = torch.zeros(2)
    for level in range(depth):
        token_X = ratio_XK[:, level]
        ratio_X = target_KV[level, token_X] / draft_KV[level, token_X]
        block_X, token_wise_X = (block_X * ratio_X).clamp(max=1), token_wise_X * ratio_X.clamp(max=1)
        expected += torch.stack(((chance_X * block_X).sum(), (chance_X * token_wise_X).sum()))
    assert expected[0] > 1.02 * expected[1]
    for accepted_B, mean in zip(lengths, expected[[0, 0, 1]].tolist(), strict=True):
        lengths_B = accepted_B.double()
        assert abs(float(lengths_B.mean()) - mean) < 5 * float(lengths_B.std()) / rows**0.5


def test_traversal_accepts_more_than_verification_from_the_root(make_stream: MakeStream) -> None:
    """The difference must exceed five standard errors; with equal means, its probability would be 3e-7."""
    rows, vocab, tree = 100_000, 5, Tree.k_ary((2, 2))
    stream = torch.Generator().manual_seed(4)
    target_KV, draft_KV = torch.rand(2, 3, vocab, generator=stream).softmax(-1).pow(3)
    target_KV, draft_KV = (probs_KV / probs_KV.sum(-1, keepdim=True) for probs_KV in (target_KV, draft_KV))
    draft_BMV = draft_KV[[0, 1, 1]].expand(rows, -1, -1)
    race_BMV = draft_BMV / torch.empty(draft_BMV.shape).exponential_(generator=stream)
    tokens_BN = torch.nn.functional.pad(race_BMV.topk(2, -1).indices.flatten(1), (1, 0))
    proposal = Proposal(tree, tokens_BN, draft_BMV)
    target_BNV = target_KV[tree.depth_BN[0]].expand(rows, -1, -1)
    rules = (Traversal(replacement=False), MultiCandidate(replacement=False))
    more, fewer = (rule.verify(proposal, target_BNV, make_stream(1, rows)).accepted_B.double() for rule in rules)
    assert more.mean() - fewer.mean() > 5 * (float(more.var() + fewer.var()) / rows) ** 0.5


def test_every_lossless_method_is_tested(pair: tuple[LlamaForCausalLM, Parts]) -> None:
    lossless = {name for name in METHODS if build_method(name, pair[1], Sampling(1.0)).verifier.lossless}
    assert lossless == {name for name, _ in CASES}


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(0.05)], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speculative", {"gamma": 2}),
        ("multi-candidate", {"k_config": "4x3", "replacement": True}),
        ("multi-candidate", {"k_config": "4x3", "replacement": False}),
        ("multi-candidate", {"k_config": "4x3", "replacement": True, "verification": "traversal"}),
        ("multi-candidate", {"k_config": "4x3", "replacement": False, "verification": "traversal"}),
        ("spectr", {"gamma": 2, "num_drafts": 4}),
        ("specinfer", {"gamma": 2, "num_drafts": 2}),
        ("naive-multi-candidate", {"k_config": "4x3"}),
    ],
    ids=lambda value: str(value),
)
def test_nearly_disjoint_supports(
    make_llama: Callable[..., LlamaForCausalLM],
    make_stream: MakeStream,
    name: str,
    options: dict[str, Any],
    sampling: Sampling,
) -> None:
    """Target and drafter each have about two likely tokens, by top-k or a low temperature. Most of them differ."""
    target = make_llama(VOCAB, seed=0, sharpness=3.0, **SMALL)
    drafter, other = (wrap_model(make_llama(VOCAB, seed=seed, sharpness=3.0, **SMALL), check=False) for seed in (9, 10))
    parts = Parts(drafter, more_drafters=(other,))
    assert p_value(build_method(name, parts, sampling, **options), target, sampling, make_stream(3, ROWS)) > FALSE_ALARM


DRAFTED = [case for case in CASES if "drafter" in method_config(*case).needs]


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        pytest.param(*case, kind, marks=[pytest.mark.slow] if (row + column) % 3 else [])
        for row, case in enumerate(DRAFTED)
        for column, kind in enumerate(("certain", "uniform", "trimmed"))
    ],
    ids=str,
)
def test_extreme_drafters(
    pair: tuple[LlamaForCausalLM, Parts],
    make_llama: Callable[..., LlamaForCausalLM],
    make_stream: MakeStream,
    name: str,
    options: dict[str, Any],
    kind: str,
) -> None:
    """Drafters put nearly all probability on one token, have equal logits, or lack two tokens."""
    target, parts = pair
    models = [make_llama(VOCAB, seed=seed, sharpness=1.5, **SMALL) for seed in (1, 2)]
    for model in models:
        model.config.pard_token = 5
        if kind == "trimmed":
            keep_tokens(model, torch.tensor([0, 2, 3, 5, 6]))
        else:
            model.lm_head.weight.data *= 20.0 if kind == "certain" else 0.0
    first, second = (wrap_model(model, check=False) for model in models)
    method = build_method(name, replace(parts, drafter=first, more_drafters=(second,)), Sampling(1.0), **options)
    assert p_value(method, target, Sampling(1.0), make_stream(13, ROWS)) > FALSE_ALARM


@pytest.mark.parametrize("doubt", [1e-5, 1e-7, 1e-9, 1e-12])
@pytest.mark.parametrize(
    "rule",
    [
        MultiCandidate(replacement=False),
        Traversal(replacement=False),
        MultiCandidate(replacement=True),
        Traversal(replacement=True),
        verifiers.SeveralDrafters(),
        verifiers.KSequential(),
        ExactChain(),
        ExactBlock(),
    ],
    ids=lambda rule: f"{type(rule).__name__}-{getattr(rule, 'replacement', '')}",
)
def test_a_nearly_certain_drafter_leaves_the_target_distribution(
    make_stream: MakeStream, rule: Verifier, doubt: float
) -> None:
    """The drafter's largest probability is 1 - `doubt`, which float32 rounds to 1 if `doubt` is below 6e-8."""
    rows, target_V = 200_000, torch.tensor([0.5, 0.3, 0.2])
    draft_V = torch.tensor([0.0, math.log(doubt * 0.6), math.log(doubt * 0.4)]).softmax(0)
    rng = make_stream(7, rows)
    chain = isinstance(rule, ExactChain)
    tree = Tree.chain(2) if chain else Tree.k_ary((2,))
    if getattr(rule, "replacement", True):
        drawn_BC = torch.stack([categorical(draft_V.expand(rows, -1), rng.uniform()) for _ in range(2)], 1)
    else:
        drawn_BC = (draft_V / rng.exponential(3)).topk(2, -1).indices
    proposal = Proposal(tree, torch.nn.functional.pad(drawn_BC, (1, 0)), draft_V.expand(rows, 2 if chain else 1, -1))
    if isinstance(rule, verifiers.SeveralDrafters):
        nodes_BMK = torch.tensor([[[1], [2]]]).expand(rows, -1, -1)
        proposal.chains = Chains(nodes_BMK, draft_V.expand(rows, 2, 1, -1))
    verdict = rule.verify(proposal, target_V.expand(rows, tree.nodes, -1), rng)
    first_B1 = proposal.tokens_BN.gather(1, verdict.path_BK[:, :1])
    tokens_B = torch.where(verdict.accepted_B > 0, first_B1[:, 0], verdict.next_B)
    counts_V = torch.bincount(tokens_B, minlength=3).double().numpy()
    assert chisquare(counts_V, target_V.double().numpy() * rows).pvalue > FALSE_ALARM


@pytest.mark.parametrize("name", ["speculative", "multi-candidate", "batch-speculative", "spectr", "specinfer"])
def test_a_drafter_that_is_the_target_leaves_no_residual(
    make_llama: Callable[..., LlamaForCausalLM], make_stream: MakeStream, name: str
) -> None:
    """Target and draft probabilities are equal, so the first candidate must always be accepted."""
    target = make_llama(VOCAB, seed=0, **SMALL)
    scorer = wrap_model(target, check=False)
    sampling = Sampling(1.0)
    method = build_method(name, Parts(scorer), sampling)
    assert p_value(method, target, sampling, make_stream(5, ROWS)) > FALSE_ALARM
    steps = list(generate(scorer, *method, [PROMPT] * 500, Limits(4), sampling, Rng.for_rows(0, 500)))
    assert sum(int(step.accepted[step.active].sum()) for step in steps) >= 500 * 4 * 0.98


class WrongResidual(ExactChain):
    """Verifier that samples the token after a rejection from the target's p instead of the residual [p - q]+."""

    def residual_distribution(self, target_BV: torch.Tensor, draft_BV: torch.Tensor) -> torch.Tensor:
        return target_BV


def test_the_test_detects_a_wrong_residual(pair: tuple[LlamaForCausalLM, Parts], make_stream: MakeStream) -> None:
    assert pair[1].drafter is not None
    method = Method(DraftTree(pair[1].drafter, (1, 1)), WrongResidual())
    assert p_value(method, pair[0], Sampling(1.0), make_stream(11, ROWS)) < FALSE_ALARM


def test_the_test_detects_a_mismatch_of_replacement(
    pair: tuple[LlamaForCausalLM, Parts], make_stream: MakeStream
) -> None:
    assert pair[1].drafter is not None
    method = Method(DraftTree(pair[1].drafter, (4, 2), replacement=False), MultiCandidate(replacement=True))
    assert p_value(method, pair[0], Sampling(1.0), make_stream(11, ROWS)) < FALSE_ALARM


def test_the_test_detects_a_wrong_rho(
    pair: tuple[LlamaForCausalLM, Parts], make_stream: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SpecTr's k-SEQ algorithm accepts too many draft tokens if its factor ρ is 1."""
    monkeypatch.setattr(verifiers, "k_seq_rho", lambda target_BV, *_: torch.ones_like(target_BV[:, :1]))
    method = build_method("spectr", pair[1], Sampling(1.0), gamma=2, num_drafts=4)
    assert p_value(method, pair[0], Sampling(1.0), make_stream(11, ROWS)) < FALSE_ALARM

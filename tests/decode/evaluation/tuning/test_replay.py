"""Replay against decoding: exact on the same text at temperature 0, and text by text in expectation elsewhere.

Shape letters: T positions, V vocabulary, K candidates, S positions sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.measure import decode, sample_texts
from draftsmith.decode.evaluation.tuning.recording import Candidates, Recording, record
from draftsmith.decode.evaluation.tuning.replay import predict
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.proposers.ngrams import TableSource
from draftsmith.decode.warpers import Sampling
from helpers import closed_forms as theory

VOCAB, TOKENS, ROWS, START = 3, 3, 20_000, 2
SAMPLING = Sampling(1.0)
MakeMarkov = Callable[[torch.Tensor], LanguageModel]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("speculative", {"gamma": 1}),
    ("speculative", {"gamma": 3}),
    ("speculative", {"gamma": 2, "verification": "block"}),
    ("speculative", {"gamma": 3, "verification": "block"}),
    ("multi-candidate", {"k_config": "2x2x1", "replacement": True}),
    ("multi-candidate", {"k_config": "2x2", "replacement": False}),
    ("multi-candidate", {"k_config": "3x1", "replacement": False}),
]


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a target and of a drafter that is often wrong, [T, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2, TOKENS, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    target_TVV, other_TVV = draws[0].softmax(-1), draws[1].softmax(-1)
    return target_TVV, torch.lerp(target_TVV, other_TVV, 0.8)


@pytest.fixture(scope="module")
def all_texts() -> list[list[int]]:
    return [list(text) for text in itertools.product(range(VOCAB), repeat=TOKENS)]


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=lambda value: str(value))
def test_steps_of_every_text(
    make_markov: MakeMarkov, make_stream: Any, all_texts: list[list[int]], name: str, options: dict[str, Any]
) -> None:
    """20,000 texts are decoded, and each of the 27 texts took as many steps on average as replay says of it.

    Five standard errors are allowed for each text. Some text takes fewer steps by twenty standard errors than the three
    that it would take if nothing were accepted.
    """
    target_TVV, draft_TVV = tables(1)
    target, parts, rows = make_markov(target_TVV), Parts(make_markov(draft_TVV)), ROWS
    prompts = [[START]] * len(all_texts)
    recording = record(target, parts, prompts, all_texts, SAMPLING, candidates=3, draws=64)
    prediction = predict(recording, parts, name, options)
    assert prediction is not None
    method = build_method(name, parts, SAMPLING, **options)
    written: list[list[int]] = [[] for _ in range(rows)]
    steps_B = np.zeros(rows)
    for step in generate(target, *method, [[START]] * rows, Limits(TOKENS), SAMPLING, make_stream(3, rows)):
        steps_B += step.active
        for row, new in zip(written, step.new_ids, strict=True):
            row += new
    number_B = np.array(written) @ (VOCAB ** np.arange(TOKENS)[::-1])
    counts_X = np.bincount(number_B, minlength=len(all_texts))
    means_X = np.bincount(number_B, steps_B, minlength=len(all_texts)) / counts_X
    squares_X = np.bincount(number_B, steps_B**2, minlength=len(all_texts)) / counts_X
    errors_X = np.sqrt(np.maximum(squares_X - means_X**2, 0) / counts_X)
    assert counts_X.min() > 20
    assert (np.abs(means_X - prediction.steps_by_text) <= 5 * errors_X + 1e-3).all()
    if name != "autoregressive":
        assert (3 - np.array(prediction.steps_by_text) > 20 * errors_X).any()


def alone(p: np.ndarray, q: np.ndarray, y: int, k: int) -> float:
    """P(one of k candidates accepted and y | y), without replacement, by following every draw."""

    def accepted(left: np.ndarray, rest: np.ndarray, count: int) -> np.ndarray:
        found = np.zeros_like(p)
        if count == 0 or rest.sum() == 0:
            return found
        for x in np.flatnonzero(rest):
            chance = min(1, left[x] / rest[x])
            found[x] += rest[x] * chance
            if chance < 1:
                after, others = np.maximum(left - rest, 0), np.where(np.arange(len(p)) == x, 0, rest)
                others = others / others.sum() if others.sum() > 0 else others
                found += rest[x] * (1 - chance) * accepted(after / after.sum(), others, count - 1)
        return found

    return float(accepted(p, q, k)[y] / p[y])


@pytest.mark.parametrize(("vocab", "flatness"), [(4, 0.2), (5, 0.5), (6, 1.0)])
def test_candidates_are_worth_what_enumeration_says(vocab: int, flatness: float) -> None:
    """Sharp and flat distributions; tokens that one side lacks; a right drafter; one that runs out of tokens."""
    rng = np.random.default_rng(vocab)
    p_TV, q_TV = rng.dirichlet(np.full(vocab, flatness), 8), rng.dirichlet(np.full(vocab, flatness), 8)
    q_TV[1, 0], p_TV[3, 1], q_TV[4, 2:] = 0, 0, 0
    q_TV[2] = p_TV[2]
    p_TV, q_TV = (table / table.sum(1, keepdims=True) for table in (p_TV, q_TV))
    y_T = np.array([rng.choice(vocab, p=p) for p in p_TV])
    judged = Candidates(*(torch.from_numpy(each) for each in (p_TV, q_TV, y_T)))
    generator = torch.Generator().manual_seed(0)
    without_TK = judged.without_replacement(4, 4000, generator).numpy()
    scale_TK = judged.scales(4)
    with_TK, left_TK = judged.accepted(scale_TK).numpy(), judged.left(scale_TK)
    for place, (p, q, y) in enumerate(zip(p_TV, q_TV, y_T, strict=True)):
        for k in (1, 2, 3, 4):
            assert without_TK[place, k - 1] == pytest.approx(alone(p, q, y, k), abs=1e-9 if k <= 2 else 4e-3)
            refused, after = theory.refusals(p, q, k)
            assert with_TK[place, k - 1] == pytest.approx(1 - refused * after[y] / p[y], abs=1e-9)
            assert left_TK[place, k - 1] == pytest.approx(float(refused), abs=1e-9)


@pytest.fixture
def parts(make_llama: Any, make_heads: Any) -> Parts:
    """A drafter that agrees now and then, heads, and a table of random counts."""
    drafter = wrap_model(make_llama(12, seed=0, sharpness=1.1))
    documents = np.random.default_rng(0).integers(0, 12, (40, 30))
    return Parts(drafter, make_heads(3, 32, 12), BigramTable.from_documents(iter(documents), 12))


GREEDY: list[tuple[str, dict[str, Any]]] = [
    *(("speculative", {"gamma": gamma}) for gamma in (1, 3, 7)),
    *(("multi-candidate", {"k_config": config}) for config in ("2x1", "4x2x1", "3x3x2x1")),
    ("multi-candidate", {"k_config": "3x2", "replacement": True}),
    ("multi-candidate", {"k_config": "2x2x1", "attention": "batch"}),
    ("unigram", {"gamma": 2}),
    ("bigram", {"gamma": 4}),
    ("bigram", {"gamma": 2, "add_k": 0.5}),
    ("prompt-lookup", {"gamma": 5, "max_ngram": 2}),
    ("bpd", {}),
    ("medusa", {"tree": "4x3x2"}),
    ("medusa", {"tree": "0, 3, 0.0, 0.5, 3.1, 0.0.2"}),
    ("slim-s", {"num_sequences": 9, "num_candidates": 6}),
    ("slim-s", {"num_sequences": 5, "num_candidates": 12, "lengths": "full", "max_depth": 2}),
    ("slim-ss", {"correlation": "none", "num_candidates": 4}),
]


HEADS = ("bpd", "medusa", "slim-s", "slim-ss")


def prompts_of(vocab: int, count: int, shortest: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, size=shortest + place % 5).tolist() for place in range(count)]


@pytest.mark.parametrize("shortest", [1, 2])
def test_greedy_replay_is_exact_for_every_method(make_llama: Any, parts: Parts, shortest: int) -> None:
    """Prompts of a few tokens, texts that a stop token ends early or the limit: as many steps as decoding takes.

    After a prompt of one token there is no hidden state, and heads hold all tokens equally likely: which of equals they
    propose is nobody's promise.
    """
    target = wrap_model(make_llama(12, seed=0))
    prompts, limits, sampling = prompts_of(12, 12, shortest), Limits(21, (5,)), Sampling()
    settings = [(name, options) for name, options in GREEDY if shortest > 1 or name not in HEADS]
    texts = sample_texts(target, prompts, limits, sampling, batch=5)
    assert min(map(len, texts)) < 21  # some texts end early
    tables = (TableSource(1), TableSource(2), TableSource(2, add_k=0.5))
    recording = record(target, parts, prompts, texts, sampling, head_candidates=12, tables=tables)
    steps = set()
    for name, options in settings:
        prediction = predict(recording, parts, name, options)
        assert prediction is not None
        method = build_method(name, parts, sampling, **options)
        tallies = [decode(target, method, sampling, 0, prompt, limits) for prompt in prompts]
        assert [run.ids for run in tallies] == texts
        assert list(prediction.steps_by_text) == [run.tally.steps for run in tallies], name
        nodes = sum(run.tally.nodes for run in tallies) / sum(run.tally.steps for run in tallies)
        assert prediction.nodes_per_step == pytest.approx(nodes), name
        steps.add(round(sum(prediction.steps_by_text)))
    assert len(steps) > 6  # the methods differ, so that one number for all would not do


def test_what_cannot_be_replayed_is_none(make_llama: Any, parts: Parts) -> None:
    target, sampling = wrap_model(make_llama(12, seed=0)), Sampling()
    prompts = prompts_of(12, 2)
    texts = sample_texts(target, prompts, Limits(6), sampling)
    recording = record(target, Parts(parts.drafter), prompts, texts, sampling)
    for name in ("mjsd", "bild", "relaxed-opt", "beam", "adaptive"):
        assert predict(recording, parts, name, {}) is None
    for name in ("medusa", "slim-s", "bigram"):  # parts that were not recorded
        assert predict(recording, parts, name, {}) is None
    warm = Sampling(1.0)
    sampled = record(target, Parts(parts.drafter), prompts, sample_texts(target, prompts, Limits(6), warm), warm)
    assert predict(sampled, parts, "speculative", {}) is not None
    assert predict(sampled, parts, "spectr", {}) is None


def test_too_many_candidates_are_named(make_markov: MakeMarkov) -> None:
    target_TVV, draft_TVV = tables(0)
    parts = Parts(make_markov(draft_TVV))
    recording = record(make_markov(target_TVV), parts, [[0]], [[1, 2, 0]], SAMPLING, candidates=2)
    with pytest.raises(ValueError, match=r"3 .*2 "):
        predict(recording, parts, "multi-candidate", {"k_config": "3x1"})
    with pytest.raises(ValueError, match=r"1 prompts.*2 texts"):
        record(make_markov(target_TVV), parts, [[0]], [[1], [2]], SAMPLING)


def test_chunks_change_nothing(make_llama: Any, parts: Parts) -> None:
    target, sampling = wrap_model(make_llama(12, seed=0)), Sampling(0.9, 8, 0.95)
    prompts = prompts_of(12, 6)
    texts = sample_texts(target, prompts, Limits(17), sampling, seed=3)
    whole, pieces = (record(target, parts, prompts, texts, sampling, candidates=2, chunk=chunk) for chunk in (64, 5))
    for name in ("drafter", "unigram", "bigram 1"):
        for key in vars(whole.drafts[name]):
            first, second = (getattr(each.drafts[name], key) for each in (whole, pieces))
            np.testing.assert_allclose(first, second, rtol=2e-3, atol=2e-4, err_msg=key)
    assert whole.heads is not None
    assert pieces.heads is not None
    np.testing.assert_array_equal(whole.heads.token_THC, pieces.heads.token_THC)


def test_standard_errors_are_those_of_other_texts(make_llama: Any, parts: Parts) -> None:
    """Predictions from other texts scatter as the standard error says: within a factor of two, over 12 sets."""
    target, sampling = wrap_model(make_llama(12, seed=0)), Sampling(1.0)
    rates, errors = [], []
    for seed in range(12):
        prompts = [[3, 4]] * 16
        texts = sample_texts(target, prompts, Limits(12), sampling, seed=1000 * seed, batch=16)
        recording: Recording = record(target, Parts(parts.drafter), prompts, texts, sampling, candidates=1)
        prediction = predict(recording, parts, "speculative", {"gamma": 3})
        assert prediction is not None
        rates.append(prediction.tokens_per_step)
        errors.append(prediction.standard_error)
    assert 0.5 < np.std(rates, ddof=1) / np.mean(errors) < 2

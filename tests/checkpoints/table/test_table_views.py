"""Correlations and distributions of bigram tables against dense formulas, smoothed or not, whole or pruned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.smoothing import default_discount
from draftsmith.checkpoints.table.table import BigramTable
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), max_size=10)
PRUNINGS: list[dict[str, int]] = [{}, {"min_count": 2}, {"top": 1}, {"min_count": 3, "top": 2}]
SMOOTHINGS = [
    ("none", 0.0),
    ("add-k", 0.0),
    ("add-k", 0.3),
    *(("kneser-ney", share) for share in (0.0, 0.4, 1.0)),
]
TOKENS = torch.arange(VOCAB)


def counted(documents: list[list[int]], vocab_size: int = VOCAB) -> BigramTable:
    return BigramTable.from_documents([np.array(document, dtype=np.int64) for document in documents], vocab_size)


def log_of(unseen: float) -> torch.Tensor:
    return torch.tensor(unseen).log()


def held(table: BigramTable) -> np.ndarray:
    """float64 [V, V]: the counts that a table holds, entry by entry."""
    dense = np.zeros((table.vocab_size,) * 2)
    for x in range(table.vocab_size):
        for entry in range(int(table.row_ptr[x]), int(table.row_ptr[x + 1])):
            dense[x, int(table.col[entry])] = int(table.count[entry])
    return dense


def reference(whole: np.ndarray, kept: np.ndarray, smoothing: str, strength: float) -> np.ndarray:
    """float64 [V, V]: p(y | x) of the smoothings, row by row, as the papers write them."""
    vocab, n = len(whole), whole.sum()
    p = np.zeros_like(whole)
    once, twice = (whole == 1).sum(), (whole == 2).sum()
    discount = strength or (once / (once + 2 * twice) if once and twice else 0.5)
    taken = whole.sum(0) - np.maximum(kept - discount, 0).sum(0)
    for x in range(vocab):
        left, lost = whole[x].sum(), whole[x].sum() - kept[x].sum()
        if smoothing == "add-k":
            k = strength or 0.01
            p[x] = (kept[x] + k + lost / vocab) / (left + k * vocab)
        elif not n:
            p[x] = 1 / vocab
        elif not left:
            p[x] = taken / taken.sum()
        else:
            rest = discount * (kept[x] > 0).sum() + lost
            p[x] = np.maximum(kept[x] - discount, 0) / left + rest / left * taken / taken.sum()
    return p


def pruned_if_any_is_left(table: BigramTable, pruning: dict[str, int]) -> BigramTable:
    """The table as it is where all of it would go, which is refused."""
    left = not table.entries or int(table.count.max()) >= pruning.get("min_count", 1)
    return table.pruned(**(pruning if left else {}))


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from(PRUNINGS), st.sampled_from(SMOOTHINGS), st.sampled_from([0.5, 1.0, 7.0]))
def test_distributions_are_those_of_the_formula(
    documents: list[list[int]], pruning: dict[str, int], smoothing: tuple[str, float], prior: float
) -> None:
    table = counted(documents)
    whole, small = held(table), pruned_if_any_is_left(table, pruning)
    rows = small.distributions("cpu", prior, *smoothing)
    found = rows.after(TOKENS)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().sum(-1), 1, atol=2e-6)
    if smoothing[0] == "none":
        unigram = (table.unigram.numpy() + 1) / (table.unigram.numpy() + 1).sum()
        lost = (whole - held(small)).sum(1, keepdims=True)
        wanted = (held(small) + (prior + lost) * unigram) / (whole.sum(1, keepdims=True) + prior)
        np.testing.assert_allclose(rows.unigram_V, unigram, rtol=1e-6)
    else:
        wanted = reference(whole, held(small), *smoothing)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    best = rows.most_likely(TOKENS).numpy()
    np.testing.assert_allclose(wanted[np.arange(VOCAB), best], wanted.max(1), rtol=1e-12)
    padded_RV = torch.outer(rows._base_V, rows._spread_V)
    rows._add_padded(padded_RV, TOKENS)
    np.testing.assert_allclose(padded_RV, found, atol=1e-7)


@pytest.mark.parametrize("pruning", PRUNINGS)
def test_kneser_and_ney_keep_the_marginal(pruning: dict[str, int]) -> None:
    """Σ p(x) p(y | x) = p(y): what they chose u for, which in whole tables is the share of distinct pairs."""
    table = counted([np.random.default_rng(0).zipf(1.5, 500).clip(max=VOCAB).tolist()], VOCAB + 1)
    small = table.pruned(**pruning)
    left, right = (part.double() / table.pairs for part in (table.left_counts(), table.right_counts()))
    after = small.distributions("cpu", 1.0, "kneser-ney").after(torch.arange(VOCAB + 1)).double()
    np.testing.assert_allclose(left @ after, right, atol=1e-6)
    if not pruning:
        never = int((left == 0).int().argmax())
        assert left[never] == 0
        np.testing.assert_allclose(after[never], (held(table) > 0).sum(0) / table.entries, atol=1e-6)


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from(PRUNINGS), st.sampled_from(SMOOTHINGS), st.sampled_from([0.0, 0.01, 2.0]))
def test_correlation_is_the_formula_for_every_pair(
    documents: list[list[int]], pruning: dict[str, int], smoothing: tuple[str, float], unseen: float
) -> None:
    table = counted(documents)
    whole, small = held(table), pruned_if_any_is_left(table, pruning)
    found = small.look_up(TOKENS[:, None], TOKENS, log_of(unseen), *smoothing)
    assert found.dtype == torch.float32
    p_right = np.maximum(whole.sum(0), 1) / max(whole.sum(), 1)
    heard = whole.sum(0) > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        if smoothing[0] == "none":
            r = held(small) / whole.sum(1, keepdims=True) / p_right
            wanted, heard = np.log(np.where(held(small) > 0, r, unseen)), heard | True
        else:
            wanted = np.log(reference(whole, held(small), *smoothing) / p_right)
    np.testing.assert_allclose(found[:, heard], wanted[:, heard], rtol=1e-5, atol=2e-6)
    assert smoothing[0] == "none" or bool(found.isfinite().all())


def test_a_token_that_was_never_on_the_right_is_taken_as_seen_once() -> None:
    """For it p(y | x) / p(y) is 0 / 0 under Kneser and Ney's discount: the limit is that of a token of one pair."""
    documents = [[8, 1, 2, 1, 2, 3], [1, 2, 2, 3, 7]]
    table, discount = counted(documents), 0.4
    found = table.look_up(TOKENS, torch.tensor(8), log_of(0.5), "kneser-ney", discount)
    assert int(table.right_counts()[8]) == 0
    assert int(table.right_counts()[7]) == 1
    like = table.look_up(TOKENS, torch.tensor(7), log_of(0.5), "kneser-ney", discount)
    elsewhere = [x for x in range(VOCAB) if x != 3]  # (3, 7) was seen
    np.testing.assert_allclose(found[elsewhere], like[elsewhere], rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 65_535, 65_536, 70_000])
def test_look_up_finds_the_first_and_the_last_pair_of_any_vocabulary(vocab_size: int) -> None:
    """Keys are 32 bits up to 65,535 tokens, whose last pair must not be taken for the end; 64 above."""
    last = vocab_size - 1
    table = counted([[last, last], [0, 0], [0, last], [0, 0]], vocab_size)
    corners = torch.tensor([0, 0, last, last]), torch.tensor([0, last, 0, last])
    seen = {(last, last), (0, 0), (0, last)}
    for tables in (table, table.pruned(top=1)):
        found = tables.look_up(*corners, log_of(0))
        kept = seen - ({(0, last)} if tables is not table and last else set())
        wanted = [(int(x), int(y)) in kept for x, y in zip(*corners, strict=True)]
        assert found.isfinite().tolist() == wanted
    without = counted([[0, 0]], vocab_size).look_up(*corners, log_of(0))
    assert without.isfinite().tolist() == [(int(x), int(y)) == (0, 0) for x, y in zip(*corners, strict=True)]


def test_a_large_table_says_what_its_dictionary_says() -> None:
    """More entries than a chunk, so that parts of rows and of keys meet, at a width where keys are 64 bits."""
    rng, vocab = np.random.default_rng(0), 66_000
    documents = [(vocab * rng.random(2_000_000) ** 3).astype(np.int64)]
    table = BigramTable.from_documents(documents, vocab)
    assert table.entries > 1 << 20
    assert len(table.chunks()) > 1
    x, y = documents[0][:-1], documents[0][1:]
    keys, counts = np.unique(x * vocab + y, return_counts=True)
    np.testing.assert_array_equal(table.count, counts)
    left, right = np.bincount(x, minlength=vocab), np.bincount(y, minlength=vocab)
    wanted_x, wanted_y = (np.append(known[:500], rng.integers(0, vocab, 500)) for known in (x, y))
    place = np.searchsorted(keys, wanted_x * vocab + wanted_y).clip(max=len(keys) - 1)
    seen = keys[place] == wanted_x * vocab + wanted_y
    with np.errstate(divide="ignore"):
        r = np.where(seen, counts[place] * float(len(x)) / (left[wanted_x] * right[wanted_y]), 0.01)
    found = table.look_up(torch.from_numpy(wanted_x), torch.from_numpy(wanted_y), log_of(0.01))
    np.testing.assert_allclose(found, np.log(r), rtol=1e-5, atol=1e-5)
    after = table.distributions("cpu", 1.0).after(torch.tensor([[0, 1], [vocab - 1, 5]]))
    assert after.shape == (2, 2, vocab)
    np.testing.assert_allclose(after.double().sum(-1), 1, atol=1e-4)
    best = table.distributions("cpu", 1.0).most_likely(torch.arange(vocab))
    for token in (0, 1, 2, 1000):
        assert int(best[token]) == int(table.distributions("cpu", 1.0).after(torch.tensor(token)).argmax())


def test_the_default_discount_is_that_of_the_whole_counts() -> None:
    """n₁ = 3, n₂ = 2: pruning away what was seen once must not change it."""
    table = counted([[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [6, 5], [7, 7]])
    assert default_discount(table) == default_discount(table.pruned(min_count=2)) == 3 / 7
    assert default_discount(counted([[1, 2]])) == default_discount(counted([])) == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_a_gpu_says_the_same_and_never_waits_for_the_host(smoothing: tuple[str, float]) -> None:
    table = counted([np.random.default_rng(1).integers(0, VOCAB, 60).tolist()]).pruned(min_count=2)
    moved, tokens = table.to("cuda"), TOKENS.cuda()
    wanted = table.look_up(TOKENS[:, None], TOKENS, log_of(0.01), *smoothing)
    rows = table.distributions("cuda", 1.0, *smoothing)
    log_unseen = torch.tensor(math.log(0.01), device="cuda")
    moved.look_up(tokens[:, None], tokens, log_unseen, *smoothing), rows.after(tokens), rows.most_likely(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # capturing fails where anything waits
        found = moved.look_up(tokens[:, None], tokens, log_unseen, *smoothing)
        after, best = rows.after(tokens), rows.most_likely(tokens)
    graph.replay()
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6)
    there = table.distributions("cpu", 1.0, *smoothing)
    torch.testing.assert_close(after.cpu(), there.after(TOKENS), rtol=1e-5, atol=1e-6)
    assert torch.equal(best.cpu(), there.most_likely(TOKENS))

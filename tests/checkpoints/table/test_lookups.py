"""Table lookups equal the formulas, with and without pseudo-counts."""

import math

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.table.table import BigramTable
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), max_size=10)
ADD_K = [0.0, 0.01, 0.3]
TOKENS = torch.arange(VOCAB)


def counted(documents: list[list[int]], vocab_size: int = VOCAB) -> BigramTable:
    return BigramTable.from_documents([np.array(document, dtype=np.int64) for document in documents], vocab_size)


def log_of(unseen: float) -> torch.Tensor:
    return torch.tensor(unseen).log()


def held(table: BigramTable) -> np.ndarray:
    """Return the counts of a table as a dense float64 array [V, V]."""
    dense = np.zeros((table.vocab_size,) * 2)
    for x in range(table.vocab_size):
        for entry in range(int(table.row_ptr[x]), int(table.row_ptr[x + 1])):
            dense[x, int(table.col[entry])] = int(table.count[entry])
    return dense


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from(ADD_K), st.sampled_from([0.5, 1.0, 7.0]))
def test_distributions_equal_the_formula(documents: list[list[int]], add_k: float, prior: float) -> None:
    table = counted(documents)
    counts = held(table)
    rows = table.distributions("cpu", prior, add_k)
    actual = rows.after(TOKENS)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.double().sum(-1), 1, atol=2e-6)
    unigram = (table.unigram.numpy() + 1) / (table.unigram.numpy() + 1).sum()
    np.testing.assert_allclose(rows.unigram_V, unigram, rtol=1e-6)
    pseudo_counts = np.full(VOCAB, add_k) if add_k else prior * unigram
    expected = (counts + pseudo_counts) / (counts.sum(1, keepdims=True) + pseudo_counts.sum())
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    best = rows.most_likely(TOKENS).numpy()
    np.testing.assert_allclose(expected[np.arange(VOCAB), best], expected.max(1), rtol=1e-12)
    padded_RV = torch.outer(rows._base_V, rows._spread_V)
    rows._add_padded(padded_RV, TOKENS)
    np.testing.assert_allclose(padded_RV, actual, atol=1e-7)


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from(ADD_K), st.sampled_from([0.0, 0.01, 2.0]))
def test_correlations_equal_the_formula(documents: list[list[int]], add_k: float, unseen: float) -> None:
    table = counted(documents)
    counts = held(table)
    actual = table.look_up(TOKENS[:, None], TOKENS, log_of(unseen), add_k)
    assert actual.dtype == torch.float32
    p_right = np.maximum(counts.sum(0), 1) / max(counts.sum(), 1)
    left = counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        if add_k:
            expected = np.log((counts + add_k) / (left + add_k * VOCAB) / p_right)
        else:
            expected = np.log(np.where(counts > 0, counts / left / p_right, unseen))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)
    assert not add_k or bool(actual.isfinite().all())


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 65_535, 65_536, 70_000])
def test_look_up_finds_the_first_and_the_last_pair_of_any_vocabulary(vocab_size: int) -> None:
    """Keys have 32 bits for up to 65,535 tokens and 64 bits above."""
    last = vocab_size - 1
    table = counted([[last, last], [0, 0], [0, last], [0, 0]], vocab_size)
    corners = torch.tensor([0, 0, last, last]), torch.tensor([0, last, 0, last])
    pairs = {(last, last), (0, 0), (0, last)}
    actual = table.look_up(*corners, log_of(0))
    assert actual.isfinite().tolist() == [(int(x), int(y)) in pairs for x, y in zip(*corners, strict=True)]
    without = counted([[0, 0]], vocab_size).look_up(*corners, log_of(0))
    assert without.isfinite().tolist() == [(int(x), int(y)) == (0, 0) for x, y in zip(*corners, strict=True)]


def test_lookups_of_a_large_table_equal_the_formulas() -> None:
    """The table has more than one chunk and 64-bit keys."""
    rng, vocab = np.random.default_rng(0), 66_000
    documents = [(vocab * rng.random(2_000_000) ** 3).astype(np.int64)]
    table = BigramTable.from_documents(documents, vocab)
    assert table.entries > 1 << 20
    assert len(table.chunks()) > 1
    x, y = documents[0][:-1], documents[0][1:]
    keys, counts = np.unique(x * vocab + y, return_counts=True)
    np.testing.assert_array_equal(table.count, counts)
    left, right = np.bincount(x, minlength=vocab), np.bincount(y, minlength=vocab)
    query_x, query_y = (np.append(known[:500], rng.integers(0, vocab, 500)) for known in (x, y))
    indices = np.searchsorted(keys, query_x * vocab + query_y).clip(max=len(keys) - 1)
    is_known = keys[indices] == query_x * vocab + query_y
    with np.errstate(divide="ignore"):
        r = np.where(is_known, counts[indices] * float(len(x)) / (left[query_x] * right[query_y]), 0.01)
    actual = table.look_up(torch.from_numpy(query_x), torch.from_numpy(query_y), log_of(0.01))
    np.testing.assert_allclose(actual, np.log(r), rtol=1e-5, atol=1e-5)
    after = table.distributions("cpu", 1.0).after(torch.tensor([[0, 1], [vocab - 1, 5]]))
    assert after.shape == (2, 2, vocab)
    np.testing.assert_allclose(after.double().sum(-1), 1, atol=1e-4)
    best = table.distributions("cpu", 1.0).most_likely(torch.arange(vocab))
    for token in (0, 1, 2, 1000):
        assert int(best[token]) == int(table.distributions("cpu", 1.0).after(torch.tensor(token)).argmax())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("add_k", ADD_K)
def test_lookups_on_a_gpu_are_equal_and_do_not_synchronise(add_k: float) -> None:
    table = counted([np.random.default_rng(1).integers(0, VOCAB, 60).tolist()])
    moved, tokens = table.to("cuda"), TOKENS.cuda()
    expected = table.look_up(TOKENS[:, None], TOKENS, log_of(0.01), add_k)
    rows = table.distributions("cuda", 1.0, add_k)
    log_unseen = torch.tensor(math.log(0.01), device="cuda")
    moved.look_up(tokens[:, None], tokens, log_unseen, add_k), rows.after(tokens), rows.most_likely(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # capture fails if an operation synchronises
        actual = moved.look_up(tokens[:, None], tokens, log_unseen, add_k)
        after, best = rows.after(tokens), rows.most_likely(tokens)
    graph.replay()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)
    on_cpu = table.distributions("cpu", 1.0, add_k)
    torch.testing.assert_close(after.cpu(), on_cpu.after(TOKENS), rtol=1e-5, atol=1e-6)
    assert torch.equal(best.cpu(), on_cpu.most_likely(TOKENS))

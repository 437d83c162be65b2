"""Runs of pairs against a plain Counter."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from draftsmith.checkpoints.table import runs as pair_runs
from draftsmith.checkpoints.table.runs import (
    Run,
    check_documents,
    inner_ends,
    key_dtype,
    left_sums,
    merge_runs,
    run_of_keys,
    write_keys,
)
from hypothesis import given, settings
from hypothesis import strategies as st

VOCABULARIES = st.one_of(st.integers(1, 70_000), st.sampled_from([1, 2, 65_536, 65_537, 300_000, 2**31 - 1]))
Corpus = tuple[int, list[list[int]]]


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """A vocabulary and documents that use few of its tokens often, the first and the last among them."""
    vocab_size = draw(VOCABULARIES)
    some = draw(st.lists(st.integers(0, vocab_size - 1), max_size=4))
    token = st.sampled_from(sorted({0, vocab_size - 1, *some}))
    return vocab_size, draw(st.lists(st.lists(token, max_size=30), max_size=10))


def packed(documents: list[list[int]], dtype: str = "int64") -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return np.array([token for document in documents for token in document], dtype=dtype), starts


def count_pairs(tokens: np.ndarray, starts: np.ndarray, vocab_size: int) -> Run:
    """The run of documents' pairs, as `PairCounter` makes it of a buffer."""
    check_documents(tokens, starts, vocab_size)
    keys, ends = np.empty(max(len(tokens) - 1, 0), key_dtype(vocab_size)), inner_ends(starts, len(tokens))
    write_keys(tokens, vocab_size, keys)
    keys[ends] = 0
    return run_of_keys(keys, len(ends))


def brute(documents: list[list[int]], vocab_size: int) -> dict[int, int]:
    pairs = Counter(left * vocab_size + right for document in documents for left, right in pairwise(document))
    return dict(sorted(pairs.items()))


def flat(parts: list[Run]) -> list[tuple[int, int]]:
    return [entry for keys, counts in parts for entry in zip(keys.tolist(), counts.tolist(), strict=True)]


@settings(deadline=None)
@given(corpus=corpora(), data=st.data(), chunk=st.sampled_from([1, 2, 7, 100, 1 << 18]))
def test_runs_in_any_order_merge_to_the_run_of_the_whole(corpus: Corpus, data: st.DataObject, chunk: int) -> None:
    vocab_size, documents = corpus
    shards = [data.draw(st.integers(0, 4)) for _ in documents]
    runs = []
    for shard in data.draw(st.permutations(range(5))):
        mine = [document for document, at in zip(documents, shards, strict=True) if at == shard]
        runs.append(count_pairs(*packed(mine), vocab_size))
    parts = list(merge_runs(runs, vocab_size, chunk))
    wanted = brute(documents, vocab_size)
    assert flat(parts) == list(wanted.items())
    assert all(keys.dtype == key_dtype(vocab_size) and counts.dtype == np.int64 for keys, counts in parts)
    assert all(0 < len(keys) <= chunk for keys, _ in parts) or chunk < 5
    if vocab_size <= 70_000:
        lefts = Counter[int]()
        for key, count in wanted.items():
            lefts[key // vocab_size] += count
        np.testing.assert_array_equal(left_sums(parts, vocab_size), [lefts[token] for token in range(vocab_size)])


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_many_pieces_are_counted_as_one(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of pieces fall between equal keys, and between different ones."""
    rng = np.random.default_rng(0)
    documents = [rng.zipf(1.3, size=size) % vocab_size for size in rng.integers(0, 60, 200)]
    tokens, starts = packed([document.tolist() for document in documents])
    whole = count_pairs(tokens, starts, vocab_size)
    for piece in (1, 2, 3, 64):
        monkeypatch.setattr(pair_runs, "_PIECE", piece)
        for found, wanted in zip(count_pairs(tokens, starts, vocab_size), whole, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("vocab_size", [1000, 100_000, 2**31 - 1])
def test_counts_larger_than_the_key_leaves_room_for_are_summed(vocab_size: int) -> None:
    last = vocab_size**2 - 1
    dtype = key_dtype(vocab_size)
    runs = [(np.array([0, 7, last], dtype=dtype), np.array([1, 2**40, 2**50 + at])) for at in range(3)]
    assert flat(list(merge_runs(runs, vocab_size))) == [(0, 3), (7, 3 * 2**40), (last, 3 * 2**50 + 3)]

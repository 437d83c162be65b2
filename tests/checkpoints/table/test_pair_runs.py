"""Runs of pairs against a plain Counter."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from draftsmith.checkpoints.table import runs as pair_runs
from draftsmith.checkpoints.table.runs import Run, count_pairs, key_dtype, left_sums, merge_runs
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


def laid(documents: list[list[int]], dtype: str = "int64") -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return np.array([token for document in documents for token in document], dtype=dtype), starts


def brute(documents: list[list[int]], vocab_size: int) -> dict[int, int]:
    pairs = Counter(left * vocab_size + right for document in documents for left, right in pairwise(document))
    return dict(sorted(pairs.items()))


def flat(parts: list[Run]) -> list[tuple[int, int]]:
    return [entry for keys, counts in parts for entry in zip(keys.tolist(), counts.tolist(), strict=True)]


@settings(deadline=None)
@given(corpus=corpora(), dtype=st.sampled_from(["int64", "uint32", "int32", ">i4"]))
def test_counts_are_those_of_a_counter(corpus: Corpus, dtype: str) -> None:
    vocab_size, documents = corpus
    keys, counts = count_pairs(*laid(documents, dtype), vocab_size)
    assert flat([(keys, counts)]) == list(brute(documents, vocab_size).items())
    assert keys.dtype == key_dtype(vocab_size)


@settings(deadline=None)
@given(corpus=corpora(), data=st.data(), chunk=st.sampled_from([1, 2, 7, 100, 1 << 18]))
def test_runs_in_any_order_merge_to_the_run_of_the_whole(corpus: Corpus, data: st.DataObject, chunk: int) -> None:
    vocab_size, documents = corpus
    shards = [data.draw(st.integers(0, 4)) for _ in documents]
    runs = []
    for shard in data.draw(st.permutations(range(5))):
        runs.append(count_pairs(*laid([d for d, at in zip(documents, shards, strict=True) if at == shard]), vocab_size))
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
    tokens, starts = laid([document.tolist() for document in documents])
    whole = count_pairs(tokens, starts, vocab_size)
    for piece in (1, 2, 3, 64):
        monkeypatch.setattr(pair_runs, "_PIECE", piece)
        for found, wanted in zip(count_pairs(tokens, starts, vocab_size), whole, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_no_pair_reaches_over_a_border_even_where_its_key_is_zero() -> None:
    keys, counts = count_pairs(np.zeros(7, dtype=np.int32), np.array([0, 1, 1, 4, 4]), 5)
    assert flat([(keys, counts)]) == [(0, 4)]  # 1, 0, 3, 0 and 3 tokens
    assert flat([count_pairs(np.zeros(3, dtype=np.int32), np.array([0, 1, 2]), 5)]) == []
    assert flat([count_pairs(np.zeros(0, dtype=np.int32), np.zeros(2, dtype=np.int64), 5)]) == []


@pytest.mark.parametrize("vocab_size", [1000, 100_000, 2**31 - 1])
def test_counts_larger_than_the_key_leaves_room_for_are_summed(vocab_size: int) -> None:
    last = vocab_size**2 - 1
    dtype = key_dtype(vocab_size)
    runs = [(np.array([0, 7, last], dtype=dtype), np.array([1, 2**40, 2**50 + at])) for at in range(3)]
    assert flat(list(merge_runs(runs, vocab_size))) == [(0, 3), (7, 3 * 2**40), (last, 3 * 2**50 + 3)]


def test_runs_in_mapped_files_are_merged(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    runs, documents = [], []
    for number in range(3):
        documents.append(rng.integers(0, 40, 500).tolist())
        keys, counts = count_pairs(*laid(documents[-1:]), 40)
        np.save(tmp_path / f"{number}-keys.npy", keys)
        np.save(tmp_path / f"{number}-counts.npy", counts)
        runs.append(tuple(np.load(tmp_path / f"{number}-{side}.npy", mmap_mode="r") for side in ("keys", "counts")))
    assert flat(list(merge_runs(runs, 40, chunk=100))) == list(brute(documents, 40).items())


@pytest.mark.parametrize("wrong", [-1, 11, 2**32 + 3, -(2**63)])
def test_a_token_outside_the_vocabulary_is_named_with_its_document(wrong: int) -> None:
    tokens, starts = laid([[1, 2], [], [3, wrong, 4], [5]])
    with pytest.raises(ValueError, match=f"document 2 holds token {wrong}; the vocabulary has 11 tokens"):
        count_pairs(tokens, starts, 11)


@pytest.mark.parametrize(
    ("tokens", "starts", "message"),
    [
        (np.zeros((2, 2), dtype=np.int64), np.array([0]), r"are int64 \[2, 2\], expected one dimension of integers"),
        (np.array([0.5]), np.array([0]), "are float64"),
        (np.array([1, 2]), np.array([0.0]), r"starts are float64 \[1\]"),
        (np.array([1, 2]), np.array([1]), "start at 1 to 1 in 2 tokens; expected ascending starts from 0 to at most 2"),
        (np.array([1, 2]), np.array([0, 3]), "start at 0 to 3 in 2 tokens"),
        (np.array([1, 2, 3]), np.array([0, 2, 1, 2]), "ascending starts"),
        (np.array([1, 2]), np.array([], dtype=np.int64), "0 documents start"),
    ],
)
def test_documents_that_make_no_sense_are_refused(tokens: np.ndarray, starts: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_pairs(tokens, starts, 11)


@pytest.mark.parametrize("vocab_size", [0, -3, 2**31])
def test_vocabularies_out_of_range_are_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}, expected 1 to 2147483647"):
        key_dtype(vocab_size)

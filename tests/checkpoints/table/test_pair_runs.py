"""Runs of pairs against a plain Counter."""

from __future__ import annotations

import numpy as np
import pytest
from draftsmith.checkpoints.table import runs as pair_runs
from draftsmith.checkpoints.table.runs import Run, check_documents, inner_ends, key_dtype, run_of_keys, write_keys


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


def flat(parts: list[Run]) -> list[tuple[int, int]]:
    return [entry for keys, counts in parts for entry in zip(keys.tolist(), counts.tolist(), strict=True)]


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
    assert flat(list(pair_runs.merge_runs(runs, vocab_size))) == [(0, 3), (7, 3 * 2**40), (last, 3 * 2**50 + 3)]

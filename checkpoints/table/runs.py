"""Sorted runs of token pairs (x, y): distinct keys x · V + y in ascending order, and their counts.

Shape letters: V vocabulary, T tokens, D documents, C document ends within the tokens, E entries (distinct pairs),
P one piece of T or E, R rows (left tokens) with entries.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = tuple[NDArray[Any], NDArray[Any]]
Ints = NDArray[np.int64]

MAX_VOCAB = 2**31 - 1
_PIECE = 1 << 17


def key_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of the keys x · V + y of token pairs (x, y): uint32 if V² ≤ 2³², else uint64."""
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {MAX_VOCAB}")
    return np.dtype(np.uint32 if vocab_size**2 <= 2**32 else np.uint64)


def check_documents(tokens_T: NDArray[Any], starts_D: NDArray[Any], vocab_size: int, first: int = 0) -> None:
    """Raise ValueError for invalid tokens or document starts. Error messages number documents from `first`."""
    size = len(tokens_T) if tokens_T.ndim == 1 else -1
    if size < 0 or (size and tokens_T.dtype.kind not in "iu"):
        shape = f"{tokens_T.dtype} {list(tokens_T.shape)}"
        raise ValueError(f"documents from {first} on are {shape}, expected one dimension of integers")
    if (size and not len(starts_D)) or (len(starts_D) and (starts_D[0] != 0 or starts_D[-1] > size)):
        raise ValueError(f"document starts must begin with 0 and end by {size}, got {starts_D[:1]} to {starts_D[-1:]}")
    if not size:
        return
    # As unsigned integers, negative numbers are large, so one comparison detects both.
    unsigned_T = tokens_T.view(np.dtype(f"u{tokens_T.dtype.itemsize}").newbyteorder(tokens_T.dtype.byteorder))
    if int(unsigned_T.max()) >= vocab_size:
        index = int(np.flatnonzero(unsigned_T >= vocab_size)[0])
        document = first + int(np.searchsorted(starts_D, index, side="right")) - 1
        raise ValueError(f"document {document} has token {tokens_T[index]}, but the vocabulary has {vocab_size} tokens")


def inner_ends(starts_D: NDArray[Any], size: int) -> Ints:
    """Return the indices of the last tokens of all documents except the last one, ascending, int64 [C]."""
    return np.unique(starts_D[(starts_D > 0) & (starts_D < size)].astype(np.int64)) - 1


def write_keys(tokens_T: NDArray[Any], vocab_size: int, out_T: NDArray[Any]) -> None:
    """Compute the keys of all T - 1 adjacent token pairs, and store them in `out_T`. Token ids are not checked."""
    dtype = key_dtype(vocab_size)
    for start in range(0, len(out_T), _PIECE):
        keys_P = out_T[start : start + _PIECE]
        tokens_P = tokens_T[start : start + len(keys_P) + 1].astype(np.uint32)
        np.multiply(tokens_P[:-1], dtype.type(vocab_size), out=keys_P, dtype=dtype)
        keys_P += tokens_P[1:]


def run_of_keys(keys_T: NDArray[Any], cross_document: int = 0) -> Run:
    """Sort and count at most 2³² − 1 keys, which are overwritten, and return the distinct keys and their counts.

    `cross_document` is the number of pairs across documents, whose keys are set to 0. It is subtracted from the count
    of key 0, which is cheaper than removing these keys.
    """
    keys_T.sort()
    size, entries, before = len(keys_T), 0, -1
    counts_T = np.empty(size, dtype=np.uint32)  # untouched memory is not allocated
    for start in range(0, size, _PIECE):
        end = min(start + _PIECE, size)
        keys_P = keys_T[start:end]
        if end < size:
            last_P = np.flatnonzero(keys_P != keys_T[start + 1 : end + 1])
        else:
            last_P = np.append(np.flatnonzero(keys_P[:-1] != keys_P[1:]), end - 1 - start)
        if len(last_P):
            after = entries + len(last_P)
            np.subtract(last_P[1:], last_P[:-1], out=counts_T[entries + 1 : after], casting="unsafe")
            counts_T[entries] = last_P[0] + start - before
            # This never overwrites unread keys, since there are at most as many entries as keys read.
            keys_T[entries:after] = keys_P[last_P]
            entries, before = after, int(last_P[-1]) + start
    skip = 0
    if cross_document:
        counts_T[0] -= cross_document
        skip = int(counts_T[0] == 0)
    return keys_T[skip:entries].copy(), counts_T[skip:entries].copy()


def merge_runs(runs: Iterable[tuple[Any, Any]], vocab_size: int, chunk: int = 1 << 18) -> Iterator[Run]:
    """Merge sorted runs, and yield the result in consecutive parts: ascending keys (`key_dtype`) and counts (int64).

    Keys and counts can be any objects that return arrays for slices, such as files. `chunk` entries are merged at
    a time and need about 60 bytes each; the default fits the CPU cache.
    """
    dtype = key_dtype(vocab_size)
    sides = [run for run in runs if len(run[0])]
    starts = [0] * len(sides)
    remaining = sum(len(keys) for keys, _ in sides)
    while remaining:
        size = min(chunk, remaining)
        windows = []
        for number, ((keys, _), start) in enumerate(zip(sides, starts, strict=True)):
            if quota := -(-size * (len(keys) - start) // remaining):
                windows.append((number, keys[start : start + quota]))
        # The windows contain all entries of the runs up to the smallest of their last keys.
        pivot = min(keys_P[-1] for _, keys_P in windows)
        parts = []
        for number, keys_P in windows:
            start, count = starts[number], int(np.searchsorted(keys_P, pivot, side="right"))
            if count:
                parts.append((keys_P[:count], np.asarray(sides[number][1][start : start + count])))
                starts[number] += count
                remaining -= count
        yield _merged(parts, dtype)


def _merged(parts: list[Run], dtype: np.dtype[Any]) -> Run:
    if len(parts) == 1:
        return parts[0][0].astype(dtype), parts[0][1].astype(np.int64)
    keys_E = np.concatenate([keys for keys, _ in parts])
    order_E = np.argsort(keys_E, kind="stable")  # timsort merges the ascending runs
    keys_E = keys_E[order_E]
    counts_E = np.concatenate([counts.astype(np.int64) for _, counts in parts])[order_E]
    last_E = np.append(np.flatnonzero(keys_E[1:] != keys_E[:-1]), len(keys_E) - 1)
    return keys_E[last_E].astype(dtype, copy=False), np.diff(np.cumsum(counts_E)[last_E], prepend=0)


def rows_and_columns(keys_E: NDArray[Any], vocab_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Split keys into left and right tokens, in the dtype of the keys."""
    rows_E = keys_E // keys_E.dtype.type(vocab_size)
    return rows_E, keys_E - rows_E * keys_E.dtype.type(vocab_size)


def add_left_counts(sums_V: Ints, part: Run) -> None:
    """Add the number of pairs of each left token in a non-empty part of a run to `sums_V`."""
    keys_E, counts_E = part
    rows_E, _ = rows_and_columns(keys_E, len(sums_V))
    first_R = np.concatenate(([0], np.flatnonzero(rows_E[1:] != rows_E[:-1]) + 1))
    sums_V[rows_E[first_R].astype(np.int64)] += np.add.reduceat(counts_E, first_R, dtype=np.int64)

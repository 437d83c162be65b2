"""Counts of neighbouring tokens as sorted runs: exact, additive, merged in bounded memory.

A run is two arrays (keys_E, counts_E): the distinct keys x V + y of the pairs (x, y), ascending, and how often each was
seen. Runs of parts of a corpus merge to exactly the run of the whole, in any order.

Letters: V vocabulary, T tokens, D documents, C documents' ends inside the tokens, E entries (distinct pairs), P one
piece of T or E, R rows (left tokens) that have entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = tuple[NDArray[Any], NDArray[Any]]
Ints = NDArray[np.int64]

MAX_VOCAB = 2**31 - 1
_PIECE = 1 << 17
_NARROW = 2**32


def key_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type of keys x V + y: uint32 where V² ≤ 2³², else uint64.

    Raises:
        ValueError: a vocabulary that is empty or has more than 2³¹ − 1 tokens.
    """
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {MAX_VOCAB}")
    return np.dtype(np.uint32 if vocab_size**2 <= _NARROW else np.uint64)


def count_pairs(tokens_T: NDArray[Any], starts_D: NDArray[Any], vocab_size: int) -> Run:
    """The run of the pairs of neighbours within documents; none reaches from a document into the next.

    Args:
        tokens_T: one dimension of integers: the documents, laid end to end.
        starts_D: where each document begins, ascending from 0; documents may be empty.

    Returns:
        keys of `key_dtype` and counts, uint32 (int64 beyond 2³² − 1 tokens).

    Raises:
        ValueError: a token outside the vocabulary (document, token and V are named); starts that contradict the tokens.
    """
    dtype = key_dtype(vocab_size)
    check_documents(tokens_T, starts_D, vocab_size)
    keys_T = np.empty(max(len(tokens_T) - 1, 0), dtype=dtype)
    write_keys(tokens_T, vocab_size, keys_T)
    ends_C = inner_ends(starts_D, len(tokens_T))
    keys_T[ends_C] = 0
    return run_of_keys(keys_T, len(ends_C))


def check_documents(tokens_T: NDArray[Any], starts_D: NDArray[Any], vocab_size: int, first: int = 0) -> None:
    """Raise what `count_pairs` raises; `first` is the number of the first document, for messages."""
    size = len(tokens_T) if tokens_T.ndim == 1 else -1
    if size < 0 or (size and tokens_T.dtype.kind not in "iu"):
        shape = f"{tokens_T.dtype} {list(tokens_T.shape)}"
        raise ValueError(f"document {first} and those after it are {shape}, expected one dimension of integers")
    if starts_D.ndim != 1 or (len(starts_D) and starts_D.dtype.kind not in "iu"):
        shape = f"{starts_D.dtype} {list(starts_D.shape)}"
        raise ValueError(f"the documents' starts are {shape}, expected one dimension of integers")
    ends = (int(starts_D[0]), int(starts_D[-1])) if len(starts_D) else (0, 0)
    if (size and not len(starts_D)) or ends[0] != 0 or ends[1] > size or bool((starts_D[1:] < starts_D[:-1]).any()):
        raise ValueError(
            f"{len(starts_D)} documents start at {ends[0]} to {ends[1]} in {size} tokens; "
            f"expected ascending starts from 0 to at most {size}"
        )
    if not size:
        return
    # Negative numbers are large ones without their sign: one pass finds both.
    unsigned_T = tokens_T.view(np.dtype(f"u{tokens_T.dtype.itemsize}").newbyteorder(tokens_T.dtype.byteorder))
    if int(unsigned_T.max()) >= vocab_size:
        place = int(np.flatnonzero(unsigned_T >= vocab_size)[0])
        document = first + int(np.searchsorted(starts_D, place, side="right")) - 1
        raise ValueError(f"document {document} holds token {tokens_T[place]}; the vocabulary has {vocab_size} tokens")


def inner_ends(starts_D: NDArray[Any], size: int) -> Ints:
    """int64 [C], ascending: places of tokens whose right neighbour belongs to another document."""
    inner_C = starts_D[(starts_D > 0) & (starts_D < size)].astype(np.int64)
    if len(inner_C):
        inner_C = inner_C[
            np.concatenate(([True], inner_C[1:] != inner_C[:-1]))
        ]  # empty documents start where others do
    return inner_C - 1


def write_keys(tokens_T: NDArray[Any], vocab_size: int, out_T: NDArray[Any]) -> None:
    """Put the keys of all T - 1 neighbours into `out_T`; the tokens are known to be in the vocabulary."""
    dtype = key_dtype(vocab_size)
    for start in range(0, len(out_T), _PIECE):
        keys_P = out_T[start : start + _PIECE]
        tokens_P = tokens_T[start : start + len(keys_P) + 1].astype(np.uint32)
        np.multiply(tokens_P[:-1], dtype.type(vocab_size), out=keys_P, dtype=dtype)
        keys_P += tokens_P[1:]


def run_of_keys(keys_T: NDArray[Any], strangers: int = 0) -> Run:
    """The run of keys in any order, which are overwritten on the way; `strangers` of them are 0 and do not count.

    Overwriting what is no pair with 0, and taking it off that key's count, is cheaper than leaving it out.
    """
    keys_T.sort()
    size, entries, before = len(keys_T), 0, -1
    # Memory that is never touched costs nothing.
    counts_T = np.empty(size, dtype=np.uint32 if size < _NARROW else np.int64)
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
            # Never beyond what has been read: there are no more keys than tokens before them.
            keys_T[entries:after] = keys_P[last_P]
            entries, before = after, int(last_P[-1]) + start
    skip = 0
    if strangers:
        counts_T[0] -= strangers
        skip = int(counts_T[0] == 0)
    return keys_T[skip:entries].copy(), counts_T[skip:entries].copy()


def merge_runs(runs: Iterable[tuple[Any, Any]], vocab_size: int, chunk: int = 1 << 18) -> Iterator[Run]:
    """The run of everything together, in consecutive parts of ascending keys.

    Args:
        runs: any number of runs. Instead of arrays they may be anything with a length that gives arrays for slices,
            such as memory-mapped or other files: slices are taken in ascending order, none longer than needed.
        chunk: entries that are merged at a time; memory is about 60 bytes an entry of it. With the default it fits
            a processor's cache, so that larger ones are not faster.

    Yields:
        keys of `key_dtype`, counts int64; their sum over all parts is that of all runs.
    """
    dtype = key_dtype(vocab_size)
    sides = [run for run in runs if len(run[0])]
    places = [0] * len(sides)
    left = sum(len(keys) for keys, _ in sides)
    while left:
        size = min(chunk, left)
        windows = []
        for number, ((keys, _), at) in enumerate(zip(sides, places, strict=True)):
            if quota := -(-size * (len(keys) - at) // left):
                windows.append((number, keys[at : at + quota]))
        # The least of the windows' last keys: up to it, everything of every run lies in its window.
        pivot = min(keys_P[-1] for _, keys_P in windows)
        parts = []
        for number, keys_P in windows:
            at, taken = places[number], int(np.searchsorted(keys_P, pivot, side="right"))
            if taken:
                parts.append((keys_P[:taken], np.asarray(sides[number][1][at : at + taken])))
                places[number] += taken
                left -= taken
        yield _merged(parts, dtype)


def _merged(parts: list[Run], dtype: np.dtype[Any]) -> Run:
    """One run of runs that fit memory."""
    if len(parts) == 1:
        return parts[0][0].astype(dtype), parts[0][1].astype(np.int64)
    first = min(int(keys[0]) for keys, _ in parts)
    key_bits = (max(int(keys[-1]) for keys, _ in parts) - first).bit_length()
    count_bits = max(int(counts.max()) for _, counts in parts).bit_length()
    if key_bits + count_bits > 64:
        return _merged_by_order(parts, dtype)
    # A key and its count in one number: sorting those moves both, and sees ascending runs, which it merges.
    packed_E = np.concatenate([keys for keys, _ in parts]).astype(np.uint64, copy=False)
    packed_E -= np.uint64(first)
    packed_E <<= np.uint64(count_bits)
    packed_E |= np.concatenate([counts.astype(np.uint64) for _, counts in parts])
    packed_E.sort(kind="stable")
    counts_E = (packed_E & np.uint64((1 << count_bits) - 1)).view(np.int64)
    packed_E >>= np.uint64(count_bits)
    return _summed(packed_E, counts_E, dtype, first)


def _merged_by_order(parts: list[Run], dtype: np.dtype[Any]) -> Run:
    """`_merged` where key and count do not fit 64 bits together."""
    keys_E, counts_E = (np.concatenate(side) for side in zip(*parts, strict=True))
    order_E = np.argsort(keys_E, kind="stable")
    return _summed(keys_E[order_E], counts_E[order_E].astype(np.int64), dtype, 0)


def _summed(sorted_E: NDArray[Any], counts_E: Ints, dtype: np.dtype[Any], first: int) -> Run:
    last_E = np.append(np.flatnonzero(sorted_E[1:] != sorted_E[:-1]), len(sorted_E) - 1)
    sums_E = np.cumsum(counts_E)[last_E]
    sums_E[1:] -= sums_E[:-1].copy()
    keys_E = sorted_E[last_E].astype(dtype)
    keys_E += dtype.type(first)
    return keys_E, sums_E


def left_sums(parts: Iterable[Run], vocab_size: int) -> Ints:
    """int64 [V]: how often each token is the left of a pair, from parts of a run in any order."""
    sums_V = np.zeros(vocab_size, dtype=np.int64)
    for keys_E, counts_E in parts:
        if len(keys_E):
            rows_E = keys_E // key_dtype(vocab_size).type(vocab_size)
            first_R = np.concatenate(([0], np.flatnonzero(rows_E[1:] != rows_E[:-1]) + 1))
            sums_V[rows_E[first_R].astype(np.int64)] += np.add.reduceat(counts_E, first_R, dtype=np.int64)
    return sums_V

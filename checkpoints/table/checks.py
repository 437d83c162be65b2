"""Reading tables of counts, and refusing those that contradict themselves, at the speed of reading them once.

Letters: V vocabulary, E entries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from ..storage.safe_read import UNREADABLE
from .runs import Ints

DTYPES = {"row_ptr": "I64", "col": "I32", "count": "I32", "unigram": "I64"}
MARGINALS = {"left": "I64", "right": "I64"}
_PRUNING = ("pairs", "entries", "seen_once", "seen_twice")
_STORED = {"I64": "<i8", "I32": "<i4"}
_CHUNK = 1 << 20


def read_arrays(path: Path, prefix: str = "") -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata of `table.safetensors`, and tensors as arrays that lie in the file; all their names begin with `prefix`.
    Raises ValueError: no file, a truncated or damaged one, one that lacks tensors, or tensors of other types."""
    if not path.is_file():
        raise ValueError(f"there is no table at {path}")
    try:
        with safe_open(path, framework="np"), path.open("rb") as opened:  # which is whole, then
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except UNREADABLE as error:
        held = f"{path.stat().st_size} bytes"
        raise ValueError(f"{path} ({held}) is not a safetensors file, or not the whole of one: {error}") from error
    every = header.get("__metadata__", {}).items()
    metadata = {name.removeprefix(prefix): text for name, text in every if name.startswith(prefix)}
    wanted = DTYPES | (MARGINALS if "pruning" in metadata else {})
    if missing := [name for name in wanted if prefix + name not in header]:
        raise ValueError(f"{path} is not a table: it lacks {', '.join(missing)}")
    arrays: dict[str, NDArray[Any]] = {}
    for name, stored in wanted.items():
        entry = header[prefix + name]
        if entry["dtype"] != stored or len(entry["shape"]) != 1:
            raise ValueError(f"{path}: {name} is {entry['dtype']} {entry['shape']}, expected one dimension of {stored}")
        dtype, start, (length,) = np.dtype(_STORED[stored]), 8 + size + entry["data_offsets"][0], entry["shape"]
        # what is written to them, which torch asks for, would not reach the file; nothing can be mapped of no bytes
        arrays[name] = np.memmap(path, dtype, "c", start, (length,)) if length else np.zeros(0, dtype)
    return metadata, arrays


def check_csr(row_ptr: Ints, col: NDArray[np.int32], count: NDArray[np.int32], unigram: Ints) -> None:
    """ValueError, naming both sides, for arrays that are no table of counts."""
    vocab_size, entries = len(unigram), len(col)
    if not vocab_size or len(row_ptr) != vocab_size + 1:
        raise ValueError(f"row_ptr has {len(row_ptr)} entries for {vocab_size} tokens, expected {vocab_size + 1}")
    if len(count) != entries:
        raise ValueError(f"there are {len(count)} counts for {entries} columns")
    ends = (int(row_ptr[0]), int(row_ptr[-1]))
    if ends != (0, entries) or int(np.diff(row_ptr).min()) < 0:
        raise ValueError(f"row_ptr runs from {ends[0]} to {ends[1]}, expected to ascend from 0 to {entries}")
    if int(unigram.min()) < 0:
        raise ValueError(f"unigram holds {int(unigram.min())}, expected at least 0")
    for start in range(0, entries, _CHUNK):  # with one more column, where there is one
        _check_entries(row_ptr, col[start : start + _CHUNK + 1], count[start : start + _CHUNK], start)


def _check_entries(row_ptr: Ints, col: NDArray[np.int32], count: NDArray[np.int32], start: int) -> None:
    vocab_size, low, high = len(row_ptr) - 1, int(col.min()), int(col.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"col holds token {low if low < 0 else high}, the vocabulary has {vocab_size} tokens")
    if int(count.min()) < 1:
        raise ValueError(f"count holds {int(count.min())}, expected at least 1")
    # There are no more falls than rows, so that looking each up costs little.
    falls = np.flatnonzero(col[1:] <= col[:-1]) + (start + 1)
    inside = falls[row_ptr[np.searchsorted(row_ptr, falls)] != falls]
    if len(inside):
        index = int(inside[0]) - start
        row = int(np.searchsorted(row_ptr, inside[0], side="right")) - 1
        raise ValueError(f"columns do not ascend in row {row}: {int(col[index - 1])} and {int(col[index])} follow")


def check_marginals(kept_left: Ints, left: Ints, right: Ints, pruning: Any) -> None:
    """ValueError, naming both sides, for marginals that cannot be those of the whole counts of a pruned table."""
    if not isinstance(pruning, dict) or any(type(pruning.get(name)) is not int for name in _PRUNING):
        raise ValueError(f"its pruning says {pruning!r}, expected a dictionary with numbers for {', '.join(_PRUNING)}")
    for side, sums_V in (("left", left), ("right", right)):
        if len(sums_V) != len(kept_left):
            raise ValueError(f"{side} has {len(sums_V)} counts for {len(kept_left)} tokens")
        if int(sums_V.min()) < 0:
            raise ValueError(f"{side} holds {int(sums_V.min())}, expected at least 0")
        if int(sums_V.sum()) != pruning["pairs"]:
            raise ValueError(f"{side} adds up to {int(sums_V.sum())}, the whole counts had {pruning['pairs']} pairs")
    if bool((kept_left > left).any()):
        row = int((kept_left > left).argmax())
        raise ValueError(f"row {row} holds {int(kept_left[row])} pairs, of {int(left[row])} in the whole counts")

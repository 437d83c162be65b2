"""Writing `table.safetensors` from a stream: a table of any size in the memory of one part of it.

Letters: V vocabulary, E entries (distinct pairs), P the entries of one part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..storage.atomic import atomic_file
from .runs import Ints, Run, key_dtype, rows_and_columns

MAX_COUNT = 2**31 - 1
_COPY = 1 << 24


def write_table(
    path: Path,
    vocab_size: int,
    parts: Iterable[Run],
    unigram_V: Ints,
    *,
    left_V: Ints | None = None,
    right_V: Ints | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a table as one safetensors file, whole and on the disk or not at all; equal content gives equal bytes.

    Tensors: row_ptr int64 [V + 1], unigram int64 [V], col int32 [E], count int32 [E], and in pruned tables left and
    right, int64 [V], the sums of the whole counts' rows and columns. Their order in the file is safetensors' own.
    `parts` are as `merge_runs` yields them, `metadata` stands beside `format` and `vocab_size`.

    Raises ValueError: a pair seen more often than an int32 can hold; counts for another vocabulary; OSError: a full
    disk.
    """
    key_dtype(vocab_size)
    sums = {"left": left_V, "right": right_V, "unigram": unigram_V}
    for name, counts_V in sums.items():
        if counts_V is not None and counts_V.shape != (vocab_size,):
            raise ValueError(f"{name} is {list(counts_V.shape)}, expected one count for each of {vocab_size} tokens")
    texts = {"format": "pt", "vocab_size": str(vocab_size)} | dict(metadata or {})
    with atomic_file(path) as out, TemporaryFile(dir=path.parent) as aside:
        _stream(out, aside, vocab_size, parts, sums, texts)


def _stream(
    out: IO[bytes],
    aside: IO[bytes],
    vocab_size: int,
    parts: Iterable[Run],
    sums: Mapping[str, Ints | None],
    texts: Mapping[str, str],
) -> None:
    """Columns are written as they come; counts go to a file aside until the number of entries is known."""
    wide = {name: vocab_size for name, counts_V in sums.items() if counts_V is not None} | {"row_ptr": vocab_size + 1}
    # Room for the header of any number of entries: its length must not depend on what is yet to come.
    room = len(_header(wide, 10**18, texts, 0))
    out.seek(room + 8 * sum(wide.values()))
    row_ptr = np.zeros(vocab_size + 1, dtype=np.int64)
    entries, last = 0, -1
    for keys_P, counts_P in parts:
        if not len(keys_P):
            continue
        assert int(keys_P[0]) > last, "parts of a run must ascend"
        assert bool((keys_P[1:] > keys_P[:-1]).all()), "keys of a run must ascend"
        last = int(keys_P[-1])
        assert last < vocab_size**2, (last, vocab_size)
        check_counts(keys_P, counts_P, vocab_size)
        rows_P, columns_P = rows_and_columns(keys_P, vocab_size)
        first = int(rows_P[0])
        in_row = np.bincount((rows_P - rows_P[0]).astype(np.int64))
        row_ptr[first + 1 : first + 1 + len(in_row)] += in_row
        write_array(out, columns_P.astype("<i4"))
        write_array(aside, counts_P.astype("<i4"))
        entries += len(keys_P)
    aside.seek(0)
    shutil.copyfileobj(aside, out, _COPY)
    out.seek(0)
    out.write(_header(wide, entries, texts, room))
    np.cumsum(row_ptr, out=row_ptr)
    for name in sorted(wide):
        write_array(out, (row_ptr if name == "row_ptr" else np.asarray(sums[name])).astype("<i8"))


def _header(wide: Mapping[str, int], entries: int, texts: Mapping[str, str], room: int) -> bytes:
    """The head of a safetensors file: eight bytes of length, then JSON, filled up with spaces to `room` bytes."""
    described: dict[str, Any] = {"__metadata__": dict(sorted(texts.items()))}
    at = 0
    sizes = {name: ("I64", 8, wide[name]) for name in sorted(wide)}
    sizes |= dict.fromkeys(("col", "count"), ("I32", 4, entries))
    for name, (dtype, itemsize, size) in sizes.items():
        end = at + size * itemsize
        described[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    length = max(room - 8, -(-len(text) // 8) * 8)
    return length.to_bytes(8, "little") + text.ljust(length)


def check_counts(keys_P: NDArray[Any], counts_P: NDArray[Any], vocab_size: int) -> None:
    """Raise a ValueError that names the pair where a count is larger than a table can hold."""
    worst = int(counts_P.argmax())
    if int(counts_P[worst]) > MAX_COUNT:
        left, right = divmod(int(keys_P[worst]), vocab_size)
        raise ValueError(
            f"the pair ({left}, {right}) was seen {int(counts_P[worst])} times; a table holds counts up to {MAX_COUNT}"
        )
    assert int(counts_P.min()) > 0, "a run holds pairs that were seen"


def write_array(out: IO[bytes], array: NDArray[Any]) -> None:
    """The array's bytes, without a copy of them."""
    if len(array):
        out.write(np.ascontiguousarray(array).data.cast("B"))

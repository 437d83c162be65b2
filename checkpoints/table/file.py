"""Streaming writer of `table.safetensors`, which keeps only one part of the table in memory.

Shape letters: V vocabulary, E entries (distinct pairs), P entries of one part.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..storage.atomic import atomic_file
from .runs import Ints, Run, key_dtype, rows_and_columns

MAX_COUNT = 2**31 - 1
_COPY = 1 << 24


def write_table(path: Path, vocab_size: int, parts: Iterable[Run], unigram_V: Ints) -> None:
    """Write a bigram table atomically to a safetensors file. Equal tables give identical files.

    The tensors are row_ptr int64 [V + 1], unigram int64 [V], col int32 [E] and count int32 [E]. `parts` are consecutive
    parts of the sorted keys and their counts, as `merge_runs` yields them. The counts of the tokens, `unigram_V`, are
    read after the last part.

    Raises ValueError if a count exceeds int32, or the counts are for a different vocabulary size.
    """
    key_dtype(vocab_size)
    if unigram_V.shape != (vocab_size,):
        raise ValueError(f"unigram is {list(unigram_V.shape)}, expected one count for each of {vocab_size} tokens")
    # Reserve space for the header, since the number of entries is not known yet.
    room = len(_header(vocab_size, 10**18, 0))
    row_ptr, entries = np.zeros(vocab_size + 1, dtype=np.int64), 0
    with atomic_file(path) as out, TemporaryFile(dir=path.parent) as counts:
        out.seek(room + 8 * (2 * vocab_size + 1))
        for keys_P, counts_P in parts:
            if not len(keys_P):
                continue
            check_counts(keys_P, counts_P, vocab_size)
            rows_P, columns_P = rows_and_columns(keys_P, vocab_size)
            first = int(rows_P[0])
            in_row = np.bincount((rows_P - rows_P[0]).astype(np.int64))
            row_ptr[first + 1 : first + 1 + len(in_row)] += in_row
            write_array(out, columns_P.astype("<i4"))
            write_array(counts, counts_P.astype("<i4"))
            entries += len(keys_P)
        counts.seek(0)
        shutil.copyfileobj(counts, out, _COPY)
        out.seek(0)
        out.write(_header(vocab_size, entries, room))
        write_array(out, np.cumsum(row_ptr).astype("<i8"))
        write_array(out, unigram_V.astype("<i8"))


def _header(vocab_size: int, entries: int, room: int) -> bytes:
    """Return the safetensors header of a table with `entries` pairs, padded with spaces to `room` bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", "vocab_size": str(vocab_size)}}
    sizes = {"row_ptr": ("I64", 8, vocab_size + 1), "unigram": ("I64", 8, vocab_size)}
    sizes |= dict.fromkeys(("col", "count"), ("I32", 4, entries))
    end = 0
    for name, (dtype, itemsize, size) in sizes.items():
        start, end = end, end + size * itemsize
        described[name] = {"dtype": dtype, "shape": [size], "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    length = max(room - 8, -(-len(text) // 8) * 8)
    return length.to_bytes(8, "little") + text.ljust(length)


def check_counts(keys_P: NDArray[Any], counts_P: NDArray[Any], vocab_size: int) -> None:
    """Raise a ValueError that names the token pair if a count exceeds `MAX_COUNT`."""
    worst = int(counts_P.argmax())
    if int(counts_P[worst]) > MAX_COUNT:
        left, right = divmod(int(keys_P[worst]), vocab_size)
        raise ValueError(f"the pair ({left}, {right}) has the count {int(counts_P[worst])}, maximum {MAX_COUNT}")


def write_array(out: IO[bytes], array: NDArray[Any]) -> None:
    """Write the bytes of an array to a file without copying them."""
    if len(array):
        out.write(np.ascontiguousarray(array).data.cast("B"))

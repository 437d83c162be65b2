"""Runs of counted pairs as files, which count once the index of their folder, replaced in one step, names them.

Letters: V vocabulary, E entries (distinct pairs), N some numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.atomic import atomic_text, errors_named, finish_file
from ...checkpoints.storage.safe_read import load_json
from ...checkpoints.table.file import check_counts, write_array, write_table
from ...checkpoints.table.runs import Ints, Run, key_dtype, left_sums, merge_runs

INDEX = "counted.json"
_COPY = 1 << 24
_CHUNK = 1 << 18
_CHUNK_OF_RUN = 1 << 11


class FileArray:
    """One dimension of numbers in a file. Slices are read, not mapped: a mapped file would count as memory in use."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, length: int) -> None:
        self._path, self._dtype, self._offset, self._length = path, dtype, offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: slice) -> NDArray[Any]:
        start, end, _ = wanted.indices(self._length)
        offset = self._offset + start * self._dtype.itemsize
        return np.fromfile(self._path, dtype=self._dtype, count=max(end - start, 0), offset=offset)


FileRun = tuple[FileArray, FileArray]
"""A run whose keys and counts are read slice by slice."""


def write_run(path: Path, vocab_size: int, parts: Iterable[Run]) -> int:
    """Write a run as a file: its keys, then its counts as uint32; returns its size."""
    try:
        with errors_named(path), path.open("wb+") as out, TemporaryFile(dir=path.parent) as counts:
            for keys_E, counts_E in parts:
                check_counts(keys_E, counts_E, vocab_size)
                write_array(out, keys_E)
                write_array(counts, counts_E.astype(np.uint32))
            counts.seek(0)
            shutil.copyfileobj(counts, out, _COPY)
            finish_file(out)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def open_run(path: Path, vocab_size: int) -> FileRun:
    """What `write_run` wrote, as arrays that are read slice by slice."""
    dtype = key_dtype(vocab_size)
    entries = path.stat().st_size // (dtype.itemsize + 4)
    keys = FileArray(path, dtype, 0, entries)
    return keys, FileArray(path, np.dtype(np.uint32), entries * dtype.itemsize, entries)


def read_index(folder: Path, vocab_size: int) -> dict[str, Any] | None:
    """What counts in a folder; None where nothing was spilled. ValueError where a file that it names is not whole."""
    path, advice = folder / INDEX, f"delete {folder} to count again"
    if not path.is_file():
        return None
    try:
        index = load_json(path, "vocab_size", "runs", "place", "tokens", "documents", "ends")
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from error
    if index["vocab_size"] != vocab_size:
        raise ValueError(f"{folder} holds counts for {index['vocab_size']} tokens, this vocabulary has {vocab_size}")
    for wanted in index["runs"]:
        file = folder / wanted["name"]
        size = file.stat().st_size if file.is_file() else 0
        if size != wanted["bytes"]:
            raise ValueError(f"{file} is damaged: it has {size} bytes, {INDEX} has {wanted['bytes']}; {advice}")
    return index


def write_index(
    folder: Path, vocab_size: int, runs: list[dict[str, Any]], ends_V: Ints, progress: dict[str, Any]
) -> None:
    """Make these runs and ends of documents those that count, in one step, and delete what no longer does."""
    index = {"vocab_size": vocab_size} | progress | {"runs": runs, "ends": ends_V.tolist()}
    atomic_text(folder / INDEX, json.dumps(index) + "\n")
    remove_leftovers(folder, index)


def remove_leftovers(folder: Path, index: dict[str, Any] | None) -> None:
    """Delete runs that the index does not name."""
    known = {run["name"] for run in index["runs"]} if index else set()
    for path in folder.glob("run-*"):
        if path.name not in known:
            path.unlink(missing_ok=True)


def merge_counts(folders: Sequence[Path], vocab_size: int, path: Path) -> tuple[int, int]:
    """Merge what finished counters left in their folders into a table's file; returns its tokens and documents. Raises
    ValueError: counts of another vocabulary; files that are missing or damaged; they are named."""
    found = [(folder, index) for folder in folders if (index := read_index(folder, vocab_size)) is not None]
    runs = [open_run(folder / run["name"], vocab_size) for folder, index in found for run in index["runs"]]
    tokens, documents = (sum(index[key] for _, index in found) for key in ("tokens", "documents"))
    unigram_V = sum((np.array(index["ends"]) for _, index in found), np.zeros(vocab_size, np.int64))

    def parts() -> Iterator[Run]:
        for part in merge_runs(runs, vocab_size, max(_CHUNK, _CHUNK_OF_RUN * len(runs))):
            np.add(unigram_V, left_sums([part], vocab_size), out=unigram_V)
            yield part
        if (counted := int(unigram_V.sum())) != tokens:
            raise ValueError(f"{', '.join(map(str, folders))}: {counted} tokens are there, {tokens} were counted")

    write_table(path, vocab_size, parts(), unigram_V)  # which writes them behind the last part
    return tokens, documents

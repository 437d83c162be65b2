"""Runs of counted pairs as files, which count once the index of their folder, replaced in one step, names them.

Letters: V vocabulary, E entries (distinct pairs), N some numbers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.atomic import atomic_text, errors_named, finish_file
from ...checkpoints.table.file import check_counts, write_array
from ...checkpoints.table.runs import Ints, Run, key_dtype

INDEX = "counted.json"
_FORMAT = 1
_COPY = 1 << 24


class FileArray:
    """One dimension of numbers in a file. Slices are read, not mapped: a mapped file would count as memory in use."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, length: int) -> None:
        self._path, self._dtype, self._offset, self._length = path, dtype, offset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, wanted: slice) -> NDArray[Any]:
        part = self.part(*wanted.indices(self._length)[:2])
        found: NDArray[Any] = np.fromfile(self._path, dtype=self._dtype, count=len(part), offset=part._offset)
        if len(found) != len(part):
            raise ValueError(f"{self._path} is cut short: {len(found)} of {len(part)} numbers are there")
        return found

    def part(self, start: int, end: int) -> FileArray:
        """The numbers from `start` to `end`, not yet read."""
        return FileArray(self._path, self._dtype, self._offset + start * self._dtype.itemsize, max(end - start, 0))

    def below(self, limits_N: Ints) -> Ints:
        """How many of these ascending numbers are smaller than each limit, at least 0."""
        counts_N = np.zeros(len(limits_N), dtype=np.int64)
        if self._length:
            mapped: NDArray[Any] = np.memmap(self._path, self._dtype, "r", self._offset, (self._length,))
            some_N = limits_N > 0
            # Not above the last number that is smaller: one more than the type's largest is a limit as well.
            last_N = (limits_N[some_N] - 1).astype(self._dtype)
            counts_N[some_N] = np.searchsorted(mapped, last_N, side="right")
        return counts_N


FileRun = tuple[FileArray, FileArray]
"""A run whose keys and counts are read slice by slice."""


def write_run(path: Path, vocab_size: int, parts: Iterable[Run]) -> dict[str, Any]:
    """Write a run as a file: its keys, then its counts as uint32; returns its entries, bytes and sha256."""
    entries, aside = 0, path.with_name(f"{path.name}.counts")
    try:
        with errors_named(path), path.open("wb+") as out, aside.open("wb+") as counts:
            for keys_E, counts_E in parts:
                check_counts(keys_E, counts_E, vocab_size)
                write_array(out, keys_E)
                write_array(counts, counts_E.astype(np.uint32))
                entries += len(keys_E)
            counts.seek(0)
            shutil.copyfileobj(counts, out, _COPY)
            finish_file(out)
            out.seek(0)
            digest = hashlib.file_digest(out, "sha256").hexdigest()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        aside.unlink(missing_ok=True)
    return {"entries": entries, "bytes": path.stat().st_size, "sha256": digest}


def open_run(path: Path, vocab_size: int) -> FileRun:
    """What `write_run` wrote, as arrays that are read slice by slice."""
    dtype = key_dtype(vocab_size)
    size = path.stat().st_size
    entries, rest = divmod(size, dtype.itemsize + 4)
    if rest:
        raise ValueError(f"{path} is no run for {vocab_size} tokens: it has {size} bytes")
    keys = FileArray(path, dtype, 0, entries)
    return keys, FileArray(path, np.dtype(np.uint32), entries * dtype.itemsize, entries)


def new_name(kind: str) -> str:
    """A name that no other process gives, not even one that is left over from a killed launch and still writing."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def read_index(folder: Path, vocab_size: int, check: bool) -> dict[str, Any] | None:
    """What counts in a folder; None where nothing was spilled. With `check` hashes are compared."""
    path, advice = folder / INDEX, f"delete {folder} to count again"
    if not path.is_file():
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; {advice}") from error
    if index.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {index.get('format')!r}, this draftsmith reads {_FORMAT}")
    if index["vocab_size"] != vocab_size:
        raise ValueError(f"{folder} holds counts for {index['vocab_size']} tokens, this vocabulary has {vocab_size}")
    for wanted in [*index["runs"], index["ends"]]:
        file = folder / wanted["name"]
        if not file.is_file():
            raise ValueError(f"{file} is missing, and {INDEX} counts it; {advice}")
        if (size := file.stat().st_size) != wanted["bytes"]:
            raise ValueError(f"{file} is damaged: it has {size} bytes, {INDEX} has {wanted['bytes']}; {advice}")
        if check and (digest := _digest(file)) != wanted["sha256"]:
            raise ValueError(f"{file} is damaged: its sha256 is {digest}, {INDEX} has {wanted['sha256']}; {advice}")
    return index


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ends(folder: Path, index: dict[str, Any] | None, vocab_size: int) -> Ints:
    """int64 [V]: how often each token was the last of a document."""
    if index is None:
        return np.zeros(vocab_size, dtype=np.int64)
    return np.fromfile(folder / index["ends"]["name"], dtype="<i8").astype(np.int64)


def write_index(
    folder: Path, vocab_size: int, runs: list[dict[str, Any]], ends_V: Ints, progress: dict[str, Any]
) -> None:
    """Make these runs and ends the ones that count, in one step, and delete what no longer does."""
    content = ends_V.astype("<i8").tobytes()
    path = folder / new_name("ends")
    try:
        with errors_named(path), path.open("wb") as out:
            out.write(content)
            finish_file(out)
        ends = {"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        index = {"format": _FORMAT, "vocab_size": vocab_size} | progress | {"runs": runs, "ends": ends}
        atomic_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    remove_leftovers(folder, index)


def remove_leftovers(folder: Path, index: dict[str, Any] | None) -> None:
    """Delete files of counting that the index does not name."""
    known = {file["name"] for file in [*index["runs"], index["ends"]]} if index else set()
    for path in [*folder.glob("run-*"), *folder.glob("ends-*")]:
        if path.name not in known:
            path.unlink(missing_ok=True)

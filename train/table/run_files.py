"""Runs of counted pairs as files, and the index of a folder that says which of them count.

A folder is whole at any time: files are written under names of their own, and count once the index, replaced in one
step, names them with their hashes. What it does not name is left over from a process that was killed.

Letters: V vocabulary, E entries (distinct pairs), N some numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.atomic import errors_named, finish_file, sync
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

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, end, _ = part.indices(self._length)
        size = max(end - start, 0)
        offset = self._offset + start * self._dtype.itemsize
        found: NDArray[Any] = np.fromfile(self._path, dtype=self._dtype, count=size, offset=offset)
        if len(found) != size:
            raise ValueError(f"{self._path} is cut short: {len(found)} of {size} numbers are there")
        return found

    def part(self, start: int, end: int) -> FileArray:
        """The numbers from `start` to `end`, not yet read."""
        return FileArray(self._path, self._dtype, self._offset + start * self._dtype.itemsize, end - start)

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
    """Write a run as a file: its keys, then its counts as uint32; returns its entries, bytes and sha256.

    Raises:
        ValueError: a pair seen more often than a table can hold.
        OSError: the disk is full, or the like; names the path, at which nothing is left.
    """
    digest, entries = hashlib.sha256(), 0
    aside = path.with_name(f"{path.name}.counts")
    try:
        with errors_named(path), path.open("wb") as out, aside.open("wb+") as counts:
            for keys_E, counts_E in parts:
                check_counts(keys_E, counts_E, vocab_size)
                write_array(out, keys_E)
                digest.update(keys_E.data.cast("B"))
                write_array(counts, counts_E.astype(np.uint32))
                entries += len(keys_E)
            counts.seek(0)
            while piece := counts.read(_COPY):
                out.write(piece)
                digest.update(piece)
            finish_file(out)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        aside.unlink(missing_ok=True)
    size = entries * (key_dtype(vocab_size).itemsize + 4)
    return {"entries": entries, "bytes": size, "sha256": digest.hexdigest()}


def open_run(path: Path, vocab_size: int) -> FileRun:
    """What `write_run` wrote, as arrays that are read slice by slice.

    Raises:
        ValueError: the file's size is not that of a run.
    """
    dtype = key_dtype(vocab_size)
    size = path.stat().st_size
    entries, rest = divmod(size, dtype.itemsize + 4)
    if rest:
        raise ValueError(f"{path} is no run for {vocab_size} tokens: it has {size} bytes")
    keys = FileArray(path, dtype, 0, entries)
    counts = FileArray(path, np.dtype(np.uint32), entries * dtype.itemsize, entries)
    return keys, counts


def new_name(kind: str) -> str:
    """A name that no other process gives, not even one that is left over from a killed one and still writing."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def read_index(folder: Path, vocab_size: int, check: bool) -> dict[str, Any] | None:
    """What counts in a folder; None where nothing was spilled. With `check` the files are compared with their hashes.

    Raises:
        ValueError: counts of another vocabulary, or files that are missing or damaged; they are named.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete {folder} to count anew") from error
    if index.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {index.get('format')!r}, this draftsmith reads {_FORMAT}")
    if index["vocab_size"] != vocab_size:
        raise ValueError(f"{folder} holds counts for {index['vocab_size']} tokens, this vocabulary has {vocab_size}")
    for file in [*index["runs"], index["ends"]]:
        _check_file(folder / file["name"], file, check)
    return index


def _check_file(path: Path, wanted: dict[str, Any], check: bool) -> None:
    found = path.stat().st_size if path.is_file() else None
    again = f"delete {path.parent} to count anew"
    if found is None:
        raise ValueError(f"{path} is missing, and {INDEX} counts it; {again}")
    if found != wanted["bytes"]:
        raise ValueError(f"{path} is damaged: it has {found} bytes, {INDEX} says {wanted['bytes']}; {again}")
    if not check:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted["sha256"]:
        raise ValueError(f"{path} is damaged: its sha256 is {digest}, {INDEX} says {wanted['sha256']}; {again}")


def read_ends(folder: Path, index: dict[str, Any] | None, vocab_size: int) -> Ints:
    """int64 [V]: how often each token was the last of a document."""
    if index is None:
        return np.zeros(vocab_size, dtype=np.int64)
    return np.fromfile(folder / index["ends"]["name"], dtype="<i8").astype(np.int64)


def write_index(folder: Path, vocab_size: int, runs: list[dict[str, Any]], ends_V: Ints, said: dict[str, Any]) -> None:
    """Make these runs and ends the ones that count, in one step, and delete what no longer does.

    Raises:
        OSError: the disk is full, or the like; what counted before still does.
    """
    content = ends_V.astype("<i8").tobytes()
    name = new_name("ends")
    try:
        _write(folder / name, content)
        ends = {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        index = {"format": _FORMAT, "vocab_size": vocab_size} | said | {"runs": runs, "ends": ends}
        temporary = folder / new_name(INDEX)
        _write(temporary, (json.dumps(index, indent=1) + "\n").encode())
    except OSError:
        (folder / name).unlink(missing_ok=True)
        raise
    with errors_named(folder / INDEX):
        os.replace(temporary, folder / INDEX)
        sync(folder)
    remove_leftovers(folder, index)


def _write(path: Path, content: bytes) -> None:
    try:
        with errors_named(path), path.open("wb") as out:
            out.write(content)
            finish_file(out)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, index: dict[str, Any] | None) -> None:
    """Delete files of counting that the index does not name."""
    known = {file["name"] for file in [*index["runs"], index["ends"]]} if index else set()
    for kind in ("run-*", "ends-*", f"{INDEX}-*"):
        for path in folder.glob(kind):
            if path.name not in known:
                path.unlink(missing_ok=True)

"""What a target says at positions of prepared data, on disk: written once, memory-mapped ever after.

A folder holds `rows-00000.safetensors`, …, each with the tensors [rows, …] that the kind of cache has; beside each a
`.sha256` as `sha256sum -c` reads it; then `documents.safetensors` with `first_row` int64 and `check` uint64, both
[documents]; and a manifest. There is a row for every position from which a token of the same document at most `reach`
places ahead is trained on. Rows lie in the order of the blocks, so that a block's are side by side, and a document's
begin at its `first_row`.

Every file is compared with its SHA-256 when a run first takes rows of it: damage stops a run, and is never learnt from.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, N documents of a batch, D documents of the
data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ...data.blocks.packing import Batch
from .row_plan import Shard, Source, spans_of

SCHEMA = 1
DOCUMENTS = "documents.safetensors"
MENDING = "`draftsmith prepare` with this recipe and `--teacher` writes it again, and nothing else"
_OPEN_SHARDS = 64  # each takes a file descriptor, and a process may have no more than 1024
_READERS = 8
_DTYPES = {
    "U16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
}


class BrokenManifestError(ValueError):
    """A manifest that is there and cannot be read."""


def check_alike(sources: Sequence[Source]) -> None:
    """Caches that serve one run must hold the same of the same target, whatever their data.

    Raises:
        ValueError: they do not.
    """
    first, *others = sources
    names = [name for name in first.identity() if name != "data"]
    for other in others:
        differences = first.differences(other, names)
        if differences:
            raise ValueError(f"caches of different targets: {'; '.join(differences)}")


class RowCache:
    """A cache, opened for reading. Build it with `load` of a subclass, which says what a row holds."""

    source_type: ClassVar[type[Source]]

    def __init__(self, folder: Path, manifest: dict[str, Any], checked: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.source = self.source_type(**manifest["source"])
        self.rows = int(manifest["rows"])
        self.columns = self.source.columns(int(manifest[self.source.size_name]))
        self._shards = [Shard(**shard) for shard in manifest["shards"]]
        self._first_rows = np.array([shard.first_row for shard in self._shards], dtype=np.int64)
        self._checked = set(manifest["files"]) if checked else set()
        self._open: dict[int, dict[str, np.ndarray]] = {}
        documents = self._mapped(DOCUMENTS)
        self._first_row_D, self._check_D = (documents[name] for name in ("first_row", "check"))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], wanted: Source | None = None, checked: bool = False) -> Self:
        """Open a finished cache; rows stay on disk. `wanted` is what it must have been made from. With `checked` its
        files have just been compared with their SHA-256.

        Raises:
            ValueError: no cache; one of something else (both sides are named); a file that is missing, or not of the
                size and form that the manifest says.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, cls.source_type, wanted)
        for name, written in manifest["files"].items():
            fault = _fault(folder / name, written)
            if fault:
                raise ValueError(f"{fault}: {MENDING}")
        cache = cls(folder, manifest, checked)
        for shard in cache._shards:
            found = {name: array.shape for name, array in map_safetensors(folder / shard.name).items()}
            if found != shard.shapes(cache.columns):
                raise ValueError(
                    f"{folder / shard.name} is damaged: it does not hold {shard.rows:,} rows, but {found}: {MENDING}"
                )
        return cache

    def verify(self) -> None:
        """Read every file and compare it with the manifest's SHA-256.

        Raises:
            ValueError: files that are not those that were written.
        """
        faults = find_damage(self.folder, self.source_type)
        if faults:
            raise ValueError(f"{'; '.join(faults.values())}: {MENDING}")
        self._checked = set(self.manifest["files"])

    def find(self, batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Flattened positions int64 [R] of a batch that have a row, and their rows int64 [R].

        None where the cache was made from other documents: tokens, positions and what is trained are compared.
        """
        spans = spans_of(batch, self.source.reach)
        if len(spans.number_N) and spans.number_N.max() >= len(self._check_D):
            return None
        if (self._check_D[spans.number_N] != spans.check_N).any():
            return None
        ends_N = np.cumsum(spans.rows_N)
        offset_N = self._first_row_D[spans.number_N] - (ends_N - spans.rows_N)
        positions_R = np.flatnonzero(spans.kept_X)
        return positions_R, np.repeat(offset_N, spans.rows_N) + np.arange(len(positions_R))

    def gather(self, rows_R: np.ndarray, into: Mapping[str, np.ndarray]) -> None:
        """Copy rows into arrays [R, …] of the stored types, by the columns' names; file after file.

        Raises:
            ValueError: a file that these rows lie in is missing, or damaged.
        """
        if not len(rows_R):
            return
        shard_R = np.searchsorted(self._first_rows, rows_R, "right") - 1
        breaks = (np.diff(rows_R) != 1) | (np.diff(shard_R) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])  # of rows that lie side by side
        ends = np.append(starts[1:], len(rows_R))
        for run in np.argsort(shard_R[starts], kind="stable"):
            start, end = starts[run], ends[run]
            arrays = self._rows_of(int(shard_R[start]))
            first = rows_R[start] - self._first_rows[shard_R[start]]
            for name, array in into.items():
                array[start:end] = arrays[name][first : first + end - start]

    def _rows_of(self, number: int) -> dict[str, np.ndarray]:
        arrays = self._open.pop(number, None)
        if arrays is None:
            arrays = self._mapped(self._shards[number].name)
            while len(self._open) >= _OPEN_SHARDS:
                del self._open[next(iter(self._open))]
        self._open[number] = arrays  # the last is the one used last
        return arrays

    def _mapped(self, name: str) -> dict[str, np.ndarray]:
        fault = _fault(self.folder / name, self.manifest["files"][name], by_hash=name not in self._checked)
        if fault:
            raise ValueError(f"{fault}: {MENDING}")
        self._checked.add(name)
        return map_safetensors(self.folder / name)


AnyCache = TypeVar("AnyCache", bound=RowCache)


def look_up(caches: Sequence[AnyCache], batch: Batch) -> tuple[AnyCache, np.ndarray, np.ndarray]:
    """The cache that was made from a batch's documents, and what `RowCache.find` says.

    Raises:
        ValueError: there is none.
    """
    for cache in caches:
        found = cache.find(batch)
        if found is not None:
            return cache, *found
    folders = ", ".join(str(cache.folder) for cache in caches)
    raise ValueError(f"a batch holds documents that the {caches[0].source.title} was not made from ({folders})")


def read_manifest(folder: Path, source_type: type[Source], wanted: Source | None = None) -> dict[str, Any]:
    """What a cache's manifest says.

    Raises:
        BrokenManifestError: one of another form.
        ValueError: there is none; one of another schema; a cache of something else than is wanted.
    """
    path = folder / source_type.manifest
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest["schema"]
        if schema == SCHEMA:
            source = source_type(**manifest["source"])
            [Shard(**shard) for shard in manifest["shards"]]
            [manifest[key] for key in (source_type.size_name, "rows", "files")]
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no {source_type.title}: it has no {source_type.manifest}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BrokenManifestError(f"{path} is damaged: not the manifest of a {source_type.title}: {error!r}") from error
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema {schema}, this version reads {SCHEMA}; write the cache again")
    differences = source.differences(wanted) if wanted is not None else []
    if differences:
        raise ValueError(f"the {source_type.title} {folder} is another one: {'; '.join(differences)}")
    return manifest


def find_damage(
    folder: Path,
    source_type: type[Source],
    wanted: Source | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, str]:
    """Read every file of a finished cache; what is wrong with each that is not the one that was written, by its name.

    Raises:
        ValueError: what `read_manifest` raises.
    """
    files = read_manifest(folder, source_type, wanted)["files"]
    faults = {name: _fault(folder / name, written) for name, written in files.items()}
    readable = [folder / name for name, fault in faults.items() if not fault]
    for name, found in stamps(readable, progress).items():
        if found != files[name]:
            faults[name] = _garbled(folder / name)
    return {name: fault for name, fault in faults.items() if fault}


def _fault(path: Path, written: Mapping[str, Any], by_hash: bool = False) -> str:
    """What is wrong with a file; nothing: an empty text."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != written["bytes"]:
        return f"{path} is damaged: it has {size} bytes, expected {written['bytes']}"
    if by_hash and stamp(path) != written:
        return _garbled(path)
    return ""


def _garbled(path: Path) -> str:
    return f"{path} is damaged: its SHA-256 is not the manifest's"


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as memory-mapped arrays, so that some rows cost no more than they are.

    Raises:
        ValueError: not such a file.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        whole = np.memmap(path, dtype=np.uint8, mode="r")
        start = int.from_bytes(whole[:8].tobytes(), "little")
        header: Any = json.loads(whole[8 : 8 + start].tobytes()) if start < len(whole) else None
        for name, item in header.items():
            begin, end = (8 + start + offset for offset in item["data_offsets"])
            dtype = np.dtype(_DTYPES[item["dtype"]])
            if end > len(whole) or end - begin != dtype.itemsize * int(np.prod(item["shape"])):
                raise ValueError(f"{name} does not fit into the file")
            arrays[name] = whole[begin:end].view(dtype).reshape(item["shape"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: not a safetensors file of ours ({error!r}): {MENDING}") from error
    return arrays


def stamp(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def stamps(paths: Sequence[Path], progress: Callable[[int, int], object]) -> dict[str, dict[str, Any]]:
    """Stamps of files by their names; several are read at once. `progress` is told how many are done, of how many."""
    found = {}
    with ThreadPoolExecutor(_READERS) as readers:
        for path, mark in zip(paths, readers.map(stamp, paths), strict=True):
            found[path.name] = mark
            progress(len(found), len(paths))
    return found

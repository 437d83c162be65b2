"""What a target says at positions of prepared data, on disk: written once, read row by row ever after.

A folder holds `rows-00000.safetensors`, … with the tensors [rows, …] of the kind of cache; `documents.safetensors` with
`first_row` int64 and `check` uint64, both [documents]; and a manifest with the size and SHA-256 of each file. There is
a row for every position from which a token of its document at most `reach` places ahead is trained on, in the order of
the blocks. A file is compared with its SHA-256 when a run first takes rows of it.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, N documents of a batch, D documents of the
data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoints.storage.safe_read import stamp
from ...data.blocks.packing import Batch
from .row_plan import Shard, Source, spans_of

SCHEMA = 1
DOCUMENTS = "documents.safetensors"
_REMEDY = "`draftsmith prepare` with this recipe and `--teacher` writes it again"
_READERS = 8


class BrokenManifestError(ValueError):
    """A manifest that is there and cannot be read."""


class RowCache:
    """A cache, opened for reading. Build it with `load` of a subclass, which says what a row holds."""

    source_type: ClassVar[type[Source]]

    def __init__(self, folder: Path, manifest: dict[str, Any], checked: bool) -> None:
        self.folder, self.manifest = folder, manifest
        self.source = self.source_type(**manifest["source"])
        self.rows = int(manifest["rows"])
        self.columns = self.source.columns(int(manifest[self.source.size_name]))
        self._shards = [Shard(**shard) for shard in manifest["shards"]]
        self._first_rows = np.array([shard.first_row for shard in self._shards], dtype=np.int64)
        self._unchecked = set() if checked else set(manifest["files"])
        self._open: dict[str, Any] = {}
        documents = self._opened(DOCUMENTS)
        self._first_row_D, self._check_D = (documents.get_tensor(name).numpy() for name in ("first_row", "check"))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], wanted: Source | None = None, checked: bool = False) -> Self:
        """Open a finished cache made from `wanted`; `checked`: its files have just been compared with their SHA-256.

        Raises:
            ValueError: no cache; one of something else; a missing or damaged file.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, cls.source_type, wanted)
        for name, written in manifest["files"].items():
            _check_size(folder / name, written)
        cache = cls(folder, manifest, checked)
        for shard in cache._shards:
            if shapes_in(folder / shard.name) != shard.shapes(cache.columns):
                raise ValueError(f"{folder / shard.name} is damaged: it does not hold {shard.rows:,} rows: {_REMEDY}")
        return cache

    def find(self, batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Flattened positions int64 [R] of a batch that have a row, and their rows int64 [R]; None where the cache was
        made from other documents."""
        spans = spans_of(batch, self.source.reach)
        if len(spans.number_N) and spans.number_N.max() >= len(self._check_D):
            return None
        if (self._check_D[spans.number_N] != spans.check_N).any():
            return None
        ends_N = np.cumsum(spans.rows_N)
        offset_N = self._first_row_D[spans.number_N] - (ends_N - spans.rows_N)
        positions_R = np.flatnonzero(spans.kept_X)
        return positions_R, np.repeat(offset_N, spans.rows_N) + np.arange(len(positions_R))

    def gather(self, rows_R: np.ndarray, into: Mapping[str, Tensor]) -> None:
        """Copy rows into tensors [R, …] of the columns' types, by the columns' names; ValueError: a damaged file."""
        if not len(rows_R):
            return
        shard_R = np.searchsorted(self._first_rows, rows_R, "right") - 1
        breaks = (np.diff(rows_R) != 1) | (np.diff(shard_R) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])  # of rows that lie side by side
        ends = np.append(starts[1:], len(rows_R))
        for run in np.argsort(shard_R[starts], kind="stable"):
            start, end = int(starts[run]), int(ends[run])
            shard = self._shards[shard_R[start]]
            file, first = self._opened(shard.name), int(rows_R[start]) - shard.first_row
            for name, tensor in into.items():
                tensor[start:end] = file.get_slice(name)[first : first + end - start]

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        if name in self._unchecked:
            problem = damage_of(path, self.manifest["files"][name])
            if problem:
                raise ValueError(f"{problem}: {_REMEDY}")
            self._unchecked.remove(name)
        if name not in self._open:
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]


AnyCache = TypeVar("AnyCache", bound=RowCache)


def check_alike(sources: Sequence[Source]) -> None:
    """Raises ValueError where caches that serve one run differ in more than their data."""
    first, *others = sources
    names = [name for name in first.identity() if name != "data"]
    for other in others:
        differences = first.differences(other, names)
        if differences:
            raise ValueError(f"caches of different targets: {'; '.join(differences)}")


def look_up(caches: Sequence[AnyCache], batch: Batch) -> tuple[AnyCache, np.ndarray, np.ndarray]:
    """The cache that was made from a batch's documents, and what `RowCache.find` gives; ValueError: there is none."""
    for cache in caches:
        found = cache.find(batch)
        if found is not None:
            return cache, *found
    folders = ", ".join(str(cache.folder) for cache in caches)
    raise ValueError(f"a batch holds documents that the {caches[0].source.title} was not made from ({folders})")


def read_manifest(folder: Path, source_type: type[Source], wanted: Source | None = None) -> dict[str, Any]:
    """A cache's manifest. Raises BrokenManifestError: one of another form; ValueError: there is none; one of another
    schema; a cache of something else than is wanted."""
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


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file by name; none where it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError:
        return {}


def find_damage(
    folder: Path, files: Mapping[str, Any], progress: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, str]:
    """Read every file of a finished cache (`files` of its manifest); what is wrong with each damaged one, by name."""
    found = {}
    with ThreadPoolExecutor(_READERS) as readers:
        problems = readers.map(lambda name: damage_of(folder / name, files[name]), files)
        for done, (name, problem) in enumerate(zip(files, problems, strict=True), 1):
            if problem:
                found[name] = problem
            progress(done, len(files))
    return found


def damage_of(path: Path, written: Mapping[str, Any]) -> str | None:
    """What is wrong with a file, by its size and SHA-256; None: nothing."""
    try:
        _check_size(path, written)
    except ValueError as error:
        return str(error)
    return None if stamp(path) == written else f"{path} is damaged: its SHA-256 is not the manifest's"


def _check_size(path: Path, written: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: {_REMEDY}")
    size = path.stat().st_size
    if size != written["bytes"]:
        raise ValueError(f"{path} is damaged: it has {size} bytes, expected {written['bytes']}: {_REMEDY}")

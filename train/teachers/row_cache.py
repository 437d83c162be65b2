"""What a target says at positions of prepared data, on disk: written once, read row by row ever after.

A folder holds `rows-00000.safetensors`, … with the tensors [rows, …] of the kind of cache; `documents.safetensors` with
`first_row` int64 and `check` uint64, both [documents]; and, when it is finished, a manifest with the size and SHA-256
of each file. There is a row for every position from which a token of its document at most `reach` places ahead is
trained on, in the order of the blocks. A file is compared with its SHA-256 when a run first takes rows of it.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, N documents of a batch, D documents of the
data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ...checkpoints.storage.safe_read import read_document, stamp
from ...data.blocks.packing import Batch
from .row_plan import Shard, Source, spans_of

SCHEMA = 1
DOCUMENTS = "documents.safetensors"
_REMEDY = "`draftsmith prepare` with this recipe and `--teacher` writes it again"
_READERS = 8


class RowCache:
    """A finished cache, opened for reading; a subclass says what a row holds.

    Args:
        checked: its files have just been compared with their SHA-256.

    Raises:
        ValueError: a damaged manifest; a missing or damaged file.
        FileNotFoundError: no cache.
    """

    source_type: ClassVar[type[Source]]

    def __init__(self, folder: str | os.PathLike[str], checked: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = manifest = read_manifest(self.folder, self.source_type)
        for name, written in manifest["files"].items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != written["bytes"]:
                raise ValueError(f"{path} is missing or damaged: {_REMEDY}")
        self.source = self.source_type(**manifest["source"])
        self.rows = int(manifest["rows"])
        self.size = int(manifest[self.source.size_name])
        """The target's number of tokens, or of hidden dimensions."""
        self.columns = self.source.columns(self.size)
        self._shards = [Shard(**shard) for shard in manifest["shards"]]
        self._first_rows = np.array([shard.first_row for shard in self._shards], dtype=np.int64)
        self._unchecked = set() if checked else set(manifest["files"])
        self._open: dict[str, Any] = {}
        documents = self._opened(DOCUMENTS)
        self._first_row_D, self._check_D = (documents.get_tensor(name).numpy() for name in ("first_row", "check"))

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

    def gather(self, rows_R: np.ndarray, names: Iterable[str], pin: bool = False) -> dict[str, Tensor]:
        """Rows [R, …] of these columns, in pinned memory on request; ValueError: a damaged file."""
        found = {
            name: torch.empty(len(rows_R), *self.columns[name].shape, dtype=self.columns[name].dtype, pin_memory=pin)
            for name in names
        }
        if not len(rows_R):
            return found
        shard_R = np.searchsorted(self._first_rows, rows_R, "right") - 1
        breaks = (np.diff(rows_R) != 1) | (np.diff(shard_R) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])  # of rows that lie side by side
        ends = np.append(starts[1:], len(rows_R))
        for run in np.argsort(shard_R[starts], kind="stable"):
            start, end = int(starts[run]), int(ends[run])
            shard = self._shards[shard_R[start]]
            file, first = self._opened(shard.name), int(rows_R[start]) - shard.first_row
            for name, tensor in found.items():
                tensor[start:end] = file.get_slice(name)[first : first + end - start]
        return found

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        if name in self._unchecked:
            if stamp(path) != self.manifest["files"][name]:
                raise ValueError(f"{path} is damaged, its SHA-256 is not the manifest's: {_REMEDY}")
            self._unchecked.remove(name)
        if name not in self._open:
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]


AnyCache = TypeVar("AnyCache", bound=RowCache)


def look_up(caches: Sequence[AnyCache], batch: Batch) -> tuple[AnyCache, np.ndarray, np.ndarray]:
    """The cache that was made from a batch's documents, and what `RowCache.find` gives; ValueError: there is none."""
    for cache in caches:
        found = cache.find(batch)
        if found is not None:
            return cache, *found
    folders = ", ".join(str(cache.folder) for cache in caches)
    raise ValueError(f"a batch holds documents that the {caches[0].source.title} was not made from ({folders})")


def read_manifest(folder: Path, source_type: type[Source]) -> dict[str, Any]:
    """A cache's manifest; ValueError: one of another form or schema."""

    def fits(found: Any) -> bool:
        if found["schema"] == SCHEMA:
            source_type(**found["source"])
            for shard in found["shards"]:
                Shard(**shard)
            if lacking := {source_type.size_name, "rows", "files"} - found.keys():
                raise KeyError(*lacking)
        return bool(found["schema"] == SCHEMA)

    return read_document(folder / source_type.manifest, "manifest", "draftsmith prepare --teacher", SCHEMA, fits)


def stamps(
    folder: Path, names: Sequence[str], progress: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, Any]:
    """Size and SHA-256 of files by name, None of one that is missing."""
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        made = readers.map(lambda name: stamp(folder / name) if (folder / name).is_file() else None, names)
        for name, each in zip(names, made, strict=True):
            found[name] = each
            progress(len(found), len(names))
    return found

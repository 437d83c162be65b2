"""What a target says at positions of prepared data, on disk: written once, read row by row ever after.

A folder holds `rows-00000.safetensors`, … with the tensors [rows, …] of the kind of cache; `documents.safetensors` with
`first_row` int64 and `check` uint64, both [documents]; and, when it is finished, a manifest with the size and SHA-256
of each file. There is a row for every position from which a token of its document at most `reach` places ahead is
trained on, in the order of the blocks. A file is compared with its SHA-256 when a run first takes rows of it.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, N documents of a batch, D documents of the
data.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ...checkpoints.storage.safe_read import file_entry, read_document
from ...data.blocks.packing import IGNORED, PADDING, Batch
from ..losses.drafter import shifted_labels

SCHEMA = 1
DOCUMENTS = "documents.safetensors"
_REMEDY = "`draftsmith prepare` with this recipe and `--teacher` writes it again"
_READERS = 8


class Column(NamedTuple):
    """One tensor of every file: the shape of a row of it, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Source(ABC):
    """What a cache is made from and holds; two caches with the same `key` hold the same. `target` (where it lies) is
    not compared; `data` is `loop.checkpoints.data_fingerprint`."""

    target: str
    sha256: str
    data: str

    manifest: ClassVar[str]
    """Name of the file that describes the cache."""
    size_name: ClassVar[str]
    """The manifest's key for what `columns` needs to know of the target."""
    reach: ClassVar[int]
    """A position has a row if one of so many tokens after it is trained on; 0: every token has."""

    @abstractmethod
    def columns(self, size: int) -> dict[str, Column]:
        """The tensors of a file; `size` is the target's number of tokens, or of hidden dimensions."""

    @property
    def key(self) -> str:
        """Name of the cache's folder."""
        text = json.dumps({name: value for name, value in asdict(self).items() if name != "target"}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Shard:
    """A file of rows: those of the blocks `first_block` … `end_block` - 1."""

    number: int
    first_block: int
    end_block: int
    first_row: int
    rows: int

    @property
    def name(self) -> str:
        return f"rows-{self.number:05d}.safetensors"


class RowCache:
    """A finished cache, opened for reading; a subclass says what a row holds. `checked`: its files have just been
    compared with their SHA-256. Raises ValueError: a damaged manifest; a missing or damaged file; FileNotFoundError: no
    cache."""

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
            if file_entry(path) != self.manifest["files"][name]:
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
    raise ValueError(f"a batch holds documents that no cache of the target was made from ({folders})")


def read_manifest(folder: Path, source_type: type[Source]) -> dict[str, Any]:
    """A cache's manifest; ValueError: one of another form or schema."""
    path = folder / source_type.manifest
    found = read_document(path, SCHEMA, "draftsmith prepare --teacher")
    try:
        source_type(**found["source"])
        for shard in found["shards"]:
            Shard(**shard)
        if lacking := {source_type.size_name, "rows", "files"} - found.keys():
            raise KeyError(*lacking)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return found


def stamps(
    folder: Path, names: Sequence[str], progress: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, Any]:
    """Size and SHA-256 of files by name, None of one that is missing."""
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        made = readers.map(lambda name: file_entry(folder / name) if (folder / name).is_file() else None, names)
        for name, each in zip(names, made, strict=True):
            found[name] = each
            progress(len(found), len(names))
    return found


def kept_positions(batch: Batch, reach: int) -> np.ndarray:
    """Whether a flattened position has a row, bool [X]: one of the next `reach` tokens of its document is trained."""
    if not reach:
        every_X: np.ndarray = (batch.documents_BT != PADDING).flatten().cpu().numpy()
        return every_X
    offsets = range(1, reach + 1)
    ahead = [shifted_labels(batch.labels_BT, batch.documents_BT, offset) != IGNORED for offset in offsets]
    kept_X: np.ndarray = torch.stack(ahead).any(0).flatten().cpu().numpy()
    return kept_X


@dataclass(frozen=True)
class Spans:
    """The documents of a batch in the order in which they stand: number, rows, and a hash of what decides its rows."""

    blocks: int
    kept_X: np.ndarray
    number_N: np.ndarray
    rows_N: np.ndarray
    check_N: np.ndarray


def spans_of(batch: Batch, reach: int) -> Spans:
    """The documents of a batch; tokens, positions and what is trained make the hash."""
    kept_X = kept_positions(batch, reach)
    tokens_X, positions_X, documents_X = (
        tensor.cpu().numpy().reshape(-1) for tensor in (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    )
    starts = np.flatnonzero(positions_X == 0)  # of documents, and of padding
    mixed_X = (tokens_X * 2 + kept_X + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed_X ^= (positions_X + 1).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed_X ^= mixed_X >> np.uint64(29)
    mixed_X *= np.uint64(0xBF58476D1CE4E5B9)
    mixed_X ^= mixed_X >> np.uint64(32)
    real = documents_X[starts] >= 0
    rows_N = np.add.reduceat(kept_X.astype(np.int64), starts)[real]
    check_N = np.add.reduceat(mixed_X, starts)[real]
    return Spans(len(batch.tokens_BT), kept_X, documents_X[starts][real], rows_N, check_N)

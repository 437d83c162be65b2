"""Which positions of prepared data a cache has rows for, and where each row lies; see `row_cache`.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, N documents of a batch, D documents of the data.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...data.blocks.packing import IGNORED, Batch
from ...data.blocks.prepared import PreparedData
from ..losses.drafter import shifted_labels

SHARD_BYTES = 64 << 20  # what a killed writer may lose
_SCANNED_BLOCKS = 128


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
    fingerprint: str
    data: str

    manifest: ClassVar[str]
    """Name of the file that describes the cache."""
    title: ClassVar[str]
    """What the cache is called in messages."""
    size_name: ClassVar[str]
    """The manifest's key for what `columns` needs to know of the target."""
    reach: ClassVar[int]
    """A position has a row if one of so many tokens after it is trained on."""

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


@dataclass(frozen=True)
class CachePlan:
    """Where every row of a cache will lie, known before the target has run."""

    columns: dict[str, Column]
    size: int
    reach: int
    rows: int
    first_row_D: np.ndarray
    check_D: np.ndarray
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, data: PreparedData, source: Source, size: int, shard_bytes: int | None = None) -> CachePlan:
        """Look through the data once; `shard_bytes` is the size of a file (None: `SHARD_BYTES`)."""
        columns = source.columns(size)
        starts = range(0, data.blocks, _SCANNED_BLOCKS)
        batches = (data.batch(range(start, min(start + _SCANNED_BLOCKS, data.blocks))) for start in starts)
        spans = [spans_of(batch, source.reach) for batch in batches]
        number_N, rows_N, check_N = (
            np.concatenate([getattr(each, name) for each in spans]) for name in ("number_N", "rows_N", "check_N")
        )
        first_row_D = np.zeros(number_N.max() + 1, dtype=np.int64)
        check_D = np.zeros(number_N.max() + 1, dtype=np.uint64)
        first_row_D[number_N] = np.cumsum(rows_N) - rows_N
        check_D[number_N] = check_N
        most = max(1, (shard_bytes or SHARD_BYTES) // sum(column.row_bytes for column in columns.values()))
        rows_of_block = np.concatenate([each.kept_X.reshape(each.blocks, -1).sum(1) for each in spans])
        shards = tuple(_shards(rows_of_block, most))
        return cls(columns, size, source.reach, int(rows_N.sum()), first_row_D, check_D, shards)

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns.values())

    def bytes_of(self, shards: int, rows: int) -> int:
        """Bytes on disk of so many files with so many rows, and of what is written at the end (headers rounded up)."""
        return rows * self.row_bytes + 1024 * (shards + 2) + 16 * len(self.first_row_D)


def _shards(rows_of_block: np.ndarray, most: int) -> Iterator[Shard]:
    """Consecutive blocks with at most `most` rows together, or one block with more."""
    total = np.concatenate([[0], np.cumsum(rows_of_block)])
    first = number = 0
    while first < len(rows_of_block):
        end = max(first + 1, int(np.searchsorted(total, total[first] + most, "right")) - 1)
        rows = int(total[end] - total[first])
        if rows:
            yield Shard(number, first, end, int(total[first]), rows)
            number += 1
        first = end


def kept_positions(batch: Batch, reach: int) -> np.ndarray:
    """Whether a flattened position has a row, bool [X]: one of the next `reach` tokens of its document is trained."""
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

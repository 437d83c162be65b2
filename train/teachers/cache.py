"""On-disk cache of a target's outputs for prepared data, written file by file and read row by row.

A folder has `rows-00000.safetensors`, … with tensors [rows, …] according to the kind of cache;
`documents.safetensors` with `first_row` int64 and `check` uint64, both [documents]; and, once complete, a manifest with
the size and SHA-256 of each file. A position has a row if one of the next `reach` tokens of its document is supervised.
Rows are in the order of the blocks. A file's SHA-256 is checked when a run first reads rows of it.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, R rows, N documents of a batch, D documents of the
data.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...checkpoints.storage.atomic import atomic_file, atomic_text
from ...checkpoints.storage.safe_read import file_entry, read_document
from ...data.blocks.packing import IGNORED, PADDING, Batch
from ...data.blocks.prepared import PreparedData
from ..losses.drafter import shifted_labels

SCHEMA = 1
DOCUMENTS = "documents.safetensors"


class Column(NamedTuple):
    """Row shape and dtype of a tensor that each file of a cache contains."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Source(ABC):
    """Description of a cache's contents and origin; two caches with the same `key` contain the same rows.

    `target` (a path or id) is not part of the key. `data` is the result of `loop.checkpoints.data_fingerprint`.
    """

    target: str
    sha256: str
    data: str

    manifest: ClassVar[str]
    """Name of the file that describes the cache."""
    size_name: ClassVar[str]
    """Key in the manifest of the argument `size` of `columns`."""
    reach: ClassVar[int]
    """A position has a row if one of the next `reach` tokens is supervised. If 0, every position has a row."""
    size_advice: ClassVar[str]
    """Advice on how to make the cache smaller, for error messages."""

    @abstractmethod
    def load(self, device: torch.device) -> "tuple[MakeRows, int]":
        """Load the target. Return the function that computes the rows, and the target's vocabulary or hidden size."""

    @abstractmethod
    def columns(self, size: int) -> dict[str, Column]:
        """Return the columns of the cache by name. `size` is the target's vocabulary size or hidden size."""

    @property
    def key(self) -> str:
        """Name of the cache's folder: a hash of all fields except `target`."""
        text = json.dumps({name: value for name, value in asdict(self).items() if name != "target"}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Shard:
    """File of a cache that contains the rows of the blocks `first_block` to `end_block` - 1."""

    number: int
    first_block: int
    end_block: int
    first_row: int
    rows: int

    @property
    def name(self) -> str:
        return f"rows-{self.number:05d}.safetensors"


class RowCache:
    """Reader of a complete cache. Raises ValueError if a file is missing or damaged."""

    def __init__(self, folder: str | os.PathLike[str], source_type: type[Source]) -> None:
        self.folder = Path(folder)
        path = self.folder / source_type.manifest
        self.manifest = manifest = read_document(path, SCHEMA, "draftsmith prepare --teacher")
        try:
            self.source: Any = source_type(**manifest["source"])
            self.rows, self.size = int(manifest["rows"]), int(manifest[source_type.size_name])
            self._shards = [Shard(**shard) for shard in manifest["shards"]]
            files = dict(manifest["files"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}; delete {folder}") from error
        for name, entry in files.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise self._damaged(path)
        self.columns = self.source.columns(self.size)
        self._first_rows = np.array([shard.first_row for shard in self._shards], dtype=np.int64)
        self._unchecked = set(files)
        self._open: dict[str, Any] = {}
        documents = self._open_file(DOCUMENTS)
        self._first_row_D, self._check_D = (documents.get_tensor(name).numpy() for name in ("first_row", "check"))

    def find(self, batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
        """Return positions and row numbers of a batch, both int64 [R], or None if the batch is not in the cache."""
        spans = list_document_rows(batch, self.source.reach)
        if len(spans.number_N) and spans.number_N.max() >= len(self._check_D):
            return None
        if (self._check_D[spans.number_N] != spans.check_N).any():
            return None
        ends_N = np.cumsum(spans.rows_N)
        offset_N = self._first_row_D[spans.number_N] - (ends_N - spans.rows_N)
        positions_R = np.flatnonzero(spans.has_row_X)
        return positions_R, np.repeat(offset_N, spans.rows_N) + np.arange(len(positions_R))

    def gather(self, rows_R: np.ndarray, names: Iterable[str], pin: bool = False) -> dict[str, Tensor]:
        """Read rows [R, …] of the named columns, to pinned memory if `pin`. Raises ValueError if a file is damaged."""
        columns = {
            name: torch.empty(len(rows_R), *self.columns[name].shape, dtype=self.columns[name].dtype, pin_memory=pin)
            for name in names
        }
        if not len(rows_R):
            return columns
        shard_R = np.searchsorted(self._first_rows, rows_R, "right") - 1
        breaks = (np.diff(rows_R) != 1) | (np.diff(shard_R) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])  # of runs of adjacent rows
        ends = np.append(starts[1:], len(rows_R))
        for run in np.argsort(shard_R[starts], kind="stable"):
            start, end = int(starts[run]), int(ends[run])
            shard = self._shards[shard_R[start]]
            file, first = self._open_file(shard.name), int(rows_R[start]) - shard.first_row
            for name, tensor in columns.items():
                tensor[start:end] = file.get_slice(name)[first : first + end - start]
        return columns

    def _open_file(self, name: str) -> Any:
        path = self.folder / name
        if name in self._unchecked:
            if file_entry(path) != self.manifest["files"][name]:
                raise self._damaged(path)
            self._unchecked.remove(name)
        if name not in self._open:
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]

    def _damaged(self, path: Path) -> ValueError:
        return ValueError(f"{path} is missing or damaged: delete {self.folder} and repeat `prepare --teacher`")


def look_up(caches: Sequence[RowCache], batch: Batch) -> tuple[RowCache, np.ndarray, np.ndarray]:
    """Return the cache that contains a batch, and the result of `RowCache.find`. Raises ValueError if there is none."""
    for cache in caches:
        if (rows := cache.find(batch)) is not None:
            return cache, *rows
    folders = ", ".join(str(cache.folder) for cache in caches)
    raise ValueError(f"a batch contains documents that are in no cache: run `prepare --teacher` ({folders})")


def kept_positions(batch: Batch, reach: int) -> np.ndarray:
    """Return a mask (bool [X]) of the flattened positions that have a row in a cache; see `Source.reach`."""
    if not reach:
        return (batch.documents_BT != PADDING).flatten().cpu().numpy()
    offsets = range(1, reach + 1)
    ahead = [shifted_labels(batch.labels_BT, batch.documents_BT, offset) != IGNORED for offset in offsets]
    return torch.stack(ahead).any(0).flatten().cpu().numpy()


@dataclass(frozen=True)
class DocumentRows:
    """Numbers, row counts and content hashes of the documents in a batch, in order."""

    blocks: int
    has_row_X: np.ndarray
    number_N: np.ndarray
    rows_N: np.ndarray
    check_N: np.ndarray


def list_document_rows(batch: Batch, reach: int) -> DocumentRows:
    """List the documents of a batch, with hashes of tokens, positions and the mask of positions that have a row."""
    has_row_X = kept_positions(batch, reach)
    tokens_X, positions_X, documents_X = (
        tensor.cpu().numpy().reshape(-1) for tensor in (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    )
    starts = np.flatnonzero(positions_X == 0)  # of documents, and of padding
    mixed_X = (tokens_X * 2 + has_row_X + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed_X ^= (positions_X + 1).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed_X ^= mixed_X >> np.uint64(29)
    mixed_X *= np.uint64(0xBF58476D1CE4E5B9)
    mixed_X ^= mixed_X >> np.uint64(32)
    real = documents_X[starts] >= 0
    rows_N = np.add.reduceat(has_row_X.astype(np.int64), starts)[real]
    check_N = np.add.reduceat(mixed_X, starts)[real]
    return DocumentRows(len(batch.tokens_BT), has_row_X, documents_X[starts][real], rows_N, check_N)


SHARD_BYTES = 64 << 20  # an interrupted writer loses at most this much
_SCANNED_BLOCKS = 128

MakeRows = Callable[[Batch, Tensor], Iterator[dict[str, Tensor]]]
"""Function from a batch and flattened positions int64 [R] to chunks of rows, each as a dictionary of columns."""


class CacheWriter:
    """Writer of a cache, which skips files that are complete. Several processes may write different `shards`.

    The constructor scans the data once to determine all row numbers. `size` is the target's vocabulary size or hidden
    size, and `shard_bytes` is the size of a file (default: `SHARD_BYTES`). The manifest is written last.
    """

    def __init__(
        self, folder: Path, source: Source, data: PreparedData, size: int, shard_bytes: int | None = None
    ) -> None:
        self.folder, self.source, self.data, self.size = folder, source, data, size
        self.columns = source.columns(size)
        self.row_bytes = sum(column.row_bytes for column in self.columns.values())
        starts = range(0, data.blocks, _SCANNED_BLOCKS)
        batches = (data.batch(range(start, min(start + _SCANNED_BLOCKS, data.blocks))) for start in starts)
        batch_rows = [list_document_rows(batch, source.reach) for batch in batches]
        number_N, rows_N, check_N = (
            np.concatenate([getattr(part, name) for part in batch_rows]) for name in ("number_N", "rows_N", "check_N")
        )
        self.rows = int(rows_N.sum())
        self._first_row_D = np.zeros(number_N.max() + 1, dtype=np.int64)
        self._check_D = np.zeros(number_N.max() + 1, dtype=np.uint64)
        self._first_row_D[number_N] = np.cumsum(rows_N) - rows_N
        self._check_D[number_N] = check_N
        rows_of_block = np.concatenate([part.has_row_X.reshape(part.blocks, -1).sum(1) for part in batch_rows])
        self.shards = list(_shards(rows_of_block, max(1, (shard_bytes or SHARD_BYTES) // self.row_bytes)))

    def missing_bytes(self) -> int:
        """Return an upper bound on the number of bytes that remain to be written."""
        missing = self.missing_shards()
        rows = sum(shard.rows for shard in missing)
        return rows * self.row_bytes + 1024 * (len(missing) + 2) + 16 * len(self._first_row_D)

    def missing_shards(self) -> list[Shard]:
        """Return the shards whose file is missing or has the wrong tensor shapes."""
        return [shard for shard in self.shards if not self._holds(shard)]

    def _holds(self, shard: Shard) -> bool:
        shapes = {name: [shard.rows, *column.shape] for name, column in self.columns.items()}
        try:
            with safe_open(self.folder / shard.name, framework="pt") as file:
                return shapes == {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (FileNotFoundError, SafetensorError):
            return False

    def write(
        self,
        shard: Shard,
        make_rows: MakeRows,
        device: torch.device,
        batch_blocks: int = 4,
        progress: Callable[[int], object] = lambda rows: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Compute the rows of a shard and write its file. Return False if `stopping` interrupted the work."""
        file = {name: torch.empty(shard.rows, *each.shape, dtype=each.dtype) for name, each in self.columns.items()}
        num_written = 0
        for first in range(shard.first_block, shard.end_block, batch_blocks):
            if stopping():
                return False
            batch = self.data.batch(range(first, min(first + batch_blocks, shard.end_block)))
            positions_R = torch.from_numpy(kept_positions(batch, self.source.reach)).nonzero()[:, 0]
            if not len(positions_R):
                continue
            end = num_written
            for piece in make_rows(batch.to(device), positions_R.to(device)):
                start, end = end, end + len(next(iter(piece.values())))
                for name, rows in piece.items():
                    file[name][start:end] = rows.cpu()
            progress(end - num_written)
            num_written = end
        assert num_written == shard.rows, (num_written, shard)
        with atomic_file(self.folder / shard.name) as out:
            out.write(save(file))
        return True

    def finish(self) -> None:
        """Hash every file and write the manifest."""
        assert not self.missing_shards(), "files of other processes are missing"
        documents = {"first_row": self._first_row_D, "check": self._check_D}
        with atomic_file(self.folder / DOCUMENTS) as out:
            out.write(save({name: torch.from_numpy(array) for name, array in documents.items()}))
        names = [*(shard.name for shard in self.shards), DOCUMENTS]
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            self.source.size_name: self.size,
            "rows": self.rows,
            "shards": [asdict(shard) for shard in self.shards],
            "files": {name: file_entry(self.folder / name) for name in names},
        }
        atomic_text(self.folder / self.source.manifest, json.dumps(manifest, indent=2) + "\n")


def _shards(rows_of_block: np.ndarray, most: int) -> Iterator[Shard]:
    """Yield shards of consecutive blocks with at most `most` rows in total. A larger block is its own shard."""
    total = np.concatenate([[0], np.cumsum(rows_of_block)])
    first = number = 0
    while first < len(rows_of_block):
        end = max(first + 1, int(np.searchsorted(total, total[first] + most, "right")) - 1)
        if rows := int(total[end] - total[first]):
            yield Shard(number, first, end, int(total[first]), rows)
            number += 1
        first = end

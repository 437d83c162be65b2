"""Running a target over prepared data and keeping what it says: the writing side of `row_cache`.

Letters: R positions of a batch that have a row, C some of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...checkpoints.storage.atomic import atomic_file, atomic_text
from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.storage.safe_read import OtherSchemaError
from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from .row_cache import DOCUMENTS, SCHEMA, Shard, Source, kept_positions, read_manifest, spans_of, stamps

SHARD_BYTES = 64 << 20  # what a killed writer may lose
_SCANNED_BLOCKS = 128

MakeRows = Callable[[Batch, Tensor], Iterator[dict[str, Tensor]]]
"""From a batch and flattened positions int64 [R] of it: the columns' rows [C, …] in that order, in pieces."""


class CacheWriter:
    """Writes a cache file by file; whole files stay when it is killed, and the next writer resumes from them. The
    manifest comes last. Several processes may each write some of the `shards`, of `shard_bytes` (None: `SHARD_BYTES`).

    Making one looks through the data once: where every row will lie is known before the target has run. `size` is the
    target's number of tokens, or of hidden dimensions.
    """

    def __init__(
        self, folder: Path, source: Source, data: PreparedData, size: int, shard_bytes: int | None = None
    ) -> None:
        self.folder, self.source, self.data, self.size = folder, source, data, size
        self.columns = source.columns(size)
        self.row_bytes = sum(column.row_bytes for column in self.columns.values())
        starts = range(0, data.blocks, _SCANNED_BLOCKS)
        batches = (data.batch(range(start, min(start + _SCANNED_BLOCKS, data.blocks))) for start in starts)
        spans = [spans_of(batch, source.reach) for batch in batches]
        number_N, rows_N, check_N = (
            np.concatenate([getattr(each, name) for each in spans]) for name in ("number_N", "rows_N", "check_N")
        )
        self.rows = int(rows_N.sum())
        self._first_row_D = np.zeros(number_N.max() + 1, dtype=np.int64)
        self._check_D = np.zeros(number_N.max() + 1, dtype=np.uint64)
        self._first_row_D[number_N] = np.cumsum(rows_N) - rows_N
        self._check_D[number_N] = check_N
        rows_of_block = np.concatenate([each.kept_X.reshape(each.blocks, -1).sum(1) for each in spans])
        self.shards = list(_shards(rows_of_block, max(1, (shard_bytes or SHARD_BYTES) // self.row_bytes)))

    def missing_bytes(self) -> int:
        """Bytes on disk that are still to be written (headers rounded up)."""
        missing = self.missing()
        rows = sum(shard.rows for shard in missing)
        return rows * self.row_bytes + 1024 * (len(missing) + 2) + 16 * len(self._first_row_D)

    def missing(self) -> list[Shard]:
        """Files that are not there yet, or hold other rows than the plan's."""
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
        """Run the target over a shard's blocks, batch by batch from its first, and write its file; False if stopped."""
        file = {
            name: torch.empty((shard.rows, *column.shape), dtype=column.dtype) for name, column in self.columns.items()
        }
        written = 0
        for first in range(shard.first_block, shard.end_block, batch_blocks):
            if stopping():
                return False
            batch = self.data.batch(range(first, min(first + batch_blocks, shard.end_block)))
            positions_R = torch.from_numpy(kept_positions(batch, self.source.reach)).nonzero()[:, 0]
            if not len(positions_R):
                continue
            end = written
            for piece in make_rows(batch.to(device), positions_R.to(device)):
                start, end = end, end + len(next(iter(piece.values())))
                for name, rows in piece.items():
                    file[name][start:end] = rows.cpu()
            progress(end - written)
            written = end
        assert written == shard.rows, (written, shard)
        with atomic_file(self.folder / shard.name) as out:
            out.write(save(file))
        return True

    def finish(self, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Hash every file and write the manifest."""
        assert not self.missing(), "files of other processes are missing"
        documents = {"first_row": self._first_row_D, "check": self._check_D}
        with atomic_file(self.folder / DOCUMENTS) as out:
            out.write(save({name: torch.from_numpy(array) for name, array in documents.items()}))
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            self.source.size_name: self.size,
            "rows": self.rows,
            "shards": [asdict(shard) for shard in self.shards],
            "files": stamps(self.folder, [*(shard.name for shard in self.shards), DOCUMENTS], progress),
        }
        atomic_text(self.folder / self.source.manifest, json.dumps(manifest, indent=2) + "\n")


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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from writing the same cache (to be entered in one process).
    ValueError: another process is at it."""
    with sole_writer(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def discard_damage(
    folder: Path, source_type: type[Source], progress: Callable[[int, int], object] = lambda done, total: None
) -> list[str]:
    """Compare a finished cache, `locked`, with its manifest; without its damaged and missing files, which are returned,
    it is an unfinished one that a `CacheWriter` resumes, as it is without a damaged manifest. ValueError: its manifest
    is of another schema."""
    manifest = folder / source_type.manifest
    try:
        files = read_manifest(folder, source_type)["files"]
    except OtherSchemaError as error:
        raise ValueError(f"{error}, once {folder} is deleted") from error
    except ValueError:
        manifest.unlink()
        return [manifest.name]
    found = stamps(folder, list(files), progress)
    damaged = [name for name, written in files.items() if found[name] != written]
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    if damaged:
        manifest.unlink()
    return damaged

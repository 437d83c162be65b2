"""Running a target over prepared data and keeping what it says: the writing side of `row_cache`.

Letters: R positions of a batch that have a row, C some of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...checkpoints.storage.atomic import atomic_file, atomic_text
from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.storage.safe_read import OtherSchemaError, sealed
from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from .row_cache import DOCUMENTS, SCHEMA, read_manifest, stamps
from .row_plan import CachePlan, Shard, Source, kept_positions

MakeRows = Callable[[Batch, Tensor], Iterator[dict[str, Tensor]]]
"""From a batch and flattened positions int64 [R] of it: the columns' rows [C, …] in that order, in pieces."""


class CacheWriter:
    """Writes a cache file by file; whole files stay when it is killed, and the next writer resumes from them. The
    manifest comes last. Several processes may each write some of the shards."""

    def __init__(self, folder: Path, source: Source, data: PreparedData, plan: CachePlan) -> None:
        self.folder, self.source, self.data, self.plan = folder, source, data, plan

    def missing(self) -> list[Shard]:
        """Files that are not there yet, or hold other rows than the plan's."""
        return [shard for shard in self.plan.shards if not self._holds(shard)]

    def _holds(self, shard: Shard) -> bool:
        shapes = {name: [shard.rows, *column.shape] for name, column in self.plan.columns.items()}
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
        columns = self.plan.columns
        file = {name: torch.empty((shard.rows, *column.shape), dtype=column.dtype) for name, column in columns.items()}
        written = 0
        for first in range(shard.first_block, shard.end_block, batch_blocks):
            if stopping():
                return False
            batch = self.data.batch(range(first, min(first + batch_blocks, shard.end_block)))
            positions_R = torch.from_numpy(kept_positions(batch, self.plan.reach)).nonzero()[:, 0]
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
        documents = {"first_row": self.plan.first_row_D, "check": self.plan.check_D}
        with atomic_file(self.folder / DOCUMENTS) as out:
            out.write(save({name: torch.from_numpy(array) for name, array in documents.items()}))
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            self.source.size_name: self.plan.size,
            "rows": self.plan.rows,
            "shards": [asdict(shard) for shard in self.plan.shards],
            "files": stamps(self.folder, [*(shard.name for shard in self.plan.shards), DOCUMENTS], progress),
        }
        atomic_text(self.folder / self.source.manifest, json.dumps(sealed(manifest), indent=2) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from writing the same cache (to be entered in one process); removes what killed writers left.
    ValueError: another process is at it."""
    with sole_writer(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder.with_name(f".{folder.name}.unfinished"), ignore_errors=True)  # of 0.1
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

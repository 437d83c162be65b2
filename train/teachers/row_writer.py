"""Running a target over prepared data and keeping what it says: the writing side of `row_cache`.

Letters: R positions of a batch that have a row, C some of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from ...checkpoints.storage.atomic import atomic_file, atomic_text, sync
from ...checkpoints.storage.safe_read import stamp
from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from .row_cache import DOCUMENTS, SCHEMA, shapes_in
from .row_plan import CachePlan, Shard, Source, kept_positions

MakeRows = Callable[[Batch, Tensor], Iterator[dict[str, Tensor]]]
"""From a batch and flattened positions int64 [R] of it: the columns' rows [C, …] in that order, in pieces."""


class CacheWriter:
    """Writes a cache file by file; whole files stay when it is killed, and the next writer resumes from them. The
    folder appears when everything is there. Several processes may each write some of the shards."""

    def __init__(self, folder: Path, source: Source, data: PreparedData, plan: CachePlan) -> None:
        self.folder, self.source, self.data, self.plan = folder, source, data, plan
        self.unfinished = unfinished(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing the same (to be entered in one process); removes a killed writer's half files.
        ValueError: another process is at it, or the folder holds other files."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ValueError(f"{self.folder} is there already, and is no {self.source.title}: move it away")
        self.unfinished.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.unfinished, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process is writing {self.folder}; wait for it") from error
            for leftover in self.unfinished.glob(".*"):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def missing(self) -> list[Shard]:
        """Files that are not there yet, or not of the planned form."""
        return [shard for shard in self.plan.shards if not self._is_written(shard)]

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
        file = {name: torch.empty(shape, dtype=columns[name].dtype) for name, shape in shard.shapes(columns).items()}
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
        with atomic_file(self.unfinished / shard.name) as out:
            out.write(save(file))
        return True

    def finish(self, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Hash every file, write the manifest, and move the folder to its final path."""
        assert not self.missing(), "files of other processes are missing"
        names = [*(shard.name for shard in self.plan.shards), DOCUMENTS]
        for path in self.unfinished.iterdir():
            if path.name not in names:
                path.unlink()
        documents = {"first_row": self.plan.first_row_D, "check": self.plan.check_D}
        with atomic_file(self.unfinished / DOCUMENTS) as out:
            out.write(save({name: torch.from_numpy(array) for name, array in documents.items()}))
        files = {}
        for name in names:
            files[name] = stamp(self.unfinished / name)
            progress(len(files), len(names))
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            self.source.size_name: self.plan.size,
            "rows": self.plan.rows,
            "shards": [asdict(shard) for shard in self.plan.shards],
            "files": files,
        }
        atomic_text(self.unfinished / self.source.manifest, json.dumps(manifest, indent=2) + "\n")
        self.unfinished.rename(self.folder)
        sync(self.folder.parent)

    def _is_written(self, shard: Shard) -> bool:
        path = self.unfinished / shard.name
        return path.is_file() and shapes_in(path) == shard.shapes(self.plan.columns)


def unfinished(folder: Path) -> Path:
    """Where a cache lies while it is written."""
    return folder.with_name(f".{folder.name}.unfinished")


def discard_damaged(folder: Path, damaged: Iterable[str]) -> None:
    """Turn a finished cache into an unfinished one without these files: a `CacheWriter` then writes them again."""
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(unfinished(folder), ignore_errors=True)
    folder.rename(unfinished(folder))
    sync(folder.parent)

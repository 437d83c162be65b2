"""Running a target over prepared data and keeping what it says: the writing side of `row_cache`.

Letters: R positions of a batch that have a row, C some of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ...checkpoints.storage.atomic import atomic_file, sync
from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from .row_cache import DOCUMENTS, SCHEMA, map_safetensors, stamp, stamps
from .row_plan import CachePlan, Shard, Source, kept_positions

MakeRows = Callable[[Batch, Tensor], Iterator[dict[str, Tensor]]]
"""From a batch and flattened positions int64 [R] of it: the columns' rows [C, …] in that order, in pieces."""


class CacheWriter:
    """Writes a cache file by file; what is whole stays when it is killed, and is gone on from.

    The folder appears when all is there and has been read back. Several processes may each write some of the shards.
    `known` are stamps of files by their names that were just found to be right, and need not be read again.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        data: PreparedData,
        plan: CachePlan,
        known: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.folder = folder
        self.source = source
        self.data = data
        self.plan = plan
        self.unfinished = unfinished(folder)
        self._known = dict(known or {})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing the same; enter it in one process, and remove what a killed one has left half done.

        Raises:
            ValueError: another process is at it, or the folder holds other files.
        """
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
        return [shard for shard in self.plan.shards if not self._whole(shard)]

    def rows(self, make_rows: MakeRows, first: int, end: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Run the target over the blocks `first` … `end` − 1 in one batch; rows in the machine's memory."""
        batch = self.data.batch(range(first, end))
        positions_R = torch.from_numpy(kept_positions(batch, self.plan.reach)).nonzero()[:, 0]
        if len(positions_R):
            for piece in make_rows(batch.to(device), positions_R.to(device)):
                yield {name: rows.cpu() for name, rows in piece.items()}

    def write(
        self,
        shard: Shard,
        make_rows: MakeRows,
        device: torch.device,
        batch_blocks: int = 4,
        progress: Callable[[int], object] = lambda rows: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run the target over a shard's blocks and write its file, whole or not at all. Returns False if stopped.

        Batches begin at the shard's first block, so that its bytes do not depend on which process writes it.
        """
        columns = self.plan.columns
        file = {name: torch.empty(shape, dtype=columns[name].dtype) for name, shape in shard.shapes(columns).items()}
        at = 0
        for first in range(shard.first_block, shard.end_block, batch_blocks):
            if stopping():
                return False
            before = at
            for piece in self.rows(make_rows, first, min(first + batch_blocks, shard.end_block), device):
                count = len(next(iter(piece.values())))
                for name, rows in piece.items():
                    file[name][at : at + count] = rows
                at += count
            progress(at - before)
        assert at == shard.rows, (at, shard)
        content = save(file)
        path = self.unfinished / shard.name
        _write_whole(path.with_suffix(".sha256"), _sum_line(hashlib.sha256(content).hexdigest(), path))
        _write_whole(path, content)
        return True

    def finish(self, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Read every file back, compare it with what was written, and put the folder in its place.

        Raises:
            ValueError: files are not what was written; they are deleted, so that writing goes on with them.
        """
        assert not self.missing(), "files of other processes are missing"
        self._remove_strangers()
        files = self._read_back(progress)
        documents = {"first_row": self.plan.first_row_D, "check": self.plan.check_D}
        _write_whole(
            self.unfinished / DOCUMENTS, save({name: torch.from_numpy(array) for name, array in documents.items()})
        )
        files[DOCUMENTS] = stamp(self.unfinished / DOCUMENTS)
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            self.source.size_name: self.plan.size,
            "rows": self.plan.rows,
            "shards": [asdict(shard) for shard in self.plan.shards],
            "files": files,
        }
        _write_whole(self.unfinished / self.source.manifest, (json.dumps(manifest, indent=2) + "\n").encode())
        self.unfinished.rename(self.folder)
        sync(self.folder.parent)

    def _read_back(self, progress: Callable[[int, int], object]) -> dict[str, dict[str, Any]]:
        """Stamps of all shards by name, compared with the sums beside them."""
        paths = [self.unfinished / shard.name for shard in self.plan.shards]
        sums = [path.with_suffix(".sha256").read_text(encoding="utf-8").split()[0] for path in paths]
        known = {path.name: self._known.get(path.name, {}) for path in paths}
        # one that was written again since it was known has another sum beside it
        unsure = [path for path, written in zip(paths, sums, strict=True) if known[path.name].get("sha256") != written]
        files = known | stamps(unsure, progress)
        wrong = [path for path, written in zip(paths, sums, strict=True) if files[path.name]["sha256"] != written]
        for path in wrong:
            path.unlink()
        if wrong:
            names = ", ".join(map(str, wrong))
            verb = "is" if len(wrong) == 1 else "are"
            raise ValueError(f"{names} {verb} not what was written there; the same command writes it again")
        return files

    def _whole(self, shard: Shard) -> bool:
        path = self.unfinished / shard.name
        if not (path.is_file() and path.with_suffix(".sha256").is_file()):
            return False
        try:
            arrays = map_safetensors(path)
        except ValueError:
            return False
        return {name: array.shape for name, array in arrays.items()} == shard.shapes(self.plan.columns)

    def _remove_strangers(self) -> None:
        ours = {shard.name for shard in self.plan.shards}
        ours |= {str(Path(name).with_suffix(".sha256")) for name in ours}
        for path in self.unfinished.iterdir():
            if path.name not in ours:
                path.unlink()


def unfinished(folder: Path) -> Path:
    """Where a cache lies while it is written."""
    return folder.with_name(f".{folder.name}.unfinished")


def set_aside(folder: Path, damaged: Iterable[str], known: Mapping[str, dict[str, Any]]) -> None:
    """Make of a finished cache one that is being written and lacks `damaged`; nothing else in it is touched.

    `known` are the stamps of the files that are right, whose sums beside them are written anew where they are not.
    Killed anywhere in between, it leaves a finished cache without some files, or one that is being written.

    Raises:
        ValueError: one that is being written lies there as well.
    """
    aside = unfinished(folder)
    if aside.exists() and any(aside.iterdir()):
        raise ValueError(f"{folder} is damaged, and {aside} is another one, half written: delete either")
    for name in damaged:
        for path in (folder / name, (folder / name).with_suffix(".sha256")):
            path.unlink(missing_ok=True)
    for name, written in known.items():
        path = (folder / name).with_suffix(".sha256")
        line = _sum_line(written["sha256"], folder / name)
        if name != DOCUMENTS and (not path.is_file() or path.read_bytes() != line):
            _write_whole(path, line)
    folder.rename(aside)
    sync(folder.parent)


def _sum_line(sha256: str, path: Path) -> bytes:
    return f"{sha256}  {path.name}\n".encode()


def _write_whole(path: Path, content: bytes) -> None:
    with atomic_file(path) as out:
        out.write(content)

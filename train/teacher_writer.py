"""Running a target over prepared data and keeping its most likely tokens: the writing side of `teacher_cache`.

Letters: X flattened positions of a batch, R positions whose next token is trained on, C positions of a chunk, K tokens
kept, E hidden of the target, V vocabulary.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from ..checkpoints.artifact import sync
from ..data.packing import Batch
from ..data.prepared import PreparedData, token_dtype
from .chunks import DenseTeacher
from .losses import IGNORED, shifted_labels
from .teacher_cache import (
    DOCUMENTS,
    MANIFEST,
    SCHEMA,
    CachePlan,
    CacheSource,
    Shard,
    TeacherCache,
    map_safetensors,
    shapes_of,
    stamp,
)

_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits at a time

Run = Callable[[Batch], DenseTeacher]


@torch.no_grad()
def top_log_probs(teacher: DenseTeacher, positions_R: Tensor, top_k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids int64 [C, K] and log-probabilities float32 [C, K] of the most likely tokens, chunk by chunk of positions.

    log p(v) = z_v − log Σ_u exp z_u, over the whole vocabulary at temperature 1; the most likely first.

    Raises:
        ValueError: logits that are not finite.
    """
    weight_VE = teacher.weight_VE
    vocab = teacher.hidden_XE.shape[1] if weight_VE is None else len(weight_VE)
    elements = _CHUNK_ELEMENTS.get(positions_R.device.type, 1 << 23)
    for positions_C in positions_R.split(max(16, elements // vocab)):
        hidden_CE = teacher.hidden_XE[positions_C]
        logits_CV = (hidden_CE if weight_VE is None else hidden_CE @ weight_VE.T).float()
        top_CK, ids_CK = logits_CV.topk(top_k)
        total_C1 = logits_CV.logsumexp(1, keepdim=True)
        if not bool(total_C1.isfinite().all()):
            raise ValueError("the target's logits are not finite: load it with a wider `teacher.dtype`")
        yield ids_CK, top_CK - total_C1


class CacheWriter:
    """Writes a cache file by file; what is whole stays when it is killed, and is gone on from.

    The folder appears when all is there and has been read back. Several processes may each write some of the shards.
    """

    def __init__(self, folder: Path, source: CacheSource, data: PreparedData, plan: CachePlan) -> None:
        self.folder = folder
        self.source = source
        self.data = data
        self.plan = plan
        self.unfinished = folder.with_name(f".{folder.name}.unfinished")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from writing the same; enter it in one process, and remove what a killed one has left half done.

        Raises:
            ValueError: another process is at it, or the folder holds other files.
        """
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise ValueError(f"{self.folder} is there already, and is no cache of a teacher: move it away")
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

    def rows(self, run: Run, first: int, end: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the target over the blocks `first` … `end` − 1 in one batch; see `top_log_probs`."""
        batch = self.data.batch(range(first, end)).to(device)
        labels_BT = shifted_labels(batch.labels_BT, batch.documents_BT, 1)
        positions_R = (labels_BT != IGNORED).flatten().nonzero()[:, 0]
        if len(positions_R):
            yield from top_log_probs(run(batch), positions_R, self.plan.top_k)

    def write(
        self,
        shard: Shard,
        run: Run,
        device: torch.device,
        batch_blocks: int = 4,
        progress: Callable[[int], object] = lambda rows: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run the target over a shard's blocks and write its file, whole or not at all. Returns False if stopped.

        Batches begin at the shard's first block, so that its bytes do not depend on which process writes it.
        """
        shapes = shapes_of(shard.rows, self.plan.top_k)
        ids_RK = np.empty(shapes["ids"], dtype=token_dtype(self.plan.vocab_size))
        log_probs_RK = np.empty(shapes["log_probs"], dtype=np.float16)
        log_rest_R = np.empty(shapes["log_rest"], dtype=np.float16)
        at = 0
        for first in range(shard.first_block, shard.end_block, batch_blocks):
            if stopping():
                return False
            before = at
            for ids_CK, log_probs_CK in self.rows(run, first, min(first + batch_blocks, shard.end_block), device):
                place = slice(at, at + len(ids_CK))
                ids_RK[place] = ids_CK.cpu().numpy()
                log_probs_RK[place] = log_probs_CK.half().cpu().numpy()
                rest_C = (1 - log_probs_CK.double().exp().sum(1)).clamp(min=0)
                log_rest_R[place] = rest_C.log().half().cpu().numpy()
                at = place.stop
            progress(at - before)
        assert at == shard.rows, (at, shard)
        content = save({"ids": ids_RK, "log_probs": log_probs_RK, "log_rest": log_rest_R})
        path = self.unfinished / shard.name
        line = f"{hashlib.sha256(content).hexdigest()}  {shard.name}\n"
        _write_whole(path.with_suffix(".sha256"), line.encode())
        _write_whole(path, content)
        return True

    def finish(self) -> TeacherCache:
        """Read every file back, compare it with what was written, and put the folder in its place.

        Raises:
            ValueError: a file is not what was written; it is deleted, so that writing goes on with it.
        """
        assert not self.missing(), "files of other processes are missing"
        self._remove_strangers()
        files = {}
        for shard in self.plan.shards:
            path = self.unfinished / shard.name
            written = path.with_suffix(".sha256").read_text(encoding="utf-8").split()[0]
            files[shard.name] = stamp(path)
            if files[shard.name]["sha256"] != written:
                path.unlink()
                raise ValueError(f"{path} is not what was written there; the same command writes it again")
        _write_whole(
            self.unfinished / DOCUMENTS, save({"first_row": self.plan.first_row_D, "check": self.plan.check_D})
        )
        files[DOCUMENTS] = stamp(self.unfinished / DOCUMENTS)
        manifest = {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "data_sha256": self.data.manifest.get("sha256"),
            "vocab_size": self.plan.vocab_size,
            "rows": self.plan.rows,
            "shards": [asdict(shard) for shard in self.plan.shards],
            "files": files,
        }
        _write_whole(self.unfinished / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        self.unfinished.rename(self.folder)
        sync(self.folder.parent)
        return TeacherCache.load(self.folder, self.source)

    def _whole(self, shard: Shard) -> bool:
        path = self.unfinished / shard.name
        if not (path.is_file() and path.with_suffix(".sha256").is_file()):
            return False
        try:
            arrays = map_safetensors(path)
        except ValueError:
            return False
        return {name: array.shape for name, array in arrays.items()} == shapes_of(shard.rows, self.plan.top_k)

    def _remove_strangers(self) -> None:
        ours = {shard.name for shard in self.plan.shards}
        ours |= {str(Path(name).with_suffix(".sha256")) for name in ours}
        for path in self.unfinished.iterdir():
            if path.name not in ours:
                path.unlink()


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

"""Writes a small cache of what a target says in child processes that are killed after so many seconds each, then in
one that is left alone.

python cache_worker.py '{"folder": "…", "kind": "hidden", "kills": [0.01, 0.2], "pause": 0.004}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from draftsmith.train.teachers.hidden_cache import HiddenCache, HiddenRows, HiddenSource
from draftsmith.train.teachers.row_cache import RowCache
from draftsmith.train.teachers.row_plan import CachePlan, Source
from draftsmith.train.teachers.row_writer import CacheWriter, MakeRows
from draftsmith.train.teachers.teacher import ModelTeacher
from draftsmith.train.teachers.top_k_cache import CacheSource, TeacherCache, TopRows

TOP_K = 5
CACHES: dict[str, type[RowCache]] = {"top": TeacherCache, "hidden": HiddenCache}


def make_source(kind: str) -> Source:
    told = ("nowhere", "a model", "some data")
    return CacheSource(*told, top_k=TOP_K) if kind == "top" else HiddenSource(*told)


def make_rows(kind: str, model: Any) -> tuple[MakeRows, int]:
    """What makes rows of a model's states, and the size that these depend on."""
    if kind == "top":
        teacher = ModelTeacher(model)
        return TopRows(teacher, TOP_K), teacher.vocab_size
    rows = HiddenRows(model)
    return rows, rows.hidden_size


def make_writer(folder: Path, data: Any, kind: str, size: int, shard_bytes: int | None = None) -> CacheWriter:
    """Some twenty files of a few blocks each, unless `shard_bytes` says otherwise."""
    source = make_source(kind)
    row_bytes = sum(column.row_bytes for column in source.columns(size).values())
    return CacheWriter(folder, source, data, CachePlan.of(data, source, size, shard_bytes or row_bytes * 20))


def write(folder: Path, data: Any, kind: str, model: Any, pause: float = 0.0, shard_bytes: int | None = None) -> None:
    rows, size = make_rows(kind, model)
    writer = make_writer(folder, data, kind, size, shard_bytes)
    with writer.locked():
        for shard in writer.missing():
            writer.write(shard, rows, torch.device("cpu"), 1, progress=lambda rows: time.sleep(pause))
            os.write(1, f"wrote {shard.number}\n".encode())  # at once, so that no kill leaves half a line
        writer.finish()


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    from worker import make_data, make_model

    data, model = make_data(48), make_model()
    folder = Path(options["folder"])
    for seconds in [*options["kills"], None]:
        child = os.fork()
        if child == 0:
            write(folder, data, options["kind"], model, options["pause"])
            os._exit(0)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

"""Writes a small cache of a teacher in child processes that are killed after so many seconds each, then in one that is
left alone.

python teacher_worker.py '{"folder": "…", "kills": [0.01, 0.2]}'
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from draftsmith.train.teacher import ModelTeacher
from draftsmith.train.teacher_cache import CachePlan, CacheSource
from draftsmith.train.teacher_writer import CacheWriter

TOP_K = 5


def load_worker() -> ModuleType:
    """`worker.py` beside this file."""
    spec = importlib.util.spec_from_file_location("train_worker", Path(__file__).with_name("worker.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_writer(folder: Path, data: Any) -> CacheWriter:
    """Some twenty files of a few blocks each."""
    source = CacheSource("nowhere", "a model", "some data", TOP_K)
    return CacheWriter(folder, source, data, CachePlan.of(data, TOP_K, 32, shard_bytes=TOP_K * 4 * 20))


def write(folder: Path, data: Any, teacher: ModelTeacher, pause: float) -> None:
    writer = make_writer(folder, data)
    with writer.locked():
        for shard in writer.missing():
            writer.write(shard, teacher, torch.device("cpu"), 1, progress=lambda rows: time.sleep(pause))
            print("wrote", shard.number, flush=True)
        writer.finish()


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    worker = load_worker()
    data, teacher = worker.make_data(48), ModelTeacher(worker.make_model())
    folder = Path(options["folder"])
    for seconds in [*options["kills"], None]:
        child = os.fork()
        if child == 0:
            write(folder, data, teacher, options["pause"])
            os._exit(0)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

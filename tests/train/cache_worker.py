"""A small cache of what a target says, of either kind."""

from __future__ import annotations

from collections.abc import Callable
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


def make_writer(folder: Path, data: Any, kind: str, size: int) -> CacheWriter:
    """Some files of a few blocks each."""
    source = make_source(kind)
    row_bytes = sum(column.row_bytes for column in source.columns(size).values())
    return CacheWriter(folder, source, data, CachePlan.of(data, source, size, row_bytes * 20))


def write(
    folder: Path, data: Any, kind: str, model: Any, progress: Callable[[int], object] = lambda rows: None
) -> None:
    rows, size = make_rows(kind, model)
    writer = make_writer(folder, data, kind, size)
    with writer.locked():
        for shard in writer.missing():
            writer.write(shard, rows, torch.device("cpu"), 1, progress)
        writer.finish()

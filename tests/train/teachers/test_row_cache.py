"""Caches of target outputs in several files: interrupted, damaged and repaired."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.train.teachers.cache import DOCUMENTS, CacheWriter, MakeRows, RowCache, Source
from draftsmith.train.teachers.teacher import CacheSource, HiddenRows, HiddenSource, ModelTeacher, top_rows
from safetensors.torch import load_file, save_file

CPU, TOP_K = torch.device("cpu"), 5
SOURCES: dict[str, type[Source]] = {"top": CacheSource, "hidden": HiddenSource}


def make_source(kind: str) -> Source:
    identity = ("nowhere", "a model", "some data")
    return CacheSource(*identity, top_k=TOP_K) if kind == "top" else HiddenSource(*identity)


def make_rows(kind: str, model: Any) -> tuple[MakeRows, int]:
    """Return the function that computes the cached rows of a model, and its vocabulary or hidden size."""
    if kind == "top":
        teacher = ModelTeacher(model)
        return partial(top_rows, teacher, TOP_K), teacher.vocab_size
    rows = HiddenRows(model)
    return rows, rows.hidden_size


def make_writer(folder: Path, data: Any, kind: str, size: int) -> CacheWriter:
    """Return a writer with a small file size, so that a cache has several files."""
    source = make_source(kind)
    row_bytes = sum(column.row_bytes for column in source.columns(size).values())
    return CacheWriter(folder, source, data, size, row_bytes * 20)


def write(
    folder: Path, data: Any, kind: str, model: Any, progress: Callable[[int], object] = lambda rows: None
) -> None:
    rows, size = make_rows(kind, model)
    writer = make_writer(folder, data, kind, size)
    for shard in writer.missing_shards():
        writer.write(shard, rows, CPU, 1, progress)
    writer.finish()


@pytest.fixture(params=["top", "hidden"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(worker: ModuleType) -> Any:
    return worker.make_data(12)


@pytest.fixture
def cache(kind: str, worker: ModuleType, data: Any, tmp_path: Path) -> RowCache:
    write(tmp_path / "cache", data, kind, worker.make_model())
    return RowCache(tmp_path / "cache", SOURCES[kind])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def take(cache: RowCache, rows: np.ndarray) -> dict[str, torch.Tensor]:
    return cache.gather(rows, cache.columns)


def test_rows_in_any_order(cache: RowCache):
    whole = take(cache, np.arange(cache.rows))
    assert len(cache.manifest["shards"]) >= 5
    rng = np.random.default_rng(0)
    for rows in (rng.permutation(cache.rows), np.array([7, 8, 9, 3, 7, cache.rows - 1]), np.array([], dtype=int)):
        for name, tensor in take(cache, rows).items():
            assert torch.equal(tensor, whole[name][rows])


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "documents", "schema", "shards"])
def test_damage_is_named(kind: str, cache: RowCache, damage: str):
    path, manifest = cache.folder / "rows-00002.safetensors", cache.folder / cache.source.manifest
    values = json.loads(manifest.read_text())
    if damage == "flipped":
        flip(path)
    elif damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    elif damage == "documents":
        path = cache.folder / DOCUMENTS
        flip(path)
    else:
        path = manifest
        manifest.write_text(
            json.dumps(values | {"schema": {"schema": 99}, "shards": {"shards": [{"number": 1}]}}[damage])
        )

    def read() -> None:
        fresh = RowCache(cache.folder, SOURCES[kind])
        take(fresh, np.arange(fresh.rows))

    for _ in range(2):
        with pytest.raises(ValueError, match=path.name):
            read()


def test_a_file_of_other_rows_is_written_again(kind: str, cache: RowCache, worker: ModuleType, data: Any):
    before = contents(cache.folder)
    (cache.folder / cache.source.manifest).unlink()
    shorter, fewer = (cache.folder / f"rows-0000{number}.safetensors" for number in (1, 3))
    shorter.write_bytes(shorter.read_bytes()[:-1])
    save_file({name: rows[1:].contiguous() for name, rows in load_file(fewer).items()}, fewer)
    write(cache.folder, data, kind, worker.make_model())
    assert contents(cache.folder) == before


def test_a_writer_stops_between_batches(kind: str, worker: ModuleType, data: Any, tmp_path: Path):
    rows, size = make_rows(kind, worker.make_model())
    writer = make_writer(tmp_path / "cache", data, kind, size)
    calls: list[int] = []
    first = writer.shards[0]
    assert not writer.write(first, rows, CPU, 1, progress=calls.append, stopping=lambda: len(calls) == 1)
    assert len(calls) == 1
    assert writer.missing_shards() == writer.shards
    assert not writer.folder.exists()


def test_a_killed_writer_is_resumed_after_complete_files(
    cache: RowCache, kind: str, worker: ModuleType, data: Any, tmp_path: Path
):
    folder, killed = tmp_path / "killed", iter(range(99))

    def progress(rows: int) -> None:
        if next(killed) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(folder, data, kind, worker.make_model(), progress)
    whole = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert 0 < len(whole) < len(cache.manifest["shards"])
    unfinished = f".{cache.manifest['shards'][-1]['number']}.{os.getpid()}-01234567.saving"
    (folder / unfinished).write_bytes(b"half a file")
    (folder / f"{unfinished}.lock").touch()  # an unfinished file of a killed writer
    write(folder, data, kind, worker.make_model())
    assert contents(folder) == contents(cache.folder)
    assert all((folder / name).stat().st_ino == number for name, number in whole.items())

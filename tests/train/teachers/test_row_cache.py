"""What a target says, kept on disk: written file by file, killed, damaged and mended; for both kinds of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.losses.drafter import IGNORED, shifted_labels
from draftsmith.train.teachers.row_cache import DOCUMENTS, RowCache, find_damage, map_safetensors
from draftsmith.train.teachers.row_plan import kept_positions
from draftsmith.train.teachers.row_writer import CacheWriter, set_aside, unfinished
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")
MENDED = r"`draftsmith prepare` with this recipe and `--teacher` writes it again, and nothing else"


@pytest.fixture(scope="module")
def cache_worker(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(Path(__file__).parents[1] / "cache_worker.py")


@pytest.fixture(params=["top", "hidden"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(worker: ModuleType) -> Any:
    return worker.make_data(12)


@pytest.fixture
def cache(kind: str, cache_worker: ModuleType, worker: ModuleType, data: Any, tmp_path: Path) -> RowCache:
    cache_worker.write(tmp_path / "cache", data, kind, worker.make_model())
    return cache_worker.CACHES[kind].load(tmp_path / "cache")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stood(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file it is, and when it was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def every_row(cache: RowCache) -> dict[str, np.ndarray]:
    rows = {name: np.empty((cache.rows, *c.shape), dtype=c.stored) for name, c in cache.columns.items()}
    cache.gather(np.arange(cache.rows), rows)
    return rows


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 24), st.integers(1, 3))
def test_a_position_has_a_row_if_a_token_within_reach_is_trained(drawn: st.DataObject, reach: int, length: int, b: int):
    seed, share = drawn.draw(st.integers(0, 2**32 - 1)), drawn.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    rng = np.random.default_rng(seed)
    documents = np.sort(rng.integers(0, 3, (b, length)), axis=1)
    documents[:, length - rng.integers(0, length) :] = -1
    labels = np.where((rng.random((b, length)) < share) & (documents >= 0), 1, IGNORED)
    labels_BT, documents_BT = torch.from_numpy(labels), torch.from_numpy(documents)
    batch = Batch(labels_BT, labels_BT, labels_BT, documents_BT)
    wanted_BT = torch.zeros(b, length, dtype=torch.bool)
    for offset in range(1, reach + 1):
        wanted_BT |= shifted_labels(labels_BT, documents_BT, offset) != IGNORED
    assert kept_positions(batch, reach).tolist() == wanted_BT.flatten().tolist()


def test_rows_are_gathered_in_any_order_from_files_of_which_few_are_open(
    cache: RowCache, monkeypatch: pytest.MonkeyPatch
):
    whole = every_row(cache)
    assert len(cache.manifest["shards"]) >= 5
    monkeypatch.setattr("draftsmith.train.teachers.row_cache._OPEN_SHARDS", 2)
    fresh = type(cache).load(cache.folder)
    rng = np.random.default_rng(0)
    for rows in (rng.permutation(cache.rows), np.array([7, 8, 9, 3, 7, cache.rows - 1]), np.array([], dtype=int)):
        for name, column in cache.columns.items():
            found = np.empty((len(rows), *column.shape), dtype=column.stored)
            fresh.gather(rows, {name: found})
            np.testing.assert_array_equal(found, whole[name][rows])
        assert len(fresh._open) <= 2


def test_a_cache_of_more_files_than_a_process_may_open_is_read(
    cache_worker: ModuleType, worker: ModuleType, tmp_path: Path
):
    model = worker.make_model()
    data = worker.make_data(120)
    rows, size = cache_worker.make_rows("hidden", model)
    source = cache_worker.make_source("hidden")
    plan = cache_worker.CachePlan.of(data, source, size, shard_bytes=1)
    writer = CacheWriter(tmp_path / "cache", source, data, plan)
    with writer.locked():
        for shard in writer.missing():
            writer.write(shard, rows, CPU, 1)
        writer.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert len(plan.shards) > 110
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, before + 100), hard))
        found = every_row(cache_worker.CACHES["hidden"].load(tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(found["hidden"]) == plan.rows


def test_damage_is_found_and_named(cache: RowCache):
    manifest_name = cache.source.manifest
    path = cache.folder / "rows-00002.safetensors"
    whole = path.read_bytes()
    load = type(cache).load
    cache.verify()
    flip(path)
    with pytest.raises(ValueError, match=rf"rows-00002.safetensors is damaged: its SHA-256 is not .*: {MENDED}"):
        load(cache.folder).verify()
    assert list(find_damage(cache.folder, cache.source_type)) == [path.name]
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"rows-00002.safetensors is damaged: it has {len(whole) - 1} bytes"):
        load(cache.folder)
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(ValueError, match=r"rows-00002.safetensors is damaged"):
        load(cache.folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"rows-00002.safetensors is missing: {MENDED}"):
        load(cache.folder)
    flip(cache.folder / "rows-00000.safetensors")
    assert sorted(find_damage(cache.folder, cache.source_type)) == ["rows-00000.safetensors", path.name]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"rows-00002.safetensors is damaged: not a safetensors file of ours"):
        map_safetensors(path)
    path.write_bytes(whole)
    manifest = json.loads((cache.folder / manifest_name).read_text())
    for text, message in (
        (json.dumps(manifest | {"schema": 99}), "schema 99, this version reads 1"),
        (json.dumps(manifest | {"shards": [{"number": 1}]}), "not the manifest"),
        ("{", "not the manifest"),
    ):
        (cache.folder / manifest_name).write_text(text)
        with pytest.raises(ValueError, match=message):
            load(cache.folder)


def test_a_run_that_takes_rows_of_a_damaged_file_ends_and_others_go_on(cache: RowCache, data: Any):
    shards = cache.manifest["shards"]
    path = cache.folder / "rows-00003.safetensors"
    flip(path, len(path.read_bytes()) // 2)  # of the size and form that it should have
    fresh = type(cache).load(cache.folder)

    def take(shard: dict[str, int]) -> None:
        found = fresh.find(data.batch(range(shard["first_block"], shard["end_block"])))
        assert found is not None
        rows = found[1]
        fresh.gather(rows, {name: np.empty((len(rows), *c.shape), c.stored) for name, c in fresh.columns.items()})

    for shard in shards[:3] + shards[4:]:
        take(shard)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=r"rows-00003.safetensors is damaged: its SHA-256"):
            take(shards[3])
    flip(path, len(path.read_bytes()) // 2)
    take(shards[3])
    path.unlink()
    fresh._open.clear()
    with pytest.raises(ValueError, match=r"rows-00003.safetensors is missing"):
        take(shards[3])
    flip(cache.folder / DOCUMENTS)
    with pytest.raises(ValueError, match=r"documents.safetensors is damaged"):
        type(cache)(cache.folder, cache.manifest, checked=False)


@pytest.mark.parametrize("stopped_after", [0, 1, 2])
def test_only_what_is_damaged_is_written_again(
    kind: str, cache: RowCache, cache_worker: ModuleType, worker: ModuleType, data: Any, stopped_after: int
):
    before, stood_before = contents(cache.folder), stood(cache.folder)
    hurt = ["rows-00001.safetensors", "rows-00003.safetensors", DOCUMENTS]
    flip(cache.folder / hurt[0])
    (cache.folder / hurt[1]).unlink()
    flip(cache.folder / hurt[2])
    (cache.folder / "rows-00000.sha256").write_text("nonsense")  # nobody reads it; it is put right all the same
    (cache.folder / "rows-00002.sha256").unlink()
    files = cache.manifest["files"]
    damaged = find_damage(cache.folder, cache.source_type)
    assert sorted(damaged) == sorted(hurt)
    known = {name: stamp for name, stamp in files.items() if name not in damaged}
    set_aside(cache.folder, damaged, known)
    assert not cache.folder.exists()
    if stopped_after == 1:  # killed before it wrote: what is known is forgotten
        known = {}
    model = worker.make_model()
    rows, size = cache_worker.make_rows(kind, model)
    writer = cache_worker.make_writer(cache.folder, data, kind, size, known=known)
    assert [shard.name for shard in writer.missing()] == hurt[:2]
    if stopped_after == 2:  # killed between the two
        with writer.locked():
            writer.write(writer.missing()[0], rows, CPU, 1)
        assert [shard.name for shard in writer.missing()] == hurt[1:2]
    cache_worker.write(cache.folder, data, kind, model, known=known)
    assert contents(cache.folder) == before
    touched = {name for name, old in stood_before.items() if stood(cache.folder)[name] != old}
    written = {*hurt, "rows-00001.sha256", "rows-00003.sha256", "rows-00000.sha256", "rows-00002.sha256"}
    assert touched == written | {cache.source.manifest}
    type(cache).load(cache.folder).verify()


def test_what_is_damaged_while_it_is_mended_is_found(
    kind: str, cache: RowCache, cache_worker: ModuleType, worker: ModuleType, data: Any
):
    """The stamps that are taken on trust are those of files that were just read."""
    set_aside(cache.folder, ["rows-00001.safetensors"], {})
    flip(unfinished(cache.folder) / "rows-00004.safetensors")
    with pytest.raises(ValueError, match=r"rows-00004.safetensors is not what was written there; the same command"):
        cache_worker.write(cache.folder, data, kind, worker.make_model())
    cache_worker.write(cache.folder, data, kind, worker.make_model())
    type(cache).load(cache.folder).verify()

    shutil.copytree(cache.folder, unfinished(cache.folder))
    with pytest.raises(ValueError, match=r"cache is damaged, and .*\.cache\.unfinished is another one, half written"):
        set_aside(cache.folder, ["rows-00001.safetensors"], {})
    assert (cache.folder / "rows-00001.safetensors").is_file()


def test_the_sums_beside_the_files_are_what_other_tools_read(cache: RowCache):
    for path in cache.folder.glob("rows-*.safetensors"):
        expected = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        assert path.with_suffix(".sha256").read_text() == expected
    rows = map_safetensors(cache.folder / "rows-00001.safetensors")
    assert all(isinstance(array, np.memmap) for array in rows.values())  # nothing but what is asked for is read
    assert {len(array) for array in rows.values()} == {cache.manifest["shards"][1]["rows"]}


def test_what_the_disk_garbles_is_found_before_the_cache_counts_as_written(
    kind: str, worker: ModuleType, cache_worker: ModuleType, data: Any, tmp_path: Path
):
    rows, size = cache_worker.make_rows(kind, worker.make_model())
    writer = cache_worker.make_writer(tmp_path / "cache", data, kind, size)
    with writer.locked():
        shards = writer.missing()
        for shard in shards:
            writer.write(shard, rows, CPU, 1)
        path = writer.unfinished / shards[1].name
        flip(path)
        with pytest.raises(ValueError, match=r"rows-00001.safetensors is not what was written"):
            writer.finish()
        assert not writer.folder.exists()
        assert writer.missing() == [shards[1]]
        with pytest.raises(ValueError, match="another process is writing"), writer.locked():
            pass
        writer.write(shards[1], rows, CPU, 1)
        writer.finish()
    assert cache_worker.CACHES[kind].load(writer.folder).rows == writer.plan.rows
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with (
        pytest.raises(ValueError, match="is there already, and is no"),
        cache_worker.make_writer(tmp_path / "notes", data, kind, size).locked(),
    ):
        pass


def test_writing_stops_between_batches_when_asked(
    kind: str, worker: ModuleType, cache_worker: ModuleType, data: Any, tmp_path: Path
):
    rows, size = cache_worker.make_rows(kind, worker.make_model())
    writer = cache_worker.make_writer(tmp_path / "cache", data, kind, size)
    writer.unfinished.mkdir()
    asked: list[int] = []
    first = writer.plan.shards[0]
    done = writer.write(first, rows, CPU, 1, progress=asked.append, stopping=lambda: len(asked) == 1)
    assert not done
    assert len(asked) == 1
    assert writer.missing() == list(writer.plan.shards)
    assert list(writer.unfinished.iterdir()) == []


def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(kind: str, tmp_path: Path):
    def run(name: str, kills: list[float]) -> tuple[dict[str, bytes], list[str]]:
        folder = tmp_path / name
        options = json.dumps({"folder": str(folder), "kind": kind, "kills": kills, "pause": 0.004})
        command = [sys.executable, str(Path(__file__).parents[1] / "cache_worker.py"), options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
        assert done.returncode == 0, done.stderr
        return contents(folder), done.stdout.splitlines()

    rng = random.Random(os.getpid())
    kills = [rng.uniform(0.0, 0.25) for _ in range(10)]
    undisturbed, lines = run("undisturbed", [])
    shards = sum(name.endswith(".safetensors") for name in undisturbed) - 1
    assert lines == [*(f"wrote {number}" for number in range(shards)), "ended 0"]
    assert shards > 15
    killed, lines = run("killed", kills)
    assert killed == undisturbed, kills
    assert lines.count("ended -9") >= 2, kills
    written = [line for line in lines if line.startswith("wrote")]
    # no file that was whole is written again; one may be whole although the process died before it said so
    assert len(set(written)) == len(written) >= shards - lines.count("ended -9"), lines
    assert not list(tmp_path.glob(".*"))

"""What a target says, kept on disk: written file by file, killed, damaged, made whole again; both kinds of it."""

from __future__ import annotations

import json
import os
import random
import resource
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
from draftsmith.train.teachers.row_cache import DOCUMENTS, RowCache, find_damage
from draftsmith.train.teachers.row_plan import kept_positions
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


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


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def take(cache: RowCache, rows: np.ndarray) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(len(rows), *c.shape, dtype=c.dtype) for name, c in cache.columns.items()}
    cache.gather(rows, found)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 24), st.integers(1, 3))
def test_positions_with_a_trained_token_within_reach(drawn: st.DataObject, reach: int, length: int, b: int):
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


def test_rows_in_any_order(cache: RowCache):
    whole = take(cache, np.arange(cache.rows))
    assert len(cache.manifest["shards"]) >= 5
    rng = np.random.default_rng(0)
    for rows in (rng.permutation(cache.rows), np.array([7, 8, 9, 3, 7, cache.rows - 1]), np.array([], dtype=int)):
        for name, found in take(cache, rows).items():
            assert torch.equal(found, whole[name][rows])


def test_more_files_than_a_process_may_open(cache_worker: ModuleType, worker: ModuleType, tmp_path: Path):
    cache_worker.write(tmp_path / "cache", worker.make_data(120), "hidden", worker.make_model(), shard_bytes=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, before + 100), hard))
        cache = cache_worker.CACHES["hidden"].load(tmp_path / "cache")
        found = take(cache, np.arange(cache.rows))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(cache.manifest["shards"]) > 110
    assert len(found["hidden"]) == cache.rows


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flipped", "SHA-256"),
        ("shorter", "bytes"),
        ("garbage", "rows-00002"),
        ("gone", "rows-00002"),
        ("documents", DOCUMENTS),
        ("schema", "99"),
        ("shards", "json"),
    ],
)
def test_damage_is_found_and_named(cache: RowCache, damage: str, words: str):
    path, manifest = cache.folder / "rows-00002.safetensors", cache.folder / cache.source.manifest
    told, whole = json.loads(manifest.read_text()), path.read_bytes()
    match damage:
        case "flipped":
            flip(path)
        case "shorter":
            path.write_bytes(whole[:-1])
        case "garbage":
            path.write_bytes(b"\xff" * len(whole))
        case "gone":
            path.unlink()
        case "documents":
            flip(cache.folder / DOCUMENTS)
        case "schema":
            manifest.write_text(json.dumps(told | {"schema": 99}))
        case "shards":
            manifest.write_text(json.dumps(told | {"shards": [{"number": 1}]}))

    def read() -> None:
        fresh = type(cache).load(cache.folder)
        take(fresh, np.arange(fresh.rows))

    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            read()
    if damage in ("flipped", "shorter", "garbage", "gone"):
        assert list(find_damage(cache.folder, told["files"])) == [path.name]


def test_one_writer_at_a_time_and_no_foreign_folder(
    kind: str, worker: ModuleType, cache_worker: ModuleType, data: Any, tmp_path: Path
):
    size = cache_worker.make_rows(kind, worker.make_model())[1]
    writer = cache_worker.make_writer(tmp_path / "cache", data, kind, size)
    with writer.locked(), pytest.raises(ValueError, match="cache"), writer.locked():
        pass
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    with (
        pytest.raises(ValueError, match="notes"),
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
    assert not writer.write(first, rows, CPU, 1, progress=asked.append, stopping=lambda: len(asked) == 1)
    assert len(asked) == 1
    assert writer.missing() == list(writer.plan.shards)
    assert list(writer.unfinished.iterdir()) == []


@pytest.mark.parametrize("kind", ["hidden", pytest.param("top", marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_resumes_to_the_same_bytes(kind: str, tmp_path: Path):
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

"""The teacher cache: written by the command line, and read by training."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draftsmith.checkpoints.storage.locks import sole_writer
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import Prepared, prepare_data
from draftsmith.recipes.assemble.teacher import open_caches, prepare_teacher
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.plan import size_of
from draftsmith.recipes.commands.training.train import make_run, run_train
from draftsmith.recipes.schema.loading import load_training
from draftsmith.train.losses.drafter import IGNORED, shifted_labels
from draftsmith.train.parallel.accelerate import make_accelerator
from draftsmith.train.parallel.processes import Interrupted
from draftsmith.train.teachers.cache import CacheWriter, RowCache
from draftsmith.train.teachers.teacher import CachedTeacher, CacheSource, ModelTeacher, load_teacher, mean_mass
from typer.testing import CliRunner

# the command line with small cache files, so that a small corpus needs several
SMALL_FILES = """
import draftsmith.train.teachers.cache as rows
from draftsmith.recipes.commands.cli import main
rows.SHARD_BYTES = 8000
if __name__ == "__main__":
    main()
"""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def recipe_file(drafter_recipe: Path, tmp_path: Path, corpus: Path, make_llama: Callable[..., Any]) -> Path:
    """Write a recipe whose drafter learns from the cached top-6 probabilities of a small target."""
    target = tmp_path / "target"
    make_llama(320, seed=1, sharpness=2.0).save_pretrained(target)
    shutil.copytree(corpus / "tokenizer", target, dirs_exist_ok=True)
    values = yaml.safe_load(drafter_recipe.read_text())
    values |= {"target": str(target), "objective": {"forward-kl": 1.0}}
    values["teacher"] = {"top_k": 6, "cache": str(tmp_path / "teachers"), "batch": 2}
    drafter_recipe.write_text(yaml.safe_dump(values))
    return drafter_recipe


@pytest.fixture
def heads_file(recipe_file: Path, tmp_path: Path) -> Path:
    """Write a recipe whose heads learn from cached hidden states of the same target."""
    values = yaml.safe_load(recipe_file.read_text())
    heads = {"kind": "heads", "out": str(tmp_path / "heads"), "num_heads": 2}
    heads |= {key: values[key] for key in ("target", "data", "train")}
    heads["hidden"] = {"cache": str(tmp_path / "hidden"), "batch": 2}
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(heads))
    return path


def loaded(file: Path, *overrides: str) -> Any:
    return load_training(str(file), overrides)


def prepared_of(recipe: Any) -> Prepared:
    return prepare_data(recipe.data, load_tokenizer(recipe.tokenizer_source), quiet=True)


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def test_the_command_writes_the_cache_that_training_reads(recipe_file: Path):
    recipe = loaded(recipe_file)
    prepared = prepared_of(recipe)
    with pytest.raises(ValueError, match=r"top 6 .*--teacher"):
        open_caches(recipe, prepared)

    done = CliRunner().invoke(app, ["prepare", str(recipe_file), "--teacher"])
    assert done.exit_code == 0, done.output
    folder = Path(done.stdout.strip())
    cache = RowCache(folder, CacheSource)
    rows = prepared.train.manifest["trainable_tokens"]
    heldout_rows = prepared.heldout.manifest["trainable_tokens"]
    assert cache.rows == rows
    size = (rows + heldout_rows) * (6 * 4 + 2) / 1000  # the exact size is known in advance
    assert f"{rows + heldout_rows:,} positions: {size:.2f} kB in " in done.stderr
    mass = float(CachedTeacher(cache)._read(cache, np.arange(rows))[1].double().exp().sum(1).mean())
    assert mean_mass(cache) == pytest.approx(mass, abs=1e-3)
    assert f"the top 6 tokens have {mass:.0%}"[:-1] in done.stderr
    assert mass < 0.9
    assert "teacher.top_k" in done.stderr
    written = contents(folder.parent)

    again = CliRunner().invoke(app, ["prepare", str(recipe_file), "--teacher"])
    assert (again.exit_code, again.stdout) == (0, done.stdout)
    assert contents(folder.parent) == written

    cached, in_process = CachedTeacher(*open_caches(recipe, prepared)), load_teacher(str(recipe.target))
    assert isinstance(in_process, ModelTeacher)
    for data in (prepared.train, prepared.heldout):
        batch = data.batch([2, 0])
        used_X = (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).flatten()
        dense, sparse = in_process(batch), cached(batch)
        expected_RV = (dense.hidden_XE @ dense.weight_VE.T).log_softmax(1)[used_X]
        torch.testing.assert_close(sparse.log_probs_XK[used_X], expected_RV.topk(6).values, rtol=2**-10, atol=1e-3)


def test_a_cache_of_another_target_is_not_used(recipe_file: Path, make_llama: Callable[..., Any], tmp_path: Path):
    recipe = loaded(recipe_file)
    prepared = prepared_of(recipe)
    prepare_teacher(recipe)
    assert CachedTeacher(*open_caches(recipe, prepared)).vocab_size == 320
    with pytest.raises(ValueError, match="top 7"):
        open_caches(loaded(recipe_file, "teacher.top_k=7"), prepared)
    config = Path(shutil.copytree(tmp_path / "target", tmp_path / "moved")) / "config.json"
    moved = loaded(recipe_file, f"target={tmp_path / 'moved'}", f"tokenizer={tmp_path / 'target'}")
    assert CachedTeacher(*open_caches(moved, prepared)).vocab_size == 320
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="moved"):
        open_caches(moved, prepared)
    make_llama(320, seed=2).save_pretrained(tmp_path / "target")  # for example, trained again
    with pytest.raises(ValueError, match="target"):
        open_caches(recipe, prepared)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("drafter", ["teacher.cache=null"], "teacher.cache"),
        ("drafter", ["target=null", "objective={cross-entropy: 1.0}"], "target"),
        ("drafter", ["teacher.top_k=321"], "320.*321"),
        ("heads", ["hidden.cache=null"], "hidden.cache"),
    ],
)
def test_refusals(recipe_file: Path, heads_file: Path, kind: str, changes: list[str], key: str):
    with pytest.raises(ValueError, match=key):
        prepare_teacher(loaded(recipe_file if kind == "drafter" else heads_file, *changes))


def test_a_full_disk_is_detected_beforehand(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepared_of(loaded(recipe_file))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 30_000, 30_000))
    with pytest.raises(ValueError, match=r"30\.00 kB.*teacher\.top_k"):
        prepare_teacher(loaded(recipe_file))
    assert not list((tmp_path / "teachers").glob("*/*"))


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("projection=low-rank", "rank=4", "states=before-norm", 'objective={"forward-kl": 1.0}'),
        ("projection=target", "target_dtype=bfloat16"),
    ],
)
def test_losses_from_the_cache_equal_those_of_computed_states(
    changes: tuple[str, ...], heads_file: Path, tmp_path: Path, logged: Callable[[Path], list[float]]
):
    dtype = "bfloat16" if "target_dtype=bfloat16" in changes else "float32"
    few = ("train.steps=4", "train.log_every=1", "measure.prompts=0", f"hidden.dtype={dtype}", *changes)
    cached = loaded(heads_file, *few, f"out={tmp_path / 'cached'}")
    prepare_teacher(cached)
    computed = loaded(heads_file, *few, f"out={tmp_path / 'computed'}", "hidden.cache=null")
    losses = [logged(run_train(recipe)) for recipe in (cached, computed)]
    with pytest.raises(ValueError, match=r"hidden states .*--teacher"):
        open_caches(loaded(heads_file, "states=before-norm", "hidden.dtype=float16"), prepared_of(cached))
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_layers_of_a_cached_target_are_not_loaded(heads_file: Path) -> None:
    ends = (2 * 320 + 1) * 32 * 4  # embeddings, output layer and final norm
    for prompts, is_whole in ((0, False), (2, True)):
        recipe = loaded(heads_file, f"measure.prompts={prompts}")
        prepare_teacher(recipe)
        run = make_run(recipe, make_accelerator("no"))
        names = [name for name, _ in run.task.target.named_parameters() if ".layers." in name]
        size = size_of(recipe, run, make_accelerator("no")).memory["target"]
        assert (bool(names), size > ends) == (is_whole, is_whole)
        assert is_whole or size == ends


def test_an_interrupted_cache_is_resumed(recipe_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("draftsmith.train.teachers.cache.SHARD_BYTES", 8000)
    recipe, write = loaded(recipe_file), CacheWriter.write

    def interrupted(self: CacheWriter, shard: Any, *arguments: Any) -> bool:
        if shard.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return write(self, shard, *arguments)

    monkeypatch.setattr(CacheWriter, "write", interrupted)
    with pytest.raises(Interrupted, match=r"SIGINT after [\d,]+ of [\d,]+ positions"):
        prepare_teacher(recipe)
    assert not list(Path(recipe.teacher.cache).glob("*/*.json"))
    monkeypatch.setattr(CacheWriter, "write", write)
    folder = prepare_teacher(recipe)
    before = contents(folder)
    shutil.rmtree(folder)
    assert contents(prepare_teacher(recipe)) == before, "an uninterrupted run writes the same files"
    assert sum(name.endswith(".safetensors") for name in before) > 4

    (folder / "rows-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rows-00003\.safetensors .*--teacher"):
        open_caches(recipe, prepared_of(recipe))
    (folder / "teacher.json").unlink()  # an unfinished cache keeps its complete files
    untouched = (folder / "rows-00000.safetensors").stat().st_ino
    assert prepare_teacher(recipe) == folder
    assert contents(folder) == before
    assert (folder / "rows-00000.safetensors").stat().st_ino == untouched
    (folder / "teacher.json").unlink()
    with sole_writer(folder), pytest.raises(ValueError, match=folder.name):
        prepare_teacher(recipe)  # another process writes or checks the cache


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "small_files.py"
    script.write_text(SMALL_FILES)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(script), "prepare", str(recipe_file), "--teacher", f"teacher.cache={tmp_path / 'two'}"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # only one process prints the folder
    monkeypatch.setattr("draftsmith.train.teachers.cache.SHARD_BYTES", 8000)
    prepare_teacher(loaded(recipe_file, f"teacher.cache={tmp_path / 'one'}"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sum(".safetensors" in name for name in contents(tmp_path / "one")) > 5

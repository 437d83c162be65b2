"""The cache of what a recipe's target says, from the command line to the batches that drafters and heads learn from."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.data import Prepared, prepare_data
from draftsmith.recipes.assemble.teacher import (
    NoCacheError,
    cache_bytes,
    open_cache,
    open_hidden,
    prepare_teacher,
)
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import DrafterRecipe, HeadsRecipe
from draftsmith.train.forward.packed import PackedForward
from draftsmith.train.losses.drafter import IGNORED, head_labels, shifted_labels
from draftsmith.train.teachers.hidden_cache import HiddenCache
from draftsmith.train.teachers.teacher import CachedTeacher, ModelTeacher, load_teacher
from draftsmith.train.teachers.top_k_cache import TeacherCache

# the command line with files of a few blocks, as a large corpus has them
SMALL_FILES = """
import sys
import draftsmith.train.teachers.row_plan as rows
from draftsmith.recipes.commands.cli import main
rows.SHARD_BYTES = 8000
if __name__ == "__main__":
    main()
"""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def recipe_file(drafter_recipe: Path, tmp_path: Path, corpus: Path, make_llama: Callable[..., Any]) -> Path:
    """A recipe whose drafter learns from the cached top 6 of a small target."""
    target = tmp_path / "target"
    make_llama(320, seed=1, sharpness=2.0).save_pretrained(target)
    for path in (corpus / "tokenizer").iterdir():
        shutil.copy(path, target)
    values = yaml.safe_load(drafter_recipe.read_text())
    values |= {"target": str(target), "objective": {"forward-kl": 1.0}}
    values["teacher"] = {"top_k": 6, "cache": str(tmp_path / "teachers"), "batch": 2}
    drafter_recipe.write_text(yaml.safe_dump(values))
    return drafter_recipe


@pytest.fixture
def heads_file(recipe_file: Path, tmp_path: Path) -> Path:
    """A recipe whose heads learn from the same target's hidden states on disk."""
    values = yaml.safe_load(recipe_file.read_text())
    heads = {"kind": "heads", "out": str(tmp_path / "heads"), "num_heads": 2}
    heads |= {key: values[key] for key in ("target", "data", "train")}
    heads["hidden"] = {"cache": str(tmp_path / "hidden"), "batch": 2}
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(heads))
    return path


def loaded_heads(heads_file: Path, *overrides: str) -> HeadsRecipe:
    recipe = load_recipe(str(heads_file), overrides)
    assert isinstance(recipe, HeadsRecipe)
    return recipe


def loaded(recipe_file: Path, *overrides: str) -> DrafterRecipe:
    recipe = load_recipe(str(recipe_file), overrides)
    assert isinstance(recipe, DrafterRecipe)
    return recipe


def prepared_of(recipe: DrafterRecipe | HeadsRecipe) -> Prepared:
    return prepare_data(recipe.data, load_tokenizer(recipe.tokenizer_source), quiet=True)


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def environment() -> dict[str, str]:
    return os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_the_command_writes_what_the_drafter_then_learns_from(recipe_file: Path, cli: Callable[..., Any]):
    recipe = loaded(recipe_file)
    prepared = prepared_of(recipe)
    with pytest.raises(NoCacheError, match=r"top 6 .*--teacher"):
        open_cache(recipe, prepared)

    done = cli("prepare", str(recipe_file), "--teacher")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    cache = TeacherCache.load(folder)
    rows = prepared.train.manifest["trainable_tokens"]
    heldout_rows = prepared.heldout.manifest["trainable_tokens"]
    assert cache.rows == rows
    size = (rows + heldout_rows) * (6 * 4 + 2) / 1000  # known to the byte before it starts
    assert f"{rows + heldout_rows:,} positions: {size:.2f} kB in " in done.stderr
    assert f"training: {rows:,} positions in {folder}, every SHA-256" in done.stderr
    mass = float(cache.read(np.arange(rows))[1].double().exp().sum(1).mean())
    assert cache.mean_mass() == pytest.approx(mass, abs=1e-3)
    assert f"the top 6 hold {mass:.0%}"[:-1] in done.stderr
    assert mass < 0.9
    assert "teacher.top_k" in done.stderr
    written = contents(folder.parent)
    on_disk = sum(len(content) for name, content in written.items() if name.endswith(".safetensors"))
    assert on_disk <= cache_bytes(recipe, prepared, 320) <= on_disk + 8192

    again = cli("prepare", str(recipe_file), "--teacher")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert contents(folder.parent) == written

    cached, in_process = (
        open_cache(recipe, prepared),
        load_teacher(str(recipe.target)),
    )
    assert isinstance(cached, CachedTeacher)
    assert isinstance(in_process, ModelTeacher)
    assert cached.settings["target"] == TeacherCache.load(folder).source.fingerprint
    for data in (prepared.train, prepared.heldout):
        batch = data.batch([2, 0])
        kept_X = (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).flatten()
        dense, sparse = in_process(batch), cached(batch)
        wanted_RV = (dense.hidden_XE @ dense.weight_VE.T).log_softmax(1)[kept_X]
        torch.testing.assert_close(sparse.log_probs_XK[kept_X], wanted_RV.topk(6).values, rtol=2**-10, atol=1e-3)


def test_a_cache_of_another_target_is_not_taken(recipe_file: Path, make_llama: Callable[..., Any], tmp_path: Path):
    recipe = loaded(recipe_file)
    prepared = prepared_of(recipe)
    prepare_teacher(recipe)
    assert open_cache(recipe, prepared).vocab_size == 320
    with pytest.raises(ValueError, match="top_k is 6 there, 7 here"):
        open_cache(loaded(recipe_file, "teacher.top_k=7"), prepared)
    make_llama(320, seed=2).save_pretrained(tmp_path / "target")  # trained again, say
    with pytest.raises(ValueError, match=r"target is [0-9a-f]{16} \(.*target\) there, [0-9a-f]{16} \("):
        open_cache(recipe, prepared)
    # a target that was only moved is the same
    make_llama(320, seed=1, sharpness=2.0).save_pretrained(tmp_path / "moved")
    moved = loaded(recipe_file, f"target={tmp_path / 'moved'}", f"tokenizer={tmp_path / 'target'}")
    assert open_cache(moved, prepared).vocab_size == 320


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("drafter", ["data.streaming=true"], "data.streaming"),
        ("drafter", ["teacher.cache=null"], "teacher.cache"),
        ("drafter", ["target=null", "objective={cross-entropy: 1.0}"], "target"),
        ("drafter", ["teacher.top_k=321"], "321.*320"),
        ("heads", ["hidden.cache=null"], "hidden.cache"),
        ("heads", ["data.streaming=true"], "hidden.cache.*data.streaming"),
    ],
)
def test_refusals(recipe_file: Path, heads_file: Path, kind: str, changes: list[str], key: str):
    recipe = load_recipe(str(recipe_file if kind == "drafter" else heads_file), changes)
    with pytest.raises(ValueError, match=key):
        prepare_teacher(recipe)  # type: ignore[arg-type]


def test_a_disk_that_is_too_small_is_found_out_beforehand(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = loaded(recipe_file)
    prepared = prepared_of(recipe)
    rows = prepared.train.manifest["trainable_tokens"] + prepared.heldout.manifest["trainable_tokens"]

    def free(size: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - size, size))

    free(30_000)
    with pytest.raises(ValueError, match=r"30\.00 kB") as found:
        prepare_teacher(recipe)
    assert not list((tmp_path / "teachers").glob("[!.]*"))
    numbers = re.search(r"needs ([\d.]+) kB.*top_k.* (\d)", str(found.value))
    assert numbers is not None
    assert rows * 26 < float(numbers[1]) * 1000 < rows * 26 + 10_000
    fits = int(numbers[2])
    with pytest.raises(ValueError, match=f" {fits}$"):
        prepare_teacher(loaded(recipe_file, f"teacher.top_k={fits + 1}"))
    free(30_000)
    assert TeacherCache.load(prepare_teacher(loaded(recipe_file, f"teacher.top_k={fits}"))).rows > 0


def test_heads_learn_from_the_states_that_the_command_wrote(heads_file: Path, cli: Callable[..., Any]):
    recipe = loaded_heads(heads_file)
    prepared = prepared_of(recipe)
    with pytest.raises(NoCacheError, match=r"hidden states .*--teacher"):
        open_hidden(recipe, prepared)
    done = cli("prepare", str(heads_file), "--teacher")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    cache = HiddenCache.load(folder)
    assert cache.source.dtype == "bfloat16"
    assert f"training: {cache.rows:,} positions in {folder}, every SHA-256" in done.stderr

    cached, forward = open_hidden(recipe, prepared), PackedForward(load_model(recipe.target))
    for data in (prepared.train, prepared.heldout):
        batch = data.batch([2, 0])
        kept_BT = (head_labels(batch.labels_BT, batch.documents_BT, recipe.num_heads) != IGNORED).any(-1)
        with torch.no_grad():
            wanted_XD = forward.hidden(batch)[kept_BT]
        torch.testing.assert_close(cached.hidden(batch)[kept_BT].float(), wanted_XD, rtol=2**-8, atol=1e-5)
    with pytest.raises(NoCacheError, match=r"states is after-norm there, before-norm here"):
        open_hidden(loaded_heads(heads_file, "states=before-norm"), prepared)
    with pytest.raises(NoCacheError, match="target_dtype is auto there, float32 here"):
        open_hidden(loaded_heads(heads_file, "target_dtype=float32"), prepared)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("projection=low-rank", "rank=4", "states=before-norm", 'objective={"forward-kl": 1.0}'),
        ("projection=target", "target_dtype=bfloat16"),
    ],
)
def test_losses_from_the_cache_are_those_of_computed_states(
    changes: tuple[str, ...], heads_file: Path, tmp_path: Path, logged_losses: Callable[[Path], list[float]]
):
    kept = "bfloat16" if "target_dtype=bfloat16" in changes else "float32"
    few = ("train.steps=4", "train.log_every=1", "measure.prompts=0", f"hidden.dtype={kept}", *changes)
    cached = loaded_heads(heads_file, *few, f"out={tmp_path / 'cached'}")
    prepare_teacher(cached)
    computed = loaded_heads(heads_file, *few, f"out={tmp_path / 'computed'}", "hidden.cache=null")
    losses = [logged_losses(run_train(recipe)) for recipe in (cached, computed)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture
def logged_losses() -> Callable[[Path], list[float]]:
    """Of an artifact's training."""

    def read(out: Path) -> list[float]:
        lines = (out.with_name(f"{out.name}.state") / "log.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    return read


def test_a_target_whose_settings_changed_is_another(heads_file: Path):
    recipe = loaded_heads(heads_file)
    prepare_teacher(recipe)
    prepared = prepared_of(recipe)
    open_hidden(recipe, prepared)
    config = Path(recipe.target) / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"transformers_version": "5.0.0"}))
    open_hidden(recipe, prepared)
    config.write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    with pytest.raises(NoCacheError, match="target is"):
        open_hidden(recipe, prepared)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["drafter", "heads"])
def test_a_damaged_cache_is_refused_and_written_again(
    kind: str, recipe_file: Path, heads_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("draftsmith.train.teachers.row_plan.SHARD_BYTES", 8000)
    recipe: Any = load_recipe(str(recipe_file if kind == "drafter" else heads_file))
    open_it: Any = open_cache if kind == "drafter" else open_hidden
    folder = prepare_teacher(recipe)
    before = contents(folder)
    assert sum(name.endswith(".safetensors") for name in before) > 4
    flip(folder / "rows-00001.safetensors")
    (folder / "rows-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rows-00003\.safetensors .*--teacher"):
        open_it(recipe, prepared_of(recipe))
    untouched = (folder / "rows-00000.safetensors").stat().st_ino
    capsys.readouterr()
    assert prepare_teacher(recipe) == folder
    assert "2 damaged files" in capsys.readouterr().err
    assert contents(folder) == before
    assert (folder / "rows-00000.safetensors").stat().st_ino == untouched
    manifest = "teacher.json" if kind == "drafter" else "hidden.json"
    (folder / manifest).write_text("{")
    assert contents(prepare_teacher(recipe)) == before


def test_ctrl_c_and_two_processes_lead_to_the_same_bytes(
    recipe_file: Path, tmp_path: Path, make_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    make_llama(320, seed=1, hidden_size=128, intermediate_size=256, num_hidden_layers=12).save_pretrained(
        tmp_path / "target"
    )
    script = tmp_path / "small_files.py"
    script.write_text(SMALL_FILES)
    arguments = [str(script), "prepare", str(recipe_file), "--teacher", "teacher.batch=1"]
    prepared_of(loaded(recipe_file))
    two = f"teacher.cache={tmp_path / 'two'}"
    with subprocess.Popen(
        [sys.executable, *arguments, two], env=environment(), stderr=subprocess.PIPE, text=True
    ) as stopped:
        while stopped.poll() is None and not list((tmp_path / "two").glob("*/rows-*")):
            time.sleep(0.01)
        stopped.send_signal(signal.SIGINT)
        said = stopped.communicate()[1]
    assert stopped.returncode == 130, said
    assert re.search(r"SIGINT after [\d,]+ of [\d,]+ positions; \d+ of \d+ files", said), said
    assert not list((tmp_path / "two").glob("[!.]*"))

    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [*launcher, *arguments, two], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # the folder, once
    monkeypatch.setattr("draftsmith.train.teachers.row_plan.SHARD_BYTES", 8000)
    prepare_teacher(loaded(recipe_file, "teacher.batch=1", f"teacher.cache={tmp_path / 'one'}"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sum(".safetensors" in name for name in contents(tmp_path / "one")) > 5

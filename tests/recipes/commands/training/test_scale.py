"""Shipped launch settings are valid for accelerate, and all that can run on a CPU train the same drafter."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.recipes.assemble.heads import _check_launch
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import SHIPPED, launch_settings, load_training
from draftsmith.train.parallel.accelerate import make_accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SETTINGS = SHIPPED / "launch" / "accelerate"
KINDS = {
    "cpu": ("NO", 1, 0),
    "cpu-multi": ("MULTI_GPU", 2, 0),
    "one-gpu": ("NO", 1, 0),
    "multi-gpu": ("MULTI_GPU", 2, 0),
    "multi-node": ("MULTI_GPU", 16, 0),
    "zero1": ("DEEPSPEED", 2, 1),
    "zero2": ("DEEPSPEED", 2, 2),
    "zero3": ("DEEPSPEED", 2, 3),
    "zero3-offload": ("DEEPSPEED", 2, 3),
}


def test_launch_settings_are_documented_and_load():
    from accelerate.commands.config.config_args import load_config_from_file

    assert {path.stem for path in SETTINGS.iterdir()} == set(KINDS)
    for name, (kind, processes, stage) in KINDS.items():
        path = SETTINGS / f"{name}.yaml"
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert f"accelerate launch --config_file recipes/launch/accelerate/{name}.yaml" in head[0]
        assert any("-m draftsmith train RECIPE" in line for line in head)
        loaded = load_config_from_file(str(path))
        assert (loaded.distributed_type, loaded.num_processes) == (kind, processes)
        assert loaded.deepspeed_config.get("zero_stage", 0) == stage
        if stage:  # otherwise transformers shards every loaded model, including the target
            assert loaded.deepspeed_config["zero3_init_flag"] is False


def launch(settings: Sequence[str], *arguments: str, **extra: str) -> None:
    """Run `draftsmith train` with `arguments` under `accelerate launch` with the options `settings`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, "--main_process_port", "0"]
    command += ["-m", "draftsmith", "train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | extra
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def recipe(tiny_drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    content = tiny_drafter(folder)
    content["train"] |= {"steps": 8, "evaluate_every": 4}
    path = folder / "drafter.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def single_process(recipe: Path) -> Path:
    """Train in one process and return the drafter."""
    return run_train(load_training(str(recipe), [f"out={recipe.with_name('alone')}"]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("cpu", "NO", marks=pytest.mark.slow),
        pytest.param("cpu-multi", "MULTI_CPU", marks=pytest.mark.slow),
        *(
            pytest.param(name, "DEEPSPEED", marks=pytest.mark.slow)
            for name in ("zero1", "zero2", "zero3", "zero3-offload")
        ),
    ],
)
def test_all_settings_give_the_same_artifact(recipe: Path, single_process: Path, logged: Any, name: str, kind: str):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    # with micro batches of one, two processes take two gradient accumulation steps for the same global batch
    many = recipe.with_name(name)
    extra = {"ACCELERATE_USE_CPU": "true"} if name == "cpu-multi" else {}
    launch(
        ["--config_file", str(SETTINGS / f"{name}.yaml")], str(recipe), f"out={many}", "train.micro_batch=1", **extra
    )
    summary = verify_artifact(many).training
    assert (summary["distributed_type"], summary["processes"]) == (kind, KINDS[name][1])
    losses, norms = ([logged(out, key) for out in (single_process, many)] for key in ("loss", "grad_norm"))
    assert len(losses[1]) == 8
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # float32 sums in a different order
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    expected = load_file(single_process / "model.safetensors")
    state = AutoModelForCausalLM.from_pretrained(many).state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-3, atol=1e-4)


def test_deepspeed_configurations_leave_settings_to_the_recipe():
    files = {name: path for name, path in launch_settings().items() if name.startswith("deepspeed/")}
    assert set(files) == {f"deepspeed/{name}" for name in ("zero1", "zero2", "zero3", "zero3-offload")}
    explained = (SHIPPED / "launch" / "deepspeed" / "README.md").read_text()
    for name, path in files.items():
        settings = json.loads(path.read_text())
        assert path.name in explained
        assert settings["zero_optimization"]["stage"] == int(path.stem[4])
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            assert settings[key] == "auto", name
        assert settings["gradient_clipping"] == settings["bf16"]["enabled"] == settings["fp16"]["enabled"] == "auto"
        assert not {"optimizer", "scheduler"} & set(settings)


def test_a_target_whose_dtype_differs_from_deepspeed_is_refused():
    recipe: Any = load_training("heads/any-target", ["base={}", "train.precision=bf16"])
    zero3 = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"), deepspeed_plugin=SimpleNamespace(zero_stage=3)
    )
    half, brain = (SimpleNamespace(target=SimpleNamespace(dtype=dtype)) for dtype in (torch.float16, torch.bfloat16))
    with pytest.raises(ValueError, match=r"float16.*target_dtype"):
        _check_launch(recipe, half, zero3)
    _check_launch(recipe, brain, zero3)


def test_disabled_deepspeed_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU"):
        make_accelerator("no")

"""The launch settings that ship with the package are accelerate's, and the same recipe trains under those that can run
on processors, to the same drafter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact import verify_artifact
from draftsmith.recipes.loading import SHIPPED, shipped_recipes
from draftsmith.train.scale import make_accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SETTINGS = SHIPPED / "accelerate"
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


def test_every_file_of_launch_settings_says_how_it_is_used_and_loads_with_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    assert {path.stem for path in SETTINGS.iterdir()} == set(KINDS)
    assert not [name for name in shipped_recipes() if "accelerate" in name]
    for name, (kind, processes, stage) in KINDS.items():
        path = SETTINGS / f"{name}.yaml"
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert f"accelerate launch --config_file recipes/accelerate/{name}.yaml" in head[0]
        assert any("-m draftsmith train RECIPE" in line for line in head)
        loaded = load_config_from_file(str(path))
        assert (loaded.distributed_type, loaded.num_processes) == (kind, processes)
        assert loaded.deepspeed_config.get("zero_stage", 0) == stage
        if stage:  # else transformers shards every model that is loaded, the target too
            assert loaded.deepspeed_config["zero3_init_flag"] is False


def train(recipe: Path, out: Path, name: str | None, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run a recipe through the command line under the settings of that name (None: without a launcher)."""
    command = [sys.executable]
    if name is not None:
        settings = ["--config_file", str(SETTINGS / f"{name}.yaml"), "--main_process_port", "0"]
        command += ["-m", "accelerate.commands.launch", *settings]
    command += ["-m", "draftsmith", "train", str(recipe), f"out={out}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment |= {"ACCELERATE_USE_CPU": "true"} if name == "cpu-multi" else {}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)


@pytest.fixture(scope="module")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of a two-layer Llama."""
    folder = tmp_path_factory.mktemp("scale")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    data = {"source": str(corpus / "rows.json"), "template": "chatml", "block_tokens": 64, "heldout_share": 0.2}
    train = {
        "steps": 8,
        "global_batch": 4,
        "micro_batch": 2,
        "learning_rate": 1e-3,
        "log_every": 1,
        "evaluate_every": 4,
    }
    content = {
        "kind": "drafter",
        "out": str(folder / "unused"),
        "tokenizer": str(corpus / "tokenizer"),
        "model": {"config": sizes | {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 256}},
        "data": data | {"cache": str(folder / "prepared")},
        "train": train,
    }
    path = folder / "drafter.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Path:
    """What the recipe makes in one process."""
    out = recipe.with_name("alone")
    done = train(recipe, out, None)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cpu-multi", "MULTI_CPU"),
        ("zero3", "DEEPSPEED"),
        pytest.param("cpu", "NO", marks=pytest.mark.slow),
        pytest.param("zero1", "DEEPSPEED", marks=pytest.mark.slow),
        pytest.param("zero2", "DEEPSPEED", marks=pytest.mark.slow),
        pytest.param("zero3-offload", "DEEPSPEED", marks=pytest.mark.slow),
    ],
)
def test_one_recipe_makes_the_same_complete_artifact_under_all_settings(
    recipe: Path, alone: Path, name: str, kind: str
):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    # micro batches of one: as many rows, in two gradient accumulation steps of two processes
    many = recipe.with_name(name)
    done = train(recipe, many, name, "train.micro_batch=1")
    assert done.returncode == 0, done.stderr[-5000:]
    summary = verify_artifact(many).training
    assert (summary["distributed_type"], summary["processes"]) == (kind, KINDS[name][1])
    logs = [
        [json.loads(line) for line in (out.with_name(f"{out.name}.state") / "log.jsonl").read_text().splitlines()]
        for out in (alone, many)
    ]
    losses, norms = ([[line[key] for line in log if key in line] for log in logs] for key in ("loss", "grad_norm"))
    assert len(losses[1]) == 8
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # float32 sums in another order
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    expected = load_file(alone / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(many).state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def test_deepspeed_is_not_left_out_without_a_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU is set, with which DeepSpeed would be left out"):
        make_accelerator("no")


def test_a_launch_that_starts_one_process_of_several_says_so(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from draftsmith.train.scale import make_accelerator\nprint(make_accelerator('no').num_processes)"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "1"
    assert "several processes were asked for and one was started" in done.stderr

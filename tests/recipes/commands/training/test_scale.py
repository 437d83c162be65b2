"""The launch settings that ship with the package are accelerate's, and the same recipe trains under those that can run
on processors, to the same drafter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.recipes.assemble.heads import _check_launch
from draftsmith.recipes.commands.training.sweep import plan_sweep, run_sweep
from draftsmith.recipes.schema.loading import SHIPPED, launch_settings, load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import HeadsRecipe
from draftsmith.train.parallel.accelerate import make_accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


def test_every_file_of_launch_settings_says_how_it_is_used_and_loads_with_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    assert {path.stem for path in SETTINGS.iterdir()} == set(KINDS)
    assert not [name for name in shipped_recipes() if "accelerate" in name]
    for name, (kind, processes, stage) in KINDS.items():
        path = SETTINGS / f"{name}.yaml"
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert f"accelerate launch --config_file recipes/launch/accelerate/{name}.yaml" in head[0]
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
def recipe(tiny_drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of a two-layer Llama."""
    folder = tmp_path_factory.mktemp("scale")
    content = tiny_drafter(folder)
    content["train"] |= {"steps": 8, "evaluate_every": 4}
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
        pytest.param("cpu", "NO", marks=pytest.mark.slow),
        *(
            pytest.param(name, "DEEPSPEED", marks=pytest.mark.slow)
            for name in ("zero1", "zero2", "zero3", "zero3-offload")
        ),
    ],
)
def test_one_recipe_makes_the_same_complete_artifact_under_all_settings(
    recipe: Path, alone: Path, logged: Any, name: str, kind: str
):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    # micro batches of one: as many rows, in two gradient accumulation steps of two processes
    many = recipe.with_name(name)
    done = train(recipe, many, name, "train.micro_batch=1")
    assert done.returncode == 0, done.stderr[-5000:]
    summary = verify_artifact(many).training
    assert (summary["distributed_type"], summary["processes"]) == (kind, KINDS[name][1])
    losses, norms = ([logged(out, key) for out in (alone, many)] for key in ("loss", "grad_norm"))
    assert len(losses[1]) == 8
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # float32 sums in another order
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    expected = load_file(alone / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(many).state_dict()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def heads_recipe(corpus: Path, tiny_drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of three heads on a Llama whose sizes two processes do not divide evenly."""
    folder = tmp_path_factory.mktemp("heads")
    uneven = {"hidden_size": 17, "intermediate_size": 33, "vocab_size": 323, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**uneven, **layers, max_position_embeddings=256))
    for parameter in target.parameters():
        if parameter.dim() == 2:  # the default init is so small that every distribution is flat
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5)
    target.save_pretrained(folder / "target")
    for file in (corpus / "tokenizer").iterdir():
        (folder / "target" / file.name).write_bytes(file.read_bytes())
    # by default parameters of fewer than 100,000 elements stay whole under ZeRO-3: here none does
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    (folder / "spread.json").write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 0.123}))
    content = {"kind": "heads", "out": "unused", "target": str(folder / "target"), "num_heads": 3}
    content["data"] = tiny_drafter(folder)["data"]
    content["train"] = {"steps": 4, "global_batch": 4, "micro_batch": 1, "learning_rate": 1e-2, "log_every": 1}
    content["measure"] = {"prompts": 2, "new_tokens": 8, "blocks": 4, "keep": "last"}
    path = folder / "heads.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


FROM_FILE = ["--use_deepspeed", "--deepspeed_config_file"]
FROZEN_AND_TRAINED = "base=null,{lora: {rank: 4}}"


def train_heads(recipe: Path, name: str, launcher: list[str], *more: str, **extra: str) -> list[dict[str, Any]]:
    """Run the recipe in two processes, with a frozen target and with one trained too; what the sweep's file says of
    each run."""
    out = recipe.with_name(name)
    common = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *common, "--main_process_port", "0", *launcher]
    command += ["-m", "draftsmith", "train", str(recipe), f"out={out}", "--sweep", FROZEN_AND_TRAINED, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | extra
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(out.with_name(f"{name}-sweep.json").read_text())["rows"]


@pytest.fixture(scope="module")
def heads_alone(heads_recipe: Path) -> list[dict[str, Any]]:
    """What the recipe makes in this process."""
    sweep = plan_sweep(str(heads_recipe), [f"out={heads_recipe.with_name('alone')}"], [FROZEN_AND_TRAINED])
    run_sweep(sweep)
    return json.loads(sweep.results.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        (["--multi_gpu"], ()),
        *((["--use_deepspeed", "--zero_stage", stage], ()) for stage in "123"),
        ([*FROM_FILE, "spread"], ("--sweep", "shard_target=false,true")),
        *(([*FROM_FILE, name], ()) for name in ("zero1", "zero2", "zero3", "zero3-offload")),
    ],
    ids=lambda value: "-".join(value).replace("/", ""),
)
def test_heads_learn_the_same_and_are_complete_under_all_launches(
    heads_recipe: Path, heads_alone: list[dict[str, Any]], logged: Any, launcher: list[str], more: tuple[str, ...]
):
    name = "-".join(launcher[1:]) or "parallel"
    deepspeed = "--use_deepspeed" in launcher
    if deepspeed:
        pytest.importorskip("deepspeed")
    if launcher[-1] == "spread":
        launcher = [*launcher[:-1], str(heads_recipe.with_name("spread.json"))]
    elif launcher[:-1] == FROM_FILE:
        launcher = [*launcher[:-1], str(launch_settings()[f"deepspeed/{launcher[-1]}"])]
    extra = {"DS_ACCELERATOR": "cpu"} if deepspeed else {"ACCELERATE_USE_CPU": "true"}
    rows = train_heads(heads_recipe, name, launcher, *more, **extra)
    assert len(rows) == 2 * (2 if more else 1)
    for row in rows:
        alone = next(other for other in heads_alone if other["values"]["base"] == row["values"]["base"])
        training = verify_artifact(Path(row["out"])).training
        assert training["distributed_type"] == ("DEEPSPEED" if deepspeed else "MULTI_CPU")
        assert training["processes"] == 2
        assert len(logged(row["out"])) == 4
        assert logged(row["out"]) == pytest.approx(logged(alone["out"]), abs=1e-5)  # float32 sums in another order
        assert row["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
        assert row["parameters"] == alone["parameters"]
        found, expected = (load_heads(Path(side["out"])).state_dict() for side in (row, alone))
        assert (len(found), found["2.1.weight"].shape) == (9, (323, 17))
        for key, tensor in expected.items():
            assert bool(torch.isfinite(found[key]).all())
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)
        if row["values"]["base"] is not None:
            bases = [load_file(Path(side["out"]) / "base" / "model.safetensors") for side in (row, alone)]
            assert bases[0].keys() == bases[1].keys()
            for key, tensor in bases[1].items():
                torch.testing.assert_close(bases[0][key], tensor, rtol=1e-3, atol=1e-4)


def test_every_deepspeed_configuration_leaves_to_the_recipe_what_the_recipe_decides():
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


@pytest.mark.parametrize(("base", "spread", "refused"), [(None, True, True), ({}, False, True), (None, False, False)])
def test_a_target_that_deepspeed_would_cast_is_refused(heads_recipe: Path, base: Any, spread: bool, refused: bool):
    changes = [f"base={json.dumps(base)}", f"shard_target={json.dumps(spread)}", "train.precision=bf16"]
    recipe = load_recipe(str(heads_recipe), changes)
    assert isinstance(recipe, HeadsRecipe)
    zero3 = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"), deepspeed_plugin=SimpleNamespace(zero_stage=3)
    )
    for dtype in (torch.float16, torch.bfloat16):
        task: Any = SimpleNamespace(target=SimpleNamespace(dtype=dtype))
        if refused and dtype == torch.float16:
            with pytest.raises(ValueError, match=r"float16.*target_dtype"):
                _check_launch(recipe, task, zero3)
        else:
            _check_launch(recipe, task, zero3)
        if spread:
            alone: Any = SimpleNamespace(distributed_type=SimpleNamespace(value="NO"))
            with pytest.raises(ValueError, match="shard_target"):
                _check_launch(recipe, task, alone)


def test_deepspeed_is_not_left_out_without_a_word(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU"):
        make_accelerator("no")

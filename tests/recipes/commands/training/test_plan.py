"""A plan against what then happens: sizes of files, steps, parameters, memory and time; what cannot fit is refused with
a setting that does."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.artifact import Run, prepare_once, state_folder
from draftsmith.recipes.assemble.drafter import drafter_parts
from draftsmith.recipes.assemble.sizes import meta_model
from draftsmith.recipes.commands.training import plan as planning
from draftsmith.recipes.commands.training.plan import plan_recipe
from draftsmith.recipes.schema.loading import SHIPPED, load_recipe
from draftsmith.train.parallel.accelerate import make_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VARIANTS = {
    "whole": ["model.config.tie_word_embeddings=false"],
    "cut": ["model.config=null", "model.source=SOURCE", "model.layers=[0, 2]"],
    "half": ["model.config=null", "model.source=SOURCE", "model.dtype=bfloat16"],
    "adapter": ["model.config=null", "model.source=SOURCE", "model.lora.rank=64", "model.lora.export=adapter"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 0.6 million parameters on disk."""
    folder = tmp_path_factory.mktemp("source")
    settings = dict(SIZES)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def recipe(drafter_recipe: Path, source: Path) -> Any:
    """`recipe("train.steps=3")`: the tiny recipe with a larger model, and what is said."""

    def load(*overrides: str) -> Any:
        given = [text.replace("SOURCE", str(source)) for text in overrides]
        sizes = [] if any("model.config=" in text for text in given) else [f"model.config={json.dumps(SIZES)}"]
        return load_recipe(str(drafter_recipe), [*sizes, *given])

    return load


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_steps_and_parameters_are_what_training_makes(recipe: Any, variant: str):
    if variant == "adapter":
        pytest.importorskip("peft")
    loaded = recipe("train.steps=5", *VARIANTS[variant])
    plan = plan_recipe(loaded)
    out, accelerator = Path(loaded.out), make_accelerator("no")
    assert not out.exists()
    assert not state_folder(out).exists()
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    run = Run(loaded, out, accelerator, tokenizer, prepare_once(loaded, tokenizer, accelerator))
    parts = drafter_parts(loaded, tokenizer, run.prepared, accelerator.device)
    result = run.fit(parts.task, parts.measured)
    checkpoints = list((state_folder(out) / "checkpoints").iterdir())
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in checkpoints]
    assert plan.checkpoint_bytes == pytest.approx(sizes[0], rel=0.05)
    assert len(checkpoints) == 2  # of steps 3 and 5, and never a third: of so few the plan counts no more
    assert plan.disk[0].size_bytes == pytest.approx(sum(sizes), rel=0.05)

    def write(folder: Path) -> None:
        parts.trained.save(folder)
        tokenizer.save_pretrained(folder)

    run.save(result, write, parts.trained.shapes(), None)
    written = sum(file.stat().st_size for file in out.iterdir())
    assert plan.artifact_bytes == pytest.approx(written, rel=0.05)
    assert plan.steps == result.steps == 5
    assert plan.trained_parameters == parts.trained.shapes()["trained_parameters"]
    assert plan.parameters == sum(p.numel() for p in parts.trained.model.parameters())


def test_tokens_and_epochs_follow_the_data(recipe: Any):
    plan = plan_recipe(recipe("train.steps=null", "train.epochs=2"))
    assert plan.epochs is not None
    assert 2 <= plan.epochs < 2 + 4 / (plan.steps * 4 / plan.epochs)  # the last step is rounded up
    assert plan.tokens <= plan.steps * 4 * 64
    assert plan.evaluations == 1
    more = plan_recipe(recipe("train.evaluate_every=5", "train.steps=12"))
    assert more.evaluations == 4  # before training, after 5, 10 and 12
    assert more.seconds is not None
    assert more.step_seconds is not None
    assert more.evaluation_seconds is not None
    assert more.seconds == pytest.approx(12 * more.step_seconds + 4 * more.evaluation_seconds)


def refusal(loaded: Any) -> str:
    with pytest.raises(ValueError, match=r"nearest setting that fits|No setting") as raised:
        plan_recipe(loaded)
    return str(raised.value)


def advised(message: str) -> list[str]:
    found = re.search(r"fits: (.*) \([\d.,]+ [GM]B\)", message)
    assert found is not None, message
    return found[1].split()


WIDE = ["data.block_tokens=256", "train.global_batch=24", "train.micro_batch=24", "train.steps=1"]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (110_000_000, r"train\.micro_batch=(12|8|6|4|3|2|1)"),
        (24_000_000, r"train\.micro_batch=1 train\.gradient_checkpointing=true"),
        (18_000_000, r"model\.dtype=bfloat16"),
    ],
)
def test_too_little_memory_is_refused_with_a_setting_that_then_fits(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, free: int, expected: str
):
    fits = {"limit": free}
    monkeypatch.setattr(planning, "free_bytes", lambda device: (fits["limit"], "available"))
    message = refusal(recipe(*WIDE))
    setting = advised(message)
    assert re.search(expected, " ".join(setting)), message
    assert planning.gigabytes(free) in message
    accepted = plan_recipe(recipe(*WIDE, *setting))
    assert planning.peak(accepted.memory, "cpu") <= free
    assert accepted.step_seconds is not None


def test_what_can_never_fit_says_so_before_anything_is_loaded_or_prepared(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(planning, "free_bytes", lambda device: (8_000_000_000, "available"))
    huge = SIZES | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    message = refusal(recipe(f"model.config={json.dumps(huge)}"))
    assert "No setting of this recipe fits" in message
    assert "8.00 GB are available" in message
    assert float(re.search(r"training needs ([\d,]+)", message)[1].replace(",", "")) > 1000
    assert not (tmp_path / "prepared").exists()


def test_a_target_that_is_too_large_is_not_loaded(recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = tmp_path / "target"  # a configuration, and no weights at all
    huge = {key: value for key, value in SIZES.items() if key != "model_type"} | {"hidden_size": 8192}
    AutoConfig.for_model("llama", **huge, dtype="bfloat16").save_pretrained(folder)
    monkeypatch.setattr(planning, "free_bytes", lambda device: (1_000_000_000, "available"))
    message = refusal(recipe(f"target={folder}", "objective={forward-kl: 1.0}"))
    assert "target" in message
    assert advised(message)[-3:] == ["teacher.cache=FOLDER", "teacher.top_k=50", "measure.prompts=0"]
    weights = sum(p.numel() for p in meta_model(str(folder), "auto").parameters())
    assert f"target {planning.gigabytes(2 * weights)}" in message


def test_too_small_a_disk_is_refused_with_a_setting_that_then_fits(recipe: Any, monkeypatch: pytest.MonkeyPatch):
    many = ["train.save_every=1", "train.steps=6", "train.keep_checkpoints=4"]
    plan = plan_recipe(recipe(*many))
    usage = namedtuple("usage", "total used free")
    free = plan.checkpoint_bytes * 3 + plan.artifact_bytes
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: usage(free, 0, free))
    with pytest.raises(ValueError, match="are free there") as raised:
        plan_recipe(recipe(*many))
    message = str(raised.value)
    assert advised(message) == ["train.keep_checkpoints=2"]
    assert planning.gigabytes(free) in message
    assert planning.gigabytes(plan.checkpoint_bytes * 5 + plan.artifact_bytes) in message
    assert plan_recipe(recipe(*many, *advised(message))).steps == 6


def test_heads_are_planned_and_a_table_is_refused(drafter_recipe: Path, source: Path, corpus: Path, tmp_path: Path):
    content = yaml.safe_load(drafter_recipe.read_text())
    target = tmp_path / "target"
    shutil.copytree(source, target)
    shutil.copytree(corpus / "tokenizer", target, dirs_exist_ok=True)
    path = tmp_path / "heads.yaml"
    heads = {"kind": "heads", "out": str(tmp_path / "heads"), "target": str(target), "num_heads": 3}
    heads |= {key: content[key] for key in ("data", "train")} | {"measure": {"prompts": 2, "new_tokens": 4}}
    path.write_text(yaml.safe_dump(heads))
    plan = plan_recipe(load_recipe(str(path)))  # type: ignore[arg-type]
    assert plan.trained_parameters == 3 * (128 * 128 + 128 + 320 * 128)
    assert plan.target_parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(target).parameters())
    assert plan.artifact_bytes == pytest.approx(4 * plan.trained_parameters, rel=0.1)
    assert plan.step_seconds is not None
    table = {"kind": "table", "out": "t", "tokenizer": str(target), "data": content["data"]}
    path.write_text(yaml.safe_dump(table))
    with pytest.raises(ValueError, match="a table is counted in one pass"):
        plan_recipe(load_recipe(str(path)))  # type: ignore[arg-type]


def test_a_cache_that_is_not_written_yet_is_counted_and_said(recipe: Any, source: Path, tmp_path: Path):
    overrides = [f"target={source}", "objective={forward-kl: 1.0}", "measure.prompts=0"]
    plan = plan_recipe(recipe(*overrides, f"teacher.cache={tmp_path / 'cache'}", "teacher.top_k=8"))
    size = next(part.size_bytes for part in plan.disk if part.name == "teacher's cache")
    assert size > plan.tokens / 12 / 4
    assert plan.seconds is None
    assert any("--teacher" in note for note in plan.notes)
    assert plan.target_parameters == 0
    assert not (tmp_path / "cache").exists()


def test_the_command_line_prints_a_table_and_leaves_nothing_but_prepared_data(
    cli: Any, drafter_recipe: Path, tmp_path: Path, source: Path
):
    before = set(tmp_path.rglob("*"))
    overrides = [f"model={{source: {source}}}", f"target={source}", "objective={forward-kl: 1.0}", "measure.prompts=2"]
    overrides += ["on_policy={share: 0.5, new_tokens: 8}", "measure.new_tokens=8"]
    weights = (source / "model.safetensors").read_bytes()
    done = cli("train", str(drafter_recipe), "--plan", *overrides)
    assert done.returncode == 0, done.stderr
    for words in ("memory at most", "AdamW's two moments", "target", "artifact", "steps", "s a step", "extrapolated"):
        assert words in done.stdout
    new = set(tmp_path.rglob("*")) - before
    assert {path.relative_to(tmp_path).parts[0] for path in new} == {"prepared"}
    assert (source / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("name", "launch", "stage"),
    [("cpu-multi", "MULTI_CPU", 0), pytest.param("zero3", "ZeRO 3", 3, marks=pytest.mark.slow)],
)
def test_launched_processes_plan_together(drafter_recipe: Path, tmp_path: Path, name: str, launch: str, stage: int):
    if stage:
        pytest.importorskip("deepspeed")
    settings = ["--config_file", str(SHIPPED / "launch" / "accelerate" / f"{name}.yaml"), "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, "-m", "draftsmith", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if stage else {"ACCELERATE_USE_CPU": "true"})
    before = set(tmp_path.rglob("*"))

    whole = [*command, str(drafter_recipe), "--plan", "train.micro_batch=1"]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("memory at most") == 1
    assert f"{launch} on cpu" in done.stdout
    assert "for each of 2" in done.stdout
    assert {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before} == {"prepared"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits as Linux has them")
def test_a_limit_on_data_is_seen_and_exits_with_2(drafter_recipe: Path):
    large = SIZES | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16}
    command = [sys.executable, "-m", "draftsmith", "train", str(drafter_recipe), "--plan"]
    done = subprocess.run(
        [*command, f"model.config={json.dumps(large)}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30)),
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "ulimit -d" in done.stderr
    assert "train.gradient_checkpointing=true" in done.stderr


REAL = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
REAL_RUN = """
import json, sys
from dataclasses import asdict
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.commands.training.plan import plan_recipe
print(json.dumps(asdict(plan_recipe(load_recipe(sys.argv[1], sys.argv[2:]))), default=str))
"""
TRAINED = """
import sys
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.commands.training.train import run_train
run_train(load_recipe(sys.argv[1], sys.argv[2:]))
with open("/proc/self/status") as status:  # ru_maxrss would hold the parent's
    print(1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM")))
"""


def test_a_model_of_30_million_parameters_takes_the_memory_and_time_that_were_planned(drafter_recipe: Path):
    sizes = SIZES | REAL | {"num_attention_heads": 8, "num_key_value_heads": 8}
    overrides = [f"model.config={json.dumps(sizes)}", "data.block_tokens=256", "train.steps=3", "train.global_batch=8"]
    overrides += ["train.save_every=0", "measure.blocks=2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def run(script: str) -> str:
        command = [sys.executable, "-c", script, str(drafter_recipe), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    plan: dict[str, Any] = json.loads(run(REAL_RUN))
    peak = int(run(TRAINED))
    assert 25e6 < plan["parameters"] < 40e6
    planned = plan["process_bytes"] + plan["needed_bytes"]
    assert 0.9 * peak <= planned <= 1.35 * peak
    log = drafter_recipe.parent / "drafter.state" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [(b["tokens"] - a["tokens"], b["tokens_per_second"]) for a, b in pairwise(lines) if "loss" in b]
    measured = sum(tokens for tokens, _ in steps) / sum(tokens / speed for tokens, speed in steps)
    expected = plan["tokens"] / plan["steps"] / plan["step_seconds"]
    assert 0.4 < expected / measured < 2.5  # others may use the machine at the same time

"""The command line as a user meets it: real processes, exit codes, one clear message, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.table.table import BigramTable
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

Cli = Callable[..., subprocess.CompletedProcess[str]]


def refused(result: subprocess.CompletedProcess[str], *parts: str, code: int = 2) -> None:
    """The process failed with one line of error that holds all the parts, and without a traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.stderr
    for part in parts:
        assert part in errors[0]


def losses(state: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (state / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_help_and_doctor(cli: Cli) -> None:
    assert "quickstart" in cli("--help").stdout
    report = cli("doctor")
    assert report.returncode == 0
    assert "transformers" in report.stdout
    assert "float32" in report.stdout


def test_mistake_is_one_message_and_exit_code_2(cli: Cli, drafter_recipe: Path, tmp_path: Path) -> None:
    refused(cli("train", "drafter/vicuna68m"), "'drafter/vicuna68m'", "'drafter/vicuna-68m'")
    refused(cli("train", str(drafter_recipe), "data.source=rows-are-not-here.json"), "rows-are-not-here.json")
    assert not (tmp_path / "drafter").exists()


def test_training_ends_in_an_artifact_that_is_reused(cli: Cli, drafter_recipe: Path, tmp_path: Path) -> None:
    first = cli("train", str(drafter_recipe))
    assert first.returncode == 0, first.stderr
    artifact = tmp_path / "drafter"
    manifest = verify_artifact(artifact)
    assert manifest.kind == "drafter"
    assert manifest.training["steps"] == 12
    model = AutoModelForCausalLM.from_pretrained(artifact)
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    logits = model(torch.tensor([tokenizer("the tree")["input_ids"]])).logits
    assert logits.isfinite().all()
    again = cli("train", str(artifact / "recipe.yaml"))
    assert again.returncode == 0
    assert "reusing it" in again.stderr
    refused(cli("train", str(drafter_recipe), "train.learning_rate=1e-2"), "train.learning_rate", "0.001", "0.01")
    weights = artifact / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    refused(cli("train", str(drafter_recipe)), "model.safetensors")


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "draftsmith", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_run_is_resumed_exactly(cli: Cli, drafter_recipe: Path, tmp_path: Path, how: signal.Signals) -> None:
    longer = ["train.steps=150", "train.save_every=10"]
    whole = cli("train", str(drafter_recipe), *longer, f"out={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    process = start("train", str(drafter_recipe), *longer)
    wait_for(tmp_path / "drafter.state" / "checkpoints" / "step-000020", process)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    assert not (tmp_path / "drafter").exists()
    resumed = cli("train", str(drafter_recipe), *longer)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step" in resumed.stderr
    assert losses(tmp_path / "drafter.state") == losses(tmp_path / "whole.state")
    assert len(losses(tmp_path / "drafter.state")) == 150


def test_two_processes_train_one_drafter(drafter_recipe: Path, tmp_path: Path) -> None:
    tracked = "train.trackers=[tensorboard]"
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "draftsmith", "train"]
    result = subprocess.run(
        [*launch, str(drafter_recipe), tracked],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "2 processes (MULTI_CPU)" in result.stderr
    assert len(list((tmp_path / "drafter.state" / "draftsmith").glob("events*"))) == 1, "of one process alone"
    training = load_manifest(tmp_path / "drafter").training
    assert (training["processes"], training["distributed_type"]) == (2, "MULTI_CPU")
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "drafter"), LlamaForCausalLM)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes; needs the right to mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_is_one_message(cli: Cli, drafter_recipe: Path, small_disk: Path) -> None:
    out = small_disk / "drafter"
    fits = ["train.keep_checkpoints=1", "model.config.hidden_size=64", f"out={out}"]
    result = cli("train", str(drafter_recipe), *fits, "model.config.intermediate_size=128", "train.steps=40")
    refused(result, "no space left", code=1)
    assert not out.exists()
    assert not [name for name in os.listdir(small_disk) if name.startswith(".")]


def test_heads_table_and_evaluation_run_from_recipes(
    launcher: Any, drafter_recipe: Path, corpus: Path, tmp_path: Path
) -> None:
    def run(*arguments: str) -> None:
        code, said = launcher.run(*arguments)
        assert code == 0, said

    def refuses(*arguments: str, parts: Sequence[str]) -> None:
        code, said = launcher.run(*arguments)
        assert code == 2, said
        assert all(part in said for part in parts), said

    run("train", str(drafter_recipe), f"out={tmp_path / 'target'}")
    recipe = yaml.safe_load(drafter_recipe.read_text())
    data, train = recipe["data"], recipe["train"]
    common = {"data": data, "out": str(tmp_path / "heads"), "kind": "heads"}
    heads = common | {"target": str(tmp_path / "target"), "num_heads": 3, "train": train, "measure": {"prompts": 2}}
    table = {"kind": "table", "out": str(tmp_path / "table"), "tokenizer": str(corpus / "tokenizer"), "data": data}
    distilled = recipe | {
        "objective": {"forward-kl": 1.0},
        "target": str(tmp_path / "target"),
        "measure": {"prompts": 2},
    }
    for name, content in {"heads": heads, "table": table, "distilled": distilled}.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        run("train", str(path))
    assert "tokens_per_step" in load_manifest(tmp_path / "drafter").evaluation
    assert BigramTable.load(tmp_path / "table").vocab_size == 320

    parts = {name: str(tmp_path / name) for name in ("target", "drafter", "heads", "table")}
    methods = [{"method": name} for name in ("autoregressive", "speculative", "multi-candidate", "mjsd", "slim-s")]
    methods.append({"method": "medusa", "options": {"tree": "2x1x1"}})
    evaluate = {
        "kind": "evaluate",
        "out": str(tmp_path / "results.json"),
        "prompts": data["source"],
        "methods": methods,
    }
    evaluate |= parts | {"template": "chatml", "limit": 3, "max_new_tokens": 12}
    path = tmp_path / "evaluate.yaml"
    path.write_text(yaml.safe_dump(evaluate))
    run("evaluate", str(path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["greedy_equals_transformers"] == [3, 3]
    rows = {row["method"]: row for row in results["methods"]}
    assert set(rows) == {row["method"] for row in methods}
    for row in rows.values():
        assert row["tokens"] > 0
        if row["lossless"]:
            assert row["identical_to_greedy"] == [3, 3]
        assert row["by_category"][""]["prompts"] == 3
        assert row["by_category"][""]["tokens_per_step"] == row["tokens_per_step"]
    assert rows["autoregressive"]["tokens_per_step"] == 1.0

    wider = "model.config.vocab_size=330"
    refuses("train", str(tmp_path / "distilled.yaml"), f"out={tmp_path / 'x'}", wider, parts=("330", "320"))
    run("train", str(drafter_recipe), f"out={tmp_path / 'other'}", wider)
    refuses("evaluate", str(path), f"drafter={tmp_path / 'other'}", parts=("330", "320"))
    refuses("evaluate", str(path), f"heads={tmp_path / 'table'}", parts=("table",))
    refuses("evaluate", str(path), "methods.1.method=speculativ", parts=("'speculative'",))
    refuses("evaluate", str(path), "drafter=null", parts=("`drafter`",))

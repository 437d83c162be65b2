"""The command line: exit codes, one-line errors, and resumption."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.recipes.commands.cli import app
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner


@pytest.fixture
def run(launcher: Any) -> Callable[..., str]:
    """Return a function that runs a command, checks its exit code, and returns standard error.

    The error of a failed command must be one line that contains all `parts`.
    """

    def run(*arguments: str, code: int = 0, parts: tuple[str, ...] = ()) -> str:
        ended, text = launcher.run(*arguments)
        assert ended == code, text
        assert "Traceback" not in text
        if code:
            (error,) = [line for line in text.splitlines() if line.startswith("error:")]
            assert all(part in error for part in parts), error
        return str(text)

    return run


def test_help_doctor_and_corpora() -> None:
    for command, parts in {
        "--help": ["quickstart"],
        "doctor": ["transformers", "float32"],
        "prepare --list": ["sharegpt-v3", "spec-bench", "gated"],
    }.items():
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0
        assert all(word in result.stdout for word in parts)


def test_training_writes_an_artifact_that_is_reused(run: Callable[..., str], drafter_recipe: Path, tmp_path: Path):
    recipe, artifact = str(drafter_recipe), tmp_path / "drafter"
    run("train", "drafter/vicuna68m", code=2, parts=("'drafter/vicuna68m'", "'drafter/vicuna-68m'"))
    run("train", recipe, "data.source=rows-are-not-here.json", code=2, parts=("rows-are-not-here.json",))
    assert not artifact.exists()
    logged = run("train", recipe)
    assert "\r" not in logged, "progress bars are shown on terminals only"
    manifest = verify_artifact(artifact)
    assert manifest.kind == "drafter"
    assert manifest.training["steps"] == 12
    model = AutoModelForCausalLM.from_pretrained(artifact)
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    logits = model(torch.tensor([tokenizer("the tree")["input_ids"]])).logits
    assert logits.isfinite().all()
    assert "reusing it" in run("train", str(artifact / "recipe.yaml"))
    changed = ("train.learning_rate", "0.001", "0.01")
    run("train", recipe, "train.learning_rate=1e-2", code=2, parts=changed)
    weights = artifact / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    run("train", recipe, code=2, parts=("model.safetensors",))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_run_resumes_exactly(
    run: Callable[..., str], launcher: Any, drafter_recipe: Path, tmp_path: Path, logged: Any, number: signal.Signals
) -> None:
    longer = ["train.steps=90", "train.save_every=7"]
    run("train", str(drafter_recipe), *longer, f"out={tmp_path / 'whole'}")
    process = launcher.start("train", str(drafter_recipe), *longer)
    deadline = time.monotonic() + 120
    while not (tmp_path / "drafter.state" / "checkpoints" / "step-000021").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    code, errors = process.ended()
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    assert ("to resume: draftsmith train" in errors) == (number == signal.SIGINT)
    assert not (tmp_path / "drafter").exists()
    log = run("train", str(drafter_recipe), *longer)
    assert "resumed after step" in log
    assert logged(tmp_path / "drafter") == logged(tmp_path / "whole")
    assert len(logged(tmp_path / "drafter")) == 90


def test_ctrl_c_before_the_first_checkpoint_names_the_command(launcher: Any, tmp_path: Path) -> None:
    """The quickstart is interrupted while it reads documentation."""
    process = launcher.start("quickstart", "--out", "here", "corpus.megabytes=400", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "here" / "quickstart.yaml").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, errors = process.ended()
    assert (code, "Traceback" in errors) == (130, False), errors
    assert "to resume: draftsmith quickstart --out here corpus.megabytes=400" in errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of two megabytes and return its path."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_one_message(run: Callable[..., str], drafter_recipe: Path, small_disk: Path) -> None:
    out = small_disk / "drafter"
    fits = ["train.keep_checkpoints=1", "model.config.hidden_size=64", f"out={out}"]
    fits += ["model.config.intermediate_size=128", "train.steps=40"]
    run("train", str(drafter_recipe), *fits, code=1, parts=("no space left",))
    assert not out.exists()
    assert not [name for name in os.listdir(small_disk) if name.startswith(".")]

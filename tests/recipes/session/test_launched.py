"""Recipes and commands in several processes: results equal those of one, and all processes end together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_training

DISTIL = ("measure.prompts=2", "measure.new_tokens=8", "measure.blocks=4", "objective={forward-kl: 1.0}")


class Ranks:
    def __init__(self, launcher: Any, number: int, *arguments: str) -> None:
        world: dict[str, str] = {}
        if number > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            world |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {} for rank in range(number)]
        self._processes = [launcher.start(*arguments, **world, **rank) for rank in ranks]

    def signal(self, number: signal.Signals, rank: int, when: Callable[[], bool]) -> None:
        """Send a signal to a process when a condition holds."""
        deadline = time.monotonic() + 120
        while not when():
            assert all(process.poll() is None for process in self._processes), self.ended()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self._processes[rank].send_signal(number)

    def ended(self) -> tuple[list[int], list[str]]:
        """Wait for the processes; return exit codes and standard errors."""
        codes, outputs = zip(*(process.ended() for process in self._processes), strict=True)
        return list(codes), list(outputs)


@pytest.fixture
def heads_recipe(drafter_recipe: Path, tiny_pair: Path, tmp_path: Path) -> Path:
    """Write a recipe of three heads for the target of the tiny pair."""
    values = yaml.safe_load(drafter_recipe.read_text())
    measure = {"prompts": 2, "new_tokens": 8, "blocks": 4, "table": str(tiny_pair / "table")}
    values = {name: values[name] for name in ("data", "train")} | {"kind": "heads", "num_heads": 3, "measure": measure}
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(values | {"target": str(tiny_pair / "target"), "out": str(tmp_path / "heads")}))
    return path


SETTINGS = {
    "loop": ("train.gradient_checkpointing=true", "train.clip_norm=0"),
    "adapter": (*DISTIL, "model={source: DRAFTER, lora: {rank: 2, export: adapter}}", "target=TARGET"),
    "on policy": (*DISTIL, "on_policy={share: 0.5, new_tokens: 8}", "model={source: DRAFTER}", "target=TARGET"),
    "heads, best of all": (
        "train.evaluate_every=1", "train.learning_rate=0.1", "states=before-norm", "objective={forward-kl: 1.0}"
    ),
    "heads, joint": ("base={lora: {rank: 2}}", "projection=low-rank", "rank=4", "train.gradient_checkpointing=true"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_give_the_result_of_one(
    name: str, launcher: Any, drafter_recipe: Path, heads_recipe: Path, tiny_pair: Path, tmp_path: Path, logged: Any
) -> None:
    changes = ["train.steps=4", "train.micro_batch=1"]
    for change in SETTINGS[name]:
        changes.append(
            change.replace("DRAFTER", str(tiny_pair / "drafter")).replace("TARGET", str(tiny_pair / "target"))
        )
    recipe = heads_recipe if "heads" in name else drafter_recipe
    outs = [tmp_path / "one", tmp_path / "two"]
    for number, out in enumerate(outs, 1):
        codes, outputs = Ranks(launcher, number, "train", str(recipe), f"out={out}", *changes).ended()
        assert codes == [0] * number, outputs
        assert "wrote" in outputs[0]
        assert "wrote" not in "".join(outputs[1:])
    one, two = outs
    assert len(logged(two, "loss")) == 4
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), abs=1e-4)  # float32 sums in a different order
    measured = list(zip(logged(one, "evaluation"), logged(two, "evaluation"), strict=True))
    assert measured
    for expected, actual in measured:
        assert actual == pytest.approx(expected, abs=1e-3)
    summaries = [verify_artifact(out).training for out in outs]
    assert summaries[0]["kept_step"] == summaries[1]["kept_step"]
    assert [summary["processes"] for summary in summaries] == [1, 2]
    files = [sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file()) for out in outs]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message", "code"), [("target=/nowhere", "/nowhere", 2), ("train.max_norm=1e-9", "max_norm 1e-09", 1)]
)
def test_an_error_ends_all_processes(
    change: str, message: str, code: int, launcher: Any, drafter_recipe: Path, tmp_path: Path
) -> None:
    codes, outputs = Ranks(launcher, 2, "train", str(drafter_recipe), change).ended()
    assert codes == [code, code], outputs
    assert "Traceback" not in "".join(outputs)
    assert all(message in text for text in outputs)
    assert not (tmp_path / "drafter").exists()


def test_a_signal_to_one_ends_all_processes(launcher: Any, drafter_recipe: Path, tmp_path: Path, logged: Any) -> None:
    longer = ("train.steps=60", "train.save_every=50", "train.micro_batch=1")
    ranks = Ranks(launcher, 2, "train", str(drafter_recipe), *longer)
    log = tmp_path / "drafter.state" / "log.jsonl"
    ranks.signal(signal.SIGINT, 1, lambda: log.is_file() and log.read_text().count("loss") > 2)
    codes, outputs = ranks.ended()
    assert codes == [130, 130], outputs
    assert "".join(outputs).count("stopped by SIGINT after step") == 1
    alone, whole = (
        Ranks(launcher, 1, "train", str(drafter_recipe), *longer, *more) for more in ((), (f"out={tmp_path}/w",))
    )
    assert (alone.ended()[0], whole.ended()[0]) == ([0], [0])
    assert "resumed after step" in alone.ended()[1][0]
    losses = logged(tmp_path / "drafter")
    assert len(losses) == 60
    assert losses == pytest.approx(logged(tmp_path / "w"), abs=1e-3)


@pytest.mark.slow
def test_a_killed_process_ends_the_others(launcher: Any, drafter_recipe: Path, tmp_path: Path) -> None:
    ranks = Ranks(launcher, 2, "train", str(drafter_recipe), "train.steps=2000", "train.micro_batch=1")
    log = tmp_path / "drafter.state" / "log.jsonl"
    ranks.signal(signal.SIGKILL, 1, lambda: log.is_file() and log.read_text().count("loss") > 2)
    codes, outputs = ranks.ended()
    assert codes == [1, -signal.SIGKILL]
    ended, reason = outputs[0].splitlines()[-1].split(": ", 1)
    assert ended == "process 0 ended because another process of this launch ended or does not respond"
    assert "gloo/transport" in reason
    assert "Traceback" not in outputs[0]


LAUNCHER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"


def test_workers_of_a_killed_launcher_save_before_another_run_starts(drafter_recipe: Path, tmp_path: Path) -> None:
    out, changes = tmp_path / "drafter", ["train.steps=100000", "train.save_every=0"]
    worker = [sys.executable, "-m", "draftsmith", "train", str(drafter_recipe), *changes]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "1"}
    lock, log = tmp_path / "drafter.lock", tmp_path / "drafter.state" / "log.jsonl"

    def wait(ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *worker], env=environment) as launcher:
        wait(lambda: log.is_file() and log.read_text().count("loss") > 2)
        with pytest.raises(ValueError, match=rf"{lock.read_text()} .*{out}:"):
            run_train(load_training(str(drafter_recipe), changes))
        launcher.kill()
    wait(lambda: not lock.exists())
    (saved,) = (tmp_path / "drafter.state" / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) == log.read_text().count("loss") > 2


def commands() -> list[list[str]]:
    """Return the arguments of all commands that must run in a single process."""
    groups = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = [[name] for name in groups if name not in ("train", "prepare")]
    return [*names, ["prepare", "x"], ["prepare", "x", "--lint"]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_for_one_process_refuse_several(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    name = " ".join(word for word in command if word != "x")
    for rank in ("0", "2"):  # every process must report it, since the launcher kills the others
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=f"`draftsmith {name}` .* 3 "):
            app(command, standalone_mode=False)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_damaged_data_ends_all_processes(launcher: Any, drafter_recipe: Path, tmp_path: Path) -> None:
    assert Ranks(launcher, 1, "prepare", str(drafter_recipe)).ended()[0] == [0]
    (tokens,) = (tmp_path / "prepared").glob("*/train/tokens.npy")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    codes, outputs = Ranks(launcher, 2, "train", str(drafter_recipe), "train.micro_batch=1").ended()
    assert codes == [2, 1], outputs
    assert f"error: {tokens} has SHA-256" in outputs[0]
    assert "another process of this launch" in outputs[1]

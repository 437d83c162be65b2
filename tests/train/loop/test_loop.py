"""The training loop in one process: exact sums, exact resumption, and interruptions."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import Interrupted, fit

Logged = Callable[..., list[Any]]


def run(worker: ModuleType, folder: Path, at: int = 0, number: int = signal.SIGINT, **overrides: Any):
    task = worker.SignallingTask(worker.make_model(), worker.make_data(4, seed=1), at, number)
    return task, fit(task, worker.make_data(), worker.make_config(**overrides), folder)


def weights_of(task: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in task.module.state_dict().items()}


def assert_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_the_loss_falls_and_is_logged(worker: ModuleType, tmp_path: Path, logged: Logged):
    _, result = run(worker, tmp_path, steps=40, evaluate_every=20, save_every=0)
    losses = logged(tmp_path, "loss")
    assert len(losses) == 40
    assert result.last_loss < result.first_loss - 0.3
    assert logged(tmp_path, "tokens")[-1] == result.tokens == 40 * 8 * 14, "padding must not be counted"
    evaluations = logged(tmp_path, "evaluation")
    assert len(evaluations) == 3  # before training, after 20 steps, and at the end
    assert evaluations[-1] == result.metrics
    assert result.metrics.keys() == {"heldout_loss", "perplexity", "top1_accuracy", "top5_accuracy"}
    assert logged(tmp_path, "learning_rate")[0] == 0.0
    assert all(50e6 < size < 50e9 for size in logged(tmp_path, "peak_memory_bytes"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000040"]


def test_results_do_not_depend_on_the_micro_batch(worker: ModuleType, tmp_path: Path, logged: Logged):
    results = {}
    for micro in (8, 4, 1):
        task = worker.SignallingTask(worker.make_model(attention_dropout=0.0), None)
        fit(task, worker.make_data(), worker.make_config(micro_batch=micro, weight_decay=0.1), tmp_path / str(micro))
        results[micro] = (logged(tmp_path / str(micro)), weights_of(task))
    for micro in (4, 1):
        assert results[micro][0] == pytest.approx(results[8][0], abs=2e-6)
        for name, tensor in results[8][1].items():
            torch.testing.assert_close(results[micro][1][name], tensor, rtol=1e-3, atol=1e-5)


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(worker: ModuleType, tmp_path: Path, logged: Logged):
    whole, result = run(worker, tmp_path / "whole")
    options = {"state_dir": str(tmp_path / "killed"), "kill_at": 6, "signal": int(signal.SIGKILL), "weights": ""}
    script = Path(__file__).parents[1] / "worker.py"
    done = subprocess.run([sys.executable, script, json.dumps(options)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")[:5]
    resumed, second = run(worker, tmp_path / "killed")
    assert second.resumed_from == 4
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")  # identical, with every step once
    assert logged(tmp_path / "killed", "step") == [*range(1, 7), 6]
    assert_same_weights(weights_of(resumed), weights_of(whole))
    assert second.metrics == result.metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(worker: ModuleType, tmp_path: Path, logged: Logged, number: int):
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match="after step 3 of 6") as caught:
        run(worker, tmp_path / "stopped", at=3, number=number)
    assert caught.value.signal_number == number
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before
    assert (tmp_path / "stopped" / "checkpoints" / "step-000003").is_dir()
    resumed, result = run(worker, tmp_path / "stopped")
    whole, _ = run(worker, tmp_path / "whole")
    assert result.resumed_from == 3
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")
    assert_same_weights(weights_of(resumed), weights_of(whole))


def test_the_second_ctrl_c_aborts_immediately(worker: ModuleType, tmp_path: Path):
    class Impatient(worker.SignallingTask):  # type: ignore[name-defined]
        def count(self, batch: Any) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        fit(Impatient(worker.make_model(), None), worker.make_data(), worker.make_config(), tmp_path)


def test_a_finished_run_returns_immediately(worker: ModuleType, tmp_path: Path, logged: Logged):
    first, result = run(worker, tmp_path)
    before = (tmp_path / "log.jsonl").read_text()
    again, second = run(worker, tmp_path, at=1, number=signal.SIGKILL)  # any training step would kill the test run
    assert (tmp_path / "log.jsonl").read_text() == before
    assert dataclasses.replace(second, resumed_from=None) == result
    assert second.resumed_from == 6
    assert_same_weights(weights_of(first), weights_of(again))


def test_a_changed_setting_is_refused(worker: ModuleType, tmp_path: Path):
    run(worker, tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"learning_rate.*0\.01.*0\.02"):
        run(worker, tmp_path, steps=2, learning_rate=0.02)
    task = worker.SignallingTask(worker.make_model(), None)
    with pytest.raises(ValueError, match="data"):
        fit(task, worker.make_data(seed=5), worker.make_config(steps=2), tmp_path)
    run(worker, tmp_path, steps=2, micro_batch=2, log_every=5)  # these change no result


def test_damaged_checkpoints_are_skipped(worker: ModuleType, tmp_path: Path, logged: Logged):
    whole, _ = run(worker, tmp_path)
    expected = logged(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    weights = tmp_path / "checkpoints" / "step-000006" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (tmp_path / "checkpoints" / ".step-000005").mkdir()  # left by a crash
    with pytest.warns(UserWarning, match=r"step-000006 is skipped: model\.safetensors is damaged"):
        task, result = run(worker, tmp_path)
    assert result.resumed_from == 4
    assert logged(tmp_path) == expected
    assert_same_weights(weights_of(task), weights_of(whole))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / "checkpoint.json").unlink()
    with pytest.warns(UserWarning, match="incomplete"):
        _, result = run(worker, tmp_path)
    assert result.resumed_from is None
    assert logged(tmp_path) == expected


def test_a_checkpoint_of_another_run_is_skipped(worker: ModuleType, tmp_path: Path, logged: Logged):
    run(worker, tmp_path / "a")
    expected = logged(tmp_path / "a")
    run(worker, tmp_path / "b", learning_rate=0.5)
    for path, other in [(tmp_path / name / "checkpoints" / "step-000006", name) for name in "ab"]:
        shutil.rmtree(path) if other == "a" else shutil.copytree(path, tmp_path / "a" / "checkpoints" / path.name)
    with pytest.warns(UserWarning, match="step-000006 is skipped: it belongs to a run with other settings"):
        _, result = run(worker, tmp_path / "a")
    assert result.resumed_from == 4
    assert logged(tmp_path / "a") == expected


SUMMARIES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:90],
    "no files": lambda content: b'{"step": 6}',
    "odd files": lambda content: b'{"step": 6, "files": {"model.safetensors": 7}}',
}


@pytest.mark.parametrize("damage", SUMMARIES)
def test_a_damaged_summary_is_named_and_the_older_checkpoint_resumed(
    worker: ModuleType, tmp_path: Path, logged: Logged, damage: str
):
    run(worker, tmp_path)
    expected = logged(tmp_path)
    file = tmp_path / "checkpoints" / "step-000006" / "checkpoint.json"
    file.write_bytes(SUMMARIES[damage](file.read_bytes()))
    with pytest.warns(UserWarning, match=rf"step-000006 is skipped: {file} is damaged"):
        _, result = run(worker, tmp_path)
    assert result.resumed_from == 4
    assert logged(tmp_path) == expected


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_schedules(worker: ModuleType, tmp_path: Path, logged: Logged, schedule: str):
    run(worker, tmp_path, steps=4, warmup=0.5, schedule=schedule, learning_rate=1.0, clip_norm=0.1)
    last = [1.0, 0.5] if schedule == "linear" else [1.0, 1.0]
    assert logged(tmp_path, "learning_rate") == pytest.approx([0.0, 0.5, *last])


def test_bf16_and_gradient_checkpointing_and_tied_embeddings(worker: ModuleType, tmp_path: Path, logged: Logged):
    data, results = worker.make_data(), {}
    ways = {"plain": {}, "checkpointed": {"gradient_checkpointing": True}, "bf16": {"precision": "bf16"}}
    for name, overrides in ways.items():
        model = worker.make_model(tie_word_embeddings=True, attention_dropout=0.0)
        fit(worker.SignallingTask(model, None), data, worker.make_config(**overrides), tmp_path / name)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.dtype == torch.float32
        results[name] = logged(tmp_path / name)
    assert results["checkpointed"] == pytest.approx(results["plain"], abs=1e-6)
    assert results["bf16"] == pytest.approx(results["plain"], abs=0.05)
    assert results["bf16"] != results["plain"]
    model = worker.make_model(seed=9, tie_word_embeddings=True, attention_dropout=0.0)
    fit(worker.SignallingTask(model, None), data, worker.make_config(precision="bf16"), tmp_path / "bf16")
    assert model.lm_head.weight is model.model.embed_tokens.weight  # weights from a checkpoint are still tied


def test_a_write_that_fails_leaves_the_last_checkpoint(worker: ModuleType, tmp_path: Path):
    resource = pytest.importorskip("resource")
    task = worker.SignallingTask(worker.make_model(hidden_size=64, intermediate_size=64), None)
    counted, steps = task.count, 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
        return counted(batch)

    task.count = limit
    try:
        with pytest.raises(OSError, match=r"step-000004 .*File too large"):
            fit(task, worker.make_data(), worker.make_config(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]

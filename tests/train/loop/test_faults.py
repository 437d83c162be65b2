"""Bad steps and exhausted memory are reported, and the last checkpoint remains usable."""

import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.train.loop.fit import TrainingError, fit

Logged = Callable[..., list[Any]]


def poisoned(worker: ModuleType, at: set[int], what: str, size: float = math.inf) -> Any:
    """Return a task with a NaN loss, or for "gradient" a gradient times `size`, in the steps `at` (from 1)."""
    task = worker.SignallingTask(worker.make_model(), None)
    weight, begin, forward = task.module.model.model.norm.weight, task.begin, task.module.forward
    state = {"bad": False}
    weight.register_hook(lambda grad: grad * size if state["bad"] and what == "gradient" else grad)

    def begin_poisoned(step: int, steps: int) -> None:
        state["bad"] = step + 1 in at
        begin(step, steps)

    def forward_poisoned(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, counts = forward(*inputs)
        return (sums * math.nan if state["bad"] and what == "loss" else sums), counts

    task.begin, task.module.forward = begin_poisoned, forward_poisoned
    return task


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_bad_steps_are_skipped_if_configured(worker: ModuleType, tmp_path: Path, logged: Logged, what: str):
    task = poisoned(worker, {2, 5}, what)
    weights: list[torch.Tensor] = []
    begin = task.begin

    def remember(step: int, steps: int) -> None:
        weights.append(task.module.model.lm_head.weight.detach().clone())
        begin(step, steps)

    task.begin = remember
    result = fit(task, worker.make_data(), worker.make_config(on_bad_step="skip", warmup=0.0), tmp_path)
    changed = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert changed == [True, False, True, True, False], "steps 2 and 5 must not change the weights"
    assert result.steps == 6
    skipped = logged(tmp_path, "skipped")
    assert len(skipped) == 2
    assert all("blocks [" in line for line in skipped)
    assert "step 2" in skipped[0]
    assert all(math.isfinite(value) for value in logged(tmp_path))


@pytest.mark.gpu
def test_fp16_overflow_is_explained(worker: ModuleType, tmp_path: Path):
    with pytest.raises(TrainingError, match=r"65,504.*bf16"):
        fit(poisoned(worker, {2}, "loss"), worker.make_data(), worker.make_config(precision="fp16"), tmp_path)


def test_an_exploding_gradient_stops_a_run_with_a_limit(worker: ModuleType, tmp_path: Path, logged: Logged):
    with pytest.raises(TrainingError, match=r"max_norm 1000\.0 at step 4, blocks"):
        fit(poisoned(worker, {4}, "gradient", 1e6), worker.make_data(), worker.make_config(max_norm=1e3), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    # the user then decides to skip the step and resumes
    config = worker.make_config(max_norm=1e3, on_bad_step="skip")
    result = fit(poisoned(worker, {4}, "gradient", 1e6), worker.make_data(), config, tmp_path)
    assert result.resumed_from == 2
    assert len(logged(tmp_path, "skipped")) == 1


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nan_stops_and_keeps_the_last_checkpoint(worker: ModuleType, tmp_path: Path, what: str):
    with pytest.raises(TrainingError, match=rf"the {what}.* at step 4, blocks \[\d+, "):
        fit(poisoned(worker, {4}, what), worker.make_data(), worker.make_config(), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_full_disk_is_reported(worker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = [1 << 30, 5000]  # at the first and at the second checkpoint
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free.pop(0)))
    with pytest.raises(OSError, match=r"No space left on device: .* needs [\d.]+ [kM]B, 5\.00 kB are free"):
        fit(worker.SignallingTask(worker.make_model(), None), worker.make_data(), worker.make_config(), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_skipped_steps_are_limited(worker: ModuleType, tmp_path: Path):
    config = worker.make_config(on_bad_step="skip", steps=60, save_every=0)
    with pytest.raises(TrainingError, match="51"):
        fit(poisoned(worker, set(range(5, 99)), "loss"), worker.make_data(), config, tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_settings_that_save_memory(worker: ModuleType, tmp_path: Path, error: Exception):
    task = worker.SignallingTask(worker.make_model(), None)
    forward, calls = task.module.forward, iter(range(99))

    def fails(*inputs: torch.Tensor) -> Any:
        if next(calls) == 5:  # the second micro step of step 3
            raise error
        return forward(*inputs)

    task.module.forward = fails
    with pytest.raises(TrainingError, match=r"step 3, with micro_batch 4 of 16 tokens, blocks \[.*with micro_batch 2"):
        fit(task, worker.make_data(), worker.make_config(), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]

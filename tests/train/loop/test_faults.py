"""Bad steps, dead workers, no memory: what happened is named, the last checkpoint stays, and the run can go on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.data.blocks.stream import StreamedData
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.rendering.templates import get_template
from draftsmith.data.tokenizers import train_bpe
from draftsmith.train.loop.fit import TrainingError, fit
from torch.optim.optimizer import register_optimizer_step_pre_hook

Logged = Callable[..., list[Any]]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def poisoned(worker: ModuleType, at: set[int], what: str, size: float = math.inf) -> Any:
    """A task whose loss or gradient goes wrong in the steps `at` (from 1)."""
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
def test_bad_steps_are_skipped_if_the_recipe_says_so(worker: ModuleType, tmp_path: Path, logged: Logged, what: str):
    task = poisoned(worker, {2, 5}, what)
    weights: list[torch.Tensor] = []
    begin = task.begin

    def remember(step: int, steps: int) -> None:
        weights.append(task.module.model.lm_head.weight.detach().clone())
        begin(step, steps)

    task.begin = remember
    result = fit(task, worker.make_data(), worker.make_config(on_bad_step="skip", warmup=0.0), tmp_path)
    changed = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert changed == [True, False, True, True, False], "steps 2 and 5 changed nothing"
    assert result.steps == 6
    skipped = logged(tmp_path, "skipped")
    assert len(skipped) == 2
    assert all("blocks [" in line for line in skipped)
    assert "step 2" in skipped[0]
    assert all(math.isfinite(value) for value in logged(tmp_path))


def test_an_exploding_gradient_stops_where_a_limit_is_set(worker: ModuleType, tmp_path: Path, logged: Logged):
    with pytest.raises(TrainingError, match=r"max_norm 1000\.0 at step 4, blocks"):
        fit(poisoned(worker, {4}, "gradient", 1e6), worker.make_data(), worker.make_config(max_norm=1e3), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    # what a user does then: look, say skip, and go on from there
    config = worker.make_config(max_norm=1e3, on_bad_step="skip")
    result = fit(poisoned(worker, {4}, "gradient", 1e6), worker.make_data(), config, tmp_path)
    assert result.resumed_from == 2
    assert len(logged(tmp_path, "skipped")) == 1


def test_skipping_has_an_end(worker: ModuleType, tmp_path: Path):
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
def test_no_memory_is_named_with_what_would_need_less(worker: ModuleType, tmp_path: Path, error: Exception):
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


def test_no_memory_for_an_evaluation_or_the_optimizer_is_named_too(worker: ModuleType, tmp_path: Path):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    task = worker.SignallingTask(worker.make_model(), None)
    task.evaluate = fails
    with pytest.raises(TrainingError, match="out of memory in the evaluation after step 6"):
        fit(task, worker.make_data(), worker.make_config(), tmp_path / "evaluation")
    task = worker.SignallingTask(worker.make_model(), None)
    hook = register_optimizer_step_pre_hook(fails)
    try:
        with pytest.raises(TrainingError, match=r"out of memory in step 1, .*blocks \["):
            fit(task, worker.make_data(), worker.make_config(), tmp_path / "optimizer")
    finally:
        hook.remove()


@pytest.mark.slow
def test_memory_really_runs_out_in_a_process_of_its_own(tmp_path: Path):
    pytest.importorskip("resource")
    code = f"""
import resource, runpy, sys, torch
torch.set_num_threads(1)
worker = runpy.run_path({str(Path(__file__).parents[1] / "worker.py")!r})
from draftsmith.train.loop.fit import fit
task = worker["SignallingTask"](worker["make_model"](), None)
begin = task.begin
def limited(step, steps):
    if step == 3:  # from here on there is room for next to nothing
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 20),) * 2)
        task.module.chunk = None
        original = task.module.forward
        task.module.forward = lambda *inputs: (torch.ones(1 << 26), original(*inputs))[1]
    begin(step, steps)
task.begin = limited
fit(task, worker["make_data"](), worker["make_config"](), {str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "TrainingError: out of memory in step 4, with micro_batch 4 of 16 tokens, blocks [" in done.stderr, (
        done.stderr[-2000:]
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_killed_at_ten_moments_it_repeats_an_undisturbed_run(tmp_path: Path):
    """SIGKILL from outside, at moments that no step chooses: in steps, in savings, in start-up."""
    script = str(Path(__file__).parents[1] / "worker.py")
    config = {"steps": 24, "save_every": 2, "evaluate_every": 6}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(name: str) -> subprocess.Popen[str]:
        options = {"state_dir": str(tmp_path / name), "weights": str(tmp_path / f"{name}.safetensors")}
        command = [sys.executable, script, json.dumps(options | {"config": config, "pause": 0.05})]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )

    def finish(process: subprocess.Popen[str]) -> None:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]

    undisturbed = start("undisturbed")
    finish(undisturbed)
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
    kills = 0
    log = tmp_path / "killed" / "log.jsonl"
    for _ in range(10):
        process = start("killed")
        lines = len(log.read_text().splitlines()) if log.exists() else 0
        wait_for(process, partial(grown, log, lines), 60)
        try:
            process.wait(timeout=float(torch.rand((), generator=generator)) * 0.12)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate(timeout=60)
    finish(start("killed"))
    assert kills >= 5, f"only {kills} of ten runs were still under way when they were to be killed"
    assert (tmp_path / "killed.safetensors").read_bytes() == (tmp_path / "undisturbed.safetensors").read_bytes()
    losses = {
        name: [line["loss"] for line in map(json.loads, (tmp_path / name / "log.jsonl").open()) if "loss" in line]
        for name in ("killed", "undisturbed")
    }
    assert losses["killed"] == losses["undisturbed"]
    assert len(losses["killed"]) == 24


def grown(log: Path, lines: int) -> bool:
    """Whether the log has other lines than before: a run has begun its steps."""
    return log.exists() and len(log.read_text().splitlines()) != lines


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float) -> None:
    """Until the condition holds or the process has ended."""
    for _ in range(int(seconds / 0.01)):
        if condition() or process.poll() is not None:
            return
        try:
            process.wait(timeout=0.01)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("nothing happened in time")


def dying_rows(epoch: int) -> Iterator[Conversation]:
    """Conversations, until the worker process that reads them is killed by itself."""
    for number in range(200):
        if number == 60:
            assert torch.utils.data.get_worker_info() is not None, "this would be the test's own process"
            os.kill(os.getpid(), signal.SIGKILL)
        yield Conversation(
            f"row{number}", (Turn("user", "the question"), Turn("assistant", f"the answer {number % 7}"))
        )


def test_a_dead_data_worker_is_named_and_leaves_the_last_checkpoint(worker: ModuleType, tmp_path: Path):
    tokenizer = train_bpe(["the question the answer user assistant 0123456789"], 280, SPECIALS)
    template = get_template("chatml")
    data = StreamedData(dying_rows, tokenizer, template, 32, size=12, workers=1, seed=0, identity={"name": "dying"})
    task = worker.SignallingTask(worker.make_model(vocab_size=len(tokenizer)), None)
    with pytest.raises(TrainingError, match=r"a worker process of the data died after step \d+ \(.*killed.*untouched"):
        fit(task, data, worker.make_config(global_batch=4, steps=40, save_every=1), tmp_path)
    # the loader's signal may come anywhere, also between writing a checkpoint and deleting the oldest
    kept = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(kept) in (2, 3)
    assert all((folder / "model.safetensors").is_file() for folder in kept[-2:])

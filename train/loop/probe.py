"""A few real steps of a run, timed and weighed, that leave nothing behind: weights in memory do not move (the learning
rate is 0), and no file is written. Letters: B batch (blocks), T tokens."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data.blocks.packing import PADDING, Batch
from ..config import FitConfig, micro_steps
from ..parallel.accelerate import Stepper, configure, gathered
from ..parallel.processes import is_out_of_memory
from .fit import run_micro_batches
from .optimizer import make_optimizer
from .progress import most_held, seconds_now

if TYPE_CHECKING:
    from ...data.blocks.prepared import PreparedData
    from ...data.blocks.stream import StreamedData
    from .fit import Task

_ENOUGH_SECONDS = 30.0  # a first step that took longer is not followed by another
_STATUS = Path("/proc/self/status")
_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CGROUP_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Limit and use, by the controller that a line of `_OWN_CGROUPS` names: none in version 2."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What steps of one or two micro batches took."""

    step_seconds: float
    """Of a whole optimizer step of the run, extrapolated from the micro batches."""
    step_tokens: float
    """Of a step, padding not counted."""
    evaluation_seconds: float
    peak_bytes: int
    """Held at most, on the device, beyond what the process held when `watch` began."""


class MemoryWatch:
    """The most that this process has held on a device since it began, beyond what it held then."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, held_bytes(device)
        clear = Path("/proc/self/clear_refs")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif os.access(clear, os.W_OK):
            clear.write_text("5")  # the peak is what is held now

    def peak(self) -> int:
        """Bytes."""
        on_cuda = self._device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self._device) if on_cuda else _field(_STATUS, "VmHWM")
        return max(0, most - self._before)


def held_bytes(device: torch.device) -> int:
    """What this process holds now, of the device's memory or, on a processor, of the machine's."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _field(_STATUS, "VmRSS")


def free_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes that this process can still take there, and what limits it: the device or, on a processor, the machine or
    the control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]), f"free on {torch.cuda.get_device_name(device)}"
    info = Path("/proc/meminfo")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = _field(info, "MemAvailable") if info.is_file() else machine
    groups = [(left, "left by the control group") for left in _cgroup_left()]
    return min([(free, "available on this machine"), *groups])


def probe(
    task: Task, data: PreparedData | StreamedData, config: FitConfig, accelerator: Any, watch: MemoryWatch
) -> Probe:
    """Run `task` as `fit` would, on its first blocks, for two steps of two micro batches at most, and evaluate once. To
    be called by all processes; the module is not to be trained afterwards. MemoryError: it does not fit."""
    world = accelerator.num_processes
    wanted = micro_steps(config.global_batch, config.micro_batch, world)
    tried = min(2, wanted)
    small = replace(config, global_batch=config.micro_batch * world * tried)
    configure(accelerator, small, tried)
    try:
        started = time.perf_counter()
        _, drawn = data.step_batch(0, config.global_batch, config.seed)
        reading = time.perf_counter() - started
        data.restore(data.beginning)
        steps = _Steps(task, small, accelerator, tried)
        try:
            micro, optimizer = steps.run(drawn)
            if tried * micro + optimizer < _ENOUGH_SECONDS:
                micro, optimizer = steps.run(drawn)  # the first warms up
            evaluation = steps.evaluate()
        finally:
            accelerator.unwrap_model(steps.module, keep_fp32_wrapper=False)
            accelerator.free_memory()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(" ".join(str(error).split())) from error
    tokens = float((drawn.documents_BT != PADDING).sum())
    return Probe(reading + wanted * micro + optimizer, tokens, evaluation, watch.peak())


class _Steps:
    """A task with optimizer and accelerator, ready to step."""

    def __init__(self, task: Task, config: FitConfig, accelerator: Any, micro_steps: int) -> None:
        self._task, self._config, self._accelerator = task, config, accelerator
        self._micro_steps = micro_steps
        module: Any = task.module
        if config.gradient_checkpointing:
            module.gradient_checkpointing_enable()
        task.place(accelerator.device)
        module.to(accelerator.device)
        self.module, self.optimizer = accelerator.prepare(module, make_optimizer(module, config))
        self._stepper = Stepper(accelerator, self.module, self.optimizer, config.clip_norm)

    def run(self, drawn: Batch) -> tuple[float, float]:
        """One step at learning rate 0. Returns seconds of a micro batch, and of the optimizer."""
        config, device = self._config, self._accelerator.device
        size, rank = config.micro_batch, self._accelerator.process_index
        rows = np.arange(size * self._micro_steps) + rank * size * self._micro_steps
        batch = drawn.rows(rows)
        self._task.begin(config.steps - 1, config.steps)  # some begin with less than they do later
        started = seconds_now(device)
        if self._task.rewrites:
            with gathered(self._accelerator, self.module):
                batch = self._task.rewrite(batch, rows, config.global_batch, (config.seed, 0))
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        counts = self._task.count(batch).clamp(min=1).to(device)
        self.module.train()
        run_micro_batches(self._accelerator, self.module, self._stepper, batch, counts, size, self._micro_steps)
        done = seconds_now(device)
        self._stepper.apply()
        return (done - started) / self._micro_steps, seconds_now(device) - done

    def evaluate(self) -> float:
        """Seconds of one evaluation, which the main process does while others wait."""
        started = seconds_now(self._accelerator.device)
        with gathered(self._accelerator, self.module):
            if self._accelerator.is_main_process:
                self.module.eval()
                with torch.no_grad(), self._accelerator.autocast():
                    self._task.evaluate(self._accelerator.unwrap_model(self.module))
        self._accelerator.wait_for_everyone()
        return seconds_now(self._accelerator.device) - started


def _field(path: Path, key: str) -> int:
    """A size of a /proc file in bytes; where there is none, the most that this process ever held."""
    if not path.is_file():
        return most_held()
    lines = path.read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def _cgroup_left() -> list[int]:
    """What the memory limits of this process's control groups leave, where there are any."""
    left = []
    lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines() if _OWN_CGROUPS.is_file() else []
    for _, controllers, own in (line.split(":", 2) for line in lines):
        root = _CGROUPS / controllers
        for folder in (root / own.lstrip("/"), root):  # inside a container its own group is the root
            with suppress(OSError, ValueError, KeyError):  # no such file; "max"; a controller of something else
                most, used = (int((folder / name).read_text()) for name in _CGROUP_FILES[controllers])
                left.append(max(0, most - used))
    return left

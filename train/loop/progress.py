"""What a training run shows: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.console import Console

_SIZE = {"cpu": 1024, "cuda": 8192}
_SECONDS = 0.3  # of trying: a busy machine needs some to show its best
_SECONDS_BETWEEN_LINES = 15.0


class Report:
    """Shows steps, loss, tokens per second and time left. Silent in all processes but the main one."""

    def __init__(self, name: str, steps: int, first_step: int, console: Console | None, active: bool) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._name, self._steps, self._step = name, steps, first_step
        self._active = active
        self._bar: Any = None
        self._task: Any = None
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._seconds, self._first_step = 0.0, first_step

    def __enter__(self) -> Report:
        if self._active and self._console.is_terminal and self._step < self._steps:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            texts = TextColumn("{task.description}"), TextColumn("{task.fields[now]}")
            columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._name, total=self._steps, completed=self._step, now="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print one line."""
        if self._active:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, loss: float, tokens_per_second: float, seconds: float) -> None:
        """`step` steps are done; the last had this loss and took so long."""
        if not self._active:
            return
        self._seconds += seconds  # of steps alone: what evaluations take says nothing about what is left
        now = f"loss {loss:.4f} · {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, now=now)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES or step == self._steps:
            self._last_line = time.monotonic()
            left = self._seconds / (step - self._first_step) * (self._steps - step)
            self.line(f"{self._name}: step {step} of {self._steps} · {now} · {left:.0f} s left")

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """What was measured after `step` steps."""
        if metrics:
            shown = " · ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.line(f"{self._name}: evaluation after step {step}: {shown}")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that a large matrix product reaches on `device` in `dtype`, measured: the fastest of some."""
    size = _SIZE.get(device.type, 1024)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    until = time.perf_counter() + _SECONDS
    while time.perf_counter() < until or best == float("inf"):
        _synchronise(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that this process has held, of the device's memory or, on a processor, of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

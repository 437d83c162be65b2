"""What a training run shows: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

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

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task(self._name, total=self._steps, completed=self._step, now="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

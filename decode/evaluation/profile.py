"""Where the time of a step goes: drafting, scoring, verifying, committing, and what happens between the steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from ..models.base import LanguageModel

PHASES = ("draft", "score", "verify", "commit", "host")


class FirstStep:
    """Notes when the first step begins, at which the prompt has been read; give it to `generate` as `profile`."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before, self.at = before, math.inf

    def start(self) -> None:
        """A step begins."""
        if self.at == math.inf:
            self._before()
            self.at = time.perf_counter()

    def mark(self, phase: str) -> None:
        """A phase of it has ended."""


class StepProfile:
    """Seconds of each phase of each step; give it to `engine.generate` as `profile`.

    On CUDA the phases up to the verdict are timed with events; the commit ends in the step's one synchronisation.
    `host` is the time between two steps and, on CUDA, the part of a step in which the device was idle.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.steps: list[float] = []
        self._ended: float | None = None
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        """A step begins."""
        self._started = self._last = time.perf_counter()
        self._between = self._started - self._ended if self._ended is not None else 0.0
        if self._cuda:
            self._marks = [("start", self._event())]

    def mark(self, phase: str) -> None:
        """A phase of it has ended."""
        now = time.perf_counter()
        if self._cuda:
            self._marks.append((phase, self._event()))
        else:
            self.seconds[phase].append(now - self._last)
        self._last = now
        if phase == "commit":
            self._finish(now)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish(self, now: float) -> None:
        self._ended = now
        self.steps.append(now - self._started + self._between)
        idle = self._between
        if self._cuda:
            self._marks[-1][1].synchronize()
            busy = 0.0
            for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
                seconds = before.elapsed_time(after) / 1e3
                self.seconds[phase].append(seconds)
                busy += seconds
            idle += max(0.0, now - self._started - busy)
        self.seconds["host"].append(idle)

    def summary(self) -> dict[str, float]:
        """Median microseconds of a step by phase, and of the whole step (`step`)."""
        medians = {phase: 1e6 * statistics.median(series) for phase, series in self.seconds.items() if series}
        return medians | ({"step": 1e6 * statistics.median(self.steps)} if self.steps else {})


def time_call(model: LanguageModel, call: Callable[[], object]) -> float:
    """Seconds of a call on a model's device."""
    synchronise(model)
    start = time.perf_counter()
    call()
    synchronise(model)
    return time.perf_counter() - start


def synchronise(model: LanguageModel) -> None:
    """Wait for a model's device, before a clock is read."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)

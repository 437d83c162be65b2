"""Where the time of a step goes: drafting, scoring, verifying, committing, and what happens between the steps; how much
of it the forwards take within; what those of a proposal cost in isolation.

Shape letters: B batch, N nodes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..methods import Method
from ..models.base import LanguageModel

_RUNS = 6  # of each forward in isolation, all in turn; medians are taken
PHASES = ("draft", "score", "verify", "commit", "host")
_SPAN = "draftsmith phase: "


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
        self.shares: list[float] = []
        """Of each step's time the part that forwards took, of what `timing_forwards` was given."""
        self._ended: float | None = None
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._forwards: list[tuple[Any, Any]] | None = None  # while a step runs: when each began and ended

    def start(self) -> None:
        """A step begins."""
        self._started = self._last = time.perf_counter()
        self._between = self._started - self._ended if self._ended is not None else 0.0
        self._forwards = []
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

    @contextmanager
    def timing_forwards(self, *parts: Any) -> Iterator[None]:
        """Within, every forward of these models and heads in a step is timed too, as a part of the step's own time, so
        that it cannot exceed it: see `shares`."""
        with ExitStack() as changes:
            for part in {id(part): part for part in parts}.values():
                names = ("extend", "logits") if isinstance(part, LanguageModel) else ("forward",)
                for name in names:
                    if (call := getattr(part, name, None)) is not None:
                        changes.enter_context(_replaced(part, name, self._timed(call)))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = call(*args, **kwargs)
            if self._forwards is not None:
                self._forwards.append((start, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        return self._event() if self._cuda else time.perf_counter()

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
        spans, self._forwards = self._forwards or [], None
        forwards = sum(start.elapsed_time(end) / 1e3 if self._cuda else end - start for start, end in spans)
        self.shares.append(forwards / self.steps[-1] if self.steps[-1] else 1.0)

    def add(self, other: StepProfile) -> None:
        """Take another's steps over."""
        self.steps += other.steps
        self.shares += other.shares
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    def summary(self) -> dict[str, float]:
        """Median microseconds of a step by phase, and of the whole step (`step`)."""
        medians = {phase: 1e6 * statistics.median(series) for phase, series in self.seconds.items() if series}
        return medians | ({"step": 1e6 * statistics.median(self.steps)} if self.steps else {})


class BusyProfile:
    """Microseconds in which each phase of a step kept the device at work: CUDA's kernels and copies, on a CPU torch's
    operators. What a phase takes longer, by `StepProfile`, are gaps: the device waits for the host.

    Give it to `engine.generate` as `profile`, within `with`. Phases are waited for, so that clocks are of no use then.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        activities = torch.profiler.supported_activities() if self._cuda else [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._span: Any = None

    def __enter__(self) -> BusyProfile:
        self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.stop()

    def start(self) -> None:
        """A step begins."""
        self._begin(0)

    def mark(self, phase: str) -> None:
        """A phase of it has ended."""
        if self._cuda:
            torch.cuda.synchronize()
        self._span.__exit__(None, None, None)
        if phase != "commit":
            self._begin(PHASES.index(phase) + 1)

    def _begin(self, phase: int) -> None:
        self._span = torch.profiler.record_function(_SPAN + PHASES[phase])
        self._span.__enter__()

    def summary(self) -> dict[str, float]:
        """Of each phase, a step's mean."""
        events = self._profiler.events() or []
        on_device = torch.autograd.DeviceType.CUDA if self._cuda else torch.autograd.DeviceType.CPU
        spans = [each for each in events if each.name.startswith(_SPAN)]
        work = [each for each in events if each.device_type == on_device and not each.name.startswith(_SPAN)]
        began = np.array([each.time_range.start for each in work])
        took = np.array([each.time_range.elapsed_us() if self._cuda else each.self_cpu_time_total for each in work])
        found = {phase: list[float]() for phase in PHASES[:-1]}
        for each in spans:
            if each.device_type == torch.autograd.DeviceType.CPU:
                within = (each.time_range.start <= began) & (began < each.time_range.end)
                found[each.name.removeprefix(_SPAN)].append(float(took[within].sum()))
        return {phase: statistics.fmean(series) for phase, series in found.items() if series}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of the object alone, for a while."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


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


@torch.inference_mode()
def drafting_cost(target: LanguageModel, method: Method, nodes: float, context: int) -> tuple[float, int]:
    """Seconds of a proposal's forwards in isolation, over those of a one-token forward of the target, behind `context`
    committed tokens; how many they are. `nodes`: that the target scores an iteration."""
    drafts = Counter[tuple[Any, int]]((model or target, count) for model, count in method.proposer.forwards(nodes))
    calls = {each: isolated_forward(target, *each, context) for each in ((target, 1), *drafts)}
    seconds: dict[Any, list[float]] = {each: [] for each in calls}
    for _ in range(_RUNS):
        for each, call in calls.items():
            call()  # finds what other forwards have left
            seconds[each].append(time_call(target, call))
    median = {each: statistics.median(series) for each, series in seconds.items()}
    drafting = sum(times * median[each] for each, times in drafts.items())
    return drafting / median[target, 1], drafts.total()


def isolated_forward(target: LanguageModel, part: Any, width: int, context: int) -> Callable[[], Any]:
    """A forward of a model on top of `context` tokens, or of heads on one state, ready to be timed."""
    if isinstance(part, LanguageModel):
        return raw_forward(part, width, context)
    return partial(part, torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device))


def raw_forward(model: LanguageModel, nodes: int, context: int) -> Callable[[], Tensor]:
    """A forward of `nodes` tokens behind `context` committed ones, to be timed. They differ: tokens that are alike
    would all go to the same experts of a mixture, and the others' weights would not be read."""
    ids = torch.randint(model.vocab_size, (1, context + nodes), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _, cache = model.begin(ids[:, :context].tolist(), context + nodes)
    cache.set_lengths([context])
    tokens_BN = ids[:, context:].to(model.device)
    return lambda: model.logits(model.extend(cache, tokens_BN))

"""Cost of a method's step on this machine: measured forwards, interpolated, and the overhead between them.

The forwards of a step are known without decoding (`Proposer.forwards`). The overhead (sampling, warping, verifying,
committing) is measured by decoding a few texts, as a constant and a part that grows with the tree.

Shape letters: B batch, N nodes, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from ...engine import Limits
from ...methods import Method, Parts, build_method
from ...models.base import LanguageModel
from ...warpers import Sampling
from ..measure import BASELINE, Decoded, decode
from ..metrics import total
from ..profile import raw_forward, time_in_turns

TARGET_NODES = (1, 2, 3, 5, 9, 17, 33, 65)
DRAFTER_NODES = (1, 2, 4, 8, 16, 32)
PROBE_REPEATS = 3
"""Number of runs of each prompt to measure overheads."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a forward by its number of nodes, non-decreasing and linear between measurements."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, nodes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """Fit the nearest non-decreasing curve to measured seconds (isotonic regression)."""
        return cls(tuple(nodes), tuple(float(value) for value in isotonic_regression(seconds).x))

    def __call__(self, nodes: float) -> float:
        """Return the seconds for a number of nodes; beyond the last point the last line continues."""
        if nodes > self.nodes[-1] and len(self.nodes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.nodes[-1] - self.nodes[-2])
            return self.seconds[-1] + slope * (nodes - self.nodes[-1])
        return float(np.interp(nodes, self.nodes, self.seconds))


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step in addition to its forwards."""

    constant: float = 0.0
    per_node: float = 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Overhead:
        """Fit (nodes, seconds) by least squares; return the mean if the line would fall."""
        nodes, seconds = (np.array(column) for column in zip(*points, strict=True))
        slope, constant = np.polyfit(nodes, seconds, 1) if np.ptp(nodes) >= 0.5 else (0.0, 0.0)
        return cls(float(constant), float(slope)) if slope > 0 else cls(float(seconds.mean()))

    def __call__(self, nodes: float) -> float:
        return self.constant + self.per_node * nodes


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step by method and settings."""

    target: Curve
    """Forwards of the target."""
    drafter: Curve | None = None
    heads: float | None = None
    """Seconds of the heads."""
    baseline: float = 0.0
    """Overhead of a step of autoregressive decoding."""
    overheads: dict[str, Overhead] = field(default_factory=dict)
    """Overheads by method."""
    default: Overhead = Overhead()
    """Overhead of other methods."""
    batch: int = 1
    """Number of sequences decoded together; their forwards are assumed to cost as much as B times the nodes."""

    def forwards_seconds(self, method: Method, nodes: float) -> float:
        """Return the seconds of the forwards of a step with `nodes` nodes."""
        seconds = self.target(self.batch * nodes)
        for model, count in method.proposer.forwards(nodes):
            if model is None:
                seconds += self.target(self.batch * count)
            elif isinstance(model, LanguageModel):
                assert self.drafter is not None
                seconds += self.drafter(self.batch * count)
            else:
                assert self.heads is not None
                seconds += self.heads
        return seconds

    def step_seconds(self, name: str, method: Method, nodes: float) -> float:
        """Return the seconds of a step, at least those of autoregressive decoding."""
        seconds = self.forwards_seconds(method, nodes) + self.overheads.get(name, self.default)(nodes)
        return max(seconds, self.plain_seconds())

    def plain_seconds(self) -> float:
        """Return the seconds of a step of autoregressive decoding."""
        return self.target(self.batch) + self.baseline

    def speedup(self, tokens_per_step: float, step_seconds: float) -> float:
        """Return the speedup over autoregressive decoding, without prefill."""
        return tokens_per_step * self.plain_seconds() / step_seconds


@torch.inference_mode()
def measure_forwards(
    target: LanguageModel, parts: Parts, context: int, *, target_nodes: Sequence[int] = TARGET_NODES, runs: int = 12
) -> CostModel:
    """Time forwards of the target, the drafter and the heads after `context` tokens, in turns to share drift."""
    calls: list[Callable[[], Any]] = [raw_forward(target, count, context) for count in target_nodes]
    if parts.drafter is not None:
        calls += [raw_forward(parts.drafter, count, context) for count in DRAFTER_NODES]
    if parts.heads is not None:
        hidden_BD = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
        calls.append(partial(parts.heads, hidden_BD))
    found = [_lower_quartile(seconds) for seconds in time_in_turns(target, calls, 2 * runs)]
    wide = len(target_nodes)
    return CostModel(
        Curve.through(target_nodes, found[:wide]),
        Curve.through(DRAFTER_NODES, found[wide:][: len(DRAFTER_NODES)]) if parts.drafter is not None else None,
        found[-1] if parts.heads is not None else None,
    )


def measure_overheads(
    costs: CostModel,
    target: LanguageModel,
    parts: Parts,
    probes: Sequence[tuple[str, dict[str, Any]]],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, work: None,
    keep: Callable[[int, Callable[[], Decoded]], Decoded] = lambda _, work: work(),
) -> CostModel:
    """Measure the overheads of steps by decoding.

    Args:
        probes: methods with settings; several settings of a method determine the part that grows with the tree.
        keep: runs the work of a run, by its number, or returns the result of an earlier process.
    """
    jobs = [(BASELINE, build_method(BASELINE, parts, sampling))]
    jobs += [(name, build_method(name, parts, sampling, **options)) for name, options in probes]
    work, done = PROBE_REPEATS * len(prompts) * len(jobs), 0
    runs: list[list[Decoded]] = [[] for _ in jobs]
    for _, method in jobs:
        decode(target, method, sampling, seed, prompts[0], Limits(min(8, limits.max_new_tokens), limits.stop_ids))
    for _ in range(PROBE_REPEATS):
        for row, prompt in enumerate(prompts):
            for own, (_, method) in zip(runs, jobs, strict=True):
                own.append(keep(done, partial(decode, target, method, sampling, seed + row, prompt, limits)))
                done += 1
                progress(done, work)
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, method), own in zip(jobs, runs, strict=True):
        counts = total(run.tally for run in own)
        nodes = counts.nodes / counts.steps
        step = _lower_quartile([(run.seconds - run.reading) / run.tally.steps for run in own])
        points.setdefault(name, []).append((nodes, step - costs.forwards_seconds(method, nodes)))
    baseline = points.pop(BASELINE)[0][1]
    overheads = {name: Overhead.through(pairs) for name, pairs in points.items()}
    return replace(costs, baseline=baseline, overheads=overheads, default=Overhead(baseline))


def _lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, since other processes only ever make a measurement longer."""
    return float(np.quantile(np.asarray(seconds), 0.25))

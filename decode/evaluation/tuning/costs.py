"""What a step of a method costs on this machine: measured forwards, interpolated, and what happens between them.

A step's forwards are known without decoding (`Proposer.forwards`); what it takes beyond them (drawing, warping,
verifying, committing) is measured by decoding a few texts, as a constant and a part that grows with the tree.

Shape letters: B batch, N nodes, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from ..profile import raw_forward, time_call

TARGET_NODES = (1, 2, 3, 5, 9, 17, 33, 65)
DRAFTER_NODES = (1, 2, 4, 8, 16, 32)
PROBE_REPEATS = 3
"""Runs of each prompt to learn what a step takes beyond its forwards."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a forward by the number of nodes, never falling; straight lines between what was measured."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, nodes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """The rising curve nearest to measured seconds (isotonic regression)."""
        return cls(tuple(nodes), tuple(float(value) for value in isotonic_regression(seconds).x))

    def __call__(self, nodes: float) -> float:
        """Seconds of so many nodes; beyond the last point the last line continues."""
        if nodes > self.nodes[-1] and len(self.nodes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.nodes[-1] - self.nodes[-2])
            return self.seconds[-1] + slope * (nodes - self.nodes[-1])
        return float(np.interp(nodes, self.nodes, self.seconds))


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step beyond its forwards."""

    constant: float = 0.0
    per_node: float = 0.0

    def __call__(self, nodes: float) -> float:
        return self.constant + self.per_node * nodes


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step, by method and settings."""

    target: Curve
    """Forwards of the target."""
    drafter: Curve | None = None
    heads: float | None = None
    """Seconds of the heads."""
    baseline: float = 0.0
    """A step of autoregressive decoding beyond its forward."""
    overheads: dict[str, Overhead] = field(default_factory=dict)
    """By method."""
    default: Overhead = Overhead()
    """Of methods that have none of their own."""
    batch: int = 1
    """Number of sequences decoded together: a forward of B sequences is taken to cost that of B times the nodes."""

    def forwards_seconds(self, method: Method, nodes: float) -> float:
        """The forwards of a step of `nodes` nodes, by parts whose cost is known."""
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
        """A whole step of a method: never less than one of plain decoding, all of which it holds."""
        seconds = self.forwards_seconds(method, nodes) + self.overheads.get(name, self.default)(nodes)
        return max(seconds, self.plain_seconds())

    def draft_token(self, gamma: int) -> tuple[float, float]:
        """Of a chain, in forwards of the target: the drafter's forward, and what one token more makes the target's
        longer."""
        assert self.drafter is not None
        plain = self.target(self.batch)
        longer = (self.target(self.batch * (1 + gamma)) - plain) / gamma
        return self.drafter(self.batch) / plain, longer / plain

    def plain_seconds(self) -> float:
        """A step of autoregressive decoding: a token."""
        return self.target(self.batch) + self.baseline

    def speedup(self, tokens_per_step: float, step_seconds: float) -> float:
        """Over autoregressive decoding by this engine, the reading of prompts left out."""
        return tokens_per_step * self.plain_seconds() / step_seconds


@torch.inference_mode()
def measure_forwards(
    target: LanguageModel,
    parts: Parts,
    context: int,
    *,
    target_nodes: Sequence[int] = TARGET_NODES,
    drafter_nodes: Sequence[int] = DRAFTER_NODES,
    runs: int = 12,
) -> CostModel:
    """Time forwards of the target, the drafter and the heads behind `context` committed tokens, all in turn so that
    drift is shared."""
    calls: list[Callable[[], Any]] = [raw_forward(target, count, context) for count in target_nodes]
    if parts.drafter is not None:
        calls += [raw_forward(parts.drafter, count, context) for count in drafter_nodes]
    if parts.heads is not None:
        hidden_BD = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
        calls.append(partial(parts.heads, hidden_BD))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for index, call in enumerate(calls):
            call()  # finds what other forwards have left
            seconds[index] += [time_call(target, call) for _ in range(2)]
    found = [typical(series) for series in seconds]
    wide, narrow = len(target_nodes), len(drafter_nodes)
    return CostModel(
        Curve.through(target_nodes, found[:wide]),
        Curve.through(drafter_nodes, found[wide : wide + narrow]) if parts.drafter is not None else None,
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
    repeats: int = PROBE_REPEATS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[int, Callable[[], Decoded]], Decoded] = lambda _, work: work(),
) -> CostModel:
    """The cost model with what a step takes beyond its forwards, by decoding.

    Args:
        probes: methods with settings; of two or more settings of a method the part that grows with the tree is known.
        keep: does a run, by its number, or knows what came of it.
    """
    jobs = [(BASELINE, build_method(BASELINE, parts, sampling))]
    jobs += [(name, build_method(name, parts, sampling, **options)) for name, options in probes]
    work, done = repeats * len(prompts) * len(jobs), 0
    runs: list[list[Decoded]] = [[] for _ in jobs]
    for _, method in jobs:
        decode(target, method, sampling, seed, prompts[0], Limits(min(8, limits.max_new_tokens), limits.stop_ids))
    for _ in range(repeats):
        for row, prompt in enumerate(prompts):
            for index, (_, method) in enumerate(jobs):
                work_of = partial(decode, target, method, sampling, seed + row, prompt, limits)
                runs[index].append(keep(done, work_of))
                done += 1
                if progress:
                    progress(done, work)
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, method), own in zip(jobs, runs, strict=True):
        counts = total(run.tally for run in own)
        nodes = counts.nodes / counts.steps
        step = typical([(run.seconds - run.reading) / run.tally.steps for run in own])
        points.setdefault(name, []).append((nodes, step - costs.forwards_seconds(method, nodes)))
    baseline = points.pop(BASELINE)[0][1]
    overheads = {name: fit_overhead(pairs) for name, pairs in points.items()}
    return CostModel(costs.target, costs.drafter, costs.heads, baseline, overheads, Overhead(baseline))


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: what else runs on a machine only ever makes a measurement longer, and not all alike."""
    return float(np.quantile(np.asarray(seconds), 0.25))


def fit_overhead(points: Sequence[tuple[float, float]]) -> Overhead:
    """The line of least squares through (nodes, seconds), whose constant may lie below 0; the mean where it would
    fall."""
    nodes, seconds = (np.array(column) for column in zip(*points, strict=True))
    if nodes.max() - nodes.min() < 0.5:
        return Overhead(float(seconds.mean()))
    slope, constant = np.polyfit(nodes, seconds, 1)
    return Overhead(float(constant), float(slope)) if slope > 0 else Overhead(float(seconds.mean()))

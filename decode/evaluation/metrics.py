"""The metrics, defined once. Every table uses these names.

- `tokens_per_step` (block efficiency): tokens kept ÷ target forwards, prefill not counted, the extra token counted,
  tokens cut off by a stop token or the limit not counted.
- `acceptance_rate`: draft tokens accepted ÷ draft tokens examined; a path's examination ends at its first rejection.
- `acceptance_at_k`: the same by level: levels where one of the k candidates was accepted ÷ levels examined.
- `acceptance_by_depth[i]`: of the steps whose path reached depth i, the share that accepted a token there.
- `speedup`: tokens per second over those of autoregressive decoding by this engine, same prompts, median runs.
- intervals: 95 %, by bootstrap over prompts (percentiles of 2,000 resamples); None for fewer than 3 prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from ..engine import Step
from .bootstrap import percentile_interval, resampled_ratios

Interval = tuple[float, float]
SHARES = ("acceptance_rate", "acceptance_at_k", "acceptance_by_depth", "rouge_l")
"""Metrics that lie in [0, 1]."""


@dataclass
class Tally:
    """Counts over the steps of one row, or of many rows added up."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    examined: int = 0
    rejections: int = 0
    iterations: int = 0
    """Of the engine's loop: each takes one target forward, and those that its proposal takes. 0: not counted."""
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def add_step(self, step: Step, row: int) -> None:
        """Count one iteration of one row; a row that had ended counts nothing."""
        if not step.active[row]:
            return
        accepted, rejected = int(step.accepted[row]), bool(step.rejected[row])
        self.tokens += len(step.new_ids[row])
        self.steps += step.forwards
        self.iterations += 1
        self.nodes += step.nodes
        self.accepted += accepted
        self.examined += int(step.examined[row])
        self.rejections += rejected
        depths = accepted + rejected
        self.reached += [0] * (depths - len(self.reached))
        self.passed += [0] * (depths - len(self.passed))
        for depth in range(depths):
            self.reached[depth] += 1
            self.passed[depth] += depth < accepted

    @property
    def rounds(self) -> int:
        """Iterations; of counts without them the target's forwards, as many of every method but beams of the target."""
        return self.iterations or self.steps

    def __add__(self, other: Tally) -> Tally:
        found: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if isinstance(mine, list):  # by depth
                found[name] = [one + another for one, another in zip_longest(mine, theirs, fillvalue=0)]
            else:
                found[name] = mine + theirs
        return Tally(**found)

    def metrics(self) -> dict[str, object]:
        """The metrics of this file by name; None where nothing was examined, and no entries by depth."""
        levels = self.accepted + self.rejections
        by_depth = [passed / reached for reached, passed in zip(self.reached, self.passed, strict=True) if reached]
        return {
            "tokens_per_step": self.tokens / self.steps if self.steps else None,
            "acceptance_rate": self.accepted / self.examined if self.examined else None,
            "acceptance_at_k": self.accepted / levels if levels else None,
            "acceptance_by_depth": by_depth,
            "nodes_per_step": self.nodes / self.steps if self.steps else None,
        }


def total(tallies: Iterable[Tally]) -> Tally:
    """All counts added up."""
    return sum(tallies, Tally())


def speedup_interval(
    tokens: Sequence[float], seconds: Sequence[float], base_tokens: Sequence[float], base_seconds: Sequence[float]
) -> tuple[float, Interval | None]:
    """Throughput over the baseline's on the same prompts, and its 95 % bootstrap interval over prompts, or batches of
    them (None for fewer than 3)."""
    over_P2 = np.array([tokens, base_tokens], dtype=np.float64).T
    under_P2 = np.array([seconds, base_seconds], dtype=np.float64).T
    mine, theirs = over_P2.sum(0) / under_P2.sum(0)
    rates_R2 = resampled_ratios(over_P2, under_P2)
    return float(mine / theirs), percentile_interval(None if rates_R2 is None else rates_R2[:, 0] / rates_R2[:, 1])


def tokens_per_step_interval(tallies: Sequence[Tally]) -> Interval | None:
    """95 % bootstrap interval of `tokens_per_step` over prompts, of each of which there is one tally."""
    tokens_P1, steps_P1 = (np.array([[getattr(tally, name)] for tally in tallies]) for name in ("tokens", "steps"))
    return percentile_interval(resampled_ratios(tokens_P1, steps_P1))


def impossible(entry: Mapping[str, Any], forwards: float = 1.0, slack: float = 1.0) -> str | None:
    """Why a measured entry cannot be true, or None: such an entry is an error of the report, not a row of it.

    A number that is negative or not finite; a share above 1; a perplexity below 1; a speedup whose whole interval lies
    above the tokens of an iteration, which holds all that a step of plain decoding does: `tokens_per_step` times its
    target `forwards`; by a tenth for a category: there are many.
    """
    for key, number in _numbers(entry):
        if not math.isfinite(number):
            return f"{key} is {number}, not a finite number"
        if number < 0:
            return f"{key} is {number:g}, below 0"
        name = key.partition("[")[0]
        if name in SHARES and number > 1 + 1e-9:
            return f"{name} is {number:.3f}, outside [0, 1]"
        if key == "perplexity" and number < 1 - 1e-6:
            return f"perplexity is {number:.3f}, below 1"
    per_step, low = entry.get("tokens_per_step"), (entry.get("speedup_interval") or [0.0])[0]
    if per_step is not None and low > slack * forwards * per_step and entry.get("method") != "autoregressive":
        return f"speedup is at least {low:.2f}, above tokens_per_step of {per_step:.2f}"
    for name, part in entry.get("by_category", {}).items():
        if reason := impossible({"method": entry.get("method")} | part, forwards, 1.1):
            return f"category {name!r}: {reason}"
    return None


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number of an entry with its path, but for the method's settings and the categories."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("options", "by_category"):
                yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{key}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value

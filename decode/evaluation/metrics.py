"""Definitions of the metrics in evaluation results.

- `tokens_per_step` (mean acceptance length τ): generated tokens ÷ target forwards. It counts bonus tokens, but neither
  the prefill nor tokens after a stop token or the limit.
- `acceptance_rate` (α): accepted ÷ examined draft tokens. The examination of a path ends at its first rejection.
- `acceptance_at_k`: levels where one of k candidates was accepted ÷ levels examined.
- `acceptance_by_depth[i]`: share of the steps whose path reached depth i that accepted a token there.
- `speedup`: tokens per second relative to autoregressive decoding by this engine on the same prompts (median runs).
- Intervals: 95 % bootstrap intervals over prompts (2,000 resamples), or None for fewer than 3 prompts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from ..engine import Step
from .bootstrap import percentile_interval, resampled_ratios

Interval = tuple[float, float]
BOUNDED_METRICS = ("acceptance_rate", "acceptance_at_k", "acceptance_by_depth", "rouge_l")
"""Metrics that lie in [0, 1]."""


@dataclass
class Tally:
    """Counts over the decoding steps of one or several rows."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    examined: int = 0
    rejections: int = 0
    iterations: int = 0
    """Number of iterations of the decoding loop. 0 if iterations were not counted."""
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def add_step(self, step: Step, row: int) -> None:
        """Add the counts of one step of a row, unless the row ended before this step."""
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
        """Return the number of iterations or, if unknown, of target forwards. These differ only for beam search."""
        return self.iterations or self.steps

    def __add__(self, other: "Tally") -> "Tally":
        counts: dict[str, Any] = {}
        for name, count in vars(self).items():
            other_count = getattr(other, name)
            if isinstance(count, list):  # by depth
                counts[name] = [first + second for first, second in zip_longest(count, other_count, fillvalue=0)]
            else:
                counts[name] = count + other_count
        return Tally(**counts)

    def metrics(self) -> dict[str, object]:
        """Return a mapping from metric names to values. Metrics that have no counts are None."""
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
    """Return the sum of several tallies."""
    return sum(tallies, Tally())


def speedup_interval(
    tokens: Sequence[float], seconds: Sequence[float], base_tokens: Sequence[float], base_seconds: Sequence[float]
) -> tuple[float, Interval | None]:
    """Return the speedup over a baseline on the same prompts or batches, and its 95 % bootstrap interval.

    The interval is None for fewer than 3 prompts.
    """
    over_P2 = np.array([tokens, base_tokens], dtype=np.float64).T
    under_P2 = np.array([seconds, base_seconds], dtype=np.float64).T
    rate, base_rate = over_P2.sum(0) / under_P2.sum(0)
    rates_R2 = resampled_ratios(over_P2, under_P2)
    return float(rate / base_rate), percentile_interval(None if rates_R2 is None else rates_R2[:, 0] / rates_R2[:, 1])


def tokens_per_step_interval(tallies: Sequence[Tally]) -> Interval | None:
    """Return the 95 % bootstrap interval of `tokens_per_step`, given one tally for each prompt."""
    tokens_P1, steps_P1 = (np.array([[getattr(tally, name)] for tally in tallies]) for name in ("tokens", "steps"))
    return percentile_interval(resampled_ratios(tokens_P1, steps_P1))


def find_impossible_value(entry: Mapping[str, Any], forwards: float = 1.0, slack: float = 1.0) -> str | None:
    """Return a message about the first impossible number of a measured entry, or None if all are possible.

    Numbers must be finite and at least 0, shares at most 1, and perplexities at least 1. The lower end of the speedup's
    interval must be at most `tokens_per_step` · `forwards` (target forwards per iteration) · `slack` (tolerance).
    """
    for key, number in _numbers(entry):
        if not math.isfinite(number):
            return f"{key} is {number}, not a finite number"
        if number < 0:
            return f"{key} is {number:g}, below 0"
        name = key.partition("[")[0]
        if name in BOUNDED_METRICS and number > 1 + 1e-9:
            return f"{name} is {number:.3f}, outside [0, 1]"
        if key == "perplexity" and number < 1 - 1e-6:
            return f"perplexity is {number:.3f}, below 1"
    per_step, low = entry.get("tokens_per_step"), (entry.get("speedup_interval") or [0.0])[0]
    if per_step is not None and low > slack * forwards * per_step and entry.get("method") != "autoregressive":
        return f"speedup is at least {low:.2f}, above tokens_per_step of {per_step:.2f}"
    for name, part in entry.get("by_category", {}).items():
        if reason := find_impossible_value({"method": entry.get("method")} | part, forwards, 1.1):
            return f"category {name!r}: {reason}"
    return None


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the key and value of every number in an entry, except in its options and categories."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("options", "by_category"):
                yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{key}[{index}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value

"""The metrics, defined once. Every table uses these names.

- `tokens_per_step` (block efficiency): tokens kept ÷ target forwards, prefill not counted, the extra token counted,
  tokens cut off by a stop token or the limit not counted.
- `acceptance_rate`: draft tokens accepted ÷ draft tokens examined; a path's examination ends at its first rejection.
- `acceptance_at_k`: the same by level: levels where one of the k candidates was accepted ÷ levels examined.
- `acceptance_by_depth[i]`: of the steps whose path reached depth i, the share that accepted a token there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import bootstrap

from .engine import Step


@dataclass
class Tally:
    """Counts over the steps of one row, or of many rows added up."""

    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    examined: int = 0
    rejections: int = 0
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def add_step(self, step: Step, row: int) -> None:
        """Count one iteration of one row; a row that had ended counts nothing."""
        if not step.active[row]:
            return
        accepted, rejected = int(step.accepted[row]), bool(step.rejected[row])
        self.tokens += len(step.new_ids[row])
        self.steps += step.forwards
        self.nodes += step.nodes
        self.accepted += accepted
        self.examined += int(step.examined[row])
        self.rejections += rejected
        self._grow(accepted + rejected)
        for depth in range(accepted + rejected):
            self.reached[depth] += 1
            self.passed[depth] += depth < accepted

    def _grow(self, depth: int) -> None:
        missing = max(0, depth - len(self.reached))
        self.reached += [0] * missing
        self.passed += [0] * missing

    def __add__(self, other: Tally) -> Tally:
        total = Tally(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.nodes + other.nodes,
            self.accepted + other.accepted,
            self.examined + other.examined,
            self.rejections + other.rejections,
            list(self.reached),
            list(self.passed),
        )
        total._grow(len(other.reached))
        for depth, (reached, passed) in enumerate(zip(other.reached, other.passed, strict=True)):
            total.reached[depth] += reached
            total.passed[depth] += passed
        return total

    def metrics(self) -> dict[str, object]:
        """The metrics of this file by name; None where nothing was examined."""
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
    tokens: Sequence[int], seconds: Sequence[float], base_tokens: Sequence[int], base_seconds: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Throughput over the baseline's throughput on the same prompts, with a 95 % bootstrap interval over prompts.

    Args:
        tokens, seconds: of the method, by prompt. base_tokens, base_seconds: of autoregressive decoding.

    Returns:
        The ratio and its interval; None for the interval where there are fewer than 3 prompts.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (tokens, seconds, base_tokens, base_seconds)]

    def ratio(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        new, time, base_new, base_time = (sample.sum(axis) for sample in samples)
        return (new / time) / (base_new / base_time)

    value = float(ratio(*columns))
    if len(tokens) < 3:
        return value, None
    result = bootstrap(columns, ratio, paired=True, vectorized=True, n_resamples=2000, method="percentile", rng=0)
    interval = result.confidence_interval
    return value, (float(interval.low), float(interval.high))


def impossible(entry: dict[str, object]) -> str | None:
    """Why a measured entry cannot be true, or None. Such an entry is an error of the report, not a row of it."""
    rate, speedup, per_step = entry.get("acceptance_rate"), entry.get("speedup"), entry.get("tokens_per_step")
    if isinstance(rate, float) and not 0 <= rate <= 1:
        return f"acceptance_rate is {rate:.3f}, outside [0, 1]"
    interval = entry.get("speedup_interval")
    if isinstance(speedup, float) and isinstance(per_step, float) and entry.get("method") != "autoregressive":
        low = interval[0] if isinstance(interval, (tuple, list)) else speedup
        if low > per_step:
            return f"speedup is {speedup:.2f} (at least {low:.2f}), above tokens_per_step of {per_step:.2f}"
    return None

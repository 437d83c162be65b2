"""Tuner that uses successive halving: measure all settings on a few prompts, then the fastest on more prompts.

Settings are measured with this engine. Draft lengths can also be measured with a serving engine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_FINALISTS = 4
"""Maximum number of lossless settings in the last round."""
MAX_LOSSY = 3
"""Maximum number of settings of each lossy method after the first round."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """Batch size and temperature to optimise for."""

    batch: int
    """Batch size, or number of concurrent requests to a serving engine."""
    temperature: float

    def __str__(self) -> str:
        return f"batch {self.batch}, temperature {self.temperature:g}"

    @property
    def slug(self) -> str:
        return f"{self.batch}-{str(self.temperature).removesuffix('.0')}"


@dataclass(frozen=True)
class Measurement:
    """Measured speedup of a setting over autoregressive decoding."""

    label: str
    """Unique label of the setting."""
    tokens_per_step: float
    speedup: float
    interval: tuple[float, float]
    """95 % interval of the speedup."""
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    is_steady: bool = True
    """False if other processes disturbed the times."""
    is_lossless: bool = True
    perplexity: float | None = None
    """Perplexity of the output under the target."""
    name: str = ""
    """Name of the trained candidate that drafts tokens."""
    steps: int = 0
    """Number of training steps of the candidate. 0 if it was not trained."""

    @classmethod
    def of_row(cls, row: Row) -> "Measurement":
        """Create a measurement from a row of an evaluation."""
        interval = tuple(row["speedup_interval"] or (row["speedup"], row["speedup"]))
        about = {key: row[key] for key in ("label", "method", "options", "perplexity", "tokens_per_step", "speedup")}
        return cls(interval=interval, is_steady=row["steady"] is not False, is_lossless=row["lossless"], **about)

    def __str__(self) -> str:
        return f"{self.label}: {self.speedup:.2f}x ({self.interval[0]:.2f}–{self.interval[1]:.2f})"


def tune(
    labels: Sequence[str], measure: Callable[[Sequence[str], int, int], Sequence[Measurement]], prompts: Sequence[int]
) -> list[Measurement]:
    """Run all rounds, and return the measurements of the last one in descending order of speedup.

    Args:
        labels: Unique labels of all settings.
        measure: Function that measures settings, given their labels, the round number from 1 and the number of prompts.
        prompts: Number of prompts of each round.
    """
    measured: list[Measurement] = []
    for number, count in enumerate(prompts, 1):
        measured = sorted(measure(labels, number, count), key=lambda row: -row.speedup)
        most = MAX_FINALISTS if number >= len(prompts) - 1 else max(MAX_FINALISTS, len(labels) // 4)
        labels = [row.label for row in select_survivors(measured, most)]
    return measured


def select_survivors(ranked: Sequence[Measurement], most: int) -> list[Measurement]:
    """Select at most `most` lossless settings that may be the fastest, and Pareto-optimal lossy settings.

    Disturbed measurements are included, since selected settings are measured again.
    """
    lossless = [row for row in ranked if row.is_lossless]
    selected = [row for row in lossless if row.interval[1] >= lossless[0].interval[0]][:most]
    for method in dict.fromkeys(row.method for row in ranked if not row.is_lossless):
        selected += pareto_frontier([row for row in ranked if row.method == method and not row.is_lossless])
    return selected


def pareto_frontier(measured: Sequence[Measurement], most: int = MAX_LOSSY) -> list[Measurement]:
    """Return the Pareto-optimal settings in speed and perplexity, or `most` evenly spaced ones if there are more."""
    best: list[Measurement] = []

    def order(row: Measurement) -> tuple[float, float]:
        return math.inf if row.perplexity is None else row.perplexity, -row.speedup

    for row in sorted(measured, key=order):
        if not best or row.speedup > best[-1].speedup:
            best.append(row)
    indices = np.linspace(0, len(best) - 1, min(most, len(best))).round().astype(int)
    return [best[index] for index in indices]


def choose_winner(measurements: Sequence[Measurement]) -> tuple[Measurement | None, str]:
    """Return the fastest steady lossless measurement whose interval lies above 1, and the reason for the choice."""
    lossless = [row for row in measurements if row.is_lossless]
    ranked = sorted((row for row in lossless if row.is_steady), key=lambda row: -row.speedup)
    if not ranked:
        return None, "no measurement is steady: measure again while no other process runs on this machine"
    first = ranked[0]
    if first.interval[0] <= 1:
        disturbed = len(lossless) - len(ranked)
        more = "; more prompts may give a significant result" if first.speedup > 1 else ""
        more += f"; {disturbed} disturbed measurements are excluded" if disturbed else ""
        return None, (
            f"no setting is significantly faster than autoregressive decoding; the best is {first}: a step yields "
            f"{first.tokens_per_step:.2f} tokens and costs {first.tokens_per_step / first.speedup:.2f} forwards{more}"
        )
    tied = [row.label for row in ranked[1:] if row.interval[1] >= first.speedup]
    return first, f"{first}" + (f"; within its interval: {', '.join(tied)}" if tied else "")


def tune_lengths(measure: Callable[[int], Sequence[Row]], most: int) -> dict[int, Sequence[Row]]:
    """Measure a serving engine with increasing draft lengths until a longer one is slower at every concurrency.

    Args:
        measure: Function that takes a draft length and returns a row of `bench` for each concurrency.
        most: Maximum number of draft tokens.
    """
    rows: dict[int, Sequence[Row]] = {}
    for tokens in range(1, most + 1):
        rows[tokens] = measure(tokens)
        pairs = zip(rows.get(tokens - 1, []), rows[tokens], strict=tokens > 1)
        if tokens > 1 and all((old["speedup"] or 0) > (new["speedup"] or 0) for old, new in pairs):
            break
    return rows

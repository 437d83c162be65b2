"""The tuner: measure the settings that are predicted to be the fastest, then choose among the measurements.

A backend predicts and measures: this engine (replay under measured costs, confirmed by decoding), or a serving engine
(draft lengths under load, `lengths.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Where = TypeVar("Where", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)

MAX_FINALISTS = 4
"""Maximum number of measurements that compete for the first place."""


@dataclass(frozen=True)
class Workload:
    """Conditions under which decoding should be fast."""

    batch: int
    """Number of sequences decoded together; for a serving engine, concurrent requests."""
    temperature: float

    def __str__(self) -> str:
        return f"batch {self.batch}, temperature {self.temperature:g}"

    @property
    def slug(self) -> str:
        """Name for files."""
        return f"{self.batch}-{str(self.temperature).removesuffix('.0')}"


@dataclass(frozen=True)
class Measurement:
    """Measured speedup of a setting over autoregressive decoding."""

    name: str
    """Name of the candidate that drafts."""
    label: str
    """Label of the setting."""
    tokens_per_step: float
    speedup: float
    interval: tuple[float, float]
    """95 % interval of the speedup."""
    steps: int = 0
    """Number of training steps of the candidate; 0 if it was not trained."""
    is_steady: bool = True
    """False if the times are known to be disturbed."""
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, name: str, row: Mapping[str, Any], steps: int = 0) -> Measurement:
        """Read a row of an evaluation."""
        rates = row["tokens_per_step"], row["speedup"]
        interval = tuple(row["speedup_interval"] or (row["speedup"], row["speedup"]))
        return cls(
            name, row["label"], *rates, interval, steps, row["steady"] is not False, row["method"], row["options"]
        )


@dataclass(frozen=True)
class Ranked(Generic[Key]):
    """A setting with its evidence."""

    setting: Key
    predicted: float | None
    """Predicted speedup."""
    measured: Measurement | None

    @property
    def speedup(self) -> float:
        """Measured speedup if there is one, else the predicted one."""
        return self.measured.speedup if self.measured is not None else self.predicted or 0.0


class Backend(Protocol[Where, Key]):
    """An engine that predicts and measures settings on one or several workloads."""

    def first_settings(self) -> Sequence[Key]:
        """List the settings to measure first."""

    def measure(self, settings: Sequence[Key]) -> Mapping[Where, Mapping[Key, Measurement]]:
        """Measure settings on every workload."""

    def predict(self, workload: Where) -> Mapping[Key, float]:
        """Predict the speedups of all settings of the search space."""


def tune(backend: Backend[Where, Key], rounds: int | None = None) -> dict[Where, list[Ranked[Key]]]:
    """Rank the settings of a search space for each workload, the fastest first.

    After the first settings, those that rank first but are not measured are measured, until the first of each workload
    is, or for at most `rounds` rounds.
    """
    measured: dict[Where, dict[Key, Measurement]] = {}
    ranking: dict[Where, list[Ranked[Key]]] = {}
    settings, done = list(backend.first_settings()), 0
    while settings:
        for workload, found in backend.measure(settings).items():
            measured.setdefault(workload, {}).update(found)
        ranking = {workload: rank(backend.predict(workload), found) for workload, found in measured.items()}
        done += 1
        if done == rounds:
            break
        firsts = {workload: ranked[0].setting for workload, ranked in ranking.items()}
        settings = list({first: None for workload, first in firsts.items() if first not in measured[workload]})
    return ranking


def rank(predicted: Mapping[Key, float], measured: Mapping[Key, Measurement]) -> list[Ranked[Key]]:
    """Sort settings by their speedup, measured or predicted."""
    found = [Ranked(key, predicted.get(key), measured.get(key)) for key in {**measured, **predicted}]
    return sorted(found, key=lambda each: -each.speedup)


def within_interval_of_best(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Select the measurements that may be the fastest, the fastest first.

    They exceed autoregressive decoding, and their intervals reach that of the first. Disturbed ones are included, since
    the measurements that are selected are repeated.
    """
    ranked = sorted((each for each in measurements if each.speedup > 1), key=lambda each: -each.speedup)
    return [each for each in ranked if each.interval[1] >= ranked[0].interval[0]][:MAX_FINALISTS]


def choose_winner(measurements: Sequence[Measurement]) -> tuple[Measurement | None, str]:
    """Return the fastest steady measurement whose interval lies above 1, and the reason for the choice."""
    if not (ranked := sorted((each for each in measurements if each.is_steady), key=lambda each: -each.speedup)):
        return None, "no measurement is steady: measure again while nothing else runs on this machine"
    first = ranked[0]
    words = f"{first.label} ({first.name}): {first.speedup:.2f}x ({first.interval[0]:.2f}–{first.interval[1]:.2f})"
    if first.interval[0] <= 1:
        cost = first.tokens_per_step / first.speedup
        more = "; a larger budget measures more prompts" if first.speedup > 1 else ""
        disturbed = len(measurements) - len(ranked)
        more += f"; {disturbed} disturbed measurements are left out" if disturbed else ""
        return None, (
            f"nothing is significantly faster than autoregressive decoding; the best is {words}: a step yields "
            f"{first.tokens_per_step:.2f} tokens and costs more than {cost:.2f} forwards{more}"
        )
    tied = [each.label for each in ranked[1:] if each.interval[1] >= first.speedup]
    return first, words + (f"; within its interval: {', '.join(tied)}" if tied else "")


def interleave_rankings(rankings: Sequence[Sequence[str]], count: int) -> list[str]:
    """Interleave several rankings, keeping at most `count` names, and the first name of each in any case."""
    found = dict.fromkeys(ranked[0] for ranked in rankings if ranked)
    for at in range(1, max(map(len, rankings), default=0)):
        for ranked in rankings:
            if at < len(ranked) and len(found) < count:
                found[ranked[at]] = None
    return list(found)


@dataclass(frozen=True)
class DecodingBackend:
    """Backend of `tune` for this engine: settings with predicted speedups, measured by decoding.

    Args:
        predicted: predicted speedups by label.
        first: labels of the settings to measure.
        run: measures settings by their labels; what cannot be measured is missing.
    """

    workload: Workload
    predicted: Mapping[str, float]
    first: Sequence[str]
    run: Callable[[Sequence[str]], Mapping[str, Measurement]]

    def first_settings(self) -> Sequence[str]:
        """List the settings to measure."""
        return self.first

    def measure(self, settings: Sequence[str]) -> dict[Workload, Mapping[str, Measurement]]:
        """Decode with the settings."""
        return {self.workload: self.run(settings)}

    def predict(self, workload: Workload) -> Mapping[str, float]:
        """Return the predictions."""
        return self.predicted

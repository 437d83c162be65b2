"""Two or more results side by side: what changed from the first to each other one, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .tables import DASH, Cell, Column, Table, number_cell

BASELINE = "autoregressive"
METRICS = {
    "tokens_per_step": "Tokens per step",
    "acceptance_rate": "Acceptance rate",
    "tokens_per_second": "Tokens/s",
    "speedup": "Speedup",
}
"""What is compared, with the captions of the tables."""
_COLUMNS = {
    "tokens_per_step": ("tokens", "steps"),
    "acceptance_rate": ("accepted", "examined"),
    "tokens_per_second": ("tokens", "seconds"),
    "speedup": ("tokens", "seconds"),
}
_DECODED_ALIKE = ("target", "max_new_tokens", "top_k", "top_p", "dtype")
_RESAMPLES = 2000
_FEWEST = 3
"""Prompts that an interval needs."""


@dataclass(frozen=True)
class Change:
    """A value over the first results' value of the same method, with a 95 % interval where one can be given."""

    ratio: float
    interval: tuple[float, float] | None = None

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out that nothing changed."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


@dataclass(frozen=True)
class ComparedRow:
    """One method at one temperature."""

    label: str
    temperature: float
    values: list[dict[str, float | None]]
    """Metrics by name, for each of the results."""
    changes: list[dict[str, Change | None]]
    """For each of the results but the first."""


@dataclass(frozen=True)
class Comparison:
    """Results side by side."""

    names: list[str]
    rows: list[ComparedRow]
    notes: list[str]
    """What differs between them, and what that means for the numbers."""


def compare(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the methods that all results hold, by label and temperature.

    Intervals are 95 % bootstrap intervals (percentile, 2,000 resamples of the prompts): paired where both sides decoded
    the same prompts, otherwise each side is resampled by itself, and a note says so. Speeds of different machines are
    not compared; speedups are, for each is over its own machine's baseline.

    Args:
        names: of the results, for people.
        results: as `load_results` gives them, two at least.

    Raises:
        ValueError: no method at the same temperature is in all of them.
    """
    tables = [{(row["label"], float(row["temperature"])): row for row in result["methods"]} for result in results]
    common = [key for key in tables[0] if all(key in table for table in tables[1:])]
    if not common:
        raise ValueError(f"{' and '.join(names)} hold no method in common: {_settings(names, tables)}")
    notes, pairs, same_machine = [], [], []
    for name, result in zip(names[1:], results[1:], strict=True):
        machines = [_machine(side) for side in (results[0], result)]
        same_machine.append(machines[0] == machines[1])
        pairs.append(_same_prompts(results[0], result))
        notes += _notes(names[0], name, results[0], result, pairs[-1])
    notes += _alone(names, tables, common)
    rows = []
    for key in common:
        values = [{metric: table[key].get(metric) for metric in METRICS} for table in tables]
        changes = [
            {
                metric: _change(metric, (tables[0], table), key, paired)
                if same or metric != "tokens_per_second"
                else None
                for metric in METRICS
            }
            for table, paired, same in zip(tables[1:], pairs, same_machine, strict=True)
        ]
        rows.append(ComparedRow(key[0], key[1], values, changes))
    return Comparison(list(names), rows, notes)


_Rows = dict[tuple[str, float], Any]


def _change(metric: str, tables: tuple[_Rows, _Rows], key: tuple[str, float], paired: bool) -> Change | None:
    first, second = (table[key].get(metric) for table in tables)
    if first is None or second is None or not first:
        return None
    ratio = second / first
    sides = [_columns(metric, table, key) for table in tables]
    if any(side is None or side.shape[1] < _FEWEST for side in sides) or _is_baseline(tables, key, metric):
        return Change(ratio)
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, side.shape[1], (_RESAMPLES, side.shape[1])) for side in sides if side is not None]
    if paired:
        drawn[1] = drawn[0]
    sums = [side[:, picks].sum(-1) for side, picks in zip(sides, drawn, strict=True) if side is not None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _over(sums[1]) / _over(sums[0])
    finite = ratios[np.isfinite(ratios)]
    if len(finite) < 0.9 * _RESAMPLES:
        return Change(ratio)
    low, high = np.quantile(finite, (0.025, 0.975))
    return Change(ratio, (float(low), float(high)))


def _is_baseline(tables: tuple[_Rows, _Rows], key: tuple[str, float], metric: str) -> bool:
    """The baseline's speedup over itself is 1 by definition: it has no interval."""
    return metric == "speedup" and any(table[key].get("method") == BASELINE for table in tables)


def _over(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[0] / sums[1]
    return ratio / (sums[2] / sums[3]) if len(sums) == 4 else ratio


def _columns(metric: str, table: _Rows, key: tuple[str, float]) -> np.ndarray | None:
    """[2 or 4, prompts]: what a metric is a quotient of, prompt by prompt; None where that is not known."""
    sources = [table[key]]
    if metric == "speedup":
        base = next(
            (row for row in table.values() if row.get("method") == BASELINE and row["temperature"] == key[1]), None
        )
        if base is None:
            return None
        sources.append(base)
    columns = [
        [prompt.get(name) for prompt in row.get("by_prompt") or []] for row in sources for name in _COLUMNS[metric]
    ]
    if any(value is None for column in columns for value in column) or len({len(column) for column in columns}) != 1:
        return None
    return np.asarray(columns, dtype=np.float64)


def _same_prompts(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """By the hash of their token ids, which says nothing of how they were named."""
    mine = one.get("prompts_sha256")
    return mine is not None and mine == other.get("prompts_sha256")


def _machine(results: Mapping[str, Any]) -> dict[str, Any]:
    return {key: results["machine"].get(key) for key in ("device", "name", "cores", "threads")}


def _notes(first: str, name: str, one: Mapping[str, Any], other: Mapping[str, Any], paired: bool) -> list[str]:
    """What differs between two results."""
    notes = []
    machines = [", ".join(f"{value}" for value in _machine(side).values()) for side in (one, other)]
    if machines[0] != machines[1]:
        notes.append(
            f"machine: {machines[0]} ({first}), {machines[1]} ({name}): tokens per second are not compared, and a "
            "speedup is over its own machine's baseline"
        )
    differing = [key for key in _DECODED_ALIKE if one["recipe"].get(key) != other["recipe"].get(key)]
    for key in differing:
        notes.append(f"{key}: {one['recipe'].get(key)} ({first}), {other['recipe'].get(key)} ({name})")
    versions = [side["machine"].get("versions") or {} for side in (one, other)]
    for package in sorted(set(versions[0]) | set(versions[1])):
        theirs = [version.get(package, "none") for version in versions]
        if theirs[0] != theirs[1]:
            notes.append(f"{package}: {theirs[0]} ({first}), {theirs[1]} ({name})")
    if not all(row.get("by_prompt") for side in (one, other) for row in side["methods"]):
        notes.append(f"{first} or {name} keeps no numbers by prompt: where they are missing there is no interval")
    elif paired:
        notes.append(f"{first} and {name} decoded the same {one['prompts']} prompts: differences are paired by prompt")
    else:
        notes.append(
            f"prompts: {_prompts(one)} ({first}), {_prompts(other)} ({name}): not the same, so that differences are "
            "not paired by prompt and their intervals are wider"
        )
    return notes


def _prompts(results: Mapping[str, Any]) -> str:
    return f"{results['prompts']} of {results['recipe'].get('prompts')}"


def _alone(names: Sequence[str], tables: Sequence[_Rows], common: Sequence[tuple[str, float]]) -> list[str]:
    """Which methods not all results hold."""
    notes = []
    for name, table in zip(names, tables, strict=True):
        left = [_called(key) for key in table if key not in common]
        if left:
            notes.append(f"not in all results, so not compared: {', '.join(left)} ({name})")
    return notes


def _settings(names: Sequence[str], tables: Sequence[_Rows]) -> str:
    return "; ".join(
        f"{name} has {', '.join(map(_called, table)) or 'none'}" for name, table in zip(names, tables, strict=True)
    )


def _called(key: tuple[str, float]) -> str:
    return f"{key[0]} at temperature {key[1]:g}"


def percent(change: Change | None) -> str:
    """A change for people: `+4.2 % (+1.0 to +7.3)`."""
    if change is None or not math.isfinite(change.ratio):
        return DASH
    text = f"{100 * (change.ratio - 1):+.1f} %"
    if change.interval is None:
        return text
    low, high = (100 * (side - 1) for side in change.interval)
    return f"{text} ({low:+.1f} to {high:+.1f})"


def comparison_tables(comparison: Comparison) -> list[Table]:
    """For each metric what was measured, and what changed from the first; changes that are certain in bold."""
    columns = [Column("method", numeric=False), Column("T", "temperature"), *map(Column, comparison.names)]
    columns += [Column(f"change to {name}", "95 % interval") for name in comparison.names[1:]]
    tables = []
    for metric, heading in METRICS.items():
        rows = []
        for row in comparison.rows:
            cells = [Cell(row.label), Cell(f"{row.temperature:g}", row.temperature)]
            cells += [number_cell(values[metric]) for values in row.values]
            for change in (each[metric] for each in row.changes):
                style = "bold" if change is not None and change.certain else ""
                cells.append(Cell(percent(change), None if change is None else change.ratio, style=style))
            rows.append(cells)
        tables.append(Table(heading, columns, rows))
    return tables

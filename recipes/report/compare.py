"""Two or more results side by side: what changed from the first to each other one, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decode.evaluation.bootstrap import FEWEST, percentile_interval, resample_weights
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
_Key = tuple[str, float]
_Rows = dict[_Key, Any]
"""Rows by label and temperature."""


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
        held = zip(names, (", ".join(map(_called, table)) or "none" for table in tables), strict=True)
        raise ValueError("no method in common: " + "; ".join(f"{name} has {methods}" for name, methods in held))
    first = results[0]
    notes = [note for name, result in zip(names[1:], results[1:], strict=True)
             for note in _notes(names[0], name, first, result)]  # fmt: skip
    for name, table in zip(names, tables, strict=True):
        if left := [_called(key) for key in table if key not in common]:
            notes.append(f"not in all results, so not compared: {', '.join(left)} ({name})")
    rows = []
    for key in common:
        values = [{metric: table[key].get(metric) for metric in METRICS} for table in tables]
        changes = []
        for result, table in zip(results[1:], tables[1:], strict=True):
            paired, sides = _same_prompts(first, result), (tables[0], table)
            change = {metric: _change(metric, sides, key, paired) for metric in METRICS}
            if _machine(first) != _machine(result):
                change["tokens_per_second"] = None
            changes.append(change)
        rows.append(ComparedRow(key[0], key[1], values, changes))
    return Comparison(list(names), rows, notes)


def _change(metric: str, tables: tuple[_Rows, _Rows], key: _Key, paired: bool) -> Change | None:
    first, second = (table[key].get(metric) for table in tables)
    if first is None or second is None or not first:
        return None
    ratio = second / first
    sides = [_columns(metric, table, key) for table in tables]
    # the baseline's speedup over itself is 1 by definition: it has no interval
    if metric == "speedup" and any(table[key].get("method") == BASELINE for table in tables):
        return Change(ratio)
    drawn: list[NDArray[Any]] = []
    for seed, side in enumerate(sides):
        if side is None or side.shape[1] < FEWEST:
            return Change(ratio)
        sums = side @ resample_weights(side.shape[1], 0 if paired else seed).T
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = sums[0] / sums[1]
            drawn.append(rate / (sums[2] / sums[3]) if len(sums) == 4 else rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Change(ratio, percentile_interval(drawn[1] / drawn[0]))


def _columns(metric: str, table: _Rows, key: _Key) -> NDArray[np.float64] | None:
    """[2 or 4, prompts]: what a metric is a quotient of, prompt by prompt; None where that is not known."""
    sources = [table[key]]
    if metric == "speedup":
        base = [row for row in table.values() if row.get("method") == BASELINE and row["temperature"] == key[1]]
        if not base:
            return None
        sources.append(base[0])
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


def _notes(first: str, name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between two results."""
    sides = [(first, one), (name, other)]

    def differing(what: str, values: Sequence[Any], more: str = "") -> list[str]:
        if values[0] == values[1]:
            return []
        return [f"{what}: {values[0]} ({first}), {values[1]} ({name}){more}"]

    machines = [", ".join(f"{value}" for value in _machine(side).values()) for _, side in sides]
    limited = ": tokens per second are not compared, and a speedup is over its own machine's baseline"
    notes = differing("machine", machines, limited)
    for key in _DECODED_ALIKE:
        notes += differing(key, [side["recipe"].get(key) for _, side in sides])
    versions = [side["machine"].get("versions") or {} for _, side in sides]
    for package in sorted(versions[0] | versions[1]):
        notes += differing(package, [version.get(package, "none") for version in versions])
    if not all(row.get("by_prompt") for _, side in sides for row in side["methods"]):
        notes.append(f"{first} or {name} keeps no numbers by prompt: where they are missing there is no interval")
    elif _same_prompts(one, other):
        notes.append(f"{first} and {name} decoded the same {one['prompts']} prompts: differences are paired by prompt")
    else:
        prompts = [f"{side['prompts']} of {side['recipe'].get('prompts')}" for _, side in sides]
        asked = f"prompts: {prompts[0]} ({first}), {prompts[1]} ({name})"
        notes.append(f"{asked}: not the same, so that differences are not paired by prompt: intervals are wider")
    return notes


def _called(key: _Key) -> str:
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

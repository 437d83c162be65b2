"""Comparison of two or more results with the first, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...decode.evaluation.bootstrap import FEWEST, percentile_interval, resample_weights
from .tables import DASH, Cell, Column, Table, number_cell

BASELINE = "autoregressive"
METRICS = {
    "tokens_per_step": ("Tokens per step", ("tokens", "steps")),
    "acceptance_rate": ("Acceptance rate", ("accepted", "examined")),
    "tokens_per_second": ("Tokens/s", ("tokens", "seconds")),
    "speedup": ("Speedup", ("tokens", "seconds")),
}
"""Compared metrics, with table captions and the numbers by prompt that each is a quotient of."""
_DECODED_ALIKE = ("target", "max_new_tokens", "top_k", "top_p", "dtype")
Results = Mapping[str, Any]
Key = tuple[str, float]
"""A row's label and temperature."""


class Change(NamedTuple):
    """Ratio to the first results' value of the same method, with a 95 % interval if one is known."""

    ratio: float
    interval: tuple[float, float] | None = None


class Comparison(NamedTuple):
    """Comparison of results."""

    names: list[str]
    tables: list[Table]
    notes: list[str]
    """What differs between them, and what that means for the numbers."""


def compare(names: Sequence[str], results: Sequence[Results]) -> Comparison:
    """Compare the methods that all results hold, by label and temperature.

    Intervals are 95 % bootstrap intervals over prompts: paired if both results decoded the same prompts, otherwise each
    is resampled by itself. Changes whose interval excludes 0 are bold. Tokens per second of different machines are not
    compared. Raises ValueError: no method at the same temperature is in all results.
    """
    held = [_rows(result) for result in results]
    common = [key for key in held[0] if all(key in rows for rows in held)]
    if not common:
        listed = [f"{name} has {', '.join(map(_called, rows))}" for name, rows in zip(names, held, strict=True)]
        raise ValueError(f"no method in common: {'; '.join(listed)}")
    notes = [note for name, result in zip(names[1:], results[1:], strict=True)
             for note in _notes(names[0], name, results[0], result)]  # fmt: skip
    for name, rows in zip(names, held, strict=True):
        if left := [_called(key) for key in rows if key not in common]:
            notes.append(f"not in all results, so not compared: {', '.join(left)} ({name})")
        if unsteady := [_called(key) for key in common if rows[key].get("steady") is False]:
            notes.append(f"unsteady times, not to be relied on: {', '.join(unsteady)} ({name})")
    columns = [Column("method", numeric=False), Column("T"), *map(Column, names)]
    columns += [Column(f"change to {name}", "95 % interval") for name in names[1:]]
    tables = []
    for metric, (caption, _) in METRICS.items():
        cells = []
        for key in common:
            changes = [_change_cell(change(metric, key, results[0], result)) for result in results[1:]]
            values = [number_cell(rows[key].get(metric)) for rows in held]
            cells.append([Cell(key[0]), Cell(f"{key[1]:g}", key[1]), *values, *changes])
        tables.append(Table(caption, columns, cells))
    return Comparison(list(names), tables, notes)


def _rows(results: Results) -> dict[Key, Mapping[str, Any]]:
    return {(row["label"], float(row["temperature"])): row for row in results["methods"]}


def change(metric: str, key: Key, first: Results, second: Results) -> Change | None:
    """Return the change of a method's metric between two results, or None if it cannot be compared."""
    rows = [_rows(each)[key] for each in (first, second)]
    if metric == "tokens_per_second" and _machine(first) != _machine(second):
        return None
    if rows[1].get(metric) is None or not rows[0].get(metric):
        return None
    ratio = rows[1][metric] / rows[0][metric]
    # the baseline's speedup over itself is 1 by definition: it has no interval
    if metric == "speedup" and any(row.get("method") == BASELINE for row in rows):
        return Change(ratio)
    paired = _same_prompts(first, second)
    drawn: list[NDArray[Any]] = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for seed, results in enumerate((first, second)):
            pairs = _pairs(metric, results, key)
            if pairs is None or len(pairs["over"]) < FEWEST:
                return Change(ratio)
            weights_RP = resample_weights(len(pairs["over"]), 0 if paired else seed)
            sums = {name: weights_RP @ np.asarray(column, float) for name, column in pairs.items()}
            base = sums["base_over"] / sums["base_under"] if "base_over" in sums else 1.0
            drawn.append(sums["over"] / sums["under"] / base)
        return Change(ratio, percentile_interval(drawn[1] / drawn[0]))


def _pairs(metric: str, results: Results, key: Key) -> dict[str, list[Any]] | None:
    """Return the numerators and denominators of a metric by prompt, or None where they are unknown."""
    rows = _rows(results)
    sources = {"": rows[key]}
    if metric == "speedup":
        base = [row for row in rows.values() if row.get("method") == BASELINE and row["temperature"] == key[1]]
        if not base:
            return None
        sources["base_"] = base[0]
    pairs = {
        f"{side}{place}": [prompt.get(name) for prompt in row.get("by_prompt") or []]
        for side, row in sources.items()
        for place, name in zip(("over", "under"), METRICS[metric][1], strict=True)
    }
    known = all(value is not None for column in pairs.values() for value in column)
    return pairs if known and len(set(map(len, pairs.values()))) == 1 else None


def _same_prompts(one: Results, other: Results) -> bool:
    """Compare the hashes of the prompts' token ids."""
    mine = one.get("prompts_sha256")
    return mine is not None and mine == other.get("prompts_sha256")


def _machine(results: Results) -> str:
    return ", ".join(str(results["machine"].get(key)) for key in ("device", "name", "cores", "threads"))


def _notes(first: str, name: str, one: Results, other: Results) -> list[str]:
    """Return what differs between two results."""
    sides = (one, other)
    facts = {"machine": [_machine(side) for side in sides]}
    facts |= {key: [side["recipe"].get(key) for side in sides] for key in _DECODED_ALIKE}
    versions = [side["machine"].get("versions") or {} for side in sides]
    facts |= {package: [each.get(package) for each in versions] for package in sorted(versions[0] | versions[1])}
    notes = [f"{key}: {pair[0]} ({first}), {pair[1]} ({name})" for key, pair in facts.items() if pair[0] != pair[1]]
    if facts["machine"][0] != facts["machine"][1]:
        notes[0] += ": tokens per second are not compared, and a speedup is over its own machine's baseline"
    if not all(row.get("by_prompt") for side in sides for row in side["methods"]):
        notes.append(f"{first} or {name} keeps no numbers by prompt: where they are missing there is no interval")
    elif _same_prompts(one, other):
        notes.append(f"{first} and {name} decoded the same {one['prompts']} prompts: differences are paired by prompt")
    else:
        prompts = [f"{side['prompts']} of {side['recipe'].get('prompts')}" for side in sides]
        asked = f"prompts: {prompts[0]} ({first}), {prompts[1]} ({name})"
        notes.append(f"{asked}: not the same, so that differences are not paired by prompt: intervals are wider")
    return notes


def _called(key: Key) -> str:
    return f"{key[0]} at temperature {key[1]:g}"


def _change_cell(found: Change | None) -> Cell:
    """`+4.2 % (+1.0 to +7.3)`."""
    if found is None or not math.isfinite(found.ratio):
        return Cell(DASH)
    text = f"{100 * (found.ratio - 1):+.1f} %"
    if found.interval is None:
        return Cell(text, found.ratio)
    low, high = (100 * (side - 1) for side in found.interval)
    return Cell(f"{text} ({low:+.1f} to {high:+.1f})", found.ratio, style="bold" if low > 0 or high < 0 else "")

"""Comparison of several evaluation results with the first result."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .tables import Cell, Column, Row, Table, number_cell

METRICS = {
    "tokens_per_step": "Tokens per step",
    "acceptance_rate": "Acceptance rate",
    "tokens_per_second": "Tokens/s",
    "speedup": "Speedup",
}
"""Mapping from the metrics that are compared to table captions."""
_SETTINGS = ("target", "prompts", "max_new_tokens", "top_k", "top_p", "dtype")
Results = Mapping[str, Any]


class Comparison(NamedTuple):
    """Tables and notes from a comparison of evaluation results."""

    names: list[str]
    tables: list[Table]
    notes: list[str]
    """Notes on differences in settings, methods that are not compared, and unreliable measurements."""


def compare(names: Sequence[str], results: Sequence[Results]) -> Comparison:
    """Compare the methods that all results have in common. Raise ValueError if there are none.

    Methods are matched by label and temperature. A change is bold if the 95 % intervals do not overlap.
    """
    rows_by_key = [{(row["label"], float(row["temperature"])): row for row in result["methods"]} for result in results]
    common = [key for key in rows_by_key[0] if all(key in rows for rows in rows_by_key)]
    if not common:
        listed = [f"{name}: {', '.join(map(_row_name, rows))}" for name, rows in zip(names, rows_by_key, strict=True)]
        raise ValueError(f"the results have no method in common: {'; '.join(listed)}")
    notes = [note for name, result in zip(names[1:], results[1:], strict=True)
             for note in _differences(names[0], name, results[0], result)]  # fmt: skip
    for name, rows in zip(names, rows_by_key, strict=True):
        if skipped := [_row_name(key) for key in rows if key not in common]:
            notes.append(f"not compared, because missing from other results: {', '.join(skipped)} ({name})")
        if unsteady := [_row_name(key) for key in common if rows[key].get("steady") is False]:
            notes.append(f"unsteady and therefore unreliable times: {', '.join(unsteady)} ({name})")
    columns = [Column("method", numeric=False), Column("T"), *map(Column, names)]
    columns += [Column(f"change to {name}", "%") for name in names[1:]]
    tables = []
    for metric, caption in METRICS.items():
        cells = []
        for key in common:
            first, *others = [rows[key] for rows in rows_by_key]
            values = [number_cell(row.get(metric)) for row in (first, *others)]
            changes = [_change_cell(metric, first, other) for other in others]
            cells.append([Cell(key[0]), Cell(f"{key[1]:g}", key[1]), *values, *changes])
        tables.append(Table(caption, columns, cells))
    return Comparison(list(names), tables, notes)


def _differences(first: str, name: str, one: Results, other: Results) -> list[str]:
    """Return notes on differences between two results in machine, settings, prompts and package versions."""
    both = (one, other)
    about = ("device", "name", "cores", "threads")
    machines = [", ".join(str(result["machine"].get(key)) for key in about) for result in both]
    facts: dict[str, list[Any]] = {"machine": machines}
    facts |= {key: [result["recipe"].get(key) for result in both] for key in _SETTINGS}
    facts["hash of the prompts"] = [result.get("prompts_sha256") for result in both]
    versions = [result["machine"].get("versions") or {} for result in both]
    facts |= {package: [each.get(package) for each in versions] for package in sorted(versions[0] | versions[1])}
    notes: list[str] = [
        f"{key}: {pair[0]} ({first}), {pair[1]} ({name})" for key, pair in facts.items() if pair[0] != pair[1]
    ]
    if machines[0] != machines[1]:
        notes[0] += ": compare speedups over the baseline, not tokens per second"
    return notes


def _row_name(key: tuple[str, float]) -> str:
    return f"{key[0]} at temperature {key[1]:g}"


def _change_cell(metric: str, first: Row, other: Row) -> Cell:
    before, after = first.get(metric), other.get(metric)
    if after is None or not before:
        return number_cell(None)
    change = 100 * (after / before - 1)
    one, two = (row.get(f"{metric}_interval") for row in (first, other))
    differs = one and two and (one[1] < two[0] or two[1] < one[0])
    return Cell(f"{change:+.1f}", change, style="bold" if differs else "")

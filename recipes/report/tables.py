"""The report's tables as HTML: texts are escaped, a missing value is a dash, a number carries the value it sorts by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .compare import HEADINGS, METRICS, Comparison, percent

Row = Mapping[str, Any]
DASH = "–"


def number(value: Any, digits: int = 2, after: str = "") -> str:
    """A number for people; a dash where there is none, which is not the same as 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return DASH
    return f"{value:,.{digits}f}{after}"


def interval(pair: Any, digits: int = 2) -> str:
    """`1.80–2.10`, or a dash."""
    return f"{number(pair[0], digits)}–{number(pair[1], digits)}" if pair else DASH


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    unit: str
    show: Callable[[Row], str]
    value: Callable[[Row], Any]
    """What the column is sorted by."""


def _plain(heading: str, key: str, digits: int = 2, unit: str = "", scale: float = 1.0) -> Column:
    def value(row: Row) -> Any:
        found = _inside(row, key)
        return None if found is None else found * scale

    return Column(heading, unit, lambda row: number(value(row), digits), value)


def _spread(heading: str, key: str, unit: str = "") -> Column:
    return Column(heading, unit, lambda row: interval(row.get(key)), lambda row: (row.get(key) or [None])[0])


def _inside(row: Row, key: str) -> Any:
    """A value by its path, such as `flops_per_token.total`; None where a part of it is missing."""
    found: Any = row
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def lossless_text(row: Row) -> str:
    """Whether a method keeps the target's distribution, and on how many prompts that was seen."""
    same = row.get("identical_to_greedy")
    seen = f", {same[0]}/{same[1]} same" if same else ""
    if row.get("near_ties"):
        seen += f", {row['near_ties']} near-tie{'s' * (row['near_ties'] > 1)}"
    return ("yes" if row.get("lossless") else "no") + seen


SPEED = (
    Column("T", "temperature", lambda row: f"{row['temperature']:g}", lambda row: row["temperature"]),
    Column("lossless", "greedy text", lossless_text, lambda row: int(bool(row.get("lossless")))),
    _plain("tokens per step", "tokens_per_step", unit="τ"),
    _plain("acceptance rate", "acceptance_rate", unit="α"),
    _plain("speed", "tokens_per_second", 0, "tokens/s"),
    _plain("speedup", "speedup", unit="×"),
    _spread("interval", "speedup_interval", "95 %, ×"),
    _plain("bound", "bound", unit="×"),
    _plain("efficiency", "efficiency", unit="of bound"),
    _plain("over transformers", "speedup_over_transformers", unit="×"),
)


QUALITY = (
    Column("lossless", "greedy text", lossless_text, lambda row: int(bool(row.get("lossless")))),
    _plain("perplexity", "perplexity", unit="of the output"),
    _plain("ROUGE-L", "rouge_l", 3, "F-measure"),
    _plain("self-consistency", "self_consistency", 3, "share of greedy text"),
    _plain("output", "tokens", 0, "tokens"),
)


def cost_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """What a step and a token cost; FLOPs in the unit that suits the largest."""
    most = max((_inside(row, "flops_per_token.total") or 0 for row in rows), default=0)
    name, size = flops_unit(most)
    sources = sorted({row["energy_source"] for row in rows if row.get("energy_source")})
    joules = "J/token" + (f", {'/'.join(sources)}" if sources else "")
    return (
        _plain("nodes", "nodes_per_step", 1, "a step"),
        _plain("accepted at k", "acceptance_at_k", unit="share of levels"),
        _plain("verification", "flops_per_token.verification", unit=f"{name}/token", scale=1 / size),
        _plain("drafting", "flops_per_token.drafting", unit=f"{name}/token", scale=1 / size),
        _plain("both", "flops_per_token.total", unit=f"{name}/token", scale=1 / size),
        _plain("energy", "joules_per_token", 3, joules),
        _plain("cost ratio", "cost_ratio", unit="c"),
        _plain("ideal", "ideal", unit="τ ÷ (1 + cγ), ×"),
    )


def flops_unit(most: float) -> tuple[str, float]:
    """The unit in which the largest of some FLOPs is a number of few digits."""
    return next(
        ((name, size) for name, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)) if most >= size),
        ("kFLOP", 1e3),
    )


def method_table(caption: str, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A row a method, which the page's script can sort and filter."""
    head = "".join(heading(column.heading, column.unit) for column in columns)
    body = "".join(
        f"<tr {row_data(row)}>{method_cell(place, row)}"
        + "".join(cell(column.show(row), column.value(row)) for column in columns)
        + "</tr>"
        for place, row in enumerate(rows, 1)
    )
    return wide_table(caption, f'<th scope="col" data-sort="text">method</th>{head}', body)


def wide_table(caption: str, head: str, body: str) -> str:
    """A table that scrolls by itself where the page is narrow."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="sortable"><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heading(name: str, unit: str = "") -> str:
    """The head of a column of numbers."""
    small = f'<span class="unit">{escape(unit)}</span>' if unit else ""
    return f'<th scope="col" data-sort="number"><span>{escape(name)}</span>{small}</th>'


def cell(text: str, value: Any) -> str:
    """A text, and the number that it is sorted by."""
    sortable = isinstance(value, (int, float)) and math.isfinite(value)
    given = f' data-value="{float(value)!r}"' if sortable else ""
    return f"<td{given}>{escape(text)}</td>"


def row_data(row: Row) -> str:
    """What a row is filtered by."""
    words = f"{row['label']} {row['method']} {options_text(row)}".lower()
    lossless = "yes" if row.get("lossless") else "no"
    return f'data-words="{escape(words)}" data-lossless="{lossless}" data-temperature="{row["temperature"]:g}"'


def method_cell(place: int, row: Row) -> str:
    """A method's number, which stands for it in the charts, its name and its settings."""
    options = options_text(row)
    named = "" if row["label"].startswith(row["method"]) else f"{row['method']}, " if options else row["method"]
    small = f'<span class="options">{escape(named + options)}</span>' if named or options else ""
    return (
        f'<th scope="row" data-value="{escape(row["label"].lower())}"><span class="number">{place}</span> '
        f"{escape(row['label'])}{small}</th>"
    )


def options_text(row: Row) -> str:
    """`gamma 4, beams 8`."""
    return ", ".join(f"{name} {value}" for name, value in (row.get("options") or {}).items())


def category_tables(rows: Sequence[Row], categories: Mapping[str, int]) -> str:
    """Method by category: tokens per step and speedup."""
    names = list(categories)
    head = '<th scope="col" data-sort="text">method</th>' + "".join(
        heading(name or "no category", f"{count} prompts") for name, count in categories.items()
    )
    tables = []
    for caption, key, unit in (
        ("Tokens per step by category", "tokens_per_step", ""),
        ("Speedup by category", "speedup", "×"),
    ):
        found = [[_inside((row.get("by_category") or {}).get(name, {}), key) for name in names] for row in rows]
        body = "".join(
            f"<tr {row_data(row)}>{method_cell(place, row)}{''.join(cell(number(v, 2), v) for v in values)}</tr>"
            for place, (row, values) in enumerate(zip(rows, found, strict=True), 1)
        )
        tables.append(wide_table(f"{caption}{f' ({unit})' if unit else ''}", head, body))
    return "".join(tables)


def prediction_table(rows: Sequence[tuple[int, Row]]) -> str:
    """Predicted beside measured tokens per step, of the methods that have a prediction."""
    head = '<th scope="col" data-sort="text">method</th>' + "".join(
        heading(*names)
        for names in (
            ("predicted", "tokens per step"),
            ("measured", "tokens per step"),
            ("interval", "95 %"),
            ("difference", "%"),
        )
    )
    body = ""
    for place, row in rows:
        predicted, measured = row["prediction"]["tokens_per_step"], row["tokens_per_step"]
        apart = 100 * (predicted / measured - 1)
        cells = cell(number(predicted), predicted) + cell(number(measured), measured)
        cells += cell(interval(row.get("tokens_per_step_interval")), (row.get("tokens_per_step_interval") or [None])[0])
        body += f"<tr {row_data(row)}>{method_cell(place, row)}{cells}{cell(f'{apart:+.1f}', apart)}</tr>"
    return wide_table("Prediction beside measurement", head, body)


def comparison_section(comparison: Comparison) -> str:
    """Results side by side: what was measured, and what changed from the first."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    parts = [f'<h2>Side by side</h2><ul class="notes">{notes}</ul>']
    for metric in METRICS:
        head = '<th scope="col" data-sort="text">method</th><th scope="col" data-sort="number">temperature</th>'
        head += "".join(heading(name) for name in comparison.names)
        head += "".join(heading(f"change to {name}", "95 % interval") for name in comparison.names[1:])
        body = ""
        for row in comparison.rows:
            words = (
                f'data-words="{escape(row.label.lower())}" data-temperature="{row.temperature:g}" data-lossless="yes"'
            )
            cells = cell(f"{row.temperature:g}", row.temperature)
            cells += "".join(cell(number(values[metric]), values[metric]) for values in row.values)
            for changes in row.changes:
                change = changes[metric]
                shown = cell(percent(change), None if change is None else change.ratio)
                certain = change is not None and change.certain
                cells += shown.replace("<td", '<td class="certain"', 1) if certain else shown
            name = f'<th scope="row" data-value="{escape(row.label.lower())}">{escape(row.label)}</th>'
            body += f"<tr {words}>{name}{cells}</tr>"
        parts.append(wide_table(HEADINGS[metric][0].upper() + HEADINGS[metric][1:], head, body))
    parts.append("<p>Bold changes are those whose interval leaves out that nothing changed.</p>")
    return "".join(parts)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    inside = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{inside}</dl>'

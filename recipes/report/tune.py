"""What `draftsmith tune` found, on the terminal and as a page: settings foretold, settings confirmed, the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.markup import escape as plain
from rich.table import Table

from ...decode.methods import METHODS
from ..session.terminal import console
from .charts import Point, best_points
from .page import perplexity_chart, write_page
from .tables import DASH, cell, heading, interval, number, wide_table

_ALWAYS_SHOWN = ("gamma", "k_config", "sequences", "drafts", "threshold", "fallback", "rollback", "epsilon")
_COLUMNS = (
    ("speedup", "×"),
    ("interval", "95 %, ×"),
    ("perplexity", "of the output"),
    ("on the frontier", ""),
    ("tokens per step", ""),
    ("predicted", "tokens per step"),
    ("speedup", "without the prompt, ×"),
    ("predicted", "speedup, ×"),
)
"""Of what was confirmed: steps are compared as they were predicted, without reading the prompt; the frontier is one of
whole answers."""
Row = Mapping[str, Any]


def describe_settings(name: str, options: Mapping[str, Any]) -> str:
    """The settings that differ from the method's own, for people; a long tree by its size."""
    shown = []
    for key, value in options.items():
        if key == "tree" and "," in str(value):
            shown.append(f"tree of {len(set(str(value).replace(' ', '').split(',')))} nodes")
        elif METHODS[name].defaults.get(key) != value or key in _ALWAYS_SHOWN:
            shown.append(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(shown) or "as they are"


def with_perplexity(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plain decoding and what was confirmed, each with a perplexity: a lossless method has plain decoding's."""
    plainly = results["baseline"]
    rows = [plainly, *results["confirmed"]]
    return [{**row, "perplexity": plainly["perplexity"] if row["lossless"] else row["perplexity"]} for row in rows]


def on_frontier(rows: Sequence[Row]) -> set[str]:
    """Labels of rows that no other beats in both speed and perplexity."""
    known = [row for row in rows if row["perplexity"] is not None]
    points = [Point(0, row["label"], row["perplexity"], row["speedup"]) for row in known]
    return {point.label for point in best_points(points)}


def write_frontier(results: Mapping[str, Any], out: Path) -> Path:
    """The page: what was confirmed as a table, and speed against perplexity where lossy methods were."""
    rows = with_perplexity(results)
    best = on_frontier(rows)
    head = '<th scope="col" data-sort="text">method</th><th scope="col" data-sort="text">settings</th>'
    head += "".join(heading(*name) for name in _COLUMNS)
    body = "".join(_html_row(number, row, best) for number, row in enumerate(rows))
    labelled = [(number, {**row, "label": row.get("method", row["label"])}) for number, row in enumerate(rows)]
    chart = perplexity_chart(labelled)
    summary = f"Predicted from {results['positions']:,} recorded tokens; these settings were decoded with all prompts."
    parts = ["<h1>Settings, tuned</h1>", f"<p>{escape(summary)}</p>", wide_table("Confirmed by decoding", head, body)]
    if results["left_out"]:
        lines = "".join(f"<li>{escape(each['method'])}: {escape(each['why'])}</li>" for each in results["left_out"])
        parts.append(f"<h2>Not tuned</h2><ul>{lines}</ul>")
    if chart:
        parts.append(
            "<p>Numbers stand for the rows; 0 is plain decoding. Filled circles are lossless methods, open diamonds "
            f'are not.</p><div class="charts">{chart}</div>'
        )
    return write_page(out, "Settings, tuned", f"<section>{''.join(parts)}</section>")


def _settings(row: Row) -> str:
    return describe_settings(row["method"], row["options"]) if "method" in row else DASH


def _values(row: Row, best: set[str]) -> list[tuple[str, Any]]:
    """Text and sorting value of each of `_COLUMNS`."""
    predicted = row.get("predicted") or {}
    span, lies_on = row.get("speedup_interval"), row["label"] in best
    steps = row.get("tokens_per_step"), predicted.get("tokens_per_step")
    speeds = row.get("stepping_speedup"), predicted.get("speedup")
    return [
        (number(row["speedup"]), row["speedup"]),
        (interval(span), span[0] if span else None),
        (number(row["perplexity"]), row["perplexity"]),
        ("yes" if lies_on else "no", float(lies_on)),
        *((number(value), value) for value in (*steps, *speeds)),
    ]


def _html_row(index: int, row: Row, best: set[str]) -> str:
    label = str(row["label"]) if index else f"0. {row['label']}"
    settings = escape(_settings(row))
    cells = f'<td data-value="{settings}">{settings}</td>' + "".join(cell(*pair) for pair in _values(row, best))
    return f'<tr><th scope="row" data-value="{escape(label)}">{escape(label)}</th>{cells}</tr>'


def show(results: Mapping[str, Any], folder: Path) -> None:
    """Print what was found."""
    console().print(_predicted(results))
    rows = with_perplexity(results)
    best = on_frontier(rows)
    names = ["\n".join(filter(None, column)) for column in _COLUMNS]
    table = _table("confirmed by decoding", ["method", "settings", *names])
    for row in rows:
        table.add_row(row["label"], plain(_settings(row)), *(text for text, _ in _values(row, best)))
    console().print(table)
    for each in results["left_out"]:
        console().print(f"not tuned: {each['method']}: {each['why']}", markup=False, soft_wrap=True)
    chosen = next((row for row in results["confirmed"] if row["label"] == results["best"]), None)
    if chosen is None:
        console().print("no lossless method was tuned")
    else:
        console().print(f"best: {chosen['method']}, {_settings(chosen)}", markup=False)
        if chosen["stepping_speedup"] <= 1:
            console().print("no setting is faster here than plain decoding")
    files = f"results: {folder / 'tune.json'}, and {folder / 'tune.html'} to look at"
    console().print(f"{files}; the chosen settings as a recipe: {folder / 'recipe.yaml'}", soft_wrap=True)


def _predicted(results: Mapping[str, Any]) -> Table:
    columns = ["method", "settings", "found by", "tokens per step", "speedup", "perplexity"]
    table = _table(f"predicted from {results['positions']:,} recorded tokens", columns, left=3)
    for name, tried in results["methods"].items():
        for index, choice in enumerate(tried):
            numbers = (number(choice[key]) for key in ("tokens_per_step", "speedup", "perplexity"))
            table.add_row("" if index else plain(name), plain(_settings(choice)), choice["found_by"], *numbers)
    return table


def _table(title: str, columns: Sequence[str], left: int = 2) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right")
    return table

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

_TOLD = ("gamma", "k_config", "sequences", "drafts", "threshold", "fallback", "rollback", "epsilon")
_LEFT = ("method", "settings", "found by")
_COLUMNS = (
    ("speedup", "×"),
    ("interval", "95 %, ×"),
    ("perplexity", "of the output"),
    ("on the frontier",),
    ("tokens per step",),
    ("predicted", "tokens per step"),
    ("speedup", "without the prompt, ×"),
    ("predicted", "speedup, ×"),
)
Row = Mapping[str, Any]


def in_words(name: str, options: Mapping[str, Any]) -> str:
    """The settings that differ from the method's own, for people; a long tree by its size."""
    told = []
    for key, value in options.items():
        if key == "tree" and "," in str(value):
            told.append(f"tree of {len(set(str(value).replace(' ', '').split(',')))} nodes")
        elif METHODS[name].defaults.get(key) != value or key in _TOLD:
            told.append(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(told) or "as they are"


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
    body = "".join(_html_row(place, row, best) for place, row in enumerate(rows))
    chart = perplexity_chart(
        [(place, {**row, "label": row.get("method", row["label"])}) for place, row in enumerate(rows)]
    )
    said = f"Settings were foretold from {results['positions']:,} recorded tokens, and these decoded with all prompts."
    parts = ["<h1>Settings, tuned</h1>", f"<p>{escape(said)}</p>", wide_table("Confirmed by decoding", head, body)]
    if results["left_out"]:
        lines = "".join(f"<li>{escape(each['method'])}: {escape(each['why'])}</li>" for each in results["left_out"])
        parts.append(f"<h2>Not tuned</h2><ul>{lines}</ul>")
    if chart:
        parts.append(
            "<p>Numbers stand for the rows; 0 is plain decoding. Filled circles are lossless methods, open diamonds "
            f'are not.</p><div class="charts">{chart}</div>'
        )
    return write_page(out, "Settings, tuned", f"<section>{''.join(parts)}</section>")


def _html_row(place: int, row: Row, best: set[str]) -> str:
    label = str(row["label"]) if place else f"0. {row['label']}"
    before = row.get("predicted") or {}
    words = in_words(row["method"], row["options"]) if place else DASH
    cells = (
        f'<td data-value="{escape(words)}">{escape(words)}</td>',
        cell(number(row["speedup"]), row["speedup"]),
        cell(interval(row.get("speedup_interval")), (row.get("speedup_interval") or [None])[0]),
        cell(number(row["perplexity"]), row["perplexity"]),
        cell("yes" if row["label"] in best else "no", float(row["label"] in best)),
        cell(number(row.get("tokens_per_step")), row.get("tokens_per_step")),
        cell(number(before.get("tokens_per_step")), before.get("tokens_per_step")),
        cell(number(row.get("stepping_speedup")), row.get("stepping_speedup")),
        cell(number(before.get("speedup")), before.get("speedup")),
    )
    return f'<tr><th scope="row" data-value="{escape(label)}">{escape(label)}</th>{"".join(cells)}</tr>'


def show(results: Mapping[str, Any], folder: Path) -> None:
    """Print what was found."""
    console().print(_predicted(results))
    console().print(_measured(results))
    for each in results["left_out"]:
        console().print(f"not tuned: {each['method']}: {each['why']}", markup=False, soft_wrap=True)
    best = next((row for row in results["confirmed"] if row["label"] == results["best"]), None)
    if best is None:
        console().print("no lossless method was tuned")
    else:
        console().print(f"best: {best['method']}, {in_words(best['method'], best['options'])}", markup=False)
        if best["stepping_speedup"] <= 1:
            console().print("no setting is faster here than plain decoding")
    files = f"results: {folder / 'tune.json'}, and {folder / 'tune.html'} to look at"
    console().print(f"{files}; the chosen settings as a recipe: {folder / 'recipe.yaml'}", soft_wrap=True)


def _predicted(results: Mapping[str, Any]) -> Table:
    table = Table(title=f"predicted from {results['positions']:,} recorded tokens", title_justify="left")
    for name in ("method", "settings", "found by", "tokens per step", "speedup", "perplexity"):
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for name, tried in results["methods"].items():
        for place, choice in enumerate(tried):
            table.add_row(
                plain(name) if place == 0 else "",
                plain(in_words(choice["method"], choice["options"])),
                choice["found_by"],
                f"{choice['tokens_per_step']:.2f}",
                f"{choice['speedup']:.2f}x",
                number(choice["perplexity"]),
            )
    return table


def _measured(results: Mapping[str, Any]) -> Table:
    """Steps are compared as they were foretold, without reading the prompt; the frontier is one of whole answers."""
    rows = with_perplexity(results)
    best = on_frontier(rows)
    table = Table(title="confirmed by decoding", title_justify="left")
    names = ("method", "settings", "tokens per step", "predicted", "speedup", "predicted", "perplexity", "frontier")
    for name in names:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    table.add_row(
        rows[0]["label"], "", "1.00", "", "1.00x", "", number(rows[0]["perplexity"]), "*" * (rows[0]["label"] in best)
    )
    for row in rows[1:]:
        before = row["predicted"]
        table.add_row(
            row["label"],
            plain(in_words(row["method"], row["options"])),
            f"{row['tokens_per_step']:.2f}",
            f"{before['tokens_per_step']:.2f}",
            f"{row['stepping_speedup']:.2f}x",
            f"{before['speedup']:.2f}x",
            number(row["perplexity"]),
            "*" * (row["label"] in best),
        )
    return table

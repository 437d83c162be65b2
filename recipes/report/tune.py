"""What `draftsmith tune` found, on the terminal and as a page: settings predicted, settings confirmed, the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...decode.methods import method_options
from ..session.terminal import console
from .charts import Point, best_points
from .page import perplexity_chart, speed_chart, write_page
from .tables import DASH, Cell, Column, Table, interval_cell, number_cell, render, speedup_cell

_ALWAYS_SHOWN = (
    *("gamma", "k_config", "num_sequences", "num_drafts", "epsilon"),
    *("confidence_threshold", "likelihood_threshold", "fallback_threshold", "rollback_threshold"),
)
_COLUMNS = (
    Column("method", numeric=False),
    Column("settings", numeric=False),
    Column("speedup", "×"),
    Column("interval", "95 %, ×"),
    Column("perplexity", "of the output"),
    Column("on the frontier"),
    Column("tokens per step"),
    Column("predicted", "tokens per step"),
    Column("speedup of steps", "×"),
    Column("predicted", "of steps, ×"),
)
"""Of what was confirmed. `speedup` is that of whole answers, as in an evaluation; what is predicted, the speedup of
steps, leaves out the reading of the prompt."""
Row = Mapping[str, Any]


def describe_settings(name: str, options: Mapping[str, Any]) -> str:
    """The settings that differ from the method's own, for people; a long tree by its size."""
    shown, defaults = [], method_options(name, {})
    for key, value in options.items():
        if key == "tree" and "," in str(value):
            shown.append(f"tree of {len(set(str(value).replace(' ', '').split(',')))} nodes")
        elif defaults.get(key) != value or key in _ALWAYS_SHOWN:
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


def show(results: Mapping[str, Any], folder: Path) -> None:
    """Print what was found, and write the page: the best setting in words, what was confirmed, and charts of it."""
    confirmed, left_out, best = _confirmed(results), results["left_out"], best_in_words(results)
    rows = [*enumerate({**row, "label": _named(row)} for row in with_perplexity(results))]
    about = {"positions": results["positions"], "left_out": left_out, "best": best}
    about["charts"] = [chart for chart in (speed_chart(rows), perplexity_chart(rows)) if chart]
    write_page(folder / "tune.html", "Settings, tuned", render("tune.html", table=confirmed, **about))
    console().print(_predicted(results).rich())
    console().print(confirmed.rich())
    for each in left_out:
        console().print(f"not tuned: {each['method']}: {each['why']}", soft_wrap=True)
    console().print(best, soft_wrap=True)
    files = f"results: {folder / 'tune.json'}, and {folder / 'tune.html'} to look at"
    console().print(f"{files}; the chosen settings as a recipe: {folder / 'recipe.yaml'}", soft_wrap=True)


def best_in_words(results: Mapping[str, Any]) -> str:
    """The best lossless setting, and what it is worth."""
    best = next((row for row in results["confirmed"] if row["label"] == results["best"]), None)
    if best is None:
        return "No lossless method was tuned."
    low, high = best["speedup_interval"] or (None, None)
    span = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None else ""
    words = (
        f"best: {_named(best)}: {best['speedup']:.2f} times as fast as plain decoding{span}, with "
        f"{best['tokens_per_step']:.2f} tokens per step."
    ) + (" These times are unsteady." if best["steady"] is False else "")
    return words if best["speedup"] > 1 else f"{words} No setting is faster here than plain decoding."


def _named(row: Row) -> str:
    return f"{row['method']}, {_settings(row)}" if "method" in row else str(row["label"])


def _settings(row: Row) -> str:
    return describe_settings(row["method"], row["options"]) if "method" in row else DASH


def _confirmed(results: Mapping[str, Any]) -> Table:
    rows = with_perplexity(results)
    best = on_frontier(rows)
    cells = []
    for index, row in enumerate(rows):
        predicted = row.get("predicted") or {}
        steps = row.get("tokens_per_step"), predicted.get("tokens_per_step")
        speeds = row.get("stepping_speedup"), predicted.get("speedup")
        cells.append([
            Cell(str(row["label"]) if index else f"0. {row['label']}"),
            Cell(_settings(row)),
            speedup_cell(row),
            interval_cell(row.get("speedup_interval")),
            number_cell(row["perplexity"]),
            Cell("yes" if row["label"] in best else "no", float(row["label"] in best)),
            *map(number_cell, (*steps, *speeds)),
        ])  # fmt: skip
    return Table("Confirmed by decoding", _COLUMNS, cells)


def _predicted(results: Mapping[str, Any]) -> Table:
    columns = [Column(name, numeric=False) for name in ("method", "settings", "found by")]
    columns += [Column("tokens per step"), Column("speedup of steps", "×"), Column("perplexity")]
    cells = []
    for name, tried in results["methods"].items():
        for choice in tried:
            numbers = (number_cell(choice[key]) for key in ("tokens_per_step", "speedup", "perplexity"))
            cells.append([Cell(name), Cell(_settings(choice)), Cell(choice["found_by"]), *numbers])
    return Table(f"Predicted from {results['positions']:,} recorded tokens", columns, cells)

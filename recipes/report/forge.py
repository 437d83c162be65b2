"""The page of a forge: what won, the story of how it was found, and how far predictions held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .charts import Point, missing_matplotlib, scatter_with_diagonal
from .page import figure, write_page
from .tables import Cell, Column, Table, interval_cell, number_cell, render

_COLUMNS = (
    Column("what", numeric=False),
    Column("fastest setting", numeric=False),
    Column("steps", "of training"),
    Column("tokens per step"),
    Column("speedup", "×"),
    Column("interval", "95 %, ×"),
)
_FORECASTS = (Column("what", numeric=False), *(Column(*head) for head in (
    ("steps", "of training"), ("expected", "from, ×"), ("expected", "to, ×"), ("found", "×"),
)))  # fmt: skip


def write_forge_page(results: Mapping[str, Any], out: Path) -> Path:
    """Write the page beside its results."""
    winner, forecasts = results["winner"], results["forecasts"]
    measured = [*results["untrained"], *(each for found in results["history"].values() for each in found)]
    rows = [_row(each) for each in sorted(measured, key=lambda each: -each["speedup"])]
    charts = []
    if forecasts and missing_matplotlib() is None:
        said = "Speedup that was expected, against what was found"
        drawn = scatter_with_diagonal(_points(forecasts), "found (×)", "expected (×)", said, "as expected")
        text = "A bar is the range that was expected after less training; where it meets the line it held."
        charts = [figure(drawn, said, text)]
    about = {"recipe": results["recipe"], "machine": results["machine"], "story": results["story"], "winner": winner}
    held = sum(each["low"] <= each["found"] <= each["high"] for each in forecasts)
    tables = [Table("What was measured", _COLUMNS, rows)] if rows else []
    if forecasts:
        cells = [[Cell(each["name"]), Cell(f"{each['steps']:,}"),
                  *(number_cell(each[key]) for key in ("low", "high", "found"))] for each in forecasts]  # fmt: skip
        tables.append(Table(f"Expected and found: {held} of {len(forecasts)} within the range", _FORECASTS, cells))
    return write_page(out, "Forged", render("forge.html", tables=tables, charts=charts, **about))


def _row(found: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(found["name"]),
        Cell(found["label"]),
        Cell(f"{found['steps']:,}" if found["steps"] else "none"),
        number_cell(found["tokens_per_step"]),
        number_cell(found["speedup"]),
        interval_cell(found["interval"]),
    ]


def _points(forecasts: list[dict[str, Any]]) -> list[Point]:
    points = []
    for number, each in enumerate(forecasts, 1):
        label, low, high = f"{each['name']}, {each['steps']:,} steps", each["low"], each["high"]
        points.append(Point(number, label, each["found"], (low + high) / 2, low=low, high=high))
    return points

"""The page of a forge: what won, the story of how it was found, and how far predictions held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..session.terminal import duration
from .certificate import VERDICTS
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
    ("steps", "known before"), ("steps", "of training"), ("expected", "from, ×"), ("expected", "to, ×"), ("found", "×"),
)))  # fmt: skip


def write_forge_page(results: Mapping[str, Any], out: Path) -> Path:
    """Write the page beside its results."""
    forecasts, places = results["forecasts"], results["places"]
    tables = []
    for place in places:
        measured = [*place["untrained"], *(each for found in place["history"].values() for each in found)]
        rows = [_row(each) for each in sorted(measured, key=lambda each: -each["speedup"])]
        said = "What was measured" if len(places) == 1 else f"What was measured, {_words(place)}"
        tables += [Table(said, _COLUMNS, rows)] if rows else []
        if beside := [_row(each) for each in place["side_by_side"]]:
            said = "Side by side" if len(places) == 1 else f"Side by side, {_words(place)}"
            tables.append(Table(said, _COLUMNS, beside))
    charts = []
    if forecasts and missing_matplotlib() is None:
        said = "Speedup that was expected, against what was found"
        drawn = scatter_with_diagonal(_points(forecasts), "found (×)", "expected (×)", said, "as expected")
        text = "A bar is what was expected before any training, or after less of it; where it meets the line it held."
        charts = [figure(drawn, said, text)]
    if forecasts:
        counts = [_held([each for each in forecasts if bool(each["trained"]) == trained]) for trained in (False, True)]
        said = f"Expected and found: {counts[0]} within the range before any training, {counts[1]} from less of it"
        cells = [[Cell(each["name"]), *(Cell(f"{each[key]:,}") for key in ("trained", "steps")),
                  *(number_cell(each[key]) for key in ("low", "high", "found"))] for each in forecasts]  # fmt: skip
        tables.append(Table(said, _FORECASTS, cells))
    about = {key: results[key] for key in ("recipe", "machine", "story")}
    about["winners"] = [(_words(place), place["winner"], _verdict(place["certificate"] or {})) for place in places]
    about |= {"given": duration(3600 * results["recipe"]["hours"]), "took": duration(sum(results["spent"].values()))}
    return write_page(out, "Forged", render("forge.html", tables=tables, charts=charts, **about))


def _verdict(certificate: Mapping[str, str]) -> str | None:
    """The worst of a winner's, of plain decoding apart."""
    verdicts = [verdict for label, verdict in certificate.items() if not label.startswith("autoregressive")]
    return max(verdicts, key=VERDICTS.index, default=None)


def _held(forecasts: list[dict[str, Any]]) -> str:
    return f"{sum(each['low'] <= each['found'] <= each['high'] for each in forecasts)} of {len(forecasts)}"


def _words(place: Mapping[str, Any]) -> str:
    return f"{place['batch']} at a time, temperature {place['temperature']:g}"


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

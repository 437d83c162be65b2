"""What servers made of their drafts, on the terminal and as a page: by load, category and position, engines side by
side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checkpoints.storage.safe_read import load_json, read_json
from .charts import Line, lines, missing_matplotlib
from .page import figure, short_names, write_page
from .tables import DASH, Cell, Column, Table, interval_cell, number, number_cell, render

KIND = "served"
Results = Mapping[str, Any]
_SIDES = ("server", "baseline")
_COLUMNS = (
    Column("load", numeric=False),
    *(
        Column(*head)
        for head in (("tokens per step", "τ"), ("expected", "τ"), ("accepted", "α"), ("to the first", "ms"))
    ),
    *(Column(*head) for head in (("per token", "ms"), ("interval", "95 %"), ("tokens/s", ""))),
    *(Column(*head) for head in (("speedup", "×"), ("interval", "95 %"), ("same text", ""))),
)


def load_served(path: Path) -> dict[str, Any]:
    """The results of `evaluate --server`. Raises ValueError: it is something else, or damaged."""
    found = load_json(path, "kind", "loads")
    if found["kind"] != KIND:
        raise ValueError(f"{path} has kind {found['kind']!r}, expected {KIND!r}")
    return found


def is_served(path: Path) -> bool:
    """Whether a file is such results, whole or not."""
    try:
        return read_json(path).get("kind") == KIND
    except ValueError:
        return False


def load_name(row: Results) -> str:
    """Of a load: how many requests at a time, or begun a second."""
    return f"{row['concurrency']} at a time" if row["rate"] is None else f"{row['rate']:g} a second"


def load_table(results: Results, caption: str = "") -> Table:
    """A row for each load of a server, and one of its baseline."""
    recipe = results["recipe"]
    rows = [_cells(row, side) for row in results["loads"] for side in _SIDES if side in row]
    said = caption or f"{recipe['server']}, {results['prompts']} prompts of {recipe['prompts']}"
    return Table(said, _COLUMNS, rows)


def _cells(row: Results, side: str) -> list[Cell]:
    found, compared = row[side], row.get("beside", {}) if side == "server" else {}
    first, same = found["ms_to_first"], compared.get("same")
    return [
        Cell(load_name(row) if side == "server" else "  baseline"),
        number_cell(found["tokens_per_step"]),
        number_cell(row.get("expected", {}).get("tokens_per_step") if side == "server" else None),
        number_cell(found["acceptance_rate"]),
        number_cell(first and first["median"], 0),
        number_cell(found["ms_per_token"], 1),
        interval_cell(found["ms_per_token_interval"], 1),
        number_cell(found["tokens_per_second"], 0),
        number_cell(compared.get("speedup")),
        interval_cell(compared.get("speedup_interval")),
        Cell(f"{same[0]}/{same[1]}" if same else DASH),
    ]


def length_table(results: Results) -> Table:
    """What each number of drafted tokens a step is worth by load: predicted, and measured where it was."""
    deepest = max(len(load["lengths"]) for load in results["loads"])
    columns = [Column("load", numeric=False), Column("best", "tokens")]
    columns += [Column(f"{tokens} drafted", "×") for tokens in range(1, deepest + 1)]
    rows = []
    for load in results["loads"]:
        best = load["best"]
        cells = [_length_cell(length, length["tokens"] == best) for length in load["lengths"]]
        cells += [Cell(DASH)] * (deepest - len(cells))
        rows.append([Cell(load_name(load)), Cell(str(best) if best else "none"), *cells])
    return Table(f"{results['engine']}: speedup by drafted tokens, predicted (measured)", columns, rows)


def _length_cell(length: Results, best: bool) -> Cell:
    measured = length.get("measured")
    said = "" if measured is None else f" ({number(measured)})"
    return Cell(f"{number(length['speedup'])}{said}", length["speedup"], style="bold" if best else "")


def run_served_report(paths: Sequence[Path], out: Path) -> None:
    """Write the page of one measurement, or of several side by side."""
    names, found = short_names(paths), [load_served(path) for path in paths]
    sections = [_section(name, results) for name, results in zip(names, found, strict=True)]
    charts = [] if missing_matplotlib() is not None else _charts(dict(zip(names, found, strict=True)))
    body = render("served.html", sections=sections, charts=charts, no_charts=missing_matplotlib())
    write_page(out, "Speculative decoding, served", body)


def _section(name: str, results: Results) -> dict[str, Any]:
    tables = [load_table(results, "By load"), _category_table(results), _position_table(results)]
    return {
        "name": name,
        "verdict": verdict(results),
        "warnings": results["warnings"],
        "tables": [table for table in tables if table is not None],
        "recipe": results["recipe"],
        "prompts": results["prompts"],
        "machine": results["machine"],
        "models": results["models"],
    }


def verdict(results: Results) -> str:
    """In a line, what the drafts are worth, and from which load on nothing."""
    known = [row for row in results["loads"] if (row.get("beside") or {}).get("speedup") is not None]
    if not known:
        return "Nothing to compare with: give a --baseline."
    best = max(known, key=lambda row: float(row["beside"]["speedup"]))
    low, high = best["beside"]["speedup_interval"] or (None, None)
    span = f" (95 %: {number(low)}–{number(high)})" if low is not None else ""
    said = (
        f"At best, {load_name(best)}, a token comes {number(best['beside']['speedup'])} times as fast{span} with drafts"
    )
    slower = [row for row in known if row["beside"]["speedup"] <= 1]
    if not slower:
        return f"{said}; they pay at every load that was tried."
    if len(slower) == len(known):
        return f"{said}: they do not pay at any load that was tried."
    return f"{said}; they do not pay at {', '.join(load_name(row) for row in slower)}."


def _category_table(results: Results) -> Table | None:
    """Speedups of a category at each load."""
    known = [row for row in results["loads"] if row.get("beside")]
    categories = dict.fromkeys(name for row in known for name in row["beside"]["by_category"])
    if len(categories) < 2:
        return None
    columns = [Column("category", numeric=False)]
    columns += [column for row in known for column in (Column(load_name(row), "×"), Column("interval", "95 %"))]
    cells = []
    for name in categories:
        parts = [row["beside"]["by_category"].get(name, {}) for row in known]
        numbers = [(number_cell(part.get("speedup")), interval_cell(part.get("speedup_interval"))) for part in parts]
        cells.append([Cell(name or DASH), *(cell for pair in numbers for cell in pair)])
    return Table("Speedup by category", columns, cells)


def _position_table(results: Results) -> Table | None:
    """Acceptance at each place of a draft, of those that got so far."""
    shares = {load_name(row): row["server"]["acceptance_by_depth"] for row in results["loads"]}
    shares |= {
        f"as {each['label']} here": each["acceptance_by_depth"]
        for row in results["loads"]
        if (each := row.get("expected"))
    }
    deepest = max(map(len, shares.values()), default=0)
    if not deepest:
        return None
    columns = [Column("load", numeric=False), *(Column(str(place + 1)) for place in range(deepest))]
    padded = {name: [*found, *[None] * (deepest - len(found))] for name, found in shares.items()}
    rows = [[Cell(name), *map(number_cell, found)] for name, found in padded.items()]
    return Table("Acceptance by position", columns, rows)


def _charts(found: Mapping[str, Results]) -> list[str]:
    """Speedup and time of a token against the load; of rates and of numbers of requests apart."""
    drawn = []
    for key, title in (("concurrency", "requests at a time"), ("rate", "requests a second")):
        loads = {
            name: [row for row in results["loads"] if (row["rate"] is None) == (key == "concurrency")]
            for name, results in found.items()
        }
        speed = [_line(name, rows, key, "beside", "speedup") for name, rows in loads.items()]
        pace = [
            _line(f"{name}{', baseline' * (side == 'baseline')}", rows, key, side, "ms_per_token")
            for name, rows in loads.items()
            for side in _SIDES
        ]
        for known, what, level in ((speed, "speedup (×)", 1.0), (pace, "time of a token (ms)", None)):
            if known := [line for line in known if line.xs]:
                heading = f"{what.partition(' (')[0].capitalize()} against {title}"
                drawn.append(figure(lines(known, title, what, heading, level), heading, _CAPTION))
    return drawn


def _line(label: str, rows: Sequence[Results], key: str, part: str, name: str) -> Line:
    known = [row for row in rows if (row.get(part) or {}).get(name) is not None]
    found = [row[part] for row in known]
    spans = [each[f"{name}_interval"] for each in found]
    return Line(label, [row[key] for row in known], [each[name] for each in found], spans)


_CAPTION = "Bars are 95 % intervals by prompts. A time is that from a text's first token to its last, a token."

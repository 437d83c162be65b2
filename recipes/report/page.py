"""`report.html`: the results of evaluations as one file that needs nothing else, neither a network nor scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ...checkpoints.storage.atomic import atomic_text
from ..schema.results import load_results
from ..session.terminal import console, log
from .certificate import certificate_beside, certificate_section, load_certificate
from .charts import Point, depth_bars, missing_matplotlib, scatter, stacked_bars
from .compare import BASELINE, Comparison, compare, comparison_tables
from .papers import paper_section
from .tables import (
    QUALITY,
    SPEED,
    Row,
    category_tables,
    cost_metrics,
    flops_unit,
    inside,
    interval_cell,
    method_table,
    number,
    prediction_table,
    render,
)
from .trace import load_trace, trace_section

Numbered = tuple[int, Row]
"""A method and its number on the page."""


def report_beside(results: Path) -> Path:
    """Where the report of a results file lies: `report.html` beside `results.json`, `NAME.html` beside `NAME.json`."""
    return results.with_name("report.html" if results.name == "results.json" else f"{results.stem}.html")


def trace_beside(results: Path) -> Path:
    """Where a trace lies that the report takes in: `trace.json` beside `results.json`, else `NAME.trace.json`."""
    return results.with_name("trace.json" if results.name == "results.json" else f"{results.stem}.trace.json")


def run_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one or more results files; several are also compared on the terminal.

    Args:
        paths: the first is what the others are compared with.
        out: the page; by default it lies beside the first results.

    Raises:
        ValueError: results that cannot be read (see `load_results`), the same file twice, or results that hold no
            method in common.
    """
    double = sorted({str(path) for path in paths if list(paths).count(path) > 1})
    if double:
        raise ValueError(f"{double[0]} is given twice: give different results to compare")
    loaded = [load_results(path) for path in paths]
    comparison = compare(_names(paths), loaded) if len(loaded) > 1 else None
    written = write_report(out or report_beside(paths[0]), paths, loaded, comparison)
    if comparison is not None:
        for table in comparison_tables(comparison):
            console().print(table.rich())
        for note in comparison.notes:
            console().print(f"- {note}", markup=False)
    if (missing := missing_matplotlib()) is not None:
        log(missing)
    console().print(f"report: {written}", markup=False, soft_wrap=True)
    return written


def write_report(
    out: Path, paths: Sequence[Path], results: Sequence[Mapping[str, Any]], comparison: Comparison | None = None
) -> Path:
    """Write the page, whole or not at all. Where a certificate or a trace beside the results cannot be read, the page
    says so: the results stand."""
    names = _names(paths)
    parts = ["<h1>Speculative decoding, measured</h1>"]
    if comparison is not None:
        parts.append(render("comparison.html", comparison=comparison, tables=comparison_tables(comparison)))
    for name, path, found in zip(names, paths, results, strict=True):
        certified = partial(certificate_section, recipe=found["recipe"])
        about = {"name": name, "named": len(paths) > 1, "results": found} | _context(found)
        parts.append(render("evaluation.html", **about))
        parts.append(_beside(certificate_beside(path), load_certificate, certified))
        parts.append(_beside(trace_beside(path), load_trace, trace_section))
    return write_page(out, f"Speculative decoding: {', '.join(names)}", "".join(parts))


def _beside(path: Path, load: Callable[[Path], dict[str, Any]], section: Callable[[dict[str, Any]], str]) -> str:
    """The section of a file that lies beside the results; where that cannot be read, an alert."""
    if not path.is_file():
        return ""
    try:
        found = load(path)
    except ValueError as error:
        log(f"report: {error}")
        return render("alert.html", notes=[str(error)])
    return section(found)


def write_page(out: Path, title: str, body: str) -> Path:
    """Write a page in the report's form, whole or not at all; `body` is HTML."""
    atomic_text(out, render("page.html", title=title, body=body))
    return out


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the files apart: as much of their paths' ends as it takes."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _context(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of one evaluation shows."""
    rows: list[Row] = results["methods"]
    groups: dict[float, list[Numbered]] = {}
    for index, row in enumerate(rows, 1):
        groups.setdefault(float(row["temperature"]), []).append((index, row))
    metrics = (("All methods", SPEED), ("Cost", cost_metrics(rows)), ("Quality", QUALITY))
    machine = {name: value for name, value in results["machine"].items() if name != "versions"}
    versions = {f"{name} version": value for name, value in (results["machine"].get("versions") or {}).items()}
    by_category = any(row.get("by_category") for row in rows)
    predicted = [
        (index, row)
        for index, row in enumerate(rows, 1)
        if inside(row, "prediction.tokens_per_step") and row["tokens_per_step"]
    ]
    return {
        "cards": [_card(temperature, [row for _, row in group]) for temperature, group in groups.items()],
        "paper": paper_section(results["paper"], rows) if "paper" in results else "",
        "tables": [method_table(caption, rows, columns) for caption, columns in metrics],
        "categories": category_tables(rows, results["categories"]) if by_category else [],
        "charts": _charts(groups, predicted) if missing_matplotlib() is None else None,
        "no_charts": missing_matplotlib(),
        "prediction": prediction_table(predicted) if predicted else None,
        "facts": [*machine.items(), *versions.items(), ("results schema", results["schema"])],
        "recipe": yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True),
    }


def best_lossless(rows: Iterable[Row]) -> Row | None:
    """The fastest method that keeps the target's distribution, plain decoding aside."""
    fit = (row for row in rows if row.get("lossless") and row["method"] != BASELINE and row.get("speedup") is not None)
    return max(fit, key=lambda row: float(row["speedup"]), default=None)


def _card(temperature: float, rows: Sequence[Row]) -> dict[str, Any]:
    """The fastest lossless method at a temperature, and which are not clearly slower."""
    best = best_lossless(rows)
    if best is None:
        return {"temperature": f"{temperature:g}", "best": None}
    spread = best.get("speedup_interval") or [math.inf, math.inf]
    others = [row for row in rows if row is not best and row.get("lossless") and row["method"] != BASELINE]
    known = [row for row in others if row.get("speedup_interval")]
    return {
        "temperature": f"{temperature:g}",
        "best": best,
        "speedup": number(best["speedup"]),
        "interval": interval_cell(best.get("speedup_interval")).text,
        "speed": number(best.get("tokens_per_second"), 0),
        "tokens_per_step": number(best.get("tokens_per_step")),
        "near": [row["label"] for row in known if row["speedup_interval"][1] >= spread[0]],
    }


# --- charts -----------------------------------------------------------------------------------------------------------

_BOUND = (
    "The heavy bar above a point is the measured bound: what this hardware could give at that many tokens per step. "
    "The thin line through it is the 95 % interval. On the dotted line a step would cost no more than plain decoding's."
)
_WORK = "Dashed: methods that no other beats in both, less work and more speed."


def _charts(groups: Mapping[float, Sequence[Numbered]], predicted: Sequence[Numbered]) -> dict[str, Any]:
    points: list[str] = []
    for temperature, group in groups.items():
        at = f", temperature {temperature:g}" if len(groups) > 1 else ""
        speedups = _points(group, "tokens_per_step", bound="bound")
        about = (f"Speedup against tokens per step{at}", "tokens per step (τ)", _BOUND)
        points.append(_speed_chart(speedups, *about, diagonal="a draft that costs nothing"))
        name, size = flops_unit([row for _, row in group])
        work = _points(group, "flops_per_token.total", scale=1 / size)
        about = (f"Speed against work{at}", f"{name} per token, verification and drafting", _WORK)
        points.append(_speed_chart(work, *about, frontier=True))
        points.append(perplexity_chart(group, at))
    numbered = [each for group in groups.values() for each in group]
    bars = [_depth_chart(numbered), _phase_chart(numbered)]
    return {"points": points, "bars": bars, "prediction": _prediction_chart(predicted) if predicted else ""}


def _figure(drawn: str, title: str, caption: str, kind: str = "") -> str:
    return render("figure.html", drawn=drawn, title=title, caption=caption, kind=kind)


def _speed_chart(points: Sequence[Point], title: str, axis: str, caption: str, **options: Any) -> str:
    """Speedup against something; nothing without points."""
    if not points:
        return ""
    return _figure(scatter(points, axis, "speedup (×)", title, **options), title, caption)


def _points(
    group: Sequence[Numbered], x: str, y: str = "speedup", bound: str | None = None, scale: float = 1.0
) -> list[Point]:
    """Points of the rows that have both values, by their keys, with the interval of y where it is known."""
    points = []
    for index, row in group:
        across, up = inside(row, x), row.get(y)
        if across is not None and up is not None:
            low, high = row.get(f"{y}_interval") or (None, None)
            most = row.get(bound) if bound else None
            points.append(Point(index, row["label"], across * scale, up, bool(row.get("lossless")), low, high, most))
    return points


def perplexity_chart(group: Sequence[Numbered], at: str = "") -> str:
    """Numbered rows at one temperature, with the frontier; nothing where all of them are lossless, or without
    matplotlib."""
    points = _points(group, "perplexity")
    if not points or all(row.get("lossless") for _, row in group) or missing_matplotlib() is not None:
        return ""
    caption = (
        "What lossy methods give up, or gain: a lossless method has the target's own perplexity. Dashed: methods that "
        "no other beats in both. Low perplexity is not quality by itself: text that repeats itself has it too."
    )
    axis = "perplexity of the output under the target"
    return _speed_chart(points, f"Speed against perplexity{at}", axis, caption, frontier=True, from_zero=False)


def _depth_chart(rows: Sequence[Numbered]) -> str:
    known = [(f"{index} {row['label']}", row["acceptance_by_depth"]) for index, row in rows]
    known = [(label, shares) for label, shares in known if shares]
    if not known:
        return ""
    caption = "Of the steps that reached a depth, the share that accepted a token there. Across: depth."
    return _figure(depth_bars(known, "acceptance by depth"), "Acceptance by depth", caption, "broad")


def _phase_chart(rows: Sequence[Numbered]) -> str:
    title = "Where the time of a step goes"
    timed = [(f"{index} {row['label']}", row["phases_us"]) for index, row in rows if row.get("phases_us")]
    if not timed:
        return _figure("", title, "Not measured.")
    most = max(float(phases.get("step") or 0.0) for _, phases in timed)
    unit, size = ("ms", 1e3) if most >= 2000 else ("µs", 1.0)
    bars = [(label, {name: (spent or 0.0) / size for name, spent in phases.items()}) for label, phases in timed]
    caption = (
        "Median time of each phase of a step. Host is the time between steps, and time in which the device is idle."
    )
    return _figure(stacked_bars(bars, unit, "time of a step by phase"), title, caption, "broad")


def _prediction_chart(known: Sequence[Numbered]) -> str:
    points = _points(known, "prediction.tokens_per_step", "tokens_per_step")
    axes = ("predicted tokens per step", "measured tokens per step", "prediction against measurement")
    drawn = scatter(points, *axes, diagonal="as predicted", band=0.03, from_zero=False)
    return _figure(drawn, "", "Dashed: 3 % off.")

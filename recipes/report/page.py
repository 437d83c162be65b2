"""`report.html`: the results of evaluations as one file that needs nothing else, neither a network nor scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...checkpoints.storage.atomic import atomic_text
from ..schema.results import beside, load_results
from ..session.terminal import console, log
from .certificate import KIND, certificate_section, load_certificate
from .charts import Point, missing_matplotlib, scatter_with_diagonal, scatter_with_frontier, stacked_bars
from .compare import Comparison, compare
from .tables import (
    BASELINE,
    PREDICTED,
    QUALITY,
    SPEED,
    UNSTEADY,
    Row,
    best_lossless,
    category_table,
    cost_metrics,
    depth_table,
    interval_cell,
    method_table,
    number,
    render,
)

Numbered = tuple[int, Row]
"""A method and its number on the page."""


def report_beside(results: Path) -> Path:
    """Where the report of a results file lies: `report.html` beside `results.json`, `NAME.html` beside `NAME.json`."""
    return results.with_name("report.html" if results.name == "results.json" else f"{results.stem}.html")


def run_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of results files, by default beside the first; the others are also compared with that on the
    terminal. Raises ValueError: the same results twice."""
    names, loaded = short_names(paths), [load_results(path) for path in paths]
    comparison = compare(names, loaded) if len(loaded) > 1 else None
    written = write_report(out or report_beside(paths[0]), paths, loaded, comparison)
    if comparison is not None:
        for table in comparison.tables:
            console().print(table.rich())
        for note in comparison.notes:
            console().print(f"- {note}")
    if (missing := missing_matplotlib()) is not None:
        log(missing)
    console().print(f"report: {written}", soft_wrap=True)
    return written


def write_report(
    out: Path, paths: Sequence[Path], results: Sequence[Mapping[str, Any]], comparison: Comparison | None = None
) -> Path:
    """Write the page, whole or not at all. Where a certificate beside the results cannot be read, the page says so: the
    results stand."""
    names = short_names(paths)
    parts = ["<h1>Speculative decoding, measured</h1>"]
    if comparison is not None:
        parts.append(render("comparison.html", comparison=comparison))
    for name, path, found in zip(names, paths, results, strict=True):
        about = {"name": name, "named": len(paths) > 1, "results": found} | _context(found)
        parts.append(render("evaluation.html", **about))
        parts.append(_certificate(path, found["recipe"]))
    return write_page(out, f"Speculative decoding: {', '.join(names)}", "".join(parts))


def _certificate(results: Path, recipe: Mapping[str, Any]) -> str:
    """The section of the certificate that lies beside the results; where that cannot be read, an alert."""
    path = beside(results, KIND)
    if not path.is_file():
        return ""
    try:
        return certificate_section(load_certificate(path), recipe)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # it, or something in it, is of another form
        problem = str(error) if str(path) in str(error) else f"{path} cannot be shown: {error!r}"
        log(f"report: {problem}")
        return render("alert.html", notes=[problem])


def write_page(out: Path, title: str, body: str) -> Path:
    """Write a page in the report's form, whole or not at all; `body` is HTML, whose headings and captions become the
    contents behind its title."""
    links: list[tuple[str, str]] = []

    def anchored(found: re.Match[str]) -> str:
        links.append((found[1], found[2]))
        return f'<{found[1]} id="part-{len(links)}">{found[2]}</{found[1]}>'

    body = re.sub(r"<(h2|h3|caption)>(.*?)</\1>", anchored, str(body), flags=re.DOTALL)
    if len(links) > 1:
        body = body.replace("</h1>", "</h1>" + str(render("contents.html", links=links)), 1)
    atomic_text(out, render("page.html", title=title, body=body))
    return out


def short_names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the files apart. Raises ValueError: the same one twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"the same results twice: {', '.join(map(str, paths))}")
    names = ["/".join(path.parts[-2:]) for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _context(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of one evaluation shows."""
    rows: list[Row] = results["methods"]
    temperatures = dict.fromkeys(float(row["temperature"]) for row in rows)
    groups = {each: [(n, row) for n, row in enumerate(rows, 1) if row["temperature"] == each] for each in temperatures}
    speed = (*SPEED, PREDICTED) if any(row.get("prediction") for row in rows) else SPEED
    metrics = (("All methods", speed), ("Cost", cost_metrics(rows)), ("Quality", QUALITY))
    tables = [method_table(caption, rows, columns) for caption, columns in metrics]
    if any(len(row.get("by_category") or ()) > 1 for row in rows):
        tables.append(category_table(rows))
    if any(row.get("acceptance_by_depth") for row in rows):
        tables.append(depth_table(rows))
    versions = {f"{name} version": one for name, one in (results["machine"].get("versions") or {}).items()}
    return {
        "cards": [_card(temperature, [row for _, row in group]) for temperature, group in groups.items()],
        "unsteady": [row["label"] for row in rows if row.get("steady") is False],
        "mark": UNSTEADY,
        "tables": tables,
        "charts": _charts(groups) if missing_matplotlib() is None else [],
        "no_charts": missing_matplotlib(),
        "facts": results["machine"] | versions | {"versions": None, "results schema": results["schema"]},
        "recipe": yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True),
    }


def _card(temperature: float, rows: Sequence[Row]) -> dict[str, Any]:
    """The fastest lossless method at a temperature, and which are not clearly slower."""
    best = best_lossless(rows)
    if best is None:
        return {"temperature": f"{temperature:g}", "best": None}
    low = (best.get("speedup_interval") or [math.inf])[0]
    others = [row for row in rows if row is not best and row.get("lossless") and row["method"] != BASELINE]
    return {
        "temperature": f"{temperature:g}",
        "best": best,
        "speedup": number(best["speedup"]),
        "interval": interval_cell(best.get("speedup_interval")).text,
        "speed": number(best.get("tokens_per_second"), 0),
        "tokens_per_step": number(best.get("tokens_per_step")),
        "near": [row["label"] for row in others if (row.get("speedup_interval") or [0, 0])[1] >= low],
    }


# --- charts -----------------------------------------------------------------------------------------------------------

_BOUND = "The heavy bar above a point is its bound: the speedup if steps took no longer than the forwards in them. "
_INTERVAL = (
    "The thin line through a point is its 95 % interval. On the dotted line a step would cost no more than plain "
    "decoding's."
)
_PERPLEXITY = (
    "What lossy methods give up, or gain: a lossless method has the target's own perplexity. Dashed: methods that "
    "no other beats in both. Low perplexity is not quality by itself: text that repeats itself has it too."
)


def _charts(groups: Mapping[float, Sequence[Numbered]]) -> list[str]:
    drawn: list[str] = []
    for temperature, group in groups.items():
        at = f", temperature {temperature:g}" if len(groups) > 1 else ""
        drawn += [speed_chart(group, at), perplexity_chart(group, at)]
    return [*drawn, _phase_chart([each for group in groups.values() for each in group])]


def figure(drawn: str, title: str, caption: str, kind: str = "") -> str:
    """A chart with its title and what there is to see."""
    return render("figure.html", drawn=drawn, title=title, caption=caption, kind=kind)


def _points(group: Sequence[Numbered], x: str) -> list[Point]:
    """Speedups, with interval and bound where they are known, against another metric."""
    points = []
    for index, row in group:
        if row.get(x) is not None and row.get("speedup") is not None:
            low, high = row.get("speedup_interval") or (None, None)
            most = row.get("bound") if x == "tokens_per_step" else None
            lossless = bool(row.get("lossless"))
            points.append(Point(index, row["label"], row[x], row["speedup"], lossless, low, high, most))
    return points


def speed_chart(group: Sequence[Numbered], at: str = "") -> str:
    """Numbered rows at one temperature by tokens per step; nothing without one that has them, or without matplotlib."""
    title, points = f"Speedup against tokens per step{at}", _points(group, "tokens_per_step")
    if not points or missing_matplotlib() is not None:
        return ""
    axes = ("tokens per step (τ)", "speedup (×)", title)
    bounded = any(point.bound is not None for point in points)
    drawn = scatter_with_diagonal(points, *axes, "a draft that costs nothing")
    return figure(drawn, title, (_BOUND if bounded else "") + _INTERVAL)


def perplexity_chart(group: Sequence[Numbered], at: str = "") -> str:
    """Numbered rows at one temperature, with the frontier; nothing where all of them are lossless, or without
    matplotlib."""
    points = _points(group, "perplexity")
    if not points or all(row.get("lossless") for _, row in group) or missing_matplotlib() is not None:
        return ""
    title = f"Speed against perplexity{at}"
    axes = ("perplexity of the output under the target", "speedup (×)", title)
    return figure(scatter_with_frontier(points, *axes), title, _PERPLEXITY)


def _phase_chart(rows: Sequence[Numbered]) -> str:
    timed = [(f"{index} {row['label']}", row["phases_us"]) for index, row in rows if row.get("phases_us")]
    if not timed:
        return ""
    milliseconds = [(label, {name: (us or 0.0) / 1e3 for name, us in phases.items()}) for label, phases in timed]
    title = "Where the time of a step goes"
    caption = (
        "Median time of each phase of a step. Host is the time between steps, and time in which the device is idle."
    )
    return figure(stacked_bars(milliseconds, "ms", "time of a step by phase"), title, caption, "broad")

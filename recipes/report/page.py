"""`report.html`: results of evaluations and benchmarks as one self-contained page without scripts from elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.messages import did_you_mean
from ...decode.evaluation.serving import synthetic_acceptance
from ..schema.results import BENCH, beside, load_results
from ..session.terminal import console, log
from .certificate import KIND, certificate_section, load_certificate
from .charts import Line, Point, lines, missing_matplotlib, scatter, stacked_bars
from .compare import Comparison, compare
from .tables import (
    BASELINE,
    BENCH_COLUMNS,
    QUALITY,
    SPEED,
    UNSTEADY,
    Row,
    best_lossless,
    category_table,
    cost_metrics,
    depth_table,
    energy_table,
    interval_cell,
    method_table,
    number,
    render,
)

Results = Mapping[str, Any]
Numbered = tuple[int, Row]
"""Row and its number on the page."""


def report_beside(results: Path) -> Path:
    """Return the report of a results file: `report.html` for `results.json`, otherwise `NAME.html` for `NAME.json`."""
    return results.with_name("report.html" if results.name == "results.json" else f"{results.stem}.html")


def run_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of results files, by default next to the first, and print how the others differ from it. Raises
    ValueError: the same results twice."""
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
    out: Path, paths: Sequence[Path], results: Sequence[Results], comparison: Comparison | None = None
) -> Path:
    """Write the page atomically. A certificate next to the results that cannot be read becomes an alert."""
    names = short_names(paths)
    parts = ["<h1>Speculative decoding, measured</h1>"]
    if comparison is not None:
        parts.append(render("comparison.html", comparison=comparison))
    for name, path, found in zip(names, paths, results, strict=True):
        context = _bench_context(name, found) if found["kind"] == BENCH else _evaluation_context(found)
        about = {"name": name, "named": len(paths) > 1, "results": found} | _common_context(found)
        parts.append(render("evaluation.html", **about | context))
        parts.append(_certificate(path, found["recipe"]))
    return write_page(out, f"Speculative decoding: {', '.join(names)}", "".join(parts))


def vllm_config(results: Results, label: str) -> dict[str, Any]:
    """Return the `--speculative-config` with which vLLM simulates the acceptance of a row. Raises ValueError: no such
    row, or one that accepted no draft token."""
    rows = {row["label"]: row for row in results["methods"]}
    if label not in rows:
        raise ValueError(f"no row {label!r}.{did_you_mean(label, rows)} Known: {', '.join(rows)}")
    rates, recipe = synthetic_acceptance(rows[label]), results["recipe"]
    sources = [recipe.get("drafter"), *(recipe.get("more_drafters") or [])]
    return {
        "model": sources[rows[label]["options"].get("drafter", 1) - 1] or "a model of the drafter's size",
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def _certificate(results: Path, recipe: Mapping[str, Any]) -> str:
    """Return the section of the certificate next to the results, or an alert if it cannot be read."""
    path = beside(results, KIND)
    if not path.is_file():
        return ""
    try:
        return certificate_section(load_certificate(path), recipe)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = str(error) if str(path) in str(error) else f"{path} cannot be shown: {error!r}"
        log(f"report: {problem}")
        return render("alert.html", notes=[problem])


def write_page(out: Path, title: str, body: str) -> Path:
    """Write a page atomically; the headings and captions of `body` (HTML) become the contents after its title."""
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
    """Return short names that distinguish the files. Raises ValueError: the same file twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"the same results twice: {', '.join(map(str, paths))}")
    names = ["/".join(path.parts[-2:]) for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _common_context(results: Results) -> dict[str, Any]:
    rows, machine = results["methods"], results["machine"]
    versions = {f"{name} version": version for name, version in (machine.get("versions") or {}).items()}
    tables = [category_table(rows)] if any(len(row.get("by_category") or ()) > 1 for row in rows) else []
    tables += [depth_table(rows)] if any(row.get("acceptance_by_depth") for row in rows) else []
    tables += [energy_table(results["energy_by_batch"])] if results.get("energy_by_batch") else []
    return {
        "unsteady": [row["label"] for row in rows if row.get("steady") is False],
        "mark": UNSTEADY,
        "more_tables": tables,
        "no_charts": missing_matplotlib(),
        "facts": machine | versions | {"versions": None},
        "recipe": yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True),
    }


def _evaluation_context(results: Results) -> dict[str, Any]:
    rows: list[Row] = results["methods"]
    temperatures = dict.fromkeys(float(row["temperature"]) for row in rows)
    groups = {each: [(n, row) for n, row in enumerate(rows, 1) if row["temperature"] == each] for each in temperatures}
    metrics = (("All methods", SPEED), ("Cost", cost_metrics(rows)), ("Quality", QUALITY))
    return {
        "verdict": "",
        "cards": [_card(temperature, [row for _, row in group]) for temperature, group in groups.items()],
        "tables": [method_table(caption, rows, columns) for caption, columns in metrics],
        "charts": _charts(groups) if missing_matplotlib() is None else [],
    }


def _card(temperature: float, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fastest lossless method at a temperature, and those that are not clearly slower."""
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


def _bench_context(name: str, results: Results) -> dict[str, Any]:
    rows = results["methods"]
    return {
        "verdict": verdict(rows),
        "cards": [],
        "tables": [method_table("By load", rows, BENCH_COLUMNS)],
        "charts": _load_charts(name, rows) if missing_matplotlib() is None else [],
    }


def verdict(rows: Sequence[Row]) -> str:
    """Return a sentence that says how much faster a server is with drafts, and at which loads it is slower."""
    known = [row for row in rows if row["method"] != BASELINE and row["speedup"] is not None]
    if not known:
        return "There is no baseline to compare with: give --baseline."
    best = max(known, key=lambda row: float(row["speedup"]))
    interval = f" (95 % interval {interval_cell(best['speedup_interval']).text})" if best["speedup_interval"] else ""
    found = f"Best speedup: {number(best['speedup'])}×{interval} at {best['label']}"
    slower = [row["label"] for row in known if row["speedup"] <= 1]
    return f"{found}; not faster than the baseline at {', '.join(slower)}." if slower else f"{found}."


# --- charts -----------------------------------------------------------------------------------------------------------

_BOUND = "The heavy bar above a point is its bound: the speedup if steps took no longer than the forwards in them. "
_INTERVAL = (
    "The thin line through a point is its 95 % interval. On the dotted line a step would cost no more than plain "
    "decoding's."
)
_PERPLEXITY = (
    "Lossy methods change the perplexity; a lossless method has the target's own. Dashed: methods that no other method "
    "beats in both. Low perplexity alone is not quality: repetitive text has it too."
)
_PHASES = "Median time of each phase of a step. Host is the time between steps, and time in which the device is idle."
_LOADS = "Bars are 95 % intervals over prompts. The time per token is that after an answer's first token."


def _charts(groups: Mapping[float, Sequence[Numbered]]) -> list[str]:
    drawn: list[str] = []
    for temperature, group in groups.items():
        at = f", temperature {temperature:g}" if len(groups) > 1 else ""
        drawn += [_speed_chart(group, at), _perplexity_chart(group, at)]
    rows = [each for group in groups.values() for each in group]
    timed = [(f"{index} {row['label']}", row["phases_us"]) for index, row in rows if row.get("phases_us")]
    if timed:
        milliseconds = [(label, {name: us / 1e3 for name, us in phases.items()}) for label, phases in timed]
        bars = stacked_bars(milliseconds, "ms", "time of a step by phase")
        drawn.append(_figure(bars, "Where the time of a step goes", _PHASES, "broad"))
    return drawn


def _figure(drawn: str, title: str, caption: str, kind: str = "") -> str:
    return render("figure.html", drawn=drawn, title=title, caption=caption, kind=kind)


def _points(group: Sequence[Numbered], x: str) -> list[Point]:
    """Return speedups, with interval and bound where they are known, against another metric."""
    points = []
    for index, row in group:
        if row.get(x) is not None and row.get("speedup") is not None:
            low, high = row.get("speedup_interval") or (None, None)
            most = row.get("bound") if x == "tokens_per_step" else None
            points.append(Point(index, row["label"], row[x], row["speedup"], bool(row["lossless"]), low, high, most))
    return points


def _speed_chart(group: Sequence[Numbered], at: str) -> str:
    title, points = f"Speedup against tokens per step{at}", _points(group, "tokens_per_step")
    if not points:
        return ""
    drawn = scatter(points, "tokens per step (τ)", "speedup (×)", title, "a draft that costs nothing")
    bounded = any(point.bound is not None for point in points)
    return _figure(drawn, title, (_BOUND if bounded else "") + _INTERVAL)


def _perplexity_chart(group: Sequence[Numbered], at: str) -> str:
    """Draw the frontier of speed and perplexity; empty if all rows are lossless."""
    points = _points(group, "perplexity")
    if not points or all(row.get("lossless") for _, row in group):
        return ""
    title = f"Speed against perplexity{at}"
    drawn = scatter(points, "perplexity of the output under the target", "speedup (×)", title)
    return _figure(drawn, title, _PERPLEXITY)


def _load_charts(name: str, rows: Sequence[Row]) -> list[str]:
    """Draw speedup and time per token against the load."""
    key, axis = ("concurrency", "requests in flight") if rows[0]["rate"] is None else ("rate", "requests per second")
    sides = {name: [row for row in rows if row["method"] != BASELINE]}
    sides[f"{name}, baseline"] = [row for row in rows if row["method"] == BASELINE]
    speed = [_line(name, sides[name], key, "speedup")]
    pace = [_line(label, some, key, "ms_per_token") for label, some in sides.items()]
    drawn = []
    for found, title, level in ((speed, "speedup (×)", 1.0), (pace, "time per token (ms)", None)):
        if known := [line for line in found if line.xs]:
            heading = f"{title.partition(' (')[0].capitalize()} against {axis}"
            drawn.append(_figure(lines(known, axis, title, heading, level), heading, _LOADS))
    return drawn


def _line(label: str, rows: Sequence[Row], key: str, metric: str) -> Line:
    known = [row for row in rows if row[metric] is not None]
    spans = [row[f"{metric}_interval"] for row in known]
    return Line(label, [row[key] for row in known], [row[metric] for row in known], spans)

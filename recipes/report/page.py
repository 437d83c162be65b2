"""`report.html`: the results of evaluations as one file that needs nothing else, neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ...checkpoints.storage.atomic import atomic_text
from ..schema.results import load_results
from ..session.terminal import console, log
from .certificate import certificate_beside, certificate_section, load_certificate
from .charts import Point, depth_bars, scatter, stacked_bars
from .compare import BASELINE, Comparison, compare, comparison_table
from .papers import paper_section
from .tables import (
    DASH,
    QUALITY,
    SPEED,
    category_tables,
    comparison_section,
    cost_columns,
    facts,
    flops_unit,
    interval,
    method_table,
    number,
    prediction_table,
)
from .trace import load_trace, trace_section

PAGE = Path(__file__).with_name("page.html")
Row = Mapping[str, Any]


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
    names = _names(paths)
    comparison = compare(names, loaded) if len(loaded) > 1 else None
    written = write_report(out or report_beside(paths[0]), paths, loaded, comparison)
    if comparison is not None:
        console().print(comparison_table(comparison))
        for note in comparison.notes:
            console().print(f"- {note}", markup=False)
    console().print(f"report: {written}", markup=False, soft_wrap=True)
    return written


def write_report(
    out: Path, paths: Sequence[Path], results: Sequence[Mapping[str, Any]], comparison: Comparison | None = None
) -> Path:
    """Write the page, whole or not at all. Where a certificate or a trace beside the results cannot be read, the page
    says so in its place: the results stand."""
    names = _names(paths)
    parts = ["<h1>Speculative decoding, measured</h1>"]
    if comparison is not None:
        parts.append(f"<p class=soft>{escape(' · '.join(names))}</p>{comparison_section(comparison)}")
    for place, (name, path, found) in enumerate(zip(names, paths, results, strict=True)):
        inside = _sections(found, f"r{place}")
        certified = partial(certificate_section, recipe=found["recipe"])
        inside += _taken_in(certificate_beside(path), load_certificate, certified)
        inside += _taken_in(trace_beside(path), load_trace, trace_section)
        title = f"<h2>{escape(name)}</h2>" if len(paths) > 1 else f'<p class="soft">{escape(name)}</p>'
        parts.append(f"<section>{title}{inside}</section>")
    return write_page(out, f"Speculative decoding: {', '.join(names)}", "\n".join(parts))


def _taken_in(path: Path, load: Callable[[Path], dict[str, Any]], section: Callable[[dict[str, Any]], str]) -> str:
    """The section of a file that lies beside the results; where that cannot be read, an alert."""
    if not path.is_file():
        return ""
    try:
        told = load(path)
    except ValueError as error:
        log(f"report: {error}")
        return f'<div class="problem" role="alert">{escape(str(error))}</div>'
    return section(told)


def write_page(out: Path, title: str, body: str) -> Path:
    """Write a page in the report's form, whole or not at all; `body` is HTML."""
    page = PAGE.read_text(encoding="utf-8").replace("{{title}}", escape(title)).replace("{{body}}", body)
    atomic_text(out, page)
    return out


def _names(paths: Sequence[Path]) -> list[str]:
    """Short names that tell the files apart: as much of their paths' ends as it takes."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _sections(results: Mapping[str, Any], name: str) -> str:
    """Everything about one evaluation; `name` sets its drawings apart from those of others on the page."""
    rows: list[Row] = results["methods"]
    parts = [_headline(results)]
    if results["errors"]:
        listed = "".join(f"<li>{escape(str(error))}</li>" for error in results["errors"])
        parts.append(f'<div class="problem" role="alert"><strong>What went wrong</strong><ul>{listed}</ul></div>')
    if "paper" in results:
        parts.append(paper_section(results["paper"], rows))
    if rows:
        parts.append(_controls(rows))
        parts.append(method_table("All methods", rows, SPEED))
        parts.append(method_table("Cost", rows, cost_columns(rows)))
        parts.append(method_table("Quality", rows, QUALITY))
        parts.append(_categories(rows, results["categories"]))
        parts.append(_charts(rows, name))
    parts.append(_setting(results))
    return "".join(parts)


def _by_temperature(rows: Sequence[Row]) -> dict[float, list[tuple[int, Row]]]:
    """Rows with their numbers, by temperature."""
    groups: dict[float, list[tuple[int, Row]]] = {}
    for place, row in enumerate(rows, 1):
        groups.setdefault(float(row["temperature"]), []).append((place, row))
    return groups


def best_lossless(rows: Iterable[Row]) -> Row | None:
    """The fastest method that keeps the target's distribution, plain decoding aside."""
    fit = (row for row in rows if row.get("lossless") and row["method"] != BASELINE and row.get("speedup") is not None)
    return max(fit, key=lambda row: float(row["speedup"]), default=None)


def _headline(results: Mapping[str, Any]) -> str:
    recipe, machine = results["recipe"], results["machine"]
    cards = "".join(
        _card(temperature, [row for _, row in group])
        for temperature, group in _by_temperature(results["methods"]).items()
    )
    hardware = (
        f"{machine.get('name') or 'an unknown machine'} ({machine.get('device')}, {machine.get('threads')} threads)"
    )
    data = f"{results['prompts']} prompts of {recipe.get('prompts')}"
    said = (
        f"Target {recipe.get('target')} on {hardware}; {data}, {recipe.get('max_new_tokens')} new tokens each at most."
    )
    same = results.get("greedy_equals_transformers")
    if same:
        said += f" Greedy decoding equals transformers.generate on {same[0]} of {same[1]} prompts."
    if results.get("resumed"):
        said += " The evaluation was interrupted and taken up again: its times come from more than one process."
    return f'<div class="headline">{cards}</div><p>{escape(said)}</p>'


def _card(temperature: float, rows: Sequence[Row]) -> str:
    best = best_lossless(rows)
    title = f"Best lossless method at temperature {temperature:g}"
    if best is None:
        return f'<div class="card"><div class="soft">{title}</div><p>None was measured.</p></div>'
    spread = best.get("speedup_interval")
    said = (
        f"{number(best.get('tokens_per_second'), 0)} tokens/s, {number(best.get('tokens_per_step'))} tokens per step; "
    )
    said += "speedup over autoregressive decoding by the same engine. "
    if best["speedup"] <= 1:
        said = f"No lossless method was faster than plain decoding. {said}"
    near = [
        row["label"]
        for row in rows
        if row is not best and row.get("lossless") and row["method"] != BASELINE and spread
        and row.get("speedup_interval") and row["speedup_interval"][1] >= spread[0]
    ]  # fmt: skip
    if near:
        said += f"Not clearly slower (their intervals overlap): {', '.join(near)}."
    return (
        f'<div class="card"><div class="soft">{title}</div><div><strong>{escape(best["label"])}</strong></div>'
        f'<div class="big">{number(best["speedup"])}× <small>95 % interval {interval(spread)}</small></div>'
        f"<p>{escape(said)}</p></div>"
    )


def _controls(rows: Sequence[Row]) -> str:
    temperatures = "".join(f'<option value="{value:g}">{value:g}</option>' for value in _by_temperature(rows))
    return (
        '<form class="controls" onsubmit="return false"><label>Filter <input type="search" '
        'placeholder="method or setting"></label><label><input type="checkbox"> lossless only</label>'
        f'<label>Temperature <select><option value="">all</option>{temperatures}</select></label>'
        '<output aria-live="polite"></output></form>'
    )


def _categories(rows: Sequence[Row], categories: Mapping[str, int]) -> str:
    title = "<h3>By category</h3>"
    if not any(row.get("by_category") for row in rows):
        return f"{title}<p>These results hold no numbers by category.</p>"
    return title + category_tables(rows, categories)


def _figure(drawn: str, caption: str, title: str = "", kind: str = "") -> str:
    head = f"<h3>{escape(title)}</h3>" if title else ""
    below = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure class="{kind}">{head}<div class="drawn">{drawn}</div>{below}</figure>'


def _charts(rows: Sequence[Row], name: str) -> str:
    groups = _by_temperature(rows)
    parts = [
        "<h3>Charts</h3><p>Numbers stand for the methods of the tables. Filled circles are lossless methods, open "
        "diamonds are not.</p>",
        '<div class="charts">',
    ]
    for temperature, group in groups.items():
        at = f"temperature {temperature:g}" if len(groups) > 1 else ""
        parts.append(_speedup_chart(group, at))
    for temperature, group in groups.items():
        at = f"temperature {temperature:g}" if len(groups) > 1 else ""
        parts += [_flops_chart(group, at), perplexity_chart(group, at)]
    parts.append("</div>")
    return "".join(parts) + _depths(rows) + _phases(rows, name) + _predictions(rows)


def _titled(title: str, at: str) -> str:
    return f"{title}, {at}" if at else title


def _points(group: Sequence[tuple[int, Row]], x: Any, **more: Any) -> list[Point]:
    """Points of the rows that have both values; `x` gives the one across, speedup is the one up."""
    points = []
    for place, row in group:
        across, up = x(row), row.get("speedup")
        if across is None or up is None:
            continue
        low, high = row.get("speedup_interval") or (None, None)
        extra = {key: row.get(source) for key, source in more.items()}
        points.append(Point(place, row["label"], across, up, bool(row.get("lossless")), low, high, **extra))
    return points


def _speedup_chart(group: Sequence[tuple[int, Row]], at: str) -> str:
    points = _points(group, lambda row: row.get("tokens_per_step"), bound="bound")
    if not points:
        return ""
    title = _titled("Speedup against tokens per step", at)
    drawn = scatter(points, "tokens per step (τ)", "speedup (×)", title, diagonal="a draft that costs nothing")
    return _figure(
        drawn,
        "The heavy bar above a point is the measured bound: what this hardware could give at that many tokens per "
        "step. The thin line through it is the 95 % interval. On the dotted line a step would cost no more than plain "
        "decoding's.",
        title,
    )


def _flops_chart(group: Sequence[tuple[int, Row]], at: str) -> str:
    def total(row: Row) -> float | None:
        return (row.get("flops_per_token") or {}).get("total")

    known = [total(row) for _, row in group if total(row) is not None]
    name, size = flops_unit(max(filter(None, known), default=0.0))
    points = _points(group, lambda row: None if total(row) is None else (total(row) or 0.0) / size)
    if not points:
        return ""
    title = _titled("Speed against work", at)
    drawn = scatter(points, f"{name} per token, verification and drafting", "speedup (×)", title, frontier=True)
    return _figure(drawn, "Dashed: methods that no other beats in both, less work and more speed.", title)


def perplexity_chart(group: Sequence[tuple[int, Row]], at: str = "") -> str:
    """Numbered rows at one temperature, with the frontier; nothing where all of them are lossless."""
    if all(row.get("lossless") for _, row in group):
        return ""
    points = _points(group, lambda row: row.get("perplexity"))
    if not points:
        return ""
    title = _titled("Speed against perplexity", at)
    axis = "perplexity of the output under the target"
    drawn = scatter(points, axis, "speedup (×)", title, frontier=True, from_zero=False)
    return _figure(
        drawn,
        "What lossy methods give up, or gain: a lossless method has the target's own perplexity. Dashed: methods that "
        "no other beats in both. Low perplexity is not quality by itself: text that repeats itself has it too.",
        title,
    )


def _depths(rows: Sequence[Row]) -> str:
    known = [(place, row) for place, row in enumerate(rows, 1) if row.get("acceptance_by_depth")]
    if not known:
        return ""
    deepest = max(len(row["acceptance_by_depth"]) for _, row in known)
    drawn = "".join(depth_bars(place, row["label"], row["acceptance_by_depth"], deepest) for place, row in known)
    caption = (
        "Of the steps that reached a depth, the share that accepted a token there. Across: depth; the upper line is 1."
    )
    return (
        f'<h3>Acceptance by depth</h3><figure><div class="panels">{drawn}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _phases(rows: Sequence[Row], name: str) -> str:
    timed = [(f"{place} {row['label']}", row["phases_us"]) for place, row in enumerate(rows, 1) if row.get("phases_us")]
    if not timed:
        return "<h3>Where the time of a step goes</h3><p>Not measured.</p>"
    most = max(float(phases.get("step") or 0.0) for _, phases in timed)
    unit, size = ("ms", 1e3) if most >= 2000 else ("µs", 1.0)
    bars = [
        (label, {phase: float(spent) / size for phase, spent in phases.items() if phase != "step" and spent})
        for label, phases in timed
    ]
    drawn = stacked_bars(bars, unit, "time of a step by phase", name)
    caption = (
        "Median time of each phase of a step. Host is the time between steps, and time in which the device is idle."
    )
    return f"<h3>Where the time of a step goes</h3>{_figure(drawn, caption, kind='broad')}"


def _predictions(rows: Sequence[Row]) -> str:
    title = "<h3>Prediction against measurement</h3>"
    known = [
        (place, row)
        for place, row in enumerate(rows, 1)
        if (row.get("prediction") or {}).get("tokens_per_step") and row.get("tokens_per_step")
    ]
    if not known:
        return f"{title}<p>No predictions are in these results.</p>"
    points = []
    for place, row in known:
        low, high = row.get("tokens_per_step_interval") or (None, None)
        across = row["prediction"]["tokens_per_step"]
        points.append(Point(place, row["label"], across, row["tokens_per_step"], bool(row.get("lossless")), low, high))
    axes = ("predicted tokens per step", "measured tokens per step")
    drawn = scatter(
        points, *axes, "prediction against measurement", diagonal="as predicted", band=0.03, from_zero=False
    )
    caption = "Predicted by replay of one recorded pass, without decoding. Dashed: 3 % off."
    return f'{title}<div class="charts">{_figure(drawn, caption)}</div>{prediction_table(known)}'


def _setting(results: Mapping[str, Any]) -> str:
    """Machine, versions and recipe."""
    machine = dict(results["machine"])
    versions = machine.pop("versions", None) or {}
    pairs = [(str(name), DASH if value is None else str(value)) for name, value in machine.items()]
    pairs += [(f"{name} version", str(version)) for name, version in versions.items()]
    pairs.append(("results schema", str(results.get("schema"))))
    recipe = yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True)
    return (
        f"<h3>Machine and versions</h3>{facts(pairs)}<details><summary>The recipe</summary>"
        f"<pre>{escape(recipe)}</pre></details>"
    )

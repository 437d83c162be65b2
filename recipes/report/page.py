"""`report.html`: results of evaluations and benchmarks in one self-contained HTML file."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...checkpoints.storage.atomic import atomic_text
from ..schema.results import BENCH, derive_path, load_results
from ..session.terminal import console, log
from .certificate import KIND, certificate_section, load_certificate
from .charts import method_charts
from .compare import Comparison, Results, compare
from .tables import (
    BASELINE,
    BENCH_COLUMNS,
    PHASES,
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


def report_path(results: Path) -> Path:
    """Return the path of a report: `report.html` for `results.json`, otherwise `NAME.html` for `NAME.json`."""
    return results.with_name("report.html" if results.name == "results.json" else f"{results.stem}.html")


def run_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write an HTML report of results files, and print a comparison of the first file with the others."""
    names, loaded = short_names(paths), [load_results(path) for path in paths]
    comparison = compare(names, loaded) if len(loaded) > 1 else None
    written = write_report(out or report_path(paths[0]), paths, loaded, comparison)
    if comparison is not None:
        for table in comparison.tables:
            console().print(table.rich())
        for note in comparison.notes:
            console().print(f"- {note}")
    console().print(f"report: {written}", soft_wrap=True)
    return written


def write_report(
    out: Path, paths: Sequence[Path], results: Sequence[Results], comparison: Comparison | None = None
) -> Path:
    """Write an HTML report of results and of the certificates next to them, and return the path of the report."""
    names = short_names(paths)
    parts = ["<h1>Speculative decoding benchmark</h1>"]
    if comparison is not None:
        parts.append(render("comparison.html", comparison=comparison))
    for name, path, result in zip(names, paths, results, strict=True):
        parts.append(render("evaluation.html", name=name, named=len(paths) > 1, results=result, **_context(result)))
        parts.append(_certificate(path, result["recipe"]))
    return write_page(out, f"Speculative decoding: {', '.join(names)}", "".join(parts))


def _certificate(results: Path, recipe: Mapping[str, Any]) -> str:
    """Render the certificate next to the results as HTML, or an error message if it cannot be loaded."""
    path = derive_path(results, KIND)
    if not path.is_file():
        return ""
    try:
        return certificate_section(load_certificate(path), recipe)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = str(error) if str(path) in str(error) else f"{path} cannot be rendered: {error!r}"
        log(f"report: {problem}")
        return render("alert.html", notes=[problem])


def write_page(out: Path, title: str, body: str) -> Path:
    """Write an HTML file with a table of contents that links to the headings and table captions in `body`."""
    links: list[tuple[str, str]] = []

    def add_anchor(match: re.Match[str]) -> str:
        links.append((match[1], match[2]))
        return f'<{match[1]} id="part-{len(links)}">{match[2]}</{match[1]}>'

    body = re.sub(r"<(h2|h3|caption)>(.*?)</\1>", add_anchor, str(body), flags=re.DOTALL)
    if len(links) > 1:
        body = body.replace("</h1>", "</h1>" + str(render("contents.html", links=links)), 1)
    atomic_text(out, render("page.html", title=title, body=body))
    return out


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return short and distinct names for results files. Raise ValueError if a file is given twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"results files must be distinct, got {', '.join(map(str, paths))}")
    names = ["/".join(path.parts[-2:]) for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _context(results: Results) -> dict[str, Any]:
    """Return the variables for the template `evaluation.html`."""
    rows, machine, is_bench = results["methods"], results["machine"], results["kind"] == BENCH
    temperatures = dict.fromkeys(float(row["temperature"]) for row in rows)
    groups = {each: [(n, row) for n, row in enumerate(rows, 1) if row["temperature"] == each] for each in temperatures}
    metrics = {"All methods": SPEED, "Cost": cost_metrics(rows), "Quality": QUALITY, "Time of a step": PHASES}
    metrics = {"By load": BENCH_COLUMNS} if is_bench else metrics
    tables = [method_table(caption, rows, columns) for caption, columns in metrics.items()]
    tables += [category_table(rows)] if any(len(row.get("by_category") or ()) > 1 for row in rows) else []
    tables += [depth_table(rows)] if any(row.get("acceptance_by_depth") for row in rows) else []
    tables += [energy_table(results["energy_by_batch"])] if results.get("energy_by_batch") else []
    versions = {f"{name} version": version for name, version in (machine.get("versions") or {}).items()}
    return {
        "verdict": verdict(rows) if is_bench else "",
        "cards": [] if is_bench else [_card(each, [row for _, row in group]) for each, group in groups.items()],
        "tables": tables,
        "charts": [] if is_bench else method_charts(groups),
        "unsteady": [row["label"] for row in rows if row.get("steady") is False],
        "mark": UNSTEADY,
        "facts": machine | versions | {"versions": None},
        "recipe": yaml.safe_dump(results["recipe"], sort_keys=False, allow_unicode=True),
    }


def _card(temperature: float, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fastest lossless method at a temperature, and the methods that are not significantly slower."""
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


def verdict(rows: Sequence[Row]) -> str:
    """Return a sentence on the best speedup of a server and on the concurrency levels without a speedup."""
    known = [row for row in rows if row["method"] != BASELINE and row["speedup"] is not None]
    if not known:
        return "The speedup is unknown without a baseline: pass --baseline."
    best = max(known, key=lambda row: float(row["speedup"]))
    interval = f" (95 % interval {interval_cell(best['speedup_interval']).text})" if best["speedup_interval"] else ""
    text = f"Best speedup: {number(best['speedup'])}×{interval} at {best['label']}"
    slower = [row["label"] for row in known if row["speedup"] <= 1]
    return f"{text}; not faster than the baseline at {', '.join(slower)}." if slower else f"{text}."

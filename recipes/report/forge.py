"""HTML report of `draftsmith forge`: the fastest settings, the decision log and the measurements."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...decode.evaluation.tuning.tuner import Workload
from ..session.terminal import duration
from .certificate import VERDICTS
from .page import write_page
from .tables import Cell, Column, Table, interval_cell, number_cell, render

_COLUMNS = (
    Column("setting", numeric=False),
    Column("steps", "of training"),
    Column("tokens per step"),
    Column("speedup", "×"),
    Column("interval", "95 %, ×"),
)


def write_forge_page(results: Mapping[str, Any], out: Path) -> Path:
    """Write the results of `draftsmith forge` to an HTML file."""
    tables, winners = [], []
    for each in results["workloads"]:
        workload = Workload(each["batch"], each["temperature"])
        parts = {"Existing drafters, and candidates after short training": each["compared"], "Tuned": each["tuned"]}
        tables += [
            Table(f"{title}, {workload}", _COLUMNS, list(map(_row, rows))) for title, rows in parts.items() if rows
        ]
        winners.append((str(workload), each["winner"], _verdict(each["certificate"] or {})))
    about = {key: results[key] for key in ("recipe", "machine", "decision_log")} | {"winners": winners}
    about |= {"given": duration(3600 * results["recipe"]["hours"]), "took": duration(sum(results["spent"].values()))}
    return write_page(out, "Forge report", render("forge.html", tables=tables, **about))


def _verdict(certificate: Mapping[str, str]) -> str | None:
    """Return the worst verdict in a certificate, except for the baseline, or None if there are no verdicts."""
    verdicts = [verdict for label, verdict in certificate.items() if not label.startswith("autoregressive")]
    return max(verdicts, key=VERDICTS.index, default=None)


def _row(measurement: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(measurement["label"]),
        Cell(f"{measurement['steps']:,}" if measurement["steps"] else "none"),
        number_cell(measurement["tokens_per_step"]),
        number_cell(measurement["speedup"]),
        interval_cell(measurement["interval"]),
    ]

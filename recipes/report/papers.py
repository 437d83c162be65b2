"""A paper's table beside ours, and what came of its claims: on the terminal, and as pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..schema.claims import HELD, NOISE, NOT_HELD, NOT_JUDGED, metric_of, parse_claim, show
from .tables import DASH, Cell, Column, Table, render

Result = Mapping[str, Any]
TITLES = {
    "multi-candidate": "Multi-Candidate Speculative Decoding",
    "mjsd": "Multi-Token Joint Speculative Decoding",
    "slim": "SLiM: Speculative Decoding with Hypothesis Reduction",
    "slides": "Speculative Decoding (slides)",
    "theory": "A Theoretical Perspective for Speculative Decoding",
}
_MOST_METRICS = 6
_USUAL = ("tokens_per_step", "acceptance_rate", "speedup")
_STYLES = {HELD: "green", NOT_HELD: "red", NOISE: "yellow", NOT_JUDGED: "dim"}


def title_of(result: Result) -> str:
    """The paper's title and the table in it."""
    return f"{TITLES[result['paper']]}, {result['where']}"


def numbers_table(result: Result, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Our rows, with the paper's numbers beside them, of the metrics that it gives or makes claims about."""
    theirs: Mapping[str, Mapping[str, float]] = result["theirs"]
    given = dict.fromkeys(metric for numbers in theirs.values() for metric in numbers)
    claims = (parse_claim(claim["holds"]) for claim in result["claims"])
    claimed = dict.fromkeys(reference.metric for claim in claims for reference in claim.names.values())
    metrics = list(given | claimed)[:_MOST_METRICS] or list(_USUAL)
    columns = [Column("row", numeric=False)]
    for metric in metrics:
        columns.append(Column(metric.replace("_", " ").replace(".", " ")))
        columns += [Column("paper's")] if metric in given else []
    table = []
    for row in rows:
        cells = [Cell(row["label"])]
        for metric in metrics:
            value = metric_of(row, metric)
            cells.append(Cell(DASH if value is None else show(value), value))
            cells += [Cell(_their_number(theirs, row["label"], metric))] if metric in given else []
        table.append(cells)
    return Table("Ours and the paper's", columns, table)


def _their_number(theirs: Mapping[str, Mapping[str, float]], label: str, metric: str) -> str:
    """The paper's number for a row, or the range over its runs where ours was one run; a dash if it has none."""
    runs = [label] if label in theirs else [name for name in theirs if name.endswith(f": {label}")]
    values = [theirs[name][metric] for name in runs if metric in theirs[name]]
    if not values:
        return DASH
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def claims_table(results: Sequence[Result]) -> Table:
    """What the papers claim and what came of it; with the recipe's name where there are several."""
    names = ["recipe"] if len(results) > 1 else []
    names += ["the paper says", "ours", "the paper's", "verdict"]
    rows = []
    for result in results:
        for index, claim in enumerate(result["claims"]):
            name = [Cell(result["name"] if index == 0 else "")] if len(results) > 1 else []
            says = claim["says"] if claim["where"] == result["where"] else f"{claim['says']} ({claim['where']})"
            verdict = Cell(claim["status"], style=_STYLES[claim["status"]])
            rows.append([*name, Cell(says), Cell(_ours(claim)), Cell(_theirs(claim)), verdict])
    return Table("Claims", [Column(name, numeric=False) for name in names], rows)


def _ours(claim: Mapping[str, Any]) -> str:
    """The sides in numbers, of several runs in how many it held, or why it was not judged."""
    if claim["status"] == NOT_JUDGED or "; " in claim["ours"]:
        return str(claim["why"])
    return f"{claim['ours']} ({claim['why']})" if claim["why"] else str(claim["ours"])


def _theirs(claim: Mapping[str, Any]) -> str:
    """The paper's sides in numbers, or of several runs in how many it holds; a dash where the paper has no numbers."""
    if claim["paper_status"] == NOT_JUDGED:
        return DASH
    return str(claim["paper_why"] if "; " in claim["paper"] else claim["paper"])


def paper_section(result: Result, rows: Sequence[Mapping[str, Any]], links: Sequence[str] = ()) -> str:
    """The paper's numbers beside ours and its claims, as HTML, with links to the reports of several runs."""
    claims = claims_table([result]) if result["claims"] else None
    about = {"title": title_of(result), "not_rerun": result["not_rerun"], "links": links}
    return render("paper.html", numbers=numbers_table(result, rows), claims=claims, **about)


def papers_body(heading: str, results: Sequence[Result], failed: Mapping[str, str], links: Sequence[str] = ()) -> str:
    """Papers' tables one below the other, as HTML, and what became of all their claims."""
    statuses = [claim["status"] for result in results for claim in result["claims"]]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in _STYLES)
    sections = [(result["name"], paper_section(result, result["rows"], links)) for result in results]
    notes = [f"{name} failed: {error}" for name, error in failed.items()]
    return render(
        "papers.html", heading=heading, counts=f"{len(statuses)} claims: {counts}.", notes=notes, sections=sections
    )

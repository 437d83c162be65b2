"""A paper's table beside ours: on the terminal, as Markdown, and as a part of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape as plain
from rich.table import Table

from ..schema.claims import HELD, NOISE, NOT_HELD, NOT_JUDGED, metric_of, parse_claim, show
from .tables import DASH, cell, heading, wide_table

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


class Column(NamedTuple):
    """A metric of a table."""

    metric: str
    beside: bool
    """Whether the paper has numbers of it, which then stand in a column of their own."""


def title_of(result: Result) -> str:
    """The paper's title and the table in it."""
    return f"{TITLES[result['paper']]}, {result['where']}"


def columns_of(result: Result) -> list[Column]:
    """What a table shows: the metrics that the paper gives, and those that its claims are about."""
    theirs = dict.fromkeys(metric for numbers in result["theirs"].values() for metric in numbers)
    claims = (parse_claim(claim["holds"]) for claim in result["claims"])
    ours = dict.fromkeys(reference.metric for claim in claims for reference in claim.references())
    names = list(theirs | ours)[:_MOST_METRICS] or list(_USUAL)
    return [Column(name, name in theirs) for name in names]


def our_number(row: Mapping[str, Any], metric: str) -> float | None:
    """None where it was not measured, or the row has no such metric."""
    try:
        return metric_of(row, metric)
    except ValueError:
        return None


def their_number(theirs: Mapping[str, Mapping[str, float]], label: str, metric: str) -> str:
    """The paper's number for a row, or the range over its runs where ours was one run; empty if it has none."""
    if label in theirs:
        return show(theirs[label][metric]) if metric in theirs[label] else ""
    runs = [name for name in theirs if name.endswith(f": {label}")]
    values = [theirs[name][metric] for name in runs if metric in theirs[name]]
    if not values:
        return ""
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def numbers_table(result: Result) -> Table:
    """Our rows, with the paper's numbers beside them."""
    on = " on the embedded pair" if result["pair"] else ""
    table = _table(f"{result['name']}: {title_of(result)}{on}")
    columns = columns_of(result)
    table.add_column("row", overflow="fold")
    for metric, beside in columns:
        name = metric.replace("_per_", "\nper ").replace("_", "\n").replace(".", "\n")
        table.add_column(name, justify="right")
        if beside:
            table.add_column("paper's", justify="right", style="dim")
    for row in result["rows"]:
        table.add_row(plain(row["label"]), *(text for text, _ in _cells(result, row, columns)))
    return table


def _cells(result: Result, row: Mapping[str, Any], columns: Sequence[Column]) -> list[tuple[str, float | None]]:
    """Texts of a row behind its label, and what ours are sorted by."""
    cells: list[tuple[str, float | None]] = []
    for metric, beside in columns:
        value = our_number(row, metric)
        cells.append((DASH if value is None else show(value), value))
        if beside:
            cells.append((their_number(result["theirs"], row["label"], metric), None))
    return cells


def claims_table(results: Sequence[Result]) -> Table:
    """What the papers claim and what came of it."""
    table = _table("claims")
    if len(results) > 1:
        table.add_column("recipe", overflow="fold")
    for name in ("the paper says", "ours", "the paper's", "verdict"):
        table.add_column(name, overflow="fold")
    for result in results:
        for place, claim in enumerate(result["claims"]):
            first = [plain(result["name"]) if place == 0 else ""] if len(results) > 1 else []
            verdict = f"[{_STYLES[claim['status']]}]{claim['status']}[/]"
            table.add_row(*first, *map(plain, (_said(claim, result), _ours(claim), _theirs(claim))), verdict)
    return table


def markdown(results: Sequence[Result], failed: Mapping[str, str]) -> str:
    """All papers' claims, and below them each table."""
    claims = [claim for result in results for claim in result["claims"]]
    counts = [f"{sum(claim['status'] == status for claim in claims)} {status}" for status in _STYLES]
    lines = ["# The papers' tables, run again", "", f"{len(claims)} claims: {', '.join(counts)}.", ""]
    for name, fault in failed.items():
        lines += [f"**{name} failed:** {_in_a_row(fault)}", ""]
    for paper in dict.fromkeys(result["paper"] for result in results):
        lines += [f"## {TITLES[paper]}", ""]
        for result in (each for each in results if each["paper"] == paper):
            lines += _markdown_of(result)
    return "\n".join(lines) + "\n"


def _markdown_of(result: Result) -> list[str]:
    lines = [f"### {result['name']} ({result['where']})", ""]
    if result["claims"]:
        lines += ["| the paper says | ours | the paper's | verdict |", "| --- | --- | --- | --- |"]
        for claim in result["claims"]:
            texts = (_said(claim, result), _ours(claim), _theirs(claim), claim["status"])
            lines.append(f"| {' | '.join(map(_in_a_row, texts))} |")
        lines.append("")
    columns = columns_of(result)
    heads = [text for metric, beside in columns for text in (metric, "the paper's")[: 1 + beside]]
    lines += [f"| row | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for row in result["rows"]:
        shown = [row["label"], *(text for text, _ in _cells(result, row, columns))]
        lines.append(f"| {' | '.join(map(_in_a_row, shown))} |")
    if result["not_rerun"]:
        lines += ["", f"Not run again: {result['not_rerun']}"]
    return [*lines, ""]


def paper_section(result: Result, rows: Sequence[Mapping[str, Any]]) -> str:
    """The paper's numbers beside ours and its claims, as HTML."""
    columns = columns_of(result)
    head = '<th scope="col" data-sort="text">row</th>'
    for metric, beside in columns:
        head += heading(metric.replace("_", " ")) + (heading("the paper’s") if beside else "")
    body = ""
    for row in rows:
        cells = "".join(cell(text or DASH, value) for text, value in _cells(result, row, columns))
        body += f'<tr><th scope="row">{escape(row["label"])}</th>{cells}</tr>'
    parts = [f"<h3>Beside the paper: {escape(title_of(result))}</h3>"]
    parts.append(wide_table("Ours and the paper's", head, body))
    if result["claims"]:
        names = ("the paper says", "verdict", "ours", "the paper’s")
        head = "".join(f'<th scope="col" data-sort="text">{name}</th>' for name in names)
        body = ""
        for claim in result["claims"]:
            texts = (claim["status"], _ours(claim), _theirs(claim))
            cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
            body += f'<tr><th scope="row">{escape(_said(claim, result))}</th>{cells}</tr>'
        parts.append(wide_table("Claims", head, body))
    if result["not_rerun"]:
        parts.append(f"<p>Not run again: {escape(result['not_rerun'])}</p>")
    return "".join(parts)


def paper_page(result: Result, links: Sequence[str]) -> str:
    """The body of a page about one recipe, with links to the reports of its runs."""
    parts = [f"<h1>{escape(result['name'])}</h1>", paper_section(result, result["rows"])]
    if links:
        listed = "".join(f'<li><a href="{escape(link)}">{escape(link)}</a></li>' for link in links)
        parts.append(f"<h3>Reports of the runs</h3><ul>{listed}</ul>")
    return "".join(parts)


def _table(title: str) -> Table:
    return Table(title=plain(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def _said(claim: Mapping[str, Any], result: Result) -> str:
    """The claim, with its place where that is not the table's own."""
    return claim["says"] if claim["where"] == result["where"] else f"{claim['says']} ({claim['where']})"


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


def _in_a_row(text: str) -> str:
    """Text that does not break a Markdown table's row."""
    return " ".join(text.split()).replace("|", "\\|")

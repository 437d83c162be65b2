"""Findings of `draftsmith doctor` on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from ..tables import Cell, Column, Table, number, number_cell

if TYPE_CHECKING:
    from ....checkpoints.pairs.sides import Diagnosis

_COLOURS = {"fault": "red", "weakness": "yellow", "works": "green", "works but": "yellow", "refused": "red"}
_MEASURES = {
    "top1_accuracy": "top-1 accuracy",
    "overlap": "overlap Σmin(p,q)",
    "top1_agreement": "top-1 agreement",
    "accepted": "accepted",
    "tokens_per_step": "tokens per step",
}
_STAGES = {"record": "in training", "files": "from its files", "own": "target's answers", "decoding": "in decoding"}


def show_pair(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return tables of the facts, the findings and the verdicts of a pair."""
    facts = _wide("compared", "", f"target {diagnosis.target}", f"drafter {diagnosis.drafter}")
    for name, mine, theirs in diagnosis.facts:
        facts.add_row(name, mine, theirs, style=None if mine == theirs else "bold")
    findings = _wide("findings", RichColumn(no_wrap=True), "check", "what", "target", "drafter")
    for one in sorted(diagnosis.findings, key=lambda one: one.severity):
        findings.add_row(Text(one.severity, _COLOURS[one.severity]), one.check, one.what, one.target, one.drafter)
    short = RichColumn(no_wrap=True), RichColumn("verdict", no_wrap=True)
    verdicts = _wide("verdicts", *short, "reasons, and the version of the rules")
    for name, verdict in diagnosis.verdicts.items():
        why = Text("".join(f"{reason}; " for reason in verdict.reasons)).append(diagnosis.consumers[name], "dim")
        verdicts.add_row(name, Text(verdict.outcome, _COLOURS[verdict.outcome]), why)
    return [facts, findings if diagnosis.findings else "nothing differs that matters\n", verdicts]


def show_server(rows: Sequence[tuple[str, float | None, float | None, Sequence[str]]]) -> Table:
    """Return the table of a server's loads: tokens per step, what this engine's results predict, and reasons."""
    cells = [[label, number(reached), number(wanted), "; ".join(reasons)] for label, reached, wanted, reasons in rows]
    return _table("server and this engine", ("load", "tokens per step", "expected", "differences"), cells)


def show_part(found: Mapping[str, Any], console: Console) -> None:
    """Print the measured diagnosis of a drafter, heads or a table."""
    at = f"temperature {found['temperature']:g}"
    console.print(Text(f"\n{found['part']} {found['source']}, decoded with {found['method']} at {at}", "bold"))
    console.print(_stages_table(found["stages"], found["gaps"]).rich())
    for line in found["skipped"]:
        console.print(f"not measured: {line}", style="dim")
    known = [stage for stage in found["stages"] if stage["by_depth"]]
    if known:
        by_head = enumerate(zip_longest(*(stage["by_depth"] for stage in known)), 1)
        rows = [[head, *(number_cell(value, 3) for value in values)] for head, values in by_head]
        console.print(
            _table("top-1 accuracy by head", ("head", *(_STAGES[each["key"]] for each in known)), rows).rich()
        )
    if found["readings"]:
        rows = [
            [each["reading"], "; ".join(each["who"]), " ".join(f"{share:.3f}" for share in each["by_step"])]
            for each in found["readings"]
        ]
        console.print(_table("agreement when fed as", ("reading", "of", "by step"), rows).rich())
    rows = [
        [
            *(cell["name"], f"{cell['examined']:,}", f"{cell['share']:.3f}", _span(cell["interval"])),
            *(f"{cell['rejections_share']:.0%}", f"{cell['excess']:+.0%}"),
        ]
        for cell in found["cells"]
    ]
    headings = ("class of token", "verified", "accepted", "95 % interval", "of all rejections", "beyond average")
    console.print(_table("which drafts are rejected", headings, rows).rich())
    console.print(Text("findings", "bold"))
    for line in _finding_lines(found["findings"]):
        console.print(f"- {line}")


def _stages_table(stages: Sequence[Mapping[str, Any]], gaps: Sequence[Mapping[str, Any]]) -> Table:
    lost = {gap["after"]: gap for gap in gaps}
    rows = []
    for stage in stages:
        gap = lost.get(stage["key"], {})
        change = Cell(f"{gap['lost']:+.3f}" if gap else "", style="bold red" if gap and gap["lost"] >= 0.02 else "")
        measures = [number_cell(stage[name], 3) for name in _MEASURES]
        tokens = f"{stage['tokens']:,}" if stage["tokens"] else ""
        rows.append([stage["description"], tokens, *measures, change, _span(gap.get("interval"))])
    return _table("acceptance by stage", ("stage", "tokens", *_MEASURES.values(), "lost", "99 % interval"), rows)


def _finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for each in findings:
        amount = "not measured" if each["lost"] is None else f"{each['lost']:.3f}"
        amount += f" ({_span(each['interval'])})" if each["interval"] is not None else ""
        kind = "fault" if each["fault"] else "cause"
        yield f"{kind}, {each['cause']}: {amount}: {each['description']}. To do: {each['advice']}."
    if not findings:
        yield "no cause of lost acceptance was found."


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table of cells or texts; the first column is left-aligned."""
    cells = [[each if isinstance(each, Cell) else Cell(str(each)) for each in row] for row in rows]
    texts = ("differences", "of")
    columns = [Column(each, numeric=index > 0 and each not in texts) for index, each in enumerate(headings)]
    return Table(title, columns, cells)


def _wide(title: str, *columns: RichColumn | str) -> RichTable:
    whole = [RichColumn(each, overflow="fold") if isinstance(each, str) else each for each in columns]
    return RichTable(*whole, box=None, title=title, title_justify="left")


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}…{interval[1]:.2f}"

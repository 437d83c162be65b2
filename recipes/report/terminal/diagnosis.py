"""Terminal output of `draftsmith doctor` for target/drafter pairs."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from ..tables import Cell, Column, Table, number_cell

_COLOURS = {"fault": "red", "weakness": "yellow", "works": "green", "works but": "yellow", "refused": "red"}
_STAGES = {"record": "training", "files": "saved artifact", "own": "on-policy", "decoding": "decoding"}


def show_diagnosis(result: Mapping[str, Any], console: Console) -> None:
    """Print the measured stages, the findings and the verdicts of serving engines for a target/drafter pair."""
    if "stages" in result:
        _show_measured(result, console)
    if "variants" in result:
        rows = [
            [each["change"], each["reason"] or number_cell(each["acceptance_length"], 2)] for each in result["variants"]
        ]
        console.print(_table("acceptance length by config", ("config", "acceptance length"), rows))
    show_findings(result["findings"], console)
    if result["verdicts"]:
        table = _wide_table("verdicts", RichColumn(no_wrap=True), RichColumn("verdict", no_wrap=True), "reasons")
        for name, verdict in result["verdicts"].items():
            reasons = Text("".join(f"{reason}; " for reason in verdict["reasons"])).append(verdict["reader"], "dim")
            table.add_row(name, Text(verdict["outcome"], _COLOURS[verdict["outcome"]]), reasons)
        console.print(table)


def show_findings(findings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of findings and their remedies, with faults first."""
    if not findings:
        console.print("no findings\n")
        return
    table = _wide_table("findings", RichColumn(no_wrap=True), "check", "issue", "target", "drafter", "acceptance lost")
    for one in sorted(findings, key=lambda one: one["severity"]):
        loss = "" if one["lost"] is None else f"{one['lost']:.3f}"
        loss += f" ({_span(one['interval'])})" if one["interval"] is not None else ""
        problem = one["what"] + (f" Remedy: {one['advice']}." if one["advice"] else "")
        table.add_row(
            Text(one["severity"], _COLOURS[one["severity"]]), one["check"], problem, one["target"], one["drafter"], loss
        )
    console.print(table)


def _show_measured(result: Mapping[str, Any], console: Console) -> None:
    at = f"temperature {result['temperature']:g}"
    console.print(Text(f"\n{result['part']} {result['source']}, decoded with {result['method']} at {at}", "bold"))
    gaps, rows = {gap["after"]: gap for gap in result["gaps"]}, []
    for stage in result["stages"]:
        gap = gaps.get(stage["key"], {})
        numbers = [number_cell(stage[name], 3) for name in ("value", "tokens_per_step")]
        change = [f"{gap['lost']:+.3f}" if gap else "", _span(gap.get("interval"))]
        rows.append([stage["description"], f"{stage['tokens'] or ''}", *numbers, *change])
    headings = ("stage", "tokens", "acceptance", "tokens per step", "lost", "99 % interval")
    console.print(_table("acceptance by stage", headings, rows))
    for line in result["skipped"]:
        console.print(f"not measured: {line}", style="dim")
    known = [stage for stage in result["stages"] if stage["by_depth"]]
    if known:
        by_head = enumerate(zip_longest(*(stage["by_depth"] for stage in known)), 1)
        rows = [[head, *(number_cell(value, 3) for value in values)] for head, values in by_head]
        console.print(_table("top-1 accuracy by head", ("head", *(_STAGES[each["key"]] for each in known)), rows))


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> RichTable:
    cells = [[each if isinstance(each, Cell) else Cell(str(each)) for each in row] for row in rows]
    columns = [Column(each, numeric=index > 0) for index, each in enumerate(headings)]
    return Table(title, columns, cells).rich()


def _wide_table(title: str, *columns: RichColumn | str) -> RichTable:
    whole = [RichColumn(each, overflow="fold") if isinstance(each, str) else each for each in columns]
    return RichTable(*whole, box=None, title=title, title_justify="left")


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}…{interval[1]:.2f}"

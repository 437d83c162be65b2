"""A diagnosis on the terminal: stages, classes of tokens, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.text import Text

from ..tables import Cell, Column, Table, number_cell

_MEASURES = {
    "top1_accuracy": "top-1 accuracy",
    "overlap": "overlap Σmin(p,q)",
    "top1_agreement": "same best",
    "accepted": "accepted",
    "tokens_per_step": "tokens per step",
}


def show_part(found: Mapping[str, Any], console: Console) -> None:
    """One part of a diagnosis, as `diagnose` describes it."""
    at = f"temperature {found['temperature']:g}"
    console.print(Text(f"\n{found['part']} {found['source']}, decoded with {found['method']} at {at}", "bold"))
    console.print(_stages_table(found["stages"], found["gaps"]).rich())
    for line in found["skipped"]:
        console.print(f"not measured: {line}", style="dim")
    if any(stage["by_depth"] for stage in found["stages"]):
        console.print(_heads_table(found["stages"]).rich())
    console.print(_cells_table(found["cells"]).rich())
    console.print(Text("verdict", "bold"))
    for line in _finding_lines(found["findings"]):
        console.print(f"- {line}")


def _stages_table(stages: Sequence[Mapping[str, Any]], gaps: Sequence[Mapping[str, Any]]) -> Table:
    """The stages one below the other, with what is lost on the way to each."""
    lost = {gap["after"]: gap for gap in gaps}
    rows = []
    for stage in stages:
        gap = lost.get(stage["key"], {})
        change = f"{gap['lost']:+.3f}" if gap else ""
        cells = [Cell(stage["description"]), Cell(f"{stage['tokens']:,}" if stage["tokens"] else "")]
        cells += [number_cell(stage[name], 3) for name in _MEASURES]
        rows.append([*cells, Cell(change, style="bold red" if gap and gap["lost"] >= 0.02 else ""),
                     Cell(_span(gap.get("interval")))])  # fmt: skip
    return _table("where acceptance goes", ("stage", "tokens", *_MEASURES.values(), "lost", "99 % interval"), rows)


def _heads_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """Each head's accuracy by stage, and what decoding accepts of its drafts."""
    known = [stage for stage in stages if stage["by_depth"]]
    names = {"record": "in training", "files": "from its files", "own": "target's own", "decoding": "in decoding"}
    by_head = zip_longest(*(stage["by_depth"] for stage in known))
    rows = [[Cell(str(head)), *(number_cell(value, 3) for value in values)] for head, values in enumerate(by_head, 1)]
    headings = ("head", *(names[stage["key"]] for stage in known))
    return _table("head by head: how often its best guess is right", headings, rows)


def _cells_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("class of token", "tried", "accepted", "95 % interval", "of all rejections", "beyond its due")
    rows = []
    for cell in cells:
        shares = (f"{cell['rejections_share']:.0%}", f"{cell['excess']:+.0%}")
        texts = (cell["name"], f"{cell['examined']:,}", f"{cell['share']:.3f}", _span(cell["interval"]), *shares)
        rows.append([*map(Cell, texts)])
    return _table("which drafts are refused", headings, rows)


def _finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for each in findings:
        amount = "not measured" if each["lost"] is None else f"{each['lost']:.3f}"
        if each["interval"] is not None:
            amount += f" ({_span(each['interval'])})"
        kind = "fault" if each["fault"] else "cause"
        yield f"{kind}, {each['cause']}: {amount}: {each['description']}. To do: {each['advice']}."
    if not findings:
        yield "no cause of lost acceptance was found."


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    return Table(title, [Column(heading, numeric=index > 0) for index, heading in enumerate(headings)], rows)


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}…{interval[1]:.2f}"

"""A diagnosis on the terminal: stages, differences, classes of tokens, examples, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import number
from .trace import visible

_MEASURES = {
    "top1_accuracy": "top-1\naccuracy",
    "overlap": "overlap\nΣmin(p,q)",
    "top1_agreement": "same\nbest",
    "accepted": "accep-\nted",
    "tokens_per_step": "tokens\nper step",
}


def show_part(found: Mapping[str, Any], console: Console) -> None:
    """One part of a diagnosis, as `diagnose` describes it."""
    at = f"temperature {found['temperature']:g}"
    console.print(Text(f"\n{found['part']} {found['source']}, decoded with {found['method']} at {at}", "bold"))
    console.print(_stages_table(found["stages"], found["gaps"]))
    for line in found["skipped"]:
        console.print(f"not measured: {line}", markup=False, style="dim")
    for line in _difference_lines(found["differences"]):
        console.print(line)
    if any(stage["by_depth"] for stage in found["stages"]):
        console.print(_heads_table(found["stages"]))
    console.print(_cells_table(found["cells"]))
    for line in _example_lines(found["cells"][:2]):
        console.print(line)
    decoding = found["decoding"]
    predicted = decoding["predicted"]
    replay = "" if predicted is None else f"; predicted by replay of the target's own answers: {predicted:.2f}"
    console.print(f"tokens per step: {decoding['tokens_per_step']:.2f}{replay}", markup=False)
    console.print(Text("verdict", "bold"))
    for line in _finding_lines(found["findings"]):
        console.print(f"- {line}", markup=False)


def _stages_table(stages: Sequence[Mapping[str, Any]], gaps: Sequence[Mapping[str, Any]]) -> Table:
    """The stages one below the other, with what is lost on the way to each."""
    table = _table("where acceptance goes", ("stage", "tokens", *_MEASURES.values(), "lost", "99 %\ninterval"))
    lost = {gap["after"]: gap for gap in gaps}
    for stage in stages:
        gap = lost.get(stage["key"])
        change = Text("" if gap is None else f"{gap['lost']:+.3f}")
        if gap is not None and gap["lost"] >= 0.02:
            change.stylize("bold red")
        tokens = f"{stage['tokens']:,}" if stage["tokens"] else ""
        measures = [number(stage[name], 3) for name in _MEASURES]
        span = _span(None if gap is None else gap["interval"])
        table.add_row(Text(stage["description"]), tokens, *measures, change, span)
    return table


def _heads_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """Each head's accuracy by stage, and what decoding accepts of its drafts."""
    known = [stage for stage in stages if stage["by_depth"]]
    names = {"record": "in\ntraining", "files": "from its\nfiles", "own": "target's\nown", "decoding": "in de-\ncoding"}
    headings = ("head", *(names[stage["key"]] for stage in known))
    table = _table("head by head: how often its best guess is right", headings)
    for head in range(max(len(stage["by_depth"]) for stage in known)):
        values = [stage["by_depth"][head] if head < len(stage["by_depth"]) else None for stage in known]
        table.add_row(str(head + 1), *(number(value, 3) for value in values))
    return table


def _cells_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("class of token", "tried", "accepted", "95 %\ninterval", "of all\nrejections", "beyond\nits due")
    table = _table("which drafts are refused", headings)
    for cell in cells:
        shares = (f"{cell['rejections_share']:.0%}", f"{cell['excess']:+.0%}")
        table.add_row(cell["name"], f"{cell['examined']:,}", f"{cell['share']:.3f}", _span(cell["interval"]), *shares)
    return table


def _example_lines(cells: Sequence[Mapping[str, Any]]) -> Iterable[Text]:
    """Refused tokens of the costliest classes, with the text before them."""
    for cell in cells:
        if cell["examples"]:
            yield Text(f"refused, {cell['name']}:", "bold")
        for each in cell["examples"]:
            line = Text("  …" + visible(each["before"]), "dim")
            line.append(f"[-{visible(each['drafted']) or '◌'}-]", "red")
            line.append(f"{{+{visible(each['written']) or '◌'}+}}", "bold blue")
            odds = f"drafted: source {each['source_drafted']:.2f}, target {each['target_drafted']:.2f}; "
            yield line.append(f"  {odds}target's own {each['target_written']:.2f}", "dim")


def _difference_lines(differences: Sequence[Mapping[str, Any]]) -> Iterable[Text]:
    """How training and evaluation write conversations, line by line, with ids where they part."""
    for each in differences:
        yield Text(f"differs: {each['what']}: trained {each['trained']}, evaluated {each['evaluated']}")
        example = each["example"]
        if example is not None:
            yield Text(f"  {example['conversation']}, from id {example['index']} on:", "dim")
            for side in ("trained", "evaluated"):
                pairs = zip(example[side]["ids"], example[side]["tokens"], strict=True)
                yield Text(f"    {side:9} " + " ".join(f"{index}:{visible(token)}" for index, token in pairs), "dim")


def _finding_lines(findings: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for each in findings:
        amount = "not measured" if each["lost"] is None else f"{each['lost']:.3f}"
        if each["interval"] is not None:
            amount += f" ({_span(each['interval'])})"
        kind = "fault" if each["fault"] else "cause"
        yield f"{kind}, {each['cause']}: {amount}: {each['description']}. To do: {each['advice']}."
    if not findings:
        yield "no cause of lost acceptance was found."


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return table


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}…{interval[1]:.2f}"

"""A diagnosis on the terminal: stages, differences, types, cells, examples, and what it all comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .trace import visible

_FEWEST, _LARGE = 5, 0.05
"""Tokens of a cell that is shown, or share of all rejections."""
_CELLS = 8
"""Of a split, shown at most."""
_MEASURES = {
    "top1_accuracy": "top-1\naccuracy",
    "overlap": "overlap\nΣmin(p,q)",
    "top1_agreement": "same\nbest",
    "accepted": "accep-\nted",
    "tokens_per_step": "tokens\nper step",
}

_HEADS = {
    "record": "in\ntraining",
    "export": "from its\nfiles",
    "target": "this\ntarget",
    "written": "training's\ntemplate",
    "corpus": "real\nanswers",
    "within": "own, in\na block",
    "own": "target's\nown",
    "warped": "warped",
    "served": "as\nserved",
    "decoding": "in de-\ncoding",
}


def show_part(told: Mapping[str, Any], console: Console) -> None:
    """One part of a diagnosis, as `diagnose` describes it."""
    at = f"temperature {told['temperature']:g}"
    console.print(Text(f"\n{told['part']} {told['source']}, decoded with {told['method']} at {at}", "bold"))
    if told["counted_on"]:
        console.print(f"counted on {told['counted_on']}", markup=False)
    console.print(stages_table(told["stages"], told["gaps"]))
    for line in told["skipped"]:
        console.print(f"not measured: {line}", markup=False, style="dim")
    for line in difference_lines(told["differences"]):
        console.print(line, markup=False)
    if told["types"]:
        console.print(types_table(told["types"]))
    if told["heads"]:
        console.print(heads_table(told["heads"]))
    console.print(cells_table(told["cells"]))
    for line in example_lines(told["cells"]):
        console.print(line)
    decoding = told["decoding"]
    foretold = (
        "" if decoding["foretold"] is None else f"; replay of the target's own answers: {decoding['foretold']:.2f}"
    )
    console.print(f"tokens per step: {decoding['tokens_per_step']:.2f}{foretold}", markup=False)
    for tree in told["trees"]:
        console.print(Text(tree_line(tree), "bold"))
        console.print(tree_table(tree))
        ranks = {name: rows for name, rows in tree["cells"].items() if name.startswith("head's rank")}
        if ranks:
            console.print(cells_table(ranks))
    console.print(Text(f"verdict: {told['headline']}", "bold"))
    for line in told["sentences"]:
        console.print(f"- {line}", markup=False)
    for line in worst_lines(told["cells"], decoding):
        console.print(f"- {line}", markup=False)


def stages_table(stages: Sequence[Mapping[str, Any]], gaps: Sequence[Mapping[str, Any]]) -> Table:
    """The stages one below the other, with what is lost on the way to each."""
    table = _table("where acceptance goes", ("stage", "tokens", *_MEASURES.values(), "lost", "99 %\ninterval"))
    lost = {gap["after"]: gap for gap in gaps}
    for stage in stages:
        gap = lost.get(stage["key"])
        cells = [_number(stage[name]) for name in _MEASURES]
        change = "" if gap is None else f"{gap['lost']:+.3f}"
        style = "bold red" if gap is not None and gap["lost"] >= 0.02 else None
        tokens = f"{stage['tokens']:,}" if stage["tokens"] else ""
        table.add_row(
            Text(stage["says"]),
            tokens,
            *cells,
            Text(change, style or ""),
            _span(None if gap is None else gap["interval"]),
        )
    return table


def heads_table(heads: Sequence[Mapping[str, Any]]) -> Table:
    """Each head's accuracy by stage: as training measured it, as it is on the way, as decoding accepts."""
    keys = list(dict.fromkeys(key for head in heads for key in head["stages"]))
    headings = ("head", *(_HEADS.get(key, key) for key in keys), "tried in\ndecoding")
    table = _table("head by head: how often its best guess is right", headings)
    for head in heads:
        cells = (_number(head["stages"].get(key)) for key in keys)
        table.add_row(str(head["head"]), *cells, f"{head['examined']:,}")
    return table


def tree_line(tree: Mapping[str, Any]) -> str:
    """What a tree came to, in a line."""
    foretold = "" if tree["foretold"] is None else f", {tree['foretold']:.2f} by replay of the same text"
    nodes = "" if tree["nodes_per_step"] is None else f", {tree['nodes_per_step']:.1f} nodes"
    at = f"{tree['label']} at temperature {tree['temperature']:g}"
    return f"{at}: {tree['tokens_per_step']:.2f} tokens per step{foretold}{nodes}"


def tree_table(tree: Mapping[str, Any]) -> Table:
    """A tree depth by depth: what its candidates are worth at every place, and what decoding accepts."""
    headings = (
        "depth",
        "in\ntraining",
        "best\nguess",
        "candi-\ndates",
        "one of\nthem",
        "tried in\ndecoding",
        "accep-\nted",
    )
    table = _table("a tree, depth by depth", headings)
    for row in tree["depths"]:
        shares = (_number(row["trained"]), _number(row["best"]))
        width = "–" if row["candidates"] is None else str(row["candidates"])
        more = (width, _number(row["among"]), f"{row['examined']:,}", _number(row["accepted"]))
        table.add_row(str(row["depth"]), *shares, *more)
    return table


def types_table(types: Sequence[Mapping[str, Any]]) -> Table:
    """The same weights in other types."""
    table = _table("the target's own answers, by type of the weights", ("type", *_MEASURES.values()))
    for row in types:
        name = f"{row['type']} (served)" if row["served"] else row["type"]
        table.add_row(Text(name), *(_number(row.get(key)) for key in _MEASURES))
    return table


def cells_table(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """The tokens tried, by split, those first that cost most."""
    headings = ("tokens tried, by", "", "tried", "accepted", "95 %\ninterval", "of all\nrejections", "beyond\nits due")
    table = _table("which drafts are refused", headings, left=2)
    for split, rows in cells.items():
        shown = [row for row in rows if row["examined"] >= _FEWEST or row["rejections_share"] >= _LARGE][:_CELLS]
        for place, row in enumerate(shown):
            counts = (f"{row['examined']:,}", f"{row['share']:.3f}", _span(row["interval"]))
            shares = (f"{row['rejections_share']:.0%}", f"{row['excess']:+.0%}")
            table.add_row("" if place else split, Text(row["name"]), *counts, *shares)
        left = len(rows) - len(shown)
        if left:
            said = f"and {left} more" if shown else f"{left} of fewer than {_FEWEST} tokens each"
            table.add_row("" if shown else split, Text(said, "dim"))
    return table


def worst_cells(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first cell of each split that has more refused than its due, the costliest first."""
    first = [(split, rows[0]) for split, rows in cells.items() if rows and rows[0]["excess"] > 0]
    return sorted(first, key=lambda pair: -pair[1]["excess"])


def example_lines(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[Text]:
    """Refused tokens of the costliest class of tokens, with the text before them."""
    rows = [row for row in cells.get("token class", []) if row["examples"]][:2]
    for row in rows:
        yield Text(f"refused, {row['name']}:", "bold")
        for each in row["examples"]:
            line = Text("  …" + visible(each["before"]), "dim")
            line.append(f"[-{visible(each['drafted']) or '◌'}-]", "red")
            line.append(f"{{+{visible(each['said']) or '◌'}+}}", "bold blue")
            odds = f"drafted: source {each['source_drafted']:.2f}, target {each['target_drafted']:.2f}; "
            line.append(f"  {odds}target's own {each['target_said']:.2f}", "dim")
            yield line


def worst_lines(cells: Mapping[str, Sequence[Mapping[str, Any]]], decoding: Mapping[str, Any]) -> list[str]:
    """The cells that are worse than the average for certain and hold a twentieth of all rejections beyond their due."""
    if not decoding["rejections"]:
        return []
    rate = decoding["accepted"] / decoding["examined"]
    lines = []
    for split, row in worst_cells(cells):
        if row["excess"] >= 0.05 and row["interval"] is not None and row["interval"][1] < rate:
            share, due = row["rejections_share"], row["rejections_share"] - row["excess"]
            said = f"most costly {split}: {row['name']}: {row['share']:.2f} of {row['examined']:,} accepted, "
            lines.append(f"{said}{share:.0%} of all rejections where {due:.0%} would be its due")
    return lines


def difference_lines(differences: Sequence[Mapping[str, Any]]) -> Iterable[Text]:
    """How training and evaluation write conversations, line by line, with ids where they part."""
    for each in differences:
        mark = "differs" if each["matters"] else "note"
        yield Text(f"{mark}: {each['what']}: trained {each['trained']}, evaluated {each['evaluated']}")
        example = each["example"]
        if example is not None:
            yield Text(f"  {example['conversation']}, from id {example['place']} on:", "dim")
            for side in ("trained", "evaluated"):
                pairs = zip(example[side]["ids"], example[side]["tokens"], strict=True)
                yield Text(f"    {side:9} " + " ".join(f"{number}:{visible(token)}" for number, token in pairs), "dim")


def _table(title: str, headings: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold", no_wrap=place >= left)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}…{interval[1]:.2f}"

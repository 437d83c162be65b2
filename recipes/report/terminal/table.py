"""A bigram table's statistics on the terminal: two lines after counting, all of them for `show`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.table.facts import AT_LEAST
from ...session.terminal import console, gigabytes, log
from ..tables import Cell, Column, Table


def log_facts(facts: Mapping[str, Any]) -> None:
    """Log the size and the most extreme correlations of a table."""
    log(
        f"table: {facts['entries']:,} different pairs of {facts['tokens']:,} tokens "
        f"({facts['density']:.3%} of all possible pairs), {gigabytes(facts['bytes'])}"
    )
    extremes = {name: facts[key][0] for name, key in (("highest", "highest_r"), ("lowest", "lowest_r")) if facts[key]}
    if extremes:
        log("table: " + ", ".join(f"{name} r {pair['r']:.4g} of {_pair(pair)}" for name, pair in extremes.items()))


def show_facts(folder: Path, manifest: Manifest, facts: Mapping[str, Any], hint: str | None) -> None:
    """Print the statistics of a table; `hint` is printed below if there are pairs of extreme correlation."""
    rows = [[Cell(name), Cell(value)] for name, value in _rows(manifest, facts)]
    console().print(Table(f"table: {folder}", [Column("", numeric=False)] * 2, rows).rich())
    columns = [Column("pair", numeric=False), *map(Column, ("seen", "expected", "r"))]
    extremes = {"highest r": facts["highest_r"], "lowest r": facts["lowest_r"]}
    for title, pairs in extremes.items():
        cells = [(_pair(one), f"{one['count']:,}", f"{one['expected']:,.1f}", f"{one['r']:.4g}") for one in pairs]
        if pairs:
            console().print(Table(title, columns, [[*map(Cell, texts)] for texts in cells]).rich())
    if hint is not None and any(extremes.values()):
        console().print(hint)


def _rows(manifest: Manifest, facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("vocabulary", f"{facts['vocab_size']:,} tokens, {facts['tokens_never_seen']:,} of them never seen"),
        ("tokens counted", f"{facts['tokens']:,}"),
        ("pairs", f"{facts['pairs']:,}, {facts['entries']:,} different ones ({facts['density']:.3%} of all possible)"),
        ("rows", f"{facts['rows_seen']:,} tokens have successors, at most {facts['widest_row']:,} different ones"),
        ("entries by count", ", ".join(f"{bin_}: {n:,}" for bin_, n in facts["entries_by_count"].items())),
        ("size", gigabytes(facts["bytes"])),
    ]
    if not facts["highest_r"] and not facts["lowest_r"]:
        rows.append(("extreme r", f"none: no pair was seen or is expected {AT_LEAST} times"))
    data = manifest.data
    corpora = ", ".join(str(each.get("source")) for each in data.get("corpus", {}).get("sources", []))
    pairs = data["source"].get("pairs") if isinstance(data.get("source"), dict) else None
    counted = ("conversations", "held_out", "documents", "tokens")
    numbers = [f"{data[key]:,} {key.replace('_', ' ')}" for key in counted if key in data]
    rows.append(("counted from", "; ".join(filter(None, [corpora or "unknown data", ", ".join(numbers), pairs]))))
    return rows


def _pair(pair: Mapping[str, Any]) -> str:
    ids = (pair["left"], pair["right"])
    # padding of a target's embedding has no text
    left, right = (text or f"#{token}" for text, token in zip(pair.get("texts") or ("", ""), ids, strict=True))
    return f"{left} {right}"

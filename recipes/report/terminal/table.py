"""A table's report on the terminal: a line when it is made, all of it when it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.manifest import Manifest
from ....checkpoints.table.report import AT_LEAST
from ...session.terminal import console, gigabytes, log
from ..tables import Cell, Column, Table


def log_report(report: Mapping[str, Any]) -> None:
    """Sizes, mass and the most extreme correlation, in two lines."""
    mass = "" if report["pruning"] is None else f", {report['mass']:.1%} of all pairs seen, margins kept whole"
    log(
        f"table: {report['entries']:,} different pairs of {report['tokens']:,} tokens "
        f"({report['density']:.3%} of all there could be{mass}), {gigabytes(report['bytes'])}"
    )
    extremes = {name: report[key][0] for name, key in (("highest", "highest_r"), ("lowest", "lowest_r")) if report[key]}
    if extremes:
        log("table: " + ", ".join(f"{name} r {pair['r']:.4g} of {_pair(pair)}" for name, pair in extremes.items()))


def show_report(folder: Path, manifest: Manifest, report: Mapping[str, Any], hint: str | None) -> None:
    """Everything about a table, on standard output; `hint` says why tokens have no texts, where they have none."""
    facts = [[Cell(name), Cell(value)] for name, value in _facts(manifest, report)]
    console().print(Table(f"table: {folder}", [Column("", numeric=False)] * 2, facts).rich())
    columns = [Column("pair", numeric=False), *map(Column, ("seen", "expected", "r"))]
    extremes = {"highest r": report["highest_r"], "lowest r": report["lowest_r"]}
    for title, pairs in extremes.items():
        cells = [(_pair(one), f"{one['count']:,}", f"{one['expected']:,.1f}", f"{one['r']:.4g}") for one in pairs]
        if pairs:
            console().print(Table(title, columns, [[*map(Cell, texts)] for texts in cells]).rich())
    if hint is not None and any(extremes.values()):
        console().print(hint)


def _facts(manifest: Manifest, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("vocabulary", f"{report['vocab_size']:,} tokens, {report['tokens_never_seen']:,} of them never seen"),
        ("tokens counted", f"{report['tokens']:,}"),
        ("pairs", f"{report['pairs']:,}, {report['entries']:,} different ones ({report['density']:.3%} of all)"),
        ("rows", f"{report['rows_seen']:,} tokens were followed by another, one of them by {report['widest_row']:,}"),
        ("seen so often", ", ".join(f"{bin_}: {n:,}" for bin_, n in report["entries_by_count"].items())),
        ("size", gigabytes(report["bytes"])),
    ]
    if report["pruning"] is not None:
        options = ", ".join(f"{key} {value}" for key, value in report["pruning"].items() if value is not None)
        kept = f"{report['mass']:.2%} of all pairs kept ({options}); the margins and r are those of the whole counts"
        facts.append(("pruned", kept))
    if not report["highest_r"] and not report["lowest_r"]:
        facts.append(("extreme r", f"none to tell from chance: no pair was seen or expected {AT_LEAST} times"))
    for part in manifest.data.get("parts", [manifest.data]):
        facts.append(("counted from", _source(part)))
    return facts


def _source(data: Mapping[str, Any]) -> str:
    """Where the counts of a table, or of a part of it, come from."""
    corpora = ", ".join(str(each.get("source")) for each in data.get("corpus", {}).get("sources", []))
    pairs = data["source"].get("pairs") if isinstance(data.get("source"), dict) else None
    counted = ("conversations", "held_out", "documents", "tokens")
    numbers = [f"{data[key]:,} {key.replace('_', ' ')}" for key in counted if key in data]
    return "; ".join(filter(None, [corpora or data.get("table", "unknown data"), ", ".join(numbers), pairs]))


def _pair(pair: Mapping[str, Any]) -> str:
    ids = (pair["left"], pair["right"])
    # padding of a target's embedding has no text
    left, right = (text or f"#{token}" for text, token in zip(pair.get("texts") or ("", ""), ids, strict=True))
    return f"{left} {right}"

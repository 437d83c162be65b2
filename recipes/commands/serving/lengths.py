"""`draftsmith tune --engine`: how many tokens a serving engine should draft under each load, or none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ....decode.evaluation.tuning.lengths import DraftLengths
from ....decode.evaluation.tuning.tuner import tune
from ...report.tables import DASH, Cell, Column, Table, number
from ...schema.results import BENCH, load_results
from ...schema.serving import BenchRecipe
from ...session.terminal import console
from .engines import measure_engine

MAX_TOKENS = 5
"""Maximum number of draft tokens if the export does not limit it."""
Commands = Callable[[int | None], list[list[str]]]
"""Commands of the engine with so many draft tokens, and without drafts."""


def tune_lengths(
    recipe: BenchRecipe, engine: str, commands: Commands, most: int, more: Sequence[str], stem: str
) -> dict[str, Any]:
    """Measure, choose, print and write. Measurements are kept next to the results, and reused.

    Args:
        most: maximum number of draft tokens.
        more: more arguments of the engine.
        stem: path of the engine's log files, without suffix.

    Raises:
        ValueError: The engine reports no acceptance by position.
    """
    out = Path(recipe.out)

    def measure(tokens: int) -> list[dict[str, Any]]:
        own = recipe.model_copy(update={"out": str(out.with_suffix(f".{tokens}.json"))})
        if not _is_measured(own):
            measure_engine(own, commands(tokens), more, f"{stem}-{tokens}")
        rows = load_results(own.out, BENCH)["methods"]
        return [row | {"plain_ms": plain["ms_per_token"]} for row, plain in zip(rows[::2], rows[1::2], strict=True)]

    backend, loads, chosen = DraftLengths(most, measure), [], {}
    for key, ranked in tune(backend).items():
        load = backend.loads[key]
        for each in ranked:
            if each.setting and each.measured is not None:
                measured = {"measured": each.measured.speedup, "interval": each.measured.interval}
                load["lengths"][each.setting - 1] |= measured
        loads.append(load | {"best": ranked[0].setting})
        drafting, plain = commands(ranked[0].setting or None)
        chosen[str(ranked[0].setting)] = shlex.join([*(drafting if ranked[0].setting else plain), *more])
    results: dict[str, Any] = {"kind": "lengths", "engine": engine, "recipe": recipe.model_dump(mode="json")}
    results |= {"loads": loads, "commands": chosen}
    atomic_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
    console().print(length_table(results).rich())
    for load in loads:
        console().print(f"{load['label']}: {chosen[str(load['best'])]}", soft_wrap=True)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def max_draft_tokens(export: Path | str) -> int:
    """Return the maximum number of draft tokens of an export; Medusa heads draft one token each."""
    manifest = load_manifest(Path(export).expanduser())
    assert manifest.export is not None
    heads = manifest.shapes.get("num_heads") if manifest.export["format"].startswith("medusa") else None
    return min(MAX_TOKENS, heads or MAX_TOKENS)


def _is_measured(recipe: BenchRecipe) -> bool:
    """Return whether the results of a recipe are there, at whatever addresses the engine listened."""
    path, places = Path(recipe.out), {"server": "", "baseline": ""}
    return path.is_file() and load_results(path, BENCH)["recipe"] | places == recipe.model_dump(mode="json") | places


def length_table(results: Mapping[str, Any]) -> Table:
    """Return the speedup of each number of draft tokens by load: predicted, and measured where it was."""
    deepest = max(len(load["lengths"]) for load in results["loads"])
    columns = [Column("load", numeric=False), Column("best", "tokens")]
    columns += [Column(f"{tokens} drafted", "×") for tokens in range(1, deepest + 1)]
    rows = []
    for load in results["loads"]:
        best = load["best"]
        cells = [_length_cell(length, length["tokens"] == best) for length in load["lengths"]]
        cells += [Cell(DASH)] * (deepest - len(cells))
        rows.append([Cell(load["label"]), Cell(str(best) if best else "none"), *cells])
    return Table(f"{results['engine']}: speedup by draft tokens, predicted (measured)", columns, rows)


def _length_cell(length: Mapping[str, Any], best: bool) -> Cell:
    measured = "" if length.get("measured") is None else f" ({number(length['measured'])})"
    return Cell(f"{number(length['speedup'])}{measured}", length["speedup"], style="bold" if best else "")

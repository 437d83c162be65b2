"""`draftsmith tune --engine`: find the best number of draft tokens for a serving engine at each concurrency."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ....decode.evaluation.tuning.tuner import tune_lengths
from ...report.tables import Cell, Column, Table, number_cell
from ...schema.results import BENCH, load_results
from ...schema.serving import BenchRecipe
from ...session.terminal import console
from .engines import measure_engine

MAX_TOKENS = 5
"""Maximum number of draft tokens if the export does not limit it."""
Commands = Callable[[int | None], list[list[str]]]
"""Function that maps a number of draft tokens to the engine's commands with and without speculative decoding."""


def run_tune_lengths(
    recipe: BenchRecipe, engine: str, commands: Commands, most: int, more: Sequence[str], stem: str
) -> dict[str, Any]:
    """Measure each number of draft tokens, print the best one for each concurrency, and write the results.

    Finished measurements are reused. `most` is the maximum number of draft tokens, `more` are additional arguments of
    the engine, and `stem` is the path of the log files without suffix.
    """
    out = Path(recipe.out)

    def measure(tokens: int) -> list[dict[str, Any]]:
        own = recipe.model_copy(update={"out": str(out.with_suffix(f".{tokens}.json"))})
        if not _is_measured(own):
            measure_engine(own, commands(tokens), more, f"{stem}-{tokens}")
        return [row for row in load_results(own.out, BENCH)["methods"] if row["method"] == "server"]

    by_length, loads, chosen = tune_lengths(measure, most), [], {}
    for rows in zip(*by_length.values(), strict=True):
        metrics = ("tokens_per_step", "speedup", "speedup_interval")
        lengths = [
            {"tokens": tokens} | {key: row[key] for key in metrics} for tokens, row in zip(by_length, rows, strict=True)
        ]
        fastest = max(lengths, key=lambda each: each["speedup"] or 0)
        best = fastest["tokens"] if (fastest["speedup"] or 0) > 1 else 0
        loads.append({key: rows[0][key] for key in ("label", "concurrency")} | {"lengths": lengths, "best": best})
        drafting, plain = commands(best or None)
        chosen[str(best)] = shlex.join([*(drafting if best else plain), *more])
    results: dict[str, Any] = {"kind": "lengths", "engine": engine, "recipe": recipe.model_dump(mode="json")}
    results |= {"loads": loads, "commands": chosen}
    atomic_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
    console().print(length_table(results).rich())
    for load in loads:
        console().print(f"{load['label']}: {chosen[str(load['best'])]}", soft_wrap=True)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def max_draft_tokens(export: Path | str) -> int:
    """Return the maximum number of draft tokens for an export: the heads of Medusa, or the block of DFlash."""
    manifest = load_manifest(Path(export).expanduser())
    assert manifest.export is not None
    form, heads = manifest.export["format"], manifest.shapes.get("num_heads")
    if form == "dflash" and heads:  # one forward drafts the whole block
        return int(heads)
    return min(MAX_TOKENS, heads or MAX_TOKENS) if form.startswith("medusa") else MAX_TOKENS


def _is_measured(recipe: BenchRecipe) -> bool:
    """Check if results of the same recipe exist, ignoring the URLs of the servers."""
    path, places = Path(recipe.out), {"server": "", "baseline": ""}
    return path.is_file() and load_results(path, BENCH)["recipe"] | places == recipe.model_dump(mode="json") | places


def length_table(results: Mapping[str, Any]) -> Table:
    """Return a table of the speedup for each concurrency and number of draft tokens."""
    columns = [Column("load", numeric=False), Column("best", "tokens")]
    columns += [Column(f"{length['tokens']} drafted", "×") for length in results["loads"][0]["lengths"]]
    rows = [
        [
            Cell(load["label"]),
            Cell(str(load["best"] or "none")),
            *(number_cell(each["speedup"]) for each in load["lengths"]),
        ]
        for load in results["loads"]
    ]
    return Table(f"{results['engine']}: speedup by draft tokens", columns, rows)

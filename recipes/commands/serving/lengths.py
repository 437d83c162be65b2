"""`draftsmith tune --engine`: how many tokens a serving engine should draft under each load, or none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ....decode.evaluation.tuning.lengths import DraftLengths
from ....decode.evaluation.tuning.tuner import tune
from ...report.served import length_table, load_name, load_served
from ...schema.serving import ServedRecipe
from ...session.terminal import console
from .engines import measure_engine

MAX_TOKENS = 5
"""Maximum number of draft tokens if the export does not limit it."""
Commands = Callable[[int | None], list[list[str]]]
"""Commands of the engine with so many draft tokens, and without drafts."""


def tune_lengths(
    recipe: ServedRecipe, engine: str, commands: Commands, most: int, more: Sequence[str], stem: str
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
        found: list[dict[str, Any]] = load_served(Path(own.out))["loads"]
        return found

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
        console().print(f"{load_name(load)}: {chosen[str(load['best'])]}", soft_wrap=True)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def max_draft_tokens(export: Path | str) -> int:
    """Return the maximum number of draft tokens of an export; Medusa heads draft one token each."""
    manifest = load_manifest(Path(export).expanduser())
    assert manifest.export is not None
    heads = manifest.shapes.get("num_heads") if manifest.export["format"].startswith("medusa") else None
    return min(MAX_TOKENS, heads or MAX_TOKENS)


def _is_measured(recipe: ServedRecipe) -> bool:
    """Return whether the results of a recipe are there, at whatever addresses the engine listened."""
    path, places = Path(recipe.out), {"server": "", "baseline": ""}
    return path.is_file() and load_served(path)["recipe"] | places == recipe.model_dump(mode="json") | places

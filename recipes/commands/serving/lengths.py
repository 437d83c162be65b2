"""`draftsmith tune --engine`: how many tokens a step an engine should draft under each load, or whether none.

An engine is measured beside itself without drafts, with one token a step and with `MOST`. Between the two a step's
time, beside the same run's plain step, is taken to grow by as much with each token; how many tokens a step keeps
follows from acceptance by position. What looks best and was not measured yet is measured, until the best one was.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ...report.served import length_table, load_name, load_served
from ...schema.serving import ServedRecipe
from ...session.terminal import console
from .engines import commands_of, measure_engine

MOST = 5
"""Tokens a step, where the export does not say how many it can draft."""


def run_lengths(
    recipe: ServedRecipe, engine: str, export: str | None, target: str | None, more: Sequence[str]
) -> dict[str, Any]:
    """Measure, choose, print and write; what is measured is kept beside the results file. Raises ValueError: as
    `commands_of`; an engine that does not count acceptance by position."""
    out, sides = Path(recipe.out), partial(commands_of, export, engine, target)
    sides()  # what cannot be served is said first
    assert export is not None
    most = _most(export)

    def measured(tokens: int) -> list[dict[str, Any]]:
        own = recipe.model_copy(update={"out": str(out.with_suffix(f".{tokens}.json"))})
        if not _is_measured(own):
            measure_engine(own, sides(tokens), more, f"serve-{engine}-{tokens}")
        found: list[dict[str, Any]] = load_served(Path(own.out))["loads"]
        return found

    found = {tokens: measured(tokens) for tokens in dict.fromkeys((1, most))}
    loads = [predicted(*rows, most) for rows in zip(found[1], found[most], strict=True)]
    _note(loads, found)
    while left := {best_of(load) for load in loads} - {0, *found}:
        found |= {tokens: measured(tokens) for tokens in left}
        _note(loads, found)
    for load in loads:
        load["best"] = best_of(load)
    commands = {}
    for tokens in {int(load["best"]) for load in loads}:
        drafting, plain = sides(tokens or None)
        commands[str(tokens)] = shlex.join([*(drafting if tokens else plain), *more])
    results: dict[str, Any] = {"kind": "lengths", "engine": engine, "recipe": recipe.model_dump(mode="json")}
    results |= {"loads": loads, "commands": commands}
    atomic_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
    console().print(length_table(results).rich())
    for load in loads:
        console().print(f"{load_name(load)}: {commands[str(load['best'])]}", soft_wrap=True)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def _most(export: str) -> int:
    """Tokens that are drafted at most: heads of Medusa's kind draft one each."""
    manifest = load_manifest(Path(export).expanduser())
    assert manifest.export is not None
    heads = manifest.shapes.get("num_heads") if manifest.export["format"].startswith("medusa") else None
    return min(MOST, heads or MOST)


def _is_measured(recipe: ServedRecipe) -> bool:
    path = Path(recipe.out)
    return path.is_file() and bool(load_served(path)["recipe"] == recipe.model_dump(mode="json"))


def _note(loads: Sequence[dict[str, Any]], found: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Lay what was measured of each number of tokens beside what was predicted."""
    for tokens, rows in found.items():
        for load, row in zip(loads, rows, strict=True):
            load["lengths"][tokens - 1]["measured"] = row["beside"]["speedup"]
            load["lengths"][tokens - 1]["interval"] = row["beside"]["speedup_interval"]


def best_of(load: Mapping[str, Any]) -> int:
    """The number of tokens of a load that is worth most, as far as is known; 0: none is worth anything."""
    worth = {length["tokens"]: length.get("measured") or length["speedup"] for length in load["lengths"]}
    best = max(worth, key=lambda tokens: worth[tokens])
    return best if worth[best] > 1 else 0


def predicted(short: Mapping[str, Any], long: Mapping[str, Any], most: int) -> dict[str, Any]:
    """What each number of tokens a step is worth under a load, of which one and `most` were measured. Raises
    ValueError: no acceptance by position, or no answers to compare."""
    rates = long["server"]["acceptance_by_depth"]
    plain = [side["baseline"]["ms_per_token"] for side in (short, long)]
    if not rates or None in plain:
        raise ValueError(f"{load_name(long)}: the engine does not say what it accepts by position, or answered nothing")
    plain_ms = sum(plain) / 2
    # each beside what ran in turns with it: between two runs a machine's speed drifts
    first, last = (_step_ms(side["server"]) / alone for side, alone in zip((short, long), plain, strict=True))
    reached = accumulate([*rates, *[0.0] * (most - len(rates))], mul)
    lengths = []
    for tokens, accepted in enumerate(accumulate(reached), 1):
        steps = first if most == 1 else first + (last - first) * (tokens - 1) / (most - 1)
        about = {"tokens": tokens, "tokens_per_step": 1 + accepted, "step_ms": steps * plain_ms}
        lengths.append(about | {"speedup": (1 + accepted) / steps})
    return {key: long[key] for key in ("concurrency", "rate")} | {"plain_ms": plain_ms, "lengths": lengths}


def _step_ms(side: Mapping[str, Any]) -> float:
    return float(side["ms_per_token"] * side["tokens_per_step"])

"""`draftsmith train RECIPE --sweep key=value,value`: train a recipe with every combination of some values."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ...schema.loading import load_training, parse_values
from ...schema.training import TrainingRecipe
from ...session.launch import is_first
from ...session.terminal import console, log

_MAX_NAME = 80  # characters of a combination in the name of its folder; a longer one ends in a hash
_METRICS = ("tokens_per_step", "slim_tokens_per_step", "heldout_loss", "overlap", "base_loss", "base_overlap")
_TRAINING = ("trained_parameters", "steps", "tokens", "entries", "bytes", "seconds")


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: the swept values by key path, and the recipe with a folder of its own."""

    values: dict[str, Any]
    recipe: TrainingRecipe


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep and the file of their results."""

    keys: dict[str, list[Any]]
    combinations: list[Combination]
    results: Path


def plan_sweep(name: str, overrides: Sequence[str], options: Sequence[str]) -> Sweep:
    """Return all combinations of the values of `options` (`key.path=value,value` in YAML), each a checked recipe.

    The first key changes slowest. Raises ValueError: an option without values, or for `out`; a key that is swept twice;
    what `load_training` raises for any combination, which is named.
    """
    keys: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = option.partition("=")
        values = parse_values(text, f"--sweep {option!r}")
        if not values or key in ("", "out", *keys):
            raise ValueError(f"--sweep {option!r} is not of the form key.path=value,value, once for a key but `out`")
        keys[key] = values
    combinations, results = [], Path()
    for each in itertools.product(*keys.values()):
        chosen = dict(zip(keys, each, strict=True))
        recipe = load_training(name, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in chosen.items())])
        out = Path(recipe.out)
        results = out.with_name(f"{out.name}-sweep.json")
        folder = out.with_name(f"{out.name}-{_folder_name(chosen)}")
        combinations.append(Combination(chosen, recipe.model_copy(update={"out": str(folder)})))
    return Sweep(keys, combinations, results)


def run_sweep(sweep: Sweep) -> None:
    """Run what is not finished, one after the other, then print a table; all launched processes call it.

    `<out>-sweep.json` holds the finished runs; the same command resumes.
    """
    from .train import run_train

    rows: list[dict[str, Any]] = []
    for number, combination in enumerate(sweep.combinations, 1):
        if is_first():
            words = " ".join(_words(combination.values))
            log(f"sweep: run {number} of {len(sweep.combinations)}: {words}")
        out = run_train(combination.recipe)
        gc.collect()  # models in reference cycles would stay in memory during the next run
        if is_first():
            manifest = load_manifest(out)
            known = manifest.shapes | manifest.training
            training = {name: known[name] for name in _TRAINING if name in known}
            metrics = manifest.evaluation or {}
            rows.append({"out": str(out), "values": combination.values, "metrics": metrics, "training": training})
            atomic_text(sweep.results, json.dumps({"sweep": sweep.keys, "rows": rows}, indent=1) + "\n")
    if is_first():
        console().print(_table(sweep, rows))
        log(f"sweep: wrote {sweep.results}")


def _table(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per run: the swept values, metrics, sizes, seconds."""
    table = Table(title=f"sweep: {sweep.results}", title_justify="left", box=None)
    lines = []
    for row in rows:
        metrics = {name: f"{row['metrics'][name]:.3f}" for name in _METRICS if name in row["metrics"]}
        training = {name: f"{value:,.0f}" for name, value in row["training"].items()}
        lines.append({key: _shown(value) for key, value in row["values"].items()} | metrics | training)
    headings = list(dict.fromkeys(name for line in lines for name in line))
    for heading in headings:
        table.add_column(heading if heading in sweep.keys else heading.replace("_", " "), justify="right")
    for line in lines:
        table.add_row(*(line.get(heading, "–") for heading in headings))
    return table


def _words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={_shown(value)}" for key, value in values.items()]


def _shown(value: Any) -> str:
    """Return a value as JSON, or as plain text if that does not look like a value of another type."""
    if isinstance(value, str):
        with suppress(ValueError):
            json.loads(value)
            return json.dumps(value)
        return value
    return json.dumps(value)


def _folder_name(values: dict[str, Any]) -> str:
    """Return a unique name for the combination that file systems allow."""
    words = "-".join(_words(values))
    plain = re.sub(r"[^\w.=+-]+", "_", words)
    if plain == words and len(words) <= _MAX_NAME:
        return words
    return f"{plain[:_MAX_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

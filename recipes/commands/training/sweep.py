"""`draftsmith train RECIPE --sweep key=value,value`: one recipe with every combination of some values, in one table."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from safetensors import safe_open

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ...schema.loading import load_training, parse_values
from ...schema.training import TrainingRecipe
from ...session.launch import is_first
from ...session.terminal import console, log

_MOST_NAME = 80
"""Characters of a combination's name in that of its folder; a longer one ends in a hash."""
_METRICS = ("tokens_per_step", "slim_tokens_per_step", "heldout_loss", "overlap", "base_loss", "base_overlap")
_TRAINING = ("steps", "kept_step", "tokens", "entries", "bytes")
"""What the file says of a run's training or count."""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    values: dict[str, Any]
    """By the swept key's path."""
    recipe: TrainingRecipe
    """Its `out` is the recipe's with the combination's name behind it."""

    @property
    def words(self) -> str:
        """`num_heads=3 num_layers=1`."""
        return " ".join(_words(self.values))


@dataclass(frozen=True)
class Sweep:
    """All runs, and where their results go."""

    keys: dict[str, list[Any]]
    combinations: list[Combination]
    results: Path


def plan_sweep(name: str, overrides: Sequence[str], options: Sequence[str]) -> Sweep:
    """All combinations of the values of `options` (`key.path=value,value`), each a checked recipe.

    The first key changes slowest. Values are YAML, so one may be a list or a mapping of its own. Raises ValueError: an
    option without values, or for `out`; a key that is swept twice; what `load_recipe` finds in any combination, which
    is named.
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
        given = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        recipe = load_training(name, [*overrides, *given])
        out = Path(recipe.out)
        results = out.with_name(f"{out.name}-sweep.json")
        folder = out.with_name(f"{out.name}-{_folder_name(chosen)}")
        combinations.append(Combination(chosen, recipe.model_copy(update={"out": str(folder)})))
    return Sweep(keys, combinations, results)


def run_sweep(sweep: Sweep) -> None:
    """Run what is not finished, one after the other; then show all in a table. Under `accelerate launch` all processes
    call it. `<out>-sweep.json` holds what is finished, after each run, from which the same command goes on."""
    from .train import run_train

    rows: list[dict[str, Any]] = []
    for number, combination in enumerate(sweep.combinations, 1):
        if is_first():
            log(f"sweep: run {number} of {len(sweep.combinations)}: {combination.words}")
        out = run_train(combination.recipe)
        gc.collect()  # models in cycles must not lie beside those of the next run
        if is_first():
            rows.append(_row(combination, out))
            atomic_text(sweep.results, json.dumps({"sweep": sweep.keys, "rows": rows}, indent=1) + "\n")
    if is_first():
        console().print(sweep_table(sweep, rows))
        log(f"sweep: wrote {sweep.results}")


def sweep_table(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> Table:
    """A row a run: the swept values, what was measured of the kept weights, sizes, the minutes; the file has more."""
    table = Table(title=f"sweep: {sweep.results}", title_justify="left", box=None)
    lines = [{key: _shown(value) for key, value in row["values"].items()} | _cells(row) for row in rows]
    headings = list(dict.fromkeys(name for line in lines for name in line))
    for heading in headings:
        table.add_column(heading if heading in sweep.keys else heading.replace("_", " "), justify="right")
    for line in lines:
        table.add_row(*(line.get(heading, "–") for heading in headings))
    return table


def _cells(row: dict[str, Any]) -> dict[str, str]:
    metrics, training = row["metrics"], row["training"]
    cells = {name: f"{metrics[name]:.3f}" for name in _METRICS if name in metrics}
    if "entries" in training:
        return cells | {name: f"{training[name]:,}" for name in ("tokens", "entries", "bytes")}
    cells["parameters"] = f"{row['parameters']:,}"
    return cells if row["minutes"] is None else cells | {"minutes": f"{row['minutes']:.1f}"}


def _row(combination: Combination, out: Path) -> dict[str, Any]:
    manifest = load_manifest(out)
    training = manifest.training
    return {
        "out": str(out),
        "values": combination.values,
        "metrics": manifest.evaluation or {},
        "parameters": _parameters(out),
        "minutes": training["seconds"] / 60 if "seconds" in training else None,
        "training": {name: training[name] for name in _TRAINING if name in training},
    }


def _parameters(folder: Path) -> int:
    """Numbers in the tensors of an artifact's own files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def _words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={_shown(value)}" for key, value in values.items()]


def _shown(value: Any) -> str:
    """A text stands in quotes where it would look like a value of another type."""
    if isinstance(value, str):
        with suppress(ValueError):
            json.loads(value)
            return json.dumps(value)
        return value
    return json.dumps(value)


def _folder_name(values: dict[str, Any]) -> str:
    """The combination as a name that file systems allow; no two are the same."""
    words = "-".join(_words(values))
    plain = re.sub(r"[^\w.=+-]+", "_", words)
    if plain == words and len(words) <= _MOST_NAME:
        return words
    return f"{plain[:_MOST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

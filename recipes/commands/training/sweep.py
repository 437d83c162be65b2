"""`draftsmith train RECIPE --sweep key=value,value`: one recipe with every combination of some values, in one table."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from safetensors import safe_open

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.storage.atomic import atomic_text
from ....train.parallel.interrupts import TrainingError
from ....train.parallel.processes import StoppedError
from ...schema.loading import load_training, parse_values
from ...schema.training import TrainingRecipe
from ...session.launch import is_first
from ...session.terminal import console, log

_MOST_NAME = 80
"""Characters of a combination's name in that of its folder; a longer one ends in a hash."""
_KEPT = ("tokens_per_step", "slim_tokens_per_step", "heldout_loss", "overlap", "base_loss", "base_overlap")
"""Metrics that are columns of the table, where a run has them; the file has all."""
_WHOLE = ("heads_top1", "heads_top5", "tokens", "entries", "megabytes", "parameters", "minutes")
"""Columns whose cells are not broken into lines."""

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
        return " ".join(_named(self.values))


@dataclass(frozen=True)
class Sweep:
    """All runs, and where their results go."""

    keys: dict[str, list[Any]]
    combinations: list[Combination]
    results: Path


def plan_sweep(name: str, overrides: Sequence[str], options: Sequence[str]) -> Sweep:
    """All combinations of the values of `options` (`key.path=value,value`), each a checked recipe.

    The first key changes slowest. Values are YAML, so one may be a list or a mapping of its own.

    Raises:
        ValueError: an option without values, with the same twice, or for `out` or `kind`; a key that is swept twice or
            that an override sets too; what `load_recipe` finds in any combination, which is named.
    """
    keys: dict[str, list[Any]] = {}
    for option in options:
        key, values = _parsed(option)
        if key in keys:
            raise ValueError(f"{key!r} is swept twice: give all its values at once")
        if any(f"{key}.".startswith(f"{override.partition('=')[0]}.") for override in overrides):
            raise ValueError(f"{key!r} is swept and set: leave one out")
        keys[key] = values
    found, out = [], None
    for each in itertools.product(*keys.values()):
        chosen = dict(zip(keys, each, strict=True))
        try:
            recipe = load_training(name, overrides, given=chosen)
        except ValueError as error:
            raise ValueError(f"with {' '.join(_named(chosen))}: {error}") from error
        out = Path(recipe.out)
        place = out.with_name(f"{out.name}-{_folder_name(chosen)}")
        found.append(Combination(chosen, recipe.model_copy(update={"out": str(place)})))
    assert out is not None
    return Sweep(keys, found, out.with_name(f"{out.name}-sweep.json"))


def run_sweep(sweep: Sweep) -> None:
    """Run what is not finished, one after the other; then show all in a table. Under `accelerate launch` all processes
    call it.

    `<out>-sweep.json` holds what is finished, after each run.

    Raises:
        ValueError, TrainingError, Interrupted: what `run_train` raises; the same command goes on from there.
    """
    from .train import run_train

    is_main = is_first()
    rows: list[dict[str, Any]] = []
    for number, combination in enumerate(sweep.combinations, 1):
        if is_main:
            log(f"sweep: run {number} of {len(sweep.combinations)}: {combination.words}")
        with _named_in_errors(combination):
            out = run_train(combination.recipe)
        gc.collect()  # models in cycles must not lie beside those of the next run
        if is_main:
            rows.append(_row(combination, out))
            _write(sweep, rows)
    if is_main:
        console().print(sweep_table(sweep, rows))
        log(f"sweep: wrote {sweep.results}")


def show_plans(sweep: Sweep) -> None:
    """`--plan` of every combination.

    Raises:
        ValueError: one of them does not fit, named.
    """
    from .plan import plan_recipe, show

    for combination in sweep.combinations:
        with _named_in_errors(combination):
            planned = plan_recipe(combination.recipe)
        if is_first():
            console().print(combination.words)
            show(planned)
        gc.collect()


@contextmanager
def _named_in_errors(combination: Combination) -> Iterator[None]:
    """Raises what is raised inside, a mistake or a failed training, with the combination's words before it."""
    try:
        yield
    except StoppedError:
        raise
    except TrainingError as error:
        raise TrainingError(f"with {combination.words}: {error}", error.blocks) from error
    except ValueError as error:
        raise ValueError(f"with {combination.words}: {error}") from error


def sweep_table(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> Table:
    """A row a run: the swept values, what was measured of the kept weights, the artifact's parameters, the minutes."""
    table = Table(title=f"sweep: {sweep.results}", title_justify="left", box=None)
    columns = [*sweep.keys, *_columns(rows)]
    for heading in columns:
        if heading in sweep.keys:
            table.add_column(heading, justify="right", overflow="fold")
        else:
            table.add_column(heading.replace("_", " "), justify="right", no_wrap=heading in _WHOLE)
    for row in rows:
        cells = {key: _shown(value) for key, value in row["values"].items()} | _cells(row)
        table.add_row(*(cells.get(heading, "–") for heading in columns))
    return table


def _columns(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    known = [name for row in rows for name in _cells(row)]
    return (name for name in [*_KEPT, *_WHOLE] if name in known)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    metrics = row["metrics"]
    cells = {name: f"{metrics[name]:.3f}" for name in _KEPT if name in metrics}
    for name in ("top1", "top5"):
        heads = (f"head{k}_{name}" for k in itertools.count())
        hits = [f"{metrics[head]:.2f}" for head in itertools.takewhile(metrics.__contains__, heads)]
        if hits:
            cells[f"heads_{name}"] = " ".join(hits)
    if "entries" in row["training"]:
        sizes = row["training"]
        return cells | {
            "tokens": f"{sizes['tokens']:,}",
            "entries": f"{sizes['entries']:,}",
            "megabytes": f"{sizes['bytes'] / 1e6:.2f}",
        }
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
            for name in opened.keys():  # noqa: SIM118 (safetensors has no iteration)
                size = 1
                for length in opened.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _write(sweep: Sweep, rows: list[dict[str, Any]]) -> None:
    content = json.dumps({"sweep": sweep.keys, "rows": rows}, indent=1) + "\n"
    atomic_text(sweep.results, content)


def _parsed(option: str) -> tuple[str, list[Any]]:
    key, equals, text = option.partition("=")
    if not equals or not key:
        raise ValueError(f"--sweep {option!r} is not of the form key.path=value,value")
    if key in ("out", "kind"):
        raise ValueError(f"{key!r} cannot be swept" + (": each run's folder is named by its values" * (key == "out")))
    values = parse_values(text, f"--sweep {option!r}")
    if not values:
        raise ValueError(f"--sweep {option!r} has no values: expected key.path=value,value")
    shown = [_shown(value) for value in values]
    double = sorted({word for word in shown if shown.count(word) > 1})
    if double:
        raise ValueError(f"--sweep {option!r} has the value {double[0]} twice")
    return key, values


def _named(values: dict[str, Any]) -> list[str]:
    return [f"{key}={_shown(value)}" for key, value in values.items()]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _folder_name(values: dict[str, Any]) -> str:
    """The combination as a name that file systems allow; no two are the same."""
    words = "-".join(_named(values))
    plain = re.sub(r"[^\w.=+-]+", "_", words)
    if plain == words and len(words) <= _MOST_NAME:
        return words
    return f"{plain[:_MOST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

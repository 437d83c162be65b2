"""`draftsmith energy`: joules and seconds of a target's forward, by the number of inputs that it serves (MJSD, table
1).

`energy.json`, schema 1: what ran on what (target, dtype, machine, runs, context), what counted joules (source, covers,
idle_watts; null, and why none did), and a row a batch size, in rising order. A row's `inputs` are those of all forwards
together; joules have idle power in them but for `joules_per_run_above_idle`; `errors` are standard errors, by rounds of
forwards for seconds, by windows for joules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from torch import Tensor

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....decode.evaluation.energy import Energy, batch_forward, batch_row, count_joules, open_meter, time_forwards
from ....decode.evaluation.measure import devices_of
from ....decode.methods import Parts
from ....decode.models.base import LanguageModel
from ....decode.models.loading import wrap_model
from ....train.parallel.interrupts import is_out_of_memory
from ...assemble.evaluation import load_target
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import load_recipe
from ...session.machine import machine
from ...session.terminal import bar, console, log
from .recipe import BASE, BASELINE, PARTS, evaluate_recipe


def run_energy(recipe: EvaluateRecipe, out: Path, *, batches: Sequence[int], runs: int, context: int) -> dict[str, Any]:
    """Time forwards of a recipe's target at several batch sizes with `context` tokens behind each input, count their
    joules (over windows of their own) where something counts them, print the table and write it to `out`. Raises
    ValueError: a number below 1, more context than the target has positions, too large a batch for the device's
    memory."""
    if min(runs, context, *batches) < 1:
        raise ValueError(f"all must be at least 1: --runs {runs}, --context {context}, --batch {[*batches]}")
    check_writable(out)
    model = wrap_model(load_target(recipe))
    if context + 1 > model.max_positions:
        raise ValueError(
            f"--context {context} and a new token are more than the target's {model.max_positions} positions"
        )
    dtype_name = str(model.weights_dtype).removeprefix("torch.")
    sizes = ", ".join(map(str, batches))
    log(f"energy: {recipe.target} ({dtype_name}) on {model.device}: {runs} forwards at batch {sizes}")
    calls, seconds = _timed(model, batches, runs, context, recipe.seed)
    energies, covers = _energies(model, calls, recipe.seed)
    counted = next(iter(energies.values()), None)
    results = {
        "schema": 1,
        "kind": "energy-by-batch",
        "target": recipe.target,
        "dtype": dtype_name,
        "machine": machine(str(model.device)),
        "runs": runs,
        "context": context,
        "source": counted.source if counted else None,
        "covers": covers,
        "idle_watts": counted.idle_watts if counted else None,
        "rows": [batch_row(batch, seconds[batch], energies.get(batch)) for batch in calls],
    }
    atomic_text(out, json.dumps(results, indent=2, allow_nan=False) + "\n")
    _show(results)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def energy_command(
    recipe: str | None, overrides: Sequence[str], target: str | None, batch: str, runs: int, context: int
) -> dict[str, Any]:
    """The command line's: of an evaluation recipe, or of a target by itself; `batch`: numbers with commas between."""
    try:
        batches = [int(part) for part in batch.split(",")]
    except ValueError as error:
        raise ValueError(f"--batch takes whole numbers with commas between, such as 1,2,4, got {batch!r}") from error
    if target is not None and (recipe is None or "=" in recipe):
        # The same checks for a device and a type as in a recipe; nothing else of it is used.
        given = dict.fromkeys(PARTS) | {"target": target, "out": f"runs/energy/{Path(target).name}.json"}
        words = [*([recipe] if recipe else []), *overrides]
        loaded = load_recipe(BASE, words, given=given | {"methods": [{"method": BASELINE}]}, kinds=["evaluate"])
    else:
        loaded = evaluate_recipe(recipe, overrides, {"target": target}, "energy")
    assert isinstance(loaded, EvaluateRecipe)
    return run_energy(loaded, Path(loaded.out).with_suffix(".energy.json"), batches=batches, runs=runs, context=context)


def _timed(
    model: LanguageModel, batches: Sequence[int], runs: int, context: int, seed: int
) -> tuple[dict[int, Callable[[], Tensor]], dict[int, list[list[float]]]]:
    """Forwards by batch size, and their seconds by round. Raises ValueError where memory runs out."""
    try:
        calls = {batch: batch_forward(model, batch, context, seed) for batch in sorted(batches)}
        with bar("timing forwards", "rounds") as advance:
            return calls, time_forwards(model, calls, runs, advance)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory: name smaller batches than {max(batches)} (--batch), or less context than {context} "
            "(--context)"
        ) from error


def _energies(model: LanguageModel, calls: dict[int, Callable[[], Tensor]], seed: int) -> tuple[dict[int, Energy], str]:
    """Joules of a forward by batch size, and of what; none, and why there are none."""
    meter, covers = open_meter(devices_of(model, Parts()))
    if meter is None:
        log(f"energy: no joules: {covers}")
        return {}, covers
    with meter, bar("counting joules", "batch sizes") as advance:
        found, failure = count_joules(model, meter, calls, seed, advance)
    if failure:
        log(f"energy: no joules at batch {', '.join(str(batch) for batch in calls if batch not in found)}: {failure}")
    return found, covers if found else failure


def _show(results: dict[str, Any]) -> None:
    title = f"{results['target']}: forwards of one new token with {results['context']} tokens behind it"
    headings = ("batch", "J/run", "J/input", "J/run above idle", "ms/run", "ms/input")
    table = Table(*(Column(heading, justify="right") for heading in headings), box=None, pad_edge=False)
    for row in results["rows"]:
        joules = (row[f"joules_per_{name}"] for name in ("run", "input", "run_above_idle"))
        times = (1e3 * row[f"seconds_per_{name}"] for name in ("run", "input"))
        table.add_row(str(row["batch"]), *map(_three_digits, (*joules, *times)))
    console().print(title, soft_wrap=True)
    console().print(table)
    counted = f"joules of {results['covers']}, by {results['source']}"
    console().print(counted if results["source"] else f"no joules: {results['covers']}", soft_wrap=True)


def _three_digits(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return "–"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"

"""`draftsmith energy`: joules and seconds of a target's forward, by the number of inputs that it serves (MJSD, table
1).

The file it writes, `energy.json`, schema 1:

    schema, kind: "energy-by-batch"
    target, dtype, machine        the model, and what it ran on (`session.machine`)
    runs, context                 forwards timed at each batch size, one new token an input; tokens committed before it
    source, covers                what counted joules ("nvml", "rapl"), of what; null, and why none did
    idle_watts                    power of the same devices idle; null without a source
    rows                          one a batch size, in rising order
    paper                         the same table of the paper, OPT-13B on two A10 GPUs: rows with the keys of ours

A row:

    label, batch, inputs          "batch 4"; inputs of one forward; of all forwards together
    seconds, seconds_per_run, seconds_per_input
    joules, joules_per_run, joules_per_input             idle power included; null without a source
    joules_per_run_above_idle                            without it; null too where they are no more than idle ones
    watts                                                mean power while working
    errors                        {metric: its standard error}: by rounds of forwards for seconds, by windows for joules
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ....checkpoints.storage.atomic import atomic_text
from ....decode.evaluation.energy import Energy, batch_forward, batch_row, count_joules, open_meter, time_forwards
from ....decode.evaluation.measure import devices_of
from ....decode.methods import Parts
from ....decode.models.base import LanguageModel
from ....decode.models.loading import load_model, wrap_model
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import load_recipe
from ...session.machine import machine
from ...session.terminal import bar, console, log
from .recipe import BASE, evaluate_recipe

SCHEMA = 1
KIND = "energy-by-batch"
BATCHES = (1, 2, 4, 8, 16)
RUNS = 300
CONTEXT = 128
_PAPER = {
    1: (42450, 14.1, 14.1, 1129, 0.376, 0.376),
    2: (49621, 16.5, 8.26, 1191, 0.397, 0.198),
    4: (53325, 17.7, 4.43, 1178, 0.392, 0.098),
    8: (59210, 19.7, 2.46, 1211, 0.403, 0.050),
    16: (74058, 24.7, 1.54, 1255, 0.418, 0.026),
}
_PAPER_KEYS = ("joules", "joules_per_run", "joules_per_input", "seconds", "seconds_per_run", "seconds_per_input")
PAPER = [
    {"label": f"batch {batch}", "batch": batch} | dict(zip(_PAPER_KEYS, numbers, strict=True))
    for batch, numbers in _PAPER.items()
]
"""Table 1 of `mjsd.txt`: OPT-13B on two A10 GPUs, about 3,000 forwards a row."""


def run_energy(
    target: str,
    *,
    batches: Sequence[int] = BATCHES,
    runs: int = RUNS,
    context: int = CONTEXT,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Time forwards of a target at several batch sizes, count their joules where something counts them, print the table
    with the paper's beside it, and write it to `out` (None: nothing is written).

    Args:
        batches: inputs of a forward.
        runs: forwards that are timed at each batch size; joules are counted over windows of their own.
        context: tokens that each input has behind it.
        dtype, device, device_map: of the target, as in a recipe.

    Raises:
        ValueError: a number below 1, a batch size twice, more context than the target has positions, an `out` that is
            no .json; a target that cannot be loaded, or too large a batch for the device's memory.
    """
    sizes = _checked(batches, runs, context, out)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = wrap_model(load_model(target, dtype=dtype, device=device, device_map=device_map))
    if context + 1 > model.max_positions:
        raise ValueError(
            f"--context {context} and a new token are more than the target's {model.max_positions} positions"
        )
    dtype_name = str(model.dtype).removeprefix("torch.")
    log(f"energy: {target} ({dtype_name}) on {model.device}: {runs} forwards at batch {', '.join(map(str, sizes))}")
    calls = {batch: _prepared(model, batch, context, seed) for batch in sizes}
    with bar("timing forwards", "forwards") as advance:
        seconds = time_forwards(model, calls, runs, advance)
    energies, covers = _energies(model, calls, seed)
    results: dict[str, Any] = {"schema": SCHEMA, "kind": KIND, "target": target, "dtype": dtype_name}
    results |= {"machine": machine(str(model.device)), "runs": runs, "context": context}
    counted = next(iter(energies.values()), None)
    results |= {"source": counted.source if counted else None, "covers": covers}
    results["idle_watts"] = counted.idle_watts if counted else None
    results["rows"] = [batch_row(batch, seconds[batch], energies.get(batch)) for batch in sizes]
    results["paper"] = PAPER
    if out is not None:
        atomic_text(out, json.dumps(results, indent=2, allow_nan=False) + "\n")
    _show(results, out)
    return results


def energy_command(
    recipe: str | None,
    overrides: Sequence[str],
    target: str | None,
    *,
    batch: str,
    runs: int,
    context: int,
    out: Path | None,
) -> dict[str, Any]:
    """The command line's: the target, its device and its type are an evaluation recipe's, or given by themselves.

    Args:
        batch: numbers with commas between.
        out: by default beside the recipe's results, or in `runs/energy/`.
    """
    batches = _numbers(batch)
    alone = recipe is None or ("=" in recipe and not Path(recipe).is_file())
    if alone:
        if target is None:
            raise ValueError("give a recipe (`draftsmith recipes ls`), or a target: draftsmith energy --target T")
        out = out or Path("runs") / "energy" / f"{Path(target.rstrip('/')).name}.json"
        # The same checks and places for a device and a type as in a recipe; nothing else of it is used.
        words = ["drafter=null", "heads=null", "table=null", "methods=[{method: autoregressive}]"]
        words += [f"target={json.dumps(target)}", *([recipe] if recipe else []), *overrides]
        loaded = load_recipe(BASE, words, kinds=["evaluate"])
        assert isinstance(loaded, EvaluateRecipe)
    else:
        loaded = evaluate_recipe(recipe, overrides, {"target": target}, "energy")
        out = out or Path(loaded.out).with_suffix(".energy.json")
    where: dict[str, Any] = {"dtype": loaded.dtype, "device": loaded.device, "device_map": loaded.device_map}
    return run_energy(loaded.target, batches=batches, runs=runs, context=context, seed=loaded.seed, out=out, **where)


def _energies(model: LanguageModel, calls: dict[int, Callable[[], Tensor]], seed: int) -> tuple[dict[int, Energy], str]:
    """Joules of a forward by batch size, and of what; none, and why there are none."""
    meter, covers = open_meter(devices_of(model, Parts()))
    if meter is None:
        log(f"energy: no joules: {covers}")
        return {}, covers
    with meter, bar("counting joules", "windows") as advance:
        found, failure = count_joules(model, meter, calls, seed, advance)
    if failure:
        missing = ", ".join(str(batch) for batch in calls if batch not in found)
        log(f"energy: no joules at batch {missing}: {failure}")
    return found, covers if found else failure


def _prepared(model: LanguageModel, batch: int, context: int, seed: int) -> Callable[[], Tensor]:
    try:
        return batch_forward(model, batch, context, seed)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the device has no memory for a batch of {batch} with {context} tokens each: name smaller ones (--batch), "
            "or less context (--context)"
        ) from error


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--batch takes whole numbers with commas between, such as 1,2,4, got {text!r}") from error


def _checked(batches: Sequence[int], runs: int, context: int, out: Path | None) -> list[int]:
    for name, least in (("--runs", runs), ("--context", context), *(("--batch", batch) for batch in batches)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    double = sorted({batch for batch in batches if list(batches).count(batch) > 1})
    if double or not batches:
        raise ValueError(f"--batch names {double[0]} twice" if double else "--batch names no batch size")
    if out is not None and out.suffix != ".json":
        raise ValueError(f"--out must be a .json file, got {out}")
    return sorted(batches)


def _show(results: dict[str, Any], out: Path | None) -> None:
    title = f"{results['target']}: forwards of one new token with {results['context']} tokens behind it"
    console().print(title, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    headings = ("batch", "J/run", "J/input", "J/run\nabove idle", "ms/run", "ms/input")
    for heading in (*headings, *(f"paper:\n{heading}" for heading in ("J/run", "J/input", "ms/run", "ms/input"))):
        table.add_column(heading, justify="right")
    theirs = {row["batch"]: row for row in results["paper"]}
    joules, times = ("joules_per_run", "joules_per_input"), ("seconds_per_run", "seconds_per_input")
    for row in results["rows"]:
        cells = [_digits(row[key]) for key in (*joules, "joules_per_run_above_idle")]
        cells += [_digits(row[key], 1e3) for key in times]
        paper = theirs.get(row["batch"], {})
        cells += [_digits(paper.get(key)) for key in joules] + [_digits(paper.get(key), 1e3) for key in times]
        table.add_row(str(row["batch"]), *cells)
    console().print(table)
    counted = f"joules of {results['covers']}, by {results['source']}; idle {_digits(results['idle_watts'])} W"
    console().print(counted if results["source"] else f"no joules: {results['covers']}", markup=False, soft_wrap=True)
    console().print("paper: OPT-13B on two A10 GPUs (MJSD, table 1)")
    if out is not None:
        console().print(f"results: {out}", soft_wrap=True)


def _digits(value: float | None, scale: float = 1.0) -> str:
    """Three digits that count, or a dash."""
    return "–" if value is None else f"{value * scale:.3g}" if value * scale < 1000 else f"{value * scale:.0f}"

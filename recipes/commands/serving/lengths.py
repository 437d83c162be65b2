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
        load = {key: rows[0][key] for key in ("label", "concurrency", "context")}
        loads.append(load | {"lengths": lengths, "best": best})
        drafting, plain = commands(best or None)
        chosen[str(best)] = shlex.join([*(drafting if best else plain), *more])
    schedules = []
    for context in dict.fromkeys(load["context"] for load in loads):
        best_by_load = {load["concurrency"]: load["best"] for load in loads if load["context"] == context}
        drafting, path = commands(max(best_by_load.values()) or None)[0], out.with_suffix(f".{context or 'load'}.json")
        scheduled = schedule_command(engine, drafting, best_by_load, path)
        command = None if scheduled is None else shlex.join([*scheduled, *more])
        schedules.append({"context": context, "off_from": switch_off_point(best_by_load), "command": command})
    results: dict[str, Any] = {"kind": "lengths", "engine": engine, "recipe": recipe.model_dump(mode="json")}
    results |= {"loads": loads, "commands": chosen, "schedules": schedules}
    atomic_text(out, json.dumps(results, indent=1, allow_nan=False) + "\n")
    console().print(length_table(results).rich())
    for load in loads:
        console().print(f"{load['label']}: {chosen[str(load['best'])]}", soft_wrap=True)
    for schedule in schedules:
        console().print(_describe_schedule(schedule), soft_wrap=True)
    console().print(f"results: {out}", soft_wrap=True)
    return results


def switch_off_point(best_by_load: Mapping[int, int]) -> int | None:
    """Return the lowest concurrency from which on speculative decoding was never faster; None if there is none.

    `best_by_load` maps each measured concurrency to the best number of draft tokens, 0 for none.
    """
    drafting = [concurrency for concurrency, tokens in best_by_load.items() if tokens]
    return min((each for each in best_by_load if each > max(drafting, default=0)), default=None)


def schedule_command(
    engine: str, drafting: Sequence[str], best_by_load: Mapping[int, int], path: Path
) -> list[str] | None:
    """Add the draft length for each batch size to a command of an engine, in the engine's own syntax.

    vLLM 0.33 reads `num_speculative_tokens_per_batch_size`: lists of the first and last batch size and the draft
    length. SGLang 0.5.23 reads a file (written to `path`) with the draft length from each batch size on, for EAGLE-3
    only. The result is None if the engine has no such setting, or if speculative decoding is never faster.
    """
    points = sorted(best_by_load.items())
    changes = [now for now, before in zip(points, [(0, None), *points], strict=False) if now[1] != before[1]]
    starts = [1, *(load for load, _ in changes[1:])]
    if not any(best_by_load.values()):
        return None
    if engine == "vllm":
        ends = [*(start - 1 for start in starts[1:]), points[-1][0]]
        ranges = [[start, end, tokens] for start, end, (_, tokens) in zip(starts, ends, changes, strict=True)]
        index = drafting.index("--speculative-config") + 1
        config = json.loads(drafting[index]) | {"num_speculative_tokens_per_batch_size": ranges}
        return [*drafting[:index], json.dumps(config), *drafting[index + 1 :]]
    if engine == "sglang" and "EAGLE3" in drafting:
        steps = {str(start): {"candidate_steps": [tokens]} for start, (_, tokens) in zip(starts, changes, strict=True)}
        atomic_text(path, json.dumps(steps, indent=1) + "\n")
        return [*drafting, "--speculative-adaptive", "--speculative-adaptive-config", str(path)]
    return None


def _describe_schedule(schedule: Mapping[str, Any]) -> str:
    prompts = f"prompts of about {schedule['context']} tokens" if schedule["context"] else "these prompts"
    advice = "speculative decoding is faster at the highest measured concurrency"
    if schedule["off_from"]:
        advice = f"switch speculative decoding off from concurrency {schedule['off_from']} on"
    command = f"; draft length by load: {schedule['command']}" if schedule["command"] else ""
    return f"{prompts}: {advice}{command}"


def max_draft_tokens(export: Path | str) -> int:
    """Return the maximum number of draft tokens for an export, such as the tokens of a DFlash block."""
    manifest = load_manifest(Path(export).expanduser())
    assert manifest.export is not None
    form, heads = manifest.export["format"], manifest.shapes.get("num_heads")
    if form in ("dflash", "dspark") and heads:  # one forward drafts the whole block
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

"""Evaluation: prompts and artifacts in, one honest table and `results.json` out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import check_writable
from ....data.prompts import SkippedPrompts
from ....decode.evaluation.energy import CounterError, Energy, open_meter
from ....decode.evaluation.measure import BASELINE, Entry, check_capacity, devices_of, energy_of, measure
from ....decode.evaluation.summary import EvalPrompt, Summariser, Summary
from ....decode.evaluation.tuning.replay import predict_entries, record_entries
from ...assemble.evaluation import Case, entries_of, open_case, prompts_digest
from ...report.page import report_beside, write_report
from ...report.tables import UNSTEADY, category_table, method_table
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import write_recipe
from ...schema.results import KIND, SCHEMA, write_results
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console, duration, log
from .estimate import evaluation_runs, time_words
from .journal import Journal, Kept

_ENERGY = TypeAdapter(Energy)


class NotLosslessError(ValueError):
    """A method that calls itself lossless wrote other tokens than the target's own; the results are written."""


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results; resume where a killed run stopped.
    Raises NotLosslessError, once all is written, for a method whose output at temperature 0 is not the target's own."""
    out, skipped = Path(recipe.out), SkippedPrompts()
    check_writable(out)
    case, entries = open_case(recipe, skipped), entries_of(recipe)
    opened, prompts = case.opened, case.prompts
    named = {asked.id: ids for asked, ids in zip(case.asked, prompts, strict=True)}
    check_capacity(opened.target, opened.parts, entries, named, case.limits)
    log(f"evaluate: {len(prompts)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {opened.device}")
    runs = evaluation_runs(recipe, len(prompts))
    log(f"evaluate: {time_words(opened.target, runs, recipe.max_new_tokens, max(map(len, prompts)))}")
    if skipped:
        log(f"evaluate: skipped {skipped.words()}")
    with Stoppable("evaluate") as signals, Journal(out, "runs", case.identity) as journal:
        work = _Case(**vars(case), entries=entries, kept=Kept(journal, signals), signals=signals)
        results, broken = _measured(work, skipped)
        write_results(out, results)
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        journal.remove()
    _show(case, results)
    report = write_report(report_beside(out), [out], [results])
    console().print(f"results: {out}, and {report} to look at", soft_wrap=True)
    if broken:
        raise NotLosslessError(broken[0])
    return results


@dataclass(frozen=True)
class _Case(Case):
    """What is measured, and what is finished of it."""

    entries: list[Entry]
    kept: Kept
    signals: Stoppable


def _measured(case: _Case, skipped: SkippedPrompts) -> tuple[dict[str, Any], list[str]]:
    """All that is measured; and the broken promises of losslessness."""
    opened, recipe, entries = case.opened, case.recipe, case.entries
    kept = case.kept.runs("run")
    with case.signals.bar("evaluating", "runs") as advance:
        runs = measure(
            opened.target,
            opened.parts,
            entries,
            case.prompts,
            case.limits,
            reference=opened.model if recipe.compare_with_transformers else None,
            repeats=recipe.repeats,
            again=recipe.again,
            batch=recipe.batch,
            seed=recipe.seed,
            progress=advance,
            **kept,
        )
    energies = _energies(case) if recipe.energy != "off" else {}

    def text_of(ids: Sequence[int]) -> str:
        return str(opened.tokenizer.decode(ids, skip_special_tokens=True))

    prompts = [
        EvalPrompt(ids, asked.id, asked.category, asked.references)
        for asked, ids in zip(case.asked, case.prompts, strict=True)
    ]
    more: dict[str, Any] = {"seed": recipe.seed, "text_of": text_of, "energies": energies, "batch": recipe.batch}
    summariser = Summariser(opened.target, opened.parts, prompts, runs, case.limits, **more)
    with case.signals.bar("timing steps, reading texts", "methods") as advance:
        summary = summariser.summarise(entries, advance)
    if recipe.predict:
        log("evaluate: predicting the rows by replay of the target's own texts")
        texts = {entry.sampling: runs[entry.label].ids for entry in entries if entry.method == BASELINE}
        recordings = record_entries(opened.target, opened.parts, entries, case.prompts, texts)
        predictions = predict_entries(recordings, opened.parts, entries)
        for row in summary.rows:
            row["prediction"] = predictions[row["label"]]
    return _results(case, skipped, len(kept["finished"]), summary), summary.broken


def _energies(case: _Case) -> dict[str, Energy]:
    """Joules a token by label, as far as they can be counted; those that the journal holds are not counted again. What
    counts them and how long that takes is logged, or why nothing does."""
    opened = case.opened
    names = {entry.label: f"joules of {entry.label}" for entry in case.entries}
    found = {label: case.kept.known(name, _ENERGY) for label, name in names.items() if name in case.kept}
    left = [entry for entry in case.entries if entry.label not in found]
    if not left:
        return found
    meter, words = open_meter(devices_of(opened.target, opened.parts))
    if meter is None:
        log(f"evaluate: no joules: {words}")
        return found
    least = duration(len(left) * meter.timing.least)
    log(
        f"evaluate: counting joules of {words} ({meter.source}): {len(left)} rows, {least} or more in all; "
        "`energy: off` leaves them out"
    )
    with meter, case.signals.bar("counting joules", "windows") as advance:
        try:
            idle = meter.idle_watts()
            for number, entry in enumerate(left):

                def progress(trial: int, trials: int, number: int = number, label: str = entry.label) -> None:
                    advance(number * trials + trial, len(left) * trials, label)

                what = (opened.target, opened.parts, entry, case.prompts, case.limits, meter, idle)
                work = partial(energy_of, *what, seed=case.recipe.seed, progress=progress)
                found[entry.label] = case.kept(names[entry.label], _ENERGY, work)
        except CounterError as error:
            missing = ", ".join(entry.label for entry in left if entry.label not in found)
            log(f"evaluate: no joules of {missing}: {error}")
    return found


def _results(case: Case, skipped: SkippedPrompts, resumed: int, summary: Summary) -> dict[str, Any]:
    errors, same = [*summary.errors, *summary.broken], summary.same
    if same is not None and same[0] < same[1]:
        errors.append(f"greedy decoding differs from transformers.generate on {same[1] - same[0]} of {same[1]} prompts")
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(case.opened.device),
        "artifacts": case.opened.artifacts(),
        "recipe": case.recipe.recorded(),
        "prompts": len(case.prompts),
        "prompts_sha256": prompts_digest(case.prompts),
        "passed_over": skipped.as_dict(),
        "categories": dict(Counter(prompt.category for prompt in case.asked)),
        "resumed": resumed,
        "greedy_equals_transformers": same,
        "methods": summary.rows,
        "errors": errors,
    }


def _show(case: Case, results: dict[str, Any]) -> None:
    console().print(method_table(case.title, results["methods"]).rich())
    if case.recipe.show_categories:
        console().print(category_table(results["methods"]).rich())
    if unsteady := ", ".join(row["label"] for row in results["methods"] if row["steady"] is False):
        why = "something else ran here; measure again, or with more `repeats`"
        console().print(f"{UNSTEADY}: unsteady times, of {unsteady}: {why}", soft_wrap=True)
    for error in results["errors"]:
        console().print(f"error: {error}")
    same = results["greedy_equals_transformers"]
    if same is not None:
        console().print(f"autoregressive decoding equals transformers.generate on {same[0]} of {same[1]} prompts")
    if results["resumed"]:
        console().print(f"{results['resumed']} runs were timed by an earlier process that was interrupted")

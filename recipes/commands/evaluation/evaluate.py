"""`draftsmith evaluate`: measures every method of a recipe and writes a table, `results.json` and a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import check_writable
from ....data.prompts import SkippedPrompts
from ....decode.evaluation.energy import CounterError, Energy, measure_batches, open_meter
from ....decode.evaluation.measure import check_capacity, devices_of, energy_of, measure
from ....decode.evaluation.summary import EvalPrompt, Summariser, Summary
from ....decode.methods import Parts
from ....decode.models.base import LanguageModel
from ....train.parallel.interrupts import is_out_of_memory
from ...assemble.evaluation import Case, entries_of, open_case, prompts_digest
from ...report.page import report_beside, write_report
from ...report.tables import UNSTEADY, energy_table, method_table
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import write_recipe
from ...schema.results import EVALUATION, write_results
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import bar, console, duration, log
from .estimate import evaluation_runs, time_words
from .journal import Journal, Kept

_ENERGY = TypeAdapter(Energy)


class NotLosslessError(ValueError):
    """Error of a lossless method that wrote other tokens than the target; the results are written."""


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results; resume an interrupted run. Raises
    NotLosslessError, after writing, for a lossless method whose output at temperature 0 is not the target's."""
    out, skipped = Path(recipe.out), SkippedPrompts()
    check_writable(out)
    case = open_case(recipe, skipped)
    opened, prompts, entries = case.opened, case.prompts, entries_of(recipe)
    named = {asked.id: ids for asked, ids in zip(case.asked, prompts, strict=True)}
    check_capacity(opened.target, opened.parts, entries, named, case.limits)
    log(f"evaluate: {len(prompts)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {opened.device}")
    runs = evaluation_runs(recipe, len(prompts))
    log(f"evaluate: {time_words(opened.target, runs, recipe.max_new_tokens, max(map(len, prompts)))}")
    if skipped:
        log(f"evaluate: skipped {skipped.words()}")
    with Stoppable("evaluate") as signals, Journal(out, "runs", case.identity) as journal:
        work = _Evaluation(case, Kept(journal, signals), signals)
        summary, resumed = work.measure()
        results = _results(case, skipped, resumed, summary)
        if recipe.energy_batches:
            results["energy_by_batch"] = measure_energy(opened.target, recipe)
        write_results(out, results)
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        journal.remove()
    _show(case, results)
    report = write_report(report_beside(out), [out], [results])
    console().print(f"results: {out}; report: {report}", soft_wrap=True)
    if summary.broken:
        raise NotLosslessError(summary.broken[0])
    return results


@dataclass(frozen=True)
class _Evaluation:
    """Measurement of a case that keeps what is finished."""

    case: Case
    kept: Kept
    signals: Stoppable

    def measure(self) -> tuple[Summary, int]:
        """Return the rows, and the number of runs that an earlier process finished."""
        case, opened, recipe = self.case, self.case.opened, self.case.recipe
        entries, kept = entries_of(recipe), self.kept.runs("run")
        with self.signals.bar("evaluating", "runs") as advance:
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
        energies = self._energies() if recipe.energy != "off" else {}

        def text_of(ids: Sequence[int]) -> str:
            return str(opened.tokenizer.decode(ids, skip_special_tokens=True))

        prompts = [
            EvalPrompt(ids, asked.id, asked.category, asked.references)
            for asked, ids in zip(case.asked, case.prompts, strict=True)
        ]
        more: dict[str, Any] = {"seed": recipe.seed, "text_of": text_of, "energies": energies, "batch": recipe.batch}
        summariser = Summariser(opened.target, opened.parts, prompts, runs, case.limits, **more)
        with self.signals.bar("timing steps, reading texts", "methods") as advance:
            return summariser.summarise(entries, advance), len(kept["finished"])

    def _energies(self) -> dict[str, Energy]:
        """Return joules per token by label, as far as they can be counted, and log why others cannot."""
        opened, recipe = self.case.opened, self.case.recipe
        names = {entry.label: f"joules of {entry.label}" for entry in entries_of(recipe)}
        found = {label: self.kept.known(name, _ENERGY) for label, name in names.items() if name in self.kept}
        left = [entry for entry in entries_of(recipe) if entry.label not in found]
        if not left:
            return found
        meter, covers = open_meter(devices_of(opened.target, opened.parts))
        if meter is None:
            log(f"evaluate: no joules: {covers}")
            return found
        least = duration(len(left) * meter.timing.least)
        log(f"evaluate: counting joules of {covers} ({meter.source}), at least {least}; `energy: off` skips it")
        with meter, self.signals.bar("counting joules", "windows") as advance:
            try:
                idle = meter.idle_watts()
                for number, entry in enumerate(left):

                    def progress(trial: int, trials: int, number: int = number, label: str = entry.label) -> None:
                        advance(number * trials + trial, len(left) * trials, label)

                    what = (opened.target, opened.parts, entry, self.case.prompts, self.case.limits, meter, idle)
                    work = partial(energy_of, *what, seed=recipe.seed, progress=progress)
                    found[entry.label] = self.kept(names[entry.label], _ENERGY, work)
            except CounterError as error:
                missing = ", ".join(entry.label for entry in left if entry.label not in found)
                log(f"evaluate: no joules of {missing}: {error}")
        return found


def measure_energy(target: LanguageModel, recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure the time and, if a counter is available, the energy of the target's forwards by batch size (MJSD, table
    1). Raises ValueError: more context than the target has positions, or batches that do not fit into memory."""
    batches, context = recipe.energy_batches, recipe.energy_context
    if context + 1 > target.max_positions:
        raise ValueError(
            f"energy_context={context} and a new token exceed the target's {target.max_positions} positions"
        )
    meter, covers = open_meter(devices_of(target, Parts()))
    log(f"evaluate: {recipe.energy_runs} forwards at batch {', '.join(map(str, batches))}; energy of {covers}")
    try:
        with meter or nullcontext(), bar("timing forwards", "rounds") as advance:
            found = measure_batches(target, batches, recipe.energy_runs, context, meter, recipe.seed, advance)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory: use smaller batches than energy_batches={batches} or less context than "
            f"energy_context={context}"
        ) from error
    return {"covers": covers} | found


def _results(case: Case, skipped: SkippedPrompts, resumed: int, summary: Summary) -> dict[str, Any]:
    errors, same = [*summary.errors, *summary.broken], summary.same
    if same is not None and same[0] < same[1]:
        errors.append(f"greedy decoding differs from transformers.generate on {same[1] - same[0]} of {same[1]} prompts")
    return {
        "kind": EVALUATION,
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
    if section := results.get("energy_by_batch"):
        console().print(energy_table(section).rich())
    if unsteady := ", ".join(row["label"] for row in results["methods"] if row["steady"] is False):
        why = "another process disturbed them; measure again, or with more `repeats`"
        console().print(f"{UNSTEADY}: unsteady times of {unsteady}: {why}", soft_wrap=True)
    for error in results["errors"]:
        console().print(f"error: {error}")
    same = results["greedy_equals_transformers"]
    if same is not None:
        console().print(f"autoregressive decoding equals transformers.generate on {same[0]} of {same[1]} prompts")
    if results["resumed"]:
        console().print(f"{results['resumed']} runs were timed by an earlier process that was interrupted")

"""`draftsmith evaluate`: measure every method of a recipe, print the table, and write `results.json` and the report."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from .... import __version__
from ....checkpoints.artifact.model_ref import source_hash
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.safe_read import load_json
from ....data.prompts import SkippedPrompts
from ....decode.evaluation.energy import CounterError, Energy, measure_batches, open_meter
from ....decode.evaluation.measure import check_capacity, devices_of, ignored_settings, measure, measure_entry_energy
from ....decode.evaluation.summary import EvalPrompt, Summariser, Summary
from ....decode.methods import Parts
from ....decode.models.base import LanguageModel
from ...assemble.evaluation import Case, device_of, entries_of, open_case, prompts_digest
from ...report.certificate import KIND
from ...report.page import report_beside, write_report
from ...report.tables import UNSTEADY, conclusions, energy_table, method_table
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import write_recipe
from ...schema.results import EVALUATION, derive_path, load_results, write_results
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console, log
from .certify import run_certify
from .journal import Journal

_ENERGY = TypeAdapter(Energy)


class NotLosslessError(ValueError):
    """Error of a lossless method whose tokens differ from the target's; the results are written before it is raised."""


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results; resume an interrupted run.

    Raises:
        NotLosslessError: The output of a lossless method at temperature 0 is not the target's; raised after writing.
    """
    out, skipped = Path(recipe.out), SkippedPrompts()
    check_writable(out)
    case = open_case(recipe, skipped)
    opened, prompts, entries = case.opened, case.prompts, entries_of(recipe)
    named = {asked.id: ids for asked, ids in zip(case.asked, prompts, strict=True)}
    check_capacity(opened.target, opened.parts, entries, named, case.limits)
    log(f"evaluate: {len(prompts)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {opened.device}")
    if ignored := ignored_settings(opened.model.generation_config):
        asked = ", ".join(f"{name}={value}" for name, value in ignored.items())
        log(f"evaluate: no method, nor the reference run, applies {asked} of the target's generation_config.json")
    if skipped:
        log(f"evaluate: skipped {skipped.summary()}")
    with Stoppable("evaluate") as signals, Journal(out, "runs", case.identity, signals) as kept:
        summary, resumed = _measure(case, kept, signals)
        results = _results(case, skipped, resumed, summary)
        if recipe.energy_batches:
            results["energy_by_batch"] = measure_energy(opened.target, recipe)
        write_results(out, results)
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        kept.remove()
    _show(case, results)
    report = write_report(report_beside(out), [out], [results])
    console().print(f"results: {out}; report: {report}", soft_wrap=True)
    if summary.lossless_violations:
        raise NotLosslessError(summary.lossless_violations[0])
    return results


def evaluate_once(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Return the results of an evaluation, running it only if settings, files, version or machine have changed."""
    out = Path(recipe.out)
    stamp = out.with_suffix(".stamp.json")
    # Computed before decoding, since files may change meanwhile.
    identity = identity_of(recipe.recorded(exclude={"out"}), recipe.sources(), recipe)
    if out.is_file() and read_finished(stamp, identity) is not None:
        log(f"{out} had finished already")
        return load_results(out)
    stamp.unlink(missing_ok=True)
    results = run_evaluate(recipe)
    atomic_text(stamp, json.dumps({"identity": identity}) + "\n")
    return results


def certify_once(recipe: EvaluateRecipe, tokens: int) -> dict[str, str]:
    """Return the verdicts of a certificate by row, certifying only if they are missing or outdated."""
    stamp = derive_path(Path(recipe.out), KIND).with_suffix(".stamp.json")
    identity = identity_of([recipe.recorded(exclude={"out"}), tokens], recipe.sources(), recipe)
    if (found := read_finished(stamp, identity)) is None:
        found = {"identity": identity, "verdicts": {each.label: each.verdict for each in run_certify(recipe, tokens)}}
        atomic_text(stamp, json.dumps(found) + "\n")
    return dict(found["verdicts"])


def identity_of(settings: Any, sources: Sequence[str], evaluation: EvaluateRecipe) -> str:
    """Return a hash of the version, settings, files and machine, on which results depend."""
    states = {source: source_hash(source) for source in sources}
    known = [__version__, settings, states, machine(device_of(evaluation))]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def read_finished(path: Path, identity: str) -> dict[str, Any] | None:
    """Read the record of an earlier run with the same identity, or return None."""
    try:
        found = load_json(path)
    except (OSError, ValueError):
        return None
    return found if found.get("identity") == identity else None


def _measure(case: Case, kept: Journal, signals: Stoppable) -> tuple[Summary, int]:
    """Return the summary of all methods, and the number of runs that an earlier process finished."""
    opened, recipe, entries, known = case.opened, case.recipe, entries_of(case.recipe), kept.runs("run")
    with signals.bar("evaluating", "runs") as advance:
        runs = measure(
            opened.target,
            opened.parts,
            entries,
            case.prompts,
            case.limits,
            reference=opened.model if recipe.compare_with_transformers else None,
            repeats=recipe.repeats,
            batch=recipe.batch,
            seed=recipe.seed,
            progress=advance,
            **known,
        )
    summariser = Summariser(
        opened.target,
        opened.parts,
        [
            EvalPrompt(ids, asked.id, asked.category, asked.references)
            for asked, ids in zip(case.asked, case.prompts, strict=True)
        ],
        runs,
        case.limits,
        seed=recipe.seed,
        text_of=lambda ids: str(opened.tokenizer.decode(ids, skip_special_tokens=True)),
        energies=_count_energy(case, kept, signals) if recipe.energy != "off" else {},
        batch=recipe.batch,
    )
    with signals.bar("timing steps, reading texts", "steps") as advance:
        return summariser.summarise(entries, advance), len(known["finished"])


def _count_energy(case: Case, kept: Journal, signals: Stoppable) -> dict[str, Energy]:
    """Return the energy per token by label; log the reason for methods that cannot be measured."""
    opened, entries = case.opened, entries_of(case.recipe)
    names = {entry.label: f"joules of {entry.label}" for entry in entries}
    found = {label: kept.known(name, _ENERGY) for label, name in names.items() if name in kept}
    left = [entry for entry in entries if entry.label not in found]
    if not left:
        return found
    meter, covers = open_meter(devices_of(opened.target, opened.parts))
    if meter is None:
        log(f"evaluate: no joules: {covers}")
        return found
    log(f"evaluate: counting joules of {covers} ({meter.source}); `energy: off` skips it")
    with meter, signals.bar("counting joules", "windows") as advance:
        try:
            idle = meter.idle_watts()
            for number, entry in enumerate(left):

                def progress(trial: int, trials: int, number: int = number, label: str = entry.label) -> None:
                    advance(number * trials + trial, len(left) * trials, label)

                given = (opened.target, opened.parts, entry, case.prompts, case.limits, meter, idle)
                work = partial(measure_entry_energy, *given, seed=case.recipe.seed, progress=progress)
                found[entry.label] = kept(names[entry.label], _ENERGY, work)
        except CounterError as error:
            missing = ", ".join(entry.label for entry in left if entry.label not in found)
            log(f"evaluate: no joules of {missing}: {error}")
    return found


def measure_energy(target: LanguageModel, recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure the time and, if possible, the energy of forward passes by batch size (arXiv 2407.09722, table 1)."""
    batches, context = recipe.energy_batches, recipe.energy_context
    if context + 1 > target.max_positions:
        raise ValueError(
            f"energy_context={context} and a new token exceed the target's {target.max_positions} positions"
        )
    meter, covers = open_meter(devices_of(target, Parts()))
    log(f"evaluate: {recipe.energy_runs} forwards at batch {', '.join(map(str, batches))}; energy of {covers}")
    with meter or nullcontext():
        found = measure_batches(target, batches, recipe.energy_runs, context, meter, recipe.seed)
    return {"covers": covers} | found


def _results(case: Case, skipped: SkippedPrompts, resumed: int, summary: Summary) -> dict[str, Any]:
    errors, same = [*summary.errors, *summary.lossless_violations], summary.identical_to_transformers
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
    left_out = ", ".join(f"{count} {reason}" for reason, count in results["passed_over"]["counts"].items() if count)
    title = f"{case.title} (left out: {left_out})" if left_out else case.title
    for line in conclusions(results["methods"]):
        console().print(line, soft_wrap=True)
    console().print(method_table(title, results["methods"]).rich())
    if section := results.get("energy_by_batch"):
        console().print(energy_table(section).rich())
    if unsteady := ", ".join(row["label"] for row in results["methods"] if row["steady"] is False):
        why = "another process disturbed them; measure again, or with more `repeats`"
        console().print(f"{UNSTEADY}: unsteady times of {unsteady}: {why}", soft_wrap=True)
    for error in results["errors"]:
        console().print(f"error: {error}")
    if (same := results["greedy_equals_transformers"]) is not None:
        console().print(f"autoregressive decoding equals transformers.generate on {same[0]} of {same[1]} prompts")
    if results["resumed"]:
        console().print(f"{results['resumed']} runs were timed by an earlier process that was interrupted")

"""`draftsmith evaluate`: measure every method of a recipe, print the table, and write `results.json` and the report."""

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
from ...report.page import report_path, write_report
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
    """Error for a lossless method whose output differs from the target's, raised after the results are written."""


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of a recipe, print a table, and write the results. An interrupted run resumes.

    Raises:
        NotLosslessError: The output of a lossless method at temperature 0 differs from the target's.
    """
    out, skipped = Path(recipe.out), SkippedPrompts()
    check_writable(out)
    case = open_case(recipe, skipped)
    pair, prompts, entries = case.pair, case.prompts, entries_of(recipe)
    named = {prompt.id: ids for prompt, ids in zip(case.questions, prompts, strict=True)}
    check_capacity(pair.target, pair.parts, entries, named, case.limits)
    log(f"evaluate: {len(prompts)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {pair.device}")
    if ignored := ignored_settings(pair.model.generation_config):
        prompt = ", ".join(f"{name}={value}" for name, value in ignored.items())
        log(f"evaluate: ignoring {prompt} of the target's generation_config.json")
    if skipped:
        log(f"evaluate: skipped {skipped.summary()}")
    with Stoppable("evaluate") as signals, Journal(out, "runs", case.identity, signals) as journal:
        summary, resumed = _measure(case, journal, signals)
        results = _results(case, skipped, resumed, summary)
        if recipe.energy_batches:
            results["energy_by_batch"] = measure_energy(pair.target, recipe)
        write_results(out, results)
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        journal.remove()
    _show(case, results)
    report = write_report(report_path(out), [out], [results])
    console().print(f"results: {out}; report: {report}", soft_wrap=True)
    if summary.lossless_violations:
        raise NotLosslessError(summary.lossless_violations[0])
    return results


def evaluate_once(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Run an evaluation, or load its results if settings, files, version and machine have not changed."""
    out = Path(recipe.out)
    stamp = out.with_suffix(".stamp.json")
    # The identity is computed before decoding, because files may change during decoding.
    identity = identity_of(recipe.recorded(exclude={"out"}), recipe.sources(), recipe)
    if out.is_file() and read_finished(stamp, identity) is not None:
        log(f"{out} is finished, reusing it")
        return load_results(out)
    stamp.unlink(missing_ok=True)
    results = run_evaluate(recipe)
    atomic_text(stamp, json.dumps({"identity": identity}) + "\n")
    return results


def certify_once(recipe: EvaluateRecipe, tokens: int) -> dict[str, str]:
    """Return a mapping from labels to verdicts. Run the certification only if verdicts are missing or outdated."""
    stamp = derive_path(Path(recipe.out), KIND).with_suffix(".stamp.json")
    identity = identity_of([recipe.recorded(exclude={"out"}), tokens], recipe.sources(), recipe)
    if (record := read_finished(stamp, identity)) is None:
        record = {"identity": identity, "verdicts": {each.label: each.verdict for each in run_certify(recipe, tokens)}}
        atomic_text(stamp, json.dumps(record) + "\n")
    return dict(record["verdicts"])


def identity_of(settings: Any, sources: Sequence[str], evaluation: EvaluateRecipe) -> str:
    """Return a hash of everything that affects the results: version, settings, files and machine."""
    states = {source: source_hash(source) for source in sources}
    known = [__version__, settings, states, machine(device_of(evaluation))]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def read_finished(path: Path, identity: str) -> dict[str, Any] | None:
    """Load the record of a finished run. Return None if it is missing or if `identity` has changed."""
    try:
        record = load_json(path)
    except (OSError, ValueError):
        return None
    return record if record.get("identity") == identity else None


def _measure(case: Case, journal: Journal, signals: Stoppable) -> tuple[Summary, int]:
    """Measure all methods, and return the summary and the number of reused runs of an earlier process."""
    pair, recipe, entries, known = case.pair, case.recipe, entries_of(case.recipe), journal.runs("run")
    with signals.bar("evaluating", "runs") as advance:
        runs = measure(
            pair.target,
            pair.parts,
            entries,
            case.prompts,
            case.limits,
            reference=pair.model if recipe.compare_with_transformers else None,
            repeats=recipe.repeats,
            batch=recipe.batch,
            seed=recipe.seed,
            progress=advance,
            **known,
        )
    summariser = Summariser(
        pair.target,
        pair.parts,
        [
            EvalPrompt(ids, prompt.id, prompt.category, prompt.references)
            for prompt, ids in zip(case.questions, case.prompts, strict=True)
        ],
        runs,
        case.limits,
        seed=recipe.seed,
        text_of=lambda ids: str(pair.tokenizer.decode(ids, skip_special_tokens=True)),
        energies=_count_energy(case, journal, signals) if recipe.energy != "off" else {},
        batch=recipe.batch,
    )
    with signals.bar("timing steps and scoring texts", "steps") as advance:
        return summariser.summarise(entries, advance), len(known["finished"])


def _count_energy(case: Case, journal: Journal, signals: Stoppable) -> dict[str, Energy]:
    """Measure the energy per token of each method, by label. Failed measurements are logged and omitted."""
    pair, entries = case.pair, entries_of(case.recipe)
    names = {entry.label: f"joules of {entry.label}" for entry in entries}
    energies = {label: journal.known(name, _ENERGY) for label, name in names.items() if name in journal}
    remaining = [entry for entry in entries if entry.label not in energies]
    if not remaining:
        return energies
    meter, covers = open_meter(devices_of(pair.target, pair.parts))
    if meter is None:
        log(f"evaluate: energy is not measured: {covers}")
        return energies
    log(f"evaluate: measuring the energy of {covers} ({meter.source}); skip it with `energy: off`")
    with meter, signals.bar("measuring energy", "windows") as advance:
        try:
            idle = meter.idle_watts()
            for number, entry in enumerate(remaining):

                def progress(trial: int, trials: int, number: int = number, label: str = entry.label) -> None:
                    advance(number * trials + trial, len(remaining) * trials, label)

                arguments = (pair.target, pair.parts, entry, case.prompts, case.limits, meter, idle)
                work = partial(measure_entry_energy, *arguments, seed=case.recipe.seed, progress=progress)
                energies[entry.label] = journal(names[entry.label], _ENERGY, work)
        except CounterError as error:
            missing = ", ".join(entry.label for entry in remaining if entry.label not in energies)
            log(f"evaluate: the energy of {missing} is not measured: {error}")
    return energies


def measure_energy(target: LanguageModel, recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure time and, if possible, energy of forward passes for each batch size (arXiv 2407.09722, table 1)."""
    batches, context = recipe.energy_batches, recipe.energy_context
    if context + 1 > target.max_positions:
        raise ValueError(f"`energy_context` must be below {target.max_positions} (target's positions), got {context}")
    meter, covers = open_meter(devices_of(target, Parts()))
    log(f"evaluate: {recipe.energy_runs} forwards at batch sizes {', '.join(map(str, batches))}; energy of {covers}")
    with meter or nullcontext():
        results = measure_batches(target, batches, recipe.energy_runs, context, meter, recipe.seed)
    return {"covers": covers} | results


def _results(case: Case, skipped: SkippedPrompts, resumed: int, summary: Summary) -> dict[str, Any]:
    errors, same = [*summary.errors, *summary.lossless_violations], summary.identical_to_transformers
    if same is not None and same[0] < same[1]:
        errors.append(f"greedy decoding differs from transformers.generate on {same[1] - same[0]} of {same[1]} prompts")
    return {
        "kind": EVALUATION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(case.pair.device),
        "artifacts": case.pair.artifacts(),
        "recipe": case.recipe.recorded(),
        "prompts": len(case.prompts),
        "prompts_sha256": prompts_digest(case.prompts),
        "passed_over": skipped.as_dict(),
        "categories": dict(Counter(prompt.category for prompt in case.questions)),
        "resumed": resumed,
        "greedy_equals_transformers": same,
        "methods": summary.rows,
        "errors": errors,
    }


def _show(case: Case, results: dict[str, Any]) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in results["passed_over"]["counts"].items() if count)
    title = f"{case.title} (skipped: {skipped})" if skipped else case.title
    for line in conclusions(results["methods"]):
        console().print(line, soft_wrap=True)
    console().print(method_table(title, results["methods"]).rich())
    if section := results.get("energy_by_batch"):
        console().print(energy_table(section).rich())
    if unsteady := ", ".join(row["label"] for row in results["methods"] if row["steady"] is False):
        remedy = "other processes disturbed the measurement; repeat it, or increase `repeats`"
        console().print(f"{UNSTEADY}: unsteady times of {unsteady}: {remedy}", soft_wrap=True)
    for error in results["errors"]:
        console().print(f"error: {error}")
    if (same := results["greedy_equals_transformers"]) is not None:
        end = f"on {same[0]} of {same[1]} prompts (near-ties count as equal)"
        console().print(f"autoregressive decoding equals transformers.generate {end}", soft_wrap=True)
    if results["resumed"]:
        console().print(f"{results['resumed']} runs were completed by an earlier, interrupted process")

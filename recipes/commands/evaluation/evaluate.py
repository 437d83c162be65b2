"""Evaluation: prompts and artifacts in, one honest table and `results.json` out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....data.prompts import SkippedPrompts, load_prompts, stop_ids
from ....decode.engine import Limits
from ....decode.evaluation.energy import CounterError, Energy, open_meter
from ....decode.evaluation.measure import BASELINE, Entry, Run, devices_of, energy_of, measure
from ....decode.evaluation.replay.replay import predict_entries, record_entries
from ....decode.evaluation.summary import EvalPrompt, Summariser, Summary, same_as_reference
from ....decode.methods import Parts, build_method
from ....decode.models.base import LanguageModel
from ....train.parallel.interrupts import Interrupted, StopSignals
from ...assemble.evaluation import LoadedPair, artifact_hashes, entries_of, identity_of, open_recipe, prompts_digest
from ...report.page import report_beside, write_report
from ...report.tables import categories_table, results_table
from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import write_recipe
from ...schema.results import KIND, SCHEMA, write_results
from ...session.machine import machine
from ...session.terminal import Advance, bar, console, duration, log
from .journal import RunJournal


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results; go on where a killed run stopped.

    Raises:
        ValueError: a missing or unfit artifact, no prompt short enough, a method without its part, a damaged journal,
            or a lossless method whose output at temperature 0 differs from the target's own.
        Interrupted: a signal came; the runs that had finished are kept.
    """
    opened = open_recipe(recipe)
    tokenizer, target, parts, device = opened.tokenizer, opened.target, opened.parts, opened.device
    passed = SkippedPrompts()
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None, "passed_over": passed}
    found = load_prompts(recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where)
    asked = [EvalPrompt(ids, prompt.id, prompt.category, prompt.references) for prompt, ids in found]
    limits, entries = Limits(recipe.max_new_tokens, stop_ids(tokenizer)), entries_of(recipe)
    check_capacity(target, parts, entries, asked, limits)
    log(f"evaluate: {len(asked)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {device}")
    if passed:
        log(f"evaluate: passed over {passed.words()}")
    out, ids = Path(recipe.out), [prompt.ids for prompt in asked]
    with StopSignals() as signals, RunJournal(out, identity_of(recipe, ids, device)) as journal:
        runs = _measure(recipe, target, parts, entries, asked, limits, opened.model, journal, signals)
        energies = _energies(recipe, opened, entries, asked, limits, journal, signals)

        def text_of(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        more: dict[str, Any] = {"seed": recipe.seed, "text_of": text_of, "energies": energies}
        summariser = Summariser(target, parts, asked, runs, limits, **more)
        with bar("timing steps, reading texts", "methods") as advance:
            summary = summariser.summarise(entries, Watch("evaluate", signals, advance))
        log("evaluate: foretelling the rows by replay of the target's own texts")
        _predict(summary, opened, entries, asked, runs)
        results = _results(recipe, asked, passed, device, summary, same_as_reference(entries, runs))
        results["resumed"] = len(journal.finished)
        write_results(out, results)
        write_recipe(recipe, out.with_suffix(".recipe.yaml"))
        journal.remove()
    _show(recipe, results)
    report = write_report(report_beside(out), [out], [results])
    console().print(f"results: {out}, and {report} to look at", soft_wrap=True)
    if summary.broken:
        raise ValueError(summary.broken[0])
    return results


class Watch:
    """Progress that stops a command where a signal has come. `inner` shows it."""

    def __init__(self, command: str, signals: StopSignals, inner: Advance) -> None:
        self._command, self._signals, self._inner = command, signals, inner

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self._inner(done, total, note)
        if self._signals.received is not None:
            message = f"{self._command}: stopped by signal {self._signals.received}; the same command goes on from here"
            log(message)
            raise Interrupted(self._signals.received, message)


def _measure(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    asked: Sequence[EvalPrompt],
    limits: Limits,
    model: Any,
    journal: RunJournal,
    signals: StopSignals,
) -> dict[str, Run]:
    """The runs, of which those that the journal holds are not done again."""
    if journal.changed:
        changed = ", ".join(journal.changed)
        log(f"evaluate: {journal.path} holds runs of another evaluation ({changed} differ): starting anew")
    if journal.finished:
        log(f"evaluate: going on; {len(journal.finished)} runs are finished already, timed by an earlier process")
    with bar("evaluating", "runs") as advance:
        return measure(
            target,
            parts,
            entries,
            [prompt.ids for prompt in asked],
            limits,
            reference=model if recipe.compare_with_transformers else None,
            repeats=recipe.repeats,
            seed=recipe.seed,
            finished=journal.finished,
            on_run=journal.add,
            progress=Watch("evaluate", signals, advance),
        )


def _energies(
    recipe: EvaluateRecipe,
    opened: LoadedPair,
    entries: Sequence[Entry],
    asked: Sequence[EvalPrompt],
    limits: Limits,
    journal: RunJournal,
    signals: StopSignals,
) -> dict[str, Energy]:
    """Joules a token by label, as far as they can be counted; those that the journal holds are not counted again. Said
    is what counts them and how long that takes, or why nothing does."""
    if recipe.energy == "off":
        return {}
    found = {entry.label: journal.energies[entry.label] for entry in entries if entry.label in journal.energies}
    if found:
        log(f"evaluate: joules of {len(found)} of {len(entries)} rows were counted by an earlier process")
    left = [entry for entry in entries if entry.label not in found]
    if not left:
        return found
    meter, words = open_meter(devices_of(opened.target, opened.parts))
    if meter is None:
        log(f"evaluate: no joules: {words}")
        return found
    each, whole = meter.timing.least, len(left) * meter.timing.least
    takes = f"{len(left)} rows of {duration(each)} or more, {duration(whole)} in all; `energy: off` leaves them out"
    log(f"evaluate: counting joules of {words} ({meter.source}): {takes}")
    prompts = [prompt.ids for prompt in asked]
    with meter, bar("counting joules", "windows") as advance:
        watch = Watch("evaluate", signals, advance)
        try:
            idle = meter.idle_watts()
            for place, entry in enumerate(left):

                def progress(trial: int, trials: int, place: int = place, label: str = entry.label) -> None:
                    watch(place * trials + trial, len(left) * trials, label)

                what = (opened.target, opened.parts, entry, prompts, limits, meter, idle)
                found[entry.label] = energy_of(*what, seed=recipe.seed, progress=progress)
                journal.add_energy(entry.label, found[entry.label])
        except CounterError as error:
            missing = ", ".join(entry.label for entry in left if entry.label not in found)
            log(f"evaluate: no joules of {missing}: {error}")
    return found


def _predict(
    summary: Summary, opened: LoadedPair, entries: Sequence[Entry], asked: Sequence[EvalPrompt], runs: dict[str, Run]
) -> None:
    """Put beside each row what replay of the baseline's texts foretells; None where it cannot."""
    texts = {entry.sampling: runs[entry.label].ids for entry in entries if entry.method == BASELINE}
    prompts = [prompt.ids for prompt in asked]
    recordings = record_entries(opened.target, opened.parts, entries, prompts, texts)
    predictions = predict_entries(recordings, opened.parts, entries)
    for row in summary.rows:
        row["prediction"] = predictions[row["label"]]


def _results(
    recipe: EvaluateRecipe,
    asked: Sequence[EvalPrompt],
    passed: SkippedPrompts,
    device: str,
    summary: Summary,
    same: list[int] | None,
) -> dict[str, Any]:
    errors = [*summary.errors, *summary.broken]
    if same is not None and same[0] < same[1]:
        errors.append(f"greedy decoding differs from transformers.generate on {same[1] - same[0]} of {same[1]} prompts")
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "artifacts": artifact_hashes(recipe),
        "recipe": recipe.model_dump(mode="json"),
        "prompts": len(asked),
        "prompts_sha256": prompts_digest([prompt.ids for prompt in asked]),
        "passed_over": passed.as_dict(),
        "categories": dict(Counter(prompt.category for prompt in asked)),
        "resumed": 0,
        "greedy_equals_transformers": same,
        "methods": summary.rows,
        "errors": errors,
    }


def check_capacity(
    target: LanguageModel, parts: Parts, entries: Sequence[Entry], asked: Sequence[EvalPrompt], limits: Limits
) -> None:
    """ValueError for a prompt that leaves no room for its answer among the positions of the target, or of a drafter
    that some row runs: before hours of decoding come to it. The tightest row is named."""
    longest = max(asked, key=lambda prompt: len(prompt.ids))
    drafters = [each for each in (parts.drafter, *parts.more_drafters) if each is not None]
    rooms = []
    for entry in entries:
        proposer = build_method(entry.method, parts, entry.sampling, **entry.options).proposer
        nodes, ahead = proposer.capacity(limits)
        run = [model for model, _ in proposer.forwards(nodes) if any(model is each for each in drafters)]
        for name, model in (("target", target), *(("drafter", each) for each in run)):
            most = model.max_positions - limits.max_new_tokens + 1 - ahead
            rooms.append((most, ahead, entry.label, name, model.max_positions))
    most, ahead, label, name, positions = min(rooms)
    if len(longest.ids) > most:
        fits = f"`max_prompt_tokens={most}` leaves such prompts out" if most > 0 else "ask for fewer `max_new_tokens`"
        raise ValueError(
            f"prompt {longest.name} has {len(longest.ids)} tokens; with {limits.max_new_tokens} new ones and a "
            f"look-ahead of {ahead} ({label}) they do not fit into the {name}'s {positions} positions: {fits}"
        )


def _show(recipe: EvaluateRecipe, results: dict[str, Any]) -> None:
    title = f"{recipe.target}, {results['prompts']} prompts of {recipe.prompts}"
    console().print(results_table(title, results["methods"]))
    if recipe.show_categories:
        console().print(categories_table(results["methods"]))
    for error in results["errors"]:
        console().print(f"error: {error}", markup=False)
    same = results["greedy_equals_transformers"]
    if same is not None:
        console().print(f"autoregressive decoding equals transformers.generate on {same[0]} of {same[1]} prompts")
    if results["resumed"]:
        console().print(f"{results['resumed']} runs were timed by an earlier process that was interrupted")

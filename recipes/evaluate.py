"""Evaluation: prompts and artifacts in, one honest table and `results.json` out."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.sources import at_revision
from ..data.conversations import Prompt
from ..data.corpora import find_corpus
from ..data.reading import read_prompts
from ..data.rendering import prompt_renderer
from ..data.templates import get_template
from ..decode.energy import CounterError, Energy, open_meter
from ..decode.engine import Limits
from ..decode.measure import BASELINE, Entry, Run, devices_of, energy_of, measure
from ..decode.methods import Parts, build_method
from ..decode.models import LanguageModel
from ..decode.replay import predict_entries, record_entries
from ..decode.summary import Asked, Summariser, Summary, same_as_reference
from ..train.interrupts import Interrupted, StopSignals
from .certificate_report import artifact_hashes
from .config import EvaluateRecipe
from .journal import RunJournal
from .loading import write_recipe
from .opening import Opened, entries_of, open_recipe, place_of
from .report import report_beside, write_report
from .results import KIND, SCHEMA, write_results
from .terminal import Advance, bar, categories_table, console, duration, results_table, say

_NAMED_PASSED_OVER = 20  # of prompts that were too long; of the others only the number is kept


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results; go on where a killed run stopped.

    Raises:
        ValueError: a missing or unfit artifact, no prompt short enough, a method without its part, a damaged journal,
            or a lossless method whose output at temperature 0 differs from the target's own.
        Interrupted: a signal came; the runs that had finished are kept.
    """
    opened = open_recipe(recipe)
    tokenizer, target, parts, device = opened.tokenizer, opened.target, opened.parts, opened.device
    passed = PassedOver()
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None, "passed_over": passed}
    found = load_prompts(recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where)
    asked = [Asked(ids, prompt.id, prompt.category, prompt.references) for prompt, ids in found]
    limits, entries = Limits(recipe.max_new_tokens, stop_ids(tokenizer)), entries_of(recipe)
    check_room(target, parts, entries, asked, limits)
    say(f"evaluate: {len(asked)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {device}")
    if passed:
        say(f"evaluate: passed over {passed.words()}")
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
        say("evaluate: foretelling the rows by replay of the target's own texts")
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
            say(message)
            raise Interrupted(self._signals.received, message)


def _measure(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    asked: Sequence[Asked],
    limits: Limits,
    model: Any,
    journal: RunJournal,
    signals: StopSignals,
) -> dict[str, Run]:
    """The runs, of which those that the journal holds are not done again."""
    if journal.changed:
        changed = ", ".join(journal.changed)
        say(f"evaluate: {journal.path} holds runs of another evaluation ({changed} differ): starting anew")
    if journal.finished:
        say(f"evaluate: going on; {len(journal.finished)} runs are finished already, timed by an earlier process")
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
    opened: Opened,
    entries: Sequence[Entry],
    asked: Sequence[Asked],
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
        say(f"evaluate: joules of {len(found)} of {len(entries)} rows were counted by an earlier process")
    left = [entry for entry in entries if entry.label not in found]
    if not left:
        return found
    meter, words = open_meter(devices_of(opened.target, opened.parts))
    if meter is None:
        say(f"evaluate: no joules: {words}")
        return found
    each, whole = meter.timing.least, len(left) * meter.timing.least
    takes = f"{len(left)} rows of {duration(each)} or more, {duration(whole)} in all; `energy: off` leaves them out"
    say(f"evaluate: counting joules of {words} ({meter.source}): {takes}")
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
            say(f"evaluate: no joules of {missing}: {error}")
    return found


def _predict(
    summary: Summary, opened: Opened, entries: Sequence[Entry], asked: Sequence[Asked], runs: dict[str, Run]
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
    asked: Sequence[Asked],
    passed: PassedOver,
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
        "prompts_sha256": _prompts_digest([prompt.ids for prompt in asked]),
        "passed_over": passed.as_dict(),
        "categories": dict(Counter(prompt.category for prompt in asked)),
        "resumed": 0,
        "greedy_equals_transformers": same,
        "methods": summary.rows,
        "errors": errors,
    }


def identity_of(recipe: EvaluateRecipe, prompts: Sequence[Sequence[int]], device: str) -> dict[str, Any]:
    """What finished runs belong to: they may only be used again where all of it is the same."""
    settings = recipe.model_dump(mode="json", exclude={"out", "show_categories", "energy"})
    drafters = [recipe.drafter, *recipe.more_drafters]
    parts = [*((source, "drafter") for source in drafters), (recipe.heads, "heads"), (recipe.table, "table")]
    artifacts = {source: state_of(place_of(source, kind)) for source, kind in parts if source is not None}
    artifacts[recipe.target] = state_of(at_revision(recipe.target))
    return settings | {"artifacts": artifacts, "prompts read": _prompts_digest(prompts), "machine": machine(device)}


def state_of(source: str) -> Any:
    """What changes when a folder or file is written anew; an artifact's manifest holds the hashes of its files."""
    folder = Path(source)
    manifest = folder / "artifact.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = sorted(path for path in (folder, *folder.rglob("*")) if path.is_file())
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


@dataclass
class PassedOver:
    """Prompts that were read and not asked, up to the last that was."""

    too_long: list[str] = field(default_factory=list)
    """Their names."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many others, by reason."""

    def __bool__(self) -> bool:
        return bool(self.too_long or self.skipped)

    def words(self) -> str:
        """For people."""
        counts = Counter({"too long": len(self.too_long)}) + self.skipped
        return ", ".join(f"{count} prompts ({reason})" for reason, count in counts.items())

    def as_dict(self) -> dict[str, Any]:
        """Numbers by reason, and the first names of those that were too long."""
        counts = {"too long": len(self.too_long)} | dict(self.skipped)
        return {"counts": counts, "too_long": self.too_long[:_NAMED_PASSED_OVER]}


def load_prompts(
    source: str,
    template: str,
    tokenizer: Any,
    limit: int,
    max_tokens: int,
    *,
    path: str | None = None,
    groups: Sequence[str] | None = None,
    passed_over: PassedOver | None = None,
) -> list[tuple[Prompt, list[int]]]:
    """Questions of an evaluation set or of conversations, each with its token ids as the template presents them for
    generation, in the order of the set. Of a set with fixed groups each group gives as many as the others, as far as
    it has them. `passed_over` gets those that were read and left out.

    Raises:
        ValueError: where there is no prompt, naming what was left out and why, or none is short enough, naming the
            limit and the shortest.
    """
    encode = prompt_renderer(get_template(template, tokenizer), tokenizer)
    lengths: list[int] = []
    passed = PassedOver() if passed_over is None else passed_over

    def short_enough() -> Iterator[tuple[Prompt, list[int]]]:
        for prompt in read_prompts(source, path=path, groups=groups, skipped=passed.skipped):
            ids = encode(prompt.turns)
            lengths.append(len(ids))
            if len(ids) <= max_tokens:
                yield prompt, ids
            else:
                passed.too_long.append(prompt.id)

    prompts = list(islice(_in_turn(source, short_enough()), limit))
    if not lengths:
        raise ValueError(f"no prompt in {source}: {passed.words() or 'it is empty'}")
    if not prompts:
        raise ValueError(f"no prompt in {source} has at most {max_tokens} tokens; the shortest has {min(lengths)}")
    return prompts


def check_room(
    target: LanguageModel, parts: Parts, entries: Sequence[Entry], asked: Sequence[Asked], limits: Limits
) -> None:
    """ValueError for a prompt that leaves no room for its answer among the positions of the target, or of a drafter
    that some row runs: before hours of decoding come to it. The tightest row is named."""
    longest = max(asked, key=lambda prompt: len(prompt.ids))
    drafters = [each for each in (parts.drafter, *parts.more_drafters) if each is not None]
    rooms = []
    for entry in entries:
        proposer = build_method(entry.method, parts, entry.sampling, **entry.options).proposer
        nodes, ahead = proposer.room(limits)
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


def _in_turn(source: str, prompts: Iterator[tuple[Prompt, list[int]]]) -> Iterator[tuple[Prompt, list[int]]]:
    """Prompts of a set with groups, one of each group after the other."""
    corpus = find_corpus(source)
    if corpus is None or not corpus.groups:
        yield from prompts
        return
    by_group: dict[str, list[tuple[Prompt, list[int]]]] = {}
    for prompt, ids in prompts:
        by_group.setdefault(prompt.category, []).append((prompt, ids))
    for place in range(max(map(len, by_group.values()), default=0)):
        yield from (group[place] for group in by_group.values() if place < len(group))


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer."""
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def machine(device: str) -> dict[str, Any]:
    """Hardware and library versions that numbers were measured with."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu_name()
    versions = {}
    for package in ("draftsmith", "torch", "transformers", "accelerate", "deepspeed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    threads = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"device": device, "name": name, **threads, "python": platform.python_version(), "versions": versions}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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

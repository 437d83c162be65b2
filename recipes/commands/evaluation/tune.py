"""`draftsmith tune`: the best settings of every method by replay under measured costs, and the winners decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....decode.evaluation.measure import BASELINE, Entry, Run, measure, sample_texts, steady
from ....decode.evaluation.metrics import speedup_interval, total
from ....decode.evaluation.quality import perplexity
from ....decode.evaluation.replay.costs import PROBE_REPEATS, CostModel, measure_forwards, measure_overheads
from ....decode.evaluation.replay.recording import Recording, record
from ....decode.evaluation.replay.tuning import (
    DECODED,
    LOSSY,
    PROBE_SETTINGS,
    SAME_WHEN_GREEDY,
    SLIM,
    TYPICAL,
    VARIANTS,
    Choice,
    Space,
    frontier,
    probes,
    settings_of,
    tune_decoded,
    tune_method,
    tuned_methods,
    with_costs,
)
from ....decode.methods import Parts, build_method, needs_of
from ....decode.proposers.ngrams import TableSource
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, open_case
from ...report.tune import describe_settings, show
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.loading import write_recipe
from ...session.machine import machine
from ...session.stopping import Stoppable
from ...session.terminal import console, log
from .estimate import planned_time, time_words
from .journal import RUN, Journal, Kept

LeftOut = dict[str, str]
"""Why, by method, or by the name of a row."""
Fixed = dict[str, dict[str, Any]]
"""By method, the settings that the recipe fixes."""
_SHOWN = 3  # settings of each method in the table and in the file
_CONFIRMED = 4  # methods whose best settings are decoded
_CONFIRMED_OF_BEST = 3  # settings of the first of them
_CONFIRMED_LOSSY = 3  # settings of each lossy method
_PROBES = 4  # prompts that each method is decoded with to learn its overhead
_BATCH = 8  # texts that the target writes together
_TEXTS, _CHOICES = TypeAdapter(list[list[int]]), TypeAdapter(list[Choice])
_CHOICE: TypeAdapter[Choice | None] = TypeAdapter(Choice | None)
_COSTS = TypeAdapter(CostModel)


@dataclass(frozen=True)
class _Case(Case):
    """What is tuned."""

    sampling: Sampling
    space: Space
    fixed: Fixed
    """Of every method to tune."""
    kept: Kept
    signals: Stoppable


def run_tune(recipe: EvaluateRecipe, space: Space | None = None) -> dict[str, Any]:
    """Record, search, confirm; writes `tune.json` and `recipe.yaml` to a folder beside `recipe.out`. Resumes where a
    killed run stopped.

    Methods of the recipe that can be tuned are; their settings that are not searched stay as they are. A recipe with
    the baseline alone has every method tuned that its parts allow.
    """
    if recipe.batch > 1:
        raise ValueError(f"tune decodes one prompt at a time, and `batch` is {recipe.batch}")
    folder, space = Path(recipe.out).with_suffix(".tune"), space or Space()
    check_writable(folder)
    sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
    opened = open_case(recipe)
    fixed, left_out = _methods_to_tune(recipe, opened.opened.parts, sampling)
    runs, longest = _runs(fixed, len(opened.prompts), recipe, space), max(map(len, opened.prompts))
    log(f"tune: {', '.join(fixed)}; {time_words(opened.opened.target, runs, recipe.max_new_tokens, longest)}")
    identity = opened.identity | {"space": asdict(space)}
    with Stoppable("tune") as signals, Journal(folder / "tune.json", "work", identity) as journal:
        case = _Case(
            **vars(opened), sampling=sampling, space=space, fixed=fixed, kept=Kept(journal, signals), signals=signals
        )
        results = _tuned(case, left_out, folder)
        journal.remove()
    show(results, folder)
    return results


def show_plan(recipe: EvaluateRecipe) -> None:
    """Print what would be tuned and how long that takes, of which the target alone is loaded."""
    named: Any = recipe  # which has names where parts would be
    fixed, left_out = _methods_to_tune(recipe, named, Sampling(recipe.temperature, recipe.top_k, recipe.top_p))
    time = planned_time(recipe, _runs(fixed, recipe.limit, recipe, Space()))
    lines = [f"{', '.join(fixed)}, on {recipe.limit} prompts of {recipe.prompts}", time]
    lines += [f"left out: {name}: {why}" for name, why in left_out.items()]
    console().print("\n".join(lines), soft_wrap=True)


def _runs(fixed: Fixed, prompts: int, recipe: EvaluateRecipe, space: Space) -> int:
    """Texts that are decoded at most: the target's own, settings that are decoded, probes of steps, the winners."""
    sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
    settings = sum(len(settings_of(name, sampling, Parts(), space)) for name in fixed if name in DECODED)
    winners = 1 + _CONFIRMED + _CONFIRMED_OF_BEST + _CONFIRMED_LOSSY * sum(name in LOSSY for name in fixed)
    probed = PROBE_REPEATS * min(_PROBES, prompts) * (1 + PROBE_SETTINGS * len(fixed))
    return prompts + settings * min(space.decoded_prompts, prompts) + probed + winners * prompts * recipe.repeats


def _tuned(case: _Case, left_out: LeftOut, folder: Path) -> dict[str, Any]:
    recipe, recording = case.recipe, _recording(case)
    lengths = [len(prompt) + len(text) / 2 for prompt, text in zip(case.prompts, recording.texts, strict=True)]
    log("tune: timing forwards")
    context = round(sum(lengths) / len(lengths))
    forwards = case.kept("forwards", _COSTS, lambda: measure_forwards(case.opened.target, case.opened.parts, context))
    searched, nothing = _search(case, recording, forwards)
    costs, choices = _timed(case, forwards, searched)
    plain, confirmed = _confirm(case, choices)
    lossless = [row for row in confirmed if row["lossless"]]
    best = max(lossless, key=lambda row: float(row["speedup"]), default=None)
    results = {
        "schema": 2,
        "kind": "tuning",
        "machine": machine(case.opened.device),
        "artifacts": case.opened.artifacts(),
        "recipe": recipe.recorded(),
        "prompts": len(case.prompts),
        "positions": recording.positions,
        "costs": asdict(costs),
        "methods": {name: [asdict(choice) for choice in tried[:_SHOWN]] for name, tried in choices.items()},
        "tried": {name: len(tried) for name, tried in searched.items()},
        "left_out": [{"method": name, "why": why} for name, why in (left_out | nothing).items()],
        "baseline": plain,
        "confirmed": confirmed,
        "best": None if best is None else best["label"],
    }
    atomic_text(folder / "tune.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    write_recipe(_tuned_recipe(recipe, choices, folder), folder / "recipe.yaml")
    return results


def _recording(case: _Case) -> Recording:
    """What replay needs of the target's own texts."""
    tables = [TableSource(1)]
    if "bigram" in case.fixed:
        proposer = build_method("bigram", case.opened.parts, case.sampling, **case.fixed["bigram"]).proposer
        tables.append(proposer.source)  # type: ignore[attr-defined]
    texts, seed = list[list[int]](), case.recipe.seed
    with case.signals.bar("writing texts", "prompts") as advance:
        for first in range(0, len(case.prompts), _BATCH):
            what = (case.opened.target, case.prompts[first : first + _BATCH], case.limits, case.sampling)
            written = case.kept(f"texts {first}", _TEXTS, partial(sample_texts, *what, seed=seed + first))
            texts += written
            advance(len(texts), len(case.prompts))
    given: dict[str, Any] = {"candidates": case.space.candidates, "head_candidates": case.space.head_candidates}
    given |= {"tables": tables, "seed": seed}
    with case.signals.bar("recording", "prompts") as advance:
        return record(
            case.opened.target, case.opened.parts, case.prompts, texts, case.sampling, progress=advance, **given
        )


def _search(case: _Case, recording: Recording, costs: CostModel) -> tuple[dict[str, list[Choice]], LeftOut]:
    """By method, its settings in order of predicted speedup; and why there are none of others."""
    choices: dict[str, list[Choice]] = {}
    for name, fixed in case.fixed.items():
        if name not in DECODED:
            log(f"tune: searching the settings of {name}")
            given = (recording, case.opened.parts, costs, name, fixed, case.space)
            choices[name] = case.kept(f"settings of {name}", _CHOICES, partial(tune_method, *given))
            continue

        with case.signals.bar(f"decoding settings of {name}", "settings") as advance:
            what = (case.opened.target, case.opened.parts, recording, costs, name, case.limits, fixed, case.space)
            choices[name] = tune_decoded(
                *what, seed=case.recipe.seed, progress=advance, keep=case.kept.each(f"setting of {name}", _CHOICE)
            )
    why = f"no setting within the bounds of the search, {case.space.nodes} nodes a step among them, could be judged"
    nothing = {name: why for name in case.fixed if not choices[name]}
    return {name: choices[name] for name in case.fixed if choices[name]}, nothing


def _timed(
    case: _Case, forwards: CostModel, searched: Mapping[str, list[Choice]]
) -> tuple[CostModel, dict[str, list[Choice]]]:
    """The cost model with the methods' overheads, and the choices under it."""
    # A step of Medusa's costs what it costs, whichever way it accepts.
    known = [tried for name, tried in searched.items() if name != TYPICAL or "medusa" not in searched]
    timed = [(choice.method, choice.options) for tried in known for choice in probes(tried)]
    given = (forwards, case.opened.target, case.opened.parts, timed, case.prompts[:_PROBES], case.limits, case.sampling)
    with case.signals.bar("timing steps", "runs") as advance:
        costs = measure_overheads(
            *given, seed=case.recipe.seed, progress=advance, keep=case.kept.each("timed run", RUN)
        )
    choices = {}
    for name, tried in searched.items():
        fastest = with_costs(tried, case.opened.parts, case.sampling, costs)
        choices[name] = frontier(fastest, _CONFIRMED_LOSSY) if name in LOSSY else fastest
    return costs, choices


def _confirm(case: _Case, choices: dict[str, list[Choice]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Plain decoding, and the best settings decoded beside it: what was predicted and what was measured."""
    firsts = sorted((tried[0] for name, tried in choices.items() if name not in LOSSY), key=lambda each: -each.speedup)
    chosen = firsts[:_CONFIRMED]
    if chosen:
        chosen[1:1] = choices[chosen[0].method][1:_CONFIRMED_OF_BEST]
    chosen += [choice for name, tried in choices.items() if name in LOSSY for choice in tried]
    labelled = {f"{number}. {choice.method}": choice for number, choice in enumerate(chosen, 1)}
    entries = [Entry(BASELINE, BASELINE, {}, case.sampling)]
    entries += [Entry(label, choice.method, choice.options, case.sampling) for label, choice in labelled.items()]
    settings: dict[str, Any] = case.recipe.model_dump(include={"repeats", "again", "seed"})
    settings |= case.kept.runs("confirmed run")
    with case.signals.bar("confirming", "runs") as advance:
        what = (case.opened.target, case.opened.parts, entries, case.prompts, case.limits)
        runs = measure(*what, progress=advance, **settings)
    plain = {"label": BASELINE, "lossless": True, "speedup": 1.0}
    plain["perplexity"] = perplexity(case.opened.target, case.prompts, runs[BASELINE].ids)
    return plain, [_confirmed(case, label, choice, runs) for label, choice in labelled.items()]


def _confirmed(case: _Case, label: str, choice: Choice, runs: Mapping[str, Run]) -> dict[str, Any]:
    run, base = runs[label], runs[BASELINE]
    tokens, plain_tokens = [len(ids) for ids in run.ids], [len(ids) for ids in base.ids]
    speedup, interval = speedup_interval(tokens, run.median_seconds(), plain_tokens, base.median_seconds())
    predicted = ("tokens_per_step", "speedup", "perplexity", "found_by")
    return {
        "label": label,
        "method": choice.method,
        "options": choice.options,
        "lossless": choice.lossless,
        "predicted": {name: getattr(choice, name) for name in predicted},
        "tokens_per_step": total(run.tallies).metrics()["tokens_per_step"],
        "speedup": speedup,
        "speedup_interval": interval,
        "steady": steady(run, base),
        "stepping_speedup": run.stepping_rate() / base.stepping_rate(),
        "perplexity": None if choice.lossless else perplexity(case.opened.target, case.prompts, run.ids),
    }


def _tuned_recipe(recipe: EvaluateRecipe, choices: Mapping[str, list[Choice]], folder: Path) -> EvaluateRecipe:
    """The recipe with the chosen settings: a row a method, and one for each setting of a lossy one."""
    rows = [MethodSection(method=BASELINE)]
    for name, tried in choices.items():
        for each in tried if name in LOSSY else tried[:1]:
            label = f"{name} {describe_settings(each.method, each.options)}" if name in LOSSY else None
            rows.append(MethodSection(method=each.method, label=label, options=each.options))
    return recipe.model_copy(update={"methods": rows, "out": str(folder / "results.json")})


def _methods_to_tune(recipe: EvaluateRecipe, parts: Parts, sampling: Sampling) -> tuple[Fixed, LeftOut]:
    """The methods to tune; and why the others are not that the recipe names, or that its parts allow if it names none.
    Raises ValueError: no method that can be tuned."""
    known = tuned_methods(parts, sampling)
    rows = [row for row in recipe.methods if row.method != BASELINE]
    if not rows:
        if not known:
            raise ValueError("there is nothing to tune: the recipe names neither a drafter nor heads nor a table")
        same = {
            name: f"at temperature 0 it does the same as {other}"
            for name, other in SAME_WHEN_GREEDY.items()
            if name not in known and all(getattr(parts, part) is not None for part in needs_of(name, {}))
        }
        return {name: {} for name in known}, same
    first = [row.options.get("drafter", 1) == 1 for row in rows]
    here = [mine and row.temperature in (None, recipe.temperature) for mine, row in zip(first, rows, strict=True)]
    last = {_tuned_as(row, sampling): index for index, row in enumerate(rows) if here[index]}
    fixed: Fixed = {}
    why: LeftOut = {}
    for index, row in enumerate(rows):
        name, at = _tuned_as(row, sampling), row.temperature
        if not first[index]:
            why[_named(row)] = "only methods of the first drafter are replayed"
        elif not here[index]:
            why[_named(row)] = f"its temperature is {at:g}, the recipe's {recipe.temperature:g}: `temperature={at:g}`"
        elif name not in (*known, *SAME_WHEN_GREEDY, *SLIM):  # one without correlation needs no table
            why[_named(row)] = "none of its settings is searched"
        elif index != last[name]:
            why[_named(row)] = f"{name} is tuned once, with what the last of its rows fixes"
        else:
            fixed[name] = dict(row.options)
    if not fixed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"none of the recipe's methods can be tuned ({reasons}). Known: {', '.join(known)}")
    return fixed, why


def _tuned_as(row: MethodSection, sampling: Sampling) -> str:
    for name, (method, options) in VARIANTS.items():
        chosen = method == row.method and all(row.options.get(key) == value for key, value in options.items())
        if chosen and not (name == TYPICAL and sampling.greedy):
            return name
    return row.method


def _named(row: MethodSection) -> str:
    """A row for people."""
    settings = ", ".join(f"{key} {value}" for key, value in row.options.items())
    words = row.label or (f"{row.method} ({settings})" if settings else row.method)
    return words if row.temperature is None else f"{words} at temperature {row.temperature:g}"

"""`draftsmith tune`: search the settings of every method, and confirm the fastest ones by an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....decode.evaluation.measure import BASELINE, sample_texts
from ....decode.evaluation.tuning.costs import PROBE_REPEATS, CostModel, measure_forwards, measure_overheads
from ....decode.evaluation.tuning.recording import Recording, record
from ....decode.evaluation.tuning.search import (
    PROBES,
    apply_costs,
    pareto_frontier,
    search_by_decoding,
    search_by_replay,
    select_probes,
)
from ....decode.evaluation.tuning.space import (
    DECODED,
    LOSSY,
    SAME_WHEN_GREEDY,
    SLIM,
    TYPICAL,
    VARIANTS,
    Setting,
    Space,
    is_decoded,
    list_settings,
    tunable_methods,
)
from ....decode.evaluation.tuning.tuner import DecodingBackend, Measurement, Workload, tune
from ....decode.methods import Parts, build_method, method_config
from ....decode.proposers.ngrams import TableSource
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, open_case
from ...report.tune import describe_settings, show_tuning
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.loading import write_recipe
from ...session.stopping import Stoppable
from ...session.terminal import log
from .evaluate import evaluate_once, identity_of, read_finished
from .journal import RUN, Journal, Kept

LeftOut = dict[str, str]
"""Reasons why methods, or rows, are not tuned."""
Fixed = dict[str, dict[str, Any]]
"""Options that the recipe fixes, by method."""
_CONFIRMED = 4  # methods whose best setting is confirmed
_CONFIRMED_OF_BEST = 3  # settings of the first of them
_CONFIRMED_LOSSY = 3  # settings of each lossy method
_BATCH = 8  # texts that the target writes together
_TEXTS, _SETTINGS = TypeAdapter(list[list[int]]), TypeAdapter(list[Setting])
_SETTING: TypeAdapter[Setting | None] = TypeAdapter(Setting | None)
_COSTS = TypeAdapter(CostModel)


@dataclass(frozen=True)
class Search:
    """Settings that were searched."""

    positions: int
    """Number of recorded tokens."""
    costs: CostModel
    settings: dict[str, list[Setting]]
    """Settings by method, the fastest first; of lossy methods the frontier of speed and perplexity."""
    tried: dict[str, int]
    """Number of settings that were tried, by method."""
    left_out: LeftOut


_SEARCH = TypeAdapter(Search)


@dataclass(frozen=True)
class _Case(Case):
    """An opened evaluation to tune."""

    sampling: Sampling
    space: Space
    fixed: Fixed
    kept: Kept
    signals: Stoppable


def run_tune(recipe: EvaluateRecipe, space: Space | None = None) -> dict[str, Any]:
    """Search the settings of the recipe's methods and confirm the best ones; resume an interrupted run.

    Options of the recipe that are not searched stay fixed. With the baseline alone, every method is tuned for which
    the recipe has the parts. Writes `tune.json`, `recipe.yaml` and the evaluation `confirmed.json` into a directory
    next to `recipe.out`.
    """
    folder = tuning_folder(recipe)
    search = search_settings(recipe, space)
    chosen = {_label(each): each for each in _to_confirm(search.settings)}
    rows = [MethodSection(method=each.method, label=label, options=each.options) for label, each in chosen.items()]
    changes: dict[str, Any] = {"compare_with_transformers": False, "energy": "off"}
    changes |= {"methods": [MethodSection(method=BASELINE), *rows], "out": str(folder / "confirmed.json")}
    results = evaluate_once(recipe.model_copy(update=changes))
    baseline, *measured = results["methods"]
    found = {row["label"]: row for row in measured}
    lossless = [label for label, row in found.items() if row["lossless"]]
    backend = DecodingBackend(
        Workload(recipe.batch, recipe.temperature),
        {label: chosen[label].speedup for label in lossless},
        lossless,
        lambda labels: {label: Measurement.of_row("", found[label]) for label in labels},
    )
    ranking = [each.measured for ranked in tune(backend, rounds=1).values() for each in ranked if each.measured]
    best = max(ranking, key=lambda each: (each.is_steady, each.speedup), default=None)
    tuned = {
        "schema": 3,
        "kind": "tuning",
        **{key: results[key] for key in ("machine", "artifacts", "prompts")},
        "recipe": recipe.recorded(),
        "positions": search.positions,
        "costs": asdict(search.costs),
        "methods": {name: [asdict(each) for each in found[:3]] for name, found in search.settings.items()},
        "tried": search.tried,
        "left_out": [{"method": name, "why": why} for name, why in search.left_out.items()],
        "baseline": baseline,
        "confirmed": [row | {"predicted": asdict(chosen[label])} for label, row in found.items()],
        "best": None if best is None else best.label,
    }
    atomic_text(folder / "tune.json", json.dumps(tuned, indent=2, allow_nan=False) + "\n")
    write_recipe(_tuned_recipe(recipe, search.settings, folder), folder / "recipe.yaml")
    show_tuning(tuned, folder)
    return tuned


def tuning_folder(recipe: EvaluateRecipe) -> Path:
    """Return the directory of what tuning writes."""
    return Path(recipe.out).with_suffix(".tune")


def search_settings(recipe: EvaluateRecipe, space: Space | None = None) -> Search:
    """Search the settings of the recipe's methods under measured costs.

    An interrupted search resumes. A finished one of the same settings, files and machine is read again.
    """
    folder, space = tuning_folder(recipe), space or Space()
    check_writable(folder)
    done = folder / "search.json"
    identity = identity_of([recipe.recorded(exclude={"out"}), asdict(space)], recipe.sources(), recipe)
    if (finished := read_finished(done, identity)) is not None:
        log(f"tune: settings were searched before, see {done}")
        return _SEARCH.validate_python(finished["search"])
    sampling = sampling_of(recipe)
    opened = open_case(recipe)
    fixed, left_out = _methods_to_tune(recipe, opened.opened.parts, sampling)
    log(f"tune: {', '.join(fixed)}")
    about = opened.identity | {"space": asdict(space)}
    with Stoppable("tune") as signals, Journal(folder / "tune.json", "work", about) as journal:
        case = _Case(
            **vars(opened), sampling=sampling, space=space, fixed=fixed, kept=Kept(journal, signals), signals=signals
        )
        search = _search(case, left_out)
        text = json.dumps({"identity": identity, "search": _SEARCH.dump_python(search, mode="json")})
        atomic_text(done, text + "\n")
        journal.remove()
    return search


def count_runs(names: Sequence[str] | Fixed, prompts: int, recipe: EvaluateRecipe, space: Space) -> int:
    """Count the texts that tuning decodes at most: the target's, searched settings, probes, confirmed settings."""
    sampling = sampling_of(recipe)
    settings = sum(len(list_settings(name, sampling, Parts(), space)) for name in names if name in DECODED)
    confirmed = 1 + _CONFIRMED + _CONFIRMED_OF_BEST + _CONFIRMED_LOSSY * sum(name in LOSSY for name in names)
    probed = PROBE_REPEATS * min(space.probed_prompts, prompts) * (1 + PROBES * len(names))
    return prompts + settings * min(space.decoded_prompts, prompts) + probed + confirmed * prompts * recipe.repeats


def sampling_of(recipe: EvaluateRecipe) -> Sampling:
    """Return how the recipe samples."""
    return Sampling(recipe.temperature, recipe.top_k, recipe.top_p)


def _search(case: _Case, left_out: LeftOut) -> Search:
    recording, target, parts = _record(case), case.opened.target, case.opened.parts
    lengths = [len(prompt) + len(text) / 2 for prompt, text in zip(case.prompts, recording.texts, strict=True)]
    log("tune: timing forwards")
    context = round(sum(lengths) / len(lengths))
    forwards = case.kept("forwards", _COSTS, lambda: measure_forwards(target, parts, context))
    found = {name: _search_method(case, recording, forwards, name) for name in case.fixed}
    why = f"no setting within the bounds of the search, {case.space.nodes} nodes per step among them, could be judged"
    left_out = left_out | {name: why for name, settings in found.items() if not settings}
    found = {name: settings for name, settings in found.items() if settings}
    # A step of Medusa costs the same with exact and typical acceptance.
    timed = [settings for name, settings in found.items() if name != TYPICAL or "medusa" not in found]
    probes = [(each.method, each.options) for settings in timed for each in select_probes(settings)]
    prompts = case.prompts[: case.space.probed_prompts]
    with case.signals.bar("timing steps", "runs") as advance:
        what = (forwards, target, parts, probes, prompts, case.limits, case.sampling)
        keep = case.kept.each("timed run", RUN)
        costs = measure_overheads(*what, seed=case.recipe.seed, progress=advance, keep=keep)
    costs = replace(costs, batch=case.recipe.batch)
    settings = {name: apply_costs(each, parts, case.sampling, costs) for name, each in found.items()}
    settings |= {name: pareto_frontier(settings[name], _CONFIRMED_LOSSY) for name in LOSSY if name in settings}
    return Search(recording.positions, costs, settings, {name: len(each) for name, each in found.items()}, left_out)


def _record(case: _Case) -> Recording:
    """Record what replay needs from texts of the target."""
    target, parts, tables = case.opened.target, case.opened.parts, [TableSource(1)]
    if "bigram" in case.fixed:
        proposer = build_method("bigram", parts, case.sampling, **case.fixed["bigram"]).proposer
        tables.append(proposer.source)  # type: ignore[attr-defined]
    texts, seed = list[list[int]](), case.recipe.seed
    with case.signals.bar("writing texts", "prompts") as advance:
        for first in range(0, len(case.prompts), _BATCH):
            what = (target, case.prompts[first : first + _BATCH], case.limits, case.sampling)
            written = case.kept(f"texts {first}", _TEXTS, partial(sample_texts, *what, seed=seed + first))
            texts += written
            advance(len(texts), len(case.prompts))
    given: dict[str, Any] = {"candidates": case.space.candidates, "head_candidates": case.space.head_candidates}
    with case.signals.bar("recording", "prompts") as advance:
        given |= {"tables": tables, "seed": seed, "progress": advance}
        return record(target, parts, case.prompts, texts, case.sampling, **given)


def _search_method(case: _Case, recording: Recording, costs: CostModel, name: str) -> list[Setting]:
    parts, fixed = case.opened.parts, case.fixed[name]
    if not is_decoded(name, parts):
        log(f"tune: searching the settings of {name}")
        work = partial(search_by_replay, recording, parts, costs, name, fixed, case.space)
        return case.kept(f"settings of {name}", _SETTINGS, work)
    with case.signals.bar(f"decoding settings of {name}", "settings") as advance:
        what = (case.opened.target, parts, recording, costs, name, case.limits, fixed, case.space)
        keep = case.kept.each(f"setting of {name}", _SETTING)
        return search_by_decoding(*what, seed=case.recipe.seed, progress=advance, keep=keep)


def _to_confirm(settings: Mapping[str, list[Setting]]) -> list[Setting]:
    """Select the best settings of the best methods, and the frontiers of lossy ones."""
    ranked = sorted((found for name, found in settings.items() if name not in LOSSY), key=lambda each: -each[0].speedup)
    chosen = [found[0] for found in ranked[:_CONFIRMED]]
    chosen[1:1] = ranked[0][1:_CONFIRMED_OF_BEST] if ranked else []
    return chosen + [each for name, found in settings.items() if name in LOSSY for each in found]


def _label(setting: Setting) -> str:
    return f"{setting.method}, {describe_settings(setting.method, setting.options)}"


def _tuned_recipe(recipe: EvaluateRecipe, settings: Mapping[str, list[Setting]], folder: Path) -> EvaluateRecipe:
    """Return the recipe with the best setting of each method, and the frontier of each lossy one."""
    rows = [MethodSection(method=BASELINE)]
    for name, found in settings.items():
        for each in found if name in LOSSY else found[:1]:
            label = f"{name} {describe_settings(each.method, each.options)}" if name in LOSSY else None
            rows.append(MethodSection(method=each.method, label=label, options=each.options))
    return recipe.model_copy(update={"methods": rows, "out": str(folder / "results.json")})


def _methods_to_tune(recipe: EvaluateRecipe, parts: Parts, sampling: Sampling) -> tuple[Fixed, LeftOut]:
    """Return the methods to tune, and why others that the recipe names, or its parts allow, are left out.

    Raises:
        ValueError: No method can be tuned.
    """
    known = tunable_methods(parts, sampling)
    rows = [row for row in recipe.methods if row.method != BASELINE]
    if not rows:
        if not known:
            raise ValueError("there is nothing to tune: the recipe names neither a drafter nor heads nor a table")
        same = {
            name: f"at temperature 0 it does the same as {other}"
            for name, other in SAME_WHEN_GREEDY.items()
            if name not in known and all(getattr(parts, part) is not None for part in method_config(name, {}).needs)
        }
        return {name: {} for name in known}, same
    fixed: Fixed = {}
    why: LeftOut = {}
    for row in rows:
        name, temperature = tuned_as(row, sampling), row.temperature
        if row.options.get("drafter", 1) != 1:
            why[_row_name(row)] = "only methods of the first drafter are tuned"
        elif temperature not in (None, recipe.temperature):
            why[_row_name(row)] = (
                f"the temperature of the recipe is {recipe.temperature:g}: set `temperature={temperature:g}`"
            )
        elif name not in (*known, *SAME_WHEN_GREEDY, *SLIM):  # SLiM without correlation needs no table
            why[_row_name(row)] = "none of its settings is searched"
        elif name in fixed:
            why[_row_name(row)] = f"{name} is tuned once, with the options of its first row"
        else:
            fixed[name] = dict(row.options)
    if not fixed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"none of the recipe's methods can be tuned ({reasons}). Known: {', '.join(known)}")
    return fixed, why


def tuned_as(row: MethodSection, sampling: Sampling) -> str:
    """Return the name under which the method of a row is tuned."""
    for name, (method, options) in VARIANTS.items():
        chosen = method == row.method and all(row.options.get(key) == value for key, value in options.items())
        if chosen and not (name == TYPICAL and sampling.greedy):
            return name
    return row.method


def _row_name(row: MethodSection) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in row.options.items())
    words = row.label or (f"{row.method} ({settings})" if settings else row.method)
    return words if row.temperature is None else f"{words} at temperature {row.temperature:g}"

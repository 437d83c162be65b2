"""`draftsmith tune`: the best settings of every method by replay under measured costs, and the winners decoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import model_fingerprint
from ....checkpoints.artifact.locate import at_revision
from ....checkpoints.storage.atomic import atomic_text
from ....decode.engine import Limits
from ....decode.evaluation.measure import BASELINE, Entry, Run, measure
from ....decode.evaluation.metrics import speedup_interval, total
from ....decode.evaluation.quality import perplexity
from ....decode.evaluation.replay.costs import CostModel, measure_forwards, measure_overheads
from ....decode.evaluation.replay.mjsd import record_joint
from ....decode.evaluation.replay.recording import (
    Recording,
    TableSource,
    load_recording,
    record,
    sample_texts,
    save_recording,
)
from ....decode.evaluation.replay.replay import predict
from ....decode.evaluation.replay.tuning import (
    DECODED,
    LOSSY,
    SAME_WHEN_GREEDY,
    SLIM,
    TYPICAL,
    Choice,
    Space,
    probes,
    settings_of,
    several_chains,
    tune_joint,
    tune_method,
    tuned_methods,
    with_costs,
)
from ....decode.evaluation.replay.tuning_lossy import frontier, lossy_settings, tune_lossy
from ....decode.methods import METHODS, Parts, build_method
from ....decode.models.base import LanguageModel
from ....decode.warpers import Sampling
from ...assemble.evaluation import LoadedPair, open_recipe, place_of
from ...report.tune import in_words, show, write_frontier
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.loading import write_recipe
from ...session.terminal import Advance, bar, log
from . import evaluate

LeftOut = dict[str, str]
"""Why, by method, or by the name of a row."""
_SAME = dict.fromkeys(SAME_WHEN_GREEDY, "speculative") | {
    "naive-multi-candidate": "multi-candidate",
    "relaxed-uno": "relaxed-opt",
}
"""What methods of `SAME_WHEN_GREEDY` do the same as."""


SCHEMA = 2
_SHOWN = 3  # settings of each method in the table and in the file
_CONFIRMED = 4  # methods whose best settings are decoded
_CONFIRMED_OF_BEST = 3  # settings of the first of them
_CONFIRMED_LOSSY = 3  # settings of each lossy method whose settings were decoded
_PROBES = 4  # prompts that each method is decoded with to learn its overhead
_JOINT = ((2, 2), (2, 4), (3, 4), (4, 2), (4, 4), (4, 8), (6, 4), (8, 4))  # γ and beams of MJSD


def run_tune(recipe: EvaluateRecipe, space: Space | None = None) -> dict[str, Any]:
    """Record, search, confirm; writes `tune.json`, `tune.html`, `recipe.yaml` and the recording to a folder beside
    `recipe.out`.

    Methods of the recipe that can be tuned are; their settings that are not searched stay as they are. A recipe with
    the baseline alone has every method tuned that its parts allow. A recording of the same models, prompts and sampling
    is used again.

    Raises:
        ValueError: what an evaluation raises for its artifacts and prompts; no method that can be tuned.
    """
    space = space or Space()
    opened = open_recipe(recipe)
    target, parts, tokenizer = opened.target, opened.parts, opened.tokenizer
    sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
    rows, left_out = rows_of(recipe, opened, sampling)
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    asked = evaluate.load_prompts(
        recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where
    )
    prompts = [ids for _, ids in asked]
    limits = Limits(recipe.max_new_tokens, evaluate.stop_ids(tokenizer))
    folder = tune_folder(Path(recipe.out))
    recording = _recording(recipe, target, parts, prompts, limits, sampling, rows, space, folder)
    lengths = [len(prompt) + len(text) / 2 for prompt, text in zip(prompts, recording.texts, strict=True)]
    log("tune: timing forwards")
    forwards = measure_forwards(target, parts, round(sum(lengths) / len(lengths)))
    searched, nothing = search(target, parts, recording, forwards, rows, limits, space, seed=recipe.seed)
    left_out |= nothing
    costs, choices = _timed(recipe, target, parts, recording, forwards, searched, prompts, limits)
    plain, confirmed = _confirm(recipe, target, parts, recording, choices, prompts, limits)
    lossless = [row for row in confirmed if row["lossless"]]
    best = max(lossless, key=lambda row: float(row["speedup"]), default=None)
    results = {
        "schema": SCHEMA,
        "kind": "tuning",
        "machine": evaluate.machine(opened.device),
        "recipe": recipe.model_dump(mode="json"),
        "prompts": len(prompts),
        "positions": recording.positions,
        "costs": costs.as_dict(),
        "methods": {name: [choice.as_dict() for choice in tried[:_SHOWN]] for name, tried in choices.items()},
        "tried": {name: len(tried) for name, tried in searched.items()},
        "left_out": [{"method": name, "why": why} for name, why in left_out.items()],
        "baseline": plain,
        "confirmed": confirmed,
        "best": None if best is None else best["label"],
    }
    _write(folder / "tune.json", results)
    write_recipe(_tuned_recipe(recipe, choices, folder), folder / "recipe.yaml")
    write_frontier(results, folder / "tune.html")
    show(results, folder)
    return results


def tune_folder(out: Path) -> Path:
    """Where the results of tuning lie, given an evaluation's results file."""
    return out.with_suffix(".tune")


def search(
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    costs: CostModel,
    rows: dict[str, dict[str, Any]],
    limits: Limits,
    space: Space,
    *,
    seed: int = 0,
) -> tuple[dict[str, list[Choice]], LeftOut]:
    """By method, its settings in order of predicted speedup, of MJSD one for each threshold; and why there are none of
    others."""
    choices: dict[str, list[Choice]] = {}
    with bar("searching", "methods") as advance:
        for place, (name, fixed) in enumerate(rows.items()):
            advance(place, len(rows), name)
            if name == "mjsd":
                assert parts.drafter is not None
                sizes = [(gamma, beams) for gamma, beams in _JOINT if gamma <= space.gamma]
                records = [record_joint(target, parts.drafter, recording, *each) for each in sizes]
                choices[name] = tune_joint(records, parts, recording.sampling, costs, space.thresholds)
            elif name not in DECODED:
                choices[name] = tune_method(recording, parts, costs, name, fixed, space)
    for name in rows:
        if name in DECODED:
            with bar(f"decoding settings of {name}", "settings") as advance:
                noted = _counted(advance, sum(1 for _ in lossy_settings(name, recording, space)))
                given = (target, parts, recording, costs, name, limits, rows[name], space)
                choices[name] = tune_lossy(*given, seed=seed, progress=noted)
    nothing = {name: why_nothing(name, rows[name], recording, parts, space) for name in rows if not choices[name]}
    return {name: choices[name] for name in rows if choices[name]}, nothing


def _counted(advance: Advance, count: int) -> Callable[[], None]:
    """Progress of one more each time."""
    places = iter(range(1, count + 1))
    return lambda: advance(next(places), count)


def _recording(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    rows: dict[str, dict[str, Any]],
    space: Space,
    folder: Path,
) -> Recording:
    path = folder / "recording.safetensors"
    several = several_chains(parts) if "specinfer" in rows else 0
    tables = [TableSource(1, 1.0)]
    if "bigram" in rows:
        proposer = build_method("bigram", parts, sampling, **rows["bigram"]).proposer
        tables.append(TableSource.of(proposer))  # type: ignore[arg-type]
    looked_at = {"sampling": asdict(sampling), "tables": [table.name for table in tables], "several": several}
    identity = _identity(recipe, prompts, limits, space) | looked_at
    if path.is_file():
        recording = load_recording(path)
        if recording.identity == identity:
            log(f"tune: using the recording at {path}")
            return recording
        log(f"tune: {path} is a recording of other models, prompts or settings: recording anew")
    with bar("writing texts", "prompts") as advance:
        texts = sample_texts(target, prompts, limits, sampling, seed=recipe.seed, progress=advance)
    with bar("recording", "prompts") as advance:
        recording = record(
            target,
            parts,
            prompts,
            texts,
            sampling,
            candidates=space.candidates,
            chains=space.candidates,
            head_candidates=space.head_candidates,
            several=several,
            tables=tables,
            seed=recipe.seed,
            identity=identity,
            progress=advance,
        )
    save_recording(recording, path)
    return recording


def _identity(recipe: EvaluateRecipe, prompts: Sequence[Sequence[int]], limits: Limits, space: Space) -> dict[str, Any]:
    """What a recording belongs to."""
    models = {
        part: [source, _fingerprint(Path(at_revision(source) if part == "target" else place_of(source, part)))]
        for part in ("target", "drafter", "heads", "table")
        if (source := getattr(recipe, part)) is not None
    }
    for place, source in enumerate(recipe.more_drafters):
        models[f"drafter {place + 2}"] = [source, _fingerprint(Path(place_of(source, "drafter")))]
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()
    sizes = [space.candidates, space.head_candidates, limits.max_new_tokens, list(limits.stop_ids)]
    return {"models": models, "dtype": recipe.dtype, "prompts": digest, "sizes": sizes, "seed": recipe.seed}


def _fingerprint(folder: Path) -> str | None:
    """What changes when an artifact or a model's folder is written anew."""
    manifest = folder / "artifact.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    return model_fingerprint(folder) if (folder / "config.json").is_file() else None


def _timed(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    forwards: CostModel,
    searched: dict[str, list[Choice]],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
) -> tuple[CostModel, dict[str, list[Choice]]]:
    """The cost model with the methods' overheads, and the choices under it."""
    sampling = recording.sampling
    # A step of Medusa's costs what it costs, whichever way it accepts.
    known = [tried for name, tried in searched.items() if name != TYPICAL or "medusa" not in searched]
    timed = [(choice.method, choice.options) for tried in known for choice in probes(tried)]
    with bar("timing steps", "runs") as advance:
        costs = measure_overheads(
            forwards, target, parts, timed, prompts[:_PROBES], limits, sampling, seed=recipe.seed, progress=advance
        )
    choices = {}
    for name, tried in searched.items():
        fastest = with_costs(tried, parts, sampling, costs)
        if name == "mjsd":
            fastest.sort(key=lambda each: -each.options["threshold"])
        choices[name] = frontier(fastest, _CONFIRMED_LOSSY) if name in DECODED else fastest
    return costs, choices


def _confirm(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    choices: dict[str, list[Choice]],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Plain decoding, and the best settings decoded beside it: what was predicted and what was measured."""
    firsts = sorted((tried[0] for name, tried in choices.items() if name not in LOSSY), key=lambda each: -each.speedup)
    chosen = firsts[:_CONFIRMED]
    if chosen:
        chosen[1:1] = choices[chosen[0].method][1:_CONFIRMED_OF_BEST]
    chosen += [choice for name, tried in choices.items() if name in LOSSY for choice in tried]
    entries = {f"{place + 1}. {choice.method}": choice for place, choice in enumerate(chosen)}
    sampling = recording.sampling
    asked = [Entry(BASELINE, BASELINE, {}, sampling)]
    asked += [Entry(label, choice.method, choice.options, sampling) for label, choice in entries.items()]
    with bar("confirming", "runs") as advance:
        runs = measure(
            target, parts, asked, prompts, limits, repeats=recipe.repeats, seed=recipe.seed, progress=advance
        )
    plain = {"label": BASELINE, "lossless": True, "speedup": 1.0}
    plain["perplexity"] = perplexity(target, prompts, runs[BASELINE].ids)
    return plain, [_confirmed(target, prompts, label, choice, runs) for label, choice in entries.items()]


def _confirmed(
    target: LanguageModel, prompts: Sequence[Sequence[int]], label: str, choice: Choice, runs: dict[str, Run]
) -> dict[str, Any]:
    run, base = runs[label], runs[BASELINE]
    tokens, plain_tokens = [len(ids) for ids in run.ids], [len(ids) for ids in base.ids]
    speedup, interval = speedup_interval(tokens, run.median_seconds(), plain_tokens, base.median_seconds())
    foretold = ("tokens_per_step", "speedup", "perplexity", "found_by")
    return {
        "label": label,
        "method": choice.method,
        "options": choice.options,
        "lossless": choice.lossless,
        "predicted": {name: getattr(choice, name) for name in foretold},
        "tokens_per_step": total(run.tallies).metrics()["tokens_per_step"],
        "speedup": speedup,
        "speedup_interval": interval,
        "stepping_speedup": run.stepping_rate() / base.stepping_rate(),
        "perplexity": None if choice.lossless else perplexity(target, prompts, run.ids),
    }


def _tuned_recipe(recipe: EvaluateRecipe, choices: dict[str, list[Choice]], folder: Path) -> EvaluateRecipe:
    """The recipe with the chosen settings: a row a method, and one for each setting of a lossy one."""
    rows = [MethodSection(method=BASELINE)]
    for name, tried in choices.items():
        if name in LOSSY:
            rows += [
                MethodSection(
                    method=each.method, label=f"{name} {in_words(each.method, each.options)}", options=each.options
                )
                for each in tried
            ]
        else:
            rows.append(MethodSection(method=name, options=tried[0].options))
    return recipe.model_copy(update={"methods": rows, "out": str(folder / "results.json")})


def _write(path: Path, results: dict[str, Any]) -> None:
    atomic_text(path, json.dumps(results, indent=2, allow_nan=False) + "\n")


def rows_of(
    recipe: EvaluateRecipe, opened: LoadedPair, sampling: Sampling
) -> tuple[dict[str, dict[str, Any]], LeftOut]:
    """The settings that the recipe fixes, of each method to tune; and of the others that it names, or that its parts
    allow if it names none, why they are not tuned.

    Raises:
        ValueError: no method that can be tuned.
    """
    known = tuned_methods(opened.parts, sampling)
    left_out: LeftOut = {}
    if opened.model.config.is_encoder_decoder and "mjsd" in known:
        known.remove("mjsd")
        left_out["mjsd"] = "joint decoding is replayed for decoders, and the target is an encoder-decoder"
    asked = [row for row in recipe.methods if row.method != BASELINE]
    if not asked:
        if not known:
            raise ValueError("there is nothing to tune: the recipe names neither a drafter nor heads nor a table")
        return {name: {} for name in known}, left_out | _same_as_others(opened.parts, known)
    here = [row.temperature in (None, recipe.temperature) for row in asked]
    last = {_name(row, sampling): place for place, row in enumerate(asked) if here[place]}
    rows, why = {}, {}
    for place, row in enumerate(asked):
        name = _name(row, sampling)
        if not here[place]:
            at = row.temperature
            why[_named(row)] = f"its temperature is {at:g}, the recipe's {recipe.temperature:g}: `temperature={at:g}`"
        elif name not in (*known, *SAME_WHEN_GREEDY, *SLIM):  # one without correlation needs no table
            why[_named(row)] = left_out.get(name, "none of its settings is searched")
        elif place != last[name]:
            why[_named(row)] = f"{name} is tuned once, with what the last of its rows fixes"
        else:
            rows[name] = dict(row.options)
    if not rows:
        said = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"none of the recipe's methods can be tuned ({said}). Known: {', '.join(known)}")
    return rows, why


def _name(row: MethodSection, sampling: Sampling) -> str:
    """What a row is tuned as."""
    typical = row.method == "medusa" and row.options.get("acceptance") == "typical" and not sampling.greedy
    return TYPICAL if typical else row.method


def _named(row: MethodSection) -> str:
    """A row for people."""
    told = ", ".join(f"{key} {value}" for key, value in row.options.items())
    words = row.label or (f"{row.method} ({told})" if told else row.method)
    return words if row.temperature is None else f"{words} at temperature {row.temperature:g}"


def _same_as_others(parts: Parts, known: list[str]) -> LeftOut:
    """Methods that these parts allow, and that at temperature 0 do what another does."""
    allowed = [name for name in _SAME if all(getattr(parts, part) is not None for part in METHODS[name].needs)]
    return {name: f"at temperature 0 it does the same as {_SAME[name]}" for name in allowed if name not in known}


def why_nothing(name: str, fixed: Mapping[str, Any], recording: Recording, parts: Parts, space: Space) -> str:
    """Why a search found no setting of a method."""
    if name == "specinfer" and parts.more_drafters and recording.several is None:
        return f"replay cannot follow the chains of {1 + len(parts.more_drafters)} drafters"
    if name in (TYPICAL, "medusa"):
        if space.nodes < 2:
            return f"no tree has {space.nodes} nodes"
        if not any(True for _ in settings_of("medusa", recording, parts, space)):
            return "no candidate of the heads ever was the token that the target wrote"
    decoded = name in DECODED
    tried = lossy_settings(name, recording, space) if decoded else settings_of(name, recording, parts, space)
    first = next(tried, None)
    if first is None:
        return "no setting lies within the bounds of the search"
    if not decoded and predict(recording, parts, name, dict(fixed) | first) is None:
        told = ", ".join(f"{key} {value}" for key, value in fixed.items())
        return f"replay cannot follow it with what its row fixes ({told})" if told else "replay cannot follow it"
    return f"every setting that was tried has more than {space.nodes} nodes a step"

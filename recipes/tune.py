"""`draftsmith tune`: the best settings of every method by replay under measured costs, and the winners decoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..checkpoints.artifact import model_fingerprint
from ..decode.cost_model import CostModel, measure_forwards, measure_overheads
from ..decode.engine import Limits
from ..decode.joint_replay import record_joint
from ..decode.measure import BASELINE, Entry, Run, measure
from ..decode.methods import METHODS, Parts, build_method
from ..decode.metrics import speedup_interval, total
from ..decode.models import LanguageModel
from ..decode.quality import perplexity
from ..decode.recording import Recording, TableSource, load_recording, record, sample_texts, save_recording
from ..decode.tuning import SAME_WHEN_GREEDY, Choice, Space, probes, tune_joint, tune_method, tuned_methods, with_costs
from ..decode.warpers import Sampling
from . import evaluate
from .config import EvaluateRecipe, MethodSection
from .files import write_whole
from .loading import write_recipe
from .opening import open_recipe, place_of
from .terminal import bar, console, say

SCHEMA = 1
_SHOWN = 3  # settings of each method in the table and in the file
_CONFIRMED = 4  # methods whose best settings are decoded
_CONFIRMED_OF_BEST = 3  # settings of the first of them
_PROBES = 4  # prompts that each method is decoded with to learn its overhead
_JOINT = ((2, 2), (2, 4), (3, 4), (4, 2), (4, 4), (4, 8), (6, 4), (8, 4))  # γ and beams of MJSD


def run_tune(recipe: EvaluateRecipe, space: Space | None = None) -> dict[str, Any]:
    """Record, search, confirm; writes `tune.json`, `recipe.yaml` and the recording to a folder beside `recipe.out`.

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
    rows = _rows(recipe, parts, sampling)
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    asked = evaluate.load_prompts(
        recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where
    )
    prompts = [ids for _, ids in asked]
    limits = Limits(recipe.max_new_tokens, evaluate.stop_ids(tokenizer))
    folder = tune_folder(Path(recipe.out))
    recording = _recording(recipe, target, parts, prompts, limits, sampling, rows, space, folder)
    lengths = [len(prompt) + len(text) / 2 for prompt, text in zip(prompts, recording.texts, strict=True)]
    say("tune: timing forwards")
    forwards = measure_forwards(target, parts, round(sum(lengths) / len(lengths)))
    searched = search(target, parts, recording, forwards, rows, space)
    costs, choices = _timed(recipe, target, parts, recording, forwards, searched, prompts, limits)
    confirmed = _confirm(recipe, target, parts, recording, choices, prompts, limits)
    best = max((row for row in confirmed if row["lossless"]), key=lambda row: float(row["speedup"]))
    results = {
        "schema": SCHEMA,
        "kind": "tuning",
        "machine": evaluate.machine(opened.device),
        "recipe": recipe.model_dump(mode="json"),
        "prompts": len(prompts),
        "positions": recording.positions,
        "costs": costs.as_dict(),
        "methods": {name: [choice.as_dict() for choice in tried[:_SHOWN]] for name, tried in choices.items()},
        "tried": {name: len(tried) for name, tried in choices.items()},
        "confirmed": confirmed,
        "best": best["label"],
    }
    _write(folder / "tune.json", results)
    write_recipe(_tuned_recipe(recipe, choices, folder), folder / "recipe.yaml")
    _show(results, folder)
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
    space: Space,
) -> dict[str, list[Choice]]:
    """By method, its settings in order of predicted speedup; of MJSD one for each threshold."""
    choices: dict[str, list[Choice]] = {}
    with bar("searching", "methods") as advance:
        for place, (name, fixed) in enumerate(rows.items()):
            advance(place, len(rows), name)
            if name == "mjsd":
                assert parts.drafter is not None
                sizes = [(gamma, beams) for gamma, beams in _JOINT if gamma <= space.gamma]
                records = [record_joint(target, parts.drafter, recording, *each) for each in sizes]
                choices[name] = tune_joint(records, parts, recording.sampling, costs, space.thresholds)
            else:
                choices[name] = tune_method(recording, parts, costs, name, fixed, space)
    return {name: tried for name, tried in choices.items() if tried}


def _rows(recipe: EvaluateRecipe, parts: Parts, sampling: Sampling) -> dict[str, dict[str, Any]]:
    """Settings of each method to tune that the recipe fixes."""
    known = tuned_methods(parts, sampling)
    asked = [row for row in recipe.methods if row.method != BASELINE]
    rows = {row.method: dict(row.options) for row in asked if row.method in (*known, *SAME_WHEN_GREEDY)}
    if asked and not rows:
        names = ", ".join(dict.fromkeys(row.method for row in asked))
        raise ValueError(f"none of the recipe's methods can be tuned: {names}. Known: {', '.join(known)}")
    rows = rows or {name: {} for name in known}
    if not rows:
        raise ValueError("there is nothing to tune: the recipe names neither a drafter nor heads nor a table")
    return rows


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
    identity = _identity(recipe, prompts, limits, space)
    if path.is_file():
        recording = load_recording(path)
        if recording.identity == identity:
            say(f"tune: using the recording at {path}")
            return recording
        say(f"tune: {path} is a recording of other models, prompts or settings: recording anew")
    with bar("writing texts", "prompts") as advance:
        texts = sample_texts(target, prompts, limits, sampling, seed=recipe.seed, progress=advance)
    tables = [TableSource(1, 1.0)]
    if "bigram" in rows:
        proposer = build_method("bigram", parts, sampling, **rows["bigram"]).proposer
        tables.append(TableSource.of(proposer))  # type: ignore[arg-type]
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
        part: [source, _fingerprint(Path(source if part == "target" else place_of(source, part)))]
        for part in ("target", "drafter", "heads", "table")
        if (source := getattr(recipe, part)) is not None
    }
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()
    sizes = [space.candidates, space.head_candidates, limits.max_new_tokens, list(limits.stop_ids)]
    rows = [row.model_dump(mode="json") for row in recipe.methods if row.method == "bigram"]
    return {"models": models, "prompts": digest, "sizes": sizes, "seed": recipe.seed, "bigram": rows}


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
    timed = [(choice.method, choice.options) for tried in searched.values() for choice in probes(tried)]
    with bar("timing steps", "runs") as advance:
        costs = measure_overheads(
            forwards, target, parts, timed, prompts[:_PROBES], limits, sampling, seed=recipe.seed, progress=advance
        )
    choices = {}
    for name, tried in searched.items():
        fastest = with_costs(tried, parts, sampling, costs)
        choices[name] = sorted(fastest, key=lambda each: -each.options["threshold"]) if name == "mjsd" else fastest
    return costs, choices


def _confirm(
    recipe: EvaluateRecipe,
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    choices: dict[str, list[Choice]],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
) -> list[dict[str, Any]]:
    """The best settings decoded beside plain decoding: what was predicted and what was measured."""
    firsts = sorted((tried[0] for name, tried in choices.items() if name != "mjsd"), key=lambda each: -each.speedup)
    chosen = firsts[:_CONFIRMED]
    if chosen:
        chosen[1:1] = choices[chosen[0].method][1:_CONFIRMED_OF_BEST]
    chosen += choices.get("mjsd", [])
    entries = {f"{place + 1}. {choice.method}": choice for place, choice in enumerate(chosen)}
    sampling = recording.sampling
    asked = [Entry(BASELINE, BASELINE, {}, sampling)]
    asked += [Entry(label, choice.method, choice.options, sampling) for label, choice in entries.items()]
    with bar("confirming", "runs") as advance:
        runs = measure(
            target, parts, asked, prompts, limits, repeats=recipe.repeats, seed=recipe.seed, progress=advance
        )
    return [_confirmed(target, prompts, label, choice, runs) for label, choice in entries.items()]


def _confirmed(
    target: LanguageModel, prompts: Sequence[Sequence[int]], label: str, choice: Choice, runs: dict[str, Run]
) -> dict[str, Any]:
    run, base = runs[label], runs[BASELINE]
    tokens, plain_tokens = [len(ids) for ids in run.ids], [len(ids) for ids in base.ids]
    speedup, interval = speedup_interval(tokens, run.median_seconds(), plain_tokens, base.median_seconds())
    lossless = choice.method != "mjsd"
    return {
        "label": label,
        "method": choice.method,
        "options": choice.options,
        "lossless": lossless,
        "predicted": {"tokens_per_step": choice.tokens_per_step, "speedup": choice.speedup, "exact": choice.exact},
        "tokens_per_step": total(run.tallies).metrics()["tokens_per_step"],
        "speedup": speedup,
        "speedup_interval": interval,
        "stepping_speedup": run.stepping_rate() / base.stepping_rate(),
        "perplexity": None if lossless else perplexity(target, prompts, run.ids),
    }


def _tuned_recipe(recipe: EvaluateRecipe, choices: dict[str, list[Choice]], folder: Path) -> EvaluateRecipe:
    """The recipe with the chosen settings: a row a method, and one for each threshold of MJSD."""
    rows = [MethodSection(method=BASELINE)]
    for name, tried in choices.items():
        if name == "mjsd":
            rows += [
                MethodSection(method=name, label=f"mjsd {choice.options['threshold']:g}", options=choice.options)
                for choice in tried
            ]
        else:
            rows.append(MethodSection(method=name, options=tried[0].options))
    return recipe.model_copy(update={"methods": rows, "out": str(folder / "results.json")})


def _write(path: Path, results: dict[str, Any]) -> None:
    write_whole(path, json.dumps(results, indent=2, allow_nan=False) + "\n")


def _show(results: dict[str, Any], folder: Path) -> None:
    predicted = Table(title=f"predicted from {results['positions']:,} recorded tokens", title_justify="left")
    for heading, justify in (
        ("method", "left"),
        ("settings", "left"),
        ("tokens per step", "right"),
        ("speedup", "right"),
    ):
        predicted.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, tried in results["methods"].items():
        for place, choice in enumerate(tried):
            numbers = f"{choice['tokens_per_step']:.2f}", f"{choice['speedup']:.2f}x"
            predicted.add_row(name if place == 0 else "", _words(name, choice["options"]), *numbers)
    console().print(predicted)
    measured = Table(title="confirmed by decoding", title_justify="left")
    for heading in ("method", "settings", "tokens per step", "predicted", "speedup", "predicted", "perplexity"):
        measured.add_column(heading, justify="left" if heading in ("method", "settings") else "right")
    for row in results["confirmed"]:
        before = row["predicted"]
        measured.add_row(
            row["label"],
            _words(row["method"], row["options"]),
            f"{row['tokens_per_step']:.2f}",
            f"{before['tokens_per_step']:.2f}",
            f"{row['stepping_speedup']:.2f}x",
            f"{before['speedup']:.2f}x",
            "–" if row["perplexity"] is None else f"{row['perplexity']:.2f}",
        )
    console().print(measured)
    best = next(row for row in results["confirmed"] if row["label"] == results["best"])
    console().print(f"best: {best['method']}, {_words(best['method'], best['options'])}", markup=False)
    if best["stepping_speedup"] <= 1:
        console().print("no setting is faster here than plain decoding")
    console().print(f"results: {folder / 'tune.json'}; the chosen settings as a recipe: {folder / 'recipe.yaml'}")


def _words(name: str, options: dict[str, Any]) -> str:
    """The settings that differ from the method's own, for people; a long tree by its size."""
    told = []
    for key, value in options.items():
        if key == "tree" and "," in str(value):
            told.append(f"tree of {len(str(value).split(','))} nodes")
        elif METHODS[name].defaults.get(key) != value or key in ("gamma", "k_config", "sequences", "drafts"):
            told.append(f"{key} {value}")
    return ", ".join(told) or "as they are"

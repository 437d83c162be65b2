"""Evaluation: prompts and artifacts in, one honest table and `results.json` out."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.artifact import (
    check_target,
    load_manifest,
    model_fingerprint,
    tokenizer_fingerprint,
    verify_artifact,
)
from ..checkpoints.heads import PredictionHeads, load_heads
from ..checkpoints.table import BigramTable
from ..data.conversations import Prompt
from ..data.corpora import find_corpus
from ..data.reading import read_prompts
from ..data.rendering import prompt_renderer
from ..data.templates import get_template
from ..data.tokenizers import load_tokenizer
from ..decode.engine import Limits
from ..decode.head_trees import attach_projection, states_of
from ..decode.loading import load_model, wrap_model
from ..decode.measure import BASELINE, Entry, Run, measure, same_as_reference, summarise
from ..decode.methods import Parts, method_options, needs_of
from ..decode.metrics import Tally, total
from ..decode.models import LanguageModel, check_same_vocabulary
from ..decode.warpers import Sampling
from .config import EvaluateRecipe
from .loading import write_recipe
from .terminal import bar, console, results_table, say

SCHEMA = 1


def run_evaluate(recipe: EvaluateRecipe) -> dict[str, Any]:
    """Measure every method of the recipe, print the table and write the results.

    Raises:
        ValueError: a missing or unfit artifact, no prompt short enough, a method without its part, or a lossless
            method whose output at temperature 0 differs from the target's own.
    """
    for row in recipe.methods:
        method_options(row.method, row.options)
    device = _device(recipe.device)
    tokenizer = load_tokenizer(recipe.target)
    model = load_model(recipe.target, dtype=recipe.dtype, device=device, device_map=recipe.device_map)
    heads = _load_heads(recipe, device)
    target = wrap_model(model, states=states_of(heads))
    parts = _load_parts(recipe, target, heads, tokenizer, device)
    attach_projection(heads, model, target.device)
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    asked = load_prompts(recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where)
    prompts = [ids for _, ids in asked]
    categories = [prompt.category for prompt, _ in asked]
    limits = Limits(recipe.max_new_tokens, stop_ids(tokenizer))
    entries = _entries(recipe)
    say(f"evaluate: {len(prompts)} prompts, {len(entries)} methods, {recipe.repeats} run(s) each, on {device}")
    with bar("evaluating", "runs") as advance:
        runs = measure(
            target,
            parts,
            entries,
            prompts,
            limits,
            reference=model if recipe.compare_with_transformers else None,
            repeats=recipe.repeats,
            seed=recipe.seed,
            progress=advance,
        )
    rows, errors = summarise(target, parts, entries, prompts, runs)
    for measured in rows:
        measured["by_category"] = _by_category(runs[measured["label"]], categories)
    same = same_as_reference(entries, runs)
    if same is not None and same[0] < same[1]:
        errors.append(f"greedy decoding differs from transformers.generate on {same[1] - same[0]} of {same[1]} prompts")
    results = {
        "schema": SCHEMA,
        "machine": machine(device),
        "recipe": recipe.model_dump(mode="json"),
        "prompts": len(prompts),
        "categories": dict(Counter(categories)),
        "greedy_equals_transformers": same,
        "methods": rows,
        "errors": errors,
    }
    _write_json(Path(recipe.out), results)
    write_recipe(recipe, Path(recipe.out).with_suffix(".recipe.yaml"))
    _show(recipe, results)
    _check_lossless(results, runs)
    return results


def _by_category(run: Run, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Counted metrics of each category of prompts."""
    groups: dict[str, list[Tally]] = {}
    for category, tally in zip(categories, run.tallies, strict=True):
        groups.setdefault(category, []).append(tally)
    return {category: {"prompts": len(tallies)} | total(tallies).metrics() for category, tallies in groups.items()}


def _entries(recipe: EvaluateRecipe) -> list[Entry]:
    entries = []
    for label, row in zip(recipe.labels(), recipe.methods, strict=True):
        temperature = recipe.temperature if row.temperature is None else row.temperature
        entries.append(Entry(label, row.method, row.options, Sampling(temperature, recipe.top_k, recipe.top_p)))
    return entries


def load_prompts(
    source: str,
    template: str,
    tokenizer: Any,
    limit: int,
    max_tokens: int,
    *,
    path: str | None = None,
    groups: Sequence[str] | None = None,
) -> list[tuple[Prompt, list[int]]]:
    """Questions of an evaluation set or of conversations, each with its token ids as the template presents them for
    generation. Of a set with fixed groups each group gives as many as the others, as far as it has them.

    Raises:
        ValueError: where no prompt is short enough, naming the limit and the shortest.
    """
    encode = prompt_renderer(get_template(template, tokenizer), tokenizer)
    lengths: list[int] = []

    def short_enough() -> Iterator[tuple[Prompt, list[int]]]:
        for prompt in read_prompts(source, path=path, groups=groups):
            ids = encode(prompt.turns)
            lengths.append(len(ids))
            if len(ids) <= max_tokens:
                yield prompt, ids

    prompts = list(islice(_in_turn(source, short_enough()), limit))
    if not prompts:
        shortest = min(lengths, default=None)
        raise ValueError(f"no prompt in {source} has at most {max_tokens} tokens; the shortest has {shortest}")
    return prompts


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


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_heads(recipe: EvaluateRecipe, device: str) -> PredictionHeads | None:
    """The recipe's heads, which decide what hidden states the target must give."""
    if recipe.heads is None:
        return None
    verify_artifact(Path(recipe.heads), "heads")
    return load_heads(Path(recipe.heads), device=device)


def _load_parts(
    recipe: EvaluateRecipe, target: LanguageModel, heads: PredictionHeads | None, tokenizer: Any, device: str
) -> Parts:
    for row in recipe.methods:
        for part in needs_of(row.method, row.options):
            if getattr(recipe, part) is None:
                raise ValueError(f"method {row.method!r} needs `{part}`, and the recipe names none")
    fingerprint = tokenizer_fingerprint(tokenizer)
    sizes: dict[str, Any] = {"vocab_size": target.vocab_size, "tokenizer_fingerprint": fingerprint}
    sources = [recipe.drafter, *recipe.more_drafters] if recipe.drafter else recipe.more_drafters
    drafters = []
    for source in sources:
        drafter = wrap_model(load_model(source, dtype=recipe.dtype, device=device))
        check_same_vocabulary(target, drafter, f"drafter {source}")
        if (Path(source) / "artifact.json").is_file():
            check_target(verify_artifact(Path(source), "drafter"), what=f"the drafter {source}", **sizes)
        drafters.append(drafter)
    table = None
    if heads is not None:
        _check_made_for(recipe)
        check_target(load_manifest(Path(str(recipe.heads))), what=f"the heads {recipe.heads}", **sizes)
        heads = heads.to(target.dtype)
        if heads.hidden_size != target.hidden_size:
            raise ValueError(
                f"the heads take hidden states of {heads.hidden_size}, the target makes {target.hidden_size}"
            )
    if recipe.table is not None:
        check_target(verify_artifact(Path(recipe.table), "table"), what=f"the table {recipe.table}", **sizes)
        table = BigramTable.load(Path(recipe.table))
    return Parts(drafters[0] if drafters else None, heads, table, tuple(drafters[1:]))


def _check_made_for(recipe: EvaluateRecipe) -> None:
    """Warn where the target is another model than the one that the heads were trained on, or with (Medusa-2)."""
    heads, target = Path(str(recipe.heads)), Path(recipe.target)
    made_for = load_manifest(heads).target or {}
    base = heads / "base"
    trained = (base / "config.json").is_file()
    theirs = model_fingerprint(base) if trained else made_for.get("fingerprint")
    if theirs is not None and (target / "config.json").is_file() and model_fingerprint(target) != theirs:
        say(f"evaluate: the heads were trained with {base if trained else made_for.get('id')}, not with {target}")


def _write_json(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _show(recipe: EvaluateRecipe, results: dict[str, Any]) -> None:
    title = f"{recipe.target}, {results['prompts']} prompts of {recipe.prompts}"
    console().print(results_table(title, results["methods"]))
    for error in results["errors"]:
        console().print(f"error: {error}", markup=False)
    same = results["greedy_equals_transformers"]
    if same is not None:
        console().print(f"autoregressive decoding equals transformers.generate on {same[0]} of {same[1]} prompts")
    console().print(f"results: {recipe.out}")


def _check_lossless(results: dict[str, Any], runs: dict[str, Run]) -> None:
    """The run's own check: at temperature 0 a lossless method writes what the target writes."""
    for row in results["methods"]:
        same = row["identical_to_greedy"]
        if row["lossless"] and same is not None and same[0] < same[1]:
            greedy = next(
                other for other in results["methods"] if other["method"] == BASELINE and not other["temperature"]
            )
            pairs = zip(runs[row["label"]].ids, runs[greedy["label"]].ids, strict=True)
            place = next(index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)
            raise ValueError(
                f"{row['label']!r} calls itself lossless, but differs from greedy decoding on {same[1] - same[0]} of "
                f"{same[1]} prompts, first on prompt {place}"
            )

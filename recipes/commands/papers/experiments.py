"""What a paper recipe can do, by name: each takes a recipe and a folder, and gives the rows of a table.

A row is a mapping: its `label`, metrics by name (None: not measured), and what is known of their uncertainty, as
`claims.judge` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....decode.evaluation.measure import BASELINE
from ....decode.methods import method_options
from ...schema.claims import ratio_of
from ...schema.evaluation import EvaluateRecipe
from ...schema.experiments import RunsSettings
from ...schema.papers import PaperRecipe, run_folder
from ..evaluation.finished import evaluated
from .acceptance import acceptance
from .bench import Row
from .tables import correlation, energy, saturation

Pairs = dict[str, dict[str, Any]]
"""What each metric is the ratio of, by prompt; see `claims.judge`."""
_CHAINS = ("speculative", "unigram", "bigram")
_CERTAIN = ["temperature", "lossless", "identical_to_greedy", "flops_per_step", "prompts"]
"""Counts and settings. What else has neither numbers by prompt nor an error was timed once, or summed up."""


def evaluate(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """Rows of one or several evaluations, with the metrics of `results.json`, `flops_per_step`, `seconds_per_step`, and
    of chains `closed_form`, the tokens a step that follow from the acceptance rate (slides, "Theoretical Analysis").
    Those that have finished with the same settings and artifacts are read again."""
    settings = recipe.section()
    assert isinstance(settings, RunsSettings)
    found = {}
    for name, each in recipe.evaluations().items():
        asked = each.model_dump() | {"out": str(results_of(folder, name))}
        found[name] = evaluated(EvaluateRecipe.model_validate(asked))
    rows: list[Row] = []
    for run, results in found.items():
        sample, before = str(results["prompts_sha256"]), f"{run}: " if run else ""
        rows += [_method_row(row, results) | {"label": before + row["label"]} for row in results["methods"]]
        for row in results["methods"] if settings.categories else ():
            for name in row["by_category"] if len(row["by_category"]) > 1 else ():
                label = f"{before}{row['label']} [{name}]"
                rows.append(_row_from(label, _pairs(results, row, category=name), sample + name))
    if settings.pooled and len(found) > 1:
        sample = "".join(str(results["prompts_sha256"]) for results in found.values())
        tables = [{row["label"]: _pairs(results, row) for row in results["methods"]} for results in found.values()]
        shared = [label for label in tables[0] if all(label in table for table in tables)]
        rows += [_row_from(label, _pooled([table[label] for table in tables]), sample) for label in shared]
    return rows


EXPERIMENTS: dict[str, Callable[[PaperRecipe, Path], list[Row]]] = {
    "evaluate": evaluate,
    "acceptance": acceptance,
    "correlation": correlation,
    "saturation": saturation,
    "energy": energy,
}


def results_of(folder: Path, run: str) -> Path:
    """Where the results of a run lie; those of an evaluation without runs in the folder itself."""
    return folder / run_folder(run) / "results.json"


def _method_row(row: Mapping[str, Any], results: Mapping[str, Any]) -> Row:
    found = {key: value for key, value in row.items() if key not in ("by_prompt", "by_category")}
    pairs = _pairs(results, row)
    found["flops_per_step"] = row["flops_per_token"]["total"] * row["tokens_per_step"]
    for metric in ("seconds_per_step", "closed_form"):
        found[metric] = _ratio(pairs[metric]) if metric in pairs else None
    if row["joules_per_token"] is None:
        found["why"] = {"joules_per_token": "nothing here counts energy"}
    elif row["energy"] is not None:
        found["errors"] = {"joules_per_token": row["energy"]["error"]}
    found |= {"certain": _CERTAIN, "prompts": results["prompts"], "sample": str(results["prompts_sha256"])}
    return found | {"pairs": pairs}


def _row_from(label: str, pairs: Pairs, sample: str) -> Row:
    """A row that is only known by prompt."""
    row: Row = {metric: _ratio(pair) for metric, pair in pairs.items()}
    return row | {"label": label, "pairs": pairs, "sample": sample, "prompts": len(pairs["perplexity"]["over"])}


def _ratio(pair: Mapping[str, Any]) -> float | None:
    return float(ratio_of(pair, np.ones(len(pair["over"])))) if sum(pair["under"]) else None


def _pooled(parts: Sequence[Pairs]) -> Pairs:
    """Over the prompts of all parts."""
    shared = [metric for metric in parts[0] if metric != "closed_form" and all(metric in part for part in parts)]
    return {
        metric: {
            key: value if key == "exp" else [number for part in parts for number in part[metric][key]]
            for key, value in parts[0][metric].items()
        }
        for metric in shared
    }


def _pairs(results: Mapping[str, Any], row: Mapping[str, Any], category: str | None = None) -> Pairs:
    """Of a row of results, over its prompts or those of a category."""
    same = [each for each in results["methods"] if each["temperature"] == row["temperature"]]
    base = next(each for each in same if each["method"] == BASELINE)

    def column(name: str, of: Mapping[str, Any] = row) -> list[float]:
        prompts = [prompt for prompt in of["by_prompt"] if category in (None, prompt["category"])]
        return [prompt[name] if prompt[name] is not None else 0.0 for prompt in prompts]

    tokens, steps, seconds = column("tokens"), column("steps"), column("seconds")
    pairs: Pairs = {
        "tokens_per_step": {"over": tokens, "under": steps},
        "acceptance_rate": {"over": column("accepted"), "under": column("examined")},
        "tokens_per_second": {"over": tokens, "under": seconds},
        "seconds_per_step": {"over": seconds, "under": steps},
    }
    if row["method"] in _CHAINS and any(column("examined")):
        gamma = method_options(row["method"], row["options"])["gamma"]
        pairs["closed_form"] = pairs["acceptance_rate"] | {"gamma": gamma}
    theirs = {"base_over": column("tokens", base), "base_under": column("seconds", base)}
    pairs["speedup"] = pairs["tokens_per_second"] | theirs
    nats = [float(n * np.log(each)) if each else 0.0 for n, each in zip(tokens, column("perplexity"), strict=True)]
    pairs["perplexity"] = {"over": nats, "under": tokens, "exp": True}
    # what a step costs is the same for all prompts, how many tokens it makes is not
    for part in ("verification", "drafting", "total"):
        step = row["flops_per_token"][part] * row["tokens_per_step"]
        pairs[f"flops_per_token.{part}"] = {"over": [step * count for count in steps], "under": tokens}
    for name in ("rouge_l", "self_consistency"):
        if all(prompt[name] is not None for prompt in row["by_prompt"]):
            pairs[name] = {"over": column(name), "under": [1.0] * len(tokens)}
    return pairs

"""What a paper recipe can do, by name: each takes a recipe and a folder, and gives the rows of a table.

A row is a mapping: its `label`, metrics by name (None: not measured), and what is known of their uncertainty, as
`claims.judge` takes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....checkpoints.artifact.fingerprints import source_state
from ....checkpoints.storage.atomic import atomic_text
from ....decode.evaluation.measure import BASELINE
from ....decode.methods import method_options
from ...assemble.evaluation import device_of
from ...schema.claims import transformed
from ...schema.evaluation import EvaluateRecipe
from ...schema.papers import RUN, PaperEvaluation, PaperRecipe, RunsSettings, run_folder
from ...schema.results import Metrics, load_results
from ...session.machine import machine
from ...session.terminal import log
from ..evaluation.evaluate import run_evaluate
from .acceptance import acceptance
from .bench import Row
from .simulation import simulation
from .tables import correlation, energy, saturation

Rows = list[Row]
_CHAINS = ("speculative", "unigram", "bigram")
_SHOWN = [*Metrics.model_fields, "cost_ratio", "milliseconds", "joules_per_token", "prediction"]
_SHOWN += ["method", "temperature", "lossless"]
_CERTAIN = ["temperature", "lossless", "identical_to_greedy", "flops_per_step", "prompts"]
"""Counts and settings. What else has neither numbers by prompt nor an error was timed once, or summed up."""
_TRANSFORMS = ("exp", "gamma")


def evaluate(recipe: PaperRecipe, folder: Path) -> Rows:
    """Rows of one or several evaluations, with the metrics of `results.json`. Those that have finished with the same
    settings and artifacts are read again.

    Raises:
        ValueError: what `run_evaluate` raises.
    """
    settings = RunsSettings.model_validate(recipe.settings)
    runs = recipe.evaluations()
    found: dict[str, dict[str, Any]] = {}
    for index, (name, evaluation) in enumerate(runs.items(), 1):
        if name:
            log(f"run {name}: {index} of {len(runs)}")
        found[name] = _results(evaluation, results_of(folder, name))
    rows: Rows = []
    for name, results in found.items():
        rows += _rows_of(results, name)
        if settings.categories:
            rows += _category_rows(results, name)
    if settings.pooled and len(found) > 1:
        rows += _pooled_rows(list(found.values()))
    return rows


EXPERIMENTS: dict[str, Callable[[PaperRecipe, Path], Rows]] = {
    "evaluate": evaluate,
    "acceptance": acceptance,
    "correlation": correlation,
    "saturation": saturation,
    "simulation": simulation,
    "energy": energy,
}


def results_of(folder: Path, run: str) -> Path:
    """Where the results of a run lie; those of an evaluation without runs in the folder itself."""
    return folder / run_folder(run) / "results.json" if run else folder / "results.json"


def machine_of(evaluation: EvaluateRecipe | None) -> dict[str, Any]:
    """What an evaluation runs on, as in `results.json`; without one, a processor.

    Raises:
        ValueError: a GPU that there is not.
    """
    device = device_of(evaluation) if evaluation is not None else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"`evaluate.device` is {device!r}, and torch finds no GPU here")
    return machine(device)


def is_finished(evaluation: PaperEvaluation, out: Path) -> bool:
    """Whether the results that lie there are those of this evaluation, with these artifacts, on this machine."""
    try:
        stamp = json.loads(_stamp(out).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, cut off or not text: decode once more rather than trust it
        return False
    return out.is_file() and bool(stamp == _identity(evaluation))


def _results(evaluation: PaperEvaluation, out: Path) -> dict[str, Any]:
    """The results of an evaluation, decoded only where they are not there already."""
    if is_finished(evaluation, out):
        log(f"{out} had finished already")
        return load_results(out)
    _stamp(out).unlink(missing_ok=True)
    identity = _identity(evaluation)  # before decoding: what changes meanwhile was not decoded
    results = run_evaluate(EvaluateRecipe.model_validate(evaluation.model_dump() | {"out": str(out)}))
    atomic_text(_stamp(out), json.dumps(identity, indent=1) + "\n")
    return results


def _stamp(out: Path) -> Path:
    return out.with_name("evaluated.json")


def _identity(evaluation: PaperEvaluation) -> Any:
    """What results belong to: they may only be used again where all of it is the same."""
    states = {source: source_state(source) for source in evaluation.sources()}
    identity = {"recipe": evaluation.model_dump(mode="json"), "artifacts": states, "machine": machine_of(evaluation)}
    return json.loads(json.dumps(identity))


def _rows_of(results: Mapping[str, Any], run: str) -> Rows:
    rows = []
    for row in results["methods"]:
        pairs = _pairs(row, _baseline(results, row))
        found = {key: row[key] for key in _SHOWN if key in row}
        found["flops_per_step"] = row["flops_per_token"]["total"] * row["tokens_per_step"]
        for metric in ("seconds_per_step", "closed_form"):
            found[metric] = _ratio(pairs[metric]) if metric in pairs else None
        if row["joules_per_token"] is None:
            found["why"] = {"joules_per_token": "nothing here counts energy"}
        elif row["energy"] is not None:
            found["errors"] = {"joules_per_token": row["energy"]["error"]}
        found |= {"certain": _CERTAIN, "prompts": results["prompts"], "sample": str(results["prompts_sha256"])}
        rows.append(found | {"label": _label(run, row["label"]), "pairs": pairs})
    return rows


def _label(run: str, label: str) -> str:
    return RUN.format(run=run, label=label) if run else label


def _category_rows(results: Mapping[str, Any], run: str) -> Rows:
    """Rows of each category that has prompts of its own name, of what is known prompt by prompt."""
    rows = []
    for row in results["methods"]:
        for name in row["by_category"] if len(row["by_category"]) > 1 else ():
            chosen = [index for index, prompt in enumerate(row["by_prompt"]) if prompt["category"] == name]
            pairs = _pairs(row, _baseline(results, row), chosen)
            rows.append(_row_from(_label(run, f"{row['label']} [{name}]"), pairs, f"{results['prompts_sha256']}{name}"))
    return rows


def _pooled_rows(all_results: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows over the prompts of all runs, of those labels that every run has."""
    by_label: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for results in all_results:
        for row in results["methods"]:
            by_label.setdefault(row["label"], []).append(_pairs(row, _baseline(results, row)))
    sample = "".join(str(results["prompts_sha256"]) for results in all_results)
    rows = []
    for label, parts in by_label.items():
        if len(parts) < len(all_results):
            continue
        pooled: dict[str, dict[str, Any]] = {}
        for metric, first in parts[0].items():
            of_all = [part.get(metric, {}) for part in parts]
            if any(each.keys() != first.keys() or each.get("gamma") != first.get("gamma") for each in of_all):
                continue
            columns = [key for key in first if key not in _TRANSFORMS]
            pooled[metric] = {key: [value for part in parts for value in part[metric][key]] for key in columns}
            pooled[metric] |= {key: first[key] for key in _TRANSFORMS if key in first}
        rows.append(_row_from(label, pooled, sample))
    return rows


def _baseline(results: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of autoregressive decoding that a row is compared with."""
    same = (each for each in results["methods"] if each["temperature"] == row["temperature"])
    return next(each for each in same if each["method"] == BASELINE)


def _pairs(
    row: Mapping[str, Any], base: Mapping[str, Any], chosen: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """What each metric is the ratio of, by prompt (see `claims.judge`); of some prompts, or of all."""

    def column(name: str, of: Mapping[str, Any] = row) -> list[float]:
        prompts = of["by_prompt"] if chosen is None else [of["by_prompt"][index] for index in chosen]
        return [prompt[name] if prompt[name] is not None else 0.0 for prompt in prompts]

    tokens, steps, seconds = column("tokens"), column("steps"), column("seconds")
    pairs: dict[str, dict[str, Any]] = {
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
        known = [prompt[name] is not None for prompt in row["by_prompt"]]
        if all(known):
            pairs[name] = {"over": column(name), "under": [1.0] * len(tokens)}
    return pairs


def _row_from(label: str, pairs: dict[str, dict[str, Any]], sample: str) -> dict[str, Any]:
    """A row that is only known by prompt."""
    row: dict[str, Any] = {"label": label, "pairs": pairs, "sample": sample}
    for metric, pair in pairs.items():
        value = _ratio(pair)
        name, _, part = metric.partition(".")
        if part:
            row.setdefault(name, {})[part] = value
        else:
            row[name] = value
    row["prompts"] = len(pairs["tokens_per_step"]["over"])
    return row


def _ratio(pair: Mapping[str, Any]) -> float | None:
    under = sum(pair["under"])
    if not under:
        return None
    value = sum(pair["over"]) / under
    if "base_over" in pair:
        value /= sum(pair["base_over"]) / sum(pair["base_under"])
    return float(transformed(value, pair))

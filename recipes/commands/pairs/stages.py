"""Recipes that a forge writes: answers, each candidate's training, evaluations; and the settings that it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.verify.model_files import is_adapter, load_config
from ....decode.evaluation.tuning.plan import (
    EXPECTED_ACCEPTANCE,
    Candidate,
    Kind,
    ModelShape,
    Seconds,
    best_draft,
)
from ....decode.evaluation.tuning.space import Space
from ....decode.evaluation.tuning.tuner import Measurement, Workload
from ....decode.methods import needs_of
from ...schema.evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import find_recipe, parse_recipe, read_extended
from ...schema.training import DrafterRecipe, HeadsRecipe, ParallelSection
from ..evaluation.tune import count_runs, sampling_of, tuned_as
from .quickstart import resolve

DRAFT_VOCABULARY = 8192
"""Size of the draft vocabulary if that of the target is larger."""
Row = tuple[str, dict[str, Any]]
UNTRAINED: list[Row] = [("prompt-lookup", {"min_ngram": 2}), ("suffix", {})]
WITH_ANSWERS: list[Row] = [("suffix", {"datastore": "table"}), ("suffix", {"datastore": "table", "max_nodes": 4})]
_MAX_LENGTH = 6


def list_rows(kind: Kind, seconds: Seconds, shape: ModelShape, cost: float | None = None) -> list[Row]:
    """List the settings with which a candidate is measured before they are tuned.

    Args:
        seconds: time of a forward of the target by its number of tokens.
        cost: cost of a draft token in forwards of the target; by default that of a layer.
    """
    candidate = Candidate("", kind, (), shape.layer_parameters / shape.parameters if cost is None else cost)
    length = best_draft(candidate, seconds, [EXPECTED_ACCEPTANCE] * _MAX_LENGTH)[0]
    suffix = {"fallback": "drafter", "datastore": "table", "max_nodes": 6, "draft_depth": 2}
    if kind == "drafter":
        return [("speculative", {"gamma": length}), ("suffix", suffix)]
    if kind == "parallel":
        return [("speculative", {"gamma": max(2, length), "parallel": True}), ("suffix", suffix)]
    if kind == "eagle":
        chain = ("speculative", {"gamma": min(2, length)})
        return [chain, ("dynamic-tree", {}), ("suffix", suffix | {"min_prob": 0.15})]
    slim = ("slim-s", {"num_sequences": 8, "min_prob": 0.05})
    return [("medusa", {"tree": "2x1"}), slim, ("suffix", {"fallback": "heads", "datastore": "table"})]


def kind_of(drafter: Path) -> Kind:
    """Return the kind of a given drafter. Raises ValueError if the folder holds no model."""
    if is_eagle(drafter):
        return "eagle"
    return "drafter" if is_adapter(drafter) or mask_token(load_config(drafter)) is None else "parallel"


def label_of(row: Row) -> str:
    """Return the label of a setting."""
    method, options = row
    return " ".join([method, *(name if value is True else str(value) for name, value in options.items())])


def combine_rows(
    measurements: Sequence[Measurement], trained: Mapping[str, dict[str, Any]], given: Sequence[str]
) -> tuple[list[Row], dict[str, Any]]:
    """Combine settings of several candidates into rows of one evaluation, and the artifacts that it opens.

    Args:
        trained: artifacts of trained candidates, by name.
        given: drafters of the recipe.
    """
    rows: list[Row] = []
    drafters: list[str] = []
    parts: dict[str, Any] = {"drafters": drafters}
    for each in measurements:
        own = {"drafters": [each.name]} if each.name in given else trained.get(each.name, {})
        options = {name: value for name, value in each.options.items() if name != "drafter"}
        for drafter in own.get("drafters", []):
            drafters += [] if drafter in drafters else [drafter]
            options |= {"drafter": number} if (number := 1 + drafters.index(drafter)) > 1 else {}
        parts |= {"heads": own["heads"]} if "heads" in own else {}
        rows.append((each.method, options))
    return rows, parts | {"table": any("table" in needs_of(*row) for row in rows)}


def base_of(recipe: ForgeRecipe) -> QuickstartRecipe:
    """Return the stages of `realpair` for the recipe's target, prompts and folder."""
    values: dict[str, Any] = read_extended(find_recipe("realpair"))
    values |= {"out": recipe.out, "target": recipe.target, "seed": recipe.seed}
    for name in ("answers", "evaluate"):
        values[name]["template"] = recipe.template
    for name in ("eagle", "drafter", "heads", "table"):
        values[name]["data"] = values[name]["data"] | {"template": recipe.template}
    if recipe.prompts:
        values["corpus"] |= {"files": recipe.prompts, "megabytes": 0}
    values["corpus"]["heldout_share"] = recipe.heldout_share
    base = parse_recipe(values, "forge", kinds=("quickstart",))
    assert isinstance(base, QuickstartRecipe)
    return resolve(base)


def answers_of(base: QuickstartRecipe, count: int, name: str) -> RegenerateRecipe:
    """Return the recipe of the target's answers to so many prompts."""
    return base.answers.model_copy(update={"limit": count, "out": f"{base.out}/{name}.jsonl"})


def training_of(
    base: QuickstartRecipe, candidate: Candidate, vocabulary: int, steps: int, out: Path, processes: int = 1
) -> DrafterRecipe | HeadsRecipe:
    """Return the recipe of a candidate's training; the global batch grows with the number of processes."""
    stage = {"eagle": base.eagle, "heads": base.heads}.get(candidate.kind, base.drafter)
    assert stage is not None
    train = stage.train.model_copy(update={"steps": steps, "global_batch": stage.train.global_batch * processes})
    measure = stage.measure.model_copy(update={"prompts": 0})  # a forge measures by itself
    changes: dict[str, Any] = {"out": str(out), "train": train, "measure": measure}
    full = {} if vocabulary > DRAFT_VOCABULARY else {"vocabulary": None}
    if isinstance(stage, DrafterRecipe):
        model = stage.model.model_copy(update={"layers": list(candidate.layers), **full})
        teacher = stage.teacher.model_copy(update={"top_k": min(stage.teacher.top_k, vocabulary)})
        changes |= {"parallel": ParallelSection.model_validate({"tokens": 4})} if candidate.kind == "parallel" else {}
        return stage.model_copy(update=changes | {"model": model, "teacher": teacher})
    return stage.model_copy(update=changes | full)


def evaluation_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    rows: Sequence[Row],
    workload: Workload,
    prompts: int,
    *,
    drafters: Sequence[str] = (),
    heads: str | None = None,
    table: bool = False,
    labels: Sequence[str] = (),
    source: str = "heldout.jsonl",
) -> EvaluateRecipe:
    """Return the evaluation of the baseline and of settings on held-out prompts; `labels` if theirs are not unique."""
    values = base.evaluate.model_dump(mode="json")
    methods = [
        {"method": row[0], "label": label, "options": row[1]}
        for row, label in zip(rows, labels or map(label_of, rows), strict=True)
    ]
    values |= {"out": f"{base.out}/{name}.json", "methods": [{"method": "autoregressive"}, *methods]}
    values |= {"drafter": next(iter(drafters), None), "more_drafters": list(drafters[1:]), "heads": heads}
    values |= {"limit": prompts, "temperature": workload.temperature, "batch": workload.batch}
    values |= {"max_new_tokens": recipe.new_tokens, "max_prompt_tokens": recipe.max_prompt_tokens}
    values |= {"prompts": f"{base.out}/corpus/{source}"}
    values |= {"table": base.table.out if table else None, "compare_with_transformers": False}
    return EvaluateRecipe.model_validate(values)


def tuning_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    measured: Sequence[Measurement],
    trained: Mapping[str, dict[str, Any]],
    workload: Workload,
    prompts: int,
) -> EvaluateRecipe:
    """Return the recipe that tunes the methods with which a candidate was measured."""
    rows, parts = combine_rows(measured, trained, recipe.drafters)
    kept = {"parallel", "fallback"}
    fixed = [(method, {key: options[key] for key in kept & options.keys()}) for method, options in rows]
    labels = [f"{number} {method}" for number, (method, _) in enumerate(fixed)]
    return evaluation_of(base, recipe, name, fixed, workload, prompts, labels=labels, **parts)


def affordable_space(recipe: EvaluateRecipe, answers: int) -> Space | None:
    """Return the search space that decodes at most so many answers; None if there is none."""
    names = [tuned_as(row, sampling_of(recipe)) for row in recipe.methods[1:]]
    for prompts in (8, 4, 2, 1):
        space = Space(nodes=32, decoded_prompts=prompts, probed_prompts=min(4, prompts))
        if count_runs(names, recipe.limit, recipe, space) <= answers:
            return space
    return None

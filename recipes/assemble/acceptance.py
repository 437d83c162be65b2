"""What training is for: tokens per step by real decoding of a fixed held-out sample, while a recipe trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.table.table import BigramTable
from ...data.prompts import load_prompts, stop_ids
from ...decode.engine import Limits
from ...decode.evaluation.measure import decode
from ...decode.evaluation.metrics import total
from ...decode.methods import Parts, build_method
from ...decode.models.base import LanguageModel
from ...decode.models.eagle import EagleDrafter
from ...decode.models.final_norm import layers_in
from ...decode.models.loading import wrap_model
from ...decode.proposers.head_trees import attach_projection
from ...decode.tree import parse_tree
from ...decode.warpers import Sampling
from ..schema.training import DrafterRecipe, HeadsRecipe, MeasureSection
from .data import Prepared
from .teacher import states_read

_FEW_PARAMETERS = 1_000_000_000
_LOOK_AHEAD = 16  # more than any tree of a measurement is deep

Measure = Callable[[Any], dict[str, float]]


def decodes_fast(target: PreTrainedModel) -> bool:
    """Whether a target decodes with weights laid out for that: copies of most of them, which a large one has no room
    for beside the training."""
    return sum(weight.numel() for weight in target.parameters()) <= _FEW_PARAMETERS


def drafter_measure(
    recipe: DrafterRecipe, target: PreTrainedModel, drafter: PreTrainedModel, tokenizer: Any, prepared: Prepared
) -> Measure:
    """Speculative decoding with a drafter as it stands: `tokens_per_step` and `acceptance_rate`."""
    scorer = wrap_model(target, fast=decodes_fast(target))
    positions = min(scorer.max_positions, getattr(drafter.config, "max_position_embeddings", scorer.max_positions))
    prompts = _sample(recipe, tokenizer, prepared, positions)
    options = {"gamma": recipe.measure.gamma, "parallel": recipe.parallel is not None}

    def run(model: Any) -> dict[str, float]:
        was_training = model.training
        parts = Parts(drafter=wrap_model(model, check=False))
        metrics = _acceptance(scorer, parts, "speculative", options, prompts, recipe.measure, tokenizer)
        model.train(was_training)
        return metrics

    return run


def check_measure(recipe: HeadsRecipe) -> None:
    """Raises ValueError where heads could not be measured as a recipe says, before anything is spent."""
    if not recipe.measure.prompts or recipe.architecture == "eagle3":
        return
    depth = parse_tree(_tree(recipe))[0].max_depth
    if depth > recipe.num_heads:
        raise ValueError(f"`measure.tree` is {depth} levels deep, and there are {recipe.num_heads} heads")
    if recipe.measure.table is not None:
        BigramTable.load(Path(recipe.measure.table))


def _tree(recipe: HeadsRecipe) -> str:
    """Of the measurement; of a k-configuration no more levels than there are heads."""
    tree = recipe.measure.tree
    return tree if "," in tree else "x".join(tree.split("x")[: recipe.num_heads])


def heads_measure(recipe: HeadsRecipe, target: PreTrainedModel, tokenizer: Any, prepared: Prepared) -> Measure:
    """Medusa decoding with heads as they stand: the same, and `slim_tokens_per_step`, SLiM's."""
    if recipe.architecture == "eagle3":
        return _eagle_measure(recipe, target, tokenizer, prepared)
    section = recipe.measure
    # weights laid out for decoding are copies, and `base` changes the target
    fast = recipe.base is None and decodes_fast(target)
    scorer = wrap_model(target, fast=fast, states=recipe.states)
    prompts = _sample(recipe, tokenizer, prepared, scorer.max_positions)
    table = None if section.table is None else BigramTable.load(Path(section.table))
    rows: list[tuple[str, str, dict[str, Any]]] = [("", "medusa", {"tree": _tree(recipe)})]
    if section.sequences:
        # With r = 1 a sequence is never likelier than its beginning: of all lengths the shortest would fill the tree.
        without = {"correlation": "none", "lengths": "full"} if table is None else {}
        rows.append(("slim_", "slim-s", {"num_sequences": section.sequences, **without}))

    def run(heads: Any) -> dict[str, float]:
        was_training = heads.training
        mine = heads.eval()
        if next(heads.parameters()).dtype != scorer.dtype:  # trained in float32, kept in the target's type
            mine = copy.deepcopy(heads).to(scorer.dtype)
            attach_projection(mine, target, scorer.device)
        parts = Parts(heads=mine, table=table)
        metrics: dict[str, float] = {}
        for prefix, name, options in rows:
            found = _acceptance(scorer, parts, name, options, prompts, section, tokenizer)
            metrics |= {f"{prefix}{key}": value for key, value in found.items()}
        heads.train(was_training)
        return metrics

    return run


def _eagle_measure(recipe: HeadsRecipe, target: PreTrainedModel, tokenizer: Any, prepared: Prepared) -> Measure:
    """Speculative decoding with EAGLE-3's layer as it stands."""
    layers = layers_in(states_read(recipe))
    scorer = wrap_model(target, fast=decodes_fast(target), aux_layers=layers)
    prompts = _sample(recipe, tokenizer, prepared, scorer.max_positions)
    options = {"gamma": recipe.measure.gamma}

    def run(heads: Any) -> dict[str, float]:
        was_training = heads.training
        parts = Parts(drafter=EagleDrafter(heads.eval()))
        metrics = _acceptance(scorer, parts, "speculative", options, prompts, recipe.measure, tokenizer)
        heads.train(was_training)
        return metrics

    return run


def _sample(recipe: DrafterRecipe | HeadsRecipe, tokenizer: Any, prepared: Prepared, positions: int) -> list[list[int]]:
    # Room for the answer and the look-ahead, in models whose positions are as many as a block has.
    longest = min(recipe.data.block_tokens, positions - recipe.measure.new_tokens - _LOOK_AHEAD)
    source = str(prepared.folder / "heldout.jsonl")
    found = load_prompts(source, recipe.data.template, tokenizer, recipe.measure.prompts, longest)
    return [ids for _, ids in found]


def _acceptance(
    scorer: LanguageModel,
    parts: Parts,
    name: str,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    section: MeasureSection,
    tokenizer: Any,
) -> dict[str, float]:
    sampling = Sampling(temperature=section.temperature)
    method = build_method(name, parts, sampling, **options)
    limits = Limits(section.new_tokens, stop_ids(tokenizer))
    found = (decode(scorer, method, sampling, seed, prompt, limits) for seed, prompt in enumerate(prompts))
    metrics = total(each.tally for each in found).metrics()
    return {key: float(metrics[key]) for key in ("tokens_per_step", "acceptance_rate")}  # type: ignore[arg-type]

"""Measurement of drafters and heads during training, by decoding a fixed sample of held-out prompts."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.table.table import BigramTable
from ...checkpoints.verify.windows import position_limit
from ...data.prompts import end_ids, load_prompts
from ...data.rendering.templates import get_template
from ...decode.engine import Limits
from ...decode.evaluation.measure import decode_batch
from ...decode.evaluation.metrics import total
from ...decode.methods import Parts, build_method
from ...decode.models.base import LanguageModel
from ...decode.models.dflash import block_drafter
from ...decode.models.eagle import EagleDrafter
from ...decode.models.final_norm import parse_layers
from ...decode.models.loading import wrap_model
from ...decode.proposers.head_trees import attach_projection
from ...decode.tree import parse_tree
from ...decode.warpers import Sampling
from ..schema.training import DrafterRecipe, HeadsRecipe
from .data import Prepared
from .teacher import states_read

_FEW_PARAMETERS = 1_000_000_000
_LOOK_AHEAD = 16  # exceeds the depth of every draft tree in these measurements

Measure = Callable[[Any], dict[str, float]]
_Row = tuple[str, str, dict[str, Any]]  # prefix of the metrics, method, options of the method


def decodes_fast(target: PreTrainedModel) -> bool:
    """Check if a target is small enough for the optimised forward pass, which copies most of its weights."""
    return sum(weight.numel() for weight in target.parameters()) <= _FEW_PARAMETERS


def drafter_measure(
    recipe: DrafterRecipe, target: PreTrainedModel, drafter: PreTrainedModel, tokenizer: Any, prepared: Prepared
) -> Measure:
    """Return a function that measures a drafter's `tokens_per_step` and `acceptance_rate` in speculative decoding."""
    scorer = wrap_model(target, fast=decodes_fast(target))
    positions = min(scorer.max_positions, position_limit(drafter.config) or scorer.max_positions)
    rows: list[_Row] = [("", "speculative", {"gamma": recipe.measure.gamma, "parallel": recipe.parallel is not None})]

    def parts_of(model: Any) -> Parts:
        return Parts(wrap_model(model, check=False))

    return _measure_of(recipe, scorer, tokenizer, target.generation_config, prepared, positions, rows, parts_of)


def check_measure(recipe: HeadsRecipe) -> None:
    """Raise ValueError if the `measure` section of a recipe does not fit its heads, before data is prepared."""
    if not recipe.measure.prompts or recipe.architecture != "medusa":
        return
    depth = parse_tree(_tree(recipe))[0].max_depth
    if depth > recipe.num_heads:
        raise ValueError(f"`measure.tree` must have at most `num_heads` = {recipe.num_heads} levels, got {depth}")
    if recipe.measure.table is not None:
        BigramTable.load(Path(recipe.measure.table))


def _tree(recipe: HeadsRecipe) -> str:
    """Return the candidate tree of a recipe. In `4x2x1` notation, levels beyond the number of heads are removed."""
    tree = recipe.measure.tree
    return tree if "," in tree else "x".join(tree.split("x")[: recipe.num_heads])


def heads_measure(recipe: HeadsRecipe, target: PreTrainedModel, tokenizer: Any, prepared: Prepared) -> Measure:
    """Return a function that measures the acceptance of prediction heads by decoding held-out prompts.

    Medusa heads are measured in Medusa decoding and, if `measure.sequences` is set, in SLiM decoding
    (`slim_tokens_per_step`). If the target cannot score token trees, they are measured in BPD, which drafts chains.
    EAGLE-3 heads, DFlash and DSpark drafters are measured in speculative decoding.
    """
    section = recipe.measure
    # The optimised forward pass copies weights, but training with `base` changes the weights of the target.
    fast = recipe.base is None and decodes_fast(target)
    table = None if section.table is None else BigramTable.load(Path(section.table))
    rows: list[_Row] = [("", "medusa", {"tree": _tree(recipe)})]
    if recipe.architecture != "medusa":
        scorer = wrap_model(target, fast=fast, aux_layers=parse_layers(states_read(recipe)))
        gamma = min(section.gamma, recipe.num_heads) if recipe.drafts_blocks else section.gamma
        rows = [("", "speculative", {"gamma": gamma})]
    else:
        scorer = wrap_model(target, fast=fast, states=recipe.states)
        if scorer.tree_fault is not None:
            rows = [("", "bpd", {})]
        elif section.sequences:
            # Without a table (r = 1), a prefix is never less likely than its sequence, so only full lengths are used.
            without = {"correlation": "none", "lengths": "full"} if table is None else {}
            rows.append(("slim_", "slim-s", {"num_sequences": section.sequences, **without}))

    def parts_of(heads: Any) -> Parts:
        if recipe.architecture == "eagle3":
            return Parts(drafter=EagleDrafter(heads))
        if recipe.drafts_blocks:
            return Parts(drafter=block_drafter(heads))
        if next(heads.parameters()).dtype != scorer.dtype:  # trained in float32, saved in the target's dtype
            heads = copy.deepcopy(heads).to(scorer.dtype)
            attach_projection(heads, target, scorer.device)
        return Parts(heads=heads, table=table)

    settings = target.generation_config
    return _measure_of(recipe, scorer, tokenizer, settings, prepared, scorer.max_positions, rows, parts_of)


def _measure_of(
    recipe: DrafterRecipe | HeadsRecipe,
    scorer: LanguageModel,
    tokenizer: Any,
    settings: Any,
    prepared: Prepared,
    positions: int,
    rows: Sequence[_Row],
    parts_of: Callable[[Any], Parts],
) -> Measure:
    """Return a function that decodes held-out prompts with each method in `rows`, and returns acceptance metrics."""
    section = recipe.measure
    # Leave room for the answer and the draft tokens if the model has only as many positions as a block.
    longest = min(recipe.data.block_tokens, positions - section.new_tokens - _LOOK_AHEAD)
    sources = {"": str(prepared.folder / "heldout.jsonl"), "general_": section.general}
    template = get_template(recipe.data.template, tokenizer, recipe.data.template_options)
    prompts = {
        group: [ids for _, ids in load_prompts(source, template, tokenizer, section.prompts, longest)]
        for group, source in sources.items()
        if source is not None
    }
    ends = end_ids(tokenizer, template, settings)
    sampling, limits = Sampling(temperature=section.temperature), Limits(section.new_tokens, ends)

    def run(module: Any) -> dict[str, float]:
        was_training = module.training
        parts, metrics = parts_of(module.eval()), dict[str, float]()
        for (prefix, name, options), (group, group_prompts) in product(rows, prompts.items()):
            method = build_method(name, parts, sampling, **options)
            decode = partial(decode_batch, scorer, method, sampling)
            texts = [text for seed, ids in enumerate(group_prompts) for text in decode(seed, [ids], limits)]
            counts = total(text.tally for text in texts).metrics()
            for key in ("tokens_per_step", "acceptance_rate"):
                metrics[f"{group}{prefix}{key}"] = float(counts[key])  # type: ignore[arg-type]
        module.train(was_training)
        return metrics

    return run

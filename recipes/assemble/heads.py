"""Prediction heads from their recipe: target, heads and measurement put together, trained, and written.

Letters: V vocabulary, D hidden, X positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.artifact.compat import save_tokenizer
from ...checkpoints.artifact.model_ref import resolve_model, target_record
from ...checkpoints.heads.eagle import EagleHeads, save_eagle
from ...checkpoints.heads.files import PredictionHeads, save_heads
from ...data.blocks.packing import PADDING
from ...data.tokenizers import load_tokenizer
from ...train.config import Medusa2, micro_steps
from ...train.forward.packed import PackedForward
from ...train.loop.fit import FitResult
from ...train.losses.objectives import parse_weights
from ...train.parallel.accelerate import zero_stage
from ...train.parallel.processes import on_main, together
from ...train.tasks.heads import EagleTask, HeadsTask
from ...train.tasks.medusa2 import Medusa2Task
from ..schema.training import HeadsRecipe, ModelSection
from .acceptance import check_measure, heads_measure
from .artifact import Run, prepare_once
from .data import Prepared
from .drafter import frequent_tokens
from .models import TrainableModel, add_lora, check_vocabulary, load_trainable
from .teacher import open_hidden

BASE = "base"
"""Folder of the artifact that holds a target trained with its heads."""


@dataclass(frozen=True)
class HeadsParts:
    """What a heads recipe comes to before the first step."""

    heads: PredictionHeads | EagleHeads
    task: HeadsTask
    base: TrainableModel | None
    """The target, where it is trained too."""
    target_sha256: str | None
    """Of the target as it was."""


def run_heads(recipe: HeadsRecipe, out: Path, accelerator: Any) -> None:
    """Train prediction heads on a target, frozen or trained with them."""

    def opened() -> Any:
        parse_weights(recipe.objective)
        check_measure(recipe)
        micro_steps(recipe.train.global_batch, recipe.train.micro_batch, accelerator.num_processes)
        return load_tokenizer(recipe.tokenizer_source)

    def made() -> HeadsParts:
        parts = heads_parts(recipe, tokenizer, run.prepared, accelerator.device)
        _check_launch(recipe, parts.task, accelerator)
        return parts

    # mistakes are found before the data is prepared, which may take hours
    tokenizer = together(accelerator, opened)
    run = Run(recipe, out, accelerator, tokenizer, prepare_once(recipe, tokenizer, accelerator))
    parts = together(accelerator, made)
    result = run.fit(parts.task, recipe.measure.prompts > 0)
    on_main(accelerator, lambda: _save(run, parts, result))


def _save(run: Run, parts: HeadsParts, result: FitResult) -> None:
    heads, base, target = parts.heads, parts.base, str(run.recipe.target)
    names = ("num_heads", "num_layers", "hidden_size", "vocab_size", "projection_kind", "rank", "states")
    shapes = {name: getattr(heads, name) for name in names if hasattr(heads, name)}
    assert isinstance(run.recipe, HeadsRecipe)
    shapes["architecture"] = run.recipe.architecture
    if heads.proposed is not None:
        shapes["proposed_tokens"] = len(heads.proposed)
    made_for = target if base is None else str(run.out / BASE)
    if base is not None:
        shapes["trained_from"] = target

    def write(folder: Path) -> None:
        if isinstance(heads, EagleHeads):
            save_eagle(heads.to(parts.task.target.dtype), folder)
        else:
            save_heads(heads.to(parts.task.target.dtype), folder, made_for)
        if base is not None:
            base.save(folder / BASE)
            save_tokenizer(run.tokenizer, folder / BASE)

    run.save(result, write, shapes, target_record(made_for, parts.target_sha256 if base is None else None))


def _check_launch(recipe: HeadsRecipe, task: HeadsTask, accelerator: Any) -> None:
    """Raises ValueError where nothing would spread the target, or DeepSpeed, which casts all of a module, would make it
    another."""
    if recipe.shard_target and zero_stage(accelerator) < 3:
        raise ValueError("`shard_target` is for ZeRO 3, and this launch has none: recipes/launch/accelerate/zero3.yaml")
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.train.precision)
    inside = recipe.base is not None or recipe.shard_target
    if inside and zero_stage(accelerator) and precision not in (None, task.target.dtype):
        name, cast = (str(dtype).removeprefix("torch.") for dtype in (task.target.dtype, precision))
        raise ValueError(f"the target is in {name}, and DeepSpeed would cast it to {cast}: set `target_dtype: {cast}`")


def heads_parts(recipe: HeadsRecipe, tokenizer: Any, prepared: Prepared, device: Any) -> HeadsParts:
    """Load the target, and make heads for it."""
    ref = resolve_model(recipe.target)
    target = load_trainable(ref.path, decoder=True, device=str(device), dtype=recipe.target_dtype)
    check_vocabulary(len(tokenizer), target, recipe.target)
    states = None if recipe.hidden.cache is None else open_hidden(recipe, prepared)
    heads: Any = _new_heads(recipe, target, prepared)
    base = None
    if recipe.base is not None:
        section = ModelSection(source=recipe.target, lora=recipe.base.lora)
        torch.manual_seed(recipe.train.seed)
        base = TrainableModel(target, recipe.base.lora, add_lora(target, section))
    common: dict[str, Any] = {
        "head_weights": [recipe.weight_decay_by_head**head for head in range(recipe.num_heads)],
        "objective": recipe.objective,
        "temperature": recipe.temperature,
        "evaluate_fn": heads_measure(recipe, target, tokenizer, prepared) if recipe.measure.prompts else None,
        "evaluate_blocks": recipe.measure.blocks,
    }
    heldout = prepared.heldout if recipe.measure.blocks else None
    task: HeadsTask
    if recipe.architecture == "eagle3":
        task = EagleTask(target, heads, heldout, states=states, **common)
    elif recipe.base is None:
        task = HeadsTask(target, heads, heldout, states=states, shard_target=recipe.shard_target, **common)
    else:
        numbers = recipe.base.model_dump(exclude={"lora"})
        task = Medusa2Task(target, heads, heldout, Medusa2(**numbers), **common)
        task.settings["lora"] = recipe.base.lora.model_dump(mode="json", exclude={"export"})
    if recipe.hidden.cache is not None and not recipe.measure.prompts and not recipe.shard_target:
        _let_go(target)  # training reads only its embeddings and output layer
    if recipe.train.compile:
        task.module.compile()
    # what changes the training, or what its evaluations are compared by
    task.settings["hash of the target"] = ref.sha256
    task.settings["target_dtype"] = str(target.dtype)
    task.settings["heads"] = [recipe.num_heads, recipe.num_layers, recipe.projection, recipe.rank, heads.states]
    if recipe.vocabulary is not None:
        task.settings["vocabulary"] = recipe.vocabulary.tokens
    task.settings["hidden"] = None if states is None else states.settings
    task.settings["measure"] = recipe.measure.model_dump(mode="json", exclude={"keep"})
    return HeadsParts(heads, task, base, ref.sha256)


def _let_go(target: Any) -> None:
    """Drop a decoder's layers, which are most of its memory."""
    decoder = target.get_decoder()
    for name, layers in [*decoder.named_children()]:
        if isinstance(layers, nn.ModuleList):
            setattr(decoder, name, nn.ModuleList())


def _new_heads(recipe: HeadsRecipe, target: Any, prepared: Prepared) -> PredictionHeads | EagleHeads:
    """Heads that begin as the target's own projection, in float32 (16 bits would lose small changes)."""
    weight_VD = target.get_output_embeddings().weight.detach()
    if recipe.architecture == "eagle3":
        proposed = None
        if recipe.vocabulary is not None and recipe.vocabulary.tokens is not None:
            proposed = frequent_tokens(recipe.vocabulary.tokens, len(weight_VD), prepared, "heads")
        torch.manual_seed(recipe.train.seed)
        eagle = EagleHeads.for_target(target.config, recipe.layers, proposed, recipe.num_heads)
        eagle = eagle.to(target.device).attach(target.get_input_embeddings().weight, weight_VD)
        return eagle.begin_as(target)
    start_VD, scale = weight_VD.float(), 1.0
    if recipe.states == "before-norm":
        scale, norm_D = _before_norm(target, prepared)
        start_VD = start_VD * norm_D
    forms = (recipe.projection, recipe.rank, recipe.states)
    heads = PredictionHeads.from_lm_head(start_VD, recipe.num_heads, recipe.num_layers, *forms, scale=scale)
    if recipe.vocabulary is not None and recipe.vocabulary.tokens is not None:
        heads.propose(frequent_tokens(recipe.vocabulary.tokens, len(weight_VD), prepared, "heads"))
    if recipe.projection == "target":
        heads.attach(target.get_output_embeddings().weight)
    return heads


@torch.no_grad()
def _before_norm(target: Any, prepared: Prepared) -> tuple[float, Tensor]:
    """Of a held-out block: what makes the states that go into the final norm as large as those after a norm, and [D],
    what the norm then multiplies each number by, by least squares: heads begin near the target's own projection."""
    if not prepared.heldout.blocks:
        raise ValueError("`states: before-norm` needs a held-out block to begin from, and there is none")
    forward = PackedForward(target, "before-norm")
    batch = prepared.heldout.batch([0]).to(target.device)
    before_XD = forward.hidden(batch)[batch.documents_BT != PADDING]
    after_XD = forward.after_norm(before_XD).float()
    scale = 1 / float(before_XD.float().square().mean().sqrt().clamp(min=1e-12))
    before_XD = before_XD.float() * scale
    return scale, (after_XD * before_XD).sum(0) / before_XD.square().sum(0).clamp(min=1e-12)

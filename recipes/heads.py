"""Prediction heads from their recipe: target, heads and measurement put together, trained, and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoints.artifact import model_fingerprint
from ..checkpoints.heads import PredictionHeads, save_heads
from ..data.tokenizers import load_tokenizer
from ..train.config import micro_steps
from ..train.heads import HeadsTask
from .acceptance import heads_measure
from .models import check_vocabulary, load_trainable
from .outcome import fit_recipe, prepare_once, save
from .prepare import Prepared
from .training import HeadsRecipe


def run_heads(recipe: HeadsRecipe, out: Path, accelerator: Any) -> None:
    """Train prediction heads on a frozen target."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    micro_steps(recipe.train.global_batch, recipe.train.micro_batch, accelerator.num_processes)
    prepared = prepare_once(recipe, tokenizer, accelerator)
    task, heads = heads_parts(recipe, tokenizer, prepared, accelerator.device)
    task.settings["target"] = model_fingerprint(task.target)
    task.settings["measure"] = recipe.measure.model_dump(mode="json", exclude={"keep"})
    measured = recipe.measure.prompts > 0
    result = fit_recipe(task, prepared, recipe, out, accelerator, tokenizer, measured)
    if not accelerator.is_main_process:
        return
    shapes = {name: getattr(heads, name) for name in ("num_heads", "num_layers", "hidden_size", "vocab_size")}

    def write(folder: Path) -> None:
        save_heads(heads, folder, recipe.target)

    save(recipe, out, write, tokenizer, prepared, result, task.target, shapes)


def heads_parts(
    recipe: HeadsRecipe, tokenizer: Any, prepared: Prepared, device: Any
) -> tuple[HeadsTask, PredictionHeads]:
    """Load the target, and make heads for it.

    Raises:
        ValueError: what loading the target raises; a tokenizer with more tokens than it.
    """
    target = load_trainable(recipe.target, decoder=True, device=str(device))
    check_vocabulary(len(tokenizer), target, recipe.target)
    projection_VD = target.get_output_embeddings().weight.detach()
    heads = PredictionHeads.from_lm_head(projection_VD, recipe.num_heads, recipe.num_layers).to(device)
    task = HeadsTask(
        target,
        heads,
        prepared.heldout if recipe.measure.blocks else None,
        head_weights=[recipe.weight_decay_by_head**place for place in range(recipe.num_heads)],
        evaluate_fn=heads_measure(recipe, target, tokenizer, prepared) if recipe.measure.prompts else None,
        evaluate_blocks=recipe.measure.blocks,
    )
    return task, heads

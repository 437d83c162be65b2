"""The kinds of training recipes: from a checked recipe to an artifact on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.artifact import model_fingerprint
from ..checkpoints.heads import PredictionHeads, save_heads
from ..data.tokenizers import load_tokenizer
from ..train.heads import HeadsTask
from ..train.scale import make_accelerator
from ..train.table import count_table
from .acceptance import heads_measure
from .drafters import run_drafter
from .models import check_vocabulary, load_trainable
from .outcome import check_out, fit_recipe, on_main, prepare_once, save, state_folder
from .terminal import say
from .training import DrafterRecipe, HeadsRecipe, TableRecipe


def run_train(recipe: DrafterRecipe | HeadsRecipe | TableRecipe) -> Path:
    """Run a training recipe to its artifact, or find that it is there already.

    Returns:
        The artifact's folder.

    Raises:
        ValueError: an artifact of another recipe stands there; whatever data, models and training raise.
    """
    out = Path(recipe.out)
    accelerator = accelerator_for(recipe)
    on_main(accelerator, partial(check_out, out, recipe))
    if (out / "artifact.json").is_file():
        say(f"{recipe.kind}: {out} is finished, reusing it")
        return out
    KINDS[recipe.kind](recipe, out, accelerator)
    accelerator.wait_for_everyone()
    return out


def accelerator_for(recipe: DrafterRecipe | HeadsRecipe | TableRecipe) -> Any:
    """accelerate's view of the processes that were launched, with the recipe's precision and trackers.

    Raises:
        ValueError: a tracker that is not installed; a launch that is not what it says.
    """
    if isinstance(recipe, TableRecipe):
        return make_accelerator("no")
    names = list(recipe.train.trackers)
    if not names:
        return make_accelerator(recipe.train.precision)
    from accelerate.tracking import get_available_trackers

    missing = sorted(set(names) - {str(name) for name in get_available_trackers()})
    if missing:
        raise ValueError(f"`train.trackers` has {missing[0]!r}, which is not installed: pip install {missing[0]}")
    return make_accelerator(recipe.train.precision, log_with=names, project_dir=str(state_folder(Path(recipe.out))))


def run_heads(recipe: HeadsRecipe, out: Path, accelerator: Any) -> None:
    """Train prediction heads on a frozen target."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = prepare_once(recipe, tokenizer, accelerator)
    target = load_trainable(recipe.target, decoder=True, device=str(accelerator.device))
    check_vocabulary(len(tokenizer), target, recipe.target)
    projection_VD = target.get_output_embeddings().weight.detach()
    heads = PredictionHeads.from_lm_head(projection_VD, recipe.num_heads, recipe.num_layers).to(accelerator.device)
    measure = heads_measure(recipe, target, tokenizer, prepared) if recipe.measure.prompts else None
    task = HeadsTask(
        target,
        heads,
        prepared.heldout if recipe.measure.blocks else None,
        head_weights=[recipe.weight_decay_by_head**place for place in range(recipe.num_heads)],
        evaluate_fn=measure,
        evaluate_blocks=recipe.measure.blocks,
    )
    task.settings["target"] = model_fingerprint(target)
    result = fit_recipe(task, prepared, recipe, out, accelerator, tokenizer, measure is not None)
    if not accelerator.is_main_process:
        return
    shapes = {name: getattr(heads, name) for name in ("num_heads", "num_layers", "hidden_size", "vocab_size")}

    def write(folder: Path) -> None:
        save_heads(heads, folder, recipe.target)

    save(recipe, out, write, tokenizer, prepared, result, target, shapes)


def run_table(recipe: TableRecipe, out: Path, accelerator: Any) -> None:
    """Count bigrams; one process counts, others wait."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = prepare_once(recipe, tokenizer, accelerator)
    if not accelerator.is_main_process:
        return
    amount = "a stream" if recipe.data.streaming else f"{prepared.train.manifest['tokens']:,} tokens"
    say(f"table: counting pairs in {amount}")
    table = count_table(prepared.train, len(tokenizer))
    shapes = {"entries": len(table.col)}
    say(f"table: {len(table.col):,} pairs seen at least once")
    save(recipe, out, table.save, tokenizer, prepared, None, None, shapes)


KINDS: dict[str, Callable[..., None]] = {"drafter": run_drafter, "heads": run_heads, "table": run_table}

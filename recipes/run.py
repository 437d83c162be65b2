"""The kinds of training recipes: from a checked recipe to an artifact on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..data.tokenizers import load_tokenizer
from ..train.scale import make_accelerator
from ..train.table import count_table
from .drafters import run_drafter
from .heads import run_heads
from .outcome import check_out, on_main, prepare_once, save, state_folder
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

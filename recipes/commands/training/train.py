"""The kinds of training recipes: from a checked recipe to an artifact on disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import check_writable
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....train.parallel.accelerate import make_accelerator
from ....train.parallel.processes import on_main
from ...assemble.artifact import check_out, state_folder
from ...assemble.drafter import run_drafter
from ...assemble.heads import run_heads
from ...assemble.table.count import run_table
from ...schema.training import DrafterRecipe, HeadsRecipe, TableRecipe, TrainingRecipe, role_of
from ...session.launch import run_on_all
from ...session.terminal import log


def run_train(recipe: TrainingRecipe) -> Path:
    """Run a training recipe to its artifact, or find that it is there already; the artifact's folder. Of several
    processes the main one raises what goes wrong, and the others leave with its exit code."""
    out = Path(recipe.out)
    accelerator = run_on_all(lambda: accelerator_for(recipe))
    with ExitStack() as stack:

        def claim() -> None:
            check_writable(out)
            if not (out / MANIFEST_FILE).is_file():
                stack.enter_context(sole_writer(out))
            check_out(out, recipe)

        on_main(accelerator, claim)
        if (out / MANIFEST_FILE).is_file():
            if accelerator.is_main_process:
                log(f"{role_of(recipe)}: {out} is finished, reusing it")
            return out
        if isinstance(recipe, DrafterRecipe):
            run_drafter(recipe, out, accelerator)
        elif isinstance(recipe, HeadsRecipe):
            run_heads(recipe, out, accelerator)
        else:
            run_table(recipe, accelerator)
        accelerator.wait_for_everyone()
    return out


def accelerator_for(recipe: TrainingRecipe) -> Any:
    """accelerate's view of the processes that were launched, with the recipe's precision and trackers. Raises
    ValueError: a tracker that is not installed; a launch that is not what it says."""
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

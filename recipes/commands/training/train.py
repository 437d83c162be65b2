"""`draftsmith train`: run a training recipe and write its artifact."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import check_writable
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.names import MANIFEST_FILE
from ....data.tokenizers import load_tokenizer
from ....train.config import micro_steps
from ....train.losses.objectives import parse_weights
from ....train.parallel.accelerate import make_accelerator
from ....train.parallel.processes import on_main
from ...assemble.acceptance import check_measure
from ...assemble.artifact import Run, check_out, prepare_once, state_folder
from ...assemble.drafter import make_drafter_run
from ...assemble.heads import make_heads_run
from ...assemble.table.count import run_table
from ...schema.training import DrafterRecipe, HeadsRecipe, TableRecipe, TrainingRecipe, role_of
from ...session.precision import settle_precision
from ...session.terminal import log


def run_train(recipe: TrainingRecipe) -> Path:
    """Run a training recipe unless its artifact is already complete, and return the artifact directory."""
    recipe, out = settle_precision(recipe), Path(recipe.out)
    accelerator = accelerator_for(recipe)
    with ExitStack() as stack:

        def claim() -> None:
            check_writable(out, folder=True)
            if not (out / MANIFEST_FILE).is_file():
                stack.enter_context(sole_writer(out))
            check_out(out, recipe)

        on_main(accelerator, claim)
        if (out / MANIFEST_FILE).is_file():
            if accelerator.is_main_process:
                log(f"{role_of(recipe)}: {out} is finished, reusing it")
            return out
        if isinstance(recipe, TableRecipe):
            run_table(recipe, accelerator)
        else:
            run = make_run(recipe, accelerator)
            result = run.fit(accelerator)
            on_main(accelerator, partial(run.save, result))
        accelerator.wait_for_everyone()
    return out


def make_run(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any) -> Run:
    """Load the models of a recipe, and prepare its data; raise ValueError if the recipe is invalid."""
    parse_weights(recipe.objective)
    micro_steps(recipe.train.global_batch, recipe.train.micro_batch, accelerator.num_processes)
    if isinstance(recipe, HeadsRecipe):
        check_measure(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepare = partial(prepare_once, recipe, tokenizer, accelerator)
    if isinstance(recipe, DrafterRecipe):
        return make_drafter_run(recipe, tokenizer, prepare, accelerator)
    return make_heads_run(recipe, tokenizer, prepare, accelerator)


def accelerator_for(recipe: TrainingRecipe) -> Any:
    """Create the `Accelerator` for the launched processes, with the recipe's precision and trackers.

    Raises ValueError if a tracker is not installed, or if the launch is not supported (see `make_accelerator`).
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

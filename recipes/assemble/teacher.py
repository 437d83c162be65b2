"""Caches of target outputs: top-k log-probabilities to distil a drafter, or hidden states to train heads."""

import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.artifact.model_ref import resolve_model
from ...checkpoints.heads import dflash, eagle
from ...checkpoints.storage.atomic import check_writable
from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.storage.messages import gigabytes
from ...data.blocks.prepared import PreparedData
from ...data.tokenizers import load_tokenizer
from ...train.loop.checkpoints import data_fingerprint
from ...train.parallel.accelerate import make_accelerator
from ...train.parallel.processes import Interrupted, on_main
from ...train.teachers.cache import CacheWriter, MakeRows, RowCache, Source
from ...train.teachers.teacher import CacheSource, HiddenSource, mean_mass
from ..schema.training import DrafterRecipe, HeadsRecipe, TableRecipe, TrainingRecipe
from ..session.precision import settle_precision
from ..session.stopping import Stoppable
from ..session.terminal import bar, log
from .artifact import prepare_once
from .data import Prepared

_ENOUGH_MASS = 0.9  # a mass of 0.54 made a drafter worse (docs/lab-notes/training.md)


class _Part(NamedTuple):
    """Training or held-out data, with the source and the directory of its cache."""

    name: str
    data: PreparedData
    source: Source
    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / self.source.manifest).is_file()


def states_read(recipe: HeadsRecipe) -> str:
    """Return the `PackedForward` name of the target's hidden states that the heads use as input."""
    if recipe.architecture == "medusa":
        return recipe.states
    config = AutoConfig.from_pretrained(model_source(recipe.target, weights=False)).get_text_config()
    default = dflash.default_layers if recipe.drafts_blocks else eagle.default_layers
    layers = default(config.num_hidden_layers) if recipe.layers is None else recipe.layers
    return "-".join(["layers", *map(str, layers)])


def prepare_teacher(recipe: TrainingRecipe) -> Path:
    """Run the target of a recipe on its data, cache the outputs, and return the cache directory of the training data.

    An interrupted run resumes, and a finished cache is reused. With `accelerate launch`, the processes share the work
    and require a shared file system.

    Raises ValueError if the recipe sets no cache or no target, or there is too little free disk space.
    """
    state = make_accelerator("no")
    recipe = _check(settle_precision(recipe))
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    on_main(state, partial(check_writable, _folder(recipe) / "report.json"))
    parts = _parts(recipe, prepare_once(recipe, tokenizer, state))
    missing = [part for part in parts if not part.done]
    state.wait_for_everyone()  # all processes check for missing parts before any process writes
    if missing:
        _write(recipe, missing, state)
    on_main(state, partial(_report, parts))
    return parts[0].folder


def _check(recipe: TrainingRecipe) -> DrafterRecipe | HeadsRecipe:
    """Return the recipe if it trains a drafter or heads and sets a target and a cache, else raise ValueError."""
    if isinstance(recipe, TableRecipe):
        raise ValueError("--teacher requires a recipe of kind 'drafter' or 'heads', got 'table'")
    setting = "teacher.cache" if isinstance(recipe, DrafterRecipe) else "hidden.cache"
    if recipe.target is None or _section(recipe).cache is None:
        missing = "target" if recipe.target is None else setting
        raise ValueError(f"`prepare --teacher` requires `{missing}`, which the recipe does not set")
    return recipe


def _section(recipe: DrafterRecipe | HeadsRecipe) -> Any:
    return recipe.teacher if isinstance(recipe, DrafterRecipe) else recipe.hidden


def _folder(recipe: DrafterRecipe | HeadsRecipe) -> Path:
    return Path(_section(recipe).cache)


def _parts(recipe: DrafterRecipe | HeadsRecipe, prepared: Prepared) -> list[_Part]:
    target = str(recipe.target)
    sha256, parts = str(resolve_model(target).sha256), []
    for name, data in (("training", prepared.train), ("held-out", prepared.heldout)):
        made_of = (target, sha256, data_fingerprint(data))
        source: Source
        if isinstance(recipe, DrafterRecipe):
            source = CacheSource(*made_of, recipe.teacher.top_k, recipe.teacher.dtype)
        else:
            source = HiddenSource(*made_of, states_read(recipe), recipe.hidden.dtype, recipe.target_dtype)
        parts.append(_Part(name, data, source, _folder(recipe) / source.key))
    return parts


def open_caches(recipe: DrafterRecipe | HeadsRecipe, prepared: Prepared) -> list[RowCache]:
    """Open the caches of the training and the held-out data. Raise ValueError if one does not exist."""
    parts = _parts(_check(recipe), prepared)
    for part in parts:
        if not part.done:
            raise ValueError(
                f"{part.folder.parent} has no cache of {part.source} for the {part.name} data: write it with "
                "`draftsmith prepare --teacher` and this recipe"
            )
    return [RowCache(part.folder, type(part.source)) for part in parts]


def _write(recipe: DrafterRecipe | HeadsRecipe, parts: Sequence[_Part], state: Any) -> None:
    make_rows, size = parts[0].source.load(state.device)
    writers = [CacheWriter(part.folder, part.source, part.data, size) for part in parts]
    with ExitStack() as locks:

        def begin() -> None:
            for writer in writers:
                locks.enter_context(sole_writer(writer.folder))
            _check_disk(parts[0], writers)

        def finish() -> None:
            for writer in writers:
                writer.finish()

        on_main(state, begin)
        _write_share(writers, make_rows, _section(recipe).batch, state)
        state.wait_for_everyone()
        on_main(state, finish)


def _write_share(writers: Sequence[CacheWriter], make_rows: MakeRows, batch: int, state: Any) -> None:
    """Write the missing cache files of this process. Raise Interrupted if a signal is received."""
    missing = [(writer, shard) for writer in writers for shard in writer.missing_shards()]
    missing = [each for each in missing if each[1].number % state.num_processes == state.process_index]
    total, done = sum(shard.rows for _, shard in missing), 0
    with Stoppable("teacher") as stopping, bar("teacher: writing the cache", "positions") as advance:

        def progress(rows: int) -> None:
            nonlocal done
            done += rows
            if state.is_main_process:
                advance(done, total)

        for writer, shard in missing:
            if not writer.write(shard, make_rows, state.device, batch, progress, stopping):
                assert stopping.received is not None
                message = f"stopped by {signal.Signals(stopping.received).name} after {done:,} of {total:,} positions"
                log(f"teacher: {message}; run the same command again to resume")
                raise Interrupted(stopping.received, message)


def _check_disk(part: _Part, writers: Sequence[CacheWriter]) -> None:
    """Log the size of the cache. Raise ValueError if there is too little free disk space."""
    needed = sum(writer.missing_bytes() for writer in writers)
    size, rows = sum(writer.rows * writer.row_bytes for writer in writers), sum(writer.rows for writer in writers)
    folder = part.folder.parent
    summary = f"{part.source} at {rows:,} positions: {gigabytes(size)} in {folder}, {gigabytes(needed)} to write"
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"{summary}, but only {gigabytes(free)} are free; {part.source.size_advice}")
    log(f"teacher: {summary}")


def _report(parts: Sequence[_Part]) -> None:
    for part in parts:
        cache = RowCache(part.folder, type(part.source))
        log(f"teacher: {part.name}: {cache.rows:,} positions in {part.folder}")
        if isinstance(part.source, CacheSource):
            mass = mean_mass(cache)
            advice = "" if mass >= _ENOUGH_MASS else "; increase `teacher.top_k` to distil more of it"
            log(f"teacher: the top {part.source.top_k} tokens have {mass:.1%} of the probability{advice}")

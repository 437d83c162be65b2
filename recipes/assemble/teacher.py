"""What a recipe's target says, on disk: a drafter's teacher (its most likely tokens) or the hidden states that heads
read; opened for a run, written, resumed, and made again where it is damaged."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.artifact.model_ref import resolve_model
from ...checkpoints.heads.eagle import default_layers
from ...checkpoints.storage.atomic import check_writable
from ...data.blocks.prepared import PreparedData
from ...data.tokenizers import load_tokenizer
from ...decode.models.final_norm import layers_in
from ...decode.models.loading import load_model
from ...train.loop.checkpoints import data_fingerprint
from ...train.parallel.accelerate import make_accelerator
from ...train.parallel.processes import Interrupted, on_main, together
from ...train.teachers.cache import CacheWriter, MakeRows, RowCache, Source, discard_damage, locked, read_manifest
from ...train.teachers.teacher import (
    CachedHidden,
    CachedTeacher,
    CacheSource,
    HiddenRows,
    HiddenSource,
    StatesTeacher,
    load_teacher,
    mean_mass,
    top_rows,
)
from ..schema.training import DrafterRecipe, HeadsRecipe, HiddenSection, TableRecipe, TrainingRecipe
from ..session.stopping import Stoppable
from ..session.terminal import bar, gigabytes, log
from .artifact import prepare_once
from .data import Prepared

_ENOUGH_MASS = 0.9  # with 0.54 of it a drafter was taught to be worse than it had been (docs/lab-notes/training.md)


@dataclass(frozen=True)
class _TargetCache:
    """One kind of cache, with a recipe's settings."""

    word: str  # that lines about it begin with
    title: str  # of what it holds
    target: str
    folder: Path
    batch: int  # blocks per forward of the target
    source_type: type[Source]
    source: Callable[[str, str], Source]  # from the hashes of target and data
    load: Callable[[torch.device, Prepared], tuple[MakeRows, int]]  # the target, and the size that its rows depend on
    smaller: str  # what makes it smaller


@dataclass(frozen=True)
class _Part:
    """The training data, or what is held out, and where its cache lies."""

    name: str
    data: PreparedData
    source: Source
    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / self.source.manifest).is_file()


def _cache_of(recipe: TrainingRecipe) -> _TargetCache:
    """Raises ValueError for a recipe of a table, without target or folder, or with streamed data."""
    if isinstance(recipe, TableRecipe):
        raise ValueError("--teacher is for recipes of kind 'drafter' or 'heads', and this one is of kind 'table'")
    section: Any = recipe.teacher if isinstance(recipe, DrafterRecipe) else recipe.hidden
    setting = "teacher.cache" if isinstance(recipe, DrafterRecipe) else "hidden.cache"
    if recipe.target is None or section.cache is None:
        missing = "target" if recipe.target is None else setting
        raise ValueError(f"a cache of the target (`prepare --teacher`) needs `{missing}`, and the recipe has none")
    if recipe.data.streaming:
        raise ValueError(f"`{setting}` needs prepared data: with `data.streaming` nobody knows which blocks come")
    target, folder, batch = recipe.target, Path(section.cache), section.batch
    if isinstance(recipe, DrafterRecipe):
        top_k, dtype, eight_bit = recipe.teacher.top_k, recipe.teacher.dtype, recipe.teacher.load_in_8bit
        states = _states_of(recipe)

        def teacher_rows(device: torch.device, prepared: Prepared) -> tuple[MakeRows, int]:
            teacher: Any
            if states is None:
                teacher = load_teacher(target, dtype, eight_bit, device)
            else:
                model = load_model(target, dtype=dtype, device=str(device))
                teacher = StatesTeacher(model, CachedHidden(*_opened(states, prepared), states="after-norm"))
            return partial(top_rows, teacher, top_k), teacher.vocab_size

        return _TargetCache(
            word="teacher",
            title=f"the top {top_k} tokens of {target}",
            target=target,
            folder=folder,
            batch=batch,
            source_type=CacheSource,
            source=lambda model, data: CacheSource(target, model, data, top_k, dtype, eight_bit),
            load=teacher_rows,
            smaller="a smaller `teacher.top_k`",
        )
    return _hidden_cache(target, section, states_read(recipe), recipe.target_dtype)


def _states_of(recipe: TrainingRecipe) -> _TargetCache | None:
    """The hidden states that a drafter's teacher is computed from, where they are."""
    if not isinstance(recipe, DrafterRecipe) or recipe.teacher.hidden is None or recipe.target is None:
        return None
    section = HiddenSection(cache=recipe.teacher.hidden, batch=recipe.teacher.batch)
    return _hidden_cache(recipe.target, section, "after-norm", recipe.teacher.dtype)


def states_read(recipe: HeadsRecipe) -> str:
    """The target's hidden states that heads read, as `PackedForward` names them."""
    if recipe.architecture == "medusa":
        return recipe.states
    config = AutoConfig.from_pretrained(model_source(recipe.target, weights=False)).get_text_config()
    layers = default_layers(config.num_hidden_layers) if recipe.layers is None else recipe.layers
    return "-".join(["layers", *map(str, layers)])


def _hidden_cache(target: str, section: HiddenSection, states: str, target_dtype: str) -> _TargetCache:
    assert section.cache is not None
    dtype = section.dtype

    def hidden_rows(device: torch.device, prepared: Prepared) -> tuple[MakeRows, int]:
        rows = HiddenRows(load_model(target, dtype=target_dtype, device=str(device)), states, dtype)
        return rows, rows.hidden_size

    return _TargetCache(
        word="hidden states",
        title=f"the hidden states of {target} ({states}, {dtype})",
        target=target,
        folder=Path(section.cache),
        batch=section.batch,
        source_type=HiddenSource,
        source=lambda model, data: HiddenSource(target, model, data, states, dtype, target_dtype=target_dtype),
        load=hidden_rows,
        smaller="`hidden.dtype=bfloat16`, or `hidden.cache=null`, which computes the states in every step",
    )


def open_cache(recipe: DrafterRecipe, prepared: Prepared) -> CachedTeacher:
    """The cache of its teacher that a recipe names, for batches of its training data and of what is held out."""
    return CachedTeacher(*_opened(_cache_of(recipe), prepared))


def open_hidden(recipe: HeadsRecipe, prepared: Prepared) -> CachedHidden:
    """The same of the hidden states that a recipe names."""
    return CachedHidden(*_opened(_cache_of(recipe), prepared), states=states_read(recipe))


def prepare_teacher(recipe: TrainingRecipe, accelerator: Any | None = None) -> Path:
    """Run a recipe's target over its data and keep what it says, or find that this is done and whole.

    A stopped or killed run is resumed; of a finished cache, missing and damaged files are written again. Under
    `accelerate launch` the processes share the work; they need one file system. Returns the folder of the training
    data's cache.
    """
    state = accelerator if accelerator is not None else make_accelerator("no")
    cache = together(state, partial(_cache_of, recipe))
    states = together(state, partial(_states_of, recipe))
    on_main(state, lambda: check_writable(cache.folder / "report.json"))
    assert not isinstance(recipe, TableRecipe)
    tokenizer = together(state, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, state)
    if states is not None and not all(part.done for part in together(state, partial(_parts, cache, prepared))):
        _prepare(states, prepared, state)
    return _prepare(cache, prepared, state)


def _prepare(cache: _TargetCache, prepared: Prepared, state: Any) -> Path:
    """Write one kind of cache, or find it whole; the folder of the training data's."""
    parts = together(state, partial(_parts, cache, prepared))

    def check() -> None:
        for part in parts:
            if part.done:
                _discard_damage(cache, part)

    on_main(state, check)
    missing = [part for part in parts if not part.done]
    state.wait_for_everyone()  # all have looked before one writes
    if missing:
        _write(cache, missing, prepared, state)
    on_main(state, partial(_report, cache, parts))
    return parts[0].folder


def _parts(cache: _TargetCache, prepared: Prepared) -> list[_Part]:
    assert isinstance(prepared.train, PreparedData)
    sha256 = resolve_model(cache.target).sha256
    parts = []
    for name, data in (("training", prepared.train), ("held-out", prepared.heldout)):
        own = cache.source(str(sha256), data_fingerprint(data))
        known = [own, *_wider(cache.folder, own)]
        source = next((each for each in known if (cache.folder / each.key / each.manifest).is_file()), known[0])
        parts.append(_Part(name, data, source, cache.folder / source.key))
    return parts


def _wider(folder: Path, own: Source) -> list[Source]:
    """Return the caches in a folder that hold what `own` would hold, besides the inner layers that EAGLE-3 reads."""
    found: list[Source] = []
    if isinstance(own, HiddenSource) and own.states == "after-norm":
        for manifest in sorted(folder.glob(f"*/{HiddenSource.manifest}")):
            source = HiddenSource(**read_manifest(manifest.parent, HiddenSource)["source"])
            if layers_in(source.states) and replace(source, target=own.target, states="after-norm") == own:
                found.append(source)
    return found


def _opened(cache: _TargetCache, prepared: Prepared) -> list[Any]:
    parts = _parts(cache, prepared)
    for part in parts:
        if not part.done:
            raise ValueError(
                f"there is no cache of {cache.title} as it is now for the {part.name} data in {cache.folder}: "
                "`draftsmith prepare` with this recipe and `--teacher` writes it"
            )
    return [RowCache(part.folder, cache.source_type) for part in parts]


def _discard_damage(cache: _TargetCache, part: _Part) -> None:
    """Read a finished cache; where it is damaged, keep its other files for the writer."""
    with locked(part.folder), bar(f"{cache.word}: reading the {part.name} cache", "files") as advance:
        damaged = discard_damage(part.folder, type(part.source), advance)
    if damaged:
        log(f"{cache.word}: {len(damaged)} damaged files are written again: {damaged[0]}")


def _write(cache: _TargetCache, parts: Sequence[_Part], prepared: Prepared, state: Any) -> None:
    make_rows, size = together(state, partial(cache.load, state.device, prepared))
    writers = [CacheWriter(part.folder, part.source, part.data, size) for part in parts]
    with ExitStack() as locks:

        def begin() -> None:
            for writer in writers:
                locks.enter_context(locked(writer.folder))
            _check_disk(cache, writers)

        def finish() -> None:
            for part, writer in zip(parts, writers, strict=True):
                with bar(f"{cache.word}: hashing the {part.name} cache", "files") as advance:
                    writer.finish(advance)

        on_main(state, begin)
        try:
            together(state, partial(_write_share, cache, writers, make_rows, state))
        except Interrupted as stopped:
            if state.is_main_process:
                log(str(stopped))
            raise
        on_main(state, finish)


def _write_share(cache: _TargetCache, writers: Sequence[CacheWriter], make_rows: MakeRows, state: Any) -> None:
    """Write this process's share of the files. Raises Interrupted where a signal came."""
    missing = [(writer, shard) for writer in writers for shard in writer.missing()]
    missing = [each for each in missing if each[1].number % state.num_processes == state.process_index]
    total, done = sum(shard.rows for _, shard in missing), 0
    with Stoppable(cache.word) as stopping, bar(f"{cache.word}: writing the cache", "positions") as advance:

        def progress(rows: int) -> None:
            nonlocal done
            done += rows
            if state.is_main_process:
                advance(done, total)

        for writer, shard in missing:
            if not writer.write(shard, make_rows, state.device, cache.batch, progress, stopping):
                assert stopping.received is not None
                words = f"stopped by {signal.Signals(stopping.received).name} after {done:,} of {total:,} positions"
                raise Interrupted(stopping.received, f"{cache.word}: {words}; the same command resumes")


def _check_disk(cache: _TargetCache, writers: Sequence[CacheWriter]) -> None:
    """Report how large the cache becomes. Raises ValueError where the disk is too small, before anything is written."""
    needed = sum(writer.missing_bytes() for writer in writers)
    size, rows = sum(writer.rows * writer.row_bytes for writer in writers), sum(writer.rows for writer in writers)
    what = f"{cache.title} at {rows:,} positions: {gigabytes(size)} in {cache.folder}, {gigabytes(needed)} to write"
    free = shutil.disk_usage(writers[0].folder.parent).free
    if needed > free:
        raise ValueError(f"{what}, and {gigabytes(free)} are free; less takes {cache.smaller}")
    log(f"{cache.word}: {what}")


def _report(cache: _TargetCache, parts: Sequence[_Part]) -> None:
    for part in parts:
        opened = RowCache(part.folder, cache.source_type, checked=True)
        log(f"{cache.word}: {part.name}: {opened.rows:,} positions in {part.folder}, every SHA-256 as written")
        if isinstance(opened.source, CacheSource):
            mass = mean_mass(opened)
            advice = "" if mass >= _ENOUGH_MASS else "; the rest is not taught: a larger `teacher.top_k` is better"
            log(f"{cache.word}: the top {opened.source.top_k} hold {mass:.1%} of the probability{advice}")

"""A drafter recipe's teacher: the target in this process, or a cache of its most likely tokens; how that is written."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..checkpoints.fingerprints import model_fingerprint
from ..data.prepared import PreparedData
from ..data.tokenizers import load_tokenizer
from ..train.interrupts import Interrupted, StopSignals
from ..train.scale import make_accelerator
from ..train.state import data_fingerprint
from ..train.teacher import CachedTeacher, ModelTeacher, load_teacher
from ..train.teacher_cache import MANIFEST, CachePlan, CacheSource, Shard, TeacherCache, read_manifest
from ..train.teacher_writer import CacheWriter
from .prepare import Prepared, prepare_data
from .terminal import bar, duration, gigabytes, say
from .training import DrafterRecipe

_PROBE_BATCHES = 3
_PROBE_SECONDS = 20.0
_ENOUGH_MASS = 0.9  # with 0.54 of it a drafter was taught to be worse than it had been (tests/bench/objectives.py)


class NoCacheError(ValueError):
    """A recipe names a cache that has not been written yet."""


@dataclass(frozen=True)
class _Part:
    """The training data, or what is held out, and where the target's tokens for it lie."""

    name: str
    data: PreparedData
    source: CacheSource
    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / MANIFEST).is_file()


def open_cache(recipe: DrafterRecipe, prepared: Prepared) -> CachedTeacher:
    """The cache that a recipe names, for batches of its training data and of what is held out.

    Raises:
        NoCacheError: it has not been written yet.
        ValueError: it is damaged; streamed data.
    """
    parts = _parts(recipe, prepared)
    for part in parts:
        if not part.done:
            raise NoCacheError(
                f"there is no cache of the top {part.source.top_k} tokens of {recipe.target} for the {part.name} data "
                f"in {recipe.teacher.cache}: `draftsmith prepare` with this recipe and `--teacher` writes it"
                f"{_nearest(part)}"
            )
    return CachedTeacher(*(TeacherCache.load(part.folder, part.source) for part in parts))


def prepare_teacher(recipe: DrafterRecipe, accelerator: Any | None = None) -> Path:
    """Run a recipe's target over its data and keep its most likely tokens, or find that this is done and whole.

    A run that was stopped or killed is gone on from. Under `accelerate launch` the processes share the work; they need
    one file system.

    Returns:
        The folder of the training data's cache.

    Raises:
        ValueError: a recipe without target or `teacher.cache`; streamed data; a disk that is too small; a cache that
            is damaged; what preparing the data and loading the target raise.
        Interrupted: a signal came; what was whole stays.
    """
    if recipe.target is None or recipe.teacher.cache is None:
        missing = "target" if recipe.target is None else "teacher.cache"
        raise ValueError(f"`prepare --teacher` needs `{missing}`, and the recipe has none")
    _check_kept(recipe)
    state = accelerator if accelerator is not None else make_accelerator("no")
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    with state.main_process_first():
        prepared = prepare_data(recipe.data, tokenizer, seed=recipe.train.seed, quiet=not state.is_main_process)
    parts = _parts(recipe, prepared)
    missing_parts = [part for part in parts if not part.done]
    state.wait_for_everyone()  # all have looked before one writes
    if missing_parts:
        _write(recipe, missing_parts, state)
    if state.is_main_process:
        for part in parts:
            cache = TeacherCache.load(part.folder, part.source)
            if part not in missing_parts:
                cache.verify()
            mass = cache.mean_mass()
            say(
                f"teacher: {part.name}: {cache.rows:,} positions in {part.folder}, every SHA-256 as written; the top "
                f"{cache.source.top_k} hold {mass:.1%} of the probability"
            )
            if mass < _ENOUGH_MASS:
                say(f"teacher: {1 - mass:.0%} of the probability is not taught: a larger `teacher.top_k` is better")
    return parts[0].folder


def _check_kept(recipe: DrafterRecipe) -> None:
    if recipe.data.streaming:
        raise ValueError(
            "`teacher.cache` needs data that is kept: with `data.streaming` nobody knows beforehand which blocks come; "
            "take the target in process, or prepare the data"
        )


def _parts(recipe: DrafterRecipe, prepared: Prepared) -> list[_Part]:
    _check_kept(recipe)
    assert isinstance(prepared.train, PreparedData)
    section = recipe.teacher
    fingerprint = _fingerprint(str(recipe.target))
    parts = []
    for name, data in (("training", prepared.train), ("held-out", prepared.heldout)):
        source = CacheSource(
            target=str(recipe.target),
            fingerprint=fingerprint,
            data=data_fingerprint(data),
            top_k=section.top_k,
            dtype=section.dtype,
            load_in_8bit=section.load_in_8bit,
        )
        parts.append(_Part(name, data, source, Path(str(section.cache)) / source.key))
    return parts


def _fingerprint(target: str) -> str:
    """Which model it is, without loading it: a folder's fingerprint, or a hub id with its commit."""
    folder = Path(target).expanduser()
    if folder.is_dir():
        return model_fingerprint(folder)
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no target {target!r}: {str(error).strip().splitlines()[0]}") from error
    return f"{target}@{getattr(config, '_commit_hash', None)}"


def _nearest(part: _Part) -> str:
    """In what the most similar cache beside the missing one differs."""
    found: list[list[str]] = []
    for manifest in sorted(part.folder.parent.glob(f"*/{MANIFEST}")):
        try:
            source = CacheSource(**read_manifest(manifest.parent)["source"])
        except ValueError:
            continue
        found.append(source.differences(part.source))
    if not found:
        return ""
    found.sort(key=len)
    return f" (what lies there is another: {'; '.join(found[0])})"


def _write(recipe: DrafterRecipe, parts: Sequence[_Part], state: Any) -> None:
    section = recipe.teacher
    with ExitStack() as locks:
        with StopSignals() as signals:
            teacher = load_teacher(str(recipe.target), section.dtype, section.load_in_8bit, state.device)
            writers = [
                CacheWriter(
                    part.folder, part.source, part.data, CachePlan.of(part.data, section.top_k, teacher.vocab_size)
                )
                for part in parts
            ]
            if state.is_main_process:
                Path(str(section.cache)).mkdir(parents=True, exist_ok=True)
                for writer in writers:
                    locks.enter_context(writer.locked())
                _announce(writers, teacher, section.batch, state)
            state.wait_for_everyone()
            _run(writers, teacher, section.batch, state, signals)
        # signals work as ever while processes wait for each other
        state.wait_for_everyone()
        if state.is_main_process:
            say("teacher: reading back what was written")
            for writer in writers:
                writer.finish()
        state.wait_for_everyone()


def _run(writers: Sequence[CacheWriter], teacher: ModelTeacher, batch: int, state: Any, signals: StopSignals) -> None:
    """Write this process's share of the files.

    Raises:
        Interrupted: a signal came.
    """
    mine: list[tuple[CacheWriter, Shard]] = []
    for writer in writers:
        missing = set(writer.missing())
        shares = (shard for shard in writer.plan.shards if shard.number % state.num_processes == state.process_index)
        mine += [(writer, shard) for shard in shares if shard in missing]
    total, done = sum(shard.rows for _, shard in mine), 0
    with bar("teacher: writing the cache", "positions") as advance:

        def progress(rows: int) -> None:
            nonlocal done
            done += rows
            if state.is_main_process:
                advance(done, total)

        for number, (writer, shard) in enumerate(mine):
            whole = writer.write(
                shard, teacher, state.device, batch, progress, stopping=lambda: signals.received is not None
            )
            if not whole:
                assert signals.received is not None
                message = (
                    f"teacher: stopped by {signal.Signals(signals.received).name} after {done:,} of {total:,} "
                    f"positions; {number} of {len(mine)} files are whole, and the same command goes on with the next"
                )
                say(message)
                raise Interrupted(signals.received, message)


def _announce(writers: Sequence[CacheWriter], teacher: ModelTeacher, batch: int, state: Any) -> None:
    """Say how large the cache becomes and how long it takes.

    Raises:
        ValueError: the disk is too small; nothing was written.
    """
    missing = [writer.missing() for writer in writers]
    needed = sum(
        writer.plan.bytes_of(len(shards), sum(shard.rows for shard in shards))
        for writer, shards in zip(writers, missing, strict=True)
    )
    plans = [writer.plan for writer in writers]
    rows, size = sum(plan.rows for plan in plans), sum(plan.rows * plan.row_bytes for plan in plans)
    top_k, folder = plans[0].top_k, writers[0].folder.parent
    what = f"the {top_k} most likely of {plans[0].vocab_size:,} tokens at {rows:,} positions: "
    what += f"{gigabytes(size)} in {folder}"
    free = shutil.disk_usage(folder).free
    if needed > free:
        fixed = sum(plan.bytes_of(len(plan.shards), 0) for plan in plans)
        fits = max(0, (free - fixed) * top_k // max(1, size))
        advice = f"the largest `teacher.top_k` that fits is {fits}" if fits else "not even one token a position fits"
        raise ValueError(f"{what}; it needs {gigabytes(needed)}, and {gigabytes(free)} are free: {advice}")
    blocks, speed = _probe(writers, missing, teacher, batch, state.device)
    left = sum(shard.end_block - shard.first_block for shards in missing for shard in shards)
    seconds = left / blocks / state.num_processes if blocks else 0.0
    say(f"teacher: {what}")
    if needed < size:
        written = sum(len(plan.shards) for plan in plans) - sum(map(len, missing))
        say(f"teacher: {written} files are there already, {gigabytes(needed)} are left to write")
    if blocks:
        say(
            f"teacher: about {duration(seconds)} with {state.num_processes} process(es) at {speed:,.0f} positions a "
            "second each, by a short probe"
        )


def _probe(
    writers: Sequence[CacheWriter],
    missing: Sequence[Sequence[Shard]],
    teacher: ModelTeacher,
    batch: int,
    device: torch.device,
) -> tuple[float, float]:
    """Blocks and positions a second of the first missing blocks; zeros where nothing is missing."""
    for writer, shards in zip(writers, missing, strict=True):
        if not shards:
            continue
        first, end = shards[0].first_block, min(shards[0].first_block + batch, shards[0].end_block)
        rows = 0
        seconds: list[float] = []
        while len(seconds) < _PROBE_BATCHES and sum(seconds) < _PROBE_SECONDS:
            start = time.perf_counter()
            rows = sum(len(ids_CK.cpu()) for ids_CK, _ in writer.rows(teacher, first, end, device))
            seconds.append(time.perf_counter() - start)
        fastest = min(seconds)  # the first warms up
        return (end - first) / fastest, rows / fastest
    return 0.0, 0.0

"""What a recipe's target says, kept on disk: opened for a run, planned, written, gone on with, and mended.

A drafter's teacher and the hidden states that heads read are kept in the same way; `caches` says in what they differ.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ...checkpoints.artifact.fingerprints import model_fingerprint
from ...checkpoints.artifact.locate import at_revision
from ...checkpoints.storage.messages import first_line
from ...data.blocks.prepared import PreparedData
from ...data.tokenizers import load_tokenizer
from ...train.loop.checkpoints import data_fingerprint
from ...train.parallel.accelerate import make_accelerator
from ...train.parallel.interrupts import Interrupted, StopSignals
from ...train.parallel.processes import StoppedError, on_main, raised, together
from ...train.teachers.hidden_cache import CachedHidden
from ...train.teachers.row_cache import BrokenManifestError, find_damage, read_manifest
from ...train.teachers.row_plan import CachePlan, Shard, Source
from ...train.teachers.row_writer import CacheWriter, MakeRows, set_aside
from ...train.teachers.teacher import CachedTeacher
from ..schema.training import DrafterRecipe, HeadsRecipe
from ..session.terminal import bar, duration, gigabytes, log
from .artifact import prepare_once
from .data import Prepared
from .teacher_kinds import Kept, KeptHidden, KeptTeacher, kept_by

_PROBE_BATCHES = 3
_PROBE_SECONDS = 20.0
_STOP = ".stop"
"""Of several processes the one that is stopped leaves it beside what is being written, for the others to see; the next
launch that locks that place clears it away."""
_TOLD = 20  # damaged files that are named one by one

Stamps = Mapping[str, dict[str, Any]]


_OF_NO_EFFECT = ("_name_or_path", "architectures", "transformers_version", "use_cache", "id2label", "label2id")


class NoCacheError(ValueError):
    """A recipe names a cache that has not been written yet."""


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


def open_cache(recipe: DrafterRecipe, prepared: Prepared) -> CachedTeacher:
    """The cache of its teacher that a recipe names, for batches of its training data and of what is held out.

    Raises:
        NoCacheError: it has not been written yet.
        ValueError: it is damaged; streamed data.
    """
    return CachedTeacher(*_opened(KeptTeacher(recipe), prepared))


def open_hidden(recipe: HeadsRecipe, prepared: Prepared) -> CachedHidden:
    """The cache of hidden states that a recipe names, for batches of its training data and of what is held out.

    Raises:
        NoCacheError: it has not been written yet.
        ValueError: it is damaged; streamed data.
    """
    return CachedHidden(*_opened(KeptHidden(recipe), prepared))


def teacher_bytes(recipe: DrafterRecipe, prepared: Prepared, vocab_size: int) -> int:
    """Bytes on disk of the cache of a recipe's teacher, whether it is there or not."""
    return _bytes(KeptTeacher(recipe), prepared, vocab_size)


def hidden_bytes(recipe: HeadsRecipe, prepared: Prepared, hidden_size: int) -> int:
    """Bytes on disk of the cache of hidden states of a recipe's target, whether it is there, or wanted, or not."""
    return _bytes(KeptHidden(recipe), prepared, hidden_size)


def _bytes(kept: Kept, prepared: Prepared, size: int) -> int:
    assert isinstance(prepared.train, PreparedData)
    source = kept.source("", "")
    return sum(CachePlan.of(data, source, size).bytes for data in (prepared.train, prepared.heldout))


def _opened(kept: Kept, prepared: Prepared) -> list[Any]:
    parts = _parts(kept, prepared)
    for part in parts:
        if not part.done:
            raise NoCacheError(
                f"there is no cache of {kept.title} for the {part.name} data in {kept.folder}: `draftsmith prepare` "
                f"with this recipe and `--teacher` writes it{_nearest(part)}"
            )
    return [kept.cache_type.load(part.folder, part.source) for part in parts]


def prepare_teacher(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any | None = None) -> Path:
    """Run a recipe's target over its data and keep what is learnt from it, or find that this is done and whole.

    A run that was stopped or killed is gone on from; of a finished cache, files that are missing or damaged are named
    and written again, and no others. Under `accelerate launch` the processes share the work; they need one file system.

    Returns:
        The folder of the training data's cache.

    Raises:
        ValueError: a recipe without target or folder; streamed data; a disk that is too small; what preparing the data
            and loading the target raise.
        Interrupted: a signal came; what was whole stays.
    """
    state = accelerator if accelerator is not None else make_accelerator("no")
    kept = together(state, partial(_kept, recipe))
    tokenizer = together(state, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, state)
    parts = together(state, partial(_parts, kept, prepared))
    known: dict[Path, Stamps] = {}

    def check() -> None:
        known.update({part.folder: _check(kept, part) for part in parts if part.done})

    on_main(state, check)  # what was damaged has been set aside
    missing_parts = [part for part in parts if not part.done]
    state.wait_for_everyone()  # all have looked before one writes
    if missing_parts:
        _write(kept, missing_parts, known, state)
    on_main(state, partial(_tell, kept, parts))
    return parts[0].folder


def _kept(recipe: DrafterRecipe | HeadsRecipe) -> Kept:
    kept = kept_by(recipe)
    if kept.target is None or kept.folder is None:
        missing = "target" if kept.target is None else kept.setting
        raise ValueError(f"`prepare --teacher` needs `{missing}`, and the recipe has none")
    if recipe.data.streaming:
        raise ValueError(_streamed(kept))
    return kept


def _tell(kept: Kept, parts: Sequence[_Part]) -> None:
    for part in parts:
        cache = kept.cache_type.load(part.folder, part.source, checked=True)
        first, *others = kept.facts(cache)
        log(f"{kept.word}: {part.name}: {cache.rows:,} positions in {part.folder}, every SHA-256 as written; {first}")
        for fact in others:
            log(f"{kept.word}: {fact}")


def _streamed(kept: Kept) -> str:
    return (
        f"`{kept.setting}` needs data that is kept: with `data.streaming` nobody knows beforehand which blocks come; "
        f"{kept.instead}, or prepare the data"
    )


def _parts(kept: Kept, prepared: Prepared) -> list[_Part]:
    if not isinstance(prepared.train, PreparedData):
        raise ValueError(_streamed(kept))
    fingerprint = _fingerprint(str(kept.target))
    parts = []
    for name, data in (("training", prepared.train), ("held-out", prepared.heldout)):
        source = kept.source(fingerprint, data_fingerprint(data))
        parts.append(_Part(name, data, source, Path(str(kept.folder)) / source.key))
    return parts


def _fingerprint(target: str) -> str:
    """Which model it is, without loading it: a hash of a folder's fingerprint and of all settings that decide what it
    computes, or a hub id with its commit."""
    folder = Path(at_revision(target)).expanduser()
    if folder.is_dir():
        settings = AutoConfig.from_pretrained(folder).to_dict()
        decisive = {name: value for name, value in settings.items() if name not in _OF_NO_EFFECT}
        text = json.dumps([model_fingerprint(folder), decisive], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no target {target!r}: {first_line(error)}") from error
    return f"{target}@{getattr(config, '_commit_hash', None)}"


def _nearest(part: _Part) -> str:
    """In what the most similar cache beside the missing one differs."""
    found: list[list[str]] = []
    for manifest in sorted(part.folder.parent.glob(f"*/{part.source.manifest}")):
        try:
            source = type(part.source)(**read_manifest(manifest.parent, type(part.source))["source"])
        except ValueError:
            continue
        found.append(source.differences(part.source))
    if not found:
        return ""
    found.sort(key=len)
    return f" (what lies there is another: {'; '.join(found[0])})"


def _check(kept: Kept, part: _Part) -> Stamps:
    """Read a finished cache; where files of it are damaged, make of it one that lacks them. Returns the stamps of the
    others, or nothing where it is whole."""
    try:
        with bar(f"{kept.word}: reading the {part.name} cache", "files") as advance:
            damaged = find_damage(part.folder, type(part.source), part.source, advance)
        files = read_manifest(part.folder, type(part.source))["files"]
    except BrokenManifestError as error:
        damaged, files = {part.source.manifest: str(error)}, {}
    if not damaged:
        return {}
    for fault in list(damaged.values())[:_TOLD]:
        log(f"{kept.word}: {fault}: it is written again")
    if len(damaged) > _TOLD:
        log(f"{kept.word}: … and {len(damaged) - _TOLD} more files")
    known = {name: written for name, written in files.items() if name not in damaged}
    set_aside(part.folder, damaged, known)
    return known


def _write(kept: Kept, parts: Sequence[_Part], known: Mapping[Path, Stamps], state: Any) -> None:
    def begin() -> None:
        for writer in writers:
            locks.enter_context(writer.locked())
        _announce(kept, writers, make_rows, state)

    def finish() -> None:
        for part, writer in zip(parts, writers, strict=True):
            with bar(f"{kept.word}: reading back what was written of the {part.name} cache", "files") as advance:
                writer.finish(advance)

    failure: Interrupted | StoppedError | OSError | None = None
    with ExitStack() as locks:
        with StopSignals() as signals:
            make_rows, size = together(state, partial(kept.load, state.device))
            writers = [
                CacheWriter(
                    part.folder,
                    part.source,
                    part.data,
                    CachePlan.of(part.data, part.source, size),
                    known.get(part.folder),
                )
                for part in parts
            ]
            on_main(state, begin)
            try:
                _run(kept, writers, make_rows, state, signals)
            except (Interrupted, StoppedError, OSError) as error:
                failure = error
        # signals work as ever while processes wait for each other
        try:
            together(state, lambda: failure and raised(failure))
        except Interrupted as stopped:
            if state.is_main_process:
                log(str(stopped))
            raise
        on_main(state, finish)


def _run(kept: Kept, writers: Sequence[CacheWriter], make_rows: MakeRows, state: Any, signals: StopSignals) -> None:
    """Write this process's share of the files.

    Raises:
        Interrupted: a signal came; a file tells the other processes.
        StoppedError: one came to another process.
    """
    stop = writers[0].unfinished / _STOP  # locked by this launch, so that no other sees it
    mine: list[tuple[CacheWriter, Shard]] = []
    for writer in writers:
        missing = set(writer.missing())
        shares = (shard for shard in writer.plan.shards if shard.number % state.num_processes == state.process_index)
        mine += [(writer, shard) for shard in shares if shard in missing]
    total, done, several = sum(shard.rows for _, shard in mine), 0, state.num_processes > 1
    with bar(f"{kept.word}: writing the cache", "positions") as advance:

        def progress(rows: int) -> None:
            nonlocal done
            done += rows
            if state.is_main_process:
                advance(done, total)

        for number, (writer, shard) in enumerate(mine):
            whole = writer.write(
                shard,
                make_rows,
                state.device,
                kept.batch,
                progress,
                stopping=lambda: signals.received is not None or (several and stop.exists()),
            )
            if not whole and signals.received is None:
                raise StoppedError(f"{kept.word}: stopped by another process; the same command goes on")
            if not whole:
                assert signals.received is not None
                if several:
                    stop.touch()
                message = (
                    f"{kept.word}: stopped by {signal.Signals(signals.received).name} after {done:,} of {total:,} "
                    f"positions; {number} of {len(mine)} files are whole, and the same command goes on with the next"
                )
                raise Interrupted(signals.received, message)


def _announce(kept: Kept, writers: Sequence[CacheWriter], make_rows: MakeRows, state: Any) -> None:
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
    size, folder = sum(plan.rows * plan.row_bytes for plan in plans), writers[0].folder.parent
    what = f"{kept.contents(plans)}: {gigabytes(size)} in {folder}"
    free = shutil.disk_usage(folder).free
    if needed > free:
        advice = kept.nearest(plans, free)
        raise ValueError(f"{what}; it needs {gigabytes(needed)}, and {gigabytes(free)} are free: {advice}")
    blocks, speed = _probe(writers, missing, make_rows, kept.batch, state.device)
    left = sum(shard.end_block - shard.first_block for shards in missing for shard in shards)
    seconds = left / blocks / state.num_processes if blocks else 0.0
    log(f"{kept.word}: {what}")
    if needed < size:
        written = sum(len(plan.shards) for plan in plans) - sum(map(len, missing))
        log(f"{kept.word}: {written} files are there already, {gigabytes(needed)} are left to write")
    if blocks:
        log(
            f"{kept.word}: about {duration(seconds)} with {state.num_processes} process(es) at {speed:,.0f} positions "
            "a second each, by a short probe"
        )


def _probe(
    writers: Sequence[CacheWriter],
    missing: Sequence[Sequence[Shard]],
    make_rows: MakeRows,
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
            rows = sum(len(next(iter(piece.values()))) for piece in writer.rows(make_rows, first, end, device))
            seconds.append(time.perf_counter() - start)
        fastest = min(seconds)  # the first warms up
        return (end - first) / fastest, rows / fastest
    return 0.0, 0.0

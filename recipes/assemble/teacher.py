"""What a recipe's target says, kept on disk: opened for a run, written, resumed, and made again where it is damaged.

A drafter's teacher and the hidden states that heads read are kept in the same way; a `TargetCache` is one of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from ...decode.models.loading import load_model
from ...train.loop.checkpoints import data_fingerprint
from ...train.parallel.accelerate import make_accelerator
from ...train.parallel.interrupts import Interrupted, StopSignals
from ...train.parallel.processes import on_main, together
from ...train.teachers.hidden_cache import CachedHidden, HiddenCache, HiddenRows, HiddenSource
from ...train.teachers.row_cache import BrokenManifestError, RowCache, find_damage, read_manifest
from ...train.teachers.row_plan import CachePlan, Source
from ...train.teachers.row_writer import CacheWriter, MakeRows, discard_damaged
from ...train.teachers.teacher import CachedTeacher, load_teacher
from ...train.teachers.top_k_cache import CacheSource, TeacherCache, TopRows
from ..schema.training import DrafterRecipe, HeadsRecipe
from ..session.terminal import bar, gigabytes, log
from .artifact import prepare_once
from .data import Prepared

_ENOUGH_MASS = 0.9  # with 0.54 of it a drafter was taught to be worse than it had been (tests/bench/objectives.py)
_OF_NO_EFFECT = ("_name_or_path", "architectures", "transformers_version", "use_cache", "id2label", "label2id")


class NoCacheError(ValueError):
    """A recipe names a cache that has not been written yet."""


class TargetCache(ABC):
    """One kind of cache, with a recipe's settings."""

    word: str
    """What lines about it begin with."""
    setting: str
    """The recipe's key that names the folder."""
    cache_type: type[RowCache]
    target: str | None
    folder: str | None
    batch: int
    """Blocks per forward of the target."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What there is a cache of."""

    @abstractmethod
    def source(self, fingerprint: str, data: str) -> Source:
        """What the cache of this target and data is made from."""

    @abstractmethod
    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        """The target, ready to make rows, and the size that their columns depend on."""

    @abstractmethod
    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        """The nearest setting with which it fits into so many bytes."""

    def facts(self, cache: Any) -> Iterator[str]:
        """What else there is to say about a finished cache."""
        yield from ()


class TopKTargets(TargetCache):
    """A drafter's teacher: its target's most likely tokens."""

    word = "teacher"
    setting = "teacher.cache"
    cache_type = TeacherCache

    def __init__(self, recipe: DrafterRecipe) -> None:
        self._section = recipe.teacher
        self.target, self.folder, self.batch = recipe.target, recipe.teacher.cache, recipe.teacher.batch

    @property
    def title(self) -> str:
        return f"the top {self._section.top_k} tokens of {self.target}"

    def source(self, fingerprint: str, data: str) -> CacheSource:
        section = self._section
        return CacheSource(str(self.target), fingerprint, data, section.top_k, section.dtype, section.load_in_8bit)

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        teacher = load_teacher(str(self.target), self._section.dtype, self._section.load_in_8bit, device)
        return TopRows(teacher, self._section.top_k), teacher.vocab_size

    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        size = sum(plan.rows * plan.row_bytes for plan in plans)
        fixed = sum(plan.bytes_of(len(plan.shards), 0) for plan in plans)
        fits = max(0, (free - fixed) * self._section.top_k // max(1, size))
        return f"the largest `teacher.top_k` that fits is {fits}" if fits else "not even one token a position fits"

    def facts(self, cache: TeacherCache) -> Iterator[str]:
        mass = cache.mean_mass()
        yield f"the top {cache.source.top_k} hold {mass:.1%} of the probability"
        if mass < _ENOUGH_MASS:
            yield f"{1 - mass:.0%} of the probability is not taught: a larger `teacher.top_k` is better"


class HiddenTargets(TargetCache):
    """The target's hidden states, which heads read."""

    word = "hidden states"
    setting = "hidden.cache"
    cache_type = HiddenCache

    def __init__(self, recipe: HeadsRecipe) -> None:
        self._recipe = recipe
        self.target, self.folder, self.batch = recipe.target, recipe.hidden.cache, recipe.hidden.batch

    @property
    def title(self) -> str:
        return f"the hidden states of {self.target} ({self._recipe.states}, {self._recipe.hidden.dtype})"

    def source(self, fingerprint: str, data: str) -> HiddenSource:
        recipe = self._recipe
        return HiddenSource(
            recipe.target, fingerprint, data, recipe.states, recipe.hidden.dtype, target_dtype=recipe.target_dtype
        )

    def load(self, device: torch.device) -> tuple[MakeRows, int]:
        model = load_model(self._recipe.target, dtype=self._recipe.target_dtype, device=str(device))
        rows = HiddenRows(model, self._recipe.states, self._recipe.hidden.dtype)
        return rows, rows.hidden_size

    def nearest(self, plans: Sequence[CachePlan], free: int) -> str:
        half = replace(self.source("", ""), dtype="bfloat16").columns(plans[0].size)
        size = sum(replace(plan, columns=half).bytes for plan in plans)
        if self._recipe.hidden.dtype == "float32" and size <= free:
            return f"the nearest setting that fits is `hidden.dtype=bfloat16` ({gigabytes(size)})"
        return "no type of them fits; compute the states in every step (`hidden.cache=null`)"


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
    return CachedTeacher(*_opened(TopKTargets(recipe), prepared))


def open_hidden(recipe: HeadsRecipe, prepared: Prepared) -> CachedHidden:
    """The same of the hidden states that a recipe names; raises what `open_cache` raises."""
    return CachedHidden(*_opened(HiddenTargets(recipe), prepared))


def cache_bytes(recipe: DrafterRecipe | HeadsRecipe, prepared: Prepared, size: int) -> int:
    """Bytes on disk of a recipe's cache, written or not; `size` is the target's vocabulary (a drafter's teacher) or
    hidden size."""
    assert isinstance(prepared.train, PreparedData)
    source = _cache_of(recipe).source("", "")
    return sum(CachePlan.of(data, source, size).bytes for data in (prepared.train, prepared.heldout))


def prepare_teacher(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any | None = None) -> Path:
    """Run a recipe's target over its data and keep what it says, or find that this is done and whole.

    A stopped or killed run is resumed; of a finished cache, missing and damaged files are written again. Under
    `accelerate launch` the processes share the work; they need one file system.

    Returns:
        The folder of the training data's cache.

    Raises:
        ValueError: a recipe without target or folder; streamed data; a disk that is too small; what preparing the data
            and loading the target raise.
        Interrupted: a signal came; whole files stay.
    """
    state = accelerator if accelerator is not None else make_accelerator("no")
    cache = together(state, partial(_checked_cache, recipe))
    tokenizer = together(state, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, state)
    parts = together(state, partial(_parts, cache, prepared))

    def check() -> None:
        for part in parts:
            if part.done:
                _discard_damage(cache, part)

    on_main(state, check)
    missing = [part for part in parts if not part.done]
    state.wait_for_everyone()  # all have looked before one writes
    if missing:
        _write(cache, missing, state)
    on_main(state, partial(_report, cache, parts))
    return parts[0].folder


def _cache_of(recipe: DrafterRecipe | HeadsRecipe) -> TargetCache:
    return TopKTargets(recipe) if isinstance(recipe, DrafterRecipe) else HiddenTargets(recipe)


def _checked_cache(recipe: DrafterRecipe | HeadsRecipe) -> TargetCache:
    cache = _cache_of(recipe)
    if cache.target is None or cache.folder is None:
        missing = "target" if cache.target is None else cache.setting
        raise ValueError(f"`prepare --teacher` needs `{missing}`, and the recipe has none")
    if recipe.data.streaming:
        raise ValueError(_streamed(cache))
    return cache


def _streamed(cache: TargetCache) -> str:
    return f"`{cache.setting}` needs prepared data: with `data.streaming` nobody knows beforehand which blocks come"


def _parts(cache: TargetCache, prepared: Prepared) -> list[_Part]:
    if not isinstance(prepared.train, PreparedData):
        raise ValueError(_streamed(cache))
    fingerprint = _fingerprint(str(cache.target))
    parts = []
    for name, data in (("training", prepared.train), ("held-out", prepared.heldout)):
        source = cache.source(fingerprint, data_fingerprint(data))
        parts.append(_Part(name, data, source, Path(str(cache.folder)) / source.key))
    return parts


def _opened(cache: TargetCache, prepared: Prepared) -> list[Any]:
    parts = _parts(cache, prepared)
    for part in parts:
        if not part.done:
            raise NoCacheError(
                f"there is no cache of {cache.title} for the {part.name} data in {cache.folder}: `draftsmith prepare` "
                f"with this recipe and `--teacher` writes it{_most_similar(part)}"
            )
    return [cache.cache_type.load(part.folder, part.source) for part in parts]


def _most_similar(part: _Part) -> str:
    """How the most similar cache beside the missing one differs."""
    found: list[list[str]] = []
    for manifest in sorted(part.folder.parent.glob(f"*/{part.source.manifest}")):
        try:
            source = type(part.source)(**read_manifest(manifest.parent, type(part.source))["source"])
        except ValueError:
            continue
        found.append(source.differences(part.source))
    found.sort(key=len)
    return f" (what lies there is another: {'; '.join(found[0])})" if found else ""


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


def _discard_damage(cache: TargetCache, part: _Part) -> None:
    """Read a finished cache; where it is damaged, keep its other files for the writer."""
    try:
        files = read_manifest(part.folder, type(part.source), part.source)["files"]
    except BrokenManifestError as error:
        log(f"{cache.word}: {error}: everything is written again")
        shutil.rmtree(part.folder)
        return
    with bar(f"{cache.word}: reading the {part.name} cache", "files") as advance:
        damaged = find_damage(part.folder, files, advance)
    if damaged:
        log(f"{cache.word}: {len(damaged)} damaged files are written again: {next(iter(damaged.values()))}")
        discard_damaged(part.folder, damaged)


def _write(cache: TargetCache, parts: Sequence[_Part], state: Any) -> None:
    make_rows, size = together(state, partial(cache.load, state.device))
    plans = [CachePlan.of(part.data, part.source, size) for part in parts]
    writers = [CacheWriter(part.folder, part.source, part.data, plan) for part, plan in zip(parts, plans, strict=True)]
    with ExitStack() as locks:

        def begin() -> None:
            for writer in writers:
                locks.enter_context(writer.locked())
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


def _write_share(cache: TargetCache, writers: Sequence[CacheWriter], make_rows: MakeRows, state: Any) -> None:
    """Write this process's share of the files. Raises Interrupted where a signal came."""
    missing = [
        (writer, shard)
        for writer in writers
        for shard in writer.missing()
        if shard.number % state.num_processes == state.process_index
    ]
    total, done = sum(shard.rows for _, shard in missing), 0
    with StopSignals() as signals, bar(f"{cache.word}: writing the cache", "positions") as advance:

        def progress(rows: int) -> None:
            nonlocal done
            done += rows
            if state.is_main_process:
                advance(done, total)

        def stopping() -> bool:
            return signals.received is not None

        for number, (writer, shard) in enumerate(missing):
            if not writer.write(shard, make_rows, state.device, cache.batch, progress, stopping):
                assert signals.received is not None
                raise Interrupted(
                    signals.received,
                    f"{cache.word}: stopped by {signal.Signals(signals.received).name} after {done:,} of {total:,} "
                    f"positions; {number} of {len(missing)} files are whole, and the same command resumes with the "
                    "next",
                )


def _check_disk(cache: TargetCache, writers: Sequence[CacheWriter]) -> None:
    """Report how large the cache becomes. Raises ValueError where the disk is too small, before anything is written."""
    plans, folder = [writer.plan for writer in writers], writers[0].folder.parent
    missing = [writer.missing() for writer in writers]
    needed = sum(
        plan.bytes_of(len(shards), sum(shard.rows for shard in shards))
        for plan, shards in zip(plans, missing, strict=True)
    )
    size, rows = sum(plan.rows * plan.row_bytes for plan in plans), sum(plan.rows for plan in plans)
    what = f"{cache.title} at {rows:,} positions: {gigabytes(size)} in {folder}"
    free = shutil.disk_usage(folder).free
    if needed > free:
        advice = cache.nearest(plans, free)
        raise ValueError(f"{what}; it needs {gigabytes(needed)}, and {gigabytes(free)} are free: {advice}")
    log(f"{cache.word}: {what}")
    if needed < size:
        written = sum(len(plan.shards) for plan in plans) - sum(map(len, missing))
        log(f"{cache.word}: {written} files are there already, {gigabytes(needed)} are left to write")


def _report(cache: TargetCache, parts: Sequence[_Part]) -> None:
    for part in parts:
        opened = cache.cache_type.load(part.folder, part.source, checked=True)
        facts = "; ".join(["every SHA-256 as written", *cache.facts(opened)])
        log(f"{cache.word}: {part.name}: {opened.rows:,} positions in {part.folder}, {facts}")

"""Counting a correlation table: each process reads and counts its share of the corpus and merges its part of the keys,
and the main process lays the parts together. What was counted stays when a run is killed."""

from __future__ import annotations

import json
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ....checkpoints.artifact.artifact import load_manifest, save_artifact
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.table.pruning import check_size
from ....checkpoints.table.table import TABLE_FILE, BigramTable
from ....data.blocks.prepared import rarely_collected
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....train.parallel.interrupts import Interrupted, StopSignals, TrainingError
from ....train.parallel.processes import StoppedError, together
from ....train.table.counting import Counted, PairCounter, counted
from ....train.table.documents import (
    PLACE,
    ROW,
    Numbered,
    Share,
    count_laid,
    laid_end_to_end,
    token_documents,
    tokens_at_a_time,
)
from ...report.table import say_report
from ...schema.loading import write_recipe
from ...schema.training import TableRecipe
from ...session.terminal import log
from ...session.typed import typed_command
from ..artifact import check_out, state_folder
from ..data import conversations_identity, say_form
from .shares import Reading, Seen, numbering
from .state import (
    CONSIDERABLE,
    IDENTITY,
    PARTS,
    STOP,
    TOKEN,
    Places,
    Stopping,
    counted_tokens,
    empty,
    let_go,
    locked,
    rank_folders,
    read_identity,
    read_word,
    refuse_counting,
    refuse_moved,
    spilled_numbering,
    spilled_places,
)

_MERGING = 2
"""Ranges of keys that a process merges at a time."""
_NOT_COUNTED = {"clean", "heldout_limit"}
"""Of the data's options: what is cleaned is said in full beside them, and whoever is held out is not counted."""
_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_TO_APPEAR = 10.0


def run_table(recipe: TableRecipe, _: Path, accelerator: Any) -> None:
    """Count a recipe's corpus, going on from what an earlier run has counted, and leave the artifact.

    Raises:
        ValueError: a tokenizer larger than `vocab_size`; a size to prune to that is too small for any table; processes
            that do not share a file system; another run that counts into the same place; unfinished counts of other
            settings there; nothing to count, or nothing left by pruning; what reading, rendering and counting raise.
        Interrupted: stopped by a signal after what was counted is on disk.
    """
    count_corpus(recipe, together(accelerator, partial(load_tokenizer, recipe.tokenizer_source)), accelerator)


def count_corpus(recipe: TableRecipe, tokenizer: Any, accelerator: Any) -> None:
    """`run_table` with the recipe's tokenizer."""
    job = _Job(recipe, accelerator, tokenizer, together(accelerator, partial(table_vocabulary, recipe, tokenizer)))
    if recipe.prune is not None and recipe.prune.keep_whole:
        whole = whole_recipe(recipe)
        kept = Path(whole.out)
        together(accelerator, partial(job.on_main, partial(check_out, kept, whole)))
        if (kept / "artifact.json").is_file():
            together(accelerator, partial(job.on_main, partial(_prune_artifact, recipe, kept, tokenizer)))
            return
    with ExitStack() as stack:
        token = together(accelerator, partial(job.on_main, partial(job.begin, stack)))
        try:
            together(accelerator, partial(job.see, job.broadcast(token)))
            together(accelerator, job.count)
            data = job.gather()
            together(accelerator, job.merge)
            together(accelerator, partial(job.on_main, partial(job.finish, data)))
        except (ValueError, OSError) as error:
            job.on_main(partial(job.tidy, error))
            raise


def whole_recipe(recipe: TableRecipe) -> TableRecipe:
    """The recipe of the table with all pairs: `recipe` itself, where it does not prune."""
    if recipe.prune is None:
        return recipe
    return recipe.model_copy(update={"out": f"{recipe.out}-whole", "prune": None})


def table_vocabulary(recipe: TableRecipe, tokenizer: Any) -> int:
    """V of a recipe's table.

    Raises:
        ValueError: `vocab_size` is smaller than the tokenizer's; no table of V tokens fits `prune.megabytes`.
    """
    needed = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    vocab_size = needed if recipe.vocab_size is None else recipe.vocab_size
    if vocab_size < needed:
        raise ValueError(f"`vocab_size` is {vocab_size}, and the tokenizer {recipe.tokenizer} has {needed}")
    if recipe.prune is not None and recipe.prune.megabytes is not None:
        try:
            check_size(vocab_size, recipe.prune.megabytes)
        except ValueError as error:
            raise ValueError(f"`prune`: {error}") from error
    return vocab_size


def recipe_documents(
    recipe: TableRecipe, tokenizer: Any, numbered: Iterable[Numbered]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """What a recipe counts of numbered conversations; see `token_documents`."""
    section = recipe.data
    return token_documents(
        numbered,
        tokenizer,
        get_template(section.template, tokenizer),
        pairs=recipe.count.pairs,
        roles=recipe.count.roles,
        last_turn_only=section.last_turn_only,
    )


def count_identity(recipe: TableRecipe, tokenizer: Any) -> dict[str, Any]:
    """All that decides what a recipe's counts are: what `conversations_identity` says, the kind of pairs, V."""
    identity = conversations_identity(recipe.data, tokenizer)
    options = {key: value for key, value in identity["options"].items() if key not in _NOT_COUNTED}
    return identity | {"options": options, "pairs": recipe.count.pairs, "roles": sorted(recipe.count.roles)}


def save_table(
    out: Path,
    write: Callable[[Path], None],
    table: BigramTable,
    tokenizer: Any,
    *,
    recipe: dict[str, Any],
    fingerprint: str | None,
    data: dict[str, Any],
) -> None:
    """Write the artifact of a table and print its report, which is kept in `training`; `write` fills the folder."""
    report = table.report(tokenizer)
    shapes = {"entries": len(table.col), "pairs": table.pairs}
    save_artifact(
        out,
        kind="table",
        write=write,
        vocab_size=table.vocab_size,
        tokenizer_fingerprint=fingerprint,
        target=None,
        shapes=shapes,
        recipe=recipe,
        data=data,
        training=report,
        command=typed_command(),
    )
    say_report(report)
    log(f"table: wrote {out}")


def _save_recipe(
    recipe: TableRecipe, write: Callable[[Path], None], table: BigramTable, tokenizer: Any, data: dict[str, Any]
) -> None:
    def write_all(folder: Path) -> None:
        write(folder)
        write_recipe(recipe, folder / "recipe.yaml")

    described, fingerprint = recipe.model_dump(mode="json"), data["source"]["tokenizer"]
    save_table(Path(recipe.out), write_all, table, tokenizer, recipe=described, fingerprint=fingerprint, data=data)


def _prune_artifact(recipe: TableRecipe, whole: Path, tokenizer: Any) -> None:
    log(f"table: pruning the counts of {whole}")
    _save_pruned(recipe, whole, tokenizer, load_manifest(whole, "table").data)


def _save_pruned(recipe: TableRecipe, folder: Path, tokenizer: Any, data: dict[str, Any]) -> None:
    """The pruned table of the whole one in `folder`.

    Raises:
        ValueError: it would be empty; says that nothing needs to be counted again.
    """
    assert recipe.prune is not None
    options = recipe.prune.model_dump(exclude={"keep_whole"})
    whole = BigramTable.load(folder)
    try:
        table = whole.pruned(**options)
    except ValueError as error:
        kept = f"the whole table is kept in {folder}" if recipe.prune.keep_whole else "all that was counted is kept"
        raise ValueError(f"`prune`: {error}; {kept}: another `prune` starts from it") from error
    _save_recipe(recipe, table.save, table, tokenizer, data)


@dataclass
class _Job:
    """One process of a count."""

    recipe: TableRecipe
    accelerator: Any
    tokenizer: Any
    vocab_size: int
    word: str = ""
    """What this launch's processes know each other by; see `see`."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Whose counts these are, in the main process."""
    before: Places = field(default_factory=dict)
    """What was counted before this launch."""
    alone: bool = False
    """Whether all that is on disk comes from this launch, which is not through with the data; in the main process."""
    by: str = PLACE
    """By what conversations are numbered; see `numbering`."""
    seen: Seen = field(init=False)
    """What went by of the data: in this process, or after `gather` in all."""

    def __post_init__(self) -> None:
        self.seen = Seen.nothing(self.recipe.data)

    @property
    def folder(self) -> Path:
        return state_folder(Path(self.recipe.out)) / "count"

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    def on_main(self, work: Callable[[], Any]) -> Any:
        """What the main process does; None in the others."""
        return work() if self.accelerator.is_main_process else None

    def begin(self, stack: ExitStack) -> str:
        """Claim the folder of the state, and empty it where it belongs to another recipe. Returns a word in it.

        Raises:
            ValueError: another process counts into it; counts of which nothing says whose they are; considerable ones
                of other settings.
        """
        identity = count_identity(self.recipe, self.tokenizer) | {"vocab_size": self.vocab_size}
        self.identity = json.loads(json.dumps(identity))
        self.folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(self.folder))
        token = uuid.uuid4().hex
        # Before the look for locks: a process of an earlier launch takes its lock first, then looks for its own word.
        atomic_text(self.folder / TOKEN, token)
        refuse_counting(self.folder)
        theirs = read_identity(self.folder)
        if theirs != self.identity:
            if theirs is not None:
                let_go(self.folder, counted_tokens(self.folder), theirs, self.identity)
            empty(self.folder)
            atomic_text(self.folder / IDENTITY, json.dumps(self.identity))
        self.alone = not counted_tokens(self.folder)
        (self.folder / STOP).unlink(missing_ok=True)
        if (self.folder / PARTS).is_dir():
            shutil.rmtree(self.folder / PARTS)
        return token

    def broadcast(self, token: str | None) -> tuple[str, str]:
        """The main process's word, and the machine that it runs on."""
        told = [token, socket.gethostname()]
        if self.world > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(told)
        word, host = told
        assert word is not None
        assert host is not None
        return word, host

    def see(self, told: tuple[str, str]) -> None:
        """Find the main process's word, for which a network's file system is given some seconds.

        Raises:
            ValueError: it is not there.
        """
        token, host = told
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while read_word(self.folder / TOKEN) != token:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"process {self.rank} on {socket.gethostname()} does not see in {self.folder.absolute()} what "
                    f"process 0 on {host} wrote there: `out` must lie on a file system that all processes share"
                )
            time.sleep(0.2)
        self.word = token

    def count(self) -> dict[str, Any]:
        """Count this process's share. Returns what it saw of the data.

        Raises:
            ValueError: what reading, rendering and counting raise.
            Interrupted, StoppedError: a signal came, or another process has stopped; what was counted is on disk.
        """
        self.before = spilled_places(self.folder)
        self.by = spilled_numbering(self.folder) or numbering(self.recipe.data, self.world)
        share = Share(self.rank, self.world, tuple(sorted(self.before.items())))
        with StopSignals() as signals:
            stopping = Stopping(signals, self.folder / STOP, self.word)
            reading = Reading(self.recipe.data, share, self.by, stopping, tell=self.rank == 0)
            self.seen = reading.seen
            try:
                self._count(reading)
            except (ValueError, OSError):
                with suppress(OSError):
                    self._stop_others()
                raise
            if signals.received is not None:
                self._stop_others()
        if signals.received is not None:
            message = f"table: stopped by signal {signals.received}; the same command goes on from what is counted"
            self.on_main(partial(log, message))
            raise Interrupted(signals.received, message)
        if stopping.told:
            raise StoppedError("counting was stopped by another process; the same command goes on")
        return self._data()

    def _data(self) -> dict[str, Any]:
        """What an artifact's manifest says of the data that went by."""
        numbers = {"conversations": self.seen.conversations, "held_out": self.seen.held_out}
        return numbers | {"corpus": self.seen.corpus(self.recipe.data.parts())}

    def gather(self) -> dict[str, Any]:
        """What all processes saw of the data, which the main process says."""
        self.alone = False
        parts, told = self.recipe.data.parts(), [len(forms) for forms in self.seen.forms]
        if self.by == ROW and self.world > 1:
            from accelerate.utils import gather_object

            first, *others = gather_object([self.seen])
            for seen in others:
                first.merge(seen)
            self.seen = first
        if self.accelerator.is_main_process:
            for part, forms, known, report in zip(parts, self.seen.forms, told, self.seen.reports, strict=True):
                for form in forms[known:]:
                    say_form(part, form)
                log(f"data: {part.source}: {report.summary()}")
            log(f"table: {self.seen.conversations:,} conversations are counted, {self.seen.held_out:,} are held out")
        return self._data()

    def _stop_others(self) -> None:
        (self.folder / STOP).write_text(self.word, encoding="utf-8")

    def _count(self, reading: Reading) -> None:
        folder = self.folder / f"rank-{self.rank}-of-{self.world}"
        options = self.recipe.count
        with PairCounter(self.vocab_size, folder, options.memory_mb) as counter:
            if read_word(self.folder / TOKEN) != self.word:
                raise ValueError(f"another process is counting into {self.folder}: it was started after this one")
            if counter.tokens:
                self.on_main(partial(log, f"table: going on after {counter.tokens:,} tokens that are counted already"))
            shown = _Progress(reading, counter)
            documents = recipe_documents(self.recipe, self.tokenizer, reading)
            batches = laid_end_to_end(documents, tokens_at_a_time(options.memory_mb))
            with rarely_collected():
                count_laid(batches, counter, save_seconds=60 * options.save_minutes, progress=shown, by=self.by)

    def merge(self) -> None:
        """Merge this process's range of the keys of all that was counted, by whichever process.

        Raises:
            ValueError: a process of an earlier launch has counted meanwhile; damaged counts.
        """
        refuse_moved(self.folder, self.before, self.world)
        total = self._counted(check=self.rank == 0)
        mine = slice(self.rank * _MERGING, (self.rank + 1) * _MERGING)
        ranges, parts = total.ranges(self.world * _MERGING)[mine], self.parts()[mine]
        with ThreadPoolExecutor(_MERGING, thread_name_prefix="merge") as threads:
            tasks = [
                threads.submit(total.merge_part, first, end, part)
                for (first, end), part in zip(ranges, parts, strict=True)
            ]
            for task in tasks:
                task.result()

    def parts(self) -> list[Path]:
        """The files of all ranges."""
        number = self.world * _MERGING
        return [self.folder / PARTS / f"{place}-of-{number}" for place in range(number)]

    def _counted(self, *, check: bool) -> Counted:
        return counted([folder for folder, _, _ in rank_folders(self.folder)], self.vocab_size, check)

    def finish(self, data: dict[str, Any]) -> None:
        """Lay the parts together, write the artifacts, and delete the state."""
        whole = self.folder / "whole"
        whole.mkdir(exist_ok=True)
        total = self._counted(check=False)
        if not total.documents:
            names = ", ".join(part.source for part in self.recipe.data.parts())
            raise ValueError(f"there is nothing to count: {data['conversations']} conversations of {names} are left")
        total.assemble(self.parts(), whole / TABLE_FILE)
        data = {"source": self.identity, "documents": total.documents, "tokens": total.tokens} | data
        if self.recipe.prune is None or self.recipe.prune.keep_whole:
            complete = whole_recipe(self.recipe)
            table = BigramTable.load(whole)

            def move(folder: Path) -> None:
                (whole / TABLE_FILE).rename(folder / TABLE_FILE)

            _save_recipe(complete, move, table, self.tokenizer, data)
            whole = Path(complete.out)
            self._forget()
        if self.recipe.prune is not None:
            _save_pruned(self.recipe, whole, self.tokenizer, data)
        self._forget()

    def tidy(self, error: Exception) -> None:
        """Delete the state of a launch that failed before anything was counted. Of several processes the others may
        have counted their rows before one came to a fault in its own: if that is little it goes too."""
        faulty = self.alone and self.world > 1 and not isinstance(error, (TrainingError, OSError))
        with suppress(ValueError, OSError):  # damaged counts stay, and were told
            if counted_tokens(self.folder) < (CONSIDERABLE if faulty else 1):
                self._forget()

    def _forget(self) -> None:
        """Delete the state: an artifact holds all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()  # of a table it holds nothing else


class _Progress:
    """A line of the main process now and then."""

    def __init__(self, reading: Reading, counter: PairCounter) -> None:
        share = reading.share
        self._reading, self._counter, self._active = reading, counter, share.rank == 0
        self._who = "" if share.world == 1 else f" by process 0 of {share.world}"
        self._start = self._last = time.monotonic()
        self._before = counter.tokens

    def __call__(self, place: int) -> None:
        now = time.monotonic()
        if not self._active or now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        tokens = self._counter.tokens
        rate = (tokens - self._before) / (now - self._start)
        log(
            f"table: {self._reading.seen.conversations:,} conversations read, {tokens:,} tokens counted{self._who}, "
            f"{rate:,.0f} a second, {self._counter.spilled_bytes / 1e6:,.0f} MB on disk"
        )

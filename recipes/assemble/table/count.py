"""Counting a correlation table: each process reads and counts its share of the corpus and merges its part of the keys,
and the main process joins the parts. What was counted stays when a run is killed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ....checkpoints.artifact.artifact import load_manifest, save_artifact
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.table.pruning import check_size
from ....checkpoints.table.table import TABLE_FILE, BigramTable
from ....data.blocks.prepared import rarely_collected
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....train.parallel.interrupts import Interrupted, StopSignals
from ....train.parallel.processes import StoppedError, on_main, together
from ....train.table.counting import PairCounter, lock
from ....train.table.documents import CONVERSATION, ROW, Share, count_packed, pack_documents, token_documents
from ....train.table.merging import Counted, counted
from ...report.table import log_report
from ...schema.loading import write_recipe
from ...schema.training import TableRecipe
from ...session.terminal import counter, log
from ...session.typed import typed_command
from ..artifact import check_out, state_folder
from ..data import conversations_identity, say_form
from .shares import CorpusStats, Reading, numbering
from .state import (
    LAUNCH,
    PARTS,
    STOP,
    Stopping,
    check_nobody_counts,
    claim_counts,
    counted_tokens,
    rank_folders,
    read_positions,
)

_RANGES = 2
"""Ranges of keys that a process merges at a time."""
_NOT_COUNTED = {"clean", "heldout_limit"}
"""Of the data's options: what is cleaned stands in full beside them, and whoever is held out is not counted."""
_SECONDS_TO_APPEAR = 10.0


def run_table(recipe: TableRecipe, _: Path, accelerator: Any) -> None:
    """Count a recipe's corpus, resuming from what an earlier run has counted, and leave the artifact.

    Raises:
        ValueError: a tokenizer larger than `vocab_size`; too small a size to prune to; processes without a shared file
            system; another run, or unfinished counts of other settings, in the same place; nothing to count or keep.
        Interrupted: stopped by a signal after what was counted is on disk.
    """
    count_corpus(recipe, together(accelerator, partial(load_tokenizer, recipe.tokenizer_source)), accelerator)


def count_corpus(recipe: TableRecipe, tokenizer: Any, accelerator: Any) -> None:
    """`run_table` with the recipe's tokenizer."""
    job = Job(recipe, accelerator, tokenizer, together(accelerator, partial(table_vocabulary, recipe, tokenizer)))
    if recipe.prune is not None and recipe.prune.keep_whole:
        whole = whole_recipe(recipe)
        kept = Path(whole.out)
        on_main(accelerator, partial(check_out, kept, whole))
        if (kept / "artifact.json").is_file():
            job.on_main(partial(log, f"table: pruning the counts of {kept}"))
            on_main(accelerator, lambda: _save_pruned(recipe, kept, tokenizer, load_manifest(kept, "table").data))
            return
    with ExitStack() as stack:
        launch = together(accelerator, partial(job.on_main, partial(job.claim, stack)))
        try:
            job.join(launch)
            together(accelerator, job.count)
            data = job.gather()
            together(accelerator, job.merge)
            on_main(accelerator, partial(job.finish, data))
        except (ValueError, OSError):
            job.on_main(job.forget_nothing_counted)
            raise


def whole_recipe(recipe: TableRecipe) -> TableRecipe:
    """The recipe of the table with all pairs: `recipe` itself, where it does not prune."""
    if recipe.prune is None:
        return recipe
    return recipe.model_copy(update={"out": f"{recipe.out}-whole", "prune": None})


def table_vocabulary(recipe: TableRecipe, tokenizer: Any) -> int:
    """V of a recipe's table."""
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
    log_report(report)
    log(f"table: wrote {out}")


def _save_recipe(
    recipe: TableRecipe, write: Callable[[Path], None], table: BigramTable, tokenizer: Any, data: dict[str, Any]
) -> None:
    def write_all(folder: Path) -> None:
        write(folder)
        write_recipe(recipe, folder / "recipe.yaml")

    described, fingerprint = recipe.model_dump(mode="json"), data["source"]["tokenizer"]
    save_table(Path(recipe.out), write_all, table, tokenizer, recipe=described, fingerprint=fingerprint, data=data)


def _save_pruned(recipe: TableRecipe, folder: Path, tokenizer: Any, data: dict[str, Any]) -> None:
    """The pruned table of the whole one in `folder`."""
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
class Job:
    """One process of a count."""

    recipe: TableRecipe
    accelerator: Any
    tokenizer: Any
    vocab_size: int
    launch: str = ""
    """What this launch's processes know each other by."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Whose counts these are, in the main process."""
    by: str = CONVERSATION
    """By what conversations are numbered; see `numbering`."""
    stats: CorpusStats = field(init=False)
    """What was read of the data: by this process, or after `gather` by all."""

    def __post_init__(self) -> None:
        self.stats = CorpusStats.empty(self.recipe.data)

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

    def claim(self, stack: ExitStack) -> str:
        """Claim the folder of the state for this launch and its recipe, until the stack is closed. Returns the launch's
        name, which lies in it."""
        identity = count_identity(self.recipe, self.tokenizer) | {"vocab_size": self.vocab_size}
        self.identity = json.loads(json.dumps(identity))
        self.folder.mkdir(parents=True, exist_ok=True)
        stack.callback(os.close, lock(self.folder))
        launch = uuid.uuid4().hex
        # Before the look for locks: a process of an earlier launch takes its lock first, then looks for its launch.
        atomic_text(self.folder / LAUNCH, launch)
        check_nobody_counts(self.folder)
        claim_counts(self.folder, self.identity)
        (self.folder / STOP).unlink(missing_ok=True)
        return launch

    def join(self, launch: str | None) -> None:
        """Learn the main process's launch, and find it in the folder, for which a network's file system is given some
        seconds."""
        sent = [launch, socket.gethostname()]
        if self.world > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(sent)
        self.launch = str(sent[0])
        together(self.accelerator, partial(self._find_launch, sent[1]))

    def _find_launch(self, host: str | None) -> None:
        deadline = time.monotonic() + _SECONDS_TO_APPEAR
        while not self._is_current():
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"process {self.rank} on {socket.gethostname()} does not see in {self.folder.absolute()} what "
                    f"process 0 on {host} wrote there: `out` must lie on a file system that all processes share"
                )
            time.sleep(0.2)

    def _is_current(self) -> bool:
        """Whether no later launch has claimed the folder."""
        file = self.folder / LAUNCH
        return file.is_file() and file.read_text(encoding="utf-8") == self.launch

    def count(self) -> None:
        """Count this process's share."""
        earlier, by = read_positions(self.folder)
        self.by = by or numbering(self.recipe.data, self.world)
        share = Share(self.rank, self.world, tuple(sorted(earlier.items())))
        with StopSignals() as signals:
            stopping = Stopping(signals, self.folder)
            reading = Reading(self.recipe.data, share, self.by, stopping, log_forms=self.rank == 0)
            self.stats = reading.stats
            try:
                self._count(reading)
            except (ValueError, OSError):
                with suppress(OSError):
                    self._stop_others()
                raise
        if signals.received is not None:
            self._stop_others()
            message = f"table: stopped by signal {signals.received}; the same command resumes from what is counted"
            self.on_main(partial(log, message))
            raise Interrupted(signals.received, message)
        if stopping.by_another:
            raise StoppedError("counting was stopped by another process; the same command resumes")

    def _stop_others(self) -> None:
        if self._is_current():
            (self.folder / STOP).touch()

    def _count(self, reading: Reading) -> None:
        folder = self.folder / f"rank-{self.rank}-of-{self.world}"
        section, options = self.recipe.data, self.recipe.count
        template = get_template(section.template, self.tokenizer)
        with PairCounter(self.vocab_size, folder, options.memory_mb) as pairs, counter("table", "tokens") as advance:
            if not self._is_current():
                raise ValueError(f"another process is counting into {self.folder}: it was started after this one")
            if pairs.tokens:
                self.on_main(partial(log, f"table: resuming after {pairs.tokens:,} tokens that are counted already"))
            documents = token_documents(
                reading,
                self.tokenizer,
                template,
                pairs=options.pairs,
                roles=options.roles,
                last_turn_only=section.last_turn_only,
            )
            seconds = 60 * options.save_minutes
            with rarely_collected():
                count_packed(
                    pack_documents(documents, options.memory_mb),
                    pairs,
                    save_seconds=seconds,
                    by=self.by,
                    progress=lambda: self.on_main(lambda: advance(pairs.tokens, 0)),
                )

    def gather(self) -> dict[str, Any]:
        """What all processes read of the data, for an artifact's manifest; the main process logs it."""
        parts, logged = self.recipe.data.parts(), [len(forms) for forms in self.stats.forms]
        if self.by == ROW and self.world > 1:
            from accelerate.utils import gather_object

            first, *others = gather_object([self.stats])
            for stats in others:
                first.merge(stats)
            self.stats = first
        stats = self.stats
        if self.accelerator.is_main_process:
            for part, forms, known, report in zip(parts, stats.forms, logged, stats.reports, strict=True):
                for form in forms[known:]:
                    say_form(part, form)
                log(f"data: {part.source}: {report.summary()}")
            log(f"table: {stats.conversations:,} conversations are counted, {stats.held_out:,} are held out")
        numbers = {"conversations": stats.conversations, "held_out": stats.held_out}
        return numbers | {"corpus": stats.corpus(parts)}

    def merge(self) -> None:
        """Merge this process's ranges of the keys of all that was counted, by whichever process."""
        mine = slice(self.rank * _RANGES, (self.rank + 1) * _RANGES)
        self.counted(check=self.rank == 0).merge(self.parts(), mine)

    def parts(self) -> list[Path]:
        """The files of all ranges."""
        number = self.world * _RANGES
        return [self.folder / PARTS / f"{index}-of-{number}" for index in range(number)]

    def counted(self, *, check: bool) -> Counted:
        """What all processes have counted."""
        return counted([folder for folder, _, _ in rank_folders(self.folder)], self.vocab_size, check)

    def finish(self, data: dict[str, Any]) -> None:
        """Join the parts, write the artifacts, and delete the state."""
        whole = self.folder / "whole"
        whole.mkdir(exist_ok=True)
        total = self.counted(check=False)
        if not total.documents:
            names = ", ".join(part.source for part in self.recipe.data.parts())
            raise ValueError(f"there is nothing to count: {data['conversations']} conversations of {names} are left")
        total.assemble(self.parts(), whole / TABLE_FILE)
        data = {"source": self.identity, "documents": total.documents, "tokens": total.tokens} | data
        prune = self.recipe.prune
        if prune is None or prune.keep_whole:
            complete = whole_recipe(self.recipe)
            table, counted_whole = BigramTable.load(whole), whole

            def move(folder: Path) -> None:
                (counted_whole / TABLE_FILE).rename(folder / TABLE_FILE)

            _save_recipe(complete, move, table, self.tokenizer, data)
            whole = Path(complete.out)
            self.forget()
        if prune is not None:
            _save_pruned(self.recipe, whole, self.tokenizer, data)
        self.forget()

    def forget(self) -> None:
        """Delete the state."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()  # of a table it holds nothing else

    def forget_nothing_counted(self) -> None:
        """Delete the state of a launch that failed before anything was counted; damaged counts stay."""
        with suppress(ValueError, OSError):
            if not counted_tokens(self.folder):
                self.forget()

"""Counting a correlation table: each process counts its share of the corpus, the main one merges what all have counted.

What was counted stays when a run is killed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from ....checkpoints.artifact.artifact import load_manifest, save_artifact
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.safe_read import load_json
from ....checkpoints.table.pruning import check_size
from ....checkpoints.table.table import TABLE_FILE, BigramTable
from ....checkpoints.table.texts import TextStore
from ....data.conversations import Conversation, CorpusReport, rarely_collected
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....train.parallel.processes import StoppedError, on_main, together
from ....train.table.counting import PairCounter
from ....train.table.documents import pack_documents, token_documents
from ....train.table.run_files import INDEX, merge_counts
from ...report.terminal.table import log_report
from ...schema.data import DataSection
from ...schema.loading import write_recipe
from ...schema.training import TableRecipe
from ...session.stopping import Stoppable
from ...session.terminal import counter, log
from ...session.typed import typed_command
from ..artifact import check_out, differences, state_folder
from ..data import NOT_OF_CONVERSATIONS, all_reports, data_identity, refuse_none, training_conversations

IDENTITY = "identity.json"
CONSIDERABLE = 1 << 20
"""Tokens whose counts nobody loses without being asked: some seconds of work."""
_NOT_COUNTED = {"clean", "heldout_limit"}
"""Of the data's options: what is cleaned stands in full beside them, and whoever is held out is not counted."""
_SECONDS_BETWEEN_LOOKS = 1.0


def run_table(recipe: TableRecipe, accelerator: Any) -> None:
    """Count a recipe's corpus, resuming from what an earlier run has counted, and leave the artifact. A table to be
    pruned is counted into a folder of its own, and stays."""
    tokenizer = together(accelerator, partial(load_tokenizer, recipe.tokenizer))
    vocab_size = together(accelerator, partial(table_vocabulary, recipe, tokenizer))
    if recipe.prune is None:
        _count_whole(recipe, tokenizer, vocab_size, accelerator)
        return
    folder = Path(f"{recipe.out}-whole")
    whole = recipe.model_copy(update={"out": str(folder), "prune": None})
    on_main(accelerator, partial(check_out, folder, whole))
    if not (folder / "artifact.json").is_file():
        _count_whole(whole, tokenizer, vocab_size, accelerator)
    on_main(accelerator, partial(_prune, recipe, folder, tokenizer))


def table_vocabulary(recipe: TableRecipe, tokenizer: Any) -> int:
    """V of a recipe's table."""
    needed = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    vocab_size = needed if recipe.vocab_size is None else recipe.vocab_size
    if vocab_size < needed:
        raise ValueError(f"`vocab_size` is {vocab_size}, and the tokenizer {recipe.tokenizer} has {needed}")
    if recipe.prune is not None and recipe.prune.megabytes is not None:
        check_size(vocab_size, recipe.prune.megabytes)
    return vocab_size


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
    if table.texts is not None:
        shapes["text_tokens"] = int((table.texts.ids_T >= 0).sum())
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


def _save(
    recipe: TableRecipe, write: Callable[[Path], object], table: BigramTable, tokenizer: Any, data: dict[str, Any]
) -> None:
    def write_all(folder: Path) -> None:
        write(folder)
        write_recipe(recipe, folder / "recipe.yaml")

    described, fingerprint = recipe.model_dump(mode="json"), data["source"]["tokenizer"]
    save_table(Path(recipe.out), write_all, table, tokenizer, recipe=described, fingerprint=fingerprint, data=data)


def _prune(recipe: TableRecipe, whole: Path, tokenizer: Any) -> None:
    """Leave the pruned table of the whole one."""
    assert recipe.prune is not None
    log(f"table: pruning the counts of {whole}")
    try:
        table = BigramTable.load(whole).pruned(**recipe.prune.model_dump())
    except ValueError as error:
        raise ValueError(f"`prune`: {error}; another `prune` starts from the whole table in {whole}") from error
    _save(recipe, table.save, table, tokenizer, load_manifest(whole, "table").data)


def _count_whole(recipe: TableRecipe, tokenizer: Any, vocab_size: int, accelerator: Any) -> None:
    """Leave the table of all pairs."""
    rank, world, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    folder = state_folder(Path(recipe.out)) / "count"
    identity: dict[str, Any] = {}  # known to the main process, which alone reads it
    share = Share(recipe.data, rank, world, is_main)

    def begin() -> None:
        identity.update(_identity(recipe, tokenizer) | {"vocab_size": vocab_size})
        claim(folder, identity | {"processes": world}, stack)

    with ExitStack() as stack:
        on_main(accelerator, begin)
        try:
            together(accelerator, partial(_check_shared, folder))
            opening = partial(PairCounter, vocab_size, folder / f"rank-{rank}-of-{world}", recipe.count.memory_mb)
            with together(accelerator, opening) as pairs:
                together(accelerator, partial(_count, recipe, tokenizer, pairs, share, accelerator))
            on_main(accelerator, partial(_finish, recipe, tokenizer, vocab_size, folder, identity, share.gather()))
        except (ValueError, OSError):
            if is_main:
                with suppress(ValueError, OSError):
                    if not counted_tokens(folder):  # damaged counts stay
                        _forget(folder)
            raise


def _identity(recipe: TableRecipe, tokenizer: Any) -> dict[str, Any]:
    """All that decides what a recipe's counts are."""
    identity = data_identity(recipe.data, tokenizer, NOT_OF_CONVERSATIONS)
    options = {key: value for key, value in identity["options"].items() if key not in _NOT_COUNTED}
    return identity | {"options": options, "pairs": recipe.count.pairs, "roles": sorted(recipe.count.roles)}


def claim(folder: Path, identity: dict[str, Any], stack: ExitStack) -> None:
    """Make the folder that of counts with this identity, locked until the stack is closed: those that it holds are
    resumed, or discarded if they have another identity and are few. Raises ValueError: another run counts here, or a
    process that has outlived it; many tokens of other settings; a damaged file."""
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(sole_writer(folder.parent))
    for path in _rank_folders(folder):
        with sole_writer(path):  # a process of a killed launch may count on
            pass
    file = folder / IDENTITY
    try:
        theirs = load_json(file) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{error}: delete {folder} to restart") from error
    if theirs == identity:
        return
    if tokens := counted_tokens(folder):
        key, both = next(differences(theirs, identity), (IDENTITY, "not the same"))
        holds = f"{folder} holds counts of {tokens:,} tokens with other settings ({key}: {both})"
        if tokens >= CONSIDERABLE:
            raise ValueError(
                f"{holds}: set them back to resume, delete that folder to restart, or choose another `out`"
            )
        log(f"table: restarting: {holds}")
    for path in _rank_folders(folder):
        shutil.rmtree(path)
    atomic_text(file, json.dumps(identity))


def _check_shared(folder: Path) -> None:
    if not (folder / IDENTITY).is_file():
        raise ValueError(f"{folder.absolute()} must lie on a file system that all processes share: it is empty in one")


def _rank_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*-of-*") if path.is_dir())


def counted_tokens(folder: Path) -> int:
    """Tokens that all processes together have on disk."""
    indices = [path / INDEX for path in _rank_folders(folder)]
    return sum(int(load_json(index, "tokens")["tokens"]) for index in indices if index.is_file())


class Share:
    """The conversations that a process counts: of its own rows where each row can be judged by itself; else each
    `world`-th of the whole corpus, which then every process reads. On the way it finds a report of each corpus, the
    number of conversations to count, and of those held out."""

    def __init__(self, section: DataSection, rank: int, world: int, log_forms: bool) -> None:
        self._section, self._rank, self._world, self._log_forms = section, rank, world, log_forms
        self._by_row = not section.clean.get("duplicates") and all(part.limit is None for part in section.parts())
        self.reports = [CorpusReport() for _ in section.parts()]
        self.conversations = self.held_out = 0

    def __iter__(self) -> Iterator[Conversation]:
        shard = (self._rank, self._world) if self._by_row else (0, 1)
        found = training_conversations(
            self._section, self.reports, log_forms=self._log_forms, hold=self._hold, shard=shard
        )
        for number, conversation in enumerate(found):
            self.conversations += 1
            if self._by_row or number % self._world == self._rank:
                yield conversation

    def _hold(self, _: Conversation) -> None:
        self.held_out += 1

    def add(self, other: Share) -> None:
        """Take over what another has found."""
        for report, more in zip(self.reports, other.reports, strict=True):
            report.merge(more)
        self.conversations += other.conversations
        self.held_out += other.held_out

    def gather(self) -> Share:
        """With what all processes have found together."""
        if not self._by_row or self._world == 1:
            return self
        from accelerate.utils import gather_object

        whole, *others = gather_object([self])
        for other in others:
            whole.add(other)
        return cast(Share, whole)


def _count(recipe: TableRecipe, tokenizer: Any, pairs: PairCounter, share: Share, accelerator: Any) -> None:
    """Count a process's share, together with the others."""
    is_main = accelerator.is_main_process
    if pairs.tokens and is_main:
        log(f"table: resuming after {pairs.tokens:,} tokens that are counted already")
    stopping = Stoppable("table", "; the same command resumes from what is counted")
    with stopping, counter("table", "tokens") as advance, rarely_collected():
        work = count_share(recipe, tokenizer, pairs, share, advance if is_main else lambda done, total: None)
        stopped = _in_step(accelerator, work, stopping)
        pairs.spill()
    stopping.check(report=is_main)
    if stopped:
        raise StoppedError("counting was stopped by another process; the same command resumes")


def count_share(
    recipe: TableRecipe, tokenizer: Any, pairs: PairCounter, share: Share, advance: Callable[[int, int], None]
) -> Iterator[bool]:
    """Count a share from the counter's position on, some tokens with each step; True after each."""
    options, saved, first = recipe.count, time.monotonic(), pairs.position or 0
    documents = _documents(recipe, tokenizer, islice(share, first, None))
    for batch in pack_documents(documents, first, options.memory_mb):
        pairs.add(*batch)
        if time.monotonic() - saved >= 60 * options.save_minutes:
            pairs.spill()
            saved = time.monotonic()
        advance(pairs.tokens, 0)
        yield True


def _documents(
    recipe: TableRecipe, tokenizer: Any, conversations: Iterable[Conversation]
) -> Iterator[list[NDArray[Any]]]:
    """What is counted of each conversation."""
    return token_documents(
        conversations,
        tokenizer,
        get_template(recipe.data.template, tokenizer),
        pairs=recipe.count.pairs,
        roles=recipe.count.roles,
        last_turn_only=recipe.data.last_turn_only,
    )


def kept_texts(recipe: TableRecipe, tokenizer: Any) -> TextStore:
    """The first of the counted texts, as many tokens as are to be kept."""
    kept, left = [], recipe.count.texts
    for documents in _documents(recipe, tokenizer, Share(recipe.data, 0, 1, False)):
        kept += [ids[:left] for ids in documents[:left]]
        left -= sum(len(ids) for ids in documents)
        if left <= 0:
            break
    return TextStore.from_documents(kept)


def _in_step(accelerator: Any, work: Iterator[bool], stopping: Callable[[], bool]) -> bool:
    """Work until all processes are done, or one is to stop or fails, which ends it in all of them; whether one did."""
    working, error = True, None
    while True:
        look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        try:
            while working and not stopping() and time.monotonic() < look:
                working = next(work, False)
        except (ValueError, OSError, ModuleNotFoundError) as raised:
            error = raised
        states = [(working, error is not None or stopping())]
        if accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            states = gather_object(states)
        if error is not None:
            raise error
        if any(stopped for _, stopped in states):
            return True
        if not any(going for going, _ in states):
            return False


def _finish(
    recipe: TableRecipe, tokenizer: Any, vocab_size: int, folder: Path, identity: dict[str, Any], share: Share
) -> None:
    """Merge all counts, write the artifact, and delete the state."""
    parts, file = recipe.data.parts(), folder / TABLE_FILE
    refuse_none(recipe.data, share.reports)
    for part, report in zip(parts, share.reports, strict=True):
        log(f"data: {part.source}: {report.summary()}")
    log(f"table: {share.conversations:,} conversations are counted, {share.held_out:,} are held out")
    tokens, documents = merge_counts(_rank_folders(folder), vocab_size, file)
    if not documents:
        names = ", ".join(part.source for part in parts)
        raise ValueError(f"there is nothing to count: {share.conversations} conversations of {names} are left")
    data = {"source": identity, "documents": documents, "tokens": tokens}
    data |= {"conversations": share.conversations, "held_out": share.held_out}
    data |= {"corpus": all_reports(parts, share.reports)}
    table = BigramTable.load(folder)
    table.texts = kept_texts(recipe, tokenizer) if recipe.count.texts else None

    def write(out: Path) -> None:
        file.rename(out / TABLE_FILE)
        if table.texts is not None:
            table.texts.save(out)

    _save(recipe, write, table, tokenizer, data)
    _forget(folder)


def _forget(folder: Path) -> None:
    """Delete the state."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # of a table it holds nothing else

"""Counting of a bigram table. Each process counts a share of the corpus, and the main process merges the counts.

The counts of an interrupted run are stored in `<out>.state`, and the same command resumes the run.
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from ....checkpoints.artifact.artifact import save_artifact
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.locks import sole_writer
from ....checkpoints.storage.messages import gigabytes
from ....checkpoints.storage.names import CONFIG_FILE
from ....checkpoints.storage.places import find_local
from ....checkpoints.storage.safe_read import load_json, read_json
from ....checkpoints.table.facts import table_facts
from ....checkpoints.table.table import TABLE_FILE, BigramTable
from ....checkpoints.table.texts import TextStore
from ....data.conversations import Conversation, CorpusReport, collect_rarely
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....train.parallel.processes import on_main
from ....train.table.counting import PairCounter
from ....train.table.documents import pack_documents, token_documents
from ....train.table.run_files import INDEX, merge_counts
from ...schema.data import DataSection
from ...schema.loading import write_recipe
from ...schema.training import TableRecipe
from ...session.stopping import Stoppable
from ...session.terminal import counter, log
from ...session.typed import typed_command
from ..artifact import differences, state_folder
from ..data import NOT_OF_CONVERSATIONS, all_reports, data_identity, refuse_none, training_conversations

IDENTITY = "identity.json"
_NOT_COUNTED = {"clean", "heldout_limit"}
"""Data options excluded from the identity: `clean` is recorded separately, and held-out data is not counted."""


def run_table(recipe: TableRecipe, accelerator: Any) -> None:
    """Count the token pairs in the corpus of a recipe, resuming an interrupted run, and write the artifact."""
    tokenizer = load_tokenizer(recipe.tokenizer)
    vocab_size = table_vocabulary(recipe, tokenizer)
    rank, num_processes, is_main = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    folder = state_folder(Path(recipe.out)) / "count"
    identity: dict[str, Any] = {}  # filled and used in the main process only
    share = Share(recipe.data, rank, num_processes)

    def begin() -> None:
        identity.update(_identity(recipe, tokenizer) | {"vocab_size": vocab_size})
        claim(folder, identity | {"processes": num_processes}, stack)

    with ExitStack() as stack:
        on_main(accelerator, begin)
        try:
            _check_shared(folder)
            with PairCounter(vocab_size, folder / f"rank-{rank}-of-{num_processes}", recipe.count.memory_mb) as pairs:
                _count(recipe, tokenizer, pairs, share, accelerator)
            accelerator.wait_for_everyone()
            on_main(accelerator, partial(_finish, recipe, tokenizer, vocab_size, folder, identity, share.gather()))
        except (ValueError, OSError):
            if is_main:
                with suppress(ValueError, OSError):
                    if not count_tokens(folder):  # raises for damaged counts, which are kept
                        _remove_counts(folder)
            raise


def table_vocabulary(recipe: TableRecipe, tokenizer: Any) -> int:
    """Return the vocabulary size of a table. Raise ValueError if the recipe sets it below the tokenizer's size."""
    needed = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    vocab_size = recipe.vocab_size
    if vocab_size is None:  # a model's embeddings may have more rows than its tokenizer has tokens
        folder = find_local(recipe.tokenizer)
        config = read_json(folder / CONFIG_FILE) if folder and (folder / CONFIG_FILE).is_file() else {}
        vocab_size = max(needed, (config.get("text_config") or config).get("vocab_size") or 0)
    if vocab_size < needed:
        raise ValueError(f"`vocab_size` must be at least {needed} for {recipe.tokenizer}, got {vocab_size}")
    return vocab_size


def _identity(recipe: TableRecipe, tokenizer: Any) -> dict[str, Any]:
    """Return all settings and hashes that determine the counts of a recipe."""
    identity = data_identity(recipe.data, tokenizer, NOT_OF_CONVERSATIONS)
    options = {key: value for key, value in identity["options"].items() if key not in _NOT_COUNTED}
    return identity | {"options": options, "pairs": recipe.count.pairs}


def claim(folder: Path, identity: dict[str, Any], stack: ExitStack) -> None:
    """Lock the counts directory until `stack` is closed. Raise ValueError if its counts do not match `identity`."""
    folder.mkdir(parents=True, exist_ok=True)
    stack.enter_context(sole_writer(folder.parent))
    for path in _rank_folders(folder):
        with sole_writer(path):  # a process of a killed launch may still be counting
            pass
    file = folder / IDENTITY
    try:
        stored = load_json(file) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{error}: delete {folder} to restart") from error
    if stored == identity:
        return
    if tokens := count_tokens(folder):
        key, both = next(differences(stored, identity), (IDENTITY, "different"))
        raise ValueError(
            f"{folder} contains counts of {tokens:,} tokens with other settings ({key}: {both}): restore the "
            "settings to resume, delete that folder to restart, or choose another `out`"
        )
    for path in _rank_folders(folder):
        shutil.rmtree(path)
    atomic_text(file, json.dumps(identity))


def _check_shared(folder: Path) -> None:
    """Raise ValueError in all processes if one of them cannot access the counts directory."""
    from accelerate.utils import gather_object

    if not all(gather_object([(folder / IDENTITY).is_file()])):
        raise ValueError(f"{folder.absolute()} must be on a file system that all processes share")


def _rank_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*-of-*") if path.is_dir())


def count_tokens(folder: Path) -> int:
    """Return the number of tokens counted so far, over all processes."""
    indices = [path / INDEX for path in _rank_folders(folder)]
    return sum(int(load_json(index, "tokens")["tokens"]) for index in indices if index.is_file())


class Share:
    """Iterable over the conversations that one process counts.

    Each process loads only its shard of the rows. If deduplication or a limit requires all rows, every process loads
    the whole corpus and counts every `num_processes`-th conversation. Iteration also updates the corpus reports and the
    numbers of counted and held-out conversations.
    """

    def __init__(self, section: DataSection, rank: int, num_processes: int) -> None:
        self._section, self._rank, self._world = section, rank, num_processes
        self._by_row = not section.clean.get("duplicates") and all(part.limit is None for part in section.parts())
        self.reports = [CorpusReport() for _ in section.parts()]
        self.conversations = self.held_out = 0

    def __iter__(self) -> Iterator[Conversation]:
        shard = (self._rank, self._world) if self._by_row else (0, 1)
        conversations = training_conversations(self._section, self.reports, hold=self._count_held_out, shard=shard)
        for number, conversation in enumerate(conversations):
            self.conversations += 1
            if self._by_row or number % self._world == self._rank:
                yield conversation

    def _count_held_out(self, _: Conversation) -> None:
        self.held_out += 1

    def add(self, other: "Share") -> None:
        """Add the counts and reports of another share."""
        for report, more in zip(self.reports, other.reports, strict=True):
            report.merge(more)
        self.conversations += other.conversations
        self.held_out += other.held_out

    def gather(self) -> "Share":
        """Combine the counts and reports of all processes."""
        if not self._by_row or self._world == 1:
            return self
        from accelerate.utils import gather_object

        whole, *others = gather_object([self])
        for other in others:
            whole.add(other)
        return cast(Share, whole)


def _count(recipe: TableRecipe, tokenizer: Any, pairs: PairCounter, share: Share, accelerator: Any) -> None:
    """Count the token pairs of a share, starting at document `pairs.position`, and save them if a signal arrives."""
    is_main, first = accelerator.is_main_process, pairs.position or 0
    if pairs.tokens and is_main:
        log(f"table: resuming after {pairs.tokens:,} counted tokens")
    advance, saved = counter("table", "tokens"), time.monotonic()
    documents = _documents(recipe, tokenizer, islice(share, first, None))
    with Stoppable("table") as stopping, collect_rarely():
        for batch in pack_documents(documents, first, recipe.count.memory_mb):
            pairs.add(*batch)
            if time.monotonic() - saved >= 60 * recipe.count.save_minutes:
                pairs.spill()
                saved = time.monotonic()
            if is_main:
                advance(pairs.tokens)
            if stopping():
                break
        pairs.spill()
    stopping.check(report=is_main)


def _documents(
    recipe: TableRecipe, tokenizer: Any, conversations: Iterable[Conversation]
) -> Iterator[list[NDArray[Any]]]:
    return token_documents(
        conversations,
        tokenizer,
        get_template(recipe.data.template, tokenizer, recipe.data.template_options),
        pairs=recipe.count.pairs,
        last_turn_only=recipe.data.last_turn_only,
    )


def read_texts(recipe: TableRecipe, tokenizer: Any) -> TextStore:
    """Return a store with the first `count.texts` tokens of the corpus, for suffix decoding."""
    documents_kept, remaining = [], recipe.count.texts
    for documents in _documents(recipe, tokenizer, Share(recipe.data, 0, 1)):
        documents_kept += [ids[:remaining] for ids in documents[:remaining]]
        remaining -= sum(len(ids) for ids in documents)
        if remaining <= 0:
            break
    return TextStore.from_documents(documents_kept)


def _finish(
    recipe: TableRecipe, tokenizer: Any, vocab_size: int, folder: Path, identity: dict[str, Any], share: Share
) -> None:
    """Merge the counts of all processes, write the artifact, and delete the temporary counts."""
    parts, file = recipe.data.parts(), folder / TABLE_FILE
    refuse_none(recipe.data, share.reports)
    for part, report in zip(parts, share.reports, strict=True):
        log(f"data: {part.source}: {report.summary()}")
    log(f"table: counted {share.conversations:,} conversations, held out {share.held_out:,}")
    tokens, documents = merge_counts(_rank_folders(folder), vocab_size, file)
    if not documents:
        names = ", ".join(part.source for part in parts)
        raise ValueError(f"no tokens to count in the {share.conversations} conversations of {names}")
    data = {"source": identity, "documents": documents, "tokens": tokens}
    data |= {"conversations": share.conversations, "held_out": share.held_out}
    data |= {"corpus": all_reports(parts, share.reports)}
    table, texts = BigramTable.load(folder), read_texts(recipe, tokenizer) if recipe.count.texts else None
    facts, shapes = table_facts(table), {"entries": table.entries, "pairs": table.pairs}
    if texts is not None:
        shapes["text_tokens"] = int((texts.ids_T >= 0).sum())

    def write(out: Path) -> None:
        file.rename(out / TABLE_FILE)
        if texts is not None:
            texts.save(out)
        write_recipe(recipe, out / "recipe.yaml")

    save_artifact(
        Path(recipe.out),
        kind="table",
        write=write,
        vocab_size=vocab_size,
        tokenizer_fingerprint=identity["tokenizer"],
        target=None,
        shapes=shapes,
        recipe=recipe.model_dump(mode="json"),
        data=data,
        training=facts,
        command=typed_command(),
    )
    log(
        f"table: {facts['entries']:,} distinct pairs of {facts['tokens']:,} tokens "
        f"({facts['density']:.3%} of all possible pairs), {gigabytes(facts['bytes'])}"
    )
    log(f"table: wrote {recipe.out}")
    _remove_counts(folder)


def _remove_counts(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()  # for a table, nothing else is stored there

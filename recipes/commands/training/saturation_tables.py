"""Tables of the first n conversations of a corpus, for growing n, counted in one pass; see `saturation`.

Each part between two sizes is counted into a folder of its own, and a table is the sum of the parts up to its size.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count as powers
from itertools import islice
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.table.table import TABLE_FILE, BigramTable
from ....data.conversations import Conversation, CorpusReport
from ....train.parallel.interrupts import Interrupted, StopSignals
from ....train.table.counting import Counted, PairCounter, counted
from ....train.table.documents import PLACE, Numbered, count_laid, laid_end_to_end, spilled_tokens, tokens_at_a_time
from ...assemble.data import training_conversations
from ...assemble.table.count import count_identity, recipe_documents, table_vocabulary
from ...assemble.table.state import let_go
from ...schema.training import TableRecipe
from ...session.terminal import counter, log

COUNTS_FILE = "counts.json"
_SERIES = "1, 2, 5, 10, 20, 50 …"
_SMALLEST = 1000
_LARGE = 10_000


@dataclass(frozen=True)
class PartTable:
    """The table of the first conversations of a corpus."""

    conversations: int
    tokens: int
    documents: int
    whole: bool
    """Whether that is the whole corpus."""
    folder: str

    def load(self, recipe: TableRecipe) -> BigramTable:
        """The table, pruned as the recipe prunes."""
        table = BigramTable.load(Path(self.folder))
        if recipe.prune is None:
            return table
        return table.pruned(**recipe.prune.model_dump(exclude={"keep_whole"}))

    def describe(self, recipe: TableRecipe) -> dict[str, Any]:
        """Its numbers: `density` is the share of all V x V pairs that it holds, `megabytes` the size of its tensors."""
        report = self.load(recipe).report()
        numbers = {name: report[name] for name in ("pairs", "entries", "density", "mass")}
        return asdict(self) | numbers | {"megabytes": report["bytes"] / 1e6}


def default_sizes() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 …, without end: where the corpus is cut while nobody knows how large it is."""
    return (step * 10**power for power in powers() for step in (1, 2, 5))


def sizes_to_show(sizes: list[int]) -> list[int]:
    """Of the default sizes, which end with the whole corpus, those to make tables of: from 1,000 conversations on, of a
    corpus of fewer than 10,000 from a hundredth of it on."""
    smallest = _SMALLEST if sizes[-1] >= _LARGE else sizes[-1] / 100
    return [size for size in sizes if size >= smallest]


def raise_if_stopped(signals: StopSignals, folder: Path) -> None:
    """Raises Interrupted where a signal came."""
    if signals.received is not None:
        name = signal.Signals(signals.received).name
        message = f"saturation: stopped by {name}; the same command goes on from what {folder} holds"
        log(message)
        raise Interrupted(signals.received, message)


def part_tables(recipe: TableRecipe, tokenizer: Any, folder: Path, signals: StopSignals) -> list[PartTable]:
    """The tables of all sizes of a recipe's section `saturation`, from the smallest to that of the whole corpus.

    `<folder>/tables/<n>` holds them, `<folder>/counts.json` says what they are of. Counts of another corpus, tokenizer
    or kind of pairs that lie there are deleted, if they are few; unfinished ones are gone on with.

    Raises:
        ValueError: what reading, rendering and counting raise; a corpus no larger than the smallest size; considerable
            counts of another corpus.
        Interrupted: a signal came; what is counted is on disk.
    """
    assert recipe.saturation is not None
    identity, vocab_size = count_parts_identity(recipe, tokenizer), table_vocabulary(recipe, tokenizer)
    file, counts, tables = folder / COUNTS_FILE, folder / "counts", folder / "tables"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.get("identity") != identity:
        if found:
            let_go(folder, _tokens_in(found, counts), found["identity"], identity, "saturation")
        for old in (counts, tables):
            shutil.rmtree(old, ignore_errors=True)
        found = {"identity": identity, "parts": None}
        _write(file, found)
    if found["parts"] is not None:
        shutil.rmtree(counts, ignore_errors=True)
        return [PartTable(**part) for part in found["parts"]]
    sizes = _count_parts(recipe, tokenizer, vocab_size, counts, signals)
    shown = sizes if recipe.saturation.sizes else sizes_to_show(sizes)
    parts: list[PartTable] = []
    for place, size in enumerate(sizes):
        if size not in shown:
            continue
        raise_if_stopped(signals, folder)
        total = counted([counts / str(part) for part in range(place + 1)], vocab_size, check=place + 1 == len(sizes))
        target = tables / str(size)
        if not target.is_dir():
            log(f"saturation: merging the counts of {size:,} conversations")
            _assemble(total, target)
        parts.append(PartTable(size, total.tokens, total.documents, size == sizes[-1], str(target)))
    found["parts"] = [asdict(part) for part in parts]
    _write(file, found)
    shutil.rmtree(counts)
    return parts


def count_parts_identity(recipe: TableRecipe, tokenizer: Any) -> dict[str, Any]:
    """All that decides what the tables are, as JSON has it."""
    assert recipe.saturation is not None
    identity = count_identity(recipe, tokenizer) | {"sizes": recipe.saturation.sizes or _SERIES}
    found: dict[str, Any] = json.loads(json.dumps(identity | {"vocab_size": table_vocabulary(recipe, tokenizer)}))
    return found


def _tokens_in(found: dict[str, Any], counts: Path) -> int:
    """How many tokens were counted: of what is finished, or of its parts so far."""
    if found["parts"] is not None:
        return int(found["parts"][-1]["tokens"])
    return sum(spilled_tokens(path) for path in counts.glob("*"))


def _assemble(total: Counted, target: Path) -> None:
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    total.write(unfinished / TABLE_FILE, unfinished)
    unfinished.rename(target)


def _count_parts(recipe: TableRecipe, tokenizer: Any, vocab_size: int, folder: Path, signals: StopSignals) -> list[int]:
    """Count each part into `folder/<its number>`; the sizes at which they end."""
    assert recipe.saturation is not None
    given = recipe.saturation.sizes
    numbered = enumerate(training_conversations(recipe.data, [CorpusReport() for _ in recipe.data.parts()], tell=True))
    sizes: list[int] = []
    done = 0
    ends: Iterator[int | None] = iter([*given, None]) if given else default_sizes()
    with counter("saturation: counting", "conversations") as advance:
        for place, end in enumerate(ends):
            with PairCounter(vocab_size, folder / str(place), recipe.count.memory_mb) as pairs:
                start = done if pairs.place is None else pairs.place[PLACE]
                reading = _Reading(islice(numbered, None if end is None else end - done), start, done, signals)
                documents = recipe_documents(recipe, tokenizer, reading)
                batches = laid_end_to_end(documents, tokens_at_a_time(recipe.count.memory_mb))
                seconds = 60 * recipe.count.save_minutes
                count_laid(batches, pairs, save_seconds=seconds, progress=lambda number: advance(number, 0))
            raise_if_stopped(signals, folder.parent)
            if reading.read == done:
                break
            done = reading.read
            sizes.append(done)
            if end is None or done < end:
                break
    if len(sizes) < 2:
        missing = "there are no parts to compare with it"
        if given:
            missing = f"the smallest size to compare with it is {given[0]:,}: give smaller ones in `saturation.sizes`"
        raise ValueError(f"the corpus has {done:,} conversations, and {missing}")
    return sizes


class _Reading:
    """Numbered conversations; those before `start` are read and not handed on, and nothing is after a signal."""

    def __init__(self, numbered: Iterator[Numbered], start: int, read: int, signals: StopSignals) -> None:
        self._numbered, self._start, self._signals = numbered, start, signals
        self.read = read
        """Conversations of the corpus that were read."""

    def __iter__(self) -> Iterator[tuple[int, Conversation]]:
        for number, conversation in self._numbered:
            self.read = number + 1
            if number >= self._start:
                yield number, conversation
            if self._signals.received is not None:
                return


def _write(file: Path, content: dict[str, Any]) -> None:
    atomic_text(file, json.dumps(content, indent=1) + "\n")

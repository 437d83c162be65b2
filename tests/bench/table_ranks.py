"""The part `ranks` of table.py: what one of many processes takes of the time that one process alone takes.

`rank_share`: the time of counting as rank 0 of N, alone on the machine, from the first row to the last run on the
disk, over that of the only process; 1/N would be perfect. `rank_share_cpu`: the same of processor times. The corpora:
`chats`, real conversations, one JSON object a line; `short`, the same texts in rows of some ten words; `long`, of some
ten thousand; without --quick `chats` also as one JSON list, packed lines and parquet. Ranks run in turn; medians.
`rank_fixed_cpu_sec`: where a line through the processor times against 1/N comes to at 0 (the start of the tokenizer
and of the processes that sort, and skipping others' rows). `reading_share`: the part of the only process's processor
time that reading, cleaning and choosing who is held out take.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Timed, timed
from draftsmith.data.conversations import CorpusReport, write_conversations
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.data import training_conversations
from draftsmith.recipes.assemble.table.count import Share, count_share
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter

from data import defaults, repeated

WORLDS = (1, 2, 4, 8)
MORE_WORLDS = (1, 2, 4, 8, 16)
SHORT_WORDS = 10
LONG_ROWS = 40
"""Conversations of `chats` whose texts make one row of `long`."""


def ranks(folder: Path, quick: bool) -> dict[str, Any]:
    """Time of one rank over time of one process, by corpus."""
    corpus, tokenizer_folder = defaults(folder)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    files = corpora(corpus, folder, 1 if quick else 6, quick)
    shares: dict[str, dict[str, dict[int, float]]] = {"rank_share": {}, "rank_share_cpu": {}}
    seconds: dict[str, dict[int, float]] = {}
    reading: dict[str, float] = {}
    fixed: dict[str, float] = {}
    for name, file in files.items():
        data = {"source": str(file), "cache": str(folder / "cache"), "template": "vicuna-v1.1"}
        recipe = TableRecipe(kind="table", out=str(folder / "table"), tokenizer=str(tokenizer_folder), data=data)
        found: dict[int, list[Timed]] = {world: [] for world in (WORLDS if quick else MORE_WORLDS)}
        for _ in range(2 if quick else 3):
            for world, times in found.items():
                times.append(count_as_first_of(recipe, tokenizer, world))
        wall = {world: statistics.median(each.wall for each in times) for world, times in found.items()}
        cpu = {world: statistics.median(each.cpu for each in times) for world, times in found.items()}
        for key, times_of in zip(shares, (wall, cpu), strict=True):
            shares[key][name] = {world: times_of[world] / times_of[1] for world in found if world > 1}
        seconds[name], reading[name] = wall, read(recipe) / cpu[1]
        fixed[name] = float(np.polyfit([1 / world for world in cpu], [*cpu.values()], 1)[1])
        said = "   ".join(
            f"{key} " + " ".join(f"{world}: {share:.3f}" for world, share in of[name].items())
            for key, of in shares.items()
        )
        print(
            f"ranks {name:8s} {file.stat().st_size / 1e6:5.1f} MB, alone {wall[1]:.2f} s ({cpu[1]:.2f} of processors, "
            f"{reading[name]:.1%} of it reading, {fixed[name]:.2f} s fixed)   {said}",
            flush=True,
        )
        file.unlink()
    return shares | {"rank_sec": seconds, "rank_fixed_cpu_sec": fixed, "reading_share": reading}


def corpora(corpus: Path, folder: Path, times: int, quick: bool) -> dict[str, Path]:
    """The same conversations in rows of several lengths, and several formats."""
    chats = folder / "chats.jsonl"
    write_conversations(repeated(corpus, times), chats)
    files = {"chats": chats, "short": folder / "short.jsonl", "long": folder / "long.jsonl"}
    words = (word for chat in read_conversations(str(chats)) for turn in chat.turns for word in turn.text.split())
    with files["short"].open("w", encoding="utf-8") as out:
        for number, texts in enumerate(_grouped(words, 2 * SHORT_WORDS)):
            half = len(texts) // 2
            row = {"id": f"s{number}", "prompt": " ".join(texts[:half]), "response": " ".join(texts[half:])}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    with files["long"].open("w", encoding="utf-8") as out:
        for number, group in enumerate(_grouped(read_conversations(str(chats)), LONG_ROWS)):
            turns = [{"role": turn.role, "content": turn.text} for chat in group for turn in chat.turns]
            turns = [turn for turn in turns if turn["role"] != "system"]
            out.write(json.dumps({"id": f"l{number}", "messages": turns}, ensure_ascii=False) + "\n")
    if quick:
        return files
    import pyarrow
    import pyarrow.parquet

    lines = chats.read_bytes()
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines, 6))
    rows = [json.loads(line) for line in lines.splitlines()]
    (folder / "list.json").write_text(json.dumps(rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "columns.parquet")
    more = {"packed": "packed.jsonl.gz", "list": "list.json", "parquet": "columns.parquet"}
    return files | {name: folder / file for name, file in more.items()}


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if len(group) > 1:
        yield group


def count_as_first_of(recipe: TableRecipe, tokenizer: Any, world: int) -> Timed:
    """Seconds, and processor seconds, of rank 0 of `world` that counts its share and nobody else's."""
    with tempfile.TemporaryDirectory() as folder, PairCounter(len(tokenizer), Path(folder) / "rank") as pairs:

        def count() -> None:
            for _ in count_share(recipe, tokenizer, pairs, Share(recipe.data, 0, world, False), lambda *_: None):
                pass
            pairs.spill()

        return timed(count)


def read(recipe: TableRecipe) -> float:
    """Processor seconds of reading alone, the median of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        for _ in training_conversations(recipe.data, [CorpusReport()], tell=False):
            pass
        times.append(time.process_time() - start)
    return statistics.median(times)

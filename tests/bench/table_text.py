"""The parts of table.py that count text: a whole count against the raw tokenizer, and the ranks of a launched one.

`text_vs_tokenizer`: the tokens per second of the whole recipe over conversations from their file, artifact and report
included, over those of the fastest tokenizer for the vocabulary on all cores (all messages in memory); in turn, the
median of the ratios. The recipe has the template's tokens besides: `text_time_vs_tokenizer` divides the times alone, as
`prepare_vs_tokenizer` of data.py does, `text_cpu_vs_tokenizer` the processor times.

`rank_share`: the time of counting as rank 0 of N, alone on the machine, from the first row to the last run on the
disk, over that of the only process; 1/N would be perfect. `rank_share_cpu`: the same of processor times. The corpora:
`chats`, real conversations, one JSON object a line; `short`, the same texts in rows of some ten words; `long`, of some
ten thousand. Ranks run in turn; medians.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from common import against_tokenizers, in_turns
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.data.conversations import write_conversations
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.table.count import Share, count_corpus, count_share
from draftsmith.recipes.commands.training.train import accelerator_for
from draftsmith.recipes.schema.training import TableRecipe
from draftsmith.train.table.counting import PairCounter

from data import defaults, raw_tokenizers, repeated

SHORT_WORDS = 10
LONG_ROWS = 40
"""Conversations of `chats` whose texts make one row of `long`."""


def text(folder: Path, quick: bool) -> dict[str, Any]:
    """Counting from text against the raw tokenizer, in turn."""
    corpus, tokenizer_folder = defaults(folder)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    file = folder / "repeated.jsonl"
    write_conversations(repeated(corpus, 4 if quick else 24), file)
    texts = [turn.text for chat in read_conversations(str(file)) for turn in chat.turns]
    # conversations held out are not counted: next to none are
    data = {"source": str(file), "heldout_share": 1e-9, "cache": str(folder / "cache")}
    numbers = iter(range(1_000_000))

    def count() -> int:
        out = folder / f"table-{next(numbers)}"
        recipe = TableRecipe(kind="table", out=str(out), tokenizer=str(tokenizer_folder), data=data)
        count_corpus(recipe, tokenizer, accelerator_for(recipe))
        return int(load_manifest(out).data["tokens"])

    ways = raw_tokenizers(tokenizer, tokenizer_folder, texts)
    fastest, ratios, rates = against_tokenizers(ways, "count", count, 2 if quick else 9)
    print(f"text_vs_tokenizer {ratios['rate']:.2f}")
    return {
        "text_vs_tokenizer": ratios["rate"],
        "text_time_vs_tokenizer": ratios["time"],
        "text_cpu_vs_tokenizer": ratios["cpu"],
        "text_fastest_tokenizer": fastest,
        "text_mtok_per_sec": rates,
    }


def ranks(folder: Path, quick: bool) -> dict[str, Any]:
    """Time of one rank over time of one process, by corpus."""
    corpus, tokenizer_folder = defaults(folder)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    results: dict[str, dict[str, Any]] = {"rank_share": {}, "rank_share_cpu": {}, "rank_sec": {}}
    for name, file in corpora(corpus, folder, 1 if quick else 6).items():
        data = {"source": str(file), "cache": str(folder / "cache"), "template": "vicuna-v1.1"}
        recipe = TableRecipe(kind="table", out=str(folder / "table"), tokenizer=str(tokenizer_folder), data=data)
        jobs = {world: partial(count_as_first_of, recipe, tokenizer, world) for world in (1, 2, 4, 8, 16)}
        times = in_turns({str(world): job for world, job in jobs.items()}, 2 if quick else 3)
        wall = {world: median(each.wall for each in series) for world, series in times.items()}
        cpu = {world: median(each.cpu for each in series) for world, series in times.items()}
        results["rank_sec"][name] = wall
        for key, seconds in (("rank_share", wall), ("rank_share_cpu", cpu)):
            results[key][name] = {world: seconds[world] / seconds["1"] for world in seconds if world != "1"}
            shares = " ".join(f"{world}: {share:.3f}" for world, share in results[key][name].items())
            print(f"{key:14s} {name:6s} alone {seconds['1']:.2f} s   {shares}", flush=True)
    return results


def count_as_first_of(recipe: TableRecipe, tokenizer: Any, world: int) -> None:
    """Count as rank 0 of `world`, its share and nobody else's."""
    with tempfile.TemporaryDirectory() as folder, PairCounter(len(tokenizer), Path(folder) / "rank") as pairs:
        for _ in count_share(recipe, tokenizer, pairs, Share(recipe.data, 0, world, False), lambda *_: None):
            pass
        pairs.spill()


def corpora(corpus: Path, folder: Path, times: int) -> dict[str, Path]:
    """The same conversations in rows of several lengths."""
    files = {name: folder / f"{name}.jsonl" for name in ("chats", "short", "long")}
    write_conversations(repeated(corpus, times), files["chats"])
    chats = list(read_conversations(str(files["chats"])))
    words = (word for chat in chats for turn in chat.turns for word in turn.text.split())
    halves = ((texts[: len(texts) // 2], texts[len(texts) // 2 :]) for texts in _grouped(words, 2 * SHORT_WORDS))
    _write(files["short"], ({"prompt": " ".join(one), "response": " ".join(other)} for one, other in halves))
    turns = ([turn for chat in group for turn in chat.turns if turn.role != "system"]
             for group in _grouped(chats, LONG_ROWS))  # fmt: skip
    _write(files["long"], ({"messages": [{"role": t.role, "content": t.text} for t in group]} for group in turns))
    return files


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        for number, row in enumerate(rows):
            out.write(json.dumps({"id": f"{file.stem}{number}"} | row, ensure_ascii=False) + "\n")


def _grouped(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while len(group := list(islice(iterator, size))) > 1:
        yield group

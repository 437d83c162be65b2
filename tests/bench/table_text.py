"""The part `text` of table.py: a whole count from text to artifact, against the raw tokenizer.

`text_vs_tokenizer`: the tokens per second of the whole recipe over conversations from their file, artifact and report
included, over those of the fastest tokenizer for the vocabulary on all cores (all messages in memory); in turn, the
median of the ratios. The recipe has the template's tokens besides: `text_time_vs_tokenizer` divides the times alone, as
`prepare_vs_tokenizer` of data.py does, `text_cpu_vs_tokenizer` the processor times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import against_tokenizers
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.data.conversations import write_conversations
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.table.count import count_corpus
from draftsmith.recipes.commands.training.train import accelerator_for
from draftsmith.recipes.schema.training import TableRecipe

from data import defaults, raw_tokenizers, repeated


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

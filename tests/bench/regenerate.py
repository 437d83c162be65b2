"""Regeneration compared with the engine's batch decoding: single questions, and conversations of several turns.

    python tests/bench/regenerate.py --target FOLDER [--quick] [--prompts FILE] [--sharegpt FILE] [--limit 64]
                                     [--batch 16] [--tokens 256] [--rounds 3]

In turns, at temperature 0: the steps of `generate` on as many prompts as rows, without the prefill; and `regenerate` on
`--limit` questions and on `--limit` conversations, from the first question to the last answer. Ratios are of the same
round, and their medians are given. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import SHARED, SHAREGPT, finish, parser_of
from draftsmith.data.conversations import Conversation
from draftsmith.data.prompts import load_prompts
from draftsmith.data.regeneration import Answer, Question, Store, regenerate
from draftsmith.data.rendering.templates import OWN
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.training.regenerate import LocalTarget
from draftsmith.recipes.schema.evaluation import RegenerateRecipe


def regeneration_rate(recipe: RegenerateRecipe, conversations: Sequence[Conversation], tokenizer: Any) -> float:
    """Return the answer tokens per second of a regeneration."""
    target, tokens = LocalTarget(recipe), 0

    async def answer(question: Question) -> Any:
        nonlocal tokens
        reply = await target.answer(question)
        if isinstance(reply, Answer):
            tokens += len(tokenizer(reply.text, add_special_tokens=False).input_ids) + (reply.finish == "stop")
        return reply

    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "out.jsonl", {}) as store:
        start = time.perf_counter()
        asyncio.run(regenerate(conversations, store, answer, concurrency=recipe.batch, keep_cut=True))
        return tokens / (time.perf_counter() - start)


def batch_rate(target: Any, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the tokens per second of steps in which every row runs."""
    method, rng = build_method("autoregressive", Parts(), Sampling()), Rng(list(range(len(prompts))))
    steps = generate(target, *method, prompts, Limits(tokens), Sampling(), rng)
    next(steps)
    start, count = time.perf_counter(), sum(1 for _ in steps)
    return len(prompts) * count / (time.perf_counter() - start)


def bench(options: argparse.Namespace) -> dict[str, Any]:
    name, limit, batch, tokens = str(options.target), options.limit, options.batch, options.tokens
    tokenizer, target = load_tokenizer(name), wrap_model(load_model(name), graphs=False)
    rows = [ids for _, ids in load_prompts(str(options.prompts), OWN, tokenizer, batch, 256)]
    questions = list(read_conversations(str(options.prompts), limit=limit, questions=True))
    corpora = {
        "questions": [Conversation(each.id, each.turns[:1]) for each in questions],
        "conversations": list(read_conversations(str(options.sharegpt), limit=limit, questions=True)),
    }
    recipe = RegenerateRecipe(
        kind="regenerate", out="unused.jsonl", source="unused", target=name, template=OWN, max_new_tokens=tokens,
        on_length="keep", batch=batch,
    )  # fmt: skip
    rates: dict[str, list[float]] = {"batch decoding": [], **{label: [] for label in corpora}}
    for _ in range(options.rounds):
        rates["batch decoding"].append(batch_rate(target, rows, tokens))
        for label, conversations in corpora.items():
            rates[label].append(regeneration_rate(recipe, conversations, tokenizer))
        print("   ".join(f"{label} {found[-1]:.1f} tokens/s" for label, found in rates.items()), flush=True)
    base = rates.pop("batch decoding")
    ratios = {label: [a / b for a, b in zip(found, base, strict=True)] for label, found in rates.items()}
    return {"batch_tokens_per_sec": statistics.median(base), "rows": batch} | {
        f"{label}_vs_batch": statistics.median(found) for label, found in ratios.items()
    }


def main() -> None:
    numbers = {"limit": 64, "batch": 16, "tokens": 256, "rounds": 3}
    parser = parser_of(__doc__, "8 of each in 8 rows, 16 tokens, one round", **numbers)
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, default=SHARED / "eval" / "vicuna_bench_question.jsonl")
    parser.add_argument("--sharegpt", type=Path, default=SHAREGPT)
    options = parser.parse_args()
    if options.quick:
        options.limit = options.batch = 8
        options.tokens, options.rounds = 16, 1
    finish(bench(options))


if __name__ == "__main__":
    main()

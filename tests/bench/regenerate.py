"""Regeneration beside the engine's own batch decoding: single questions, and conversations of several turns.

    python tests/bench/regenerate.py --target FOLDER [--quick] [--prompts FILE] [--sharegpt FILE] [--limit 64]
                                     [--batch 16] [--tokens 256] [--rounds 3] [--check 16]

In turns, at temperature 0: `generate` on as many prompts as rows, all of them running `--tokens` steps (the rate of the
steps, without the reading of the prompts); and `regenerate` on `--limit` questions and on `--limit` conversations, from
the first question to the last answer: prompts read, texts rendered, rows written, and at the end fewer conversations
than rows, which the rate "when full" leaves out. Ratios are of the same round, their medians are given; 0.8 and 0.5 are
wanted. `--check` answers are given once more one by one; where the two part, at a near tie, the target's logits of both
tokens are less than 0.001 apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from common import SHARED, SHAREGPT, finish, parser_of
from draftsmith.data.conversations import Conversation
from draftsmith.data.prompts import load_prompts
from draftsmith.data.regeneration import Store, regenerate
from draftsmith.data.rendering.templates import OWN
from draftsmith.data.sources.reading import read_conversations
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits, decode_texts, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.pool import Pool
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.training.regenerate import LocalTarget
from draftsmith.recipes.schema.evaluation import RegenerateRecipe

GOALS = {"questions": 0.8, "conversations": 0.5}
NEAR = 1e-3
"""Apart in float32, whose rounding in logits of some tens is of 1e-5."""
PLAIN = Sampling()


@dataclass
class Run:
    """What a regeneration was: prompts with their answers, seconds of it and of its parts, tokens read."""

    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    seconds: float = 0.0
    reading: float = 0.0
    stepping: float = 0.0
    steps: int = 0
    full: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Tokens and seconds, rendering included, while no row was idle."""
    read: int = 0
    prompts: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(ids) for _, ids in self.answers)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def regenerated(recipe: RegenerateRecipe, conversations: Sequence[Conversation]) -> Run:
    """Answer conversations with a pool of their own, under a watch."""
    run, asked, former = Run(), dict[int, list[int]](), 0.0
    add, step, read = Pool.add, Pool.step, Pool._read

    def adds(pool: Pool, prompt: list[int], seed: int) -> int:
        ticket = add(pool, prompt, seed)
        asked[ticket] = list(prompt)
        return ticket

    def steps(pool: Pool) -> list[tuple[int, list[int]]]:
        nonlocal former
        start, before, count = time.perf_counter(), run.reading, len(asked)
        ended = step(pool)
        now = time.perf_counter()
        run.stepping += now - start - (run.reading - before)
        run.steps += 1
        if count == recipe.batch and former:
            run.full[0] += count
            run.full[1] += now - former
        former = now
        run.answers += [(asked.pop(ticket), list(ids)) for ticket, ids in ended]
        return ended

    def reads(pool: Pool, index: int, prompt: list[int], start: int) -> None:
        began = time.perf_counter()
        read(pool, index, prompt, start)
        run.reading += time.perf_counter() - began
        run.read, run.prompts = run.read + len(prompt) - 1 - start, run.prompts + len(prompt) - 1

    local = LocalTarget(recipe)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, watched in (("add", adds), ("step", steps), ("_read", reads)):
            patch.setattr(Pool, name, watched)
        with Store(Path(folder) / "out.jsonl", {}) as store:
            start = time.perf_counter()
            asyncio.run(regenerate(conversations, store, local.answer, concurrency=recipe.batch, keep_cut=True))
            run.seconds = time.perf_counter() - start
    return run


def batch_rate(target: Any, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second of steps in which every row runs."""
    method, rng = build_method("autoregressive", Parts(), PLAIN), Rng(list(range(len(prompts))))
    steps = generate(target, *method, prompts, Limits(tokens), PLAIN, rng)
    next(steps)
    start, count = time.perf_counter(), sum(1 for _ in steps)
    return len(prompts) * count / (time.perf_counter() - start)


@torch.inference_mode()
def verdict(target: Any, prompt: list[int], said: list[int]) -> str:
    """Whether an answer is what is said to its prompt alone."""
    method, limits = build_method("autoregressive", Parts(), PLAIN), Limits(len(said))
    (alone,) = decode_texts(target, *method, [prompt], limits, PLAIN, Rng([0]))
    if alone == said:
        return "same"
    place = next(place for place, (a, b) in enumerate(zip(alone, said, strict=True)) if a != b)
    ids = torch.tensor([[*prompt, *said[:place]]])
    logits_V = target.logits(target.extend(target.new_cache(1, ids.shape[1]), ids)[0, -1])
    return "near tie" if abs(float(logits_V[alone[place]] - logits_V[said[place]])) < NEAR else "different"


def bench(options: argparse.Namespace) -> dict[str, Any]:
    name, limit, batch, tokens = str(options.target), options.limit, options.batch, options.tokens
    tokenizer, target = load_tokenizer(name), wrap_model(load_model(name), graphs=False)
    rows = [ids for _, ids in load_prompts(str(options.prompts), OWN, tokenizer, batch, 256)]
    sources = {"questions": options.prompts, "conversations": options.sharegpt}
    corpora = {
        label: list(read_conversations(str(source), limit=limit, questions=True)) for label, source in sources.items()
    }
    corpora["questions"] = [Conversation(each.id, each.turns[:1]) for each in corpora["questions"]]
    recipe = RegenerateRecipe(
        kind="regenerate", out="unused.jsonl", source="unused", target=name, template=OWN, max_new_tokens=tokens,
        on_length="keep", batch=batch,
    )  # fmt: skip
    rates, runs = list[float](), dict[str, Run]()
    ratios, full = ({label: list[float]() for label in GOALS} for _ in range(2))
    for _ in range(options.rounds):
        rates.append(batch_rate(target, rows, tokens))
        print(f"batch decoding   {rates[-1]:7.1f} tokens/s   {len(rows)} rows, {tokens} tokens each", flush=True)
        for label, conversations in corpora.items():
            runs[label] = run = regenerated(recipe, conversations)
            ratios[label].append(run.rate / rates[-1])
            full[label].append(run.full[0] / run.full[1] / rates[-1] if run.full[1] else math.nan)
            shares = f"prompts {run.reading / run.seconds:.0%}, steps {run.stepping / run.seconds:.0%} of the time"
            print(
                f"{label:16s} {run.rate:7.1f} tokens/s   x {ratios[label][-1]:.2f}, when full {full[label][-1]:.2f}   "
                f"{len(run.answers)} answers, {run.tokens} tokens, {run.tokens / run.steps:.1f} rows a step; {shares}; "
                f"{run.read} of {run.prompts} prompt tokens read",
                flush=True,
            )
    found: dict[str, Any] = {"batch_tokens_per_second": statistics.median(rates), "rows": batch}
    for label, run in runs.items():
        chosen = run.answers[:: max(1, len(run.answers) // options.check)] if options.check else []
        verdicts = Counter(verdict(target, *answer) for answer in chosen)
        print(f"{label:16s} as answered one by one: {dict(verdicts)}")
        found[label] = {
            "ratio": statistics.median(ratios[label]), "ratio_when_full": statistics.median(full[label]),
            "goal": GOALS[label], "tokens_per_second": run.rate,
            "answers": len(run.answers), "tokens": run.tokens, "prompt_tokens": run.prompts, "read_tokens": run.read,
            "reading_share": run.reading / run.seconds, "steps_share": run.stepping / run.seconds,
            "rows_per_step": run.tokens / run.steps,
            "as_one_by_one": dict(verdicts),
        }  # fmt: skip
    return found


def main() -> None:
    numbers = {"limit": 64, "batch": 16, "tokens": 256, "rounds": 3, "check": 16}
    parser = parser_of(__doc__, "8 of each in 8 rows, 16 tokens, one round", **numbers)
    parser.add_argument("--target", type=Path, required=True, help="a model's folder")
    parser.add_argument("--prompts", type=Path, default=SHARED / "eval" / "vicuna_bench_question.jsonl")
    parser.add_argument("--sharegpt", type=Path, default=SHAREGPT)
    options = parser.parse_args()
    for path in (options.target, options.prompts, options.sharegpt):
        if not path.exists():
            parser.error(f"there is no {path}: name it, or set DRAFTSMITH_SHARED to the shared data")
    if options.quick:
        options.limit = options.batch = 8
        options.tokens, options.rounds, options.check = 16, 1, 4
    finish(bench(options))


if __name__ == "__main__":
    main()

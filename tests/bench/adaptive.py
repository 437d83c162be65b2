"""The chain that weighs gain against cost beside fixed lengths, by group of questions and by rows decoded together.

    python tests/bench/adaptive.py [--pair runs/realpair] [--questions 8] [--tokens 48] [--rounds 2] [--batches 1 4 16]

On a finished quickstart's pair and Spec-Bench's questions of up to 400 tokens, at temperature 0. `cost` and `width` are
measured for each batch: the drafter's forward, and what two tokens a row take more than one, in forwards of the target
over one. Tokens a second without the reading of prompts, of plain decoding, of γ = 1, 2 and 4 and of the adaptive
chain, in turns; `share` is the adaptive chain's over the fastest fixed one's. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import SHARED, finish, parser_of
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.evaluation import open_case
from draftsmith.recipes.schema.evaluation import EvaluateRecipe

FIXED = (1, 2, 4)
LONGEST = 400
CONTEXT = 200


def seconds_of(model: LanguageModel, batch: int, tokens: int) -> float:
    """Of a forward over so many tokens of each row."""
    ids = torch.randint(model.vocab_size, (batch, CONTEXT + tokens))
    cache = model.new_cache(batch, CONTEXT + tokens)
    model.extend(cache, ids[:, :CONTEXT])
    cache.set_lengths([CONTEXT] * batch)
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        model.logits(model.extend(cache, ids[:, CONTEXT:], Tree.chain(tokens - 1)))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def rate(
    target: LanguageModel, parts: Parts, prompts: list[list[int]], tokens: int, name: str, **options: Any
) -> float:
    """Tokens a second, from the first step on."""
    method = build_method(name, parts, Sampling(), **options)
    count, began = 0, 0.0
    for step in generate(target, *method, prompts, Limits(tokens), Sampling(), Rng.for_rows(0, len(prompts))):
        if began:
            count += sum(map(len, step.new_ids))
        else:
            began = time.perf_counter()
    return count / (time.perf_counter() - began)


def of_group(
    ways: dict[str, Callable[[list[list[int]]], float]], batches: list[list[list[int]]], rounds: int
) -> dict[str, float]:
    """By way, the median over batches and rounds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for prompts in batches:
            for name, way in ways.items():
                found[name].append(way(prompts))
    return {name: statistics.median(each) for name, each in found.items()}


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__, "two questions of eight tokens", pair=True, questions=8, tokens=48, rounds=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    questions, tokens = (2, 8) if args.quick else (args.questions, args.tokens)
    values: dict[str, Any] = {"kind": "evaluate", "out": "none.json", "methods": [{"method": "autoregressive"}]}
    values |= {"target": str(args.pair / "target"), "drafter": str(args.pair / "drafter"), "drafter_dtype": "bfloat16"}
    values |= {"prompts": "spec-bench", "prompts_path": str(SHARED / "eval" / "spec_bench_question.jsonl")}
    values |= {"template": "tokenizer", "limit": 480, "max_prompt_tokens": LONGEST}
    case = open_case(EvaluateRecipe.model_validate(values))
    target, parts = case.opened.target, case.opened.parts
    assert parts.drafter is not None
    groups: dict[str, list[list[int]]] = {}
    for asked, ids in zip(case.asked, case.prompts, strict=True):
        groups.setdefault(asked.category, []).append(ids)
    results: dict[str, Any] = {}
    for batch in args.batches:
        plain = seconds_of(target, batch, 1)
        costs = {"draft_cost": seconds_of(parts.drafter, batch, 1) / plain}
        costs["token_cost"] = max(0.0, seconds_of(target, batch, 2) / plain - 1)
        way = partial(rate, target, parts, tokens=tokens)
        ways: dict[str, Any] = {"plain": partial(way, name="autoregressive")}
        ways |= {f"gamma {gamma}": partial(way, name="speculative", gamma=gamma) for gamma in FIXED}
        ways["adaptive"] = partial(way, name="adaptive", policy="expected-gain", **costs)
        rows: dict[str, Any] = {}
        for name, prompts in groups.items():
            own = prompts[: max(questions, batch)]
            parts_of = [own[first : first + batch] for first in range(0, len(own) - batch + 1, batch)]
            if not parts_of:
                continue
            found = of_group(ways, parts_of, args.rounds)
            best = max(found[f"gamma {gamma}"] for gamma in FIXED)
            rows[name] = found | {"share": found["adaptive"] / best}
            print(f"batch {batch:2} {name:16}" + "".join(f"  {key} {value:.2f}" for key, value in rows[name].items()))
        results[str(batch)] = costs | {"groups": rows}
    finish({"batches": results})


if __name__ == "__main__":
    main()

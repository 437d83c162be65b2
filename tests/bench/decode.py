"""Decoding speed on the quickstart pair: this engine against transformers, plain and assisted, greedy, batch 1.

    python tests/bench/decode.py [--quick] [--pair runs/quickstart] [--gamma 4]

Runs are interleaved prompt by prompt in one process, totals of per-prompt medians are compared. The assistant of
transformers is the same drafter with the same constant number of draft tokens and no confidence threshold. Needs a
trained pair: `make quickstart` first. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.measure import decode, decode_reference, raw_costs
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.metrics import total
from draftsmith.decode.models import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.evaluate import load_prompts, machine, stop_ids

Job = Callable[[Sequence[int], Limits], tuple[list[int], object, float]]


def assisted(target: torch.nn.Module, drafter: torch.nn.Module, gamma: int) -> Job:
    """`transformers.generate(assistant_model=…)` with `gamma` draft tokens a step, always."""
    config = drafter.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
    config.assistant_confidence_threshold = 0.0

    def run(prompt: Sequence[int], limits: Limits) -> tuple[list[int], object, float]:
        ids = torch.tensor([list(prompt)])
        options = {"do_sample": False, "max_new_tokens": limits.max_new_tokens, "pad_token_id": 0}
        start = time.perf_counter()
        with torch.inference_mode():
            output = target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                eos_token_id=list(limits.stop_ids) or None,
                **options,
            )
        return output[0, len(prompt) :].tolist(), None, time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 prompts, one run: under a minute")
    parser.add_argument("--pair", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--gamma", type=int, default=4)
    arguments = parser.parse_args()
    if not (arguments.pair / "drafter").is_dir():
        parser.error(f"there is no trained pair at {arguments.pair}: run `make quickstart` first")
    tokenizer = load_tokenizer(str(arguments.pair / "target"))
    target_model, drafter_model = (load_model(str(arguments.pair / name)) for name in ("target", "drafter"))
    target, drafter = wrap_model(target_model), wrap_model(drafter_model)
    heldout = str(arguments.pair / "corpus" / "heldout.jsonl")
    prompts = load_prompts(heldout, "chatml", tokenizer, 4 if arguments.quick else 32, 128)
    limits, greedy = Limits(64 if arguments.quick else 128, stop_ids(tokenizer)), Sampling()
    plain = build_method("autoregressive", Parts(), greedy)
    speculative = build_method("speculative", Parts(drafter=drafter), greedy, gamma=arguments.gamma)
    jobs: dict[str, Job] = {
        "autoregressive": lambda prompt, limits: decode(target, plain, greedy, 0, prompt, limits),
        "speculative": lambda prompt, limits: decode(target, speculative, greedy, 0, prompt, limits),
        "transformers": lambda prompt, limits: decode_reference(target_model, prompt, limits),
        "transformers assisted": assisted(target_model, drafter_model, arguments.gamma),
    }
    for job in jobs.values():
        job(prompts[0], Limits(8, limits.stop_ids))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    tokens = dict.fromkeys(jobs, 0)
    tallies, same = [], 0
    for prompt in prompts:
        runs = {
            name: [job(prompt, limits) for job in [job] * (1 if arguments.quick else 3)] for name, job in jobs.items()
        }
        for name, results in runs.items():
            seconds[name].append(statistics.median(result[2] for result in results))
            tokens[name] += len(results[0][0])
        tallies.append(runs["speculative"][0][1])
        same += len({tuple(results[0][0]) for results in runs.values()}) == 1
    rates = {name: tokens[name] / sum(seconds[name]) for name in jobs}
    counts = total(tallies)
    costs = raw_costs(target, speculative, arguments.gamma + 1, 128)
    bound = counts.tokens / counts.steps * costs.one / (costs.tree + costs.propose)
    print(f"{len(prompts)} prompts, {limits.max_new_tokens} new tokens, gamma {arguments.gamma}; same tokens on {same}")
    for name, rate in rates.items():
        print(f"{name:24s} {rate:8.1f} tokens/s   {rate / rates['transformers']:.2f} x transformers")
    result = {
        "vs_transformers": rates["autoregressive"] / rates["transformers"],
        "vs_transformers_assisted": rates["speculative"] / rates["transformers assisted"],
        "speedup": rates["speculative"] / rates["autoregressive"],
        "efficiency": {"speculative": rates["speculative"] / rates["autoregressive"] / bound},
        "tokens_per_step": counts.tokens / counts.steps,
        "same_tokens_prompts": same,
        "prompts": len(prompts),
        "machine": machine("cpu"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

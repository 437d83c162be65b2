"""Measure the decoding speed of this engine, and compare it with transformers and the limits of the hardware.

    python tests/bench/decode.py [--quick] [--pair runs/quickstart] [--gamma 4]

Requires a trained pair (`make quickstart`); shapes.py measures models of real shapes. The batch size is 1. Runs are
interleaved prompt by prompt, and medians over the runs of each prompt are reported. Speeds include the prefill.
Efficiency is the share of a step that is spent in forward passes. Assisted generation of transformers uses the same
drafter, the same constant number of draft tokens and no confidence threshold. `published` is the published algorithm
with the forward passes and caches of transformers. The last line of the output is one JSON object.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from common import finish, in_turns, medians, parser_of
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.measure import Decoded, Entry, decode_batch, decode_reference, profile_steps
from draftsmith.decode.evaluation.metrics import Tally, total
from draftsmith.decode.evaluation.profile import StepProfile
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.proposers.head_trees import PrunedHeadTree
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree
from draftsmith.decode.warpers import Sampling
from transformers import DynamicCache

Job = Callable[[Sequence[int], Limits], Decoded]


def rows(gamma: int) -> dict[str, tuple[str, dict[str, Any], Sampling]]:
    options: dict[str, dict[str, Any]] = {
        "autoregressive": {}, "speculative": {"gamma": gamma}, "multi-candidate": {"k_config": "2x1x1x1"},
        "medusa": {"tree": "2x1"}, "slim-ss": {}, "slim-s": {"num_sequences": 4}, "slim-l": {},
        "mjsd": {"num_beams": 4},
    }  # fmt: skip
    greedy = {name: (name, settings, Sampling()) for name, settings in options.items()}
    return greedy | {f"{name} T=1": (name, options[name], Sampling(1.0)) for name in list(options)[:3]}


def assisted(target: Any, drafter: Any, gamma: int) -> Job:
    """Return a job that runs `generate(assistant_model=…)` of transformers with a constant draft length."""
    config = drafter.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
    config.assistant_confidence_threshold = 0.0
    generate_assisted = partial(target.generate, assistant_model=drafter)
    model = SimpleNamespace(
        generate=generate_assisted,
        device=target.device,
        config=target.config,
        generation_config=target.generation_config,
    )
    return partial(decode_reference, model)


def published(target: Any, drafter: Any, gamma: int) -> Job:
    """Return a job that runs greedy speculative decoding as published, which crops both caches after each step."""

    @torch.inference_mode()
    def run(prompt: Sequence[int], limits: Limits) -> Decoded:
        start = time.perf_counter()
        ids = torch.tensor([list(prompt)])
        caches = DynamicCache(config=target.config), DynamicCache(config=drafter.config)
        finished = False
        while not finished:
            drafted = ids
            for _ in range(gamma):
                cached = caches[1].get_seq_length()
                logits = drafter(drafted[:, cached:], past_key_values=caches[1], use_cache=True).logits
                drafted = torch.cat((drafted, logits[:, -1:].argmax(-1)), 1)
            cached = caches[0].get_seq_length()
            logits = target(drafted[:, cached:], past_key_values=caches[0], use_cache=True).logits
            best = logits[:, -gamma - 1 :].argmax(-1)
            accepted = 0
            while accepted < gamma and bool(drafted[0, ids.shape[1] + accepted] == best[0, accepted]):
                accepted += 1
            new = [*drafted[0, ids.shape[1] : ids.shape[1] + accepted].tolist(), int(best[0, accepted])]
            for index, token in enumerate(new):
                if token in limits.stop_ids or ids.shape[1] + index + 1 - len(prompt) == limits.max_new_tokens:
                    new, finished = new[: index + 1], True
                    break
            ids = torch.cat((ids, torch.tensor([new])), 1)
            for cache in caches:
                extra = cache.get_seq_length() - (ids.shape[1] - 1)
                if extra > 0:
                    cache.crop(-extra)
        return Decoded(ids[0, len(prompt) :].tolist(), Tally(), time.perf_counter() - start, 0.0)

    return run


class Idle(LanguageModel):
    """Model without computation, which isolates the engine's own time per step."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.hidden_size, self.max_positions = vocab_size, 8, 1 << 30
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.layers = self.kv_heads = self.key_width = self.value_width = 1
        self._hidden_1ND = torch.zeros(1, 256, 8)
        self._logits_1NV = torch.randn(1, 256, vocab_size, generator=torch.Generator().manual_seed(0))

    def extend(
        self, cache: KVCache, tokens_BM: torch.Tensor, tree: Tree | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        return self._hidden_1ND[:, : tokens_BM.shape[1]]

    def _forward(self, *arguments: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        return self._logits_1NV[:, : hidden_XD.shape[1]]


class IdleHeads:
    num_heads = 4

    def __init__(self, vocab_size: int) -> None:
        self._logits_BKV = torch.randn(1, 4, vocab_size, generator=torch.Generator().manual_seed(1))

    def __call__(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        return self._logits_BKV


def host_microseconds(vocab_size: int, table: BigramTable | None, gamma: int, tokens: int) -> dict[str, float]:
    """Return the median step time in microseconds by label, with models that compute nothing."""
    parts = Parts(Idle(vocab_size), IdleHeads(vocab_size), table)
    microseconds = {}
    for label, (name, options, sampling) in rows(gamma).items():
        profile = StepProfile()
        method = build_method(name, parts, sampling, **options)
        for _ in generate(
            Idle(vocab_size), *method, [[1, 2, 3]], Limits(tokens), sampling, Rng.for_rows(0, 1), profile
        ):
            pass
        summary = profile.summary()
        microseconds[label] = summary["step"] - summary["host"]
    return microseconds


@torch.inference_mode()
def prune_share(target: LanguageModel, heads: Any, table: BigramTable | None, runs: int) -> tuple[float, float]:
    """Return the time to select the 40 best paths from the top 10 of 4 heads, relative to a one-token forward pass.

    The second value also includes the construction of the tree. Each timed job repeats its call twenty times.
    """
    proposer = PrunedHeadTree(heads, table, 40, (10,) * 4, 0.01, 4)
    generator = torch.Generator().manual_seed(0)
    root_B1 = torch.randint(target.vocab_size, (1, 1), generator=generator)
    logits_BKV = heads(torch.randn(1, target.hidden_size, generator=generator)).float()
    top = logits_BKV.topk(10, -1)
    inputs = (root_B1, top.indices, top.values - logits_BKV.logsumexp(-1, keepdim=True))
    cache = target.new_cache(1, 130)
    cache.set_lengths([128])
    jobs: dict[str, Callable[[], Any]] = {
        "forward": lambda: [target.logits(target.extend(cache, root_B1)) for _ in range(20)],
        "search": lambda: [proposer.search(*inputs) for _ in range(20)],
        "prune": lambda: [proposer.prune(*inputs) for _ in range(20)],
    }
    seconds = medians(in_turns(jobs, runs))
    return seconds["search"] / seconds["forward"], seconds["prune"] / seconds["forward"]


def bench_pair(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the trained pair on the CPU."""
    from pair import Pair  # imported late because it requires pydantic

    quick, gamma = arguments.quick, arguments.gamma
    pair, measured = Pair(arguments.pair, 3 if quick else 16), rows(gamma)
    target, parts, prompts = pair.target, pair.parts, pair.prompts
    limits = Limits(48 if quick else 128, pair.stop)

    def job(kind: str, options: dict[str, Any], sampling: Sampling) -> Job:
        method = build_method(kind, parts, sampling, **options)
        return lambda prompt, limits: decode_batch(target, method, sampling, 0, [prompt], limits)[0]

    jobs = {label: job(*settings) for label, settings in measured.items()}
    jobs["transformers"] = partial(decode_reference, pair.target_model)
    jobs["transformers assisted"] = assisted(pair.target_model, pair.drafter_model, gamma)
    jobs["published"] = published(pair.target_model, pair.drafter_model, gamma)
    runs = interleaved(jobs, prompts, limits, quick)
    results = {label: row_of(runs[label]) for label in jobs}
    for label, (kind, options, sampling) in measured.items():
        profile = profile_steps(target, parts, Entry(label, kind, options, sampling), prompts, limits)
        results[label]["efficiency"] = statistics.median(profile.shares)
        results[label]["tokens_per_step"] = total(run[0].tally for run in runs[label]).metrics()["tokens_per_step"]
    for label, row in results.items():
        base = results["autoregressive T=1" if label.endswith("T=1") else "autoregressive"]
        row["speedup"] = row["tokens_per_second"] / base["tokens_per_second"]
    exact = [label for label in jobs if not label.endswith("T=1") and label != "mjsd"]
    equal = sum(len({tuple(runs[label][number][0].ids) for label in exact}) == 1 for number in range(len(prompts)))
    print(f"{len(prompts)} prompts, {limits.max_new_tokens} new tokens, gamma {gamma}; same greedy tokens on {equal}")
    print_rows(results)
    host = host_microseconds(target.vocab_size, parts.table, gamma, 200 if quick else 2000)
    print("host per step: " + ", ".join(f"{label} {value:.0f} us" for label, value in host.items()))
    share, with_tree = prune_share(target, parts.heads, parts.table, 5 if quick else 50)
    print(f"slim: top 40 of 4 x 10 candidates {share:.1%} of a target forward, {with_tree:.1%} with the tree")

    def by_label(key: str) -> dict[str, float]:
        return {label: row[key] for label, row in results.items() if key in row}

    speeds = by_label("tokens_per_second")
    return {
        "vs_transformers_assisted": speeds["speculative"] / speeds["transformers assisted"],
        "vs_transformers": speeds["autoregressive"] / speeds["transformers"],
        "vs_published": speeds["speculative"] / speeds["published"],
        **{key: by_label(key) for key in ("efficiency", "speedup", "tokens_per_second", "tokens_per_step")},
        "host_us_per_step": host["speculative"],
        "host_us_per_step_by_method": host,
        "slim_prune_share": share,
        "slim_prune_and_tree_share": with_tree,
        "same_tokens_prompts": equal,
        "prompts": len(prompts),
    }


def interleaved(
    jobs: dict[str, Job], prompts: Sequence[Sequence[int]], limits: Limits, quick: bool
) -> dict[str, list[list[Decoded]]]:
    for job in jobs.values():
        job(prompts[0], Limits(8, limits.stop_ids))
    runs: dict[str, list[list[Decoded]]] = {label: [[] for _ in prompts] for label in jobs}
    for _ in range(2 if quick else 3):
        for number, prompt in enumerate(prompts):
            for label, job in jobs.items():
                runs[label][number].append(job(prompt, limits))
    return runs


def row_of(runs: list[list[Decoded]]) -> dict[str, Any]:
    seconds = sum(statistics.median(result.seconds for result in run) for run in runs)
    return {"tokens_per_second": sum(len(run[0].ids) for run in runs) / seconds}


def print_rows(results: dict[str, dict[str, Any]]) -> None:
    columns = {"tokens_per_second": "9.1f", "tokens_per_step": "13.2f", "speedup": "9.2f", "efficiency": "12.2f"}
    print(f"{'':24s} tokens/s  tokens/step  speedup  efficiency")
    for label, row in results.items():
        cells = [f"{row[key]:{form}}" if key in row else " " * int(float(form[:-1])) for key, form in columns.items()]
        print(f"{label:24s}{''.join(cells)}")


def main() -> None:
    parser = parser_of(__doc__, "use three prompts and two runs (under a minute)", pair=True, gamma=4)
    finish(bench_pair(parser.parse_args()))


if __name__ == "__main__":
    main()

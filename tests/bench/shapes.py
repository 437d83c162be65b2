"""Measure a decoding step of models with real shapes and random weights, by phase and on any device.

    python tests/bench/shapes.py 7b-68m 13b-160m 8b-1b [--device cuda] [--dtype bfloat16] [--batch 1 4 16]
                                 [--context 256 2048] [--graphs] [--peer]

A fixed pattern of accepted tokens replaces verification. The output shows the microseconds of each phase and those in
which the device was busy; the difference is idle time. `--graphs` also measures replayed CUDA graphs. `--peer` also
measures the steps of assisted generation in transformers, with the same models and number of draft tokens; with random
weights it accepts no draft token. The last line of the output is one JSON object. Pydantic is not required.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any, Literal

import numpy as np
import torch
from common import finish, parser_of, random_llama
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.decode.engine import Limits, Profile, Proposal, Verdict, Verifier, generate
from draftsmith.decode.evaluation.profile import PHASES, StepProfile, synchronise
from draftsmith.decode.methods import Method, Parts, build_method
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.verifiers.verdicts import path_verdict, take_node
from draftsmith.decode.warpers import Sampling

SHAPES = {
    "13b": (5120, 13824, 40, 40, 32000),
    "8b": (4096, 14336, 32, 32, 128256, 8),
    "7b": (4096, 11008, 32, 32, 32000),
    "1b": (2048, 8192, 16, 32, 128256, 8),
    "160m": (768, 3072, 12, 12, 32000),
    "135m": (576, 1536, 30, 9, 49152, 3),
    "68m": (768, 3072, 2, 12, 32000),
    "mini": (128, 256, 4, 4, 2000, 2),
    "micro": (64, 128, 1, 4, 2000),
}
"""Hidden size, MLP width, layers, heads, vocabulary size and, if there are fewer, key-value heads."""
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {}, "speculative": {}, "multi-candidate": {"k_config": "2x1x1x1"}, "medusa": {"tree": "2x1"},
    "slim-s": {"num_sequences": 4}, "slim-l": {},
}  # fmt: skip
PATTERN = (3, 1, 4, 0, 2, 4, 1)


SPAN = "draftsmith phase: "


class BusyProfile:
    """Profile of the device's busy time by phase. It synchronises, so wall times are not valid."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        activities = torch.profiler.supported_activities() if self._cuda else [torch.profiler.ProfilerActivity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._span: Any = None

    def __enter__(self) -> BusyProfile:
        self._profiler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.stop()

    def start(self) -> None:
        self._begin(0)

    def mark(self, phase: str) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._span.__exit__(None, None, None)
        if phase != "commit":
            self._begin(PHASES.index(phase) + 1)

    def _begin(self, phase: int) -> None:
        self._span = torch.profiler.record_function(SPAN + PHASES[phase])
        self._span.__enter__()

    def summary(self) -> dict[str, float]:
        events = self._profiler.events() or []
        on_device = torch.autograd.DeviceType.CUDA if self._cuda else torch.autograd.DeviceType.CPU
        spans = [event for event in events if event.name.startswith(SPAN)]
        work = [event for event in events if event.device_type == on_device and not event.name.startswith(SPAN)]
        starts = np.array([event.time_range.start for event in work])
        times = np.array([event.time_range.elapsed_us() if self._cuda else event.self_cpu_time_total for event in work])
        by_phase = {phase: list[float]() for phase in PHASES[:-1]}
        for event in spans:
            if event.device_type == torch.autograd.DeviceType.CPU:
                within = (event.time_range.start <= starts) & (starts < event.time_range.end)
                by_phase[event.name.removeprefix(SPAN)].append(float(times[within].sum()))
        return {phase: statistics.fmean(series) for phase, series in by_phase.items() if series}


class FixedPattern(Verifier):
    """Verifier that accepts tokens by a fixed pattern, since random models never agree."""

    lossless = False
    score_type: Literal["logits"] = "logits"

    def __init__(self) -> None:
        self._step = 0

    def verify(self, proposal: Proposal, target_BNV: torch.Tensor, rng: Rng) -> Verdict:
        tree = proposal.tree
        depth = PATTERN[self._step % len(PATTERN)]
        self._step += 1
        parents_BN = tree.parents_BN.expand(len(target_BNV), -1)
        node_BN = torch.arange(tree.nodes, device=parents_BN.device).expand_as(parents_BN)
        follows_BN = (parents_BN >= 0) & (tree.depth_BN <= depth)
        next_BN1 = torch.nn.functional.pad(node_BN, (0, 1)).clone()
        # If a node has several children, the first one is accepted.
        parent_or_end_BN = torch.where(follows_BN, parents_BN, tree.nodes).flip(1)
        next_BN1.scatter_reduce_(1, parent_or_end_BN, node_BN.flip(1), "amin", include_self=False)
        last_B1 = next_BN1.new_zeros(len(next_BN1), 1)
        for _ in range(depth):
            last_B1 = next_BN1.gather(1, last_B1)
        last_B = last_B1[:, 0]
        return path_verdict(tree, last_B, take_node(target_BNV, last_B).argmax(-1))


def steps_of(
    target: LanguageModel, method: Method, context: int, batch: int, limits: Limits, profile: Profile | None = None
) -> tuple[int, int, float]:
    """Decode after the prefill; return the number of new tokens in all rows, the number of steps and the seconds."""
    rng, prompts = Rng.for_rows(0, batch, target.device), [[1] * context for _ in range(batch)]
    steps = generate(target, *method, prompts, limits, Sampling(), rng, profile)
    next(steps)
    synchronise(target)
    start, counts = time.perf_counter(), [sum(map(len, step.new_ids)) for step in steps]
    synchronise(target)
    return sum(counts), len(counts), time.perf_counter() - start


def assisted(target: Any, drafter: Any, context: int, tokens: int, gamma: int) -> float:
    """Return the microseconds per step of transformers' assisted generation with a constant draft length."""
    config, starts = drafter.generation_config, list[float]()
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = gamma, "constant"
    config.assistant_confidence_threshold = 0.0
    hook = target.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
    ids = torch.ones(1, context, dtype=torch.int64, device=target.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        target.generate(ids, **options, assistant_model=drafter, max_new_tokens=tokens)
    hook.remove()
    return 1e6 * (starts[-1] - starts[1]) / (len(starts) - 2)


def measured(pair: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every method with a pair of shapes, by label, batch size and context length."""
    dtype, gamma, tokens = getattr(torch, options.dtype), options.gamma, 32 if options.quick else 128
    positions = max(options.context) + 2 * tokens + 64
    sizes = [SHAPES[shape] for shape in pair.split("-")]
    models = [random_llama(size, positions, options.device, dtype).eval().requires_grad_(False) for size in sizes]
    vocabulary, results = models[0].config.vocab_size, dict[str, Any]()
    heads = PredictionHeads.from_lm_head(models[0].lm_head.weight.detach(), 4, 1).to(options.device).eval()
    tokens_T = torch.randint(vocabulary, (200_000,), generator=torch.Generator().manual_seed(0)).numpy()
    table = BigramTable.from_documents([tokens_T], vocabulary)
    for kind in ("plain", *(["graphs"] if options.graphs else [])):
        target, drafter = (wrap_model(model, graphs=kind == "graphs") for model in models)
        for label, settings in METHODS.items():
            settings = {"gamma": gamma} if label == "speculative" else settings
            # With --graphs, plain forwards are measured at one size only, since launches dominate their time.
            first = slice(1 if options.graphs and kind == "plain" else None)
            for batch in options.batch[first]:
                for context in options.context[first]:
                    method = build_method(label, Parts(drafter, heads, table), Sampling(), **settings)
                    if label != "autoregressive":
                        method = Method(method.proposer, FixedPattern())
                    steps_of(target, method, context, batch, Limits(tokens))
                    new_tokens, steps, seconds = steps_of(target, method, context, batch, Limits(tokens))
                    profile = StepProfile(target.device)
                    steps_of(target, method, context, batch, Limits(tokens), profile)
                    busy = BusyProfile(target.device)
                    with busy:
                        steps_of(target, method, context, batch, Limits(tokens // 4), busy)
                    row = {"tokens_per_second": new_tokens / seconds, "us_per_step": 1e6 * seconds / steps}
                    row |= {"tokens_per_step": new_tokens / steps / batch, "phases_us": profile.summary()}
                    row["busy_us"] = busy.summary()
                    name = f"{label} {kind} batch {batch} context {context}"
                    results[name] = row
                    phases = "  ".join(
                        f"{phase} {value:.0f}" + (f" ({row['busy_us'][phase]:.0f})" if phase in row["busy_us"] else "")
                        for phase, value in profile.summary().items()
                    )
                    print(f"{pair:8s} {name:48s} {row['tokens_per_second']:8.1f} tokens/s  us (busy): {phases}")
    for context in options.context if options.peer else ():
        assisted(*models, context, 16, gamma)
        results[f"assisted context {context}"] = row = {"us_per_step": assisted(*models, context, tokens, gamma)}
        print(f"{pair:8s} transformers, assisted, context {context}: {row['us_per_step']:.0f} us per step")
    return results


def main() -> None:
    parser = parser_of(__doc__, "decode 32 tokens per row", gamma=4)
    parser.add_argument("pairs", nargs="+", metavar="TARGET-DRAFTER", help=f"shapes: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, nargs="+", default=[64], help="prompt lengths (default: 64)")
    parser.add_argument("--graphs", action="store_true", help="also measure replayed forwards (CUDA only)")
    parser.add_argument("--peer", action="store_true", help="also measure assisted generation of transformers")
    options = parser.parse_args()
    results = {}
    for pair in options.pairs:
        results[pair] = measured(pair, options)
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    settings = {"dtype": options.dtype, "gamma": options.gamma}
    finish({"shapes": results, **settings}, options.device)


if __name__ == "__main__":
    main()

"""What the benches share: shared data, command line, a quickstart's pair, random models, times in turns, bootstrap."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.prompts import load_prompts, stop_ids
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.recipes.commands.quickstart import resolve
from draftsmith.recipes.schema.evaluation import QuickstartRecipe
from draftsmith.recipes.schema.loading import parse_recipe, read_recipe
from draftsmith.recipes.session.machine import machine
from draftsmith.train.loop.fit import FitConfig, fit
from transformers import LlamaConfig, LlamaForCausalLM

SHARED = Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
SHAREGPT = SHARED / "sharegpt" / "sharegpt_v3_sample_800.json"
VICUNA = SHARED / "instruct" / "alpaca_eval" / "vicuna-7b-v1.3.json"
LLAMA = SHARED / "tokenizer" / "llama2c"
BOOTSTRAP = 2000


# --- command line and last line ---------------------------------------------------------------------------------------


def parser_of(doc: str | None, quick: str, pair: bool = False, **numbers: int) -> argparse.ArgumentParser:
    """A parser with `--quick`, whole numbers with these defaults and, if asked for, `--pair`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if pair:
        parser.add_argument("--pair", type=Path, default=Path("runs/quickstart"), help="a finished quickstart's folder")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def finish(results: Mapping[str, Any], device: str = "cpu") -> None:
    """Print the last line: the results as one JSON object, with the machine."""
    print(json.dumps({**results, "machine": machine(device)}))


# --- models -----------------------------------------------------------------------------------------------------------


def heldout_prompts(source: str | Path, template: str, tokenizer: Any, count: int) -> list[list[int]]:
    """Ids of the first prompts of a file, of up to 128 tokens."""
    return [ids for _, ids in load_prompts(str(source), template, tokenizer, count, 128)]


class Pair:
    """A quickstart's models and held-out prompts."""

    def __init__(self, folder: Path, prompts: int) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer(str(folder / "target"))
        self.target_model, self.drafter_model = (load_model(str(folder / name)) for name in ("target", "drafter"))
        self.target, self.drafter = wrap_model(self.target_model), wrap_model(self.drafter_model)
        self.stop = tuple(stop_ids(self.tokenizer))
        self.prompts = heldout_prompts(folder / "corpus" / "heldout.jsonl", "chatml", self.tokenizer, prompts)

    @cached_property
    def parts(self) -> Parts:
        """Drafter, heads and table."""
        return Parts(self.drafter, load_heads(self.folder / "heads"), BigramTable.load(self.folder / "table"))


def random_llama(
    sizes: tuple[int, int, int, int, int],
    positions: int = 2048,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A Llama with random weights, made on the device; sizes: hidden, MLP, layers, heads, vocabulary."""
    hidden, intermediate, layers, heads, vocabulary = sizes
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


# --- training on a quickstart -----------------------------------------------------------------------------------------


def quickstart_of(pair: Path) -> Any:
    """The recipes of a finished quickstart."""
    found = parse_recipe(read_recipe(pair / "quickstart.yaml"), "quickstart")
    assert isinstance(found, QuickstartRecipe)
    return resolve(found)


def train_steps(task: Any, data: Any, section: Any, steps: int, rate: float, seed: int) -> Any:
    """What `fit` measures in so many steps, with the other settings of a recipe's `train` section."""
    config = FitConfig(
        steps, section.global_batch, section.micro_batch, rate, section.schedule, section.warmup,
        betas=(section.betas[0], section.betas[1]), log_every=steps, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as state:
        return fit(task, data, config, state)


def per_step(counts: np.ndarray) -> float:
    """Tokens per step over seeds and prompts; counts [seeds, prompts, tokens and steps …] or [prompts, …]."""
    tokens, steps = counts.reshape(-1, counts.shape[-1]).sum(0)[:2]
    return float(tokens / steps)


def bootstrap_draws(seeds: int, prompts: int) -> Iterator[Any]:
    """Indices of seeds and prompts drawn together, 2,000 times."""
    rng = np.random.default_rng(0)
    for _ in range(BOOTSTRAP):
        yield np.ix_(rng.integers(seeds, size=seeds), rng.integers(prompts, size=prompts))


def interval_of(values: list[float]) -> list[float]:
    """95 %."""
    return [float(value) for value in np.quantile(values, [0.025, 0.975])]


# --- times and memory -------------------------------------------------------------------------------------------------


class Timed(NamedTuple):
    """A call's result, and its seconds by the clock and of processors."""

    result: Any
    wall: float
    cpu: float


def processor_seconds() -> float:
    """Processor seconds of this process and of those that have ended for it."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(job: Callable[[], Any]) -> Timed:
    """A call and its times."""
    start, used = time.perf_counter(), processor_seconds()
    result = job()
    return Timed(result, time.perf_counter() - start, processor_seconds() - used)


def in_turns(jobs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Timed]]:
    """Every job once a round."""
    found: dict[str, list[Timed]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            found[name].append(timed(job))
    return found


def against_tokenizers(
    raw: Mapping[str, Callable[[], int]], ours: str, job: Callable[[], int], rounds: int
) -> tuple[str, dict[str, float], dict[str, float]]:
    """Ours against the fastest raw tokenizer, each a function that gives its number of tokens; in turns.

    Returns:
        The fastest tokenizer, medians of the ratios (`time`, `cpu`: raw over ours; `rate`: tokens a second, ours over
        raw), and millions of tokens a second by name.
    """
    times = in_turns({**raw, ours: job}, rounds)
    wall = {name: statistics.median(each.wall for each in series) for name, series in times.items()}
    tokens = {name: series[-1].result for name, series in times.items()}
    fastest = min(raw, key=lambda name: wall[name])
    pairs = list(zip(times[fastest], times[ours], strict=True))
    ratios = {kind: statistics.median(getattr(a, f) / getattr(b, f) for a, b in pairs)
              for kind, f in (("time", "wall"), ("cpu", "cpu"))}  # fmt: skip
    ratios["rate"] = ratios["time"] * tokens[ours] / tokens[fastest]
    rates = {name: tokens[name] / wall[name] / 1e6 for name in times}
    for name, rate in rates.items():
        print(f"{name:14s} {wall[name]:6.2f} s   {rate:5.2f} M tokens/s")
    return fastest, ratios, rates


def status_bytes(name: str) -> int:
    """A size of this process, as /proc/self/status has it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_above(job: Callable[[], Any]) -> tuple[Timed, int]:
    """A call, and the most bytes that it takes above what this process holds."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    found = timed(job)
    return found, status_bytes("VmHWM") - before

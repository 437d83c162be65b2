"""Shared code of the benchmarks: data paths, command line, random models and timing. Pydantic is not required."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from children import kilobytes
from draftsmith.recipes.session.machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

SHARED = Path(os.environ.get("DRAFTSMITH_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
SHAREGPT = SHARED / "sharegpt" / "sharegpt_v3_sample_800.json"
VICUNA = SHARED / "instruct" / "alpaca_eval" / "vicuna-7b-v1.3.json"
LLAMA = SHARED / "tokenizer" / "llama2c"


def parser_of(doc: str | None, quick: str, pair: bool = False, **numbers: int) -> argparse.ArgumentParser:
    """Return an argument parser with `--quick`, optionally `--pair`, and integer options with defaults `numbers`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if pair:
        parser.add_argument("--pair", type=Path, default=Path("runs/quickstart"), help="finished quickstart (folder)")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def finish(results: Mapping[str, Any], device: str = "cpu") -> None:
    """Print the results and the machine as one JSON object, the last line of the output."""
    print(json.dumps({**results, "machine": machine(device)}))


def random_llama(
    sizes: tuple[int, ...],
    positions: int = 2048,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a Llama with random weights, created on the device.

    `sizes` are hidden size, MLP width, layers, heads, vocabulary size and, optionally, key-value heads.
    """
    hidden, intermediate, layers, heads, vocabulary, *fewer = sizes
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=(*fewer, heads)[0], max_position_embeddings=positions,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


class Timed(NamedTuple):
    """Result of a call, with its wall time and processor time in seconds."""

    result: Any
    wall: float
    cpu: float


def processor_seconds() -> float:
    """Return the CPU seconds of this process and its finished child processes."""
    return sum(sum(resource.getrusage(usage_of)[:2]) for usage_of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(job: Callable[[], Any]) -> Timed:
    start, used = time.perf_counter(), processor_seconds()
    result = job()
    return Timed(result, time.perf_counter() - start, processor_seconds() - used)


def in_turns(jobs: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 0) -> dict[str, list[Timed]]:
    """Run all jobs once per round and return their times, without those of the first `warm` rounds."""
    times: dict[str, list[Timed]] = {name: [] for name in jobs}
    for number in range(warm + rounds):
        for name, job in jobs.items():
            result = timed(job)
            if number >= warm:
                times[name].append(result)
    return times


def medians(times: Mapping[str, Sequence[Timed]]) -> dict[str, float]:
    """Return the median wall time of each job."""
    return {name: statistics.median(run.wall for run in series) for name, series in times.items()}


def against_tokenizers(
    raw: Mapping[str, Callable[[], int]], job_name: str, job: Callable[[], int], rounds: int
) -> tuple[str, dict[str, float], dict[str, float]]:
    """Compare `job` with the fastest tokenizer; every function returns its number of tokens, and runs are interleaved.

    Returns:
        The name of the fastest tokenizer, the median ratios (`time` and `cpu`: tokenizer / job; `rate`: tokens per
        second, job / tokenizer), and millions of tokens per second by name.
    """
    times = in_turns({**raw, job_name: job}, rounds)
    wall, tokens = medians(times), {name: series[-1].result for name, series in times.items()}
    fastest = min(raw, key=lambda name: wall[name])
    pairs = list(zip(times[fastest], times[job_name], strict=True))
    ratios = {"time": statistics.median(a.wall / b.wall for a, b in pairs)}
    ratios |= {"cpu": statistics.median(a.cpu / b.cpu for a, b in pairs)}
    ratios["rate"] = ratios["time"] * tokens[job_name] / tokens[fastest]
    rates = {name: tokens[name] / wall[name] / 1e6 for name in times}
    for name, rate in rates.items():
        print(f"{name:14s} {wall[name]:6.2f} s   {rate:5.2f} M tokens/s")
    return fastest, ratios, rates


def peak_above(job: Callable[[], Any]) -> tuple[Timed, int]:
    """Run a job; return its result with times, and its peak memory in bytes minus its memory at the start."""
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    result = timed(job)
    return result, 1024 * (kilobytes("VmHWM") - before)


def own_process(function: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Run a function of this folder, given as `module.function`, in a separate process; return its result."""
    module, _, name = function.partition(".")
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from {module} import {name}; "
    code += f"print(json.dumps({name}(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    variables = {**os.environ, **(environment or {})}
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    return json.loads(process.stdout.splitlines()[-1])

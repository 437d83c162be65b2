"""Compare forward passes with the limits of memory bandwidth and compute.

    python tests/bench/floor.py FOLDER [--runs 40] [--context 300] [--dtypes float32 bfloat16] [--startup]
                                  [--rows 1 4 8 16] [--processor haswell]

Runs on a CPU, for several numbers of rows, ragged rows and prefill. The lower bound for few rows is the time to read
the weights of a forward pass at the rate of summing a tensor of half a GiB. For a prompt, it is the time of the matrix
products at the rate of one large product. Forward passes process a chain of tokens after `--context` cached tokens;
runs are interleaved, and medians are reported. DRAFTSMITH_NATIVE=0 disables the compiled functions. `ragged_share` is
the rate of sixteen rows of different lengths over that of sixteen rows of their mean length. To emulate a processor
with AVX2 but without AVX-512, use `--processor haswell` and set ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2 and
MKL_ENABLE_INSTRUCTIONS=AVX2. The last line of the output is one JSON object.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import finish, in_turns, medians, parser_of
from draftsmith.checkpoints.verify.model_files import meta_model
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.models.products import native
from draftsmith.decode.tree import Tree

ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 32, 64)
BATCH = 16
PROMPT = 512
COMMANDS = ("--version", "recipes ls", "corpora", "export", "doctor", "evaluate --help", "train --help")


def rates(dtype: torch.dtype, runs: int) -> tuple[float, float]:
    """Return the memory bandwidth in bytes per second, and the FLOP per second of a large matrix product."""
    memory = torch.ones(1 << 27)
    left, right = torch.ones(PROMPT, 4096, dtype=dtype), torch.ones(4096, 4096, dtype=dtype)
    jobs = {"read": memory.sum, "product": lambda: left @ right}
    seconds = in_turns(jobs, runs, warm=2)
    best = {name: min(run.wall for run in series) for name, series in seconds.items()}
    return memory.numel() * 4 / best["read"], 2.0 * PROMPT * right.numel() / best["product"]


@torch.inference_mode()
def of_format(folder: str, name: str, runs: int, context: int, numbers: Sequence[int] | None) -> dict[str, Any]:
    """Measure forward passes in one dtype; `numbers` restricts the benchmark to these row counts (None: no limit)."""
    model = load_model(folder, dtype=name)
    dtype, width = model.dtype, 1 if name == "int8" else model.dtype.itemsize
    shape = meta_model(model.config)
    output = shape.get_output_embeddings().weight
    weights = output.numel() + sum(weight.numel() for weight in shape.get_decoder().layers.parameters())
    wrapped = wrap_model(model.requires_grad_(False))
    bandwidth, peak = rates(torch.float32 if numbers else dtype, runs)
    tokens = torch.randint(0, wrapped.vocab_size, (1, context + max(ROWS)))
    cache = wrapped.new_cache(1, tokens.shape[1])
    wrapped.extend(cache, tokens[:, :context])
    cache.set_lengths([context])
    spread = [context - context // 2 + context * row // (BATCH - 1) for row in range(BATCH)]
    caches = {"even": [sum(spread) // BATCH] * BATCH, "ragged": spread}
    batch = wrapped.new_cache(BATCH, max(spread) + 1)
    roots = torch.randint(0, wrapped.vocab_size, (BATCH, 1))
    prompt = torch.randint(0, wrapped.vocab_size, (1, PROMPT))
    prompt_cache = wrapped.new_cache(1, PROMPT)

    def run_chain(rows: int) -> None:
        wrapped.logits(wrapped.extend(cache, tokens[:, context : context + rows], Tree.chain(rows - 1)))

    def run_batch(lengths: list[int]) -> None:
        batch.set_lengths(lengths)
        wrapped.logits(wrapped.extend(batch, roots))

    def run_prefill() -> None:
        prompt_cache.set_lengths([0])
        wrapped.logits(wrapped.extend(prompt_cache, prompt)[:, -1])

    jobs: dict[Any, Any] = {rows: partial(run_chain, rows) for rows in numbers or ROWS}
    if not numbers:
        jobs |= {kind: partial(run_batch, lengths) for kind, lengths in caches.items()} | {"prompt": run_prefill}
    seconds = medians(in_turns(jobs, runs, warm=3))
    floor = weights * width / bandwidth
    work = 2.0 * PROMPT * sum(weight.numel() for weight in model.get_decoder().layers.parameters())
    milliseconds = {rows: 1e3 * seconds[rows] for rows in numbers or ROWS}
    result: dict[str, Any] = {
        "bandwidth_gb_per_sec": bandwidth / 1e9,
        "floor_ms": 1e3 * floor,
        "forward_ms": milliseconds,
        "floor_ratio": {rows: value / floor / 1e3 for rows, value in milliseconds.items()},
    }
    print(f"{name}: reads {bandwidth / 1e9:.1f} GB/s, floor {1e3 * floor:.1f} ms")
    print(f"{'rows':>4} {'ms':>8} {'floors':>7} {'ratio':>6}")
    for rows, value in milliseconds.items():
        ratio = value / next(iter(milliseconds.values()))
        print(f"{rows:>4} {value:>8.1f} {value / floor / 1e3:>7.2f} {ratio:>6.2f}")
    if not numbers:
        result["ragged_share"] = seconds["even"] / seconds["ragged"]
        result["prefill_tokens_per_sec"] = PROMPT / seconds["prompt"]
        result["prefill_share_of_peak"] = work / seconds["prompt"] / peak
        print(f"ragged {result['ragged_share']:.2f}, prefill {result['prefill_tokens_per_sec']:.0f} tokens/s", end=", ")
        print(f"{result['prefill_share_of_peak']:.2f} of the peak")
    return result


def startup() -> dict[str, float]:
    """Return the seconds of each command in `COMMANDS`, the best of three runs."""
    seconds = {}
    for command in COMMANDS:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "draftsmith", *command.split()], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        seconds[command] = min(times)
        print(f"{command:20} {seconds[command]:.2f} s")
    return seconds


def main() -> None:
    parser = parser_of(__doc__, "run each measurement five times", runs=40, context=300)
    parser.add_argument("model", help="model folder or GGUF file")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--rows", type=int, nargs="+", help="measure only these numbers of rows")
    parser.add_argument("--processor", help="compile the functions for this processor, e.g. haswell")
    parser.add_argument("--startup", action="store_true", help="also time commands that do not decode")
    args = parser.parse_args()
    runs = 5 if args.quick else args.runs
    if args.processor:
        native._OPTIONS = (*native._OPTIONS, f"-march={args.processor}")
    results: dict[str, Any] = {name: of_format(args.model, name, runs, args.context, args.rows) for name in args.dtypes}
    if args.startup:
        results["startup_sec"] = startup()
    finish(results)


if __name__ == "__main__":
    main()

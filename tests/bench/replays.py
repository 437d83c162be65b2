"""Compare replayed forward passes on a GPU with the time to read their weights, and list their kernels.

    python tests/bench/replays.py 7b 8b 68m [--rows 1 5 16 64] [--context 256 2048] [--kernels] [--dtype bfloat16]

Models have real shapes and random weights; the batch size is 1. `floor` is the time to read the bytes of the weights at
the rate of summing one GiB. `us` is the median device time of a replay with logits, measured with CUDA events.
`host_us` is the time until the host has queued the forward pass. `--kernels` prints the kernels that take the most
time. DRAFTSMITH_NATIVE=0 disables the project's own kernels. The last line of the output is one JSON object.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import finish, parser_of, random_llama
from draftsmith.decode.models.kv_cache import KVCache
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.tree import Tree
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile


def device_time(call: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Return the median microseconds of a call on the device, and of the host until it has queued all kernels."""
    times, queued = [], []
    for _ in range(runs + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        host_start = time.perf_counter()
        call()
        queued.append(1e6 * (time.perf_counter() - host_start))
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times[3:]), statistics.median(queued[3:])


def kernels(call: Callable[[], Any], runs: int = 3) -> dict[str, tuple[float, float]]:
    """Return the microseconds and number of launches of each kernel in a call, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    times = {event.key[:70]: (event.device_time_total / runs, event.count / runs) for event in profiled.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1][0]))


@torch.inference_mode()
def of_shape(shape: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Measure replayed forward passes by context length and number of rows; `rate` is the bandwidth in bytes per µs."""
    positions = max(options.context) + max(options.rows) + 64
    llama = random_llama(SHAPES[shape], positions, "cuda", getattr(torch, options.dtype)).eval().requires_grad_(False)
    weights = sum(parameter.nbytes for parameter in llama.model.layers.parameters()) + llama.lm_head.weight.nbytes
    model, floor, results = wrap_model(llama, graphs=True), weights / rate, dict[str, Any]()
    tokens = torch.randint(SHAPES[shape][4], (1, positions), device="cuda")

    def forward(cache: KVCache, tree: Tree) -> None:
        model.logits(model.extend(cache, tokens[:, : tree.nodes], tree))

    for context in options.context:
        cache = model.new_cache(1, positions)
        model.extend(cache, tokens[:, :context])
        cache.set_lengths([context])
        for rows in options.rows:
            call = partial(forward, cache, Tree.chain(rows - 1).to(model.device))
            microseconds, queued = device_time(call, options.runs)
            result = {"us": microseconds, "floor_us": floor, "ratio": microseconds / floor, "host_us": queued}
            results[f"{shape} context {context} rows {rows}"] = result
            columns = "  ".join(f"{name} {value:.2f}" for name, value in result.items())
            print(f"{shape:5} context {context:5} rows {rows:3}  {columns}")
            if options.kernels:
                for name, (duration, count) in list(kernels(call).items())[:14]:
                    print(f"    {duration:8.0f} us {count:6.1f} x  {name}")
    return results


def main() -> None:
    parser = parser_of(__doc__, "run each measurement five times", runs=30)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--kernels", action="store_true", help="print the kernels that take the most time")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    options.runs = 5 if options.quick else options.runs
    memory = torch.ones(1 << 28, device="cuda")
    rate = memory.nbytes / device_time(memory.sum, options.runs)[0]
    print(f"reads {rate / 1e6:.2f} TB/s")
    results: dict[str, Any] = {"bytes_per_us": rate}
    for shape in options.shapes:
        results |= of_shape(shape, options, rate)
    finish(results, "cuda")


if __name__ == "__main__":
    main()

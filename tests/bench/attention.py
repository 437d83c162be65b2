"""Microseconds of attention by kernel and shape, for few queries behind a context, as a step of decoding asks.

    python tests/bench/attention.py [--device cuda] [--dtype bfloat16] [--runs 50]

`grouped`: query heads that share keys by `enable_gqa`; `folded`: as rows of one head. All with a mask, as trees have;
a kernel that cannot serve a shape is null. With versions and the device. The last line is one JSON object.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from common import finish, parser_of
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS = {"7b": (32, 32), "8b": (32, 8)}
"""Query heads and key heads, 128 wide."""
CONTEXTS, QUERIES = (256, 2048, 8192), (1, 5, 16, 64)


def microseconds(call: Callable[[], Any], device: str, runs: int) -> float | None:
    """Median time; None: the kernel refuses."""
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that tell why a kernel refuses
            for run in range(runs + 3):
                start = time.perf_counter()
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                if run >= 3:
                    found.append(time.perf_counter() - start)
    except RuntimeError:
        return None
    return 1e6 * statistics.median(found)


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__, "one context", runs=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    dtype, found = getattr(torch, args.dtype), {}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    print(versions)
    for model, (heads, shared) in HEADS.items():
        for context in CONTEXTS[:1] if args.quick else CONTEXTS:
            for queries in QUERIES[:2] if args.quick else QUERIES:
                made = {"dtype": dtype, "device": args.device}
                query = torch.randn(1, heads, queries, 128, **made)
                key, value = torch.randn(2, 1, shared, context, 128, **made)
                mask = torch.zeros(1, 1, queries, context, **made)
                rows, wide = query.reshape(1, shared, -1, 128), mask.repeat(1, 1, heads // shared, 1)
                attend = F.scaled_dot_product_attention
                calls = {"folded": partial(attend, rows, key, value, attn_mask=wide)}
                if heads != shared:
                    calls["grouped"] = partial(attend, query, key, value, attn_mask=mask, enable_gqa=True)
                for way, call in calls.items():
                    for name, kernel in KERNELS.items():
                        with sdpa_kernel(kernel):
                            time_of = microseconds(call, args.device, 3 if args.quick else args.runs)
                        found[f"{model} {way} {name} context {context} queries {queries}"] = time_of
                        shown = "-" if time_of is None else f"{time_of:.0f} us"
                        print(f"{model} {way:8} {name:10} context {context:5} queries {queries:3} {shown:>10}")
    finish({"attention_us": found, "versions": versions}, args.device)


if __name__ == "__main__":
    main()

"""What reading a long prompt takes, in time and memory: in parts as the engine reads it, at once, and by transformers.

    python tests/bench/long_prompts.py [--lengths 2048 8192 16384] [--runs 2]

Random weights of the shape that SmolLM2-135M has, float32, on a CPU; in turns, medians. Memory is the most that the
process held above what it held before, keys and values included. The last line is one JSON object.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import finish, parser_of, peak_above, random_llama
from draftsmith.decode import engine
from draftsmith.decode.models.loading import wrap_model

SHAPE = (576, 1536, 30, 9, 49152, 3)
ALL = 1 << 30


@torch.inference_mode()
def of_length(model: Any, length: int, runs: int) -> dict[str, Any]:
    """Seconds and megabytes of each way."""
    target, ids_1T = wrap_model(model.requires_grad_(False), check=False), torch.randint(SHAPE[4], (1, length))
    parts = engine.READ_AT_ONCE

    def read(at_once: int) -> None:
        engine.READ_AT_ONCE = at_once
        engine.prefill(target, target.new_cache(1, length), ids_1T, [length])

    ways: dict[str, Callable[[], Any]] = {
        "parts": lambda: read(parts),
        "at once": lambda: read(ALL),
        "transformers": lambda: model(ids_1T[:, :-1], use_cache=True, logits_to_keep=1).past_key_values,
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(runs + 1):
        for name, way in ways.items():
            timed, held = peak_above(way)
            if number:  # the first prepares the others
                found[name].append((timed.wall, held))
    engine.READ_AT_ONCE = parts
    numbers = {
        name: {"sec": statistics.median(t for t, _ in each), "mb": statistics.median(m for _, m in each) / 1e6}
        for name, each in found.items()
    }
    print(f"{length:>7}", " | ".join(f"{one['sec']:7.2f} s {one['mb']:6.0f} MB" for one in numbers.values()))
    return numbers


def main() -> None:
    parser = parser_of(__doc__, "one run of 512 tokens", runs=2)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 16384], help="of the prompt, in tokens")
    args = parser.parse_args()
    lengths, runs = ([512], 1) if args.quick else (args.lengths, args.runs)
    model = random_llama(SHAPE, max(lengths)).eval()
    print(" tokens  in parts, at once, transformers")
    finish({"prompts": {length: of_length(model, length, runs) for length in lengths}})


if __name__ == "__main__":
    main()

"""What reading a long prompt takes, in time and memory: in parts as the engine reads it, at once, and by transformers.

    python tests/bench/long_prompts.py [--lengths 2048 8192] [--runs 2]

Random weights of the shape that SmolLM2-135M has, float32, on a CPU; each way in a process of its own, medians of
`--runs`. Memory is the most that the process held above what it held before, keys and values included. The last line
is one JSON object.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import finish, own_process, parser_of

WAYS = ("parts", "at once", "transformers")


def main() -> None:
    parser = parser_of(__doc__, "one run of 512 tokens", runs=2)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="of the prompt, in tokens")
    args = parser.parse_args()
    lengths, runs = ([512], 1) if args.quick else (args.lengths, args.runs)
    print(" tokens " + " | ".join(f"{way:>20}" for way in WAYS))
    found: dict[int, dict[str, Any]] = {}
    for length in lengths:
        found[length] = {}
        for way in WAYS:
            each = [own_process("children.read_prompt", way, length) for _ in range(runs)]
            found[length][way] = {key: statistics.median(one[key] for one in each) for key in ("sec", "mb")}
        shown = (f"{one['sec']:8.2f} s {one['mb']:6.0f} MB" for one in found[length].values())
        print(f"{length:>7}", " | ".join(shown))
    finish({"prompts": found})


if __name__ == "__main__":
    main()

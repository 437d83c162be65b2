"""What a row more costs: a model's forward of few rows with our compiled products, and with the library's.

    python tests/bench/products.py FOLDER [--runs 40] [--context 300] [--dtype float32]

On a CPU; forwards of a chain of tokens after `--context` cached ones, in turns; medians in milliseconds.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from common import finish, in_turns, medians, parser_of
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.models.products.native import compiled, library_products
from draftsmith.decode.tree import Tree

ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 21)


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__, "ten runs of each", runs=40, context=300)
    parser.add_argument("model", help="a model's folder or GGUF file")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    if compiled() is None:
        raise SystemExit("there are no compiled products here: no C compiler, or DRAFTSMITH_NATIVE=0")
    model = wrap_model(load_model(args.model, dtype=getattr(torch, args.dtype)))
    tokens = torch.randint(0, model.vocab_size, (1, args.context + max(ROWS)))
    cache = model.new_cache(1, tokens.shape[1])
    model.extend(cache, tokens[:, : args.context])
    cache.set_lengths([args.context])

    def forward(rows: int, ours: bool) -> None:
        with nullcontext() if ours else library_products():
            model.logits(model.extend(cache, tokens[:, args.context : args.context + rows], Tree.chain(rows - 1)))

    jobs = {f"{name} {rows}": partial(forward, rows, name == "ours") for rows in ROWS for name in ("library", "ours")}
    seconds = medians(in_turns(jobs, 10 if args.quick else args.runs, warm=3))
    found = {name: {rows: 1e3 * seconds[f"{name} {rows}"] for rows in ROWS} for name in ("library", "ours")}
    print(f"{'rows':>4} {'library':>8} {'ours':>8} {'ratio':>6}")
    for rows in ROWS:
        library, ours = found["library"][rows], found["ours"][rows]
        print(f"{rows:>4} {library:>8.1f} {ours:>8.1f} {ours / library:>6.2f}")
    finish({"rows": found, "dtype": args.dtype})


if __name__ == "__main__":
    main()

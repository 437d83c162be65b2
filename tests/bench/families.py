"""What our forward of a family's layers costs beside transformers' over the same weights, on a CPU.

    python tests/bench/families.py [--runs 15] [--context 300] [--layers 12]

Random weights of the shape that Qwen2.5-0.5B has, with fewer layers, as each family arranges it: one, five and sixteen
new tokens behind `--context` others, and a prompt of 512; all in turns, medians. The last line is one JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import finish, in_turns, medians, parser_of
from draftsmith.decode.models.base import LanguageModel
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.models.products.weights import FAMILIES
from draftsmith.decode.tree import Tree
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 32000, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "head_dim": 64,
    "query_pre_attn_scalar": 64,
}  # fmt: skip
WHOLE = ("gpt2", "gpt_neox", "opt")
"""Without heads of keys that several queries share; their MLPs have no gate, and so as many numbers with half as much
more width."""
ROWS = (1, 5, 16)
PROMPT = 512


def jobs_of(model: LanguageModel, context: int) -> dict[Any, Callable[[], None]]:
    """What is timed of one model."""
    tokens = torch.randint(0, model.vocab_size, (1, max(context + max(ROWS), PROMPT)))
    cache, whole = model.new_cache(1, tokens.shape[1]), model.new_cache(1, PROMPT)
    model.extend(cache, tokens[:, :context])
    cache.set_lengths([context])

    def few(rows: int) -> None:
        model.logits(model.extend(cache, tokens[:, context : context + rows], Tree.chain(rows - 1)))

    def read() -> None:
        model.logits(model.extend(whole, tokens[:, :PROMPT])[:, -1])

    return {rows: partial(few, rows) for rows in ROWS} | {"prompt": read}


@torch.inference_mode()
def of_family(name: str, layers: int, runs: int, context: int) -> dict[str, Any]:
    """Milliseconds of both forwards, and how many times faster ours is."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": layers}
    if name in WHOLE:
        width = shape["intermediate_size"] * 3 // 2
        shape = {key: value for key, value in shape.items() if key not in ("num_key_value_heads", "head_dim")}
        shape |= {"intermediate_size": width, "n_inner": width, "ffn_dim": width, "word_embed_proj_dim": 896}
        shape |= {"bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape)).eval()
    both = {fast: jobs_of(wrap_model(model.requires_grad_(False), fast=fast), context) for fast in (True, False)}
    jobs = {(fast, what): job for fast, of_one in both.items() for what, job in of_one.items()}
    taken = medians(in_turns(jobs, runs, warm=3))
    found: dict[str, Any] = {}
    for what in (*ROWS, "prompt"):
        ours, theirs = taken[True, what], taken[False, what]
        found[str(what)] = {"ms": 1e3 * ours, "transformers_ms": 1e3 * theirs, "faster": theirs / ours}
    times = (f"{one['ms']:8.1f} {one['transformers_ms']:8.1f} {one['faster']:5.2f}" for one in found.values())
    print(f"{name:11}", " |".join(times))
    return found


def main() -> None:
    args = parser_of(__doc__, "two layers, three runs", runs=15, context=300, layers=12).parse_args()
    layers, runs = (2, 3) if args.quick else (args.layers, args.runs)
    print("family      " + " |".join(f"{what:>5} ms  theirs times" for what in (*map(str, ROWS), "prompt")))
    finish({"families": {name: of_family(name, layers, runs, args.context) for name in sorted(FAMILIES)}})


if __name__ == "__main__":
    main()

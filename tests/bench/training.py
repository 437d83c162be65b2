"""What a training step takes beside its matrix products measured bare, and how much of the device's peak that is.

    python tests/bench/training.py [--quick] [--rounds 5] [--only drafter heads] [--profile]

`68m`: cross entropy of Llama-68M's shape with 32,000 tokens; the others learn from a target of SmolLM2-135M's shape:
`drafter`, of four layers and 16,384 tokens of frozen embeddings, its distributions (`lk-lambda`), `heads` four Medusa
heads of one block and the target's projection, `eagle` three steps of EAGLE-3, both of 8,192 tokens. Random numbers, a
block of 2,048 tokens a step, of the 68M four, each of eight documents, half of it trained, AdamW, gradients clipped, as
`fit` makes a step; in bfloat16, as recipes train where the processor has it.

Every product of one step, those of attention's kernels included, is recorded with its shapes, types and layout, and
all are computed again on random numbers, in turn with whole steps: `share` is their time over the step's. `mfu` is
the step's FLOPs (torch's counter) a second over those of a large product. `--profile` also prints where a step's time
goes by operation. The last line is one JSON object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from common import finish, in_turns, medians, parser_of, random_llama
from draftsmith.checkpoints.heads.eagle import EagleHeads
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.data.blocks.packing import IGNORED, Batch
from draftsmith.decode.models.draft_vocabulary import keep_tokens
from draftsmith.train.loop.progress import peak_flops
from draftsmith.train.tasks.drafter import DrafterTask
from draftsmith.train.tasks.eagle import EagleTask
from draftsmith.train.tasks.heads import HeadsTask
from draftsmith.train.teachers.teacher import ModelTeacher
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

TARGET = (576, 1536, 30, 9, 49152, 3)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product", "linear")
CLIP = 1.0
BLOCKS = {"68m": 4}
"""Of a step, where it is more than one."""


class Products(TorchDispatchMode):
    """Counts of the products within it, by what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::").startswith(PRODUCTS):
            given = (
                tuple(map(_described, args)),
                tuple((name, _described(value)) for name, value in (kwargs or {}).items()),
            )
            self.found[(func, *given)] += 1
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    """A tensor's shape, strides and type; of anything else itself."""
    if isinstance(value, torch.Tensor):
        return _Given((tuple(value.shape), value.stride(), value.dtype))
    return tuple(value) if isinstance(value, list) else value


class _Given(tuple[Any, ...]):
    """How a tensor is laid out."""

    def made(self) -> torch.Tensor:
        shape, strides, dtype = self
        made = torch.empty_strided(shape, strides, dtype=dtype)
        return made.normal_() if dtype.is_floating_point else made.zero_()


def again(products: Counter[Any]) -> Callable[[], None]:
    """A call that computes all of them."""

    def made(value: Any) -> Any:
        return value.made() if isinstance(value, _Given) else value

    jobs = [
        (func, [made(arg) for arg in args], {name: made(value) for name, value in named}, count)
        for (func, args, named), count in products.items()
    ]

    @torch.no_grad()
    def run() -> None:
        for func, args, named, count in jobs:
            for _ in range(count):
                func(*args, **named)

    return run


def batch_of(vocab: int, tokens: int, blocks: int) -> Batch:
    """Blocks of eight documents, the second half of each trained."""
    tokens_BT = torch.randint(vocab, (blocks, tokens))
    places_BT = torch.arange(tokens).expand(blocks, -1)
    length = tokens // 8
    labels_BT = tokens_BT.masked_fill(places_BT % length < length // 2, IGNORED)
    return Batch(tokens_BT, labels_BT, places_BT % length, places_BT // length)


def task_of(kind: str, tokens: int, layers: int) -> Any:
    if kind == "68m":
        return DrafterTask(random_llama((768, 3072, 2, 12, 32000), tokens), None)
    target = random_llama((*TARGET[:2], layers, *TARGET[3:]), tokens, dtype=torch.bfloat16).requires_grad_(False)
    few = torch.arange(8192)
    if kind == "drafter":
        drafter = random_llama((*TARGET[:2], 4, *TARGET[3:]), tokens)
        keep_tokens(drafter, torch.arange(16384))
        drafter.model.embed_tokens.requires_grad_(False)
        drafter.lm_head.requires_grad_(False)
        return DrafterTask(drafter, None, {"lk-lambda": 1.0}, ModelTeacher(target))
    if kind == "heads":
        heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach().float(), 4, 1, "target")
        heads.propose(few)
        heads.attach(target.lm_head.weight)
        return HeadsTask(target, heads, None)
    eagle = EagleHeads.for_target(target.config, [1, layers // 2, layers - 2], few)
    eagle.attach(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    return EagleTask(target, eagle, None)


def measured(kind: str, tokens: int, layers: int, rounds: int, shown: bool) -> dict[str, float]:
    task = task_of(kind, tokens, layers)
    blocks = BLOCKS.get(kind, 1)
    batch, module = batch_of(32000, tokens, blocks), task.module.train()
    parameters = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums, counts = module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        (sums / counts).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with Products() as products:
        step()
    with FlopCounterMode(display=False) as counter:
        step()
    if shown:
        with profile() as seen:
            step()
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=16))
    times = medians(in_turns({"step": step, "products": again(products.found)}, rounds, warm=1))
    peak = peak_flops(torch.device("cpu"), torch.bfloat16)
    found = {
        "step_sec": times["step"],
        "products_sec": times["products"],
        "share": times["products"] / times["step"],
        "tokens_per_sec": blocks * tokens / times["step"],
        "mfu": counter.get_total_flops() / times["step"] / peak,
    }
    print(f"{kind:8}" + "".join(f"  {name} {value:.3f}" for name, value in found.items()))
    return found


def main() -> None:
    parser = parser_of(__doc__, "blocks of 256 tokens, targets of six layers, one round", rounds=5)
    kinds = ("68m", "drafter", "heads", "eagle")
    parser.add_argument("--only", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    args = parser.parse_args()
    tokens, layers, rounds = (256, 6, 1) if args.quick else (2048, TARGET[2], args.rounds)
    finish({"training": {kind: measured(kind, tokens, layers, rounds, args.profile) for kind in args.only}})


if __name__ == "__main__":
    main()

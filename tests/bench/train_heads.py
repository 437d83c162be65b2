"""Measure the loss of prediction heads: memory and time relative to a naive implementation, or a step on a GPU.

    python tests/bench/train_heads.py [--quick] [--hidden 768 4096] [--rounds 3]
    python tests/bench/train_heads.py --gpu-shape [--rounds 10]

Four heads, 2 x 2,048 tokens, a vocabulary of 32,000, float32 and random numbers. `naive` computes logits [B, T, K, V],
`F.cross_entropy` for each head (`F.kl_div` with soft targets: forward KL to the target's distributions) and autograd.
Memory is the peak of forward and backward pass beyond inputs and parameter gradients, in a separate process that has
run products of this size before, since libraries keep memory per thread, and that does not reuse freed buffers.
`loss_memory_ratio` divides the memory of `fused` by that of the naive logits, and `..._to_naive` by the memory of
`naive`; `..._without_features_gradient` excludes that gradient. Runs of both and of the matrix products only are
interleaved. `time_ratio` is the median of fused / naive, and `products_ratio` that of products / naive, a lower bound
for exact methods. Keys of the larger shapes end in their hidden size.

`--gpu-shape`: a Llama of the 7B shape with random weights in bfloat16 and four heads of one block in float32, trained
on 2 x 2,048 tokens per step with AdamW: tokens/s, peak memory, and the target's share of a step. The last line of the
output is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import finish, in_turns, medians, own_process, parser_of, peak_above, random_llama
from draftsmith.checkpoints.heads.files import PredictionHeads
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.losses.chunks import IGNORED, DenseTeacher
from draftsmith.train.losses.drafter import head_labels, heads_mixture
from draftsmith.train.tasks.heads import HeadsTask
from torch import Tensor

HEADS, BLOCKS, VOCAB = 4, 2, 32000
SHAPES = {  # hidden, MLP, layers, heads, vocabulary
    "7b": (4096, 11008, 32, 32, VOCAB),
    "tiny": (64, 128, 2, 4, 320),
}
NO_REUSE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
WEIGHTS = {"hard": {"cross-entropy": 1.0}, "soft": {"forward-kl": 1.0}}


@dataclass
class Inputs:
    """Inputs of the fused and the naive loss. Their gradients are cleared before every run."""

    features_XKD: Tensor
    projections: list[Tensor]
    labels_XK: Tensor
    teacher: DenseTeacher
    rows_XK: Tensor

    @classmethod
    def of(cls, hidden: int, tokens: int) -> Inputs:
        torch.manual_seed(0)
        positions = BLOCKS * tokens
        labels_BT = torch.randint(VOCAB, (BLOCKS, tokens))
        labels_XK = head_labels(labels_BT, torch.zeros_like(labels_BT), HEADS).flatten(0, 1)
        ahead_XK = torch.arange(positions)[:, None] + torch.arange(1, HEADS + 1)
        target_VD = torch.randn(VOCAB, hidden) * hidden**-0.5
        return cls(
            torch.randn(positions, HEADS, hidden).requires_grad_(),
            [target_VD.clone().requires_grad_() for _ in range(HEADS)],  # the heads' initial weights
            labels_XK,
            DenseTeacher(torch.randn(positions, hidden), target_VD),
            torch.where(labels_XK == IGNORED, -1, ahead_XK),
        )

    @property
    def leaves(self) -> list[Tensor]:
        return [self.features_XKD, *self.projections]

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def fused(inputs: Inputs, kind: str) -> float:
    """Run forward and backward pass of the fused loss; return the loss."""
    arguments = (inputs.features_XKD, inputs.projections, inputs.labels_XK)
    teacher_arguments = (inputs.teacher, inputs.rows_XK) if kind == "soft" else ()
    sums_K, counts_K = heads_mixture(WEIGHTS[kind], *arguments, *teacher_arguments)
    loss = (sums_K / counts_K).sum()
    loss.backward()
    return float(loss.detach())


def naive(inputs: Inputs, kind: str) -> float:
    """Run forward and backward pass of a direct implementation; return the loss."""
    positions = len(inputs.labels_XK)
    features_BTKD = inputs.features_XKD.unflatten(0, (BLOCKS, positions // BLOCKS))
    logits_BTKV = torch.stack([features_BTKD[:, :, k] @ w_VD.T for k, w_VD in enumerate(inputs.projections)], dim=2)
    if kind == "soft":
        target_XV = (inputs.teacher.hidden_XE @ inputs.teacher.weight_VE.T).log_softmax(-1)
    loss = torch.zeros(())
    for k in range(HEADS):
        logits_XV, labels_X = logits_BTKV[:, :, k].flatten(0, 1), inputs.labels_XK[:, k]
        if kind == "hard":
            loss = loss + F.cross_entropy(logits_XV, labels_X, ignore_index=IGNORED)
        else:
            valid = labels_X != IGNORED
            log_probs_XV, target_log_probs_XV = logits_XV[valid].log_softmax(-1), target_XV[inputs.rows_XK[valid, k]]
            loss = loss + F.kl_div(log_probs_XV, target_log_probs_XV, reduction="batchmean", log_target=True)
    loss.backward()
    return float(loss.detach())


@torch.no_grad()
def products(inputs: Inputs, kind: str, chunk: int = 512) -> None:
    """Run only the matrix products of the loss and its gradients, into preallocated memory."""
    features_XD = inputs.features_XKD[:, 0].detach().contiguous()
    grad_VD = torch.zeros(VOCAB, hidden := features_XD.shape[1])
    out_CV, out_CD = torch.empty(chunk, VOCAB), torch.empty(chunk, hidden)
    for head, weight_VD in enumerate(inputs.projections):
        for hidden_CD in features_XD.split(chunk):
            rows = len(hidden_CD)
            logits_CV = torch.mm(hidden_CD, weight_VD.detach().T, out=out_CV[:rows])
            if kind == "soft" and head == 0:  # the target's logits, once for all heads
                torch.mm(hidden_CD, weight_VD.detach().T, out=out_CV[:rows])
            torch.mm(logits_CV, weight_VD.detach(), out=out_CD[:rows])
            grad_VD.addmm_(logits_CV.T, hidden_CD)


SIDES: dict[str, Callable[[Inputs, str], float]] = {"fused": fused, "naive": naive}


def memory_of(name: str, kind: str, hidden: int, tokens: int) -> dict[str, float]:
    """Return the peak bytes, seconds and loss of an implementation, measured in this process."""
    run, inputs = SIDES[name], Inputs.of(hidden, tokens)
    run(Inputs.of(8, 8), kind)  # libraries allocate their own memory once
    products(inputs, kind, BLOCKS * tokens)  # matrix libraries allocate memory per thread and product size
    times, peak = peak_above(lambda: run(inputs, kind))
    parameters = sum(weight.grad.nbytes for weight in inputs.projections if weight.grad is not None)
    return {"bytes": peak - parameters, "seconds": times.wall, "loss": times.result}


def compare_memory(hidden: int, tokens: int) -> dict[str, Any]:
    logits = BLOCKS * tokens * HEADS * VOCAB * 4
    features = BLOCKS * tokens * HEADS * hidden * 4
    print(f"hidden {hidden}: naive logits only {logits / 1e6:.0f} MB; features' gradient {features / 1e6:.0f} MB")
    peaks: dict[str, float] = {}
    for side, kind in (("fused", "hard"), ("naive", "hard"), ("fused", "soft")):
        run = own_process("train_heads.memory_of", side, kind, hidden, tokens, environment=NO_REUSE)
        peaks[f"{side}, {kind}"] = run["bytes"]
        print(f"  {side}, {kind:5} {run['bytes'] / 1e6:8.0f} MB  {run['seconds']:6.2f} s  loss {run['loss']:.5f}")
    return {
        "loss_memory_mb": {name: value / 1e6 for name, value in peaks.items()},
        "naive_logits_mb": logits / 1e6,
        "loss_memory_ratio": peaks["fused, hard"] / logits,
        "loss_memory_ratio_without_features_gradient": (peaks["fused, hard"] - features) / logits,
        "loss_memory_ratio_soft": peaks["fused, soft"] / logits,
        "loss_memory_ratio_to_naive": peaks["fused, hard"] / peaks["naive, hard"],
    }


def compare_time(hidden: int, tokens: int, rounds: int, warm: int) -> dict[str, Any]:
    inputs = Inputs.of(hidden, tokens)

    def job(run: Callable[[Inputs, str], Any], kind: str) -> None:
        inputs.clear()
        run(inputs, kind)

    sides = SIDES | {"products": products}
    jobs = {f"{side}, {kind}": partial(job, run, kind) for kind in WEIGHTS for side, run in sides.items()}
    times = in_turns(jobs, rounds, warm)
    seconds = medians(times)
    print(f"hidden {hidden}: seconds of forward and backward, medians of {rounds} rounds")
    for name, value in seconds.items():
        print(f"  {name:15} {value:7.2f}")

    def ratio(upper: str, lower: str) -> float:
        return statistics.median(a.wall / b.wall for a, b in zip(times[upper], times[lower], strict=True))

    return {
        "sec": seconds,
        "time_ratio": ratio("fused, hard", "naive, hard"),
        "products_ratio": ratio("products, hard", "naive, hard"),
        "time_over_products": ratio("fused, hard", "products, hard"),
        "soft_over_hard": ratio("fused, soft", "fused, hard"),
        "soft_over_products": ratio("fused, soft", "products, soft"),
        "time_ratio_soft": ratio("fused, soft", "naive, soft"),
    }


def on_processor(options: argparse.Namespace) -> dict[str, Any]:
    shapes = options.hidden or ([768] if options.quick else [768, 4096])
    tokens = options.tokens or (128 if options.quick else 2048)
    rounds, warm = (2 if options.quick else options.rounds), 1
    results: dict[str, Any] = {"heads": HEADS, "blocks": BLOCKS, "vocab_size": VOCAB, "block_tokens": tokens}
    results["rounds"] = rounds
    for hidden in shapes:
        measured = compare_memory(hidden, tokens) | compare_time(hidden, tokens, rounds, warm)
        suffix = "" if hidden == shapes[0] else f"_{hidden}"
        results |= {f"{key}{suffix}": value for key, value in measured.items()}
        times = f"time {measured['time_ratio']:.2f} x naive (products only {measured['products_ratio']:.2f})"
        print(f"hidden {hidden}: memory {measured['loss_memory_ratio']:.3f} x the naive logits, {times}")
    return results


def whole_step(shape: str, tokens: int, rounds: int, device: str) -> dict[str, Any]:
    """Measure training steps of heads on a random target, and the target's share of their time."""
    results: dict[str, Any] = {"shape": shape, "block_tokens": tokens, "blocks": BLOCKS, "heads": HEADS}
    target = random_llama(SHAPES[shape], tokens, device, torch.bfloat16)
    weight_VD = target.lm_head.weight.detach()
    tokens_BT = torch.randint(len(weight_VD), (BLOCKS, tokens), device=device)
    labels_BT = tokens_BT.clone()
    labels_BT[:, 0] = IGNORED
    positions_BT = torch.arange(tokens, device=device).expand(BLOCKS, -1)
    batch = Batch(tokens_BT, labels_BT, positions_BT, torch.zeros_like(tokens_BT))
    for objective, suffix in (("cross-entropy", ""), ("forward-kl", "_soft")):
        heads = PredictionHeads.from_lm_head(weight_VD, HEADS, 1, dtype=torch.float32)
        module: Any = HeadsTask(target, heads, None, objective={objective: 1.0}).module.to(device).train()
        parameters = [weight for weight in module.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def step(module: Any = module, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                sums_K, counts_K = module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
            (sums_K / counts_K).sum().backward()
            optimizer.step()

        def seconds(run: Callable[[], Any]) -> float:
            def waited() -> None:
                run()
                if device == "cuda":
                    torch.cuda.synchronize()

            return medians(in_turns({"": waited}, rounds, warm=2))[""]

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step_seconds = seconds(step)
        measured = {"tokens_per_sec": BLOCKS * tokens / step_seconds, "step_sec": step_seconds}
        if device == "cuda":
            measured["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        measured["target_share"] = seconds(partial(module.frozen_states, batch)) / step_seconds
        print(f"{shape}, {objective}: " + "   ".join(f"{key} {value:.3f}" for key, value in measured.items()))
        results |= {f"{key}{suffix}": value for key, value in measured.items()}
    return results


def main() -> None:
    parser = parser_of(__doc__, "use 2 x 128 tokens, hidden size 768 and two rounds", rounds=3)
    parser.add_argument("--hidden", type=int, nargs="+", help="hidden sizes (default: 768 4096)")
    parser.add_argument("--gpu-shape", action="store_true", help="measure a complete step on a CUDA device")
    parser.add_argument("--tokens", type=int, help="tokens per block")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cpu"
    if not options.gpu_shape:
        results = on_processor(options)
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and options.shape != "tiny":
            raise SystemExit("--gpu-shape requires a CUDA device, and none is available")
        tokens = options.tokens or (2048 if options.shape == "7b" else 64)
        results = whole_step(options.shape, tokens, options.rounds, device)
    finish(results, device)


if __name__ == "__main__":
    main()

"""The settings of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_MAY_CHANGE = {
    "micro_batch", "evaluate_every", "save_every", "log_every", "keep_checkpoints", "gradient_checkpointing",
    "keep_best", "deterministic", "on_bad_step", "max_norm",  # the last two are changed to resume after a bad step
}  # fmt: skip


def micro_steps(global_batch: int, micro_batch: int, processes: int) -> int:
    """Forwards of one process in a step. Raises ValueError: the global batch is no multiple of what the processes do at
    a time."""
    together = micro_batch * processes
    if global_batch % together:
        raise ValueError(
            f"global_batch {global_batch} cannot be split into micro_batch {micro_batch} × {processes} processes = "
            f"{together} blocks at a time; choose a multiple of {together}"
        )
    return global_batch // together


@dataclass(frozen=True)
class FitConfig:
    """How to train; what to train is the task's business."""

    steps: int
    """Optimizer steps."""
    global_batch: int
    """Blocks of a step, over all processes."""
    micro_batch: int
    """Blocks of one forward in one process; changes memory and speed, not the result."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    schedule: str = "cosine"
    """"cosine", "linear" or "constant" after the warm-up."""
    warmup: float = 0.03
    """Share of the steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Of matrices; biases and norms are not decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's mean and square."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0: never clipped."""
    precision: str = "no"
    """"no" (the weights' own type), "bf16" or "fp16" (automatic mixed precision)."""
    evaluate_every: int = 0
    """Steps between evaluations, the first before training; 0: only at the end."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    log_every: int = 1
    """Steps between lines of `log.jsonl`."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    seed: int = 0
    """Order of the blocks, and dropout."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    deterministic: bool = False
    """On CUDA only kernels that sum in a fixed order, as CPUs always do; a warning names an operation without one."""

    on_bad_step: str = "stop"
    """"stop", or "skip": leave the weights as they are and continue, 50 times in a row at most."""
    max_norm: float = 0.0
    """A gradient of a larger norm, before clipping, makes a bad step; 0: only one that is not finite."""
    keep_best: str | None = None
    """An evaluation's metric, more of which is better: the weights with the most of it are those that stay at the end.
    None: the last."""

    def fixed(self) -> dict[str, Any]:
        """The settings that a resumed run must share; the others change its memory, speed or reports alone."""
        return {name: value for name, value in asdict(self).items() if name not in _MAY_CHANGE}

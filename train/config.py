"""Settings of training runs, which recipe sections extend. This module imports neither torch nor pydantic."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

_MAY_CHANGE = {
    "micro_batch", "evaluate_every", "save_every", "log_every", "keep_checkpoints", "gradient_checkpointing",
    "keep_best", "on_bad_step", "max_norm",  # the last two are changed to resume after a bad step
}  # fmt: skip


def micro_steps(global_batch: int, micro_batch: int, processes: int) -> int:
    """Return the number of micro-batches per process and step. Raises ValueError if it is not an integer."""
    step_blocks = micro_batch * processes
    if global_batch % step_blocks:
        raise ValueError(
            f"global_batch {global_batch} cannot be split into micro_batch {micro_batch} × {processes} processes = "
            f"{step_blocks} blocks; choose a multiple of {step_blocks}"
        )
    return global_batch // step_blocks


def _limited(default: Any, **limits: float) -> Any:
    """Create a dataclass field with limits on its value (`ge`, `gt`, … as in pydantic), which recipes enforce."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of the training loop."""

    steps: int
    """Number of optimizer steps."""
    global_batch: int = _limited(128, ge=1)
    """Number of blocks per optimizer step, over all processes and micro-batches."""
    micro_batch: int = _limited(4, ge=1)
    """Number of blocks per forward pass of a process. It affects memory and speed, but not the result."""
    learning_rate: float = _limited(2e-5, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup: float = _limited(0.03, ge=0, lt=1)
    """Fraction of the steps during which the learning rate rises linearly from 0 to its peak."""
    weight_decay: float = _limited(0.0, ge=0)
    """Weight decay of AdamW, applied to matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's running averages of the gradient and its square."""
    clip_norm: float = _limited(1.0, ge=0)
    """Maximum gradient norm; 0 disables clipping."""
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"
    """Data type for automatic mixed precision; "no" disables it. Recipes with "auto" use bf16 if the hardware supports
    it natively, otherwise "no"."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass, which saves memory but takes about a third more time."""
    evaluate_every: int = _limited(200, ge=0)
    """Number of steps between evaluations on held-out data, starting before training. 0 evaluates only at the end."""
    save_every: int = _limited(200, ge=0)
    """Number of steps between checkpoints, and thus the most that a crash can lose. 0 saves only at the end."""
    keep_checkpoints: int = _limited(2, ge=1)
    """Number of most recent checkpoints to keep on disk, in addition to the best one."""
    log_every: int = _limited(10, ge=1)
    """Number of steps between log lines, which are also sent to trackers."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """Action if the loss or gradient is not finite, or the gradient norm exceeds `max_norm`: stop the run, or skip the
    step (at most 50 times in a row)."""
    max_norm: float = _limited(0.0, ge=0)
    """Maximum gradient norm before clipping, beyond which `on_bad_step` applies. 0 accepts every finite norm."""
    seed: int = 0
    """Random seed for the order of the data, dropout and initial weights."""
    keep_best: str | None = None
    """Evaluation metric that selects the best weights (higher is better). None keeps the last weights."""

    def resume_settings(self) -> dict[str, Any]:
        """Return the settings that must not change when a run resumes. All other settings may change."""
        return {name: value for name, value in asdict(self).items() if name not in _MAY_CHANGE}


@dataclass(frozen=True)
class Medusa2:
    """Settings for training a target jointly with its heads (Medusa-2: arXiv 2401.10774, section 2.2.2)."""

    heads_only: float = _limited(0.3, ge=0, lt=1)
    """Fraction of the run in which only the heads are trained (first stage)."""
    warmup: float = _limited(0.2, ge=0, lt=1)
    """Fraction of the run, at the start of the second stage, in which the weight of the heads' loss rises from 0."""
    heads_weight: float = _limited(0.2, gt=0)
    """Weight of the heads' losses in joint training."""
    label_weight: float = _limited(1.0, ge=0)
    """Weight of the target's own cross-entropy."""
    kl_weight: float = _limited(1.0, ge=0)
    """Weight of the KL divergence of the target from the original target."""
    rate: float = _limited(0.25, gt=0)
    """Ratio of the target's learning rate to the heads' learning rate."""

    def heads_loss_weight(self, progress: float) -> float:
        """Return the weight of the heads' losses: 1 in the first stage, then a sine ramp from 0 to `heads_weight`."""
        if progress < self.heads_only:
            return 1.0
        return self.heads_weight * math.sin(math.pi / 2 * self.warmup_share(progress))

    def warmup_share(self, progress: float) -> float:
        """Return the completed fraction of the second stage's warm-up, from 0 to 1."""
        if progress < self.heads_only:
            return 0.0
        return 1.0 if not self.warmup else min(1.0, (progress - self.heads_only) / self.warmup)


@dataclass(frozen=True)
class OnPolicy:
    """Settings for training on responses sampled from the drafter (DistillSpec: arXiv 2310.08461)."""

    share: float = _limited(0.5, gt=0, le=1)
    """Fraction of the blocks in a step whose responses are sampled from the drafter and scored by the target."""
    new_tokens: int = _limited(256, ge=1)
    """Maximum number of tokens of a sampled response, which also cannot exceed the text that it replaces."""
    temperature: float = _limited(1.0, gt=0)
    """Sampling temperature."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response."""


@dataclass(frozen=True)
class Parallel:
    """Settings for drafting several tokens in one forward pass at mask tokens (PARD: arXiv 2504.18583)."""

    tokens: int = _limited(8, ge=2)
    """Number of tokens drafted in one forward pass: the next token, and one token for each mask token."""
    keep_share: float = _limited(0.7, gt=0, le=1)
    """Ratio of the number of positions trained for a mask token to that of the previous mask token. Smaller values make
    training steps cheaper."""
    min_share: float = _limited(0.2, ge=0, le=1)
    """Minimum fraction of the positions that are trained for each mask token."""
    token: int = _limited(0, ge=0)
    """Id of the mask token."""

    def shares(self) -> list[float]:
        """Return the fraction of positions that have a j-th mask token, for j = 1 to `tokens` - 1."""
        return [max(self.keep_share**number, self.min_share) for number in range(1, self.tokens)]

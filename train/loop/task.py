"""Interface of training tasks, and the result of a run.

Letters: B batch (blocks), T tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...data.blocks.packing import Batch


class Task:
    """Base class of training tasks, which define a module, its loss and its evaluation. `fit` runs a task."""

    name: str
    title: str | None = None
    """Prefix of log lines. None uses `name`."""
    module: nn.Module
    """Module whose forward(tokens_BT, labels_BT, positions_BT, documents_BT) returns (loss sums, counts), two
    tensors of the same shape. The loss of a step is Σ sums ÷ counts over the whole global batch."""
    settings: dict[str, Any]
    """Settings that must not change when a run resumes (JSON values)."""
    rewrites = False
    """True if the task overrides `rewrite`."""

    def move_to(self, device: torch.device) -> None:
        """Move models that are not trained to `device`."""

    def begin(self, step: int, steps: int) -> None:
        """Set `module.progress` to the completed fraction of the run before step `step` of `steps`."""
        self.module.progress = step / steps  # type: ignore[assignment]

    def rewrite(self, batch: Batch, rows: np.ndarray, global_batch: int, seed: tuple[int, int]) -> Batch:
        """Return a replacement for `batch`, which contains the rows `rows` of a global batch.

        A new row may depend only on the old row, its number and `seed`, which consists of the run's seed and the step.
        """
        return batch

    def count(self, batch: Batch) -> Tensor:
        """Return the counts that `module` would return for this batch, without running the module."""
        raise NotImplementedError

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Return held-out metrics of `module`, which is unwrapped and in evaluation mode (default: no metrics)."""
        return {}


@dataclass(frozen=True)
class FitResult:
    """Result of a finished run."""

    steps: int
    first_loss: float
    """Loss of the first logged step."""
    last_loss: float
    """Mean loss over the last tenth of the logged steps."""
    metrics: dict[str, float]
    """Evaluation metrics of the kept weights."""
    first_metrics: dict[str, float]
    """Evaluation metrics of the initial weights; empty if they were not evaluated."""
    kept_step: int
    """Step of the kept weights: the last step, unless `keep_best` selected an earlier one."""
    tokens: int
    """Number of tokens seen, including unsupervised tokens but not padding."""
    seconds: float
    """Training time in seconds, including interrupted runs, but without evaluations and checkpoints."""
    history: Path
    """Path of `log.jsonl`, with one line per logged step and evaluation."""
    processes: int
    distributed_type: str
    resumed_from: int | None
    """Step from which this call resumed, or None if it started from the beginning."""

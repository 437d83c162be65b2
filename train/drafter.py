"""Training a drafter: any causal LM, on labels, on a teacher's distribution, or on both.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, D hidden of the drafter, E hidden of the teacher,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..data.packing import Batch
from ..data.prepared import PreparedData
from .forward import PackedForward
from .losses import IGNORED, agreement, check_objective, cross_entropy, mixture, shifted_labels

Evaluate = Callable[[nn.Module], Mapping[str, float]]


class DrafterModule(nn.Module):
    """A causal LM whose forward is its loss; the teacher, if any, is run but never trained, wrapped or stored."""

    def __init__(
        self,
        model: Any,
        objective: Mapping[str, float],
        teacher: Any | None = None,
        temperature: float = 1.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = dict(objective)
        self.temperature = temperature
        self.chunk = chunk
        self._forward = PackedForward(model)
        self._teacher = None if teacher is None else PackedForward(teacher)
        mine = self._forward.vocab_size
        theirs = mine if self._teacher is None else self._teacher.vocab_size
        if mine != theirs:
            raise ValueError(f"the drafter's vocabulary has {mine} tokens, the teacher's {theirs}: they must agree")

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum of the objective over the trained positions (float32), and their number (int64); inputs as in `Batch`."""
        batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
        hidden_XD, weight_VD = self.states(batch)
        teacher: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._teacher is not None and check_objective(self.objective):
            teacher = self.teacher_states(batch)
        labels_X = shifted_labels(labels_BT, documents_BT, 1).flatten()
        return mixture(self.objective, hidden_XD, weight_VD, labels_X, *teacher, self.temperature, self.chunk)

    def states(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The drafter's hidden states [X, D] and projection [V, D]; or its logits [X, V] and None."""
        return self._forward(batch).flatten(0, 1), self._forward.weight_VD()

    @torch.no_grad()
    def teacher_states(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The same of the teacher, without gradients."""
        assert self._teacher is not None
        return self._teacher(batch).flatten(0, 1), self._teacher.weight_VD()

    def gradient_checkpointing_enable(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})


class DrafterTask:
    """Trains `model` so that it agrees with the data, or with a teacher; see `train.loop.Task`.

    `objective` gives weights by name (`losses.OBJECTIVES`), such as {"cross-entropy": 0.3, "forward-kl": 0.7}.
    Evaluation runs over the first `evaluate_blocks` blocks of `heldout` (None: all), then calls `evaluate_fn(model)`
    and adds what it returns: the place to measure acceptance by decoding.

    Raises:
        ValueError: an unknown objective; one that needs a teacher where there is none; vocabularies that differ.
    """

    name = "drafter"

    def __init__(
        self,
        model: Any,
        heldout: PreparedData | None,
        objective: Mapping[str, float] | None = None,
        teacher: Any | None = None,
        temperature: float = 1.0,
        evaluate_fn: Evaluate | None = None,
        evaluate_blocks: int | None = 64,
        evaluate_batch: int = 4,
        chunk: int | None = None,
    ) -> None:
        objective = dict(objective or {"cross-entropy": 1.0})
        if check_objective(objective) and teacher is None:
            raise ValueError(f"objective {objective} needs a teacher, and none was given")
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected more than 0")
        if teacher is not None:
            teacher.requires_grad_(False).eval()
        self.teacher = teacher
        self.module: nn.Module = DrafterModule(model, objective, teacher, temperature, chunk)
        self.settings: dict[str, Any] = {"objective": objective, "temperature": temperature}
        self._heldout, self._evaluate_fn = heldout, evaluate_fn
        self._blocks, self._batch = evaluate_blocks, evaluate_batch

    def place(self, device: torch.device) -> None:
        """Move what is run but not trained."""
        if self.teacher is not None:
            self.teacher.to(device)

    def count(self, batch: Batch) -> Tensor:
        """Trained positions of a batch, int64 scalar: what `module` returns as its count, without running it."""
        return (shifted_labels(batch.labels_BT, batch.documents_BT, 1) != IGNORED).sum()

    @torch.no_grad()
    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """On held-out blocks: `heldout_loss` (nats a token) and `perplexity`; with a teacher also `overlap`
        (Σ min(p, q), the teacher-forced chance of acceptance) and `top1_agreement`; and what `evaluate_fn` returns.
        """
        assert isinstance(module, DrafterModule)
        sums: dict[str, float] = {"loss": 0.0, "overlap": 0.0, "same": 0.0}
        items = 0
        device = next(module.parameters()).device
        for batch in blocks_in_order(self._heldout, self._blocks, self._batch):
            batch = batch.to(device)
            hidden_XD, weight_VD = module.states(batch)
            labels_X = shifted_labels(batch.labels_BT, batch.documents_BT, 1).flatten()
            loss, count = cross_entropy(hidden_XD, weight_VD, labels_X, module.chunk)
            sums["loss"] += float(loss)
            items += int(count)
            if self.teacher is not None:
                states = module.teacher_states(batch)
                overlap, same, _ = agreement(hidden_XD, weight_VD, *states, labels_X, module.chunk)
                sums["overlap"] += float(overlap)
                sums["same"] += float(same)
        metrics: dict[str, float] = {}
        if items:
            metrics = {"heldout_loss": sums["loss"] / items, "perplexity": math.exp(min(sums["loss"] / items, 700.0))}
            if self.teacher is not None:
                metrics |= {"overlap": sums["overlap"] / items, "top1_agreement": sums["same"] / items}
        if self._evaluate_fn is not None:
            metrics |= self._evaluate_fn(module.model)
        return metrics


def blocks_in_order(data: PreparedData | None, blocks: int | None, batch_blocks: int) -> Iterator[Batch]:
    """The first `blocks` blocks of `data` (None: all of them) in batches, on the CPU; nothing if there is no data."""
    end = 0 if data is None else min(data.blocks, data.blocks if blocks is None else blocks)
    for start in range(0, end, batch_blocks):
        assert data is not None
        yield data.batch(range(start, min(start + batch_blocks, end)))

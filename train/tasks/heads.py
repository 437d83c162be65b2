"""Training of prediction heads on the last hidden state of a frozen target.

Letters: B batch (blocks), T tokens, Y = B · T flattened positions, X supervised positions, K heads, D hidden,
V vocabulary; for EAGLE-3, G hidden of the auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.blocks.packing import Batch
from ...data.blocks.prepared import PreparedData
from ...decode.models.base import TransformersModel
from ..forward.packed import PackedForward
from ..loop.task import Task
from ..losses.chunks import DenseTeacher, Teacher, Weigh
from ..losses.drafter import IGNORED, head_labels, heads_mixture, label_hits, map_labels, restrict_teacher
from ..losses.objectives import needs_teacher, parse_weights, weights_at
from ..teachers.teacher import CachedHidden
from .drafter import Evaluate, Weight, blocks_in_order

if TYPE_CHECKING:
    from ...checkpoints.heads.eagle import EagleHeads
    from ...checkpoints.heads.files import PredictionHeads

_LOGIT_TOLERANCE = 0.02  # relative to the largest logit; 16-bit rounding stays below it, a wrong scale does not


class HeadsModule(nn.Module):
    """Prediction heads whose forward pass returns their training loss. The frozen target is not a submodule."""

    def __init__(
        self,
        target: Any,
        heads: PredictionHeads,
        head_weights: Sequence[float],
        objective: Mapping[str, Weight],
        temperature: float = 1.0,
        states: CachedHidden | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = temperature
        self.head_weights, self.num_heads = tuple(map(float, head_weights)), len(head_weights)
        self.weigh: Weigh = None
        """Function that returns a weight of each loss, or None for weights of 1."""
        self.progress = 0.0
        """Completed fraction of the run (0 to 1), which determines the weights of the objectives."""
        self._objective = parse_weights(objective)
        self._target = PackedForward(target, heads.states)
        self._states = states
        self._logits = None if self._target.plain_head else _logits_of(target)

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted loss sum [K] and the number of supervised positions (int64 [K]) of each head.

        The arguments are the fields of `Batch`. At position t, head k learns to predict token t + 2 + k if that token
        is supervised and in the same document.
        """
        batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
        return self.heads_loss(batch, self.frozen_states(batch))

    def heads_loss(self, batch: Batch, states_YD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the outputs of `forward` from the target's hidden states [Y, D]."""
        rows_X, labels_XK = self.trained_rows(batch)
        weights = weights_at(self._objective, self.progress)
        teacher: Teacher | None = None
        teacher_rows_XK = None
        if needs_teacher(weights):
            teacher = self.teacher(states_YD.detach())
            offset_K = torch.arange(1, self.num_heads + 1, device=rows_X.device)
            # the target predicts token t + 2 + k at position t + 1 + k
            teacher_rows_XK = torch.where(labels_XK == IGNORED, -1, rows_X[:, None] + offset_K)
        if (ids_R := self.heads.proposed) is not None and teacher is not None:
            teacher = restrict_teacher(ids_R, self.heads.vocab_size, teacher)
        features_XKD = self.features(batch, states_YD, rows_X)
        sums_K, counts_K = self.losses(weights, features_XKD, labels_XK, teacher, teacher_rows_XK)
        return sums_K * torch.tensor(self.head_weights, device=sums_K.device), counts_K

    def losses(
        self, weights: Mapping[str, float], features_XKD: Tensor, labels_XK: Tensor, *teacher: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum [K] and the number of positions of each head; see `heads_mixture`."""
        projections = [self.heads.projection(k) for k in range(self.num_heads)]
        options |= {"temperature": self.temperature, "output": self.heads.output}
        options |= {"weigh": self.weigh, "low_rank_VF": self.low_rank}
        return heads_mixture(weights, features_XKD, projections, labels_XK, *teacher, **options)

    @property
    def low_rank(self) -> Tensor | None:
        """Matrix whose product with the last features is added to the logits (see `heads_mixture`), or None."""
        return None

    def features(self, batch: Batch, states_YD: Tensor, rows_X: Tensor) -> Tensor:
        """Compute the inputs [X, K, D] of the heads' projections from rows `rows_X` of the target's hidden states."""
        features_XKD: Tensor = self.heads.features(states_YD[rows_X].to(next(self.heads.parameters()).dtype))
        return features_XKD

    def trained_rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the flattened positions that have a label (int64 [X]) and their labels (int64 [X, K])."""
        labels_YK = self.labels(batch).flatten(0, 1)
        rows_X = (labels_YK != IGNORED).any(1).nonzero()[:, 0]
        return rows_X, labels_YK[rows_X]

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels of the heads, int64 [B, T, K], as indices into the draft vocabulary if there is one."""
        labels_BTK = head_labels(batch.labels_BT, batch.documents_BT, self.num_heads)
        if (ids_R := self.heads.proposed) is None:
            return labels_BTK
        return map_labels(ids_R.to(labels_BTK.device), self.heads.vocab_size, labels_BTK)

    @torch.no_grad()
    def frozen_states(self, batch: Batch) -> Tensor:
        """Compute the target's hidden states [Y, D], or read them from the cache if there is one."""
        if self._states is not None:
            return self._states.hidden(batch).flatten(0, 1)
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):
            return self._target.hidden(batch).flatten(0, 1)

    def teacher(self, states_YD: Tensor) -> DenseTeacher:
        """Return the target's next-token distributions for its hidden states [Y, D]."""
        with torch.no_grad(), torch.autocast(states_YD.device.type, enabled=False):
            after_YD = self._target.after_norm(states_YD.to(self._target.model.dtype))
            if self._logits is not None:
                return DenseTeacher(self._logits(after_YD))
            return DenseTeacher(after_YD, self._target.weight_VD())

    def read_directly(self) -> list[nn.Parameter]:
        """Return parameters that `forward` reads without calling their layer, so that ZeRO-3 can gather them."""
        projections = (self.heads.projection(k) for k in range(self.num_heads))
        candidates = [*projections, self.heads.bias_V, self.low_rank, self._target.weight_VD()]
        # parameters of a target outside the module are never sharded
        inside = {id(parameter) for parameter in self.parameters()}
        return [p for p in dict.fromkeys(candidates) if isinstance(p, nn.Parameter) and id(p) in inside]


def _logits_of(target: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that converts last hidden states to logits, for output layers that are not a plain matrix.

    Raises ValueError if the function does not reproduce the target's logits.
    """
    scorer = TransformersModel(target)
    token_11 = torch.ones(1, 1, dtype=torch.int64, device=scorer.device)
    with torch.no_grad():
        hidden_11D = target.base_model(token_11, use_cache=False).last_hidden_state
        expected, computed = target(token_11, use_cache=False).logits.float(), scorer.logits(hidden_11D).float()
    if float((computed - expected).abs().max()) > _LOGIT_TOLERANCE * float(expected.abs().max()):
        raise ValueError(f"the output layer of model type {target.config.model_type!r} is not supported")
    return scorer.logits


class HeadsTask(Task):
    """Task that trains prediction heads on a frozen target.

    The loss of a step is Σ_k head_weights[k] · (mean objective of head k over its positions). Medusa-1 uses weights of
    1 or 0.8^k (arXiv 2401.10774, eq. 1, where k counts from 1). Cross-entropy uses the text as labels. All other
    objectives use the target's distribution of the same token (self-distillation, section 2.3.2). `states` is a
    cache of the target's hidden states, and `evaluate_fn(heads)` returns additional metrics.

    Raises ValueError if the weights are invalid, or the heads do not match the target or the cache.
    """

    name = "heads"

    def __init__(
        self,
        target: Any,
        heads: PredictionHeads,
        heldout: PreparedData | None,
        head_weights: Sequence[float] | None = None,
        objective: Mapping[str, Weight] | None = None,
        temperature: float = 1.0,
        states: CachedHidden | None = None,
        evaluate_fn: Evaluate | None = None,
        evaluate_blocks: int | None = 64,
    ) -> None:
        weights = [1.0] * heads.num_heads if head_weights is None else [float(weight) for weight in head_weights]
        objective = dict(objective or {"cross-entropy": 1.0})
        _check(target, heads, weights, states)
        target.requires_grad_(False).eval()
        self.target = target
        self.module: nn.Module = self._make_module(
            target, heads, weights, objective, temperature=temperature, states=states
        )
        self.settings: dict[str, Any] = {"head_weights": weights, "objective": objective, "temperature": temperature}
        self._heldout, self._evaluate_fn, self._blocks = heldout, evaluate_fn, evaluate_blocks

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        return HeadsModule(*arguments, **options)

    @property
    def other_models(self) -> list[nn.Module]:
        """Models that are in memory but not trained, such as the target."""
        return [self.target]

    def move_to(self, device: torch.device) -> None:
        self.target.to(device)

    def count(self, batch: Batch) -> Tensor:
        assert isinstance(self.module, HeadsModule)
        return (self.module.labels(batch) != IGNORED).sum((0, 1))

    @torch.no_grad()
    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Evaluate the heads on held-out blocks. Return the metrics, including the metrics of `evaluate_fn(heads)`.

        Head k has the metrics `head{k}_loss` (nats per token), `head{k}_top1` and `head{k}_top5` (see `LabelHits`).
        `heldout_loss` is the weighted sum of the losses.
        """
        assert isinstance(module, HeadsModule)
        device = next(module.parameters()).device
        sums_K4 = torch.zeros(module.num_heads, 4, dtype=torch.float64)
        for batch in blocks_in_order(self._heldout, self._blocks, device):
            rows_X, labels_XK = module.trained_rows(batch)
            features_XKD = module.features(batch, module.frozen_states(batch), rows_X)
            for k in range(module.num_heads):
                arguments = (module.heads.projection(k), labels_XK[:, k], None, module.heads.output, module.low_rank)
                hits = label_hits(features_XKD[:, k], *arguments)
                sums = (hits.loss, hits.top1, hits.top5, hits.count)
                sums_K4[k] += torch.tensor([float(number) for number in sums], dtype=torch.float64)
        metrics: dict[str, float] = {}
        if bool((sums_K4[:, 3] > 0).all()):
            means_K3 = sums_K4[:, :3] / sums_K4[:, 3:]
            metrics["heldout_loss"] = float((means_K3[:, 0] * torch.tensor(module.head_weights)).sum())
            for k, (loss, top1, top5) in enumerate(means_K3.tolist()):
                metrics |= {f"head{k}_loss": loss, f"head{k}_top1": top1, f"head{k}_top5": top5}
        if self._evaluate_fn is not None:
            with torch.autocast(device.type, enabled=False):  # decoding does not use autocast either
                metrics |= self._evaluate_fn(module.heads)
        return metrics


class EagleModule(HeadsModule):
    """Training module for EAGLE-3; head k is the k-th drafting step (Li et al. 2025, arXiv 2503.01840, section 3.2).

    The hidden states [Y, S] concatenate the target's auxiliary and last hidden states (S = G + D).
    """

    heads: EagleHeads  # type: ignore[assignment]

    def features(self, batch: Batch, states_YS: Tensor, rows_X: Tensor) -> Tensor:
        """Compute the features [X, K, D] of the K drafting steps that start at the flattened positions `rows_X`."""
        aux_YG = states_YS[:, : -self.heads.hidden_size].to(self.heads.fc.weight.dtype)
        aux_BTG = aux_YG.view(*batch.tokens_BT.shape, -1)
        mask_B1TT = batch.attention_mask_B1TT()
        features_BTKD = self.heads.features(aux_BTG, batch.tokens_BT, batch.positions_BT, mask_B1TT)
        return features_BTKD.flatten(0, 1)[rows_X]


class EagleTask(HeadsTask):
    """Task that trains EAGLE-3 heads on a frozen target; see `HeadsTask` and `EagleModule`."""

    name = "eagle3"

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        return EagleModule(*arguments, **options)


def _check(target: Any, heads: PredictionHeads, weights: Sequence[float], states: CachedHidden | None) -> None:
    """Raise ValueError if the heads do not match their loss weights, the target or the hidden-state cache."""
    if len(weights) != heads.num_heads:
        raise ValueError(f"head_weights must contain {heads.num_heads} weights, one per head, got {weights}")
    hidden, vocab = target.config.get_text_config().hidden_size, target.get_output_embeddings().weight.shape[0]
    if (heads.hidden_size, heads.vocab_size) != (hidden, vocab):
        raise ValueError(
            f"the heads have hidden size {heads.hidden_size} and {heads.vocab_size} tokens, but the target has hidden "
            f"size {hidden} and {vocab} tokens: pass heads of this target"
        )
    if states is not None and (states.states, states.hidden_size) != (heads.states, heads.states_size):
        raise ValueError(
            f"the heads read {heads.states} states of size {heads.states_size}, but the cache contains "
            f"{states.states} states of size {states.hidden_size}: write a new cache"
        )

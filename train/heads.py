"""Training prediction heads on a frozen target's last hidden state.

Letters: B batch (blocks), T tokens, X = B · T flattened positions, K heads, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.packing import Batch
from ..data.prepared import PreparedData
from .drafter import Evaluate, blocks_in_order
from .forward import PackedForward
from .losses import IGNORED, head_labels, heads_cross_entropy, label_hits

if TYPE_CHECKING:
    from ..checkpoints.heads import PredictionHeads


class HeadsModule(nn.Module):
    """Heads whose forward is their loss; the target is run without gradients and makes no logits of its own."""

    def __init__(
        self, target: Any, heads: PredictionHeads, head_weights: Sequence[float], chunk: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.chunk = chunk
        self.head_weights = tuple(float(weight) for weight in head_weights)
        self._target = PackedForward(target)

    @property
    def num_heads(self) -> int:
        """How many heads there are: one weight each."""
        return len(self.head_weights)

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted cross entropy sums [K] and numbers of trained positions int64 [K]; inputs as in `Batch`.

        Head k at position t is trained on token t + 2 + k where that is labelled and of the same document.
        """
        batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
        features_XKD, labels_XK = self.features(batch)
        projections = [self.heads.projection(k) for k in range(self.num_heads)]
        sums_K, counts_K = heads_cross_entropy(features_XKD, projections, labels_XK, self.chunk)
        return sums_K * torch.tensor(self.head_weights, device=sums_K.device), counts_K

    def read_directly(self) -> list[nn.Parameter]:
        """Parameters that `forward` uses without calling the layer that owns them: ZeRO-3 must gather them for it."""
        found = (self.heads.projection(k) for k in range(self.num_heads))
        return [weight_VD for weight_VD in found if isinstance(weight_VD, nn.Parameter)]

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Heads' features [X, K, D] and labels int64 [X, K]; positions that no head is trained on are left out."""
        labels_XK = head_labels(batch.labels_BT, batch.documents_BT, self.num_heads).flatten(0, 1)
        kept = (labels_XK != IGNORED).any(1).nonzero()[:, 0]
        with torch.no_grad():
            hidden_XD = self._target.hidden(batch).flatten(0, 1)[kept]
        dtype = next(self.heads.parameters()).dtype
        return self.heads.features(hidden_XD.to(dtype)), labels_XK[kept]


class HeadsTask:
    """Trains heads on a frozen target; see `train.loop.Task`.

    The loss of a step is Σ_k head_weights[k] · (mean cross entropy of head k over its own positions). Medusa-1 uses a
    plain sum (all weights 1), Medusa's paper 0.8^k. Evaluation: as for a drafter; `evaluate_fn` is given the heads.

    Raises:
        ValueError: as many weights as heads are needed, none negative; a target whose hidden size differs.
    """

    name = "heads"

    def __init__(
        self,
        target: Any,
        heads: PredictionHeads,
        heldout: PreparedData | None,
        head_weights: Sequence[float] | None = None,
        evaluate_fn: Evaluate | None = None,
        evaluate_blocks: int | None = 64,
        evaluate_batch: int = 4,
        chunk: int | None = None,
    ) -> None:
        weights = [1.0] * heads.num_heads if head_weights is None else [float(weight) for weight in head_weights]
        if len(weights) != heads.num_heads or min(weights) < 0:
            raise ValueError(
                f"head_weights is {weights}, expected {heads.num_heads} weights (one a head), none negative"
            )
        hidden = target.config.get_text_config().hidden_size
        if heads.hidden_size != hidden:
            raise ValueError(f"the heads take hidden states of size {heads.hidden_size}, the target makes {hidden}")
        target.requires_grad_(False).eval()
        self.target = target
        self.module: nn.Module = HeadsModule(target, heads, weights, chunk)
        self.settings: dict[str, Any] = {"head_weights": weights}
        outer = (target.get_output_embeddings().weight, target.get_input_embeddings().weight)
        inner = (w for w in target.parameters() if w.dim() >= 2 and not any(w is other for other in outer))
        self._target_weights = sum(w.numel() for w in inner)
        self._head_weights = sum(w.numel() for w in heads.parameters() if w.dim() >= 2)  # before they may be sharded
        self._heldout, self._evaluate_fn = heldout, evaluate_fn
        self._blocks, self._batch = evaluate_blocks, evaluate_batch

    rewrites = False

    def place(self, device: torch.device) -> None:
        """Move what is run but not trained."""
        self.target.to(device)

    def begin(self, step: int, steps: int) -> None:
        """Every step is like any other."""

    def rewrite(self, batch: Batch, rows: np.ndarray, global_batch: int, seed: tuple[int, int]) -> Batch:
        """Heads learn on the data alone."""
        raise AssertionError("nothing is rewritten")

    def flops(self, tokens: int, trained: int) -> float:
        """Operations of the target's forward, 2 a weight and token, and of the heads' forward and backward, 6 a weight
        and trained position; products inside attention are left out."""
        return 2.0 * self._target_weights * tokens + 6.0 * self._head_weights * trained

    def count(self, batch: Batch) -> Tensor:
        """Trained positions of each head, int64 [K]."""
        assert isinstance(self.module, HeadsModule)
        labels_BTK = head_labels(batch.labels_BT, batch.documents_BT, self.module.num_heads)
        return (labels_BTK != IGNORED).sum((0, 1))

    @torch.no_grad()
    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """On held-out blocks, for each head k: `head{k}_loss` (nats a token) and `head{k}_top1`; `heldout_loss`, their
        weighted sum as in training; and what `evaluate_fn(heads)` returns.
        """
        assert isinstance(module, HeadsModule)
        sums_K = torch.zeros(module.num_heads, dtype=torch.float64)
        hits_K, counts_K = torch.zeros_like(sums_K), torch.zeros_like(sums_K)
        device = next(module.parameters()).device
        projections = [module.heads.projection(k) for k in range(module.num_heads)]
        for batch in blocks_in_order(self._heldout, self._blocks, self._batch):
            features_XKD, labels_XK = module.features(batch.to(device))
            for k, weight_VD in enumerate(projections):
                hits = label_hits(features_XKD[:, k], weight_VD, labels_XK[:, k], module.chunk)
                sums_K[k] += float(hits.loss)
                hits_K[k] += float(hits.top1)
                counts_K[k] += float(hits.count)
        metrics: dict[str, float] = {}
        if bool((counts_K > 0).all()):
            means_K = sums_K / counts_K
            weights_K = torch.tensor(module.head_weights, dtype=torch.float64)
            metrics["heldout_loss"] = float((means_K * weights_K).sum())
            for k in range(module.num_heads):
                metrics |= {f"head{k}_loss": float(means_K[k]), f"head{k}_top1": float(hits_K[k] / counts_K[k])}
        if self._evaluate_fn is not None:
            with torch.autocast(device.type, enabled=False):  # as the artifact will decode
                metrics |= self._evaluate_fn(module.heads)
        return metrics

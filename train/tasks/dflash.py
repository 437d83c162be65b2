"""Training of DFlash drafters on auxiliary hidden states of a frozen target.

Source: DFlash (z-lab). Blocks start at sampled tokens (anchors) and are trained in one forward pass; head k is slot
k + 1 of a block.

Letters: B batch (rows of tokens), T tokens, K heads, S = K + 1 slots, X blocks, Y = B · T flattened positions,
D hidden, G hidden of the auxiliary layers.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.heads.dflash import DFlashHeads
from ...data.blocks.packing import Batch
from ..losses.drafter import IGNORED
from .heads import HeadsModule, HeadsTask


class DFlashModule(HeadsModule):
    """Training module for a DFlash drafter, in which head k at position t predicts slot k + 1 of the block at t + 1.

    At most `anchors` blocks are trained per row. Their positions depend only on the row's tokens and on `progress`, so
    that the losses are the same for any number of processes.
    """

    heads: DFlashHeads  # type: ignore[assignment]
    anchors: int = 256

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels of the heads, int64 [B, T, K], which are −100 at positions that no block follows."""
        labels_BTK = super().labels(batch)
        candidate_BT = (labels_BTK != IGNORED).any(-1)
        if int(candidate_BT.sum(1).max()) <= self.anchors:
            return labels_BTK
        step, length = int(self.progress * 2**40) if self.training else 0, candidate_BT.shape[1]
        keys = list[Tensor]()
        for row_T in batch.tokens_BT.cpu():
            seed = int((row_T * torch.arange(1, length + 1)).sum())
            keys.append(torch.from_numpy(np.random.default_rng([seed, step]).random(length, np.float32)))
        key_BT = torch.stack(keys).to(candidate_BT.device).masked_fill(~candidate_BT, -1.0)
        chosen_BT = torch.zeros_like(candidate_BT)
        chosen_BT.scatter_(1, key_BT.topk(min(self.anchors, length), 1).indices, True)
        return labels_BTK.masked_fill(~(chosen_BT & candidate_BT)[..., None], IGNORED)

    def features(self, batch: Batch, states_YS: Tensor, rows_X: Tensor) -> Tensor:
        """Compute the features [X, K, D] of the blocks that follow the flattened positions `rows_X`."""
        aux_YG = states_YS[:, : -self.heads.hidden_size].to(self.heads.fc.weight.dtype)
        aux_BTG = aux_YG.view(*batch.tokens_BT.shape, -1)
        return self.heads.features(aux_BTG, batch.tokens_BT, batch.positions_BT, batch.documents_BT, rows_X)


def dynamic_weights(losses_XK: Tensor) -> Tensor:
    """Return the weights [X, K] of cross-entropy losses by slot (D-PACE).

    The confidence q of a slot is (1 + exp(−loss)) / 2, or 1 without a label. The weight of slot k is the sum, over
    slots j ≥ k with a label, of q_1 ⋯ q_j. Early slots have larger weights, since later tokens depend on their
    acceptance.
    """
    supervised_XK = losses_XK != 0
    confidence_XK = torch.where(supervised_XK, 0.5 + 0.5 * (-losses_XK).exp(), 1.0)
    reached_XK = confidence_XK.cumprod(1) * supervised_XK
    return reached_XK.flip(1).cumsum(1).flip(1)


class DFlashTask(HeadsTask):
    """Task that trains a DFlash drafter on a frozen target; see `HeadsTask`.

    At most `anchors` blocks are trained per row. With `dynamic`, losses are weighted by `dynamic_weights`.
    """

    name = "dflash"

    def __init__(self, *arguments: Any, anchors: int = 256, dynamic: bool = False, **options: Any) -> None:
        self._anchors, self._dynamic = anchors, dynamic
        super().__init__(*arguments, **options)
        self.settings |= {"anchors": anchors, "dynamic weights": dynamic}

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        module = DFlashModule(*arguments, **options)
        module.anchors, module.weigh = self._anchors, dynamic_weights if self._dynamic else None
        return module

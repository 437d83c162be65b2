"""Training of DFlash drafters on auxiliary hidden states of a frozen target.

Source: DFlash (z-lab). Blocks start at sampled tokens (anchors) and are trained in one forward pass; head k is slot
k + 1 of a block.

Letters: B batch (rows of tokens), T tokens, K heads, S = K + 1 slots, X blocks, Y = B · T flattened positions,
D hidden, G hidden of the auxiliary layers.
"""

from typing import Any

import torch
from torch import Tensor

from ...checkpoints.heads.dflash import DFlashHeads
from ...data.blocks.packing import Batch
from ..losses.drafter import IGNORED
from .heads import HeadsModule, HeadsTask


class DFlashModule(HeadsModule):
    """Module whose head k at position t is slot k + 1 of the block with anchor t + 1.

    At most `anchors` blocks are trained per row. They depend only on the row's tokens and on `progress`, so that the
    losses are the same for any number of processes.
    """

    heads: DFlashHeads  # type: ignore[assignment]
    anchors: int = 256

    def labels(self, batch: Batch) -> Tensor:
        """Return the labels of the slots, int64 [B, T, K], ignored at positions that are not followed by an anchor."""
        labels_BTK = super().labels(batch)
        candidate_BT = (labels_BTK != IGNORED).any(-1)
        if int(candidate_BT.sum(1).max()) <= self.anchors:
            return labels_BTK
        step, length = int(self.progress * 2**40) if self.training else 0, candidate_BT.shape[1]
        keys = list[Tensor]()
        for row_T in batch.tokens_BT.cpu():
            seed = int((row_T * torch.arange(1, length + 1)).sum()) + step
            keys.append(torch.rand(length, generator=torch.Generator().manual_seed(seed % 2**63)))
        key_BT = torch.stack(keys).to(candidate_BT.device).masked_fill(~candidate_BT, -1.0)
        chosen_BT = torch.zeros_like(candidate_BT)
        chosen_BT.scatter_(1, key_BT.topk(min(self.anchors, length), 1).indices, True)
        return labels_BTK.masked_fill(~(chosen_BT & candidate_BT)[..., None], IGNORED)

    def features(self, batch: Batch, states_YS: Tensor, rows_X: Tensor) -> Tensor:
        """Return the features [X, K, D] of the blocks after each flattened position."""
        aux_YG = states_YS[:, : -self.heads.hidden_size].to(self.heads.fc.weight.dtype)
        aux_BTG = aux_YG.view(*batch.tokens_BT.shape, -1)
        return self.heads.features(aux_BTG, batch.tokens_BT, batch.positions_BT, batch.documents_BT, rows_X)


class DFlashTask(HeadsTask):
    """Task that trains a DFlash drafter on a frozen target, with at most `anchors` blocks per row; see `HeadsTask`."""

    name = "dflash"

    def __init__(self, *arguments: Any, anchors: int = 256, **options: Any) -> None:
        self._anchors = anchors
        super().__init__(*arguments, **options)
        self.settings["anchors"] = anchors

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        module = DFlashModule(*arguments, **options)
        module.anchors = self._anchors
        return module

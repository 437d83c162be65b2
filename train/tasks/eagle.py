"""Training EAGLE-3 heads: as prediction heads are, but that each drafts some steps from every position.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.2 ("training-time test"). Letters: B batch (blocks),
T tokens, Y = B · T flattened positions, X those that are trained, K steps, D hidden, G the inner layers' states,
S = G + D.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...checkpoints.heads.eagle import EagleHeads
from ...data.blocks.packing import Batch
from .heads import HeadsModule, HeadsTask


class EagleModule(HeadsModule):
    """`HeadsModule` whose head k is the k-th step of drafting; its states are the target's inner and last ones."""

    heads: EagleHeads  # type: ignore[assignment]

    def features(self, batch: Batch, states_YS: Tensor, rows_X: Tensor) -> Tensor:
        """[X, K, D] what each step makes of the chain that begins at a flattened position."""
        given_YG = states_YS[:, : -self.heads.hidden_size].to(self.heads.fc.weight.dtype)
        given_BTG = given_YG.view(*batch.tokens_BT.shape, -1)
        mask_B1TT = batch.attention_mask_B1TT()
        made_BTKD = self.heads.features(given_BTG, batch.tokens_BT, batch.positions_BT, mask_B1TT)
        return made_BTKD.flatten(0, 1)[rows_X]


class EagleTask(HeadsTask):
    """Trains EAGLE-3 heads on a frozen target; see `HeadsTask`, whose head k is here the k-th step of drafting."""

    name = "eagle3"

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        return EagleModule(*arguments, **options)

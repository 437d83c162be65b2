"""AdaSPEC: a drafter learns only those tokens at which a drafter like it has learned much more than it has yet.

Source: AdaSPEC (Hu et al. 2025, arXiv 2510.19779), as its authors' trainer has it (github.com/yuezhouhu/adaspec): with
L the forward KL of the target from a drafter at a position, a step trains on the share of the positions with the
greatest L_drafter − L_reference. The reference is a drafter that was distilled before: what even it could not learn
stays out.

Letters: X = B · T flattened positions, D hidden of the drafter, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.blocks.packing import Batch
from ..losses.chunks import IGNORED, DenseTeacher, Teacher, TopK, rows_of
from ..losses.drafter import divergences
from ..teachers.teacher import ModelTeacher


@dataclass(frozen=True)
class Selection:
    """What is learned of each forward."""

    reference: ModelTeacher
    """The drafter that was distilled before."""
    share: float
    """Of the trained positions."""
    top_k: TopK | None = None
    """As in the loss."""

    @torch.no_grad()
    def __call__(self, batch: Batch, own: DenseTeacher, labels_X: Tensor, told: Teacher, ids: Tensor | None) -> Tensor:
        """`labels_X` with −100 at all positions that are not learned: `own` are the drafter's states, `told` what the
        target says, both among the tokens `ids` alone (None: of the whole vocabulary)."""
        reference = self.reference(batch)
        states = (reference.hidden_XE, reference.weight_VE)
        if ids is not None:
            states = rows_of(ids, *states)
        sides = ((own.hidden_XE, own.weight_VE), states)
        mine_X, theirs_X = (divergences(*side, labels_X, told, top_k=self.top_k) for side in sides)
        trained_X = labels_X != IGNORED
        count = math.ceil(self.share * int(trained_X.sum()))
        chosen_C = (mine_X - theirs_X).masked_fill(~trained_X, -torch.inf).topk(count).indices
        return torch.full_like(labels_X, IGNORED).index_copy_(0, chosen_C, labels_X[chosen_C])

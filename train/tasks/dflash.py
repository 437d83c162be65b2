"""Training of DFlash and DSpark drafters on auxiliary hidden states of a frozen target.

Sources: DFlash (Chen et al. 2026, arXiv 2602.06036), DSpark (arXiv 2607.05147). Blocks start at sampled tokens
(anchors) and are trained in one forward pass; head k predicts token k + 1 after the anchor.

Letters: B batch (rows of tokens), T tokens, K heads, S states, X blocks, Y = B · T flattened positions, D features
(for DSpark, with Markov factors), G hidden of the auxiliary layers, F Markov factors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

from ...checkpoints.heads.dflash import DFlashHeads
from ...checkpoints.heads.dspark import DSparkHeads
from ...checkpoints.table.table import BigramTable
from ...data.blocks.packing import Batch
from ..losses.drafter import IGNORED, label_hits
from .heads import HeadsModule, HeadsTask


class DFlashModule(HeadsModule):
    """Training module for a DFlash drafter, in which head k at position t is a slot of the block with anchor t + 1.

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


def dynamic_weights(losses_XK: Tensor, supervised_XK: Tensor) -> Tensor:
    """Return the weights [X, K] of cross-entropy losses by slot (D-PACE: arXiv 2605.18810), given a mask of labels.

    The confidence q of a slot is (1 + exp(−loss)) / 2, or 1 without a label. The weight of slot k is the sum, over
    slots j ≥ k with a label, of q_1 ⋯ q_j. Early slots have larger weights, since later tokens depend on their
    acceptance.
    """
    confidence_XK = torch.where(supervised_XK, 0.5 + 0.5 * (-losses_XK).exp(), 1.0)
    reached_XK = confidence_XK.cumprod(1) * supervised_XK
    return reached_XK.flip(1).cumsum(1).flip(1)


class DFlashTask(HeadsTask):
    """Task that trains a DFlash drafter on a frozen target; see `HeadsTask`.

    At most `anchors` blocks are trained per row. With `dynamic`, losses are weighted by `dynamic_weights`.
    """

    name = "dflash"
    module_type: type[DFlashModule] = DFlashModule

    def __init__(self, *arguments: Any, anchors: int = 256, dynamic: bool = False, **options: Any) -> None:
        self._anchors, self._dynamic = anchors, dynamic
        super().__init__(*arguments, **options)
        self.settings |= {"anchors": anchors, "dynamic weights": dynamic}

    def _make_module(self, *arguments: Any, **options: Any) -> HeadsModule:
        module = self.module_type(*arguments, **options)
        module.anchors, module.weigh = self._anchors, dynamic_weights if self._dynamic else None
        return module


class DSparkModule(DFlashModule):
    """Module for DSpark drafters. The loss includes the cross-entropy of the confidence head.

    The confidence head learns the acceptance rate of each slot, given the tokens of the text before it.
    """

    heads: DSparkHeads
    confidence_weight: float = 1.0

    @property
    def low_rank(self) -> Tensor:
        return self.heads.markov_weight

    def features(self, batch: Batch, states_YS: Tensor, rows_X: Tensor) -> Tensor:
        """Return the features [X, K, D] of the blocks after each position, and of the text's token before each slot."""
        features_XKD = super().features(batch, states_YS, rows_X)
        before_XK = rows_X[:, None] + torch.arange(1, self.num_heads + 1, device=rows_X.device)
        tokens_Y = batch.tokens_BT.flatten()
        factors_XKF = self.heads.markov_factors(tokens_Y[before_XK.clamp(max=len(tokens_Y) - 1)])
        return torch.cat((features_XKD, factors_XKF.to(features_XKD.dtype)), -1)

    @torch.no_grad()
    def begin_from_table(self, table: BigramTable, batch: Batch) -> float:
        """Initialise the Markov head from a table, with a scale that is fitted to a batch. Return the scale.

        The scale minimises the cross-entropy of the first slot, which is convex in the scale. It is between 0 (no bias)
        and 2. At full rank, 1 would turn a unigram distribution into the table's, but truncation reduces the bias.
        """
        self.heads.begin_from_table(table)
        rows_X, labels_XK = self.trained_rows(batch)
        features_XD = self.features(batch, self.frozen_states(batch), rows_X)[:, 0]
        scaled_D = torch.arange(features_XD.shape[1], device=features_XD.device) >= self.heads.hidden_size

        def loss_of(scale: float) -> float:
            inputs_XD = torch.where(scaled_D, scale * features_XD, features_XD)
            hits = label_hits(inputs_XD, self.heads.projection(), labels_XK[:, 0], low_rank_VF=self.low_rank)
            return float(hits.loss)

        scale = float(minimize_scalar(loss_of, bounds=(0, 2), method="bounded", options={"maxiter": 20}).x)
        for weight in (self.heads.markov_head.markov_w1.weight, self.heads.markov_weight):
            weight.mul_(scale**0.5)
        return scale

    def losses(
        self, weights: Mapping[str, float], features_XKD: Tensor, labels_XK: Tensor, *teacher: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        accepted_XK = torch.zeros(labels_XK.shape, device=labels_XK.device)
        options["accepted_XK"] = accepted_XK
        sums_K, counts_K = super().losses(weights, features_XKD, labels_XK, *teacher, **options)
        scores_XK = self.heads.confidence(features_XKD).float()
        errors_XK = F.binary_cross_entropy_with_logits(scores_XK, accepted_XK, reduction="none")
        errors_XK = errors_XK.masked_fill(labels_XK == IGNORED, 0.0)
        return sums_K + self.confidence_weight * errors_XK.sum(0), counts_K


class DSparkTask(DFlashTask):
    """Task that trains a DSpark drafter; see `DFlashTask`.

    `confidence_weight` multiplies the loss of the confidence head. `table` initialises the Markov head, with a scale
    that is fitted to `fit_batch`.
    """

    name = "dspark"
    module_type = DSparkModule

    def __init__(
        self,
        *arguments: Any,
        confidence_weight: float = 1.0,
        table: BigramTable | None = None,
        fit_batch: Batch | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.module, DSparkModule)
        self.module.confidence_weight = self.settings["confidence_weight"] = confidence_weight
        if table is not None and fit_batch is not None:
            self.markov_scale = self.module.begin_from_table(table, fit_batch)

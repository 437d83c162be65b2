"""Trees and chains that one language model drafts, and no draft at all.

Shape letters: B batch, N tree nodes, M nodes of a level, C candidates, K depth, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine import Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..rng import draw_many
from ..tree import Tree
from ..warpers import warp
from .draft_state import DraftState


class NoDraft(Proposer):
    """The root alone: one token a step."""

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1, 0

    def start(self, context: Context) -> None:
        self._tree = Tree.chain(0).to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        return Proposal(self._tree, context.root_B1)


class DraftTree(Proposer):
    """Candidates sampled from a draft model, `branching[i]` for each node of depth i; ones all along: a chain.

    With replacement the candidates of a node are independent draws, else they are drawn without replacement in order
    (multi-candidate paper, sections 3.1 and 3.2). At temperature 0 both take the drafter's most likely tokens.
    `by_path`: the target scores each path as a row of its own, without tree attention (section 3.3). Raises ValueError:
    a level without candidates; at the start of decoding, more of them than there are tokens.
    """

    def __init__(
        self, model: LanguageModel, branching: Sequence[int], replacement: bool = True, by_path: bool = False
    ) -> None:
        self.model = model
        self.branching = tuple(branching)
        self.replacement, self.by_path = replacement, by_path
        self.tree = Tree.k_ary(self.branching).to(model.device)

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return self.tree.nodes, self.tree.max_depth

    def start(self, context: Context) -> None:
        if not self.replacement and max(self.branching) > self.model.vocab_size:
            raise ValueError(
                f"the tree asks for {max(self.branching)} different candidates of a vocabulary of "
                f"{self.model.vocab_size} tokens"
            )
        self._draft = DraftState(self.model, context, *self.capacity(context.limits))

    def propose(self, context: Context) -> Proposal:
        tokens, probs, valid = [context.root_B1], [], []
        hidden_BMD = self._draft.read_root(context)[:, None]
        first = 1
        for level in range(len(self.branching)):
            tokens_BM, probs_BMV, valid_BM = self._draw(hidden_BMD, level, context)
            tokens.append(tokens_BM)
            if probs_BMV is not None:
                probs.append(probs_BMV)
            valid.append(valid_BM)
            if level + 1 < len(self.branching):
                hidden_BMD = self._draft.grow(tokens_BM, self.tree, first)
                first += tokens_BM.shape[1]
        proposal = Proposal(self.tree, torch.cat(tokens, 1), torch.cat(probs, 1) if probs else None)
        proposal.by_path = self.by_path
        if any(valid_BM is not None for valid_BM in valid):
            all_valid = [torch.ones_like(tokens_BM, dtype=torch.bool) for tokens_BM in tokens]
            levels = [
                mask if mask is not None else every for mask, every in zip([None, *valid], all_valid, strict=True)
            ]
            proposal.valid_BN = torch.cat(levels, 1)
        return proposal

    def _draw(self, hidden_BMD: Tensor, level: int, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens of the next level, [B, M x width], the distributions they come from, and which of them exist."""
        logits_BMV, width = self.model.logits(hidden_BMD), self.branching[level]
        if context.sampling.greedy:
            most = logits_BMV.topk(width, -1) if width > 1 else logits_BMV.max(-1, keepdim=True)
            context.watch("the drafter's", most.values[..., 0], level)
            return most.indices.flatten(1), None, None
        probs_BMV = warp(logits_BMV, context.sampling)
        if self.replacement or width == 1:
            uniform_BMC = context.rng.uniform(probs_BMV.shape[1], width)
            drawn_BMC, wanted_BMC = draw_many(probs_BMV, uniform_BMC)
            context.watch("the drafter's", wanted_BMC.flatten(1), level)
            return drawn_BMC.flatten(1), probs_BMV, None
        # Exponential races: sorting by p / E is drawing without replacement, in order.
        race_BMV = probs_BMV / context.rng.exponential(*probs_BMV.shape[1:])
        top = race_BMV.topk(width, -1)
        context.watch("the drafter's", top.values[..., 0], level)
        # Warping, or a low temperature's underflow, may leave fewer possible tokens than children.
        return top.indices.flatten(1), probs_BMV, (top.values > 0).flatten(1)

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context, own_path_BK=None if self.tree.is_chain else verdict.path_BK)

    def stop(self) -> None:
        del self._draft

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        widths = [1]
        for width in self.branching[:-1]:
            widths.append(widths[-1] * width)
        return [(self.model, width) for width in widths]

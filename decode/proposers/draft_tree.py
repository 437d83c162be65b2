"""Proposers of trees and chains from one draft model, and the proposer of autoregressive decoding.

Shape letters: B batch, N tree nodes, M nodes of a level, C candidates, K depth, V vocabulary, R vocabulary of the
drafter, D hidden.
"""

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.storage.draft_vocabulary import mask_token, widen
from ..engine import Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..rng import draw_many
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DrafterProposer


class NoDraft(Proposer):
    """Proposer of autoregressive decoding, whose trees contain only the root."""

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1, 0

    def start(self, context: Context) -> None:
        self._tree = Tree.chain(0).to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        return Proposal(self._tree, context.root_B1)


_MIN_SAMPLED_PROB = 1e-30
"""Minimum probability of a token in sampling without replacement. Less likely tokens are never sampled."""


class DraftTree(DrafterProposer):
    """Proposer of a tree sampled from a draft model, in which nodes of depth i have `branching[i]` children.

    With replacement, the candidates of a node are independent. Without replacement, they are distinct (arXiv
    2401.06706, sections 3.1 and 3.2). At temperature 0, they are the drafter's most likely tokens. With `by_path`, the
    target scores each path as a separate row, without tree attention (section 3.3).

    Raises:
        ValueError: A level has no candidates, or more candidates than the drafter's vocabulary has tokens.
    """

    def __init__(
        self, model: LanguageModel, branching: Sequence[int], replacement: bool = True, by_path: bool = False
    ) -> None:
        self.model, self.branching = model, tuple(branching)
        self.replacement, self.by_path = replacement, by_path
        self.tree = Tree.k_ary(self.branching).to(model.device)
        self._all_one = set(self.branching) == {1}
        self._widths = [*itertools.accumulate(self.branching[:-1], operator.mul, initial=1)]
        """Number of nodes that are run at each level."""
        self._ahead_N = torch.tensor([level for level, width in enumerate(self._widths) for _ in range(width)])

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return self.tree.nodes, self.tree.max_depth

    def start(self, context: Context) -> None:
        different = context.sampling.greedy or not self.replacement
        if different and max(self.branching) > self.model.draft_vocab_size:
            raise ValueError(
                f"the tree has {max(self.branching)} distinct candidates per node, but the drafter's vocabulary has "
                f"{self.model.draft_vocab_size} tokens"
            )
        super().start(context)

    def propose(self, context: Context) -> Proposal:
        hidden_BD, sampling, tree = self._draft.read_root(context), context.sampling, self.tree
        key = (self.branching, self.replacement, sampling)
        chances = [] if sampling.greedy else self._chances(context)
        tokens_BN1, watched_BN, *more = self._draft.run_captured(
            tree, key, partial(self._grow, sampling), hidden_BD, *chances
        )
        context.watch("the drafter's", watched_BN, self._ahead_N)
        proposal = Proposal(tree, torch.cat((context.root_B1, tokens_BN1), 1), by_path=self.by_path)
        if more:
            proposal.draft_probs_BMV = more[0]
        if len(more) > 1:
            proposal.valid_BN = more[1]
        return proposal

    def _chances(self, context: Context) -> list[Tensor]:
        chances = list[Tensor]()
        for parents, width in zip(self._widths, self.branching, strict=True):
            if self.replacement or width == 1:
                chances.append(context.rng.uniform(parents, width))
            else:
                chances.append(context.rng.exponential(parents, self.model.draft_vocab_size))
        return chances

    def _grow(self, sampling: Sampling, hidden_BD: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        """Draft the tokens of all levels. Return the tokens and the values to check for NaN.

        Above temperature 0, `chances` are random numbers for each level. The distributions and, if nodes may be
        missing, a mask of existing nodes are returned too.
        """
        hidden_BMD, first = hidden_BD[:, None], 1
        levels = list[tuple[Tensor, ...]]()
        for level, width in enumerate(self.branching):
            logits_BMR, vocab_ids_R = self.model.draft_logits(hidden_BMD)
            if sampling.greedy:
                most = logits_BMR.topk(width, -1) if width > 1 else logits_BMR.max(-1, keepdim=True)
                tokens_BM, *more = most.indices.flatten(1), most.values[..., 0]
            else:
                tokens_BM, *more = self._draw(warp(logits_BMR, sampling), chances[level], width)
            if vocab_ids_R is not None:
                tokens_BM = vocab_ids_R[tokens_BM]
                more[1:2] = [widen(probs_BMR, vocab_ids_R, self.model.vocab_size, 0.0) for probs_BMR in more[1:2]]
            levels.append((tokens_BM, *more))
            if level + 1 < len(self.branching):
                hidden_BMD = self._draft.grow(tokens_BM, self.tree, first)
                first += tokens_BM.shape[1]
        tokens_BN1, watched_BN, *more = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        if len(more) > 1:
            more[1] = torch.nn.functional.pad(more[1], (1, 0), value=True)
        return tokens_BN1, watched_BN, *more

    def _draw(self, probs_BMR: Tensor, chance_BMX: Tensor, width: int) -> tuple[Tensor, ...]:
        """Sample candidates for each node of a level. Return the same values as `_grow`, for this level only."""
        if self.replacement or width == 1:
            token_BMC, value_BMC = draw_many(probs_BMR, chance_BMX)
            outputs = token_BMC.flatten(1), value_BMC[..., 0], probs_BMR
            if self.replacement or self._all_one:
                return outputs
            return *outputs, torch.ones_like(outputs[0], dtype=torch.bool)
        # Exponential race: sorting by p / E samples in order, without replacement. Subnormal quotients could be equal.
        probs_BMR = torch.where(probs_BMR < _MIN_SAMPLED_PROB, 0.0, probs_BMR)
        top = (probs_BMR / chance_BMX).topk(width, -1)
        # After warping or underflow at low temperatures, there may be fewer possible tokens than children.
        return top.indices.flatten(1), top.values[..., 0], probs_BMR, (top.values > 0).flatten(1)

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context, own_path_BK=None if self.tree.is_chain else verdict.path_BK)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [*self.model.draft_forwards(self._widths)]


class ParallelChain(DrafterProposer):
    """Proposer of `gamma` tokens from one forward of a drafter that was trained for parallel drafting.

    Each token is sampled independently of the others, so the usual chain verifiers apply. Source: PARD (An et al. 2025,
    arXiv 2504.18583), with the token layout of vLLM 0.32.

    Raises:
        ValueError: The drafter has no mask token.
    """

    def __init__(self, model: LanguageModel, gamma: int) -> None:
        token = mask_token(model.config)
        if token is None:
            raise ValueError("the drafter's config.json has no `pard_token`: train it with a `parallel` section")
        self.model, self.gamma, self._token = model, gamma, token
        self._tree = Tree.chain(gamma).to(model.device)
        self._ahead_K = torch.arange(gamma)

    def start(self, context: Context) -> None:
        super().start(context)
        self._masks_BM = torch.full_like(context.root_B1, self._token).repeat(1, self.gamma - 1)

    def propose(self, context: Context) -> Proposal:
        logits_BKR, vocab_ids_R = self.model.draft_logits(self._draft.read_with(context, self._masks_BM))
        probs_BKV = None
        if context.sampling.greedy:
            value_BK, tokens_BK = logits_BKR.max(-1)
        else:
            probs_BKV = warp(logits_BKR, context.sampling)
            token_BK1, value_BK1 = draw_many(probs_BKV, context.rng.uniform(self.gamma, 1))
            tokens_BK, value_BK = token_BK1[..., 0], value_BK1[..., 0]
        context.watch("the drafter's", value_BK, self._ahead_K)
        if vocab_ids_R is not None:
            tokens_BK = vocab_ids_R[tokens_BK]
            if probs_BKV is not None:
                probs_BKV = widen(probs_BKV, vocab_ids_R, self.model.vocab_size, 0.0)
        return Proposal(self._tree, torch.cat((context.root_B1, tokens_BK), 1), probs_BKV)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.model, self.gamma)]

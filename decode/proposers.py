"""Proposers: how a token tree grows from a context. A method of the papers is one of these and one verifier.

Shape letters: B batch, N tree nodes, M nodes of a level (or beams), C candidates, K depth or heads, V vocabulary,
D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checkpoints.table import BigramTable
from .drafting import DraftState, own_path
from .engine import Context, Proposal, Verdict
from .lattice import best_paths
from .models import LanguageModel
from .rng import categorical
from .tree import Tree
from .warpers import Sampling, warp


class HeadModule(Protocol):
    """Prediction heads: [..., D] hidden states to [..., K, V] logits; head k speaks of the token at depth k + 1."""

    num_heads: int

    def __call__(self, hidden_XD: Tensor) -> Tensor: ...


class Nothing:
    """The root alone: one token a step."""

    max_nodes = 1
    max_depth = 0

    def start(self, context: Context) -> None:
        self._tree = Tree.chain(0).to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        return Proposal(self._tree, context.root_B1)

    def forwards(self) -> list[tuple[Any, int]]:
        return []

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        """Nothing is remembered."""


class DraftTree:
    """Candidates sampled from a draft model, `branching[i]` for each node of depth i; ones all along: a chain.

    With replacement the candidates of a node are independent draws, else they are drawn without replacement in order
    (multi-candidate paper, sections 3.1 and 3.2). At temperature 0 both take the drafter's most likely tokens, which
    for one candidate is its greedy choice.
    """

    def __init__(self, model: LanguageModel, branching: Sequence[int], replacement: bool = True) -> None:
        self.model = model
        self.branching = tuple(branching)
        self.replacement = replacement
        self.tree = Tree.k_ary(self.branching).to(model.device)
        self.max_nodes, self.max_depth = self.tree.nodes, self.tree.max_depth

    def start(self, context: Context) -> None:
        self._draft = DraftState(self.model, context, self.max_nodes, self.max_depth)

    def propose(self, context: Context) -> Proposal:
        tokens, probs, valid = [context.root_B1], [], []
        hidden_BMD = self._draft.read_root(context)[:, None]
        first = 1
        for level, width in enumerate(self.branching):
            tokens_BM, probs_BMV, valid_BM = self._draw(hidden_BMD, width, context)
            tokens.append(tokens_BM)
            if probs_BMV is not None:
                probs.append(probs_BMV)
            valid.append(valid_BM)
            if level + 1 < len(self.branching):
                hidden_BMD = self._draft.grow(tokens_BM, self.tree, first)
                first += tokens_BM.shape[1]
        proposal = Proposal(self.tree, torch.cat(tokens, 1), torch.cat(probs, 1) if probs else None)
        if any(valid_BM is not None for valid_BM in valid):
            all_valid = [torch.ones_like(tokens_BM, dtype=torch.bool) for tokens_BM in tokens]
            levels = [
                mask if mask is not None else every for mask, every in zip([None, *valid], all_valid, strict=True)
            ]
            proposal.valid_BN = torch.cat(levels, 1)
        return proposal

    def _draw(self, hidden_BMD: Tensor, width: int, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens of the next level, [B, M x width], the distributions they come from, and which of them exist."""
        logits_BMV = self.model.logits(hidden_BMD)
        if context.sampling.greedy:
            if width == 1:
                return logits_BMV.argmax(-1), None, None
            return logits_BMV.topk(width, -1).indices.flatten(1), None, None
        probs_BMV = warp(logits_BMV, context.sampling)
        if self.replacement or width == 1:
            uniform_BMC = context.rng.uniform(probs_BMV.shape[1], width)
            drawn_BMC = (
                categorical(probs_BMV[:, :, None], uniform_BMC) if width == 1 else _draw_many(probs_BMV, uniform_BMC)
            )
            return drawn_BMC.flatten(1), probs_BMV, None
        # Exponential races: sorting by p / E is drawing without replacement, in order.
        race_BMV = probs_BMV / context.rng.exponential(*probs_BMV.shape[1:])
        top = race_BMV.topk(width, -1)
        # Warping, or a low temperature's underflow, may leave fewer possible tokens than children.
        return top.indices.flatten(1), probs_BMV, (top.values > 0).flatten(1)

    def forwards(self) -> list[tuple[Any, int]]:
        widths = [1]
        for width in self.branching[:-1]:
            widths.append(widths[-1] * width)
        return [(self.model, width) for width in widths]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context, verdict, None if self.tree.is_chain else verdict.path_BK)


def _draw_many(probs_BMV: Tensor, uniform_BMC: Tensor) -> Tensor:
    """Independent draws [B, M, C] from each of the distributions [B, M, V]."""
    cdf_BMV = probs_BMV.double().cumsum(-1)
    return torch.searchsorted(cdf_BMV, uniform_BMC * cdf_BMV[..., -1:], right=True)


class DraftBeam:
    """The most likely of a beam of draft sequences, as one chain (`mjsd.txt`, Algorithm 1: beam sample).

    At temperature 0 a beam search over the drafter's unwarped probabilities. Otherwise each level samples its beams
    without replacement in proportion to the warped joint probability. Beams are nodes of a tree in the drafter's
    cache, so none is ever copied.
    """

    def __init__(self, model: LanguageModel, gamma: int, beams: int) -> None:
        if gamma < 1 or beams < 1:
            raise ValueError(f"beam drafting needs gamma and beams of at least 1, got {gamma} and {beams}")
        self.model, self.gamma, self.beams = model, gamma, beams
        self.max_nodes, self.max_depth = gamma + 1, gamma
        self.tree = Tree.chain(gamma).to(model.device)

    def start(self, context: Context) -> None:
        self._draft = DraftState(self.model, context, 1 + self.beams * self.gamma, self.max_depth)

    def propose(self, context: Context) -> Proposal:
        rows, device = len(context.lengths), self.model.device
        hidden_BMD = self._draft.read_root(context)[:, None]
        scores_BM = torch.zeros(rows, 1, device=device)
        parents_BN = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
        tokens_BN, scores_BN = context.root_B1, scores_BM
        tree = Tree.from_parents(parents_BN, 0)
        first = 0
        for level in range(self.gamma):
            scores_BM, beam_BM, tokens_BM = self._next_beams(hidden_BMD, scores_BM, context)
            parents_BN = torch.cat((parents_BN, first + beam_BM), 1)
            tokens_BN, scores_BN = torch.cat((tokens_BN, tokens_BM), 1), torch.cat((scores_BN, scores_BM), 1)
            first = tree.nodes
            tree = Tree.from_parents(parents_BN, level + 1)
            if level + 1 < self.gamma:
                hidden_BMD = self._draft.grow(tokens_BM, tree, first)
        last_B = first + scores_BM.argmax(1)
        line_BN = tree.ancestors_BNN[torch.arange(rows, device=device), last_B]
        self._nodes_BN = torch.zeros(rows, self.gamma + 1, dtype=torch.int64, device=device)
        nodes_N = torch.arange(tree.nodes, device=device).expand(rows, -1)
        # Nodes off the line fall on column 0 together with the root, which is put right afterwards.
        self._nodes_BN.scatter_(1, torch.where(line_BN, tree.depth_BN, 0), nodes_N)
        self._nodes_BN[:, 0] = 0
        picked_tokens, picked_scores = tokens_BN.gather(1, self._nodes_BN), scores_BN.gather(1, self._nodes_BN)
        return Proposal(self.tree, picked_tokens, draft_scores_BN=picked_scores)

    def _next_beams(self, hidden_BMD: Tensor, scores_BM: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The next level's joint log-probabilities, the beam that each extends, and its token; [B, beams] each."""
        warping = Sampling(temperature=1.0) if context.sampling.greedy else context.sampling
        joint_BMV = warp(self.model.logits(hidden_BMD), warping).log() + scores_BM[..., None]
        vocab = joint_BMV.shape[-1]
        joint_BX = joint_BMV.flatten(1)
        beams = min(self.beams, joint_BX.shape[1])
        if context.sampling.greedy:
            top = joint_BX.topk(beams, 1)
            scores, picked_BM = top.values, top.indices
        else:
            race_BX = joint_BX - context.rng.exponential(joint_BX.shape[1]).log()
            picked_BM = race_BX.topk(beams, 1).indices
            scores = joint_BX.gather(1, picked_BM)
        return scores, picked_BM // vocab, picked_BM % vocab

    def forwards(self) -> list[tuple[Any, int]]:
        return [(self.model, 1)] + [(self.model, self.beams)] * (self.gamma - 1)

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context, verdict, own_path(self._nodes_BN, verdict.path_BK, verdict.accepted_B))


class HeadTree:
    """A fixed tree filled by prediction heads: a node's r-th child holds the r-th candidate of its depth's head.

    Source: Medusa, as described in `slim.txt`, sections 2 and 4.1; ones all along are blockwise parallel decoding.
    """

    def __init__(self, heads: HeadModule, branching: Sequence[int]) -> None:
        if len(branching) > heads.num_heads:
            raise ValueError(f"the tree is {len(branching)} levels deep, but there are only {heads.num_heads} heads")
        self.heads = heads
        self.branching = tuple(branching)
        self.tree = Tree.k_ary(self.branching)
        self.max_nodes, self.max_depth = self.tree.nodes, self.tree.max_depth

    def start(self, context: Context) -> None:
        self.tree = self.tree.to(context.ids_BS.device)
        width = max(self.branching)
        place_N = (self.tree.depth_BN[0, 1:] - 1) * width + self.tree.rank_BN[0, 1:]
        self._place_N, self._width = place_N, width

    def propose(self, context: Context) -> Proposal:
        logits_BKV = self.heads(context.hidden_BD)[:, : len(self.branching)]
        candidates_BX = logits_BKV.topk(self._width, -1).indices.flatten(1)
        return Proposal(self.tree, torch.cat((context.root_B1, candidates_BX[:, self._place_N]), 1))

    def forwards(self) -> list[tuple[Any, int]]:
        return [(self.heads, 1)]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        """Nothing is remembered."""


class PrunedHeadTree:
    """Of all sequences that the heads' candidates allow, those of the highest posterior (SLiM: `slim.txt`, eq. 2, 3).

    The posterior of a sequence is the product of its tokens' head probabilities and of the correlations r of its
    neighbours, the root included; sequences of every length compete (appendix C). Without a table r is 1.
    """

    def __init__(
        self, heads: HeadModule, table: BigramTable | None, sequences: int, candidates: int, unseen: float, depth: int
    ) -> None:
        if not 1 <= depth <= heads.num_heads:
            raise ValueError(f"the depth must lie between 1 and the number of heads, {heads.num_heads}; got {depth}")
        if sequences < 1 or candidates < 1:
            raise ValueError(f"sequences and candidates must be at least 1, got {sequences} and {candidates}")
        self.heads, self.table = heads, table
        self.sequences, self.candidates, self.unseen, self.depth = sequences, candidates, unseen, depth
        self.max_nodes, self.max_depth = 1 + sequences * depth, depth

    def start(self, context: Context) -> None:
        if self.table is not None:
            self.table = self.table.to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        logits_BKV = self.heads(context.hidden_BD)[:, : self.depth].float()
        top = logits_BKV.topk(self.candidates, -1)
        log_probs_BKC = top.values - logits_BKV.logsumexp(-1, keepdim=True)
        first_B1 = context.root_B1[:, :, None]
        if self.table is None:
            links_BC, links_BKCC = torch.zeros_like(log_probs_BKC[:, 0]), None
        else:
            links_BC = self.table.log_correlation(first_B1, top.indices[:, :1], self.unseen)[:, 0]
            left, right = top.indices[:, :-1, :, None], top.indices[:, 1:, None, :]
            links_BKCC = self.table.log_correlation(left, right, self.unseen)
        parents_BN, depth_BN, place_BN = best_paths(log_probs_BKC, links_BC, links_BKCC, self.sequences)
        tokens_BN = top.indices.flatten(1).gather(1, ((depth_BN - 1).clamp(min=0) * self.candidates + place_BN))
        tokens_BN[:, 0] = context.root_B1[:, 0]
        return Proposal(Tree.from_parents(parents_BN, self.depth), tokens_BN)

    def forwards(self) -> list[tuple[Any, int]]:
        return [(self.heads, 1)]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        """Nothing is remembered."""

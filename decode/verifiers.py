"""Verifiers: which path of a scored tree is kept. Each declares whether it is lossless.

In formulas p is the target's and q the drafter's warped distribution, as in the multi-candidate paper.

Shape letters: B batch, N tree nodes, M nodes with children, C children of a node, K depth, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .engine import Proposal, Verdict
from .rng import Rng, categorical
from .tree import Tree


class Sample:
    """Nothing was proposed: draw the next token from the target (autoregressive decoding)."""

    lossless = True
    raw = False

    def verify(self, proposal: Proposal, target_probs_BNV: Tensor, rng: Rng) -> Verdict:
        probs_BV = target_probs_BNV[:, 0]
        return _nothing_accepted(categorical(probs_BV, rng.uniform()))


class GreedyMatch:
    """Keep the longest path on which each token is the target's most likely one after its parent.

    Exact at temperature 0 for any proposal: what is kept is what greedy decoding would have written (`slim.txt`, eq. 1;
    blockwise parallel decoding and Medusa verify the same way).
    """

    lossless = True
    raw = False

    def verify(self, proposal: Proposal, target_probs_BNV: Tensor, rng: Rng) -> Verdict:
        best_BN = target_probs_BNV.argmax(-1)
        tree, tokens_BN = proposal.tree, proposal.tokens_BN
        if tree.max_depth == 0:
            return _nothing_accepted(best_BN[:, 0])
        if tree.is_chain:
            matches_BK = tokens_BN[:, 1:] == best_BN[:, :-1]
            return _chain_verdict(matches_BK, best_BN)
        parents_BN = tree.parents_BN.clamp(min=0).expand_as(tokens_BN)
        matches_BN = (tokens_BN == best_BN.gather(1, parents_BN)) & (tree.parents_BN >= 0)
        if proposal.valid_BN is not None:
            matches_BN &= proposal.valid_BN
        matches_BN[:, 0] = True
        on_path_BN = (matches_BN[:, None] | ~tree.ancestors_BNN).all(-1)
        return _deepest_path(tree, on_path_BN, best_BN)


class ExactChain:
    """Speculative sampling: accept x with probability min(1, p(x)/q(x)), else draw from [p - q]+.

    Source: speculative-decoding slides, Algorithm 1 and its proof (Leviathan et al.; Chen et al.).
    """

    lossless = True
    raw = False

    def verify(self, proposal: Proposal, target_probs_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.tree.is_chain
        assert proposal.draft_probs_BMV is not None
        depth = proposal.tree.max_depth
        uniform_BU = rng.uniform(depth + 1)
        drafted_BK1 = proposal.tokens_BN[:, 1:, None]
        target_BK = target_probs_BNV[:, :-1].gather(2, drafted_BK1)[..., 0]
        draft_BK = proposal.draft_probs_BMV.gather(2, drafted_BK1)[..., 0]
        accepted_BK = uniform_BU[:, :-1] * draft_BK < target_BK
        accepted_B = accepted_BK.long().cumprod(1).sum(1)
        # The distribution to draw the next token from: the residual after a rejection, p after a whole chain.
        at_B11 = accepted_B[:, None, None].expand(-1, 1, target_probs_BNV.shape[-1])
        target_BV = target_probs_BNV.gather(1, at_B11)[:, 0]
        draft_BV = proposal.draft_probs_BMV.gather(1, at_B11.clamp(max=depth - 1))[:, 0]
        rejected_B = accepted_B < depth
        next_probs_BV = torch.where(rejected_B[:, None], residual(target_BV, draft_BV), target_BV)
        path_BK = _identity_path(proposal.tree, len(accepted_B))
        return Verdict(
            path_BK, accepted_B, categorical(next_probs_BV, uniform_BU[:, -1]), accepted_B + rejected_B, rejected_B
        )


class MultiCandidate:
    """Multi-candidate speculative sampling over a tree: each node's children are tried in turn.

    With replacement Algorithm 1 of the multi-candidate paper; without, Algorithm 2, where a refused token leaves q too.
    A child that the drafter could not fill (`valid_BN` False) is passed over. Both keep the target's distribution
    (appendices A and B). For one candidate a level both are speculative sampling.
    """

    lossless = True
    raw = False

    def __init__(self, replacement: bool) -> None:
        self.replacement = replacement

    def verify(self, proposal: Proposal, target_probs_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.draft_probs_BMV is not None
        tree = proposal.tree
        rows = len(target_probs_BNV)
        path_BK = _identity_path(tree, rows).clone()
        node_B = path_BK.new_zeros(rows)
        accepted_B, examined_B = node_B.clone(), node_B.clone()
        alive_B = torch.ones_like(node_B, dtype=torch.bool)
        rejected_B = ~alive_B
        next_probs_BV = _at(target_probs_BNV, node_B)
        uniform_BKC = rng.uniform(tree.max_depth, tree.children_BNC.shape[-1])
        for depth in range(tree.max_depth):
            children_BC = _at(tree.children_BNC.expand(rows, -1, -1), node_B)
            child_B, tried_B, residual_BV = self._try_children(
                proposal, node_B, children_BC, next_probs_BV, uniform_BKC[:, depth], alive_B
            )
            found_B = child_B >= 0
            examined_B += tried_B
            rejected_B = rejected_B | (alive_B & ~found_B & (tried_B > 0))
            path_BK[:, depth] = torch.where(found_B, child_B, path_BK[:, depth])
            accepted_B += found_B
            node_B = torch.where(found_B, child_B, node_B)
            next_probs_BV = torch.where(found_B[:, None], _at(target_probs_BNV, node_B), residual_BV)
            alive_B = found_B
        next_B = categorical(next_probs_BV, rng.uniform())
        return Verdict(path_BK, accepted_B, next_B, examined_B, rejected_B)

    def _try_children(
        self,
        proposal: Proposal,
        node_B: Tensor,
        children_BC: Tensor,
        target_BV: Tensor,
        uniform_BC: Tensor,
        alive_B: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The accepted child of `node_B` (-1: none), how many were tried, and what is left of the target's mass."""
        assert proposal.draft_probs_BMV is not None
        draft_BV = _at(proposal.draft_probs_BMV, node_B.clamp(max=proposal.draft_probs_BMV.shape[1] - 1))
        found_B = torch.full_like(node_B, -1)
        tried_B = torch.zeros_like(node_B)
        for place in range(children_BC.shape[1]):
            child_B = children_BC[:, place].clamp(min=0)
            here_B = alive_B & (found_B < 0) & (children_BC[:, place] >= 0)
            if proposal.valid_BN is not None:
                here_B = here_B & _at(proposal.valid_BN, child_B)
            token_B1 = _at(proposal.tokens_BN, child_B)[:, None]
            target_B, draft_B = target_BV.gather(1, token_B1)[:, 0], draft_BV.gather(1, token_B1)[:, 0]
            accept_B = here_B & (uniform_BC[:, place] * draft_B < target_B)
            tried_B += here_B
            found_B = torch.where(accept_B, child_B, found_B)
            refused_B1 = (here_B & ~accept_B)[:, None]
            target_BV = torch.where(refused_B1, residual(target_BV, draft_BV), target_BV)
            if not self.replacement:
                left_BV = draft_BV.scatter(1, token_B1, 0.0)
                mass_B1 = left_BV.sum(1, keepdim=True)
                left_BV = left_BV / torch.where(mass_B1 > 0, mass_B1, 1.0)
                draft_BV = torch.where(refused_B1, left_BV, draft_BV)
        return found_B, tried_B, target_BV


class JointLikelihood:
    """Keep the longest prefix of a chain whose joint likelihood passes: min(1, p(x1..j)/q(x1..j)) > threshold.

    Source: `mjsd.txt`, section 3.2 and Algorithm 1. Not lossless: it aims at likely sequences, not at the target's
    distribution. A prefix may pass although a shorter one failed.
    """

    lossless = False

    def __init__(self, threshold: float, greedy: bool) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"the threshold of joint likelihood must lie in [0, 1], got {threshold}")
        self.threshold = threshold
        # One-hot probabilities know no likelihood: at temperature 0 both models are judged unwarped.
        self.raw = greedy
        self._greedy = greedy

    def verify(self, proposal: Proposal, target_probs_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.tree.is_chain
        assert proposal.draft_scores_BN is not None
        depth = proposal.tree.max_depth
        target_BK = target_probs_BNV[:, :-1].gather(2, proposal.tokens_BN[:, 1:, None])[..., 0]
        log_ratio_BK = target_BK.log().cumsum(1) - proposal.draft_scores_BN[:, 1:]
        passes_BK = log_ratio_BK.clamp(max=0).exp() > self.threshold
        place_K = torch.arange(1, depth + 1, device=passes_BK.device)
        accepted_B = (passes_BK * place_K).amax(1)
        next_probs_BV = _at(target_probs_BNV, accepted_B)
        next_B = next_probs_BV.argmax(-1) if self._greedy else categorical(next_probs_BV, rng.uniform())
        path_BK = _identity_path(proposal.tree, len(accepted_B))
        examined_B = torch.full_like(accepted_B, depth)
        return Verdict(path_BK, accepted_B, next_B, examined_B, accepted_B < depth)


def residual(target_XV: Tensor, draft_XV: Tensor) -> Tensor:
    """[p - q]+ normalised, [..., V]; p itself where nothing is left, which only rounding can bring about."""
    left_XV = (target_XV - draft_XV).clamp(min=0)
    mass_X1 = left_XV.sum(-1, keepdim=True)
    return torch.where(mass_X1 > 0, left_XV / torch.where(mass_X1 > 0, mass_X1, 1.0), target_XV)


def _at(values_BNX: Tensor, node_B: Tensor) -> Tensor:
    """values[b, node[b]] for each row."""
    return values_BNX[torch.arange(len(values_BNX), device=values_BNX.device), node_B]


def _identity_path(tree: Tree, rows: int) -> Tensor:
    return torch.arange(1, tree.max_depth + 1, device=tree.parents_BN.device).expand(rows, -1)


def _nothing_accepted(next_B: Tensor) -> Verdict:
    none_B = torch.zeros_like(next_B)
    return Verdict(next_B.new_zeros(len(next_B), 0), none_B, next_B, none_B, none_B.bool())


def _chain_verdict(matches_BK: Tensor, best_BN: Tensor) -> Verdict:
    depth = matches_BK.shape[1]
    accepted_B = matches_BK.long().cumprod(1).sum(1)
    rejected_B = accepted_B < depth
    path_BK = torch.arange(1, depth + 1, device=best_BN.device).expand(len(best_BN), -1)
    next_B = best_BN.gather(1, accepted_B[:, None])[:, 0]
    return Verdict(path_BK, accepted_B, next_B, accepted_B + rejected_B, rejected_B)


def _deepest_path(tree: Tree, on_path_BN: Tensor, best_BN: Tensor) -> Verdict:
    """The verdict that keeps the deepest node whose whole path matched (the first of equals)."""
    rows, nodes = on_path_BN.shape
    last_B = torch.where(on_path_BN, tree.depth_BN, -1).argmax(1)
    line_BN = _at(tree.ancestors_BNN.expand(rows, -1, -1), last_B)
    depth_BN = tree.depth_BN.expand(rows, -1)
    # Column 0 takes the root and, harmlessly, every node that is not on the line.
    path_BK1 = torch.arange(tree.max_depth + 1, device=line_BN.device).expand(rows, -1).clone()
    node_N = torch.arange(nodes, device=line_BN.device).expand(rows, -1)
    path_BK1.scatter_(1, torch.where(line_BN, depth_BN, 0), node_N)
    accepted_B = _at(depth_BN, last_B)
    children_B = _at(tree.child_count_BN.expand(rows, -1), last_B)
    ranks_B = torch.where(line_BN & (depth_BN > 0), tree.rank_BN.expand(rows, -1) + 1, 0).sum(1)
    next_B = _at(best_BN, last_B)
    return Verdict(path_BK1[:, 1:], accepted_B, next_B, ranks_B + children_B, children_B > 0)

"""Lossless verifiers, which select the accepted path of a scored tree and the token after it.

In formulas p is the target's and q the drafter's warped distribution, as in the multi-candidate paper (arXiv
2401.06706). `lossy.py` contains the verifiers that do not preserve p.

Shape letters: B batch, N tree nodes, M nodes with children or chains, C children of a node, K depth, V vocabulary.
"""

import torch
from torch import Tensor

from ..engine import Proposal, Verdict, Verifier
from ..rng import Rng, categorical
from .verdicts import (
    chain_verdict,
    count_prefix,
    identity_path,
    k_seq_rho,
    normalise,
    nothing_accepted,
    path_verdict,
    remove_token,
    residual,
    take_node,
)

_TINY = torch.finfo(torch.float32).tiny


class Sample(Verifier):
    """Verifier of autoregressive decoding, which samples the next token from the target."""

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        return nothing_accepted(categorical(target_BNV[:, 0], rng.uniform()))


class GreedyMatch(Verifier):
    """Verifier that accepts the longest path on which each token is the target's most likely token.

    It is exact at temperature 0 for any proposal, because the accepted tokens equal those of greedy decoding. Blockwise
    parallel decoding, Medusa and SLiM (Lin et al. 2024, eq. 1) verify in the same way.
    """

    score_type = "logits"

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        best_BN = target_BNV.max(-1).indices  # faster than argmax on CPUs
        tree, tokens_BN = proposal.tree, proposal.tokens_BN
        if tree.max_depth == 0:
            return nothing_accepted(best_BN[:, 0])
        if tree.is_chain:
            accepted_B = count_prefix(tokens_BN[:, 1:] == best_BN[:, :-1], proposal.valid_BN)
            return chain_verdict(proposal, accepted_B, best_BN.gather(1, accepted_B[:, None])[:, 0])
        parent_BN = tree.line_BNP[..., 1].expand_as(tokens_BN)
        matches_BN = tokens_BN == best_BN.gather(1, parent_BN)
        if proposal.valid_BN is not None:
            matches_BN &= proposal.valid_BN
        # The matching child of each node, or the node itself. Column 0 collects nodes that do not match, the root and
        # padding.
        numbers_1N1 = torch.arange(-1, tree.nodes, device=tokens_BN.device)[None]
        numbers_BN1 = numbers_1N1.expand(len(tokens_BN), -1)
        next_BN = numbers_BN1.scatter(1, (tree.parents_BN + 1) * matches_BN, numbers_BN1[:, 1:])[:, 1:]
        line = [next_BN.new_zeros(len(next_BN), 1)]
        for _ in range(tree.max_depth):
            line.append(next_BN.gather(1, line[-1]))
        line_BK1 = torch.cat(line, 1)
        moved_BK = line_BK1[:, 1:] != line_BK1[:, :-1]
        path_BK = torch.where(moved_BK, line_BK1[:, 1:], identity_path(tree, len(line_BK1)))
        return Verdict(path_BK, moved_BK.sum(1), take_node(best_BN, line_BK1[:, -1]))


class ExactChain(Verifier):
    """Speculative sampling verifier, which accepts a draft token x with probability min(1, p(x)/q(x)).

    A rejected token is replaced by a sample from [p - q]+. If a proposal has no `draft_probs_BMV`, its tokens are
    deterministic and q is 1. Source: arXiv 2211.17192, Algorithm 1 and appendix A.1; arXiv 2302.01318.
    """

    tolerance = 0.0

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.tree.is_chain
        depth = proposal.tree.max_depth
        uniform_BU = rng.uniform((proposal.levels or depth) + 1)
        if depth == 0:
            return nothing_accepted(categorical(target_BNV[:, 0], uniform_BU[:, -1]))
        drafted_BK1 = proposal.tokens_BN[:, 1:, None]
        target_BK = target_BNV[:, :-1].gather(2, drafted_BK1)[..., 0]
        uniform_BK = uniform_BU[:, :depth]
        if proposal.draft_probs_BMV is not None:
            uniform_BK = uniform_BK * proposal.draft_probs_BMV.gather(2, drafted_BK1)[..., 0]
        accepted_B = count_prefix(uniform_BK < target_BK + self.tolerance, proposal.valid_BN)
        rejected_B = accepted_B < depth
        if proposal.valid_BN is not None:
            rejected_B = take_node(torch.nn.functional.pad(proposal.valid_BN, (0, 1)), accepted_B + 1)
        target_BV = take_node(target_BNV, accepted_B)
        if proposal.draft_probs_BMV is not None:
            draft_BV = take_node(proposal.draft_probs_BMV, accepted_B.clamp(max=depth - 1))
        else:
            refused_B1 = drafted_BK1[:, :, 0].gather(1, accepted_B[:, None].clamp(max=depth - 1))
            draft_BV = torch.zeros_like(target_BV).scatter_(1, refused_B1, 1.0)
        next_probs_BV = torch.where(rejected_B[:, None], self.residual_distribution(target_BV, draft_BV), target_BV)
        return chain_verdict(proposal, accepted_B, categorical(next_probs_BV, uniform_BU[:, -1]))

    def residual_distribution(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        """Return the distribution [B, V] that replaces a rejected token."""
        return residual(target_BV, draft_BV)


class ExactBlock(ExactChain):
    """Block verifier for chains. On average, it accepts at least as many tokens as `ExactChain`.

    Source: Sun et al. 2024, arXiv 2403.10444, algorithm 2. With p_i = min(p_{i-1} p / q, 1) and Z_i = Σ [p_i p - q]+ at
    node i, the first i draft tokens pass with probability Z_i / (Z_i + 1 - p_i), and all γ tokens with probability p_γ.
    The longest prefix that passes is accepted, and the next token is sampled from [p_i p - q]+. Deterministic drafts
    are verified by `ExactChain`.
    """

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        draft_BKV, depth, valid_BN = proposal.draft_probs_BMV, proposal.tree.max_depth, proposal.valid_BN
        if draft_BKV is None or depth == 0:
            return ExactChain.verify(self, proposal, target_BNV, rng)
        uniform_BU = rng.uniform((proposal.levels or depth) + 1)
        drafted_BK1 = proposal.tokens_BN[:, 1:, None]
        ratio_BK1 = target_BNV[:, :-1].gather(2, drafted_BK1) / draft_BKV.gather(2, drafted_BK1).clamp(min=_TINY)
        ratio_BK = ratio_BK1[..., 0]
        if valid_BN is not None:
            ratio_BK = ratio_BK * valid_BN[:, 1:]
        keep = [torch.ones_like(ratio_BK[:, :1])]
        for level in range(depth):
            keep.append((keep[-1] * ratio_BK[:, level, None]).clamp(max=1))
        keep_BN = torch.cat(keep, 1)
        residual_BKV = (keep_BN[:, :-1, None] * target_BNV[:, :-1] - draft_BKV).clamp_(min=0)
        mass_BK = residual_BKV.sum(-1)
        pass_BK = mass_BK[:, 1:] / (mass_BK[:, 1:] + 1 - keep_BN[:, 1:-1]).clamp(min=_TINY)
        pass_BK = torch.cat((torch.where(mass_BK[:, 1:] > 0, pass_BK, keep_BN[:, 1:-1].floor()), keep_BN[:, -1:]), 1)
        ends_B = torch.full_like(proposal.tokens_BN[:, 0], depth)
        position_K = torch.arange(1, depth + 1, device=ends_B.device)
        if valid_BN is not None:  # a shorter chain passes as a whole with its last p_i
            ends_B = valid_BN[:, 1:].long().cumprod(1).sum(1)
            end_B1 = ends_B[:, None]
            pass_BK = torch.where(position_K == end_B1, keep_BN[:, 1:], pass_BK * (position_K < end_B1))
        accepted_B = ((uniform_BU[:, :depth] < pass_BK) * position_K).amax(1)
        target_BV = take_node(target_BNV, accepted_B)
        residual_BV = take_node(residual_BKV, accepted_B.clamp(max=depth - 1))
        next_probs_BV = torch.where((accepted_B < ends_B)[:, None], normalise(residual_BV, target_BV), target_BV)
        return chain_verdict(proposal, accepted_B, categorical(next_probs_BV, uniform_BU[:, -1]))


class MultiCandidate(Verifier):
    """Verifier for multi-candidate speculative sampling, which tries the children of each tree node in turn.

    Source: arXiv 2401.06706, Algorithm 1 with replacement and Algorithm 2 without, which also removes rejected tokens
    from the drafter's q. Both preserve the target's p (appendices A and B). With one candidate per level, both equal
    speculative sampling. Children with a False `valid_BN` are skipped.

    The residual of p is stored unnormalised together with its mass. Without replacement, the remaining mass of q is
    summed again, since 1 - q would cancel in float32 for a nearly certain drafter.
    """

    def __init__(self, replacement: bool) -> None:
        self.replacement = replacement

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.draft_probs_BMV is not None
        tree, rows = proposal.tree, len(target_BNV)
        children_MC, exists_MC = tree.inner_children
        uniform_BX = rng.uniform(children_MC.numel() + 1)
        uniform_BMC = uniform_BX[:, :-1].unflatten(1, children_MC.shape)
        node_B = children_MC.new_zeros(rows)
        alive_B = torch.ones_like(node_B, dtype=torch.bool)
        residual_BV = target_BNV[:, 0]
        for width in tree.widths:
            children_BC = children_MC[node_B, :width]
            exists_BC = exists_MC[node_B, :width] & alive_B[:, None]
            if proposal.valid_BN is not None:
                exists_BC &= proposal.valid_BN.gather(1, children_BC)
            tokens_BC = proposal.tokens_BN.gather(1, children_BC)
            draft_BV, uniform_BC = take_node(proposal.draft_probs_BMV, node_B), take_node(uniform_BMC, node_B)
            child_B1, residual_BV = self._try(residual_BV, draft_BV, tokens_BC, exists_BC, uniform_BC)
            alive_B = child_B1[:, 0] >= 0
            node_B = torch.where(alive_B, children_BC.gather(1, child_B1.clamp(min=0))[:, 0], node_B)
            residual_BV = torch.where(alive_B[:, None], take_node(target_BNV, node_B), residual_BV)
        return path_verdict(tree, node_B, categorical(residual_BV, uniform_BX[:, -1]))

    def _try(
        self, target_BV: Tensor, draft_BV: Tensor, tokens_BC: Tensor, exists_BC: Tensor, uniform_BC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Try a node's children. Return the accepted one [B, 1] (-1: none), and the target's residual [B, V]."""
        residual_BV, mass_B1 = target_BV, torch.ones_like(target_BV[:, :1])
        rest_B1, accepted_B1 = mass_B1, torch.full_like(tokens_BC[:, :1], -1)
        for child, token_B1 in enumerate(tokens_BC.split(1, 1)):
            draft_B1, target_B1 = draft_BV.gather(1, token_B1), residual_BV.gather(1, token_B1)
            passes_B1 = uniform_BC[:, child, None] * draft_B1 * mass_B1 < target_B1 * rest_B1
            examined_B1 = exists_BC[:, child, None] & (accepted_B1 < 0)
            accepted_B1 = torch.where(examined_B1 & passes_B1, child, accepted_B1)
            share_B1 = torch.where(examined_B1 & ~passes_B1, mass_B1 / rest_B1.clamp(min=_TINY), 0.0)
            residual_BV = torch.addcmul(residual_BV, share_B1, draft_BV, value=-1).clamp_(min=0)
            mass_B1 = residual_BV.sum(1, keepdim=True)
            if not self.replacement and child + 1 < tokens_BC.shape[1]:
                draft_BV, rest_B1 = remove_token(draft_BV, token_B1, exists_BC[:, child, None])
        # Rounding can leave a residual of zero.
        return accepted_B1, torch.where(mass_B1 > 0, residual_BV, target_BV)


class Traversal(Verifier):
    """Traversal verifier, which accepts whole paths of a sampled tree, from the leaves to the root.

    Source: Weng et al. 2025, arXiv 2505.12398, algorithm 1. For a chain this is block verification (`ExactBlock`). The
    root is accepted with probability h = 1, and a child x with min(h P(x) / Q(x), 1), where h and the distributions P
    (target) and Q (drafter) belong to its parent. All nodes below x are tried before x. A rejection leaves the parent
    the mass Z = Σ [h P − Q]+. Then h becomes Z / (Z + 1 − h), P the normalised residual, and Q loses x if x was drawn
    without replacement. The token after the accepted node is sampled from its P. Deterministic drafts use `ExactChain`.
    Nodes may be missing if this depends only on their prefix, because the proof proceeds node by node from the leaves.
    """

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        tree, tokens_BN, draft_BMV = proposal.tree, proposal.tokens_BN, proposal.draft_probs_BMV
        if draft_BMV is None or tree.max_depth == 0:
            return ExactChain().verify(proposal, target_BNV, rng)
        valid_BN = torch.ones_like(tokens_BN) if proposal.valid_BN is None else proposal.valid_BN
        uniform_BU = rng.uniform(max(proposal.levels, tree.nodes - 1) + 1)
        uniform_BN = torch.nn.functional.pad(uniform_BU[:, :-1], (1, 0), value=-1.0)  # the root is always accepted
        node_B, next_BV = torch.zeros_like(tokens_BN[:, 0]), target_BNV[:, 0]
        undecided_B = torch.ones_like(node_B, dtype=torch.bool)

        def decided() -> bool:
            """Check if all rows have an accepted node. Return False on GPUs, to avoid a synchronisation."""
            return undecided_B.device.type == "cpu" and not undecided_B.any()

        def visit(node: int, keep_B1: Tensor) -> None:
            nonlocal node_B, next_BV, undecided_B
            # h P equals `residual_BV` times `scale_B1`.
            residual_BV, scale_B1, rest_B1 = target_BNV[:, node], keep_B1, torch.ones_like(keep_B1)
            draft_BV = draft_BMV[:, node] if tree.children[node] else residual_BV
            for child in tree.children[node]:
                token_B1, exists_B1 = tokens_BN[:, child, None], valid_BN[:, child, None]
                draft_B1 = draft_BV.gather(1, token_B1)
                ratio_B1 = scale_B1 * residual_BV.gather(1, token_B1) * rest_B1 / draft_B1.clamp(min=_TINY)
                visit(child, ratio_B1.clamp(max=1) * exists_B1)
                if decided():
                    return
                share_B1 = exists_B1 / rest_B1.clamp(min=_TINY)
                residual_BV = torch.addcmul(scale_B1 * residual_BV, share_B1, draft_BV, value=-1).clamp_(min=0)
                mass_B1 = residual_BV.sum(1, keepdim=True)
                scale_B1 = 1 / (mass_B1 + 1 - keep_B1).clamp(min=_TINY)
                keep_B1 = mass_B1 * scale_B1
                if not self.replacement and child != tree.children[node][-1]:
                    draft_BV, rest_B1 = remove_token(draft_BV, token_B1, exists_B1 > 0)
            accepts_B = undecided_B & (uniform_BN[:, node] < keep_B1[:, 0])
            node_B = torch.where(accepts_B, node, node_B)
            next_BV, undecided_B = torch.where(accepts_B[:, None], residual_BV, next_BV), undecided_B & ~accepts_B

        visit(0, torch.ones_like(uniform_BU[:, :1]))
        # Rounding can leave a residual of zero.
        next_BV = torch.where(next_BV.sum(1, keepdim=True) > 0, next_BV, take_node(target_BNV, node_B))
        return path_verdict(tree, node_B, categorical(next_BV, uniform_BU[:, -1]))


class SampleAndMatch(Verifier):
    """Verifier that samples each token from the target and follows the tree while it contains that token.

    With candidates sampled from a drafter, this is MCNS (arXiv 2401.06706, section 4.5 and appendix C). For
    deterministic candidates, such as those of prediction heads, no exact method accepts more tokens.
    """

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        tree, tokens_BN = proposal.tree, proposal.tokens_BN
        rows, depth = len(tokens_BN), tree.max_depth
        uniform_BU = rng.uniform((proposal.levels or depth) + 1)
        node_B = tokens_BN.new_zeros(rows)
        token_B = categorical(target_BNV[:, 0], uniform_BU[:, 0])
        if depth == 0:
            return nothing_accepted(token_B)
        alive_B = torch.ones_like(node_B, dtype=torch.bool)
        for level in range(depth):
            children_BN = (tree.parents_BN == node_B[:, None]) & alive_B[:, None]
            if proposal.valid_BN is not None:
                children_BN &= proposal.valid_BN
            matches_BN = children_BN & (tokens_BN == token_B[:, None])
            matches_B, child_B = matches_BN.any(1), matches_BN.int().argmax(1)
            node_B = torch.where(matches_B, child_B, node_B)
            next_B = categorical(take_node(target_BNV, node_B), uniform_BU[:, level + 1])
            token_B = torch.where(matches_B, next_B, token_B)
            alive_B = matches_B
        return path_verdict(tree, node_B, token_B)


class SeveralDrafters(Verifier):
    """Verifier of one chain per drafter, which tries candidates in turn, each with its own drafter's distribution.

    This is Algorithm 1 of arXiv 2401.06706 with a distribution q_m for the m-th candidate, as in SpecInfer (multi-step
    speculative sampling, arXiv 2305.09781). Only chains with the accepted token are tried at the next level.
    """

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.chains is not None
        nodes_BMK, probs_BMKV = proposal.chains.nodes_BMK, proposal.chains.probs_BMKV
        rows, chains, depth = nodes_BMK.shape
        tokens_BMK = proposal.tokens_BN.gather(1, nodes_BMK.flatten(1)).view_as(nodes_BMK)
        uniform_BKM, last_B = rng.uniform(depth, chains), rng.uniform()
        node_B, residual_BV = nodes_BMK.new_zeros(rows), target_BNV[:, 0]
        alive_BM = torch.ones(rows, chains, dtype=torch.bool, device=node_B.device)
        for level in range(depth):
            tokens_BM = tokens_BMK[:, :, level]
            draft_BMV, uniform_BM = probs_BMKV[:, :, level], uniform_BKM[:, level]
            chain_B, residual_BV = self.pick(alive_BM, tokens_BM, draft_BMV, residual_BV, uniform_BM)
            accepts_B = chain_B >= 0
            winner_B1 = chain_B.clamp(min=0)[:, None]
            node_B = torch.where(accepts_B, nodes_BMK[:, :, level].gather(1, winner_B1)[:, 0], node_B)
            residual_BV = torch.where(accepts_B[:, None], take_node(target_BNV, node_B), residual_BV)
            alive_BM = alive_BM & accepts_B[:, None] & (tokens_BM == tokens_BM.gather(1, winner_B1))
        return path_verdict(proposal.tree, node_B, categorical(residual_BV, last_B))

    def pick(
        self, alive_BM: Tensor, tokens_BM: Tensor, draft_BMV: Tensor, target_BV: Tensor, uniform_BM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the chain whose token is accepted, [B] (-1 for none), and the residual of the target, [B, V]."""
        chain_B = torch.full_like(tokens_BM[:, 0], -1)
        for chain in range(tokens_BM.shape[1]):
            examined_B = alive_BM[:, chain] & (chain_B < 0)
            token_B1, draft_BV = tokens_BM[:, chain, None], draft_BMV[:, chain]
            target_B, draft_B = target_BV.gather(1, token_B1)[:, 0], draft_BV.gather(1, token_B1)[:, 0]
            accept_B = examined_B & (uniform_BM[:, chain] * draft_B < target_B)
            chain_B = torch.where(accept_B, chain, chain_B)
            target_BV = torch.where((examined_B & ~accept_B)[:, None], residual(target_BV, draft_BV), target_BV)
        return chain_B, target_BV


class KSequential(SeveralDrafters):
    """k-SEQ verifier of SpecTr, which accepts the first of k candidate tokens x with u < p(x) / (ρ q(x)).

    u is uniform in [0, 1), and ρ is the smallest value for which the residual of p is a distribution (`k_seq_rho`).
    With one remaining chain, ρ is 1 and the rule equals speculative sampling. Source: arXiv 2310.15141, Algorithm 2.
    """

    def pick(
        self, alive_BM: Tensor, tokens_BM: Tensor, draft_BMV: Tensor, target_BV: Tensor, uniform_BM: Tensor
    ) -> tuple[Tensor, Tensor]:
        # All remaining chains have the same prefix and therefore the same q.
        draft_BV = take_node(draft_BMV, alive_BM.int().argmax(1))
        count_B1 = alive_BM.sum(1, keepdim=True).clamp(min=1)
        rho_B1 = k_seq_rho(target_BV, draft_BV, count_B1)
        target_BM, draft_BM = target_BV.gather(1, tokens_BM), draft_BV.gather(1, tokens_BM)
        accept_BM = alive_BM & (uniform_BM * rho_B1 * draft_BM < target_BM)
        accepts_B, first_B = accept_BM.any(1), accept_BM.int().argmax(1)
        # Each chain accepts x with probability min(q, p/ρ). The expected number of chains tried is Σ (1 - β)^i.
        accepted_BV = torch.minimum(draft_BV, target_BV / rho_B1)
        beta_B1 = accepted_BV.sum(1, keepdim=True)
        any_B1 = -torch.expm1(count_B1 * torch.log1p(-beta_B1.clamp(max=1)))  # 1 - (1 - β)^k without cancellation
        times_B1 = torch.where(beta_B1 > 0, any_B1 / beta_B1.clamp(min=1e-30), count_B1)
        residual_BV = normalise(target_BV - accepted_BV * times_B1, target_BV)
        refused_B1 = (alive_BM.any(1) & ~accepts_B)[:, None]
        return torch.where(accepts_B, first_B, -1), torch.where(refused_B1, residual_BV, target_BV)

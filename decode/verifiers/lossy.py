"""Lossy verifiers, which change the target's distribution for higher speed or more likely outputs.

In formulas p is the target's and q the drafter's warped distribution, as in the multi-candidate paper (arXiv
2401.06706).

Shape letters: B batch, N tree nodes, K depth, V vocabulary.
"""

import math

import torch
from torch import Tensor

from ..engine import Proposal, Verdict, Verifier
from ..rng import Rng, categorical
from .lossless import ExactChain
from .verdicts import chain_verdict, count_prefix, normalise, path_verdict, take_node


class JointLikelihood(Verifier):
    """Verifier that accepts the longest prefix of a chain with min(1, p/q) > threshold.

    p and q are the joint probabilities of a prefix under target and drafter. A prefix may pass even if a shorter one
    does not. Source: arXiv 2407.09722, section 3.2 and Algorithm 1.
    """

    lossless = False

    def __init__(self, threshold: float, greedy: bool) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"likelihood_threshold must be in [0, 1], got {threshold}")
        self._log_threshold = math.log(threshold) if threshold else -math.inf
        # At temperature 0 probabilities are one-hot, so both models are compared unwarped.
        self.score_type = "unwarped" if greedy else "probabilities"

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.tree.is_chain
        assert proposal.draft_scores_BN is not None
        depth = proposal.tree.max_depth
        target_BK = target_BNV[:, :-1].gather(2, proposal.tokens_BN[:, 1:, None])[..., 0]
        log_ratio_BK = target_BK.log().cumsum(1) - proposal.draft_scores_BN[:, 1:]
        passes_BK = log_ratio_BK.clamp(max=0) > self._log_threshold
        position_K = torch.arange(1, depth + 1, device=passes_BK.device)
        accepted_B = (passes_BK * position_K).amax(1)
        verdict = chain_verdict(proposal, accepted_B, _next(self, target_BNV, accepted_B, rng))
        verdict.examined_B, verdict.rejected_B = torch.full_like(accepted_B, depth), accepted_B < depth
        return verdict


class Rollback(Verifier):
    """Verifier that accepts the draft tokens before the first token x with -log p(x) > threshold.

    Source: the rollback policy of BiLD (arXiv 2302.07863).
    """

    lossless = False

    def __init__(self, threshold: float, greedy: bool) -> None:
        if threshold < 0:
            raise ValueError(f"rollback_threshold must be at least 0, got {threshold}")
        self._log_threshold = -threshold
        self.score_type = "unwarped" if greedy else "probabilities"

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.tree.is_chain
        target_BK = target_BNV[:, :-1].gather(2, proposal.tokens_BN[:, 1:, None])[..., 0]
        accepted_B = count_prefix(target_BK.log() >= self._log_threshold, proposal.valid_BN)
        return chain_verdict(proposal, accepted_B, _next(self, target_BNV, accepted_B, rng))


class OverAcceptance(ExactChain):
    """Verifier that accepts x with probability b = min(1, (p(x) + ε)/q(x)), which reduces rejections and adds a bias.

    With `optimal`, a rejected token is replaced by a sample from [p - b q]+, which minimises the bias for this b.
    Otherwise, it is replaced by a sample from p (Decoding-OPT and Decoding-UNO of arXiv 2411.00841, section 4).
    [p - b q]+ equals [p - q]+, because both are 0 for tokens with b < 1.
    """

    lossless = False

    def __init__(self, epsilon: float, optimal: bool) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must be in [0, 1], got {epsilon}")
        self.tolerance, self._optimal = epsilon, optimal

    def residual_distribution(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
        return super().residual_distribution(target_BV, draft_BV) if self._optimal else target_BV


class TypicalAcceptance(Verifier):
    """Verifier that accepts the deepest path of tokens x with p(x) > min(ε, δ exp(-H(p))), where H is the entropy.

    Among equally deep paths, the most likely path is accepted. The next token is sampled from the tokens that pass.
    Source: typical acceptance of Medusa (arXiv 2401.10774), with its defaults ε = 0.09 and δ = 0.3.
    """

    lossless = False

    def __init__(self, epsilon: float, delta: float) -> None:
        if not (0 < epsilon < 1 and 0 < delta <= 1):
            raise ValueError(f"epsilon must be in (0, 1) and delta in (0, 1], got {epsilon} and {delta}")
        self._epsilon, self._delta = epsilon, delta

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        tree = proposal.tree
        entropy_BN = torch.special.entr(target_BNV).sum(-1)
        floor_BN = (self._delta * (-entropy_BN).exp()).clamp(max=self._epsilon)
        parents_BN = tree.parents_BN.clamp(min=0).expand_as(proposal.tokens_BN)
        rows_B1 = torch.arange(len(parents_BN), device=parents_BN.device)[:, None]
        token_BN = target_BNV[rows_B1, parents_BN, proposal.tokens_BN]
        log_BN = torch.where(tree.parents_BN >= 0, token_BN.log(), 0.0)
        path_scores_BN = torch.where(tree.ancestors_BNN, log_BN[:, None], 0.0).sum(-1)
        passes_BN = (token_BN > floor_BN.gather(1, parents_BN)) & (tree.parents_BN >= 0)
        passes_BN[:, 0] = True
        on_path_BN = (passes_BN[:, None] | ~tree.ancestors_BNN).all(-1)
        reach_BN = torch.where(on_path_BN, tree.depth_BN, -1)
        deepest_BN = reach_BN == reach_BN.amax(1, keepdim=True)
        last_B = torch.where(deepest_BN, path_scores_BN, -torch.inf).argmax(1)
        probs_BV, floor_B1 = take_node(target_BNV, last_B), take_node(floor_BN, last_B)[:, None]
        typical_BV = normalise(torch.where(probs_BV > floor_B1, probs_BV, 0.0), probs_BV)
        return path_verdict(tree, last_B, categorical(typical_BV, rng.uniform()))


class AcceptAll(Verifier):
    """Verifier that accepts a chain proposed by the target itself. The chain's last token becomes the next token."""

    lossless = False
    score_type = "logits"

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        depth, tokens_BN = proposal.tree.max_depth, proposal.tokens_BN
        accepted_B = torch.full_like(tokens_BN[:, 0], depth - 1)
        verdict = chain_verdict(proposal, accepted_B, tokens_BN[:, -1])
        verdict.examined_B, verdict.rejected_B = accepted_B, torch.zeros_like(accepted_B, dtype=torch.bool)
        return verdict


def _next(verifier: JointLikelihood | Rollback, target_BNV: Tensor, accepted_B: Tensor, rng: Rng) -> Tensor:
    """Return the token after the accepted path: a sample, or the most likely token for unwarped scores."""
    probs_BV = take_node(target_BNV, accepted_B)
    return probs_BV.argmax(-1) if verifier.score_type == "unwarped" else categorical(probs_BV, rng.uniform())

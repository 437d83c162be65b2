"""Verdicts on paths of a tree, and the residual distributions of rejected tokens.

Shape letters: B batch, N tree nodes, M values of ρ, C children of a node, K depth, V vocabulary, X any shape.
"""

import torch
from torch import Tensor

from ..engine import Proposal, Verdict
from ..tree import Tree


def remove_token(draft_BV: Tensor, token_B1: Tensor, exists_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Set the probability of a sampled token in q to 0. Return q and its remaining mass [B, 1].

    Rows in which `exists_B1` is False are unchanged.
    """
    draft_BV = draft_BV.scatter(1, token_B1, torch.where(exists_B1, 0.0, draft_BV.gather(1, token_B1)))
    return draft_BV, draft_BV.sum(1, keepdim=True)


def k_seq_rho(target_BV: Tensor, draft_BV: Tensor, count_B1: Tensor) -> Tensor:
    """Return the ρ in [1, k], [B, 1], that solves 1 - (1 - β(ρ))^k = ρ β(ρ), where β(ρ) = Σ min(q, p/ρ).

    p and q are the distributions of target and drafter. k is `count_B1`, the number of draws. ρ is exact to 24 bits.
    """
    bits = 2 if target_BV.device.type == "cpu" else 6  # bits per iteration; kernel launches dominate on GPUs
    part_M = torch.arange(1, 1 << bits, dtype=target_BV.dtype, device=target_BV.device)
    low_B1 = torch.ones_like(target_BV[:, :1])
    width_B1 = (count_B1 - low_B1) / (1 << bits)
    for _ in range(24 // bits):
        rho_BM = low_B1 + width_B1 * part_M
        beta_BM = torch.minimum(draft_BV[:, None], target_BV[:, None] / rho_BM[..., None]).sum(2).clamp(max=1)
        below_BM = rho_BM * beta_BM < 1 - (1 - beta_BM) ** count_B1
        low_B1, width_B1 = low_B1 + width_B1 * below_BM.sum(1, keepdim=True), width_B1 / (1 << bits)
    return low_B1 + width_B1 * (1 << bits)


def residual(target_XV: Tensor, draft_XV: Tensor) -> Tensor:
    """Return [p - q]+ normalised, [..., V], or p if rounding leaves no mass."""
    return normalise(target_XV - draft_XV, target_XV)


def normalise(mass_XV: Tensor, otherwise_XV: Tensor) -> Tensor:
    """Set negative values to 0 and scale the rest to sum to 1. Return `otherwise_XV` if all values are 0."""
    positive_XV = mass_XV.clamp(min=0)
    mass_X1 = positive_XV.sum(-1, keepdim=True)
    return torch.where(mass_X1 > 0, positive_XV / torch.where(mass_X1 > 0, mass_X1, 1.0), otherwise_XV)


def take_node(values_BNX: Tensor, node_B: Tensor) -> Tensor:
    """Return values[b, node[b]] for each row b, [B, X]. Values of shape [1, N, X] apply to all rows."""
    if len(values_BNX) == 1:
        return values_BNX[0].index_select(0, node_B)  # several times cheaper than indexing by two tensors
    return values_BNX[torch.arange(len(values_BNX), device=values_BNX.device), node_B]


def identity_path(tree: Tree, rows: int) -> Tensor:
    """Return a placeholder path [B, K] for rows without accepted nodes, in which column i contains i + 1."""
    return torch.arange(1, tree.max_depth + 1, device=tree.parents_BN.device).expand(rows, -1)


def nothing_accepted(next_B: Tensor) -> Verdict:
    """Return the verdict on a proposal that contains only the root."""
    return Verdict(next_B.new_zeros(len(next_B), 0), torch.zeros_like(next_B), next_B)


def count_prefix(passes_BK: Tensor, valid_BN: Tensor | None) -> Tensor:
    """Return the number of accepted tokens before the first rejected token of each chain, [B]."""
    if valid_BN is not None:
        passes_BK = passes_BK & valid_BN[:, 1:]
    return passes_BK.cumprod(1).sum(1)


def chain_verdict(proposal: Proposal, accepted_B: Tensor, next_B: Tensor) -> Verdict:
    """Return the verdict that accepts the first `accepted_B` tokens of a chain."""
    return Verdict(identity_path(proposal.tree, len(accepted_B)), accepted_B, next_B)


def path_verdict(tree: Tree, last_B: Tensor, next_B: Tensor) -> Verdict:
    """Return the verdict that accepts the path from the root to the node `last_B` of each row."""
    accepted_B, path_BK = take_node(tree.depth_BN, last_B), identity_path(tree, len(last_B))
    steps_BK = accepted_B[:, None] - path_BK
    node_BK = take_node(tree.line_BNP, last_B).gather(1, steps_BK.clamp(min=0))
    return Verdict(torch.where(steps_BK >= 0, node_BK, path_BK), accepted_B, next_B)

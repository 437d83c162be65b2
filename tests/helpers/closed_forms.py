"""Closed forms from papers: rejection and over-acceptance for two given distributions, in double precision.

In formulas, p is the target's and q the drafter's distribution, as in arXiv 2401.06706 (arXiv 2411.00841 swaps the
letters).

Shape letters: V vocabulary, X any leading shape.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TINY = 1e-300


def total_variation(target_XV: Floats, draft_XV: Floats) -> Floats:
    """Compute TV(p, q) = ½ Σ |p - q|, [...]; it equals D_LK of arXiv 2211.17192 (definition 3.2, lemma 3.3)."""
    return np.asarray(np.abs(target_XV - draft_XV).sum(-1) / 2)


def refusals(target_XV: Floats, draft_XV: Floats, candidates: int) -> tuple[Floats, Floats]:
    """Apply the recursion of Algorithm 1 of arXiv 2401.06706 (with replacement): p¹ = p, pᵐ⁺¹ = [pᵐ - q]+.

    Returns:
        The probability that all `candidates` are rejected, Π TV(pᵐ, q), [...], and the distribution of the next token
        in that case, pᵏ⁺¹, [..., V]. If its mass is zero, the last distribution with a positive mass is returned.
    """
    left_XV, refused_X1 = np.asarray(target_XV, dtype=np.float64), np.ones((*np.shape(target_XV)[:-1], 1))
    for _ in range(candidates):
        rest_XV = np.maximum(left_XV - draft_XV, 0)
        mass_X1 = rest_XV.sum(-1, keepdims=True)
        refused_X1 = refused_X1 * mass_X1
        left_XV = np.where(mass_X1 > 0, rest_XV / np.maximum(mass_X1, _TINY), left_XV)
    return refused_X1[..., 0], left_XV


class OverAccepted(NamedTuple):
    """Results of over-acceptance, b = min(1, (p + ε)/q), for a target distribution p and a draft distribution q."""

    accept_V: Floats
    """Acceptance probabilities b, [V]."""
    rejection: float
    """Probability of rejection, Σ (1 - b) q."""
    loss: float
    """Loss*(b): minimum bias for this b, as total variation from the target distribution."""
    optimal_V: Floats
    """Output distribution of Decoding-OPT, which samples from [p - b q]+ after a rejection; its bias is `loss`."""
    simple_V: Floats
    """Output distribution of Decoding-UNO, which samples from p after a rejection."""


def over_acceptance(target_V: Floats, draft_V: Floats, epsilon: float) -> OverAccepted:
    """Compute rejection probability, minimum bias and outputs of over-acceptance (arXiv 2411.00841, theorem 4).

    The minimum bias is Loss*(b) = ½ Σ |p - bq| - ½ Σ (1 - b) q for the acceptance probabilities b.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon must lie in [0, 1], got {epsilon}")
    accept_V = np.minimum(1, (target_V + epsilon) / np.maximum(draft_V, _TINY))
    accepted_V = accept_V * draft_V
    rejection = float((draft_V - accepted_V).sum())
    loss = float(np.abs(target_V - accepted_V).sum() / 2 - rejection / 2)
    rest_V = np.maximum(target_V - accepted_V, 0)
    optimal_V = accepted_V + rejection * (rest_V / rest_V.sum() if rest_V.sum() > 0 else target_V)
    return OverAccepted(accept_V, rejection, loss, optimal_V, accepted_V + rejection * target_V)

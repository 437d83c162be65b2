"""Closed forms of the papers: what acceptance, rejections and speed are to be expected of two distributions.

In double precision. In formulas p is the target's and q the drafter's distribution, as in the multi-candidate paper
(Yin's paper has the letters the other way round).

Shape letters: V vocabulary, T positions, X any leading shape. In tables [T, V, V] the last index is the next token, the
one before it the last token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TINY = 1e-300


def total_variation(target_XV: Floats, draft_XV: Floats) -> Floats:
    """TV(p, q) = ½ Σ |p - q|, [...]; the slides' D_LK (definition 3.2, lemma 3.3)."""
    return np.asarray(np.abs(target_XV - draft_XV).sum(-1) / 2)


def acceptance(target_XV: Floats, draft_XV: Floats) -> Floats:
    """β = Σ min(p, q) = 1 - TV(p, q), [...]: the probability that a draft token is accepted (slides, theorem 3.5)."""
    return np.asarray(np.minimum(target_XV, draft_XV).sum(-1))


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - α^(γ+1)) / (1 - α): tokens that a step yields (slides, "Theoretical analysis"; Leviathan et al., eq. 1).

    α is taken to be the same and independent at every position. ValueError: α outside [0, 1], a negative γ.
    """
    _check_alpha(alpha)
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    return float(sum(alpha**depth for depth in range(gamma + 1)))


def walltime_improvement(alpha: float, gamma: int, cost: float) -> float:
    """(1 - α^(γ+1)) / ((1 - α)(γc + 1)): the speedup over plain decoding (slides, "Total walltime improvement").

    `cost` is c, the time of a drafter's forward in those of the target.
    """
    if cost < 0:
        raise ValueError(f"the cost of a draft token must be at least 0, got {cost}")
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def best_gamma(alpha: float, cost: float, limit: int = 64) -> int:
    """The γ from 0 to `limit` of the greatest walltime improvement, the smallest of equals (slides, "Choosing γ")."""
    return max(range(limit + 1), key=lambda gamma: (walltime_improvement(alpha, gamma, cost), -gamma))


def oracle_improvement(alpha: float, cost: float) -> float:
    """1 / ((1 - α) + cα): the speedup if γ were always the number of tokens that will be accepted.

    A run of accepted tokens has α / (1 - α) of them on average, and ends in one token of the target's own: tokens
    1 / (1 - α) for 1 + cα / (1 - α). Source: slides, "Oracle factor" (Leviathan et al., appendix A.4).
    """
    _check_alpha(alpha)
    return 1 / ((1 - alpha) + cost * alpha) if alpha < 1 or cost else float("inf")


def refusals(target_XV: Floats, draft_XV: Floats, candidates: int) -> tuple[Floats, Floats]:
    """Algorithm 1 of the multi-candidate paper (with replacement), by its recursion: p¹ = p, pᵐ⁺¹ = [pᵐ - q]+.

    Returns:
        The probability that all `candidates` are refused, Π TV(pᵐ, q), [...], and the distribution that the token is
        drawn from then, pᵏ⁺¹, [..., V]. Where nothing can be left the last distribution with a mass is given.
    """
    left_XV, refused_X1 = np.asarray(target_XV, dtype=np.float64), np.ones((*np.shape(target_XV)[:-1], 1))
    for _ in range(candidates):
        rest_XV = np.maximum(left_XV - draft_XV, 0)
        mass_X1 = rest_XV.sum(-1, keepdims=True)
        refused_X1 = refused_X1 * mass_X1
        left_XV = np.where(mass_X1 > 0, rest_XV / np.maximum(mass_X1, _TINY), left_XV)
    return refused_X1[..., 0], left_XV


def naive_acceptance(target_XV: Floats, draft_XV: Floats, candidates: int) -> Floats:
    """Σ p (1 - (1 - q)^k), [...]: a token drawn from p is among k independent candidates (MCNS, appendix C)."""
    return np.asarray((target_XV * (1 - (1 - draft_XV) ** candidates)).sum(-1))


def expected_rejections(target_TVV: Floats, draft_TVV: Floats, start: int, weights_TVV: Floats | None = None) -> float:
    """E[N_rej] = Σₙ E TV(pₙ, qₙ) of T tokens of a Markov chain (Yin et al. 2024, theorem 1; `theory.md`, point 1).

    Drafts are free and unbounded: a step ends by a rejection or with the text, which begins with `start`. The formula
    is right where the target's chain weighs the prefixes, the default.
    """
    prefix_V = _one_hot(start, target_TVV.shape[-1])
    total = 0.0
    weights_TVV = target_TVV if weights_TVV is None else weights_TVV
    for target_VV, draft_VV, weights_VV in zip(target_TVV, draft_TVV, weights_TVV, strict=True):
        total += float(prefix_V @ total_variation(target_VV, draft_VV))
        prefix_V = prefix_V @ weights_VV
    return total


def expected_batch_rejections(
    target_TVV: Floats, draft_TVV: Floats, start: int, drafts: int | None, first: float = 1.0
) -> float:
    """E[N_rej] of batch speculative decoding: Σₙ E TV(pₙ, qₙ) - Σₙ Σ f(x₁..ₙ₋₁) [TV(pₙ, qₙ) - Πₘ TV(pₙᵐ, qₙ)].

    f(x₁..ₙ) is the probability that the prefix is x₁..ₙ and that its last token took the place of a refused one. Of the
    chain only the last token matters, so f is kept by it. It follows from the target's own probability of the prefix,
    which the output has because it is unbiased: where the last token was not a replacement there is one candidate,
    refused with probability TV(p, q) and replaced from [p - q]+; where it was, all M are refused with probability
    Π TV(pᵐ, q) and replaced from pᴹ⁺¹. Source: Yin et al. 2024, theorem 4 (Algorithm 4; `theory.md`, point 3).

    Args:
        drafts: M; None: its limit, where one of the candidates is always accepted.
        first: f of the empty prefix. M drafts are made at the start too, so it is 1.
    """
    prefix_V = _one_hot(start, target_TVV.shape[-1])
    replaced_V = first * prefix_V
    total = 0.0
    for target_VV, draft_VV in zip(target_TVV, draft_TVV, strict=True):
        one_V, after_one_VV = refusals(target_VV, draft_VV, 1)
        all_V, after_all_VV = refusals(target_VV, draft_VV, drafts or 1)
        if drafts is None:
            all_V = np.zeros_like(all_V)
        total += float(prefix_V @ one_V - replaced_V @ (one_V - all_V))
        replaced_V, prefix_V = (
            (replaced_V * all_V) @ after_all_VV + ((prefix_V - replaced_V) * one_V) @ after_one_VV,
            prefix_V @ target_VV,
        )
    return total


def expected_naive_rejections(target_TVV: Floats, draft_TVV: Floats, start: int) -> float:
    """Σₙ E [1 - Σ p q]: rejections where a token is drawn from the target and compared with the drafter's.

    Unbiased too, and above `expected_rejections`, as theorem 2 of Yin et al. has it of every unbiased method.
    """
    prefix_V, total = _one_hot(start, target_TVV.shape[-1]), 0.0
    for target_VV, draft_VV in zip(target_TVV, draft_TVV, strict=True):
        total += float(prefix_V @ (1 - naive_acceptance(target_VV, draft_VV, 1)))
        prefix_V = prefix_V @ target_VV
    return total


def acceleration(tokens: float, rejections: float) -> float:
    """T / E[N_rej]: tokens for one call of the target, where drafts are free and unbounded (`theory.md`, point 1)."""
    return tokens / rejections if rejections > 0 else float("inf")


class OverAccepted(NamedTuple):
    """What acceptance with b = min(1, (p + ε)/q) makes of one pair of distributions."""

    accept_V: Floats
    """b, [V]."""
    rejection: float
    """Σ (1 - b) q."""
    loss: float
    """Loss*(b): the smallest bias (total variation from the target) that b allows."""
    optimal_V: Floats
    """The output of Decoding-OPT, which draws from [p - b q]+ after a refusal: its bias is `loss`."""
    simple_V: Floats
    """The output of Decoding-UNO, which draws from p after a refusal."""


def over_acceptance(target_V: Floats, draft_V: Floats, epsilon: float) -> OverAccepted:
    """Rejections, smallest bias and outputs of over-acceptance (Yin et al. 2024, theorem 5; `theory.md`, points 4, 6).

    Loss*(b) = ½ Σ |p - bq| - ½ Σ (1 - b) q.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon must lie in [0, 1], got {epsilon}")
    accept_V = np.minimum(1, (target_V + epsilon) / np.maximum(draft_V, _TINY))
    kept_V = accept_V * draft_V
    rejection = float((draft_V - kept_V).sum())
    loss = float(np.abs(target_V - kept_V).sum() / 2 - rejection / 2)
    rest_V = np.maximum(target_V - kept_V, 0)
    optimal_V = kept_V + rejection * (rest_V / rest_V.sum() if rest_V.sum() > 0 else target_V)
    return OverAccepted(accept_V, rejection, loss, optimal_V, kept_V + rejection * target_V)


def _one_hot(token: int, vocab: int) -> Floats:
    return np.asarray(np.eye(vocab)[token])


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"an acceptance rate must lie in [0, 1], got {alpha}")

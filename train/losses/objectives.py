"""Objectives of drafter training, and their weights over a run.

Letters: C positions of a chunk, V events (the vocabulary, or the tokens of a top-k teacher and "any other").
p is the teacher's distribution, q the drafter's, α = Σ_v min(p_v, q_v) the probability that a draft token is accepted
(Leviathan et al. 2023, arXiv 2211.17192, definition 3.2 and lemma 3.3), z the drafter's logits.

A divergence takes log q (finite) and log p (may be −∞). It returns the loss of each position and the analytic
gradient of their sum with respect to z, to which the formulas below refer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoints.storage.messages import did_you_mean

LOG_FLOOR = -100.0  # reverse KL clamps log p here; e^−100 is below the smallest normal float32
LK_DECAY = 3.0  # η of `lk-lambda`

LABELS = "cross-entropy"
"""Name of the objective that learns from labels. All others learn from a teacher."""

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy_chunk(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy −log q_label of the drafter's probabilities q, and its gradient q − onehot(label)."""
    labels_C1 = labels_C[:, None]
    grad_CV = logits_CV.softmax(1)
    loss_C1 = logits_CV.amax(1, keepdim=True) - grad_CV.amax(1, keepdim=True).log_() - logits_CV.gather(1, labels_C1)
    grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1, dtype=grad_CV.dtype))
    return loss_C1[:, 0], grad_CV


def forward_kl_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute forward KL(p ‖ q) of teacher p and drafter q, and its gradient q − p (arXiv 1503.02531, section 2)."""
    teacher_CV = log_teacher_CV.exp()
    gap_CV = _without_infinity(log_teacher_CV).sub_(log_drafter_CV)
    return gap_CV.mul_(teacher_CV).sum(1), log_drafter_CV.exp().sub_(teacher_CV)


def reverse_kl_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute reverse KL(q ‖ p) = Σ q · g of drafter q and teacher p, and its gradient q · (g − KL).

    g is log q − log p, where log p is clamped to −100 (`LOG_FLOOR`), since the exact value is infinite if p is 0 and q
    is not. Sources: MiniLLM (arXiv 2306.08543, section 2.1), DistillSpec (arXiv 2310.08461, section 4).
    """
    drafter_CV = log_drafter_CV.exp()
    gap_CV = log_teacher_CV.clamp(min=LOG_FLOOR).neg_().add_(log_drafter_CV)
    loss_C = (drafter_CV * gap_CV).sum(1)
    return loss_C, gap_CV.sub_(loss_C[:, None]).mul_(drafter_CV)


def jensen_shannon_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the Jensen-Shannon divergence ½ · KL(p ‖ m) + ½ · KL(q ‖ m) with m = (p + q) / 2, and its gradient.

    For teacher p and drafter q, the gradient is ½ · q · (g − Σ q · g) with g = log q − log m. The divergence is the
    case β = ½ of DistillSpec's generalised divergence (arXiv 2310.08461, section 4). It is at most log 2.
    """
    drafter_CV = log_drafter_CV.exp()
    log_middle_CV = torch.logaddexp(log_drafter_CV, log_teacher_CV).sub_(math.log(2.0))
    teacher_part_C = _without_infinity(log_teacher_CV).sub_(log_middle_CV).mul_(log_teacher_CV.exp()).sum(1)
    gap_CV = log_middle_CV.neg_().add_(log_drafter_CV)
    drafter_part_C = (drafter_CV * gap_CV).sum(1)
    return 0.5 * (teacher_part_C + drafter_part_C), gap_CV.sub_(drafter_part_C[:, None]).mul_(drafter_CV.mul_(0.5))


def total_variation_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the total variation ½ · Σ |p − q| of teacher p and drafter q, and its gradient q · Σ s − s.

    s is q where q < p, and otherwise 0. The total variation is the expected fraction of draft tokens that speculative
    decoding rejects (Leviathan et al. 2023, lemma 3.3). DistillSpec uses it as an objective.
    """
    drafter_CV, least_CV = log_drafter_CV.exp(), log_teacher_CV.exp()
    short_CV = drafter_CV * (drafter_CV < least_CV)  # q where a higher q would increase acceptance
    loss_C = 1.0 - torch.minimum(drafter_CV, least_CV, out=least_CV).sum(1)
    return loss_C, drafter_CV.mul_(short_CV.sum(1, keepdim=True)).sub_(short_CV)


def lk_alpha_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute −log α of the acceptance probability α = Σ min(p, q) of teacher p and drafter q, and its gradient.

    The gradient of −α is divided by α. The result does not vanish if p and q hardly overlap, and equals the gradient of
    cross-entropy if p is one-hot. α is computed in log space to avoid underflow (LK losses, arXiv 2602.23881).
    """
    least_CV = torch.minimum(log_drafter_CV, log_teacher_CV)
    part_CV = least_CV.softmax(1)
    loss_C = part_CV.amax(1).log_().sub_(least_CV.amax(1))  # log Σ from its largest term and that term's share
    short_CV = part_CV.mul_(log_drafter_CV < log_teacher_CV)
    return loss_C, log_drafter_CV.exp().mul_(short_CV.sum(1, keepdim=True)).sub_(short_CV)


def lk_lambda_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute λ · KL(p ‖ q) + (1 − λ) · (1 − α) of teacher p and drafter q, and its gradient.

    α is the acceptance probability Σ min(p, q), and λ = exp(−3 α) has no gradient. The loss changes from forward KL to
    total variation as α grows (LK losses, arXiv 2602.23881). The authors' code uses the mean α of a batch for λ.
    """
    kl_C, grad_CV = forward_kl_chunk(log_drafter_CV, log_teacher_CV)
    rejected_C, rejected_grad_CV = total_variation_chunk(log_drafter_CV, log_teacher_CV)
    share_C = torch.exp(LK_DECAY * (rejected_C - 1.0))
    grad_CV.mul_(share_C[:, None]).add_(rejected_grad_CV.mul_((1.0 - share_C)[:, None]))
    return share_C * kl_C + (1.0 - share_C) * rejected_C, grad_CV


def _without_infinity(log_teacher_CV: Tensor) -> Tensor:
    """Replace −∞ by the lowest finite value, so that 0 · log 0 is 0."""
    return log_teacher_CV.clamp(min=torch.finfo(log_teacher_CV.dtype).min)


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl_chunk,
    "reverse-kl": reverse_kl_chunk,
    "jensen-shannon": jensen_shannon_chunk,
    "total-variation": total_variation_chunk,
    "lk-alpha": lk_alpha_chunk,
    "lk-lambda": lk_lambda_chunk,
}
OBJECTIVES = (LABELS, *DIVERGENCES)


def needs_teacher(names: Iterable[str]) -> bool:
    """Check if at least one of the named objectives requires a teacher."""
    return any(name != LABELS for name in names)


@dataclass(frozen=True, slots=True)
class Ramp:
    """Weight that changes linearly from `start` to `end` up to progress `until`, and then stays constant."""

    start: float
    end: float
    until: float = 1.0

    def at(self, progress: float) -> float:
        """Return the weight at the given progress, from 0 (start of the run) to 1 (end)."""
        if progress >= self.until:
            return self.end
        return self.start + (self.end - self.start) * max(progress, 0.0) / self.until


def parse_weights(weights: Mapping[str, float | Sequence[float]]) -> dict[str, Ramp]:
    """Convert objective weights (a number, [start, end] or [start, end, progress at which `end` is reached]) to ramps.

    Raises ValueError if there are no objectives, an objective is unknown, a weight is invalid or always 0, or all
    weights are 0 at the start or at the end of a run.
    """
    known = ", ".join(OBJECTIVES)
    if not weights:
        raise ValueError(f"no objective was given: set the weight of at least one of {known}")
    for name in weights:
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r}, expected one of: {known}.{did_you_mean(name, OBJECTIVES)}")
    ramps = {name: _parse_ramp(name, value) for name, value in weights.items()}
    for point, values in (("start", [r.start for r in ramps.values()]), ("end", [r.end for r in ramps.values()])):
        if not any(values):
            formatted = ", ".join(f"{name}: {value}" for name, value in weights.items())
            raise ValueError(f"all weights are 0 at the {point} of the run ({formatted}), so nothing would be trained")
    return ramps


def weights_at(ramps: Mapping[str, Ramp], progress: float) -> dict[str, float]:
    """Return the objective weights at the given progress of the run (0 to 1), without weights of 0."""
    return {name: weight for name, ramp in ramps.items() if (weight := ramp.at(progress))}


def _parse_ramp(name: str, value: float | Sequence[float]) -> Ramp:
    numbers = [value, value] if isinstance(value, int | float) else list(value)
    is_valid = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    if is_valid and len(numbers) in (2, 3):
        ramp = Ramp(*(float(number) for number in numbers))
        if min(ramp.start, ramp.end) >= 0 < ramp.until <= 1 and (ramp.start or ramp.end):
            return ramp
    raise ValueError(
        f"objective {name!r} has weight {value!r}, expected a number, [start, end] or [start, end, share of the run], "
        "with values of at least 0 that are not all 0, and 0 < share ≤ 1"
    )

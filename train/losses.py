"""Objectives, computed chunk by chunk of positions: logits of a whole batch never exist.

Letters: X flattened positions, C positions of a chunk, D hidden of the drafter, E hidden of the teacher, V vocabulary,
K heads, B batch, T tokens. "Drafter" is what is trained, "teacher" what it learns from (the target).

For every chunk the logits, the losses *and their gradient* are computed in the forward pass: three matrix products a
chunk, nothing is computed twice, and what stays is one gradient of the size of `hidden_XD` and one of `weight_VD`
(the idea of fused linear cross entropy: Hsu et al. 2024, Liger Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a label that no loss counts

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}  # logits of a chunk: 64 MB of float32 on CPU, 256 MB on a GPU
_CHUNK_POSITIONS = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Objective:
    """One way to score a drafter's logits against labels or a teacher.

    `chunk(log_drafter_CV, log_teacher_CV, labels_C) -> (loss_C, grad_CV)`: both inputs are float32 log-probabilities
    (the teacher's is None where `needs_teacher` is False), `grad_CV` is the gradient of `loss_C.sum()` with respect
    to the logits whose log-softmax `log_drafter_CV` is. Inputs are left as they are.
    """

    chunk: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
    needs_teacher: bool


def _cross_entropy_chunk(log_drafter_CV: Tensor, _: Tensor | None, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    labels_C1 = labels_C[:, None]
    loss_C = -log_drafter_CV.gather(1, labels_C1)[:, 0]
    grad_CV = log_drafter_CV.exp()
    grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1, dtype=grad_CV.dtype))
    return loss_C, grad_CV


def _forward_kl_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
    assert log_teacher_CV is not None
    teacher_CV = log_teacher_CV.exp()
    floor = torch.finfo(log_teacher_CV.dtype).min  # a teacher that rules a token out: 0 · log 0 = 0
    loss_C = (teacher_CV * (log_teacher_CV.clamp(min=floor) - log_drafter_CV)).sum(1)
    return loss_C, log_drafter_CV.exp().sub_(teacher_CV)


def _total_variation_chunk(log_drafter_CV: Tensor, log_teacher_CV: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
    assert log_teacher_CV is not None
    drafter_CV, teacher_CV = log_drafter_CV.exp(), log_teacher_CV.exp()
    loss_C = 1.0 - torch.minimum(drafter_CV, teacher_CV).sum(1)
    short_CV = drafter_CV * (drafter_CV < teacher_CV)  # where more drafter probability would be accepted
    return loss_C, drafter_CV.mul_(short_CV.sum(1, keepdim=True)).sub_(short_CV)


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": Objective(_cross_entropy_chunk, needs_teacher=False),
    "forward-kl": Objective(_forward_kl_chunk, needs_teacher=True),
    "total-variation": Objective(_total_variation_chunk, needs_teacher=True),
}


def check_objective(weights: Mapping[str, float]) -> bool:
    """Whether this mixture of objectives (weights by name) needs a teacher.

    Raises:
        ValueError: no objective, an unknown name (the nearest is named), a weight that is not positive.
    """
    if not weights:
        raise ValueError(f"no objective given, expected weights for some of: {', '.join(OBJECTIVES)}")
    for name, weight in weights.items():
        if name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of: {', '.join(OBJECTIVES)}"
            raise ValueError(f"unknown objective {name!r}; {hint}")
        if not weight > 0:
            raise ValueError(f"objective {name!r} has weight {weight}, expected more than 0")
    return any(OBJECTIVES[name].needs_teacher for name in weights)


def mixture(
    weights: Mapping[str, float],
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    teacher_hidden_XE: Tensor | None = None,
    teacher_weight_VE: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ over positions of Σ_name weights[name] · objective; the drafter's logits of a chunk are computed once.

    Logits are `hidden_XD @ weight_VD.T`; a weight of None says that `hidden_XD` holds the logits themselves. The
    same goes for the teacher. Positions whose label is −100 are left out, and cost nothing. `temperature` divides both
    sides' logits in the objectives that need a teacher, whose loss is multiplied by temperature² so that the gradient
    keeps its size (Hinton et al. 2015, arXiv 1503.02531, section 2); cross entropy is always taken at temperature 1.
    `chunk` positions are worked on at a time (None: by vocabulary and device).

    Returns:
        The sum (float32 scalar, differentiable with respect to `hidden_XD` and `weight_VD`, once) and the number of
        positions in it (int64 scalar).

    Raises:
        ValueError: see `check_objective`; a teacher is missing; the vocabularies differ; a temperature ≤ 0.
    """
    needs_teacher = check_objective(weights)
    if not needs_teacher:
        teacher_hidden_XE = teacher_weight_VE = None
    elif teacher_hidden_XE is None:
        raise ValueError(f"objective {dict(weights)} needs a teacher, and none was given")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0")
    _check_shapes(hidden_XD, weight_VD, labels_X, teacher_hidden_XE, teacher_weight_VE)
    terms = tuple((OBJECTIVES[name], float(weight)) for name, weight in weights.items())
    kept = (labels_X != IGNORED).nonzero()[:, 0]
    plan = _Plan(terms, float(temperature), chunk, kept, labels_X, _compute_dtype(hidden_XD))
    teacher = None if teacher_hidden_XE is None else teacher_hidden_XE.detach()
    teacher_weight = None if teacher_weight_VE is None else teacher_weight_VE.detach()
    loss_sum = _ChunkedLoss.apply(hidden_XD, weight_VD, teacher, teacher_weight, plan, torch.is_grad_enabled())
    return loss_sum, torch.tensor(len(kept), device=labels_X.device)


def cross_entropy(
    hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_x −log q_x(label_x) over positions with a label, q_x = softmax(hidden_x @ weight.T); see `mixture`.

    Shapes: [X, D], [V, D], int64 [X] (−100: not trained). Returns (sum, count).
    """
    return mixture({"cross-entropy": 1.0}, hidden_XD, weight_VD, labels_X, chunk=chunk)


def forward_kl(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    teacher_hidden_XE: Tensor,
    teacher_weight_VE: Tensor | None,
    labels_X: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_x τ² · KL(p_x ‖ q_x) = τ² · Σ_x Σ_v p_x(v) · (log p_x(v) − log q_x(v)), p the teacher, q the drafter, both at
    temperature τ (Hinton et al. 2015); only positions whose label is not −100. Shapes and result: see `mixture`.
    """
    teacher = (teacher_hidden_XE, teacher_weight_VE)
    return mixture({"forward-kl": 1.0}, hidden_XD, weight_VD, labels_X, *teacher, temperature, chunk)


def total_variation(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    teacher_hidden_XE: Tensor,
    teacher_weight_VE: Tensor | None,
    labels_X: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_x τ² · (1 − Σ_v min(p_x(v), q_x(v))): at τ = 1 exactly the share of draft tokens that speculative decoding
    rejects (Leviathan et al. 2023, arXiv 2211.17192, definition 3.2 and lemma 3.3). Shapes and result: see `mixture`.

    Where p = q the minimum has a kink; the gradient there counts the drafter's side as enough.
    """
    teacher = (teacher_hidden_XE, teacher_weight_VE)
    return mixture({"total-variation": 1.0}, hidden_XD, weight_VD, labels_X, *teacher, temperature, chunk)


def shifted_labels(labels_BT: Tensor, documents_BT: Tensor, offset: int) -> Tensor:
    """What position t predicts: the label of token t + offset, int64 [B, T].

    −100 where that token is not trained on, lies beyond the block, or belongs to another document.
    """
    assert offset >= 1, offset
    assert labels_BT.shape == documents_BT.shape, (labels_BT.shape, documents_BT.shape)
    shifted_BT = torch.full_like(labels_BT, IGNORED)
    if offset < labels_BT.shape[1]:
        same_BT = documents_BT[:, offset:] == documents_BT[:, :-offset]
        shifted_BT[:, :-offset] = torch.where(same_BT, labels_BT[:, offset:], IGNORED)
    return shifted_BT


def head_labels(labels_BT: Tensor, documents_BT: Tensor, num_heads: int) -> Tensor:
    """What head k predicts at position t: the label of token t + 2 + k (k from 0), int64 [B, T, K]; see
    `shifted_labels`. (The target itself predicts t + 1. Cai et al. 2024, arXiv 2401.10774, section 2.2.)
    """
    return torch.stack([shifted_labels(labels_BT, documents_BT, 2 + k) for k in range(num_heads)], dim=-1)


def heads_cross_entropy(
    features_XKD: Tensor, projections: Sequence[Tensor], labels_XK: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each head, for itself: sums float32 [K] and counts int64 [K] (Medusa: Cai et al. 2024, eq. 1).

    `features_XKD` are the heads' outputs before their projection, `projections` one [V, D] a head, `labels_XK` as
    `head_labels` gives them. The logits of all heads never exist together: one head, one chunk at a time.
    """
    assert features_XKD.shape[:2] == labels_XK.shape, (features_XKD.shape, labels_XK.shape)
    assert len(projections) == labels_XK.shape[1], (len(projections), labels_XK.shape)
    parts = [cross_entropy(features_XKD[:, k], w_VD, labels_XK[:, k], chunk) for k, w_VD in enumerate(projections)]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


@torch.no_grad()
def top1_hits(
    hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """How many positions have their label as the most probable token, and how many positions there are (int64)."""
    plan = _Plan((), 1.0, chunk, (labels_X != IGNORED).nonzero()[:, 0], labels_X, _compute_dtype(hidden_XD))
    hits = torch.zeros((), dtype=torch.int64, device=labels_X.device)
    for rows_C, logits_CV, _ in plan.chunks(hidden_XD, weight_VD, None, None):
        hits += (logits_CV.argmax(1) == labels_X[rows_C]).sum()
    return hits, torch.tensor(len(plan.kept), device=labels_X.device)


@torch.no_grad()
def agreement(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    teacher_hidden_XE: Tensor,
    teacher_weight_VE: Tensor | None,
    labels_X: Tensor,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over positions with a label of the overlap Σ_v min(p(v), q(v)) (the chance that a draft token is accepted,
    Leviathan et al. 2023) and of "both have the same most probable token"; and the count. Shapes: see `mixture`.
    """
    _check_shapes(hidden_XD, weight_VD, labels_X, teacher_hidden_XE, teacher_weight_VE)
    plan = _Plan((), 1.0, chunk, (labels_X != IGNORED).nonzero()[:, 0], labels_X, _compute_dtype(hidden_XD))
    overlap = torch.zeros((), device=labels_X.device)
    same = torch.zeros((), dtype=torch.int64, device=labels_X.device)
    chunks = plan.chunks(hidden_XD, weight_VD, teacher_hidden_XE, teacher_weight_VE)
    for _, logits_CV, teacher_logits_CV in chunks:
        assert teacher_logits_CV is not None
        same += (logits_CV.argmax(1) == teacher_logits_CV.argmax(1)).sum()
        overlap += torch.minimum(logits_CV.softmax(1), teacher_logits_CV.softmax(1)).sum()
    return overlap, same, torch.tensor(len(plan.kept), device=labels_X.device)


@dataclass(frozen=True)
class _Plan:
    """What a chunked loss works through, and how."""

    terms: tuple[tuple[Objective, float], ...]
    temperature: float
    chunk: int | None
    kept: Tensor  # int64, the positions that count
    labels_X: Tensor
    dtype: torch.dtype  # of the matrix products

    def chunks(
        self, hidden_XD: Tensor, weight_VD: Tensor | None, teacher_hidden_XE: Tensor | None, teacher_VE: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Rows int64 [C], drafter's logits float32 [C, V], teacher's the same or None, chunk after chunk."""
        vocab = len(weight_VD) if weight_VD is not None else hidden_XD.shape[1]
        device = hidden_XD.device.type
        elements, positions = _CHUNK_ELEMENTS.get(device, 1 << 24), _CHUNK_POSITIONS.get(device, 1024)
        size = self.chunk or max(16, min(positions, elements // vocab))
        weight_VD = None if weight_VD is None else weight_VD.to(self.dtype)
        teacher_VE = None if teacher_VE is None else teacher_VE.to(self.dtype)
        for rows_C in self.kept.split(size):
            if not len(rows_C):
                return
            teacher_CV = None
            if teacher_hidden_XE is not None:
                teacher_CV = self._logits(teacher_hidden_XE[rows_C], teacher_VE)
            yield rows_C, self._logits(hidden_XD[rows_C], weight_VD), teacher_CV

    def _logits(self, hidden_CD: Tensor, weight_VD: Tensor | None) -> Tensor:
        return hidden_CD.float() if weight_VD is None else (hidden_CD.to(self.dtype) @ weight_VD.T).float()

    def score(self, logits_CV: Tensor, teacher_CV: Tensor | None, labels_C: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss of a chunk (scalar), and its gradient with respect to `logits_CV`."""
        heat = self.temperature
        log_drafter_CV = logits_CV.log_softmax(1)
        log_heated_CV = log_drafter_CV if heat == 1.0 else (logits_CV / heat).log_softmax(1)
        log_teacher_CV = None if teacher_CV is None else (teacher_CV / heat).log_softmax(1)
        total, grad_CV = logits_CV.new_zeros(()), None
        for objective, weight in self.terms:
            by_teacher = objective.needs_teacher
            loss_C, term_CV = objective.chunk(
                log_heated_CV if by_teacher else log_drafter_CV, log_teacher_CV if by_teacher else None, labels_C
            )
            total += loss_C.sum() * (weight * heat**2 if by_teacher else weight)
            scale = weight * heat if by_teacher else weight  # τ² of the loss by 1/τ of the chain rule
            if scale != 1.0:
                term_CV.mul_(scale)
            grad_CV = term_CV if grad_CV is None else grad_CV.add_(term_CV)
        assert grad_CV is not None
        return total, grad_CV


class _ChunkedLoss(torch.autograd.Function):
    """Losses and gradients in one pass over the chunks; `backward` only scales what `forward` has left."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_XD: Tensor,
        weight_VD: Tensor | None,
        teacher_hidden_XE: Tensor | None,
        teacher_weight_VE: Tensor | None,
        plan: _Plan,
        with_grad: bool,
    ) -> Tensor:
        # sums of thousands of terms stay in float32 whatever the model's type; products run in the plan's
        grad_hidden = torch.zeros_like(hidden_XD) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = None
        if weight_VD is not None and with_grad and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
        cast_VD = None if weight_VD is None else weight_VD.to(plan.dtype)
        loss_sum = torch.zeros((), device=hidden_XD.device)
        with torch.autocast(hidden_XD.device.type, enabled=False):
            for rows_C, logits_CV, teacher_CV in plan.chunks(hidden_XD, cast_VD, teacher_hidden_XE, teacher_weight_VE):
                loss, grad_CV = plan.score(logits_CV, teacher_CV, plan.labels_X[rows_C])
                loss_sum += loss
                if grad_hidden is None and grad_weight is None:
                    continue
                grad_CV = grad_CV.to(plan.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows_C] = (grad_CV if cast_VD is None else grad_CV @ cast_VD).to(hidden_XD.dtype)
                if grad_weight is not None:
                    _add_outer(grad_weight, grad_CV, hidden_XD[rows_C].to(plan.dtype))
        ctx.grads = (grad_hidden, grad_weight, None if weight_VD is None else weight_VD.dtype)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "a chunked loss can be differentiated once: its gradients were handed on"
        (grad_hidden, grad_weight, dtype), ctx.grads = ctx.grads, None
        if grad_hidden is not None:
            grad_hidden.mul_(grad_output)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_output).to(dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _add_outer(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        sum_VD += grad_CV.T @ hidden_CD


def _compute_dtype(hidden_XD: Tensor) -> torch.dtype:
    device = hidden_XD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_XD.dtype


def _check_shapes(
    hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, teacher_XE: Tensor | None, teacher_VE: Tensor | None
) -> None:
    assert hidden_XD.dim() == 2, hidden_XD.shape
    assert labels_X.shape == hidden_XD.shape[:1], (hidden_XD.shape, labels_X.shape)
    vocab = hidden_XD.shape[1] if weight_VD is None else weight_VD.shape[0]
    if teacher_XE is None:
        return
    assert teacher_XE.shape[0] == hidden_XD.shape[0], (teacher_XE.shape, hidden_XD.shape)
    teacher_vocab = teacher_XE.shape[1] if teacher_VE is None else teacher_VE.shape[0]
    if vocab != teacher_vocab:
        raise ValueError(f"the drafter's vocabulary has {vocab} tokens, the teacher's {teacher_vocab}: they must agree")

"""Losses, computed chunk by chunk of positions: logits of a whole batch never exist.

Letters: X flattened positions, C positions of a chunk, R rows of a block, D hidden of the drafter, E hidden of the
teacher, V vocabulary, K heads or tokens that a top-k teacher names, F events (K, or K + 1 with "any other"), B batch,
T tokens. "Drafter" is what is trained, "teacher" what it learns from (the target).

For every chunk the logits, the losses *and their gradient* are computed in the forward pass: three matrix products a
chunk, nothing is computed twice, and what stays is one gradient of the size of `hidden_XD` and one of `weight_VD`
(the idea of fused linear cross entropy: Hsu et al. 2024, Liger Kernel, arXiv 2410.10989). The gradient with respect to
the logits takes their place in memory. The backward pass needs neither weights nor logits: a weight that exists only
while the forward pass runs (DeepSpeed ZeRO-3) is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chunks import (
    IGNORED,
    DenseTeacher,
    DrafterLogits,
    Lesson,
    SparseTeacher,
    Teacher,
    TeacherLessons,
    TopK,
    coarsen,
    heated,
    spread,
    wide,
)
from .objectives import OBJECTIVES, Objective, check_objective

__all__ = [
    "IGNORED",
    "OBJECTIVES",
    "Agreement",
    "DenseTeacher",
    "LabelHits",
    "SparseTeacher",
    "TopK",
    "agreement",
    "check_objective",
    "cross_entropy",
    "head_labels",
    "heads_cross_entropy",
    "label_hits",
    "mixture",
    "shifted_labels",
]

TOP = 5  # tokens that "top-5" looks at


def mixture(
    weights: Mapping[str, float],
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    teacher: Teacher | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    top_k: TopK | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ over positions of Σ_name weights[name] · objective; the drafter's logits of a chunk are computed once.

    Logits are `hidden_XD @ weight_VD.T`; a weight of None says that `hidden_XD` holds the logits themselves. Positions
    whose label is −100 are left out, and cost nothing; neither does an objective of weight 0 (nor the teacher, if no
    other needs it). `temperature` divides both sides' logits in the objectives that need a teacher, whose loss is
    multiplied by temperature² so that the gradient keeps its size (Hinton et al. 2015, arXiv 1503.02531, section 2);
    cross entropy is always taken at temperature 1, and over the whole vocabulary. `top_k` makes the teacher's other
    tokens one event, or impossible; without it a `SparseTeacher` is taken with a bucket of all that it does not know.
    What a top-k teacher makes of reverse KL: "any other" is one event, and log 0 is clamped (`objectives.LOG_FLOOR`).
    `chunk` positions are worked on at a time (None: by vocabulary and device).

    Returns:
        The sum (scalar, float32 or float64 if `hidden_XD` is; differentiable with respect to `hidden_XD` and
        `weight_VD`, once) and the number of positions in it (int64 scalar).

    Raises:
        ValueError: an unknown objective; a weight that is negative or not finite; no weight above 0; a teacher is
            missing; the vocabularies differ; a temperature ≤ 0; see `TopK` and `chunks.TeacherLessons`.
    """
    terms = _terms(weights)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected more than 0")
    logits = DrafterLogits(hidden_XD, weight_VD, labels_X, chunk)
    lessons = None
    if any(objective.needs_teacher for objective, _ in terms):
        if teacher is None:
            raise ValueError(f"objective {dict(weights)} needs a teacher, and none was given")
        lessons = TeacherLessons(teacher, logits, len(labels_X), top_k, temperature)
    plan = _Plan(logits, lessons, terms, float(temperature), labels_X)
    return _ChunkedLoss.apply(hidden_XD, weight_VD, plan, torch.is_grad_enabled()), logits.count


def cross_entropy(
    hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_x −log q_x(label_x) over positions with a label, q_x = softmax(hidden_x @ weight.T); see `mixture`.

    Shapes: [X, D], [V, D], int64 [X] (−100: not trained). Returns (sum, count).
    """
    return mixture({"cross-entropy": 1.0}, hidden_XD, weight_VD, labels_X, chunk=chunk)


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


@dataclass(frozen=True, slots=True)
class LabelHits:
    """Sums over positions with a label, scalars: `loss`, the cross entropy (nats); `top1`, `top5`: how often the label
    is the drafter's most likely token, or one of its five (int64; of equally likely tokens the one with the lower id
    counts as more likely); and their number `count` (int64).
    """

    loss: Tensor
    top1: Tensor
    top5: Tensor
    count: Tensor


@torch.no_grad()
def label_hits(hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, chunk: int | None = None) -> LabelHits:
    """How well a drafter predicts the labels, in one pass; shapes as in `mixture`."""
    logits = DrafterLogits(hidden_XD, weight_VD, labels_X, chunk)
    loss = torch.zeros(
        (), dtype=torch.float64 if hidden_XD.dtype == torch.float64 else torch.float32, device=labels_X.device
    )
    top1, top5 = (torch.zeros((), dtype=torch.int64, device=labels_X.device) for _ in range(2))
    ids_V = torch.arange(logits.vocab, device=labels_X.device)
    for rows_C, logits_CV in logits.chunks():
        for block in logits.blocks(len(rows_C)):
            logits_RV, labels_R1 = wide(logits_CV[block]), labels_X[rows_C[block], None]
            mine_R1 = logits_RV.gather(1, labels_R1)
            loss -= logits_RV.log_softmax(1).gather(1, labels_R1).sum()
            ahead_RV = (logits_RV > mine_R1) | ((logits_RV == mine_R1) & (ids_V < labels_R1))
            rank_R = ahead_RV.sum(1)
            top1 += (rank_R == 0).sum()
            top5 += (rank_R < TOP).sum()
    return LabelHits(loss, top1, top5, logits.count)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Sums over positions with a label, scalars: `overlap`, Σ_v min(p(v), q(v)), the chance that a draft token is
    accepted (Leviathan et al. 2023, arXiv 2211.17192, lemma 3.3); `top1`: both have the same most likely token
    (int64); `top5`: |the five most likely tokens of p ∩ those of q| / 5; and the number of positions `count` (int64).

    Of a `SparseTeacher` the overlap is that of its tokens and "any other", an upper bound of the true one. Where there
    are less than five tokens (or a `SparseTeacher` has less), `top5` looks at as many as there are.
    """

    overlap: Tensor
    top1: Tensor
    top5: Tensor
    count: Tensor


@torch.no_grad()
def agreement(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    teacher: Teacher,
    labels_X: Tensor,
    chunk: int | None = None,
) -> Agreement:
    """How well a drafter agrees with its teacher, at temperature 1; shapes as in `mixture`.

    Raises:
        ValueError: the vocabularies differ.
    """
    logits = DrafterLogits(hidden_XD, weight_VD, labels_X, chunk)
    lessons = TeacherLessons(teacher, logits, len(labels_X), None, 1.0)
    overlap, top5 = torch.zeros((), device=labels_X.device), torch.zeros((), device=labels_X.device)
    top1 = torch.zeros((), dtype=torch.int64, device=labels_X.device)
    for rows_C, logits_CV in logits.chunks():
        lessons.load(rows_C)
        for block in logits.blocks(len(rows_C)):
            logits_RV, lesson = wide(logits_CV[block]), lessons.block(block)
            log_drafter_RF = _seen_by(lesson, logits_RV)[0]
            overlap += torch.minimum(log_drafter_RF, lesson.log_probs_RF).exp().sum()
            theirs_RK = lesson.top(TOP)
            mine_RK = logits_RV.topk(theirs_RK.shape[1], dim=1).indices
            top1 += (mine_RK[:, 0] == theirs_RK[:, 0]).sum()
            top5 += (mine_RK[:, :, None] == theirs_RK[:, None]).sum() / theirs_RK.shape[1]
    return Agreement(overlap, top1, top5, logits.count)


def _terms(weights: Mapping[str, float]) -> tuple[tuple[Objective, float], ...]:
    check_objective(weights)
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"objective {name!r} has weight {weight}, expected a finite number of 0 or more")
    terms = tuple((OBJECTIVES[name], float(weight)) for name, weight in weights.items() if weight)
    if not terms:
        raise ValueError(f"all weights are 0 ({dict(weights)}), expected one above 0: nothing would be trained")
    return terms


def _seen_by(lesson: Lesson, logits_RV: Tensor) -> tuple[Tensor, Tensor | None]:
    """The drafter's log-probabilities of the events that the teacher's lesson is about, and see `coarsen`."""
    return (logits_RV.log_softmax(1), None) if lesson.ids_RK is None else coarsen(logits_RV, lesson.ids_RK)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a chunked loss works through, and how."""

    logits: DrafterLogits
    lessons: TeacherLessons | None
    terms: tuple[tuple[Objective, float], ...]
    temperature: float
    labels_X: Tensor

    def score(self, logits_RV: Tensor, lesson: Lesson | None, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted losses of a block's rows [R], and the gradient of their sum with respect to `logits_RV`."""
        parts = []
        if own := [(objective, weight) for objective, weight in self.terms if not objective.needs_teacher]:
            parts.append(_weighted(own, logits_RV.log_softmax(1), None, labels_R))
        if taught := [(objective, weight) for objective, weight in self.terms if objective.needs_teacher]:
            assert lesson is not None
            log_drafter_RF, rest_RV = _seen_by(lesson, heated(logits_RV, self.temperature))
            loss_R, grad_RF = _weighted(taught, log_drafter_RF, lesson.log_probs_RF, labels_R)
            if lesson.ids_RK is not None:
                assert rest_RV is not None
                grad_RF = spread(grad_RF, lesson.ids_RK, rest_RV)
            heat = self.temperature  # the gradient: τ² of the loss by 1/τ of the chain rule
            parts.append((loss_R, grad_RF) if heat == 1 else (loss_R * heat**2, grad_RF.mul_(heat)))
        return _sum(parts)


def _weighted(
    terms: Sequence[tuple[Objective, float]], log_drafter_RF: Tensor, log_teacher_RF: Tensor | None, labels_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ weight · objective of each row, and its gradient."""
    parts = []
    for objective, weight in terms:
        loss_R, grad_RF = objective.chunk(log_drafter_RF, log_teacher_RF, labels_R)
        parts.append((loss_R, grad_RF) if weight == 1 else (loss_R * weight, grad_RF.mul_(weight)))
    return _sum(parts)


def _sum(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Losses added up, and their gradients, in the place of the first."""
    (loss_R, grad_RF), *others = parts
    for other_R, other_RF in others:
        loss_R, grad_RF = loss_R + other_R, grad_RF.add_(other_RF)
    return loss_R, grad_RF


class _ChunkedLoss(torch.autograd.Function):
    """Losses and gradients in one pass over the chunks; `backward` only scales what `forward` has left."""

    @staticmethod
    def forward(ctx: Any, hidden_XD: Tensor, weight_VD: Tensor | None, plan: _Plan, with_grad: bool) -> Tensor:
        # sums of thousands of terms stay in float32 or more whatever the model's type; products run in the plan's
        logits, wide_dtype = plan.logits, torch.promote_types(hidden_XD.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden_XD) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = None
        if weight_VD is not None and with_grad and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VD, dtype=wide_dtype)
        cast_VD = logits.weight_VD
        loss_sum = torch.zeros((), dtype=wide_dtype, device=hidden_XD.device)
        with torch.autocast(hidden_XD.device.type, enabled=False):
            for rows_C, logits_CV in logits.chunks():
                loss_sum += _score_chunk(plan, rows_C, logits_CV).sum()
                grad_CV = logits_CV
                if grad_hidden is not None:
                    grad_hidden[rows_C] = (grad_CV if cast_VD is None else grad_CV @ cast_VD).to(hidden_XD.dtype)
                if grad_weight is not None:
                    _add_outer(grad_weight, grad_CV, hidden_XD[rows_C].to(grad_CV.dtype))
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
        return grad_hidden, grad_weight, None, None


def _score_chunk(plan: _Plan, rows_C: Tensor, logits_CV: Tensor) -> Tensor:
    """The losses of a chunk [C]; their gradient takes the place of `logits_CV`."""
    losses = []
    if plan.lessons is not None:
        plan.lessons.load(rows_C)
    for block in plan.logits.blocks(len(rows_C)):
        lesson = None if plan.lessons is None else plan.lessons.block(block)
        loss_R, grad_RV = plan.score(wide(logits_CV[block]), lesson, plan.labels_X[rows_C[block]])
        logits_CV[block] = grad_RV
        losses.append(loss_R)
    return torch.cat(losses)


def _add_outer(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.T, hidden_CD)
    else:
        sum_VD += grad_CV.T @ hidden_CD

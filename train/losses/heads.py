"""The loss of K heads with a vocabulary each; the logits of all heads never exist together (see `fused`).

Letters: X positions, Y positions of a teacher, K heads, D what a projection takes (hidden, or a low rank), E hidden of
the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
from torch import Tensor

from .chunks import IGNORED, Teacher, TopK
from .fused import Plan, fused_loss, terms_of
from .objectives import OBJECTIVES


def heads_mixture(
    weights: Mapping[str, float],
    features_XKD: Tensor,
    projections: Sequence[Tensor],
    labels_XK: Tensor,
    teacher: Teacher | None = None,
    teacher_rows_XK: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    top_k: TopK | None = None,
    liger: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sum of `drafter.mixture` for each head: Medusa's loss (Cai et al. 2024, arXiv 2401.10774, equation 1) where
    the objective is cross entropy, its self-distillation (section 2.3.2) where it is a divergence.

    Logits of head k are `features_XKD[:, k] @ projections[k].T`; heads may share a projection [V, D]. `labels_XK` are
    as `head_labels` gives them. `teacher_rows_XK` int64 is the teacher's row that is the distribution of labels_XK[x,
    k], read where there is a label; each row is computed once for all heads. `liger` computes cross entropy by Liger
    Kernel's fused linear cross entropy (Hsu et al. 2024, arXiv 2410.10989).

    Returns:
        Sums [K] (float32, or float64 if `features_XKD` is; differentiable once) and numbers of positions int64 [K].

    Raises:
        ValueError: see `mixture`; a teacher without `teacher_rows_XK`; `liger` with another objective, without
            liger-kernel, or not on CUDA.
    """
    if liger:
        return _liger_sums(weights, features_XKD, projections, labels_XK)
    if teacher is not None and teacher_rows_XK is None:
        raise ValueError("a teacher of heads needs teacher_rows_XK: heads learn from other positions than their own")
    plan = Plan(
        weights, features_XKD, projections, labels_XK, teacher, teacher_rows_XK, temperature, chunk, top_k
    )  # fmt: skip
    return fused_loss(plan, features_XKD, projections), plan.counts_K


def _liger_sums(
    weights: Mapping[str, float], features_XKD: Tensor, projections: Sequence[Tensor], labels_XK: Tensor
) -> tuple[Tensor, Tensor]:
    terms = terms_of(weights)
    if [objective for objective, _ in terms] != [OBJECTIVES["cross-entropy"]]:
        raise ValueError(f"Liger's kernel computes cross entropy alone, not {dict(weights)}: leave `liger` out")
    try:
        module = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    except ImportError as error:
        raise ValueError(f"`liger` needs the package liger-kernel: pip install liger-kernel ({error})") from error
    device = features_XKD.device
    if device.type != "cuda":
        raise ValueError(f"Liger's kernel needs tensors on a CUDA device, not on {device}: leave `liger` out")
    kept_XK = labels_XK != IGNORED
    sums = []
    for k, weight_VD in enumerate(projections):
        rows = kept_XK[:, k].nonzero()[:, 0]
        features_RD = features_XKD[:, k][rows]
        if not len(rows):  # the kernel divides by the number of rows; both inputs still get gradients, of 0
            sums.append(features_RD.sum().float() + 0.0 * weight_VD[:1].sum().float())
            continue
        if weight_VD.requires_grad and torch.is_grad_enabled() and not features_RD.requires_grad:
            features_RD = features_RD.requires_grad_()  # without it the kernel computes no gradient at all
        found = module.LigerFusedLinearCrossEntropyFunction.apply(
            features_RD, weight_VD, labels_XK[rows, k], None, None, IGNORED, 0.0, 0.0, "sum", None, False, torch.float32
        )
        sums.append(found[0])
    return torch.stack(sums) * terms[0][1], kept_XK.sum(0)

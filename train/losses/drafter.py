"""Losses and metrics, computed chunk by chunk so that the logits of a whole batch are never stored.

Letters: as in `chunks`; B batch, T tokens, K heads (of `heads_mixture` and `head_labels`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoints.storage.draft_vocabulary import widen
from .chunks import (
    IGNORED,
    DenseTeacher,
    FusedLoss,
    Output,
    Plan,
    SparseTeacher,
    Targets,
    Teacher,
    TeacherTargets,
    Weigh,
    block_rows,
    chunk_positions,
    product_type,
    to_events,
    upcast,
)
from .product import Product

TOP = 5  # number of tokens in "top-5" metrics


def mixture(
    weights: Mapping[str, float],
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    teacher: Teacher | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    top_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the objectives over all labelled positions, and the number of these positions.

    Logits are `hidden_XD @ weight_VD.T`, or `hidden_XD` if `weight_VD` is None. Positions with the label −100 are
    skipped. In objectives other than cross-entropy, `temperature` divides the logits of drafter and teacher, and the
    loss is multiplied by temperature² (Hinton et al. 2015, arXiv 1503.02531, section 2). With `top_k`, all but the
    teacher's `top_k` most likely tokens count as one event. `chunk` is the number of positions per chunk.

    The sum is a scalar (float32, or float64 if `hidden_XD` is) that can be differentiated once; the number is int64.
    Raises ValueError if an objective needs a missing teacher, or for the same reasons as `chunks.TeacherTargets`.
    """
    sums_K, counts_K = heads_mixture(
        weights, hidden_XD[:, None], [weight_VD], labels_X[:, None], teacher, None, temperature, chunk, top_k
    )  # fmt: skip
    return sums_K[0], counts_K[0]


def heads_mixture(
    weights: Mapping[str, float],
    features_XKD: Tensor,
    projections: Sequence[Tensor | None],
    labels_XK: Tensor,
    teacher: Teacher | None = None,
    teacher_rows_XK: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    top_k: int | None = None,
    output: Output = None,
    weigh: Weigh = None,
    low_rank_VF: Tensor | None = None,
    accepted_XK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of `mixture` for each head: weighted sums [K] and numbers of positions (int64 [K]).

    This is Medusa's loss (Cai et al. 2024, arXiv 2401.10774, equation 1) for cross-entropy, and its self-distillation
    (section 2.3.2) for a divergence. Logits of head k are `features_XKD[:, k] @ projections[k].T`; heads may share a
    projection [V, D]. `labels_XK` contains rows of `head_labels`. `teacher_rows_XK` (int64) contains the teacher's row
    for labels_XK[x, k] (default: row x); the logits of a row are computed once for all heads. `output` converts the
    products [C, V] to logits (default: the products are the logits). `weigh` converts the losses [X, K] to weights, and
    requires frozen projections. With `low_rank_VF`, the last F features are factors, whose product with it is added to
    the logits of all heads. `accepted_XK` is overwritten with acceptance rates: the overlap with the teacher or,
    without one, 1 where the label is the most likely token. For other arguments and errors, see `mixture`.
    """
    arguments = (labels_XK, teacher, teacher_rows_XK, temperature, chunk, top_k, output, weigh, accepted_XK)
    plan = Plan(weights, features_XKD, projections, *arguments)
    low_ranks = () if low_rank_VF is None else (low_rank_VF,) * len(projections)
    sums_K: Tensor = FusedLoss.apply(plan, torch.is_grad_enabled(), features_XKD, *projections, *low_ranks)
    return sums_K, plan.counts_K


def select_tokens(ids: Tensor, hidden_XD: Tensor, weight_VD: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Restrict the projection, or the logits if `weight_VD` is None, to the tokens `ids`."""
    return (hidden_XD[:, ids], None) if weight_VD is None else (hidden_XD, weight_VD[ids])


def narrow_vocabulary(
    ids: Tensor, hidden_XD: Tensor, weight_VD: Tensor | None, labels_X: Tensor, teacher: Teacher | None
) -> tuple[Tensor, Tensor | None, Tensor, Teacher | None]:
    """Return the arguments of `mixture` restricted to the tokens `ids` (int64, ascending).

    Labels of other tokens become −100, and the teacher's distribution becomes conditional on these tokens. A drafter
    that matches this distribution also has the maximum possible overlap with the full distribution.

    Raises ValueError if a sparse teacher has more tokens than `ids`.
    """
    vocab = hidden_XD.shape[1] if weight_VD is None else weight_VD.shape[0]
    restricted = None if teacher is None else restrict_teacher(ids, vocab, teacher)
    return *select_tokens(ids, hidden_XD, weight_VD), map_labels(ids, vocab, labels_X), restricted


def map_labels(ids: Tensor, vocab: int, labels: Tensor) -> Tensor:
    """Map labels of any shape to their indices in `ids`. Labels that are not in `ids` become -100."""
    index_V = torch.full((vocab,), IGNORED, device=ids.device)
    index_V[ids] = torch.arange(len(ids), device=ids.device)
    return torch.where(labels == IGNORED, IGNORED, index_V[labels.clamp(min=0)])


def restrict_teacher(ids: Tensor, vocab: int, teacher: Teacher) -> Teacher:
    """Return a teacher's distribution conditional on the tokens `ids` of the vocabulary.

    A sparse teacher's tokens outside `ids` are replaced by unused tokens of `ids`, which share the remaining mass.
    """
    if isinstance(teacher, DenseTeacher):
        return DenseTeacher(*select_tokens(ids, teacher.hidden_XE, teacher.weight_VE))
    count, named = len(ids), teacher.ids_XK.shape[1]
    if named > count:
        raise ValueError(f"the teacher stores {named} tokens per position, but the draft vocabulary has {count}")
    index_XK, width = map_labels(ids, vocab, teacher.ids_XK), min(count, 2 * named)
    missing_XK = index_XK < 0
    used_XW = index_XK.new_zeros(len(index_XK), width + 1)
    used_XW.scatter_(1, torch.where(missing_XK, width, index_XK.clamp(max=width)), 1)
    free_XK = used_XW[:, :width].argsort(dim=1, stable=True).gather(1, missing_XK.cumsum(1).sub(1).clamp(min=0))
    p_XK = teacher.log_probs_XK.exp()
    rest_X1 = (1 - p_XK.sum(1, keepdim=True)).clamp(min=1e-7)
    share_X1 = rest_X1 / (count - named + missing_XK.sum(1, keepdim=True)).clamp(min=1)
    mass_X1 = p_XK.masked_fill(missing_XK, 0).sum(1, keepdim=True) + rest_X1
    log_probs_XK = (torch.where(missing_XK, share_X1, p_XK) / mass_X1).log()
    return SparseTeacher(torch.where(missing_XK, free_XK, index_XK), log_probs_XK)


def shifted_labels(labels_BT: Tensor, documents_BT: Tensor, offset: int) -> Tensor:
    """Shift labels so that position t has the label of token t + `offset`, or −100 across documents; int64 [B, T]."""
    assert offset >= 1, offset
    assert labels_BT.shape == documents_BT.shape, (labels_BT.shape, documents_BT.shape)
    shifted_BT = torch.full_like(labels_BT, IGNORED)
    if offset < labels_BT.shape[1]:
        same_document_BT = documents_BT[:, offset:] == documents_BT[:, :-offset]
        shifted_BT[:, :-offset] = torch.where(same_document_BT, labels_BT[:, offset:], IGNORED)
    return shifted_BT


def head_labels(labels_BT: Tensor, documents_BT: Tensor, num_heads: int) -> Tensor:
    """Return labels int64 [B, T, K]: at t, head k (from 0) predicts token t + 2 + k (arXiv 2401.10774, section 2.2)."""
    return torch.stack([shifted_labels(labels_BT, documents_BT, 2 + k) for k in range(num_heads)], dim=-1)


def _blocks_of_logits(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    chunk: int | None,
    teacher: Teacher | None = None,
    proposed: Tensor | None = None,
    output: Output = None,
    low_rank_VF: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Targets | None]]:
    """Yield labels int64 [R], logits [R, V] and teacher targets for each block of positions with a label.

    For the arguments, see `mixture`. Tokens that are not in `proposed` have a logit of −∞.
    """
    assert labels_X.shape == hidden_XD.shape[:1], (hidden_XD.shape, labels_X.shape)
    vocab = hidden_XD.shape[1] if weight_VD is None else weight_VD.shape[0]
    size = chunk or chunk_positions(vocab, hidden_XD.device)
    if proposed is not None:
        hidden_XD, weight_VD = select_tokens(proposed, hidden_XD, weight_VD)
    product, targets = Product(product_type(hidden_XD), low_rank_VF), None
    if teacher is not None:
        targets = TeacherTargets(teacher, vocab)
        assert targets.positions == len(labels_X), (targets.positions, len(labels_X))
    block = block_rows(vocab, size, hidden_XD.device)
    rows = (labels_X != IGNORED).nonzero()[:, 0]
    for rows_C in rows.split(size) if len(rows) else ():
        logits_CV = product(hidden_XD.detach()[rows_C], weight_VD)
        if output is not None:
            logits_CV = output(logits_CV)
        if targets is not None:
            targets.load(rows_C)
        for start in range(0, len(rows_C), block):
            part = slice(start, start + block)
            logits_RV = upcast(logits_CV[part])
            if proposed is not None:
                logits_RV = widen(logits_RV, proposed, vocab)
            yield labels_X[rows_C[part]], logits_RV, None if targets is None else targets.rows(part)


@dataclass(frozen=True, slots=True)
class LabelHits:
    """Sums over positions with a label: cross-entropy in nats, top-1 and top-5 hits, and number of positions."""

    loss: Tensor
    top1: Tensor
    top5: Tensor
    count: Tensor


@torch.no_grad()
def label_hits(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    chunk: int | None = None,
    output: Output = None,
    low_rank_VF: Tensor | None = None,
) -> LabelHits:
    """Compute the cross-entropy, top-1 hits and top-5 hits of labels; see `heads_mixture` for the arguments."""
    loss = torch.zeros((), dtype=torch.promote_types(hidden_XD.dtype, torch.float32), device=labels_X.device)
    top1, top5 = (torch.zeros((), dtype=torch.int64, device=labels_X.device) for _ in range(2))
    blocks = _blocks_of_logits(hidden_XD, weight_VD, labels_X, chunk, output=output, low_rank_VF=low_rank_VF)
    for labels_R, logits_RV, _ in blocks:
        labels_R1 = labels_R[:, None]
        label_logit_R1 = logits_RV.gather(1, labels_R1)
        loss -= logits_RV.log_softmax(1).gather(1, labels_R1).sum()
        ids_V = torch.arange(logits_RV.shape[1], device=labels_X.device)
        higher_RV = (logits_RV > label_logit_R1) | ((logits_RV == label_logit_R1) & (ids_V < labels_R1))
        rank_R = higher_RV.sum(1)
        top1 += (rank_R == 0).sum()
        top5 += (rank_R < TOP).sum()
    return LabelHits(loss, top1, top5, (labels_X != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Agreement:
    """Metrics of the agreement between drafter and teacher, summed over positions with a label.

    `overlap` is Σ_v min(p(v), q(v)), the probability that a draft token is accepted (Leviathan et al. 2023, arXiv
    2211.17192, lemma 3.3; an upper bound for a `SparseTeacher`). `top1` counts equal top tokens, `top5` sums the
    fraction of the five top tokens that both have in common, and `count` is the number of positions.
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
    proposed: Tensor | None = None,
) -> Agreement:
    """Measure how often a drafter and its teacher agree at temperature 1. Raises ValueError if vocabularies differ."""
    overlap, top5 = torch.zeros((), device=labels_X.device), torch.zeros((), device=labels_X.device)
    top1 = torch.zeros((), dtype=torch.int64, device=labels_X.device)
    for _, logits_RV, targets in _blocks_of_logits(hidden_XD, weight_VD, labels_X, chunk, teacher, proposed):
        assert targets is not None
        log_drafter_RF = to_events(targets, logits_RV)[0]
        overlap += torch.minimum(log_drafter_RF, targets.log_probs_RF).exp().sum()
        teacher_RK = targets.top(TOP)
        drafter_RK = logits_RV.topk(teacher_RK.shape[1], dim=1).indices
        top1 += (drafter_RK[:, 0] == teacher_RK[:, 0]).sum()
        top5 += (drafter_RK[:, :, None] == teacher_RK[:, None]).sum() / teacher_RK.shape[1]
    return Agreement(overlap, top1, top5, (labels_X != IGNORED).sum())

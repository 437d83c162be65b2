"""Projection, objective and gradient of many positions in one pass, chunk by chunk: the engine of `losses`.

Letters: X positions, K heads (1 for a drafter), C positions of a chunk, R rows of a block, D hidden, V vocabulary,
F events (see `chunks`), N positions of a teacher that somebody learns from, Y all of a teacher's.

For every chunk the logits, the losses *and their gradient* are computed in the forward pass, by three matrix products
(two where the projection is frozen); the gradient takes the logits' memory (the idea of fused linear cross entropy: Hsu
et al. 2024, Liger Kernel, arXiv 2410.10989). The backward pass needs neither weights nor logits: a weight that exists
only while the forward pass runs (DeepSpeed ZeRO-3) is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunks import (
    IGNORED,
    Targets,
    Teacher,
    TeacherTargets,
    TopK,
    block_rows,
    chunk_positions,
    divide_by_temperature,
    product_type,
    scatter_grad,
    to_events,
    upcast,
)
from .objectives import DIVERGENCES, LABELS, cross_entropy_chunk


class Step(NamedTuple):
    """A product: a head, some of its positions int64 [C] and, with a teacher, the rows of its chunk for them int64
    [C]."""

    head: int
    rows_C: Tensor
    target_rows_C: Tensor | None


class Plan:
    """What a fused loss works through; arguments as in `drafter.heads_mixture`. A projection of None: features are
    logits. Without `teacher_rows_XK` row x of the teacher is that of position x."""

    def __init__(
        self,
        weights: Mapping[str, float],
        features_XKD: Tensor,
        projections: Sequence[Tensor | None],
        labels_XK: Tensor,
        teacher: Teacher | None,
        teacher_rows_XK: Tensor | None,
        temperature: float,
        chunk: int | None,
        top_k: TopK | None,
    ) -> None:
        assert features_XKD.shape[:2] == labels_XK.shape, (features_XKD.shape, labels_XK.shape)
        assert len(projections) == labels_XK.shape[1], (len(projections), labels_XK.shape)
        self._label_weight = float(weights.get(LABELS, 0.0))
        self._taught = [(DIVERGENCES[name], float(w)) for name, w in weights.items() if w and name != LABELS]
        self.temperature, self.labels_XK = float(temperature), labels_XK
        first = projections[0]
        self.vocab = features_XKD.shape[2] if first is None else first.shape[0]
        self.size = chunk or chunk_positions(self.vocab, features_XKD.device)
        self.block = block_rows(self.vocab, self.size, features_XKD.device)
        self.dtype = product_type(features_XKD)
        self.kept = [(labels_X != IGNORED).nonzero()[:, 0] for labels_X in labels_XK.unbind(1)]
        self.targets: TeacherTargets | None = None
        self._teacher_rows_XK = teacher_rows_XK
        if self._taught:
            if teacher is None:
                raise ValueError(f"objective {dict(weights)} needs a teacher, and none was given")
            self.targets = TeacherTargets(teacher, self.vocab, self.size, top_k, self.temperature)
            assert teacher_rows_XK is not None or self.targets.positions == len(labels_XK)

    @property
    def counts_K(self) -> Tensor:
        """How many positions of each head have a label, int64 [K]."""
        return torch.tensor([len(rows) for rows in self.kept], device=self.labels_XK.device)

    def steps(self) -> Iterator[Step]:
        """Head by head or, where there is a teacher, chunk by chunk of its positions, which are loaded for the step."""
        if self.targets is None:
            for head, rows in enumerate(self.kept):
                yield from (Step(head, rows_C, None) for rows_C in _even(rows, self.size))
            return
        heads = range(len(self.kept))
        taught_by = [self._taught_by(head) for head in heads]
        wanted_N = torch.cat(taught_by).unique()
        chunks = _even(wanted_N, self.size)
        edges = [0, *torch.tensor([len(rows_C) for rows_C in chunks]).cumsum(0).tolist()]
        # each head's positions in the order of the rows that teach them, cut where the chunks are
        indices, orders, cuts = [], [], []
        for teaching in taught_by:
            index, order = torch.searchsorted(wanted_N, teaching).sort(stable=True)
            indices.append(index)
            orders.append(order)
            cuts.append(torch.searchsorted(index, torch.tensor(edges, device=index.device)).tolist())
        for number, rows_C in enumerate(chunks):
            self.targets.load(rows_C)
            for head in heads:
                inside = slice(cuts[head][number], cuts[head][number + 1])
                positions, local = self.kept[head][orders[head][inside]], indices[head][inside] - edges[number]
                for part, target_rows in zip(_even(positions, self.size), _even(local, self.size), strict=True):
                    yield Step(head, part, target_rows)

    def _taught_by(self, head: int) -> Tensor:
        """The teacher's row for each of a head's positions, int64."""
        rows = self.kept[head]
        if self._teacher_rows_XK is None:
            return rows
        taught_by = self._teacher_rows_XK[rows, head]
        assert not len(taught_by) or int(taught_by.min()) >= 0, "a position with a label, and no teacher for it"
        return taught_by

    def score_chunk(self, step: Step, logits_CV: Tensor) -> Tensor:
        """The sum of a chunk's losses; their gradient takes the place of `logits_CV`."""
        labels_C = self.labels_XK[step.rows_C, step.head]
        sums = []
        for start in range(0, len(labels_C), self.block):
            block, targets = slice(start, start + self.block), None
            if step.target_rows_C is not None:
                assert self.targets is not None
                targets = self.targets.rows(step.target_rows_C[block])
            loss_R, grad_RV = self._score(upcast(logits_CV[block]), targets, labels_C[block])
            logits_CV[block] = grad_RV
            sums.append(loss_R.sum())
        return torch.stack(sums).sum()

    def _score(self, logits_RV: Tensor, targets: Targets | None, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted losses of a block's rows [R], and the gradient of their sum with respect to `logits_RV`."""
        parts = []
        if self._label_weight:
            parts.append(_scaled(*cross_entropy_chunk(logits_RV, labels_R), self._label_weight))
        if targets is not None:
            log_drafter_RF, rest_RV = to_events(targets, divide_by_temperature(logits_RV, self.temperature))
            scored = [_scaled(*score(log_drafter_RF, targets.log_probs_RF), weight) for score, weight in self._taught]
            loss_R, grad_RF = _sum(scored)
            if targets.ids_RK is not None:
                assert rest_RV is not None
                grad_RF = scatter_grad(grad_RF, targets.ids_RK, rest_RV)
            heat = self.temperature  # the gradient: τ² of the loss by 1/τ of the chain rule
            parts.append((loss_R, grad_RF) if heat == 1 else (loss_R * heat**2, grad_RF.mul_(heat)))
        return _sum(parts)


def _even(rows: Tensor, size: int) -> Sequence[Tensor]:
    """As few parts of at most `size` as possible, about as long as each other: a product of few rows is slow."""
    if not len(rows):
        return ()
    return rows.split(-(-len(rows) // -(-len(rows) // size)))


def _scaled(loss_R: Tensor, grad_RF: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    return (loss_R, grad_RF) if weight == 1 else (loss_R * weight, grad_RF.mul_(weight))


def _sum(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Losses added up, and their gradients, written into the first."""
    (loss_R, grad_RF), *others = parts
    for other_R, other_RF in others:
        loss_R, grad_RF = loss_R + other_R, grad_RF.add_(other_RF)
    return loss_R, grad_RF


class _Products:
    """Features times a head's projection, always into the same memory; projections in the type of the products."""

    def __init__(self, plan: Plan, features_XKD: Tensor, projections: Sequence[Tensor | None]) -> None:
        self._plan, self._features_XKD, self._projections = plan, features_XKD.detach(), projections
        self._out_CV: Tensor | None = None
        self._cast: tuple[Tensor, Tensor] | None = None

    def weight_VD(self, head: int) -> Tensor | None:
        """Cast anew only when it is another than the last one: one copy at a time."""
        weight_VD = self._projections[head]
        if weight_VD is None:
            return None
        if self._cast is None or self._cast[0] is not weight_VD:
            self._cast = None
            self._cast = (weight_VD, weight_VD.detach().to(self._plan.dtype))
        return self._cast[1]

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """Features [C, D] and logits [C, V]; the next step overwrites the logits."""
        features_CD = self._features_XKD[:, step.head][step.rows_C].to(self._plan.dtype)
        weight_VD = self.weight_VD(step.head)
        if weight_VD is None:
            return features_CD, features_CD
        if self._out_CV is None:
            rows = min(self._plan.size, max(len(kept) for kept in self._plan.kept))
            self._out_CV = features_CD.new_empty((rows, self._plan.vocab))
        return features_CD, torch.mm(features_CD, weight_VD.T, out=self._out_CV[: len(features_CD)])


class FusedLoss(torch.autograd.Function):
    """Losses and gradients in one pass; `backward` only scales what `forward` has left."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, with_grad: bool, features_XKD: Tensor, *projections: Tensor | None) -> Tensor:
        # sums of thousands of terms stay in float32 or more whatever the model's type; products run in the plan's
        wide_dtype = torch.promote_types(features_XKD.dtype, torch.float32)
        _, _, features_wanted, *wanted = ctx.needs_input_grad
        grad_XKD = torch.zeros_like(features_XKD) if with_grad and features_wanted else None
        sums: list[Tensor] = [torch.zeros((), dtype=wide_dtype, device=features_XKD.device) for _ in projections]
        grads: list[Tensor | None] = [None] * len(projections)
        products = _Products(plan, features_XKD, projections)
        with torch.autocast(features_XKD.device.type, enabled=False):
            for step in plan.steps():
                head = step.head
                features_CD, grad_CV = products(step)
                sums[head] += plan.score_chunk(step, grad_CV)
                if grad_XKD is not None:
                    weight_VD = products.weight_VD(head)
                    grad_CD = grad_CV if weight_VD is None else grad_CV @ weight_VD
                    grad_XKD[step.rows_C, head] = grad_CD.to(grad_XKD.dtype)
                if with_grad and wanted[head]:
                    grads[head] = _add_outer(grads[head], grad_CV, features_CD, wide_dtype)
        for head, weight_VD in enumerate(projections):
            if with_grad and wanted[head] and grads[head] is None:
                assert weight_VD is not None
                grads[head] = torch.zeros_like(weight_VD, dtype=wide_dtype)
        ctx.grads = (grad_XKD, grads, [None if weight_VD is None else weight_VD.dtype for weight_VD in projections])
        return torch.stack(sums)

    @staticmethod
    def backward(ctx: Any, grad_output_K: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "a fused loss can be differentiated once: its gradients were handed on"
        (grad_XKD, grads, dtypes), ctx.grads = ctx.grads, None
        if grad_XKD is not None:
            grad_XKD.mul_(grad_output_K[:, None])
        for head, dtype in enumerate(dtypes):
            if grads[head] is not None:
                grads[head] = grads[head].mul_(grad_output_K[head]).to(dtype)
        return None, None, grad_XKD, *grads


def _add_outer(sum_VD: Tensor | None, grad_CV: Tensor, hidden_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_VD + grad_CV.T @ hidden_CD, written into `sum_VD`; `dtype` is what sums are kept in."""
    if sum_VD is None:
        return (grad_CV.T @ hidden_CD).to(dtype)
    if grad_CV.dtype == dtype:
        return sum_VD.addmm_(grad_CV.T, hidden_CD)
    return sum_VD.add_(grad_CV.T @ hidden_CD)

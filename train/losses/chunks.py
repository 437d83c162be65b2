"""Fused output projection, loss and gradient, computed chunk by chunk.

Letters: X positions, K heads (1 for a drafter), C positions of a chunk, R rows of a block (a part of a chunk), D hidden
of the drafter, E hidden of the teacher, V vocabulary, F events (the K tokens of a top-k teacher, and "any other"),
N teacher rows that are used.

Matrix products run over a *chunk* of positions, into one buffer. Elementwise operations run over *blocks* of a few
rows, whose intermediate results fit into a CPU's caches. Logits, losses and gradients are computed in the forward pass
by three products (two if the projection is frozen), and the gradient overwrites the logits (fused linear cross-entropy:
Hsu et al. 2024, Liger Kernel, arXiv 2410.10989). The backward pass needs neither weights nor logits, so the weights
need to be gathered only for the forward pass (DeepSpeed ZeRO-3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .objectives import DIVERGENCES, LABELS, cross_entropy_chunk
from .product import Product

IGNORED = -100  # label of positions that losses skip

# maximum logits and positions per chunk: 64 MB of float32 on a CPU, 256 MB on a GPU
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
CHUNK_POSITIONS = {"cpu": 1024, "cuda": 8192}
BLOCK_ELEMENTS = 1 << 18  # per thread: 1 MB of float32


@dataclass(frozen=True, slots=True)
class DenseTeacher:
    """Teacher's distributions: hidden states [X, E] and an output projection [V, E], or logits [X, V] and None."""

    hidden_XE: Tensor
    weight_VE: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SparseTeacher:
    """Most probable tokens of a teacher: distinct ids int64 [X, K], and log-probabilities [X, K] at temperature 1."""

    ids_XK: Tensor
    log_probs_XK: Tensor


Teacher = DenseTeacher | SparseTeacher
Output = Callable[[Tensor], Tensor] | None
"""Function that converts products of states and projection to logits. If None, the products are the logits."""


Weigh = Callable[[Tensor, Tensor], Tensor] | None
"""Function that returns weights of losses, given the losses and a mask of those that have a label, all [X, K]."""


def chunk_positions(vocab: int, device: torch.device) -> int:
    """Return the number of positions per chunk for a vocabulary size and a device."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return max(16, min(CHUNK_POSITIONS[kind], CHUNK_ELEMENTS[kind] // vocab))


def block_rows(vocab: int, chunk: int, device: torch.device) -> int:
    """Return the number of rows per block of a chunk. On a GPU, a chunk is a single block."""
    return chunk if device.type == "cuda" else max(1, BLOCK_ELEMENTS * torch.get_num_threads() // vocab)


class Targets(NamedTuple):
    """Log-probabilities [R, F] that a teacher assigns to F events at each of R positions.

    If `ids_RK` is None, the events are all tokens of the vocabulary (F = V). Otherwise, they are the tokens `ids_RK`
    (int64 [R, K]) and, if F = K + 1, the event "any other token".
    """

    ids_RK: Tensor | None
    log_probs_RF: Tensor

    def top(self, count: int) -> Tensor:
        """Return the `count` most probable tokens, int64 [R, count], in descending order, or all if there are fewer."""
        if self.ids_RK is None:
            return self.log_probs_RF.topk(min(count, self.log_probs_RF.shape[1]), dim=1).indices
        known = self.ids_RK.shape[1]
        return self.ids_RK.gather(1, self.log_probs_RF[:, :known].topk(min(count, known), dim=1).indices)


class TeacherTargets:
    """Reader of a teacher's log-probabilities at `temperature`, chunk by chunk.

    Raises ValueError if the vocabulary sizes differ, `top_k` is used at a temperature other than 1, or a sparse teacher
    stores fewer than `top_k` tokens.
    """

    def __init__(self, teacher: Teacher, vocab: int, top_k: int | None = None, temperature: float = 1.0) -> None:
        self._teacher, self._vocab, self._temperature = teacher, vocab, temperature
        if isinstance(teacher, SparseTeacher):
            assert teacher.ids_XK.shape == teacher.log_probs_XK.shape
            self.positions, stored = teacher.ids_XK.shape
            top_k = top_k or stored
            if top_k > stored:
                raise ValueError(f"top_k is {top_k}, but the teacher stores the {stored} most likely tokens")
        else:
            self.positions = len(teacher.hidden_XE)
            teacher_vocab = teacher.hidden_XE.shape[1] if teacher.weight_VE is None else len(teacher.weight_VE)
            if teacher_vocab != vocab:
                raise ValueError(f"the drafter's vocabulary has {vocab} tokens, but the teacher's has {teacher_vocab}")
            self._product = Product(teacher.hidden_XE.dtype)
        self._top_k = top_k
        if top_k is not None and temperature != 1:
            raise ValueError(f"top_k requires temperature 1, got {temperature}")

    def load(self, rows_C: Tensor) -> None:
        self._rows_C = rows_C
        if isinstance(self._teacher, DenseTeacher):
            self._logits_CV = self._product(self._teacher.hidden_XE.detach()[rows_C], self._teacher.weight_VE)

    def rows(self, rows_R: Tensor | slice) -> Targets:
        """Return the teacher's log-probabilities at the given rows of the loaded chunk."""
        teacher, top_k = self._teacher, self._top_k
        if isinstance(teacher, SparseTeacher):
            assert top_k is not None
            rows_R = self._rows_C[rows_R]
            ids_RK, scores_RK = teacher.ids_XK[rows_R], upcast(teacher.log_probs_XK.detach()[rows_R])
            if top_k < ids_RK.shape[1]:
                scores_RK, order_RK = scores_RK.topk(top_k, dim=1)
                ids_RK = ids_RK.gather(1, order_RK)
        else:
            logits_RV = upcast(self._logits_CV[rows_R])
            if top_k is None or top_k >= self._vocab:
                return Targets(None, divide_by_temperature(logits_RV, self._temperature).log_softmax(1))
            scores_RK, ids_RK = logits_RV.topk(top_k, dim=1)
        if ids_RK.shape[1] == self._vocab:
            return Targets(ids_RK, scores_RK.log_softmax(1))
        if isinstance(teacher, SparseTeacher):  # log(1 − Σ p); −∞ if rounding made the sum 1 or more
            rest_R1 = torch.expm1(scores_RK.logsumexp(1, keepdim=True)).neg_().clamp_(min=0).log_()
        else:
            rest_R1 = logits_RV.scatter(1, ids_RK, -torch.inf).logsumexp(1, keepdim=True)
        return Targets(ids_RK, torch.cat([scores_RK, rest_R1], 1).log_softmax(1))


def to_top_k_events(logits_RV: Tensor, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the drafter's log-probabilities [R, F] of F events: the tokens `ids_RK` and "any other token".

    The second result [R, V] is the distribution over tokens, given the event "any other token". If K = V, there is no
    such event: F = K, and the second result is 0.
    """
    scores_RK = logits_RV.gather(1, ids_RK)
    if ids_RK.shape[1] == logits_RV.shape[1]:
        return scores_RK.log_softmax(1), torch.zeros_like(logits_RV)
    rest_RV = logits_RV.scatter(1, ids_RK, -torch.inf)
    top_R1, where_R1 = rest_RV.max(1, keepdim=True)
    rest_RV = rest_RV.softmax(1)
    tail_R1 = top_R1 - rest_RV.gather(1, where_R1).log()
    return torch.cat([scores_RK, tail_R1], 1).log_softmax(1), rest_RV


def to_events(targets: Targets, logits_RV: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the drafter's log-probabilities of the events in `targets`, and the second result of `to_top_k_events`."""
    return (logits_RV.log_softmax(1), None) if targets.ids_RK is None else to_top_k_events(logits_RV, targets.ids_RK)


def scatter_grad(grad_RF: Tensor, ids_RK: Tensor, rest_RV: Tensor) -> Tensor:
    """Convert gradients of events to gradients of logits. Overwrites `rest_RV`, a result of `to_top_k_events`."""
    known = ids_RK.shape[1]
    if grad_RF.shape[1] > known:
        rest_RV.mul_(grad_RF[:, known:])
    return rest_RV.scatter_(1, ids_RK, grad_RF[:, :known])


def upcast(values: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def divide_by_temperature(logits_RV: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature."""
    return logits_RV if temperature == 1 else logits_RV / temperature


def product_type(values: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: the autocast dtype if autocast is enabled, else the dtype of `values`."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


class Plan:
    """Plan that splits the computation of a fused loss into chunks; for the arguments see `drafter.heads_mixture`."""

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
        top_k: int | None,
        output: Output = None,
        weigh: Weigh = None,
        accepted_XK: Tensor | None = None,
    ) -> None:
        self._output, self.weigh, self._accepted_XK = output, weigh, accepted_XK
        assert features_XKD.shape[:2] == labels_XK.shape, (features_XKD.shape, labels_XK.shape)
        assert len(projections) == labels_XK.shape[1], (len(projections), labels_XK.shape)
        self._label_weight = float(weights.get(LABELS, 0.0))
        self._divergences = [(DIVERGENCES[name], float(w)) for name, w in weights.items() if w and name != LABELS]
        self._temperature, self.labels_XK, self._teacher_rows_XK = float(temperature), labels_XK, teacher_rows_XK
        vocab = features_XKD.shape[2] if projections[0] is None else projections[0].shape[0]
        self._size = chunk or chunk_positions(vocab, features_XKD.device)
        self._block = block_rows(vocab, self._size, features_XKD.device)
        self.dtype = product_type(features_XKD)
        self._labelled = [(labels_X != IGNORED).nonzero()[:, 0] for labels_X in labels_XK.unbind(1)]
        self.counts_K = torch.tensor([len(rows) for rows in self._labelled], device=labels_XK.device)
        self._targets: TeacherTargets | None = None
        if self._divergences:
            if teacher is None:
                raise ValueError(f"objective {dict(weights)} requires a teacher, but none was given")
            self._targets = TeacherTargets(teacher, vocab, top_k, self._temperature)
            assert teacher_rows_XK is not None or self._targets.positions == len(labels_XK)

    def steps(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield chunks as a head index, positions (int64 [C]) and rows in the loaded teacher chunk (None if unused)."""
        if self._targets is None:
            for head, rows in enumerate(self._labelled):
                yield from ((head, rows_C, None) for rows_C in _even(rows, self._size))
            return
        source, head_rows = self._teacher_rows_XK, list(enumerate(self._labelled))
        rows_of_heads = [rows if source is None else source[rows, head] for head, rows in head_rows]
        used_N = torch.cat(rows_of_heads).unique()
        assert not len(used_N) or int(used_N[0]) >= 0, "a position has a label but no teacher row"
        chunks = _even(used_N, self._size)
        edges = [0, *torch.tensor([len(rows_C) for rows_C in chunks]).cumsum(0).tolist()]
        # positions of each head, sorted by their teacher rows and split at the chunk borders
        sorted_heads = [torch.searchsorted(used_N, rows).sort(stable=True) for rows in rows_of_heads]
        bounds = torch.tensor(edges, device=used_N.device)
        cuts = [torch.searchsorted(index, bounds).tolist() for index, _ in sorted_heads]
        for number, rows_C in enumerate(chunks):
            self._targets.load(rows_C)
            for head, rows in head_rows:
                index, order = (part[cuts[head][number] : cuts[head][number + 1]] for part in sorted_heads[head])
                parts = zip(_even(rows[order], self._size), _even(index - edges[number], self._size), strict=True)
                yield from ((head, positions_C, local_C) for positions_C, local_C in parts)

    def score_chunk(self, head: int, rows_C: Tensor, target_rows_C: Tensor | None, logits_CV: Tensor) -> Tensor:
        """Return a chunk's losses [C], and overwrite `logits_CV` with the gradient of their sum."""
        labels_C, products_CV = self.labels_XK[rows_C, head], logits_CV
        if self._output is not None:
            with torch.enable_grad():
                output_CV = self._output(input_CV := products_CV.detach().requires_grad_())
            logits_CV = output_CV.detach().clone()
        losses = []
        for start in range(0, len(labels_C), self._block):
            block, targets = slice(start, start + self._block), None
            if target_rows_C is not None:
                assert self._targets is not None
                targets = self._targets.rows(target_rows_C[block])
            logits_RV = upcast(logits_CV[block])
            if self._accepted_XK is not None:
                self._accepted_XK[rows_C[block], head] = self._acceptance(logits_RV, targets, labels_C[block])
            loss_R, grad_RV = self._score(logits_RV, targets, labels_C[block])
            logits_CV[block] = grad_RV
            losses.append(loss_R)
        if self._output is not None:
            products_CV.copy_(torch.autograd.grad(output_CV, input_CV, logits_CV)[0])
        return torch.cat(losses)

    def _acceptance(self, logits_RV: Tensor, targets: Targets | None, labels_R: Tensor) -> Tensor:
        """Return acceptance rates [R]; see `drafter.heads_mixture`."""
        if targets is None:
            return (logits_RV.argmax(1) == labels_R).float()
        log_drafter_RF, _ = to_events(targets, divide_by_temperature(logits_RV, self._temperature))
        return torch.minimum(log_drafter_RF, targets.log_probs_RF).exp().sum(1)

    def _score(self, logits_RV: Tensor, targets: Targets | None, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return weighted losses of a block's rows [R], and the gradient of their sum with respect to the logits."""
        parts = []
        if self._label_weight:
            parts.append(_scale(*cross_entropy_chunk(logits_RV, labels_R), self._label_weight))
        if targets is not None:
            log_drafter_RF, rest_RV = to_events(targets, divide_by_temperature(logits_RV, self._temperature))
            scores = [_scale(*f(log_drafter_RF, targets.log_probs_RF), weight) for f, weight in self._divergences]
            loss_R, grad_RF = _sum(scores)
            if targets.ids_RK is not None:
                assert rest_RV is not None
                grad_RF = scatter_grad(grad_RF, targets.ids_RK, rest_RV)
            tau = self._temperature  # gradient: factor τ² of the loss times 1/τ of the chain rule
            parts.append((loss_R, grad_RF) if tau == 1 else (loss_R * tau**2, grad_RF.mul_(tau)))
        return _sum(parts)


def _even(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Split rows into nearly equal parts of at most `size`, because matrix products with few rows are slow."""
    return rows.split(-(-len(rows) // -(-len(rows) // size))) if len(rows) else ()


def _scale(loss_R: Tensor, grad_RF: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    return (loss_R, grad_RF) if weight == 1 else (loss_R * weight, grad_RF.mul_(weight))


def _sum(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Add the losses and gradients of several objectives. Overwrites the first gradient."""
    (loss_R, grad_RF), *rest = parts
    for other_R, other_RF in rest:
        loss_R, grad_RF = loss_R + other_R, grad_RF.add_(other_RF)
    return loss_R, grad_RF


class FusedLoss(torch.autograd.Function):
    """Autograd function that computes losses and gradients in `forward`; `backward` only scales the gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, with_grad: bool, features_XKD: Tensor, *matrices: Tensor | None) -> Tensor:
        heads = features_XKD.shape[1]
        projections, low_ranks = matrices[:heads], matrices[heads:]  # the latter are none, or one for each head
        # sums of thousands of terms need at least float32; products run in the plan's dtype
        wide_dtype = torch.promote_types(features_XKD.dtype, torch.float32)
        _, _, features_need_grad, *needs_grad = ctx.needs_input_grad
        grad_XKD = torch.zeros_like(features_XKD) if with_grad and features_need_grad else None
        losses_XK = torch.zeros(features_XKD.shape[:2], dtype=wide_dtype, device=features_XKD.device)
        grads: list[Tensor | None] = [None] * len(matrices)
        product = Product(plan.dtype, low_ranks[0] if low_ranks else None)
        features_XKD = features_XKD.detach()
        with torch.autocast(features_XKD.device.type, enabled=False):
            for head, rows_C, target_rows_C in plan.steps():
                weight_VD = projections[head]
                features_CD = features_XKD[:, head][rows_C].to(plan.dtype)
                grad_CV = product(features_CD, weight_VD)
                losses_XK[rows_C, head] = plan.score_chunk(head, rows_C, target_rows_C, grad_CV).to(wide_dtype)
                if grad_XKD is not None:
                    grad_XKD[rows_C, head] = product.to_states(grad_CV, weight_VD).to(grad_XKD.dtype)
                for index, part_CX in zip((head, heads + head), product.split(features_CD), strict=False):
                    if with_grad and needs_grad[index]:
                        grads[index] = _add_outer(grads[index], grad_CV, part_CX, wide_dtype)
        for index, matrix in enumerate(matrices):
            if with_grad and needs_grad[index] and grads[index] is None:
                assert matrix is not None
                grads[index] = torch.zeros_like(matrix, dtype=wide_dtype)
        if plan.weigh is not None:
            assert not any(needs_grad), "weighted losses require frozen projections"
            weights_XK = plan.weigh(losses_XK, plan.labels_XK != IGNORED)
            losses_XK = losses_XK * weights_XK
            if grad_XKD is not None:
                grad_XKD.mul_(weights_XK[..., None])
        ctx.grads = (grad_XKD, grads, [None if matrix is None else matrix.dtype for matrix in matrices])
        return losses_XK.sum(0)

    @staticmethod
    def backward(ctx: Any, grad_output_K: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "a fused loss can be differentiated only once"
        (grad_XKD, grads, dtypes), ctx.grads = ctx.grads, None
        if grad_XKD is not None:
            grad_XKD.mul_(grad_output_K[:, None])
        for index, dtype in enumerate(dtypes):
            if grads[index] is not None:
                grads[index] = grads[index].mul_(grad_output_K[index % len(grad_output_K)]).to(dtype)
        return None, None, grad_XKD, *grads


def _add_outer(sum_VD: Tensor | None, grad_CV: Tensor, hidden_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_VD + grad_CV.T @ hidden_CD, accumulated in `dtype`. Overwrites `sum_VD`, which may be None."""
    if sum_VD is None:
        return (grad_CV.T @ hidden_CD).to(dtype)
    if grad_CV.dtype == dtype:
        return sum_VD.addmm_(grad_CV.T, hidden_CD)
    return sum_VD.add_(grad_CV.T @ hidden_CD)

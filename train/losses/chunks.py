"""Logits chunk by chunk: of what is trained (the "drafter"), and what a teacher says at the same positions.

Letters: X flattened positions, C positions of a chunk, R rows of a block (a part of a chunk), D hidden of the drafter,
E hidden of the teacher, V vocabulary, K tokens that a top-k teacher names, F events (K, or K + 1 with "any other").

Matrix products run over a *chunk* of positions, into one buffer; what comes after them is elementwise and runs over
*blocks* of few rows, whose temporaries stay in a CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...checkpoints.storage.draft_vocabulary import widen

IGNORED = -100  # a label that no loss counts

# logits and positions of a chunk at most: 64 MB of float32 on CPU, 256 MB on a GPU
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
CHUNK_POSITIONS = {"cpu": 1024, "cuda": 8192}
BLOCK_ELEMENTS = 1 << 18  # of a thread: 1 MB of float32


@dataclass(frozen=True, slots=True)
class DenseTeacher:
    """A teacher's whole distribution: hidden states [X, E] and projection [V, E], or logits [X, V] and None."""

    hidden_XE: Tensor
    weight_VE: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SparseTeacher:
    """A teacher's most likely tokens, in any order: ids int64 [X, K], all different, and log-probabilities [X, K] of
    the softmax over the whole vocabulary at temperature 1."""

    ids_XK: Tensor
    log_probs_XK: Tensor


Teacher = DenseTeacher | SparseTeacher


@dataclass(frozen=True, slots=True)
class TopK:
    """Learn from the teacher's k most likely tokens. The `tail` is one event on both sides ("bucket", at temperature 1
    only) or has probability 0 while the k sum to 1 ("renormalise")."""

    k: int
    tail: Literal["bucket", "renormalise"] = "bucket"


def chunk_positions(vocab: int, device: torch.device) -> int:
    """Positions of a chunk."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return max(16, min(CHUNK_POSITIONS[kind], CHUNK_ELEMENTS[kind] // vocab))


def block_rows(vocab: int, chunk: int, device: torch.device) -> int:
    """Rows of a block: on a GPU, blocks are chunks."""
    return chunk if device.type == "cuda" else max(1, BLOCK_ELEMENTS * torch.get_num_threads() // vocab)


class Targets(NamedTuple):
    """Log-probabilities of a block's events: [R, V] over the vocabulary where `ids_RK` is None, else [R, F] of these
    tokens int64 [R, K] and, where F = K + 1, of "any other"."""

    ids_RK: Tensor | None
    log_probs_RF: Tensor

    def top(self, count: int) -> Tensor:
        """The most likely tokens int64 [R, count], the first one first; fewer where the teacher names fewer."""
        if self.ids_RK is None:
            return self.log_probs_RF.topk(min(count, self.log_probs_RF.shape[1]), dim=1).indices
        known = self.ids_RK.shape[1]
        return self.ids_RK.gather(1, self.log_probs_RF[:, :known].topk(min(count, known), dim=1).indices)


class TeacherTargets:
    """A teacher's log-probabilities at `temperature`, chunk after chunk of at most `size` positions. Raises ValueError:
    another vocabulary than the drafter's; `top_k`'s bucket at a temperature other than 1; more tokens wanted than a
    sparse teacher has."""

    def __init__(
        self, teacher: Teacher, vocab: int, size: int, top_k: TopK | None = None, temperature: float = 1.0
    ) -> None:
        self._teacher, self._vocab, self._temperature = teacher, vocab, temperature
        if isinstance(teacher, SparseTeacher):
            assert teacher.ids_XK.shape == teacher.log_probs_XK.shape
            self.positions, kept = teacher.ids_XK.shape
            top_k = top_k or TopK(kept)
            if top_k.k > kept:
                raise ValueError(f"top_k wants the {top_k.k} most likely tokens, and the teacher keeps {kept}")
        else:
            hidden_XE, weight_VE = teacher.hidden_XE, teacher.weight_VE
            self.positions = len(hidden_XE)
            theirs = hidden_XE.shape[1] if weight_VE is None else len(weight_VE)
            if theirs != vocab:
                raise ValueError(
                    f"the drafter's vocabulary has {vocab} tokens, the teacher's {theirs}: they must agree"
                )
            self._product = Product(hidden_XE, weight_VE, size, own_type=True)
        self._top_k = top_k
        if top_k is not None and top_k.tail == "bucket" and temperature != 1:
            raise ValueError(f"tail 'bucket' needs temperature 1, got {temperature}: use tail 'renormalise'")

    def load(self, rows_C: Tensor) -> None:
        """Go to the chunk of these positions."""
        self._rows_C = rows_C
        if isinstance(self._teacher, DenseTeacher):
            self._logits_CV = self._product(rows_C)

    def rows(self, rows_R: Tensor | slice) -> Targets:
        """What the teacher says of these rows of the chunk."""
        top_k = self._top_k
        if isinstance(self._teacher, SparseTeacher):
            assert top_k is not None
            return self._named(self._teacher, self._rows_C[rows_R], top_k)
        logits_RV = upcast(self._logits_CV[rows_R])
        if top_k is not None and top_k.k < self._vocab:
            return self._cut(logits_RV, top_k)
        return Targets(None, divide_by_temperature(logits_RV, self._temperature).log_softmax(1))

    def _named(self, teacher: SparseTeacher, rows_R: Tensor, top_k: TopK) -> Targets:
        """Of a sparse teacher."""
        ids_RK, scores_RK = teacher.ids_XK[rows_R], upcast(teacher.log_probs_XK.detach()[rows_R])
        if top_k.k < ids_RK.shape[1]:
            scores_RK, order_RK = scores_RK.topk(top_k.k, dim=1)
            ids_RK = ids_RK.gather(1, order_RK)
        if top_k.tail == "renormalise" or ids_RK.shape[1] == self._vocab:
            return self._closed(ids_RK, scores_RK)
        return Targets(ids_RK, torch.cat([scores_RK, _log_rest(scores_RK)], 1).log_softmax(1))

    def _cut(self, logits_RV: Tensor, top_k: TopK) -> Targets:
        """Of a dense teacher of which only the most likely tokens are wanted."""
        scores_RK, ids_RK = logits_RV.topk(top_k.k, dim=1)
        if top_k.tail == "renormalise":
            return self._closed(ids_RK, scores_RK)
        tail_R1 = logits_RV.scatter(1, ids_RK, -torch.inf).logsumexp(1, keepdim=True)
        return Targets(ids_RK, torch.cat([scores_RK, tail_R1], 1).log_softmax(1))

    def _closed(self, ids_RK: Tensor, scores_RK: Tensor) -> Targets:
        """Nothing but these tokens is possible."""
        log_probs_RK = divide_by_temperature(scores_RK, self._temperature).log_softmax(1)
        if ids_RK.shape[1] == self._vocab:
            return Targets(ids_RK, log_probs_RK)
        none_R1 = torch.full_like(log_probs_RK[:, :1], -torch.inf)
        return Targets(ids_RK, torch.cat([log_probs_RK, none_R1], 1))


def blocks_of_logits(
    hidden_XD: Tensor,
    weight_VD: Tensor | None,
    labels_X: Tensor,
    chunk: int | None,
    teacher: Teacher | None = None,
    proposed: Tensor | None = None,
    top_k: TopK | None = None,
) -> Iterator[tuple[Tensor, Tensor, Targets | None]]:
    """Of the positions that have a label, block by block: labels int64 [R], logits [R, V], and what a teacher says;
    arguments as in `drafter.mixture`, and ValueError as `TeacherTargets`. `proposed`: ids of the only tokens that have
    a logit, the others having minus infinity."""
    assert labels_X.shape == hidden_XD.shape[:1], (hidden_XD.shape, labels_X.shape)
    vocab = hidden_XD.shape[1] if weight_VD is None else weight_VD.shape[0]
    size = chunk or chunk_positions(vocab, hidden_XD.device)
    if proposed is not None:
        hidden_XD, weight_VD = rows_of(proposed, hidden_XD, weight_VD)
    product, targets = Product(hidden_XD, weight_VD, size), None
    if teacher is not None:
        targets = TeacherTargets(teacher, vocab, size, top_k)
        assert targets.positions == len(labels_X), (targets.positions, len(labels_X))
    block = block_rows(vocab, size, hidden_XD.device)
    kept = (labels_X != IGNORED).nonzero()[:, 0]
    for rows_C in kept.split(size) if len(kept) else ():
        logits_CV = product(rows_C)
        if targets is not None:
            targets.load(rows_C)
        for start in range(0, len(rows_C), block):
            part = slice(start, start + block)
            said = None if targets is None else targets.rows(part)
            logits_RV = upcast(logits_CV[part])
            yield labels_X[rows_C[part]], logits_RV if proposed is None else widen(logits_RV, proposed, vocab), said


def rows_of(ids: Tensor, hidden_XD: Tensor, weight_VD: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """States and projection, or logits and None, of these tokens alone."""
    return (hidden_XD[:, ids], None) if weight_VD is None else (hidden_XD, weight_VD[ids])


def to_top_k_events(logits_RV: Tensor, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
    """A drafter's log-probabilities of the events "token ids_k" and "any other" [R, F], and each token's share of "any
    other" [R, V]. With K = V there is no other token: F = K, and the shares are 0."""
    scores_RK = logits_RV.gather(1, ids_RK)
    if ids_RK.shape[1] == logits_RV.shape[1]:
        return scores_RK.log_softmax(1), torch.zeros_like(logits_RV)
    rest_RV = logits_RV.scatter(1, ids_RK, -torch.inf)
    top_R1, where_R1 = rest_RV.max(1, keepdim=True)
    rest_RV = rest_RV.softmax(1)
    tail_R1 = top_R1 - rest_RV.gather(1, where_R1).log()
    return torch.cat([scores_RK, tail_R1], 1).log_softmax(1), rest_RV


def to_events(targets: Targets, logits_RV: Tensor) -> tuple[Tensor, Tensor | None]:
    """The drafter's log-probabilities of the targets' events; see `to_top_k_events`."""
    return (logits_RV.log_softmax(1), None) if targets.ids_RK is None else to_top_k_events(logits_RV, targets.ids_RK)


def scatter_grad(grad_RF: Tensor, ids_RK: Tensor, rest_RV: Tensor) -> Tensor:
    """The gradient of all logits from that of the scores of `to_top_k_events`, written into `rest_RV`."""
    known = ids_RK.shape[1]
    if grad_RF.shape[1] > known:
        rest_RV.mul_(grad_RF[:, known:])
    return rest_RV.scatter_(1, ids_RK, grad_RF[:, :known])


def upcast(values: Tensor) -> Tensor:
    """As float32, or float64 where it is that."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def divide_by_temperature(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits at a temperature."""
    return logits_RV if temperature == 1 else logits_RV / temperature


def _log_rest(log_probs_RK: Tensor) -> Tensor:
    """log(1 − Σ p) [R, 1]; −∞ where rounding made the sum 1 or more."""
    return torch.expm1(log_probs_RK.logsumexp(1, keepdim=True)).neg_().clamp_(min=0).log_()


def product_type(values: Tensor) -> torch.dtype:
    """The type that products of these values run in: that of autocast where it is on."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


class Product:
    """Rows of `hidden_XD @ weight_VD.T`, written into the same memory each time; or rows of `hidden_XD`."""

    def __init__(self, hidden_XD: Tensor, weight_VD: Tensor | None, rows: int, own_type: bool = False) -> None:
        self._dtype = hidden_XD.dtype if own_type else product_type(hidden_XD)
        self._weight_VD = None if weight_VD is None else weight_VD.detach().to(self._dtype)
        self._hidden_XD, self._rows = hidden_XD.detach(), min(rows, len(hidden_XD))
        self._out_CV: Tensor | None = None

    def __call__(self, rows_C: Tensor) -> Tensor:
        hidden_CD = self._hidden_XD[rows_C]
        if self._weight_VD is None:
            return hidden_CD
        if self._out_CV is None:
            self._out_CV = hidden_CD.new_empty((self._rows, len(self._weight_VD)), dtype=self._dtype)
        return torch.mm(hidden_CD.to(self._dtype), self._weight_VD.T, out=self._out_CV[: len(rows_C)])

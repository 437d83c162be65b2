"""Objectives and chunked losses equal autograd of their formulas, and never allocate all logits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draftsmith.train.losses.chunks import DenseTeacher, SparseTeacher
from draftsmith.train.losses.drafter import agreement, head_labels, label_hits, mixture, shifted_labels
from draftsmith.train.losses.objectives import (
    DIVERGENCES,
    LK_DECAY,
    LOG_FLOOR,
    OBJECTIVES,
    Ramp,
    cross_entropy_chunk,
    parse_weights,
    weights_at,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CROSS_ENTROPY = {"cross-entropy": 1.0}
SHAPES = [(1, 3, 2, None), (7, 5, 11, 3), (65, 8, 17, 64), (33, 1, 5, 1)]  # X, D, V, chunk
TAUGHT = list(DIVERGENCES)


def accepted(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.xlogy(p, p).sum(1) - torch.xlogy(p, q).sum(1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * forward_kl(p, (p + q) / 2) + 0.5 * forward_kl(q, (p + q) / 2)


def lk_lambda(p: Tensor, q: Tensor) -> Tensor:
    share = torch.exp(-LK_DECAY * accepted(p, q).detach())
    return share * forward_kl(p, q) + (1 - share) * (1 - accepted(p, q))


LITERAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": lambda p, q: forward_kl(q, p),
    "jensen-shannon": jensen_shannon,
    "total-variation": lambda p, q: 0.5 * (p - q).abs().sum(1),
    "lk-alpha": lambda p, q: -accepted(p, q).log(),
    "lk-lambda": lk_lambda,
}


def naive(name: str, drafter: Tensor, target: Tensor) -> Tensor:
    """Compute the objective by its formula from the probabilities q and p, summed over positions."""
    return LITERAL[name](target, drafter).sum()


def literal(name: str, logits_XV: Tensor, teacher_XV: Tensor, labels_X: Tensor, heat: float = 1.0) -> Tensor:
    supervised = labels_X != -100
    logits, teacher, labels = logits_XV[supervised].double(), teacher_XV[supervised].double(), labels_X[supervised]
    if name == "cross-entropy":
        return F.cross_entropy(logits, labels, reduction="sum")
    return heat**2 * naive(name, (logits / heat).softmax(-1), (teacher / heat).softmax(-1))


def coarse(probs_XV: Tensor, ids_XK: Tensor) -> Tensor:
    """Return the probabilities of the tokens `ids_XK`, and the total probability of all other tokens."""
    others_XV = torch.ones_like(probs_XV).scatter(1, ids_XK, 0.0)
    return torch.cat([probs_XV.gather(1, ids_XK), (probs_XV * others_XV).sum(1, keepdim=True)], 1)


def inputs(positions: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32):
    torch.manual_seed(positions)
    drafter = (torch.randn(positions, hidden), torch.randn(vocab, hidden))
    teacher = (torch.randn(positions, hidden + 2), torch.randn(vocab, hidden + 2))
    labels = torch.randint(vocab, (positions,))
    labels[1::3] = -100
    leaves = [tensor.to(dtype).requires_grad_() for tensor in drafter]
    return leaves, DenseTeacher(*(tensor.to(dtype) for tensor in teacher)), labels


def logits_of(teacher: DenseTeacher) -> Tensor:
    assert teacher.weight_VE is not None
    return teacher.hidden_XE @ teacher.weight_VE.T


def kept_most_likely(teacher: DenseTeacher, count: int) -> SparseTeacher:
    log_probs, ids = logits_of(teacher).log_softmax(1).topk(count, dim=1)
    shuffled = torch.randperm(count)
    return SparseTeacher(ids[:, shuffled], log_probs[:, shuffled])


@pytest.mark.parametrize(("positions", "hidden", "vocab", "chunk"), SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("heat", [1.0, 1.7])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_losses_equal_their_formulas(
    name: str, heat: float, positions: int, hidden: int, vocab: int, chunk: int | None, dtype: torch.dtype, rtol: float
):
    (hidden_XD, weight_VD), teacher, labels_X = inputs(positions, hidden, vocab, dtype)
    expected = literal(name, hidden_XD @ weight_VD.T, logits_of(teacher), labels_X, heat)
    expected_grads = torch.autograd.grad(expected * 0.5, [hidden_XD, weight_VD])
    loss, count = mixture({name: 1.0}, hidden_XD, weight_VD, labels_X, teacher, heat, chunk)
    (loss * 0.5).backward()
    assert int(count) == int((labels_X != -100).sum())
    torch.testing.assert_close(loss, expected.to(dtype), rtol=rtol / 10, atol=rtol)
    for leaf, grad in zip((hidden_XD, weight_VD), expected_grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=rtol, atol=rtol / 5)


def test_a_mixture_is_the_weighted_sum_also_of_given_logits():
    (hidden_XD, weight_VD), teacher, labels_X = inputs(31, 6, 13)
    weights = {"cross-entropy": 0.3, "forward-kl": 0.7, "total-variation": 2.0, "lk-alpha": 0.0}
    logits_XV = (hidden_XD @ weight_VD.T).detach().requires_grad_()
    before = logits_XV.detach().clone()
    teacher_XV = logits_of(teacher)
    for heat in (1.0, 1.3):
        expected = sum(w * literal(name, logits_XV, teacher_XV, labels_X, heat) for name, w in weights.items())
        (expected_grad,) = torch.autograd.grad(expected, logits_XV)
        loss, _ = mixture(weights, logits_XV, None, labels_X, DenseTeacher(teacher_XV), heat, chunk=7)
        (grad,) = torch.autograd.grad(loss, logits_XV)
        torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(logits_XV, before)


@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize("count", [1, 4, 16])
def test_top_k_merges_the_other_tokens(name: str, count: int):
    """Losses and gradients equal those of autograd with one event for all other tokens, for both kinds of teachers."""
    (hidden_XD, weight_VD), teacher, labels_X = inputs(23, 6, 17, torch.float64)
    target = logits_of(teacher).softmax(1)
    ids = target.topk(count, dim=1).indices
    trained = labels_X != -100
    drafter = (hidden_XD @ weight_VD.T).softmax(1)
    expected = naive(name, coarse(drafter, ids)[trained], coarse(target, ids)[trained])
    expected = expected + 0.5 * literal("cross-entropy", hidden_XD @ weight_VD.T, target, labels_X)
    grads = torch.autograd.grad(expected, [hidden_XD, weight_VD])
    for taught, top_k in [
        (teacher, count),
        (kept_most_likely(teacher, count), None),
        (kept_most_likely(teacher, count), count),
        (kept_most_likely(teacher, 17), count),
    ]:
        weights = {name: 1.0, "cross-entropy": 0.5}
        loss, _ = mixture(weights, hidden_XD, weight_VD, labels_X, taught, chunk=5, top_k=top_k)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(loss, [hidden_XD, weight_VD]), grads, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in TAUGHT if name != "reverse-kl"])
def test_top_k_with_a_negligible_rest_equals_the_whole_distribution(name: str):
    """The probability of all other tokens is 0, about 1e-9, or slightly negative because of rounding."""
    torch.manual_seed(1)
    logits = torch.randn(6, 30, requires_grad=True)
    labels = torch.zeros(6, dtype=torch.int64)
    for tail in (-torch.inf, -20.0):
        teacher = torch.randn(6, 30)
        teacher[:, 8:] = tail
        dense, _ = mixture({name: 1.0}, logits, None, labels, DenseTeacher(teacher))
        (expected,) = torch.autograd.grad(dense, logits)
        log_probs, ids = teacher.log_softmax(1).topk(8, dim=1)
        for taught in (DenseTeacher(teacher), SparseTeacher(ids, log_probs), SparseTeacher(ids, log_probs + 1e-6)):
            loss, _ = mixture({name: 1.0}, logits, None, labels, taught, top_k=8)
            torch.testing.assert_close(loss, dense, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected, rtol=1e-4, atol=1e-5)


def test_frozen_inputs_get_no_gradient():
    (hidden_XD, weight_VD), _, labels_X = inputs(10, 4, 9)
    loss, _ = mixture(CROSS_ENTROPY, hidden_XD, weight_VD.detach(), labels_X)
    loss.backward()
    assert hidden_XD.grad is not None
    loss, _ = mixture(CROSS_ENTROPY, hidden_XD.detach(), weight_VD, labels_X)
    loss.backward()
    assert weight_VD.grad is not None
    with torch.no_grad():
        again, _ = mixture(CROSS_ENTROPY, hidden_XD, weight_VD, labels_X)
    assert not again.requires_grad
    torch.testing.assert_close(again, loss.detach())


def test_the_weight_may_be_freed_before_the_backward_pass():
    """DeepSpeed ZeRO-3 frees gathered parameters after the forward pass."""
    (hidden_XD, weight_VD), teacher, labels_X = inputs(30, 8, 19)
    weights = {"cross-entropy": 0.5, "lk-lambda": 1.0}
    expected = torch.autograd.grad(mixture(weights, hidden_XD, weight_VD, labels_X, teacher)[0], [hidden_XD, weight_VD])
    loss, _ = mixture(weights, hidden_XD, weight_VD, labels_X, teacher)
    saved, weight_VD.data = weight_VD.data, torch.empty(0)
    loss.sum().backward(inputs=[hidden_XD])
    weight_VD.data = saved
    assert torch.equal(hidden_XD.grad, expected[0])
    loss, _ = mixture(weights, hidden_XD, weight_VD, labels_X, teacher)
    weight_VD.data.fill_(torch.nan)
    grads = torch.autograd.grad(loss, [hidden_XD, weight_VD])
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))


class Watch(TorchDispatchMode):
    """Dispatch mode that records the largest number of elements of a result."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor):
                stored = value.untyped_storage().nbytes() // value.element_size()
                self.largest = max(self.largest, value.numel(), stored)
        return result


@pytest.mark.parametrize(
    ("name", "top_k"), [("cross-entropy", None), ("lk-lambda", None), ("forward-kl", 8), ("reverse-kl", 8)]
)
def test_logits_of_a_whole_batch_are_never_allocated(name: str, top_k: int | None):
    positions, hidden, vocab, chunk = 4096, 8, 8192, 64
    torch.manual_seed(0)
    hidden_XD, weight_VD = torch.randn(positions, hidden, requires_grad=True), torch.randn(vocab, hidden)
    teacher = DenseTeacher(torch.randn(positions, hidden), torch.randn(vocab, hidden))
    labels_X = torch.randint(vocab, (positions,))
    with Watch() as watch:
        mixture({name: 1.0}, hidden_XD, weight_VD, labels_X, teacher, chunk=chunk, top_k=top_k)[0].backward()
    assert vocab * hidden <= watch.largest <= vocab * chunk
    with Watch() as watch:
        mixture(CROSS_ENTROPY, hidden_XD, weight_VD, labels_X)[0].backward()
        label_hits(hidden_XD, weight_VD, labels_X)
        agreement(hidden_XD, weight_VD, teacher, labels_X)
    assert watch.largest <= positions * vocab // 4


def test_agreement_and_label_hits():
    (hidden_XD, weight_VD), teacher, labels_X = inputs(50, 6, 13)
    supervised = labels_X != -100
    logits, target = (hidden_XD @ weight_VD.T).detach()[supervised], logits_of(teacher)[supervised]
    labels = labels_X[supervised]
    both = [set(a) & set(b) for a, b in zip(*(x.topk(5).indices.tolist() for x in (logits, target)), strict=True)]
    result = agreement(hidden_XD, weight_VD, teacher, labels_X, chunk=7)
    assert int(result.count) == int(supervised.sum())
    assert int(result.top1) == int((logits.argmax(1) == target.argmax(1)).sum())
    assert float(result.top5) == pytest.approx(sum(len(shared) for shared in both) / 5)
    torch.testing.assert_close(result.overlap, torch.minimum(logits.softmax(1), target.softmax(1)).sum())
    rejected, _ = mixture({"total-variation": 1.0}, hidden_XD, weight_VD, labels_X, teacher)
    torch.testing.assert_close(result.overlap + rejected, torch.tensor(float(result.count)))  # Leviathan's lemma 3.3
    hits = label_hits(hidden_XD, weight_VD, labels_X, chunk=7)
    torch.testing.assert_close(hits.loss, F.cross_entropy(logits, labels, reduction="sum"))
    assert int(hits.top1) == int((logits.argmax(1) == labels).sum())
    assert int(hits.top5) == int((logits.topk(5).indices == labels[:, None]).sum())
    assert int(hits.count) == int(supervised.sum())


def test_ties_are_resolved_by_token_id():
    hits = label_hits(torch.zeros(4, 9), None, torch.tensor([0, 4, 5, -100]))
    assert [int(hits.top1), int(hits.top5), int(hits.count)] == [1, 2, 3]


def test_agreement_with_a_sparse_teacher():
    (hidden_XD, weight_VD), teacher, labels_X = inputs(50, 6, 13)
    exact = agreement(hidden_XD, weight_VD, teacher, labels_X)
    bounds = []
    for count in (3, 8, 13):
        result = agreement(hidden_XD, weight_VD, kept_most_likely(teacher, count), labels_X, chunk=7)
        bounds.append(float(result.overlap))
        assert int(result.top1) == int(exact.top1)
        if count >= 5:
            assert float(result.top5) == pytest.approx(float(exact.top5))
    assert bounds[0] >= bounds[1] >= bounds[2] == pytest.approx(float(exact.overlap), rel=1e-5)
    probs, target = (hidden_XD @ weight_VD.T).detach().softmax(1), logits_of(teacher).softmax(1)
    supervised, ids = labels_X != -100, target.topk(3, dim=1).indices
    expected = torch.minimum(coarse(probs, ids), coarse(target, ids))[supervised].sum()
    assert bounds[0] == pytest.approx(float(expected), rel=1e-5)


def test_head_k_is_trained_on_the_token_k_plus_2_ahead():
    tokens = [[10, 11, 12, 13, 14, 20, 21, 22]]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    labels = torch.tensor(tokens)
    labels[0, 3] = -100  # token 13 is not supervised
    labels[0, [0, 5]] = -100  # the first token of a document has no predecessor
    none = -100
    assert shifted_labels(labels, documents, 1).tolist() == [[11, 12, none, 14, none, 21, 22, none]]
    assert head_labels(labels, documents, 3).tolist() == [
        [
            [12, none, 14],
            [none, 14, none],
            [14, none, none],
            [none, none, none],
            [none, none, none],
            [22, none, none],
            [none, none, none],
            [none, none, none],
        ]
    ]


def scored(name: str, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    return DIVERGENCES[name](logits.log_softmax(1), teacher.log_softmax(1))


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.floats(0.1, 8.0), st.integers(0, 10**6))
def test_objectives_equal_autograd_of_the_formula(name: str, rows: int, vocab: int, scale: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    expected = LITERAL[name](teacher.softmax(1), logits.softmax(1))
    (grad,) = torch.autograd.grad(expected.sum(), logits)
    log_drafter, log_teacher = logits.detach().log_softmax(1), teacher.log_softmax(1)
    before = log_drafter.clone(), log_teacher.clone()
    loss, gradient = DIVERGENCES[name](log_drafter, log_teacher)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, grad, rtol=1e-7, atol=1e-10)
    assert torch.equal(log_drafter, before[0])  # inputs are unchanged
    assert torch.equal(log_teacher, before[1])
    narrow, narrow_grad = DIVERGENCES[name](log_drafter.float(), log_teacher.float())
    torch.testing.assert_close(narrow.double(), loss, rtol=1e-4, atol=1e-5)
    kinks = (log_drafter - log_teacher).abs() < 1e-4  # where float32 rounding may change the sign
    if not kinks.any():
        torch.testing.assert_close(narrow_grad.double(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_losses_of_extreme_logits_are_finite(name: str, scale: float):
    """Teachers are one-hot, top-k, or have the lowest finite logits. Some probabilities of the drafter underflow."""
    torch.manual_seed(3)
    logits = scale * torch.randn(5, 17)
    teacher = scale * torch.randn(5, 17)
    teacher[0, 1:] = -torch.inf
    teacher[1, 3:] = -torch.inf
    teacher[2, ::2] = torch.finfo(torch.float32).min
    teacher[3] = logits[3]
    loss, grad = scored(name, logits, teacher)
    assert torch.isfinite(loss).all(), (name, loss)
    assert torch.isfinite(grad).all(), (name, grad)
    assert (loss > -1e-5).all()
    assert grad.sum(1).abs().max() < 1e-3 * max(1.0, scale)  # the loss is invariant to a constant added to logits
    assert abs(float(loss[3])) < 1e-5
    assert grad[3].abs().max() < 1e-5


def test_values_for_extreme_logits():
    """The drafter gives the teacher's only token a probability of about e^−600, which underflows in float32."""
    logits = torch.tensor([[-600.0, 0.0, 0.0]])
    teacher = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    surprise = 600 + math.log(2)
    pull = torch.tensor([[-1.0, 0.5, 0.5]])
    for name, value, gradient in [
        ("forward-kl", surprise, pull),
        ("lk-alpha", surprise, pull),
        ("lk-lambda", surprise, pull),  # α = 0: λ = 1
        ("total-variation", 1.0, 0 * pull),
        ("jensen-shannon", math.log(2), 0 * pull),
        ("reverse-kl", -math.log(2) - LOG_FLOOR, 0 * pull),  # infinite without clamping
    ]:
        loss, grad = scored(name, logits, teacher)
        torch.testing.assert_close(loss, torch.tensor([value]), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad, gradient, rtol=1e-6, atol=1e-4)
    loss, grad = cross_entropy_chunk(logits, torch.tensor([0]))
    torch.testing.assert_close((loss, grad), (torch.tensor([surprise]), pull))


def test_ramps():
    ramps = parse_weights({"cross-entropy": 1, "forward-kl": [1.0, 0.0], "lk-lambda": [0, 2.0, 0.25]})
    expected = {"cross-entropy": Ramp(1.0, 1.0), "forward-kl": Ramp(1.0, 0.0, 1.0), "lk-lambda": Ramp(0.0, 2.0, 0.25)}
    assert ramps == expected
    assert weights_at(ramps, 0.0) == {"cross-entropy": 1.0, "forward-kl": 1.0}
    assert weights_at(ramps, 0.125) == {"cross-entropy": 1.0, "forward-kl": 0.875, "lk-lambda": 1.0}
    assert weights_at(ramps, 0.6) == {"cross-entropy": 1.0, "forward-kl": 0.4, "lk-lambda": 2.0}
    assert weights_at(ramps, 1.0) == {"cross-entropy": 1.0, "lk-lambda": 2.0}
    assert ramps["lk-lambda"].at(1.5) == 2.0

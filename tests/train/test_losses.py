"""The chunked objectives equal the plain formulas, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from draftsmith.train.losses import (
    OBJECTIVES,
    agreement,
    cross_entropy,
    forward_kl,
    head_labels,
    heads_cross_entropy,
    mixture,
    shifted_labels,
    top1_hits,
    total_variation,
)

SHAPES = [(1, 3, 2, None), (7, 5, 11, 3), (64, 16, 33, 64), (65, 8, 17, 64), (33, 1, 5, 1)]  # X, D, V, chunk


def naive(name: str, logits_XV: torch.Tensor, teacher_XV: torch.Tensor, labels_X: torch.Tensor, heat: float):
    kept = labels_X != -100
    logits, teacher, labels = logits_XV[kept].float(), teacher_XV[kept].float(), labels_X[kept]
    if name == "cross-entropy":
        return F.cross_entropy(logits, labels, reduction="sum")
    drafter, target = (logits / heat).softmax(-1), (teacher / heat).softmax(-1)
    if name == "forward-kl":
        return heat**2 * (target * (target.log() - drafter.log())).sum()
    assert name == "total-variation"
    return heat**2 * (1 - torch.minimum(drafter, target).sum(-1)).sum()


def inputs(positions: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32):
    torch.manual_seed(positions)
    drafter = (torch.randn(positions, hidden), torch.randn(vocab, hidden))
    teacher = (torch.randn(positions, hidden + 2), torch.randn(vocab, hidden + 2))
    labels = torch.randint(vocab, (positions,))
    labels[1::3] = -100
    leaves = [tensor.to(dtype).requires_grad_() for tensor in drafter]
    return leaves, [tensor.to(dtype) for tensor in teacher], labels


@pytest.mark.parametrize(("positions", "hidden", "vocab", "chunk"), SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("heat", [1.0, 1.7])
def test_equals_the_formula(name: str, heat: float, positions: int, hidden: int, vocab: int, chunk: int | None):
    (hidden_XD, weight_VD), (teacher_XE, teacher_VE), labels_X = inputs(positions, hidden, vocab)
    expected = naive(name, hidden_XD @ weight_VD.T, teacher_XE @ teacher_VE.T, labels_X, heat)
    expected_grads = torch.autograd.grad(expected * 0.5, [hidden_XD, weight_VD])
    loss, count = mixture({name: 1.0}, hidden_XD, weight_VD, labels_X, teacher_XE, teacher_VE, heat, chunk)
    (loss * 0.5).backward()
    assert int(count) == int((labels_X != -100).sum())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for leaf, grad in zip((hidden_XD, weight_VD), expected_grads, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bfloat16_stays_close_to_float32(name: str):
    (hidden_XD, weight_VD), (teacher_XE, teacher_VE), labels_X = inputs(65, 32, 50, torch.bfloat16)
    exact = [hidden_XD.detach().float().requires_grad_(), weight_VD.detach().float().requires_grad_()]
    expected = naive(name, exact[0] @ exact[1].T, teacher_XE.float() @ teacher_VE.float().T, labels_X, 1.0)
    expected.backward()
    loss, _ = mixture({name: 1.0}, hidden_XD, weight_VD, labels_X, teacher_XE, teacher_VE, chunk=16)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    for leaf, reference in zip((hidden_XD, weight_VD), exact, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        difference = (leaf.grad.float() - reference.grad).norm() / reference.grad.norm()
        assert difference < 3e-2


def test_under_autocast_the_weights_gradient_is_float32():
    (hidden_XD, weight_VD), _, labels_X = inputs(40, 16, 20)
    expected = torch.autograd.grad(cross_entropy(hidden_XD, weight_VD, labels_X)[0], [hidden_XD, weight_VD])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = cross_entropy(hidden_XD, weight_VD, labels_X, chunk=16)
    loss.backward()
    for leaf, grad in zip((hidden_XD, weight_VD), expected, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert 0 < (leaf.grad - grad).norm() / grad.norm() < 2e-2


def test_a_mixture_is_the_weighted_sum_and_logits_may_be_given():
    (hidden_XD, weight_VD), (teacher_XE, teacher_VE), labels_X = inputs(31, 6, 13)
    weights = {"cross-entropy": 0.3, "forward-kl": 0.7, "total-variation": 2.0}
    logits_XV = (hidden_XD @ weight_VD.T).detach().requires_grad_()
    teacher_XV = teacher_XE @ teacher_VE.T
    expected = sum(w * naive(name, logits_XV, teacher_XV, labels_X, 1.3) for name, w in weights.items())
    (expected_grad,) = torch.autograd.grad(expected, logits_XV)
    loss, _ = mixture(weights, logits_XV, None, labels_X, teacher_XV, None, 1.3, chunk=7)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits_XV.grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_frozen_sides_get_no_gradient_and_no_grad_needs_none():
    (hidden_XD, weight_VD), _, labels_X = inputs(10, 4, 9)
    loss, _ = cross_entropy(hidden_XD, weight_VD.detach(), labels_X)
    loss.backward()
    assert hidden_XD.grad is not None
    loss, _ = cross_entropy(hidden_XD.detach(), weight_VD, labels_X)
    loss.backward()
    assert weight_VD.grad is not None
    with torch.no_grad():
        again, _ = cross_entropy(hidden_XD, weight_VD, labels_X)
    assert not again.requires_grad
    torch.testing.assert_close(again, loss.detach())


@pytest.mark.parametrize("loss", [forward_kl, total_variation])
def test_a_drafter_equal_to_its_teacher_has_nothing_to_learn(loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]):
    (hidden_XD, weight_VD), _, labels_X = inputs(20, 4, 9)
    value, _ = loss(hidden_XD, weight_VD, hidden_XD, weight_VD, labels_X)
    value.backward()
    assert abs(float(value.detach())) < 1e-5
    assert hidden_XD.grad.abs().max() < 1e-5


def test_a_teacher_that_rules_tokens_out():
    logits = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, float("-inf"), 0.0]])
    loss, _ = forward_kl(logits, None, teacher, None, torch.tensor([0]))
    loss.backward()
    drafter = logits.detach().log_softmax(1)
    expected = 0.5 * (torch.tensor(0.5).log() - drafter[0, 0]) + 0.5 * (torch.tensor(0.5).log() - drafter[0, 2])
    torch.testing.assert_close(loss.detach(), expected)
    assert torch.isfinite(logits.grad).all()


def test_nothing_to_train_on_is_zero_with_zero_gradients():
    (hidden_XD, weight_VD), _, labels_X = inputs(5, 4, 9)
    loss, count = cross_entropy(hidden_XD, weight_VD, torch.full_like(labels_X, -100))
    loss.backward()
    assert int(count) == 0
    assert float(loss.detach()) == 0.0
    assert float(weight_VD.grad.abs().sum()) == 0.0


def test_wrong_objectives_are_refused():
    (hidden_XD, weight_VD), (teacher_XE, teacher_VE), labels_X = inputs(5, 4, 9)
    with pytest.raises(ValueError, match="did you mean 'forward-kl'"):
        mixture({"foward-kl": 1.0}, hidden_XD, weight_VD, labels_X)
    with pytest.raises(ValueError, match="needs a teacher"):
        mixture({"forward-kl": 1.0}, hidden_XD, weight_VD, labels_X)
    with pytest.raises(ValueError, match="weight 0"):
        mixture({"cross-entropy": 0.0}, hidden_XD, weight_VD, labels_X)
    with pytest.raises(ValueError, match=r"9 tokens.*8"):
        forward_kl(hidden_XD, weight_VD, teacher_XE, teacher_VE[:8], labels_X)


def test_agreement_and_top1():
    (hidden_XD, weight_VD), (teacher_XE, teacher_VE), labels_X = inputs(50, 6, 13)
    kept = labels_X != -100
    logits, teacher = (hidden_XD @ weight_VD.T)[kept], (teacher_XE @ teacher_VE.T)[kept]
    overlap, same, count = agreement(hidden_XD, weight_VD, teacher_XE, teacher_VE, labels_X, chunk=7)
    assert int(count) == int(kept.sum())
    assert int(same) == int((logits.argmax(1) == teacher.argmax(1)).sum())
    torch.testing.assert_close(overlap, torch.minimum(logits.softmax(1), teacher.softmax(1)).sum().detach())
    rejected, _ = total_variation(hidden_XD, weight_VD, teacher_XE, teacher_VE, labels_X)
    torch.testing.assert_close(overlap + rejected, torch.tensor(float(count)))  # Leviathan's lemma 3.3
    hits, _ = top1_hits(hidden_XD, weight_VD, labels_X, chunk=7)
    assert int(hits) == int((logits.argmax(1) == labels_X[kept]).sum())


def test_head_k_is_trained_on_the_token_k_plus_2_ahead():
    tokens = [[10, 11, 12, 13, 14, 20, 21, 22]]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    labels = torch.tensor(tokens)
    labels[0, 3] = -100  # token 13 is not trained on
    labels[0, [0, 5]] = -100  # nothing predicts the first token of a document
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


def test_heads_loss_equals_the_formula():
    torch.manual_seed(0)
    positions, heads, hidden, vocab = 19, 3, 6, 11
    features = torch.randn(positions, heads, hidden, requires_grad=True)
    projections = [torch.randn(vocab, hidden, requires_grad=True) for _ in range(heads)]
    labels = torch.randint(vocab, (positions, heads))
    labels[::2, 1] = -100
    expected = torch.stack(
        [
            F.cross_entropy(features[:, k] @ projections[k].T, labels[:, k], reduction="sum", ignore_index=-100)
            for k in range(heads)
        ]
    )
    leaves = [features, *projections]
    scale = torch.tensor([1.0, 0.8, 0.64])
    expected_grads = torch.autograd.grad((expected * scale).sum(), leaves)
    sums, counts = heads_cross_entropy(features, projections, labels, chunk=5)
    grads = torch.autograd.grad((sums * scale).sum(), leaves)
    assert counts.tolist() == [19, 9, 19]
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-4)
    for found, grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)

"""Every objective equals autograd of its literal formula, also at the extremes; weights are parsed and run as said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from draftsmith.train.losses.objectives import (
    DIVERGENCES,
    LK_DECAY,
    LOG_FLOOR,
    Ramp,
    cross_entropy_chunk,
    parse_weights,
    weights_at,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


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


def scored(name: str, logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    return DIVERGENCES[name](logits.log_softmax(1), teacher.log_softmax(1))


def test_every_objective_has_a_literal_formula():
    assert set(LITERAL) == set(DIVERGENCES)


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
    loss, found = DIVERGENCES[name](log_drafter, log_teacher)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, grad, rtol=1e-7, atol=1e-10)
    assert torch.equal(log_drafter, before[0])  # pure
    assert torch.equal(log_teacher, before[1])
    narrow, narrow_grad = DIVERGENCES[name](log_drafter.float(), log_teacher.float())
    torch.testing.assert_close(narrow.double(), loss, rtol=1e-4, atol=1e-5)
    kinks = (log_drafter - log_teacher).abs() < 1e-4  # where float32 may see the other side of a minimum
    if not kinks.any():
        torch.testing.assert_close(narrow_grad.double(), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_extremes_stay_finite(name: str, scale: float):
    """One-hot and top-k teachers, teachers with the lowest finite float, drafters that underflow."""
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
    assert grad.sum(1).abs().max() < 1e-3 * max(1.0, scale)  # adding a constant to the logits changes nothing
    assert abs(float(loss[3])) < 1e-5
    assert grad[3].abs().max() < 1e-5


def test_true_values_at_the_extremes():
    """A drafter that gives the one possible token e^−600: below float32, and below float64's range for its square."""
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
        ("reverse-kl", -math.log(2) - LOG_FLOOR, 0 * pull),  # infinite, and clamped
    ]:
        loss, grad = scored(name, logits, teacher)
        torch.testing.assert_close(loss, torch.tensor([value]), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad, gradient, rtol=1e-6, atol=1e-4)
    loss, grad = cross_entropy_chunk(logits, torch.tensor([0]))
    torch.testing.assert_close((loss, grad), (torch.tensor([surprise]), pull))


def test_one_possible_token_makes_lk_alpha_and_forward_kl_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 11), torch.randint(11, (6,))
    teacher = torch.full((6, 11), -torch.inf).scatter(1, labels[:, None], 0.0)
    expected = cross_entropy_chunk(logits, labels)
    for name in ("forward-kl", "lk-alpha"):
        torch.testing.assert_close(scored(name, logits, teacher), expected)


def test_ramps():
    ramps = parse_weights({"cross-entropy": 1, "forward-kl": [1.0, 0.0], "lk-lambda": [0, 2.0, 0.25]})
    wanted = {"cross-entropy": Ramp(1.0, 1.0), "forward-kl": Ramp(1.0, 0.0, 1.0), "lk-lambda": Ramp(0.0, 2.0, 0.25)}
    assert ramps == wanted
    assert weights_at(ramps, 0.0) == {"cross-entropy": 1.0, "forward-kl": 1.0}
    assert weights_at(ramps, 0.125) == {"cross-entropy": 1.0, "forward-kl": 0.875, "lk-lambda": 1.0}
    assert weights_at(ramps, 0.6) == {"cross-entropy": 1.0, "forward-kl": 0.4, "lk-lambda": 2.0}
    assert weights_at(ramps, 1.0) == {"cross-entropy": 1.0, "lk-lambda": 2.0}
    assert ramps["lk-lambda"].at(1.5) == 2.0

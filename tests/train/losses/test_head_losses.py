"""The loss of K heads equals that of K separate drafters and needs bounded memory."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from draftsmith.train.losses.chunks import BLOCK_ELEMENTS, DenseTeacher
from draftsmith.train.losses.drafter import heads_mixture, mixture
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# X, K, D, V, chunk
SHAPES = [(1, 1, 2, 3, None), (19, 3, 6, 11, 5), (40, 5, 3, 17, 1), (33, 2, 7, 50, 64)]
WEIGHTS = [
    {"cross-entropy": 1.0},
    {"forward-kl": 1.0},
    {"cross-entropy": 0.3, "lk-lambda": 0.7},
    {"total-variation": 0.5, "reverse-kl": 2.0},
    {"jensen-shannon": 1.0, "lk-alpha": 0.5},
]


class Case:
    """Random heads at X positions of a block; the teacher of head k is the target state at t + 1 + k."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        positions, heads, hidden, vocab = shape[:4]
        torch.manual_seed(positions)
        self.features = torch.randn(positions, heads, hidden).to(dtype).requires_grad_()
        self.projections = [torch.randn(vocab, hidden).to(dtype).requires_grad_(not frozen) for _ in range(heads)]
        self.labels = torch.randint(vocab, (positions, heads))
        self.labels[1::3, 0] = -100
        self.labels[::5] = -100
        if heads > 1:
            self.labels[:, 1] = -100  # a head without labels
        target = torch.randn(positions + heads + 3, hidden + 2), torch.randn(vocab, hidden + 2)
        self.teacher = DenseTeacher(*(tensor.to(dtype) for tensor in target))
        self.rows = torch.arange(positions)[:, None] + torch.arange(1, heads + 1)
        self.rows[self.labels == -100] = -1
        self.scale = 0.8 ** torch.arange(heads)

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.features, *self.projections) if tensor.requires_grad]

    def separate_sums(self, weights: dict[str, float], heat: float = 1.0) -> Tensor:
        """Compute the loss sum of each head in float64 with the loss function for drafters."""
        target = self.teacher.hidden_XE.double() @ self.teacher.weight_VE.double().T
        sums = []
        for k, weight in enumerate(self.projections):
            teacher = DenseTeacher(target[self.rows[:, k].clamp(min=0)])
            features, labels = self.features[:, k].double(), self.labels[:, k]
            sums.append(mixture(weights, features, weight.double(), labels, teacher, heat)[0])
        return torch.stack(sums)

    def fused_sums(self, weights: dict[str, float], chunk: int | None, heat: float = 1.0, **more: Any) -> Any:
        return heads_mixture(
            weights, self.features, self.projections, self.labels, self.teacher, self.rows, heat, chunk, **more
        )


def close(fused_sums: Iterable[Tensor], expected: Iterable[Tensor], rtol: float, atol: float) -> None:
    for fused, separate in zip(fused_sums, expected, strict=True):
        torch.testing.assert_close(fused, separate.to(fused.dtype), rtol=rtol, atol=atol)


def distance(fused_sums: Tensor, expected: Tensor) -> float:
    return float((fused_sums.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: "+".join(weights))
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=str)
@pytest.mark.parametrize("heat", [1.0, 1.7])
def test_each_head_equals_a_drafter(
    shape: Any, weights: dict[str, float], dtype: torch.dtype, rtol: float, heat: float
):
    case = Case(shape, dtype)
    expected = case.separate_sums(weights, heat)
    grads = torch.autograd.grad((expected * case.scale).sum(), case.leaves, materialize_grads=True)
    sums, counts = case.fused_sums(weights, shape[4], heat)
    assert sums.dtype == dtype
    assert counts.tolist() == (case.labels != -100).sum(0).tolist()
    close(sums, expected, rtol / 10, rtol)
    close(torch.autograd.grad((sums * case.scale).sum(), case.leaves), grads, rtol, rtol / 2)


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: "+".join(weights))
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_losses_in_bfloat16_are_close(weights: dict[str, float], autocast: bool):
    """Parameters and gradients are bfloat16, or float32 with autocast."""
    case = Case((65, 3, 32, 50), torch.float32 if autocast else torch.bfloat16)
    grads = torch.autograd.grad(case.separate_sums(weights).sum(), case.leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        sums, _ = case.fused_sums(weights, 16)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, case.separate_sums(weights).float(), rtol=2e-2, atol=1e-2)
    for leaf, actual, expected in zip(case.leaves, torch.autograd.grad(sums.sum(), case.leaves), grads, strict=True):
        assert actual.dtype == leaf.dtype
        assert distance(actual, expected) < 3e-2


@pytest.mark.parametrize("taught", [False, True])
def test_no_positions_and_no_labels_are_zero_with_zero_gradients(taught: bool):
    for case in (Case((0, 2, 4, 9)), Case((6, 2, 4, 9))):
        case.labels.fill_(-100)
        sums, counts = case.fused_sums({"forward-kl" if taught else "cross-entropy": 1.0}, None)
        assert counts.tolist() == [0, 0]
        assert sums.tolist() == [0, 0]
        for leaf, grad in zip(case.leaves, torch.autograd.grad(sums.sum(), case.leaves), strict=True):
            assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("weights", WEIGHTS[:2], ids=lambda weights: "+".join(weights))
def test_all_heads_may_share_a_projection(weights: dict[str, float]):
    """A trained shared projection gets the weighted sum of the gradients of all heads; a frozen one gets none."""
    for frozen in (False, True):
        case = Case((33, 3, 6, 17), frozen=frozen)
        case.projections = case.projections[:1] * 3
        leaves = [case.features] if frozen else [case.features, case.projections[0]]
        expected = torch.autograd.grad((case.separate_sums(weights) * case.scale).sum(), leaves)
        sums, _ = case.fused_sums(weights, 8)
        close(torch.autograd.grad((sums * case.scale).sum(), leaves), expected, 1e-4, 5e-5)


def test_heads_may_use_any_teacher_rows():
    case = Case((50, 3, 6, 11))
    case.rows = torch.randint(9, case.rows.shape)
    case.rows[:, 2] = 4
    weights = {"forward-kl": 1.0, "cross-entropy": 0.5}
    expected = case.separate_sums(weights)
    grads = torch.autograd.grad(expected.sum(), case.leaves)
    sums, _ = case.fused_sums(weights, 4)
    close(sums, expected, 1e-5, 1e-4)
    close(torch.autograd.grad(sums.sum(), case.leaves), grads, 1e-4, 5e-5)


class Watch(TorchDispatchMode):
    """Dispatch mode that counts the FLOPs of matrix products and the bytes of all live tensors."""

    products = held = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm_"):
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self.products += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        inputs = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor) and (storage := value.untyped_storage())._cdata not in inputs | self._known:
                self._known.add(storage._cdata)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def test_the_loss_stores_one_chunk_of_logits_for_all_heads():
    positions, heads, hidden, vocab, chunk = 512, 4, 8, 4096, 64
    case = Case((positions, heads, hidden, vocab))
    case.labels = torch.randint(vocab, (positions, heads))
    case.rows = torch.arange(positions)[:, None] + torch.arange(1, heads + 1)
    gradients = 4 * (positions * heads * hidden + heads * vocab * hidden)
    for weights, chunks in (({"cross-entropy": 1.0}, 1), ({"forward-kl": 1.0}, 2)):
        with Watch() as watch:
            case.fused_sums(weights, chunk)[0].sum().backward()
        blocks = 5 * 4 * BLOCK_ELEMENTS  # temporary tensors of elementwise operations
        assert 4 * chunk * vocab < watch.peak <= gradients + chunks * 4 * chunk * vocab + blocks + (1 << 20)
        assert watch.peak < 4 * positions * heads * vocab / 3


@pytest.mark.parametrize(("frozen", "each"), [(False, 3), (True, 2)])
def test_teacher_logits_are_computed_once_for_all_heads(frozen: bool, each: int):
    positions, heads, hidden, vocab = 96, 4, 8, 32
    case = Case((positions, heads, hidden, vocab), frozen=frozen)
    case.labels = torch.randint(vocab, (positions, heads))
    case.rows = torch.arange(positions)[:, None] + torch.arange(1, heads + 1)
    with Watch() as watch:
        case.fused_sums({"forward-kl": 1.0}, 16)[0].sum().backward()
    teacher_products = 2 * (positions + heads - 1) * (hidden + 2) * vocab
    assert watch.products == each * 2 * positions * heads * hidden * vocab + teacher_products

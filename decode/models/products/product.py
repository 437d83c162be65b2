"""Products with a model's weights, by the fastest path for the number of rows, and weights of eight bits.

On a CPU products of few rows are computed by a small C function: the library's products cost more with each row,
although reading the weights is most of the work.

Shape letters: X rows, I and O inputs and outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .native import compiled, in_use

FEW_ROWS = 64
SMALLEST_PACKED = 1 << 18  # elements: below, a call costs more than it saves
_LARGEST_COPY = 1 << 25
_MAX_STACK_NUMBERS = 1 << 18  # inputs of all rows, which the C function keeps on the stack
_WIDTH = 16
WIDE, _NARROW, PAIRS, _BYTES, FOURS = range(5)  # as the C function numbers them
_TOGETHER = (1, 1, 2, 4, 4)  # inputs that lie together, of each kind
_MAX_INT8 = 127


def round_to_int8(model: nn.Module) -> None:
    """Round a model's matrices in place to what eight bits hold of each row, and mark the model."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = rounded(parameter.detach())
    model.is_int8 = True  # type: ignore[assignment]


def rounded(weight_OI: Tensor) -> Tensor:
    """What int8 holds of a matrix, in its own type."""
    integers_OI, scale_O = integers_of(weight_OI)
    return (integers_OI * scale_O[..., None]).to(weight_OI.dtype)


def is_int8(model: nn.Module) -> bool:
    """Whether its weights were rounded by `round_to_int8`."""
    return bool(getattr(model, "is_int8", False))


def integers_of(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers from -127 to 127, int8, and what a row's are multiplied by, float32 [O]; of rounded weights
    in float32 these are what they were rounded to."""
    scale_O = (weight_OI.float().abs().amax(-1) / _MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight_OI.float() / scale_O[..., None]).round().clamp(-_MAX_INT8, _MAX_INT8).to(torch.int8), scale_O


class FewRows:
    """x Wᵀ for 1 to `most_rows` rows of float32, with weights of float32 or bfloat16, or of float32 that int8 holds; a
    copy of W [O, I] is kept. See `fits`.

    `kind`: how it lies, and what it multiplies. With `PAIRS`, bfloat16 where the processor multiplies pairs of them, x
    is rounded to bfloat16; with `FOURS`, int8 where it adds up four products, to integers of 16 bits, a scale a row."""

    def __init__(self, weight_OI: Tensor, int8: bool = False) -> None:
        outputs, self._inputs = weight_OI.shape
        self._outputs, half, even = outputs, weight_OI.dtype == torch.bfloat16, self._inputs % _WIDTH == 0
        self.kind, scale_O = _NARROW if half else WIDE, None
        if half and even and compiled().multiplies_pairs():
            self.kind = PAIRS
        if int8 and self._inputs % _TOGETHER[_BYTES] == 0:
            self.kind = FOURS if even and compiled().multiplies_fours() else _BYTES
            weight_OI, scale_O = integers_of(weight_OI)
        if self.kind == FOURS:
            weight_OI = weight_OI ^ -128  # 128 more, without a sign
        panels = outputs // _WIDTH
        self._weight = weight_OI.view(panels, _WIDTH, -1, _TOGETHER[self.kind]).transpose(1, 2).contiguous()
        if scale_O is not None:
            scales = scale_O.view(torch.int8).view(panels, -1)
            self._weight = torch.cat((scales, self._weight.flatten(1)), 1)
        self.most_rows = min(FEW_ROWS, _MAX_STACK_NUMBERS // self._inputs)
        self._call = compiled().few_rows

    @property
    def pointer(self) -> int:
        """Where the weights lie, as C takes them."""
        return self._weight.data_ptr()

    def takes(self, rows: int) -> bool:
        """Whether it is for so many rows, now."""
        return in_use() and 0 < rows <= self.most_rows

    def __call__(self, x_XI: Tensor, add: Tensor | None = None) -> Tensor:
        """x Wᵀ, [X, O], float32; plus `add`, [X, O] or [O]."""
        rows = len(x_XI)
        x_XI = x_XI.contiguous()
        add = None if add is None else add.contiguous()
        assert x_XI.dtype == torch.float32
        assert 1 <= rows <= self.most_rows
        assert x_XI.shape[1] == self._inputs
        assert add is None or (add.shape[-1] == self._outputs and add.dtype == torch.float32)
        assert add is None or add.dim() == 1 or len(add) == rows
        out_XO = x_XI.new_empty(rows, self._outputs)
        added = None if add is None else add.data_ptr()
        apart = 0 if add is None or add.dim() == 1 else self._outputs
        sizes = (self._inputs, self._outputs, rows, self.kind, torch.get_num_threads())
        self._call(self.pointer, x_XI.data_ptr(), added, apart, out_XO.data_ptr(), *sizes, None, -1.0, False)
        return out_XO


def fits(weight_OI: Tensor) -> bool:
    """Whether there is such a product for these weights here."""
    right = weight_OI.device.type == "cpu" and weight_OI.dtype in (torch.float32, torch.bfloat16)
    return right and len(weight_OI) % _WIDTH == 0 and compiled() is not None


class Product:
    """x Wᵀ + b, by the fastest of the library's paths for the number of rows.

    On CPUs up to 64 rows cost least by a function of ours (`few_rows`), which keeps a copy of the weights. Where it is
    not to be had, they cost half with weights in oneDNN's own layout, which lie beside the others, in bfloat16 also one
    row; in float32 one row is fastest against a transposed copy where there are more outputs than inputs (kept up to
    `_LARGEST_COPY` elements). Results differ by rounding alone.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, int8: bool = False) -> None:
        self.weight_OI, self.int8 = weight_OI, int8
        self.bias_O = None if bias_O is None else bias_O.to(weight_OI.dtype)
        outputs, inputs = weight_OI.shape
        on_cpu, half = weight_OI.device.type == "cpu", weight_OI.dtype == torch.bfloat16
        large = weight_OI.numel() >= SMALLEST_PACKED
        self.few_rows = FewRows(weight_OI, int8) if large and fits(weight_OI) else None
        self.added_O = None if bias_O is None else bias_O.float().contiguous()
        packs = on_cpu and large and self.few_rows is None and _packs(weight_OI.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI) if packs else None
        self.packed_rows = range(1 if half else 2, FEW_ROWS + 1) if packs else range(0)
        copied = on_cpu and outputs > 2 * inputs and weight_OI.numel() <= _LARGEST_COPY and not (packs and half)
        copied = copied and self.few_rows is None
        self.weight_IO = weight_OI.t().contiguous() if copied else None

    def __call__(self, x_XI: Tensor) -> Tensor:
        """x Wᵀ + b, [X, O]."""
        rows = len(x_XI)
        if self.few_rows is not None and self.few_rows.takes(rows):
            return self.few_rows(x_XI.float(), self.added_O).to(x_XI.dtype)
        if x_XI.dtype != self.weight_OI.dtype:
            return self(x_XI.to(self.weight_OI.dtype)).to(x_XI.dtype)
        if rows in self.packed_rows:
            product_XO: Tensor = torch.ops.mkldnn._linear_pointwise(x_XI, self.packed, self.bias_O, "none", [], "")
            return product_XO
        if rows == 1 and self.weight_IO is not None and self.bias_O is None:
            return torch.mm(x_XI, self.weight_IO)
        return F.linear(x_XI, self.weight_OI, self.bias_O)

    def add_to(self, sum_XO: Tensor, x_XI: Tensor) -> Tensor:
        """sum + x Wᵀ + b; on a GPU without a bias where the sum lies, which saves a copy."""
        if self.few_rows is not None and self.few_rows.takes(len(x_XI)):
            added_XO = sum_XO.float() if self.added_O is None else sum_XO.float() + self.added_O
            return self.few_rows(x_XI.float(), added_XO).to(sum_XO.dtype)
        apart = len(x_XI) in self.packed_rows or x_XI.dtype != self.weight_OI.dtype
        if apart or self.bias_O is not None:
            return sum_XO + self(x_XI)
        if sum_XO.is_cuda:
            return sum_XO.addmm_(x_XI, self.weight_OI.t())
        return torch.addmm(sum_XO, x_XI, self.weight_OI.t())


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of this type here."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())

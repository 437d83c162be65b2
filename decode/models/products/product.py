"""Products with a model's weights, by the fastest path for the number of rows.

Shape letters: X rows, I and O inputs and outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .few_rows import FEW_ROWS, FewRows, fits

_LARGEST_COPY = 1 << 25
SMALLEST_PACKED = 1 << 18  # elements: below, a call costs more than is won


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

"""Products of few rows on a CPU, by a small C function.

The library's products cost more with each row, although reading the weights is most of the work of one row as of ten.

Letters: X rows, I and O inputs and outputs, P panels of W = 16 outputs, T inputs that lie together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .int8 import integers_of
from .native import compiled, in_use

FEW_ROWS = 64
_MOST_NUMBERS = 1 << 18  # of all rows' inputs, which lie on the stack
_WIDTH = 16
WIDE, _NARROW, PAIRS, _BYTES, FOURS = range(5)  # as the C function calls them
_TOGETHER = (1, 1, 2, 4, 4)  # inputs, of each kind


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
        self.most_rows = min(FEW_ROWS, _MOST_NUMBERS // self._inputs)
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

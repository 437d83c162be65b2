"""Products of few rows on a CPU, by a small C function.

The library's products cost more with each row, although reading the weights is most of the work of one row as of ten.

Letters: X rows, I and O inputs and outputs, P panels of 16 outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import compiled, in_use

MOST_ROWS = 32
_WIDTH = 16


class FewRows:
    """x Wᵀ for 1 to `MOST_ROWS` rows of float32, with weights of float32 or bfloat16; a copy of W [O, I] is kept. See
    `fits`."""

    def __init__(self, weight_OI: Tensor) -> None:
        outputs, self._inputs = weight_OI.shape
        self._outputs, self._narrow = outputs, weight_OI.dtype == torch.bfloat16
        self._weight_PIW = weight_OI.view(-1, _WIDTH, self._inputs).transpose(1, 2).contiguous()
        self._call = compiled().few_rows

    def takes(self, rows: int) -> bool:
        """Whether it is for so many rows, now."""
        return in_use() and 0 < rows <= MOST_ROWS

    def prepares(self, rows: int) -> bool:
        """Whether so many rows may be normed or gated by it, now."""
        return self.takes(rows) and self._inputs % _WIDTH == 0

    def __call__(
        self,
        x_XI: Tensor,
        add_XO: Tensor | None = None,
        *,
        norm_I: Tensor | None = None,
        offset: float = -1.0,
        gated: bool = False,
    ) -> Tensor:
        """x Wᵀ, [X, O], float32; plus `add_XO`. With an `offset` rows are divided by √(x² + offset²) before, and
        multiplied by `norm_I`; `gated` ones are SiLU(first half) · second half of what is given, [X, 2 · I]."""
        rows = len(x_XI)
        x_XI = x_XI.contiguous()
        add = None if add_XO is None else add_XO.contiguous()
        assert x_XI.dtype == torch.float32
        assert 1 <= rows <= MOST_ROWS
        assert x_XI.shape[1] == self._inputs * (1 + gated)
        assert norm_I is None or (norm_I.dtype == torch.float32 and norm_I.is_contiguous())
        assert add is None or (add.shape == (rows, self._outputs) and add.dtype == torch.float32)
        out_XO = x_XI.new_empty(rows, self._outputs)
        pointers = (self._weight_PIW.data_ptr(), x_XI.data_ptr(), None if add is None else add.data_ptr())
        sizes = (self._inputs, self._outputs, rows, self._narrow, torch.get_num_threads())
        norm = None if norm_I is None else norm_I.data_ptr()
        self._call(*pointers, out_XO.data_ptr(), *sizes, norm, offset, gated)
        return out_XO


def fits(weight_OI: Tensor) -> bool:
    """Whether there is such a product for these weights here."""
    right = weight_OI.device.type == "cpu" and weight_OI.dtype in (torch.float32, torch.bfloat16)
    return right and len(weight_OI) % _WIDTH == 0 and compiled() is not None

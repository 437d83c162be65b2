"""Matrix products with few rows (skinny GEMM) in C for CPUs, and int8 weights.

PyTorch's products become slower with each additional row, although reading the weights should dominate the latency.

Shape letters: X rows, I inputs, O outputs.
"""

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .native import compiled, in_use

FEW_ROWS = 64
SMALLEST_PACKED = 1 << 18  # minimum number of elements of a matrix for which the C function is used
AT_ONCE = 60  # rows per call for longer inputs, a multiple of the group sizes in few_rows.c
_MOST_PAIRS = 256
_UNPACKED_AT_ONCE = 1 << 24  # elements
_MAX_STACK_NUMBERS = 1 << 18  # elements of the input, which the C function stores on the stack
_WIDTH = 16
WIDE, _NARROW, PAIRS, _BYTES, FOURS = range(5)  # as numbered in vectors.h
_MAX_INT8 = 127
_AT_ONCE = 1 << 18  # elements quantised at a time, which fit into the CPU cache


def round_to_int8(model: nn.Module) -> None:
    """Quantise a model's matrices in place to int8 with one scale per row, and set `model.is_int8`."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = rounded(parameter.detach())
    model.is_int8 = True  # type: ignore[assignment]


def rounded(weight_OI: Tensor) -> Tensor:
    """Quantise a matrix to int8, and return the dequantised values in the matrix's dtype."""
    parts = weight_OI.split(max(1, _AT_ONCE // max(1, weight_OI[:1].numel())))
    result_OI, row = torch.empty_like(weight_OI), 0
    for integers_OI, scale_O in map(integers_of, parts):
        result_OI[row : row + len(scale_O)] = integers_OI * scale_O[..., None]
        row += len(scale_O)
    return result_OI


def is_int8(model: nn.Module) -> bool:
    """Return whether a model's weights were quantised by `round_to_int8`."""
    return bool(getattr(model, "is_int8", False))


def integers_of(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to int8. Return the integers (-127 to 127) and the scale of each row, float32 [O].

    Quantising dequantised float32 weights returns the same integers again.
    """
    scale_O = (weight_OI.float().abs().amax(-1) / _MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight_OI.float() / scale_O[..., None]).round().clamp(-_MAX_INT8, _MAX_INT8).to(torch.int8), scale_O


class FewRows:
    """Matrix product x Wᵀ for few float32 rows x. W [O, I] is stored as float32, bfloat16 or int8.

    `kind` is the memory layout and arithmetic. `PAIRS` rounds x to bfloat16, for processors with bfloat16 dot products.
    `FOURS` rounds x to 16-bit integers with a scale per row, for processors with int8 dot products.
    """

    device = torch.device("cpu")

    def __init__(self, weight_OI: Tensor, int8: bool = False) -> None:
        self._outputs, self._inputs = self.shape = weight_OI.shape
        self._missing = -self._outputs % _WIDTH  # padding rows of zeros, whose outputs are dropped
        half, even = weight_OI.dtype == torch.bfloat16, self._inputs % _WIDTH == 0
        self.kind, size = (_NARROW, 2) if half else (WIDE, 4)
        if half and even and compiled().multiplies_pairs():
            self.kind = PAIRS
        if int8 and self._inputs % 4 == 0:
            self.kind, size = FOURS if even and compiled().multiplies_fours() else _BYTES, 1
        self.dtype = torch.float32 if size == 1 else weight_OI.dtype
        panels, scales = -(-self._outputs // _WIDTH), 4 * (size == 1)
        self._weight = torch.empty(panels, _WIDTH * (size * self._inputs + scales), dtype=torch.uint8)
        weight_OI = weight_OI.contiguous()
        to = self.pointer, self._inputs, self._outputs, self.kind, torch.get_num_threads()
        compiled().pack(weight_OI.data_ptr(), half, *to)
        self.at_once = min(FEW_ROWS, _MAX_STACK_NUMBERS // self._inputs)
        # With AMX, PyTorch is faster for many bfloat16 rows.
        self.most_rows = _MOST_PAIRS if size == 2 and torch.cpu._is_amx_tile_supported() else sys.maxsize

    def rows(self, places_X: Tensor | None = None) -> Tensor:
        """Return the rows `places_X` of W (default: all rows), [X, I]. Int8 weights are dequantised to float32."""
        places_X = torch.arange(self._outputs) if places_X is None else places_X.contiguous()
        rows_XI = torch.empty(len(places_X), self._inputs, dtype=self.dtype)
        to = rows_XI.data_ptr(), self._inputs, self.kind, torch.get_num_threads()
        compiled().unpack(self.pointer, places_X.data_ptr(), len(places_X), *to)
        return rows_XI

    def part(self, start: int, stop: int) -> "FewRows":
        """Return the product for outputs start to stop - 1, which shares memory. Both limits are multiples of 16."""
        part = copy.copy(self)
        part._weight, part._outputs, part._missing = self._weight[start // _WIDTH : stop // _WIDTH], stop - start, 0
        part.shape = torch.Size((stop - start, self._inputs))
        return part

    def by_library(self, x_XI: Tensor, bias_O: Tensor | None = None, places_O: Tensor | None = None) -> Tensor:
        """Compute the outputs `places_O` (default: all) of the product with PyTorch, in the dtype of W."""
        places_O = torch.arange(self._outputs) if places_O is None else places_O
        parts = places_O.split(max(1, _UNPACKED_AT_ONCE // self._inputs))
        biases = [None] * len(parts) if bias_O is None else bias_O.to(self.dtype).split(len(parts[0]))
        x_XI = x_XI.to(self.dtype)
        outputs = [F.linear(x_XI, self.rows(part), bias) for part, bias in zip(parts, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    pointer = property(lambda self: self._weight.data_ptr(), doc="Address of the weights.")

    def takes(self, rows: int) -> bool:
        """Return whether the C function is enabled and supports this number of rows."""
        return in_use() and 0 < rows <= self.most_rows

    def __call__(self, x_XI: Tensor, add: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + `add`, float32 [X, O]. `add` is a float32 tensor [X, O] or [O], or None."""
        rows = len(x_XI)
        if rows > self.at_once:
            parts = x_XI.split(min(AT_ONCE, self.at_once))
            adds = add.split(len(parts[0])) if add is not None and add.dim() > 1 else [add] * len(parts)
            return torch.cat([self(*each) for each in zip(parts, adds, strict=True)])
        x_XI = x_XI.contiguous()
        add = None if add is None else add.contiguous()
        assert x_XI.dtype == torch.float32
        assert x_XI.shape == (max(1, rows), self._inputs)
        assert add is None or (add.shape[-1] == self._outputs and add.dtype == torch.float32)
        assert add is None or add.dim() == 1 or len(add) == rows
        if add is not None and self._missing:
            add = F.pad(add, (0, self._missing))
        outputs = self._outputs + self._missing
        out_XO = x_XI.new_empty(rows, outputs)
        added = None if add is None else add.data_ptr()
        apart = 0 if add is None or add.dim() == 1 else outputs
        sizes = (self._inputs, outputs, rows, self.kind, torch.get_num_threads())
        compiled().few_rows(self.pointer, x_XI.data_ptr(), added, apart, out_XO.data_ptr(), *sizes, None, -1.0, False)
        return out_XO[:, : self._outputs]


def fits(weight_OI: Tensor) -> bool:
    """Return whether `FewRows` supports these weights on this machine."""
    is_supported = weight_OI.device.type == "cpu" and weight_OI.dtype in (torch.float32, torch.bfloat16)
    return is_supported and compiled() is not None


def pack(weight_OI: Tensor, int8: bool = False) -> FewRows | None:
    """Convert weights to `FewRows`, or return None if they are too small or not supported."""
    weight_OI = weight_OI.float() if int8 and weight_OI.dtype == torch.float16 else weight_OI
    return FewRows(weight_OI, int8) if weight_OI.numel() >= SMALLEST_PACKED and fits(weight_OI) else None


class Product:
    """Linear layer x Wᵀ + b. Large weights on a CPU are converted to `FewRows`."""

    def __init__(self, weight_OI: Any, bias_O: Tensor | None = None, int8: bool = False) -> None:
        """Prepare the product. `weight_OI` is a matrix or `FewRows`, and `int8` selects int8 weights on a CPU."""
        self.shape, self.dtype, self.int8 = weight_OI.shape, weight_OI.dtype, int8
        self.bias_O = None if bias_O is None else bias_O.to(self.dtype)
        self.added_O = None if bias_O is None else bias_O.float().contiguous()
        self.few_rows = weight_OI if isinstance(weight_OI, FewRows) else pack(weight_OI, int8)
        self.fits = isinstance(weight_OI, FewRows) or fits(weight_OI)
        self._unpacked_OI: Any = weight_OI if self.few_rows is None else None

    @property
    def weight_OI(self) -> Any:
        """Return the weights, [O, I]."""
        return self._unpacked_OI if self.few_rows is None else self.few_rows.rows()

    def __call__(self, x_XI: Tensor) -> Tensor:
        """Return x Wᵀ + b, [X, O]."""
        if self.few_rows is None:
            return F.linear(x_XI.to(self.dtype), self.weight_OI, self.bias_O).to(x_XI.dtype)
        if self.few_rows.takes(len(x_XI)):
            return self.few_rows(x_XI.float(), self.added_O).to(x_XI.dtype)
        return self.few_rows.by_library(x_XI, self.bias_O).to(x_XI.dtype)

    def add_to(self, sum_XO: Tensor, x_XI: Tensor) -> Tensor:
        """Return sum_XO + x Wᵀ + b. On a GPU and without a bias, `sum_XO` is modified in place."""
        if self.few_rows is not None and self.few_rows.takes(len(x_XI)):
            added_XO = sum_XO.float() if self.added_O is None else sum_XO.float() + self.added_O
            return self.few_rows(x_XI.float(), added_XO).to(sum_XO.dtype)
        if self.few_rows is not None or x_XI.dtype != self.dtype or self.bias_O is not None:
            return sum_XO + self(x_XI)
        if sum_XO.is_cuda:
            return sum_XO.addmm_(x_XI, self.weight_OI.t())
        return torch.addmm(sum_XO, x_XI, self.weight_OI.t())

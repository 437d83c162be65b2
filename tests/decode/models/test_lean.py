"""Products of the thin forward, which tiny models' weights are too small to reach."""

from __future__ import annotations

import itertools

import pytest
import torch
from draftsmith.decode.models.lean import _FEW_ROWS, _SMALLEST_PACKED, _Product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(640, 500), (1200, 300), (60, 30)], ids=str)
def test_products_of_any_number_of_rows_are_the_matrix_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To rounding, whichever layout of the weights is used; a wrong layout is off by the size of the result."""
    torch.manual_seed(0)
    outputs, inputs = shape
    weight_OI = torch.randn(outputs, inputs, dtype=dtype)
    product = _Product(weight_OI)
    assert (product.packed is not None) == (outputs * inputs >= _SMALLEST_PACKED), "this machine packs nothing"
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    library = _Product(weight_OI)
    library.few_rows = None  # as where there is no compiler
    for made, rows in itertools.product((product, library), (1, 2, 5, 17, _FEW_ROWS, _FEW_ROWS + 1)):
        x_XI, sum_XO = torch.randn(rows, inputs, dtype=dtype), torch.randn(rows, outputs, dtype=dtype)
        expected_XO = x_XI.double() @ weight_OI.double().T
        bound = unit * expected_XO.abs().max()
        assert (made(x_XI).double() - expected_XO).abs().max() < bound
        assert (made.add_to(sum_XO, x_XI).double() - expected_XO - sum_XO.double()).abs().max() < 2 * bound

"""Products of few rows by compiled C: equal to the library's, compiled once, and not there where they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.decode.models.products.few_rows import MOST_ROWS, FewRows, compiled, fits
from draftsmith.decode.models.products.product import SMALLEST_PACKED, Product

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
ASK = "import torch; from draftsmith.decode.models.products.few_rows import fits; print(fits(torch.zeros(32, 4)))"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(16, 1), (48, 7), (4096, 100)], ids=str)
def test_products_are_the_librarys(shape: tuple[int, int], threads: int, dtype: torch.dtype) -> None:
    """To float32's rounding; a wrong panel, row or thread would be off by the size of the result."""
    torch.manual_seed(0)
    outputs, inputs = shape
    weight_OI = torch.randn(outputs, inputs, dtype=dtype)
    assert fits(weight_OI)
    product, before = FewRows(weight_OI), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in range(1, MOST_ROWS + 1):
            x_XI, add_XO = torch.randn(inputs, rows).T, torch.randn(rows, outputs)  # x is not contiguous
            expected_XO = x_XI.double() @ weight_OI.double().T
            bound = 2.0**-20 * (1 + inputs**0.5) * 8
            assert (product(x_XI).double() - expected_XO).abs().max() < bound
            assert (product(x_XI, add_XO).double() - expected_XO - add_XO.double()).abs().max() < bound
    finally:
        torch.set_num_threads(before)


def test_other_weights_are_left_to_the_library() -> None:
    assert not fits(torch.zeros(24, 4)), "outputs are no panels"
    assert not fits(torch.zeros(16, 4, dtype=torch.float16))
    large = Product(torch.zeros(SMALLEST_PACKED // 16, 16))
    assert (large.few_rows is None) == (compiled() is None)


@needs_compiler
def test_it_is_compiled_once_and_only_where_it_can_be(tmp_path: Path) -> None:
    def asked(**changes: str) -> tuple[str, list[Path]]:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | changes
        ran = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.strip(), sorted((tmp_path / "draftsmith").glob("*"))

    bare = tmp_path / "bin"
    bare.mkdir()
    assert asked(PATH=str(bare)) == ("False", []), "no compiler"
    (bare / "cc").write_text("#!/bin/sh\nexit 1\n")
    (bare / "cc").chmod(0o755)
    assert asked(PATH=str(bare)) == ("False", []), "one that fails"
    assert asked(DRAFTSMITH_NATIVE="0") == ("False", [])
    said, (library,) = asked()
    assert said == "True"
    made = library.stat().st_mtime_ns
    assert asked() == ("True", [library])
    assert library.stat().st_mtime_ns == made
    library.chmod(0o666)  # anybody may have written it
    assert asked() == ("True", [library])
    assert library.stat().st_mtime_ns > made

"""Every method on a CUDA device decodes the same texts as on the CPU and synchronises once per step."""

import warnings
from typing import Any

import pytest
import torch
from helpers.steps import ROWS, built, decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("label", [name for name in ROWS if not name.startswith("relaxed")])  # always sample
def test_greedy_texts_are_those_of_the_cpu(make_llama: Any, label: str, batch: int) -> None:
    name, options = ROWS[label]
    on_device, _ = decode(*built(make_llama, "cuda"), name, batch, 0.0, None, **options)
    assert decode(*built(make_llama, "cpu"), name, batch, 0.0, None, **options)[0] == on_device


@pytest.mark.parametrize("label", ROWS)
def test_each_step_synchronises_once(make_llama: Any, label: str) -> None:
    name, options = ROWS[label]
    target, parts = built(make_llama, "cuda")
    decode(target, parts, name, 1, 1.0, None, **options)  # captures the graphs
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decode(target, parts, name, 1, 1.0, None, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    lines = {f"{warning.filename}:{warning.lineno}" for warning in waits}
    assert len(waits) <= 24 + 12, lines  # at most one per token, and those at the start of a text

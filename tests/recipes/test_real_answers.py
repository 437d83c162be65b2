"""On the real answers of a real target: what is learned carries over to answers that were held out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.shared
def test_agreement_with_held_out_answers_of_vicuna_rises(
    shared_data: Path, tmp_path: Path, load_script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[1] / "bench"
    monkeypatch.syspath_prepend(folder)  # as for a script: benches share a module
    bench = load_script(folder / "vicuna_answers.py")
    bench.SHARED = shared_data
    points = bench.curve(tmp_path, 40, bench.SMALL, points=4)
    start, *later = points
    assert start["top1_accuracy"] < 0.01, "32,000 tokens, untrained"
    assert later[-1]["top1_accuracy"] > 0.05
    assert later[-1]["top5_accuracy"] > 0.1
    losses = [point["heldout_loss"] for point in points]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 2

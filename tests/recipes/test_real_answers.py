"""On the real answers of a real target: what is learned carries over to answers that were held out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.shared
def test_agreement_with_held_out_answers_of_vicuna_rises(shared_data: Path, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "bench" / "vicuna_answers.py"
    spec = importlib.util.spec_from_file_location("vicuna_answers", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.SHARED = shared_data
    points = bench.curve(tmp_path, 40, bench.SMALL, points=4)
    start, *later = points
    assert start["top1_accuracy"] < 0.01, "32,000 tokens, untrained"
    assert later[-1]["top1_accuracy"] > 0.05
    assert later[-1]["top5_accuracy"] > 0.1
    losses = [point["heldout_loss"] for point in points]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 2

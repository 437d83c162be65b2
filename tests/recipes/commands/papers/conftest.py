"""Fixtures of the papers' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.report import charts

OWN = """
kind: paper
out: runs/own
paper: slides
where: Table 2
experiment: evaluate
evaluate:
  target: no/target
  drafter: no/drafter
  prompts: mt-bench
  limit: 4
  max_new_tokens: 8
  temperature: 1
  methods:
    - {method: autoregressive}
    - {method: speculative, label: short, options: {gamma: 1}}
    - {method: speculative, label: long, options: {gamma: 3}}
small: {compare_with_transformers: false}
theirs:
  short: {tokens_per_step: 1.75, speedup: 1.5}
  long: {tokens_per_step: 3.125}
claims:
  - {says: More drafting makes more tokens a step., holds: long.tokens_per_step > short.tokens_per_step}
  - {says: Decoding token by token makes one., holds: autoregressive.tokens_per_step ==~ 1}
"""


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have tables alone here, which is quicker; the charts have tests of their own."""
    monkeypatch.setattr(charts, "find_spec", lambda name: None)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A recipe of one's own."""
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="session")
def pair(tiny_pair: Path) -> dict[str, Any]:
    """An evaluation of the tiny pair, whose drafts are accepted now and then."""
    return {
        "target": f"{tiny_pair}/target", "drafter": f"{tiny_pair}/drafter", "table": f"{tiny_pair}/table",
        "prompts": f"{tiny_pair}/corpus/heldout.jsonl", "template": "chatml", "limit": 6,
        "max_new_tokens": 12, "device": "cpu", "methods": [{"method": "autoregressive"}],
    }  # fmt: skip

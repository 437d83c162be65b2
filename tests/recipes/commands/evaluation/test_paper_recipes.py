"""Recipes that reproduce tables of papers: rows can be built and run, and have the labels used in the claims."""

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.decode.methods import METHODS
from draftsmith.decode.registry import method_config
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe, shipped_recipes

BENCH = Path(__file__).parents[3] / "bench"
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "reproduce-papers.md"
NAMES = [name for name in shipped_recipes() if name.startswith("evaluate/") and name.count("/") == 2]


@pytest.fixture(scope="module")
def papers() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        import papers as bench
    finally:
        sys.path.remove(str(BENCH))
    return bench


@pytest.mark.parametrize("name", NAMES)
def test_recipes_name_existing_methods_and_options(name: str, papers: Any) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, EvaluateRecipe)
    for row in recipe.methods:
        method_config(row.method, row.options)
    assert shipped_recipes()[name].read_text().startswith(f"# draftsmith evaluate {name.removeprefix('evaluate/')}\n")
    claims = papers.CLAIMS[name.removeprefix("evaluate/")]
    metrics = {"tokens": 1, "steps": 1, "accepted": 1, "examined": 1, "seconds": 1.0, "perplexity": 2.0, "rouge_l": 1}
    result = {"by_prompt": [metrics] * 3, "flops_per_token": {"total": 1.0}, "tokens_per_step": 1.0}
    labels = [*recipe.labels(), "table of 5", "table of 50"]
    rows = {label: papers.metrics_of(result) for label in labels}
    assert "not measured" not in [papers.judge(predicate, rows) for predicate in claims.values()]


def test_every_command_of_the_documentation_exists() -> None:
    commands = re.findall(r"`draftsmith evaluate (\S+)((?: --method [^`]+)?)`", PAGE.read_text())
    named = {name for name, _ in commands}
    assert {name.removeprefix("evaluate/") for name in NAMES} <= named
    for name, rows in commands:
        recipe = load_recipe(name)
        assert isinstance(recipe, EvaluateRecipe)
        for label in re.findall(r'--method (?:"([^"]+)"|(\S+))', rows):
            assert "".join(label) in {*recipe.labels(), *METHODS}


def test_claims_are_judged_by_resampling(papers: Any) -> None:
    sure, wide = np.full(2001, 2.0), np.concatenate(([2.0], np.linspace(0, 4, 2000)))
    rows = {"a": Namespace(speed=np.full(2001, 1.0)), "b": Namespace(speed=sure), "c": Namespace(speed=wide)}
    verdicts = [papers.judge(papers.rising("speed", *labels), rows) for labels in ("ab", "ba", "ac", "ad")]
    assert verdicts == ["held", "not held", "noise", "not measured"]


@pytest.mark.parametrize("name", ["multi-candidate/ablation", "slim/saturation", "energy"])
def test_a_table_is_run_on_a_pair(name: str, papers: Any, tiny_pair: Path) -> None:
    rows = papers.results_of(name, tiny_pair, Namespace(limit=2, tokens=6))
    verdicts = [papers.judge(predicate, rows) for predicate in papers.CLAIMS[name].values()]
    assert "not measured" not in (verdicts[:2] if name == "energy" else verdicts)
    if name == "slim/saturation":
        assert set(rows) == {"autoregressive", "table", "r = 1", "table of 5", "table of 50"}

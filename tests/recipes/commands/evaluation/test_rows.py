"""Selection of the rows of an evaluation: default, all, or by name, with their baselines."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe
from draftsmith.recipes.schema.evaluation import EvaluateRecipe

PARTS = {"drafter": "D", "heads": "H", "table": "B"}
CORE = [
    ("", ["prompt-lookup"]),
    ("D", ["speculative"]),
    ("H", ["medusa"]),
    ("B", ["bigram"]),
    ("DB", ["speculative", "bigram"]),
    ("HB", ["medusa", "slim-ss"]),
    ("DHB", ["speculative", "medusa", "slim-ss"]),
]


@pytest.fixture(scope="module")
def target(stand_ins: Any) -> str:
    return str(stand_ins.target("JackFram/llama-68m"))


def labels(target: str, artifacts: str = "DHB", *names: str, changes: tuple[str, ...] = ()) -> list[str]:
    parts = {part: folder for part, folder in PARTS.items() if folder in artifacts}
    recipe = evaluate_recipe(None, changes, {"target": target, "prompts": "P"} | parts, names=names)
    assert EvaluateRecipe.model_validate(recipe.model_dump()) == recipe
    return recipe.labels()


@pytest.mark.parametrize(("artifacts", "rows"), CORE)
def test_one_method_of_each_artifact(target: str, artifacts: str, rows: list[str]) -> None:
    assert labels(target, artifacts) == ["autoregressive", *rows]


def test_named_rows_include_their_baseline(target: str) -> None:
    assert labels(target, "DHB", "slim-l", "bild") == ["autoregressive", "slim-l", "bild"]
    assert labels(target, "D", "speculative T=1") == ["autoregressive T=1", "speculative T=1"]
    assert labels(target, "D", "speculative", "spectr T=1") == [
        *("autoregressive", "autoregressive T=1"),
        *("speculative", "spectr T=1"),
    ]
    assert labels(target, "D", "autoregressive") == ["autoregressive"]
    own = "methods=[{method: autoregressive}, {method: speculative, label: long, options: {gamma: 9}}]"
    assert labels(target, "D", "long", changes=(own,)) == ["autoregressive", "long"]
    assert labels(target, "D", changes=(own,)) == ["autoregressive", "long"]


def test_a_recipe_keeps_the_options_of_its_rows(tmp_path: Path) -> None:
    values = {"kind": "evaluate", "out": "r.json", "target": "T", "drafter": "D", "prompts": "P", "temperature": 0.5}
    rows = [{"method": "autoregressive"}, {"method": "speculative", "label": "long", "options": {"gamma": 9}}]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values | {"methods": rows}))
    assert evaluate_recipe(str(path), [], {}).labels() == ["autoregressive", "long"]
    named = evaluate_recipe(str(path), [], {}, names=("spectr", "speculative"))
    assert named.labels() == ["autoregressive", "spectr", "long"]

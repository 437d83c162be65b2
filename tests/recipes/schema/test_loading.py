"""Loading of recipes from files and from shipped recipes, with `extends` and overrides."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe
from draftsmith.recipes.commands.pairs.quickstart import resolve
from draftsmith.recipes.schema.evaluation import QuickstartRecipe, RegenerateRecipe
from draftsmith.recipes.schema.loading import dump_recipe, load_recipe, load_training, read_extended, shipped_recipes
from draftsmith.recipes.schema.training import DrafterRecipe

RECIPE = """
kind: drafter
out: runs/x
model: {source: base}
data: {<<: {limit: 7}, source: rows.json}
train: {learning_rate: 1e-3, steps: 5, betas: [0.9, 0.95]}
"""
LOADERS: dict[str, Callable[[str], Any]] = {
    "drafter": load_training,
    "heads": load_training,
    "table": load_training,
    "evaluate": lambda name: evaluate_recipe(name, [], {}),
    "regenerate": partial(load_recipe, kinds=[RegenerateRecipe]),
    "quickstart": partial(load_recipe, kinds=[QuickstartRecipe]),
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load(name: str) -> None:
    kind = read_extended(shipped_recipes()[name])["kind"]
    assert LOADERS[kind](name).kind == kind


def test_a_resolved_recipe_survives_a_round_trip(recipe: str, tmp_path: Path) -> None:
    overrides = ["train.precision=no", "train.gradient_checkpointing=true"]  # `no` is a word in YAML 1.2, False in 1.1
    first = load_recipe(recipe, ["train.steps=7", "objective={cross-entropy: 0.5}", *overrides])
    assert isinstance(first, DrafterRecipe)
    assert (first.train.steps, first.train.precision, first.train.gradient_checkpointing) == (7, "no", True)
    assert first.train.learning_rate == 1e-3  # a number in YAML 1.2, a string in 1.1
    assert first.data.limit == 7  # with the merge key of YAML
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_recipe(first))
    assert load_recipe(str(again)) == first


def test_overrides_are_applied_after_given_values(recipe: str) -> None:
    options = {"target": "a: b, [c]", "train.steps": 3, "train.betas": [0.5, 0.6], "train.seed": 1}
    loaded = load_recipe(recipe, ["train.seed=2", "train.betas.1=0.7"], options=options)
    assert isinstance(loaded, DrafterRecipe)
    assert (loaded.target, loaded.train.steps, loaded.train.seed) == ("a: b, [c]", 3, 2)
    assert loaded.train.betas == (0.5, 0.7)


def test_quickstart_sets_folder_seed_and_minutes() -> None:
    plain = load_recipe("quickstart")
    assert isinstance(plain, QuickstartRecipe)
    changed = load_recipe("quickstart", ["out=else where", "minutes=16", "seed=3", "target.data.limit=10"])
    assert isinstance(changed, QuickstartRecipe)
    assert changed.heads.data.limit is None  # overriding a value must not change other aliases of it
    resolved = resolve(changed)
    assert resolved.drafter.target == "else where/target"
    assert resolved.heads.train.seed == 3
    assert plain.target.train.steps is not None
    assert resolved.target.train.steps == 2 * plain.target.train.steps
    assert "{out}" not in dump_recipe(resolved)


def test_a_recipe_overrides_the_one_it_extends(tmp_path: Path) -> None:
    base = {"kind": "drafter", "objective": {"cross-entropy": 1.0}, "train": {"steps": 3, "seed": 1}, "out": "a"}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    middle = {"extends": "base.yaml", "objective": {"forward-kl": 1.0}, "train": {"seed": 2}}
    (tmp_path / "middle.yaml").write_text(yaml.safe_dump(middle))
    (tmp_path / "top.yaml").write_text(yaml.safe_dump({"extends": "middle.yaml", "train": {"steps": 9}}))
    expected = base | {"objective": {"forward-kl": 1.0}, "train": {"steps": 9, "seed": 2}}
    assert read_extended(tmp_path / "top.yaml") == expected
    (tmp_path / "shipped.yaml").write_text("extends: drafter/vicuna-68m\nout: mine\n")
    extended = load_recipe(str(tmp_path / "shipped.yaml"))
    assert isinstance(extended, DrafterRecipe)
    assert (extended.out, extended.train.global_batch) == ("mine", 128)

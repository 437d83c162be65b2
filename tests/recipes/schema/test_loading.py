"""Recipes: strict, with messages that name the key and the nearest right one; overrides; the shipped ones load."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftsmith.recipes.commands.quickstart import resolve
from draftsmith.recipes.schema.evaluation import QuickstartRecipe
from draftsmith.recipes.schema.loading import dump_recipe, find_recipe, load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import DrafterRecipe

RECIPE = """
kind: drafter
out: runs/x
model: {source: base}
data: {source: rows.json}
train: {learning_rate: 1e-3, steps: 5, betas: [0.9, 0.95]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return str(file)


def test_every_shipped_recipe_loads_and_opens_with_its_command() -> None:
    names = shipped_recipes()
    assert {"quickstart", "drafter/vicuna-68m"} <= set(names)
    for name, path in names.items():
        load_recipe(name)
        assert "draftsmith" in path.read_text().splitlines()[0]


def test_a_resolved_recipe_repeats_itself(recipe: str, tmp_path: Path) -> None:
    words = ["train.precision=no", "train.gradient_checkpointing=true"]  # `no` is a word in YAML 1.2, False in 1.1
    first = load_recipe(recipe, ["train.steps=7", "objective={cross-entropy: 0.5}", *words])
    assert isinstance(first, DrafterRecipe)
    assert first.train.steps == 7
    assert first.train.precision == "no"
    assert first.train.gradient_checkpointing is True
    assert first.train.learning_rate == 1e-3  # a number in YAML 1.2, a string in 1.1
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_recipe(first))
    assert load_recipe(str(again)) == first


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1e-3", r"unknown key 'train.learning_rat'. Did you mean 'learning_rate'\?"),
        ("learning_rate=1", "unknown key 'learning_rate'"),
        ("trian.steps=1", r"unknown key 'trian'. Did you mean 'train'\?"),
        ("train.steps=many", "'train.steps': input should be a valid integer, got 'many'"),
        ("train.warmup=2", "'train.warmup': input should be less than 1, got 2"),
        ("train.schedule=cosin", "'train.schedule': input should be 'cosine', 'linear' or 'constant', got 'cosin'"),
        ("model.config={model_type: llama}", "give one of `source`"),
        ("objective={forward-kl: 1.0}", "'forward-kl' needs a `target`"),
        ("kind=draftr", r"`kind` is 'draftr'. Did you mean 'drafter'\?"),
        ("train", "not of the form key.path=value"),
        ("kind=[drafter]", "`kind` is"),
        ("train.betas.0.x=1", "'train.betas.0' is a value, not a section"),
        ("out.folder=1", "'out' is a value, not a section"),
        ("data=", "'data'"),
    ],
)
def test_a_wrong_key_or_value_is_named(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, [override])


def test_all_faults_are_told_at_once(recipe: str) -> None:
    with pytest.raises(ValueError, match=r"'train.epochs'.*'train.micro_batch'"):
        load_recipe(recipe, ["train.epochs=-1", "train.micro_batch=0"])


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no recipe 'quikstart'\. Did you mean 'quickstart'"):
        find_recipe("quikstart")
    for text, message in [
        ("a: [1", "recipe.yaml:1 is not valid YAML"),
        ("- 1", "is list"),
        ("a: 1\na: 2", "'a' stands twice"),
    ]:
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_recipe(str(tmp_path / "recipe.yaml"))
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"not a text file|not valid YAML"):
        load_recipe(str(tmp_path / "recipe.yaml"))
    (tmp_path / "recipe.yaml").write_text("kind: quickstart")
    with pytest.raises(ValueError, match="'corpus' is missing; 'target' is missing"):
        load_recipe(str(tmp_path / "recipe.yaml"))


def test_a_command_refuses_other_kinds(recipe: str) -> None:
    with pytest.raises(ValueError, match="of kind 'drafter'; this command runs evaluate"):
        load_recipe(recipe, kinds=["evaluate"])


def test_the_quickstart_fills_in_folder_seed_and_minutes() -> None:
    plain = load_recipe("quickstart")
    assert isinstance(plain, QuickstartRecipe)
    changed = load_recipe("quickstart", ["out=elsewhere", "minutes=16", "seed=3", "target.data.limit=10"])
    assert isinstance(changed, QuickstartRecipe)
    assert changed.heads.data.limit is None  # an override of one part leaves what YAML's aliases share alone
    resolved = resolve(changed)
    assert resolved.drafter.target == "elsewhere/target"
    assert resolved.heads.train.seed == 3
    assert plain.target.train.steps is not None
    assert resolved.target.train.steps == 2 * plain.target.train.steps
    assert "{out}" not in dump_recipe(resolved)


def test_merge_keys_are_yaml_too(tmp_path: Path) -> None:
    merged = RECIPE.replace("data: {source: rows.json}", "data: {<<: {limit: 7}, source: rows.json}")
    (tmp_path / "recipe.yaml").write_text(merged)
    assert load_recipe(str(tmp_path / "recipe.yaml")).data.limit == 7  # type: ignore[union-attr]

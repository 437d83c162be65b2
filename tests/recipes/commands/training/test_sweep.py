"""Sweeps: every combination is a run of its own, finished ones are not run again, and one table says it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.sweep import plan_sweep, run_sweep
from draftsmith.recipes.schema.loading import load_training
from draftsmith.recipes.schema.training import DrafterRecipe
from typer.testing import CliRunner


@pytest.fixture
def heads(stand_ins: Any, tmp_path: Path) -> Path:
    """A recipe for heads on a tiny target: three steps."""
    few = "".join(f"  {change.split('.')[1].replace('=', ': ')}\n" for change in stand_ins.few if "train." in change)
    recipe = tmp_path / "heads.yaml"
    recipe.write_text(
        f"kind: heads\nout: {tmp_path}/heads\ntarget: {stand_ins.target('lmsys/vicuna-7b-v1.3')}\nnum_heads: 2\n"
        f"data: {{source: {stand_ins.rows}, block_tokens: 320, heldout_share: 0.2, cache: {tmp_path}/prepared}}\n"
        f"train:\n{few}measure: {{prompts: 1, new_tokens: 4, blocks: 2, tree: 2x1, keep: last}}\n"
    )
    return recipe


def test_all_combinations_are_run_once_and_shown_in_one_table(heads: Path, tmp_path: Path) -> None:
    command = ["train", str(heads), "train.learning_rate=1e-2", "--sweep", "num_heads=2,3", "--sweep", "num_layers=0,2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    names = [f"heads-num_heads={heads}-num_layers={layers}" for heads in (2, 3) for layers in (0, 2)]
    found = json.loads((tmp_path / "heads-sweep.json").read_text())
    assert found["sweep"] == {"num_heads": [2, 3], "num_layers": [0, 2]}
    assert [Path(row["out"]).name for row in found["rows"]] == names
    for row in found["rows"]:
        module, manifest = load_heads(Path(row["out"])), load_manifest(Path(row["out"]))
        assert (module.num_heads, module.num_layers) == tuple(row["values"].values())
        assert row["metrics"] == manifest.evaluation
        assert manifest.recipe["train"]["learning_rate"] == 1e-2, "what is set for all holds in each"
        assert f"{row['metrics']['heldout_loss']:.3f}" in done.stdout

    stamps = {name: (tmp_path / name / "artifact.json").stat().st_mtime_ns for name in names}
    (tmp_path / names[1]).rename(tmp_path / "taken away")
    assert CliRunner().invoke(app, command).exit_code == 0
    again = json.loads((tmp_path / "heads-sweep.json").read_text())
    assert [row["metrics"] for row in again["rows"]] == [row["metrics"] for row in found["rows"]]
    new = {name: (tmp_path / name / "artifact.json").stat().st_mtime_ns for name in names}
    assert [name for name in names if new[name] != stamps[name]] == [names[1]], "only what was missing is made again"


def test_what_is_finished_stands_there_when_a_later_run_fails(heads: Path, tmp_path: Path) -> None:
    other = tmp_path / "heads-train.seed=2"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    sweep = plan_sweep(str(heads), ["measure.prompts=0"], ["train.seed=1,2"])
    with pytest.raises(ValueError, match=r"train\.seed=2"):
        run_sweep(sweep)
    (row,) = json.loads(sweep.results.read_text())["rows"]
    assert row["values"] == {"train.seed": 1}


def test_values_may_be_mappings_and_names_of_folders_are_short_and_differ(drafter_recipe: Path) -> None:
    model = json.loads(json.dumps(load_training(str(drafter_recipe)).model.config))  # type: ignore[union-attr]
    sizes = "model.config=" + ",".join(json.dumps(model | {"hidden_size": size}) for size in (8, 16))
    sweep = plan_sweep(str(drafter_recipe), ["train.steps=2"], [sizes, "train.weight_decay=0.0,1e-2"])
    recipes = [combination.recipe for combination in sweep.combinations]
    assert all(isinstance(recipe, DrafterRecipe) for recipe in recipes)
    assert [recipe.model.config["hidden_size"] for recipe in recipes] == [8, 8, 16, 16]  # type: ignore[union-attr]
    assert [recipe.train.weight_decay for recipe in recipes] == [0.0, 0.01] * 2  # type: ignore[union-attr]
    names = [Path(recipe.out).name for recipe in recipes]
    assert len(set(names)) == 4
    assert all(len(name) < 100 and "/" not in name for name in names)
    alike = plan_sweep(str(drafter_recipe), [], ['model.config.name=1,"1",one,"null",null']).combinations
    assert len({combination.recipe.out for combination in alike}) == 5
    assert alike[2].recipe.out.endswith("-model.config.name=one")
    (one,) = plan_sweep(str(drafter_recipe), [], ["train.steps=3"]).combinations
    assert one.recipe == load_training(str(drafter_recipe), ["train.steps=3", f"out={one.recipe.out}"])


def test_tables_of_growing_parts_are_swept(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "table.yaml"
    recipe.write_text(
        f"{{kind: table, out: {tmp_path}/table, tokenizer: {corpus}/tokenizer, "
        f"data: {{source: {corpus}/rows.json, template: chatml, heldout_share: 0, cache: {tmp_path}/prepared}}}}"
    )
    sweep = plan_sweep(str(recipe), [], ["data.limit=5,20"])
    run_sweep(sweep)
    shown = capsys.readouterr().out
    for combination, row in zip(sweep.combinations, json.loads(sweep.results.read_text())["rows"], strict=True):
        manifest = load_manifest(Path(combination.recipe.out))
        assert manifest.data["conversations"] == row["values"]["data.limit"]
        assert row["training"]["entries"] == manifest.shapes["entries"]
        assert f"{manifest.shapes['entries']:,}" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["num_head=2,3"], r"num_head=2: .*'num_heads'"),
        (["num_heads=2,many"], 'num_heads="many": '),
        (["num_heads="], "'num_heads='"),
        (["num_heads"], "'num_heads'"),
        (["num_heads=2,[3"], r"'num_heads=2,\[3'"),
        (["num_heads=2", "num_heads=3"], "'num_heads=3'"),
        (["out=a,b"], "'out=a,b'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(heads: Path, options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_sweep(str(heads), ["num_layers=1"], options)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.yaml"]

"""Sweeps: every combination is a run of its own, finished ones are not run again, and one table says it all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.recipes.commands.training.sweep import plan_sweep, run_sweep, show_plans, sweep_table
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import DrafterRecipe
from draftsmith.train.parallel.interrupts import TrainingError

Cli = Callable[..., Any]


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


def test_all_combinations_are_run_and_shown_in_one_table(heads: Path, cli: Cli, tmp_path: Path) -> None:
    options = ["--sweep", "num_heads=2,3", "--sweep", "num_layers=0,2", "train.learning_rate=1e-2"]
    done = cli("train", str(heads), *options)
    assert done.returncode == 0, done.stderr
    names = [f"heads-num_heads={heads}-num_layers={layers}" for heads in (2, 3) for layers in (0, 2)]
    found = json.loads((tmp_path / "heads-sweep.json").read_text())
    assert found["sweep"] == {"num_heads": [2, 3], "num_layers": [0, 2]}
    assert [Path(row["out"]).name for row in found["rows"]] == names
    for row in found["rows"]:
        module, manifest = load_heads(Path(row["out"])), load_manifest(Path(row["out"]))
        assert (module.num_heads, module.num_layers) == tuple(row["values"].values())
        assert row["parameters"] == sum(parameter.numel() for parameter in module.parameters())
        assert row["metrics"] == manifest.evaluation
        assert row["minutes"] == manifest.training["seconds"] / 60
        assert manifest.recipe["train"]["learning_rate"] == 1e-2, "what is set for all holds in each"
    assert len([path for path in (tmp_path / "prepared").iterdir() if path.is_dir()]) == 1, "prepared once"
    shown = done.stdout
    for word in ("num_heads", "num_layers", "heldout", "top1", "top5", "parameters", "minutes"):
        assert word in shown
    for row in found["rows"]:
        assert f"{row['metrics']['heldout_loss']:.3f}" in shown
        assert f"{row['parameters']:,}" in shown
    assert max(map(len, shown.splitlines())) <= 120

    stamps = {name: (tmp_path / name / "artifact.json").stat().st_mtime_ns for name in names}
    sweep = plan_sweep(str(heads), ["train.learning_rate=1e-2"], ["num_heads=2,3", "num_layers=0,2"])
    (tmp_path / names[1]).rename(tmp_path / "taken away")
    run_sweep(sweep)
    again = json.loads(sweep.results.read_text())
    assert [row["values"] for row in again["rows"]] == [row["values"] for row in found["rows"]]
    assert [row["metrics"] for row in again["rows"]] == [row["metrics"] for row in found["rows"]]
    new = {name: (tmp_path / name / "artifact.json").stat().st_mtime_ns for name in names}
    assert [name for name in names if new[name] != stamps[name]] == [names[1]], "only what was missing is made again"


def test_what_is_finished_stands_there_when_a_later_run_fails(heads: Path, tmp_path: Path) -> None:
    other = tmp_path / "heads-train.seed=2"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    sweep = plan_sweep(str(heads), ["measure.prompts=0"], ["train.seed=1,2"])
    with pytest.raises(ValueError, match=r"^with train.seed=2: .*holds other files and no artifact"):
        run_sweep(sweep)
    rows = json.loads(sweep.results.read_text())["rows"]
    assert [row["values"] for row in rows] == [{"train.seed": 1}]
    assert "tokens_per_step" not in rows[0]["metrics"]
    assert "tokens" not in {column.header for column in sweep_table(sweep, rows).columns}, "nobody measured them"
    failing = plan_sweep(str(heads), ["measure.prompts=0", f"out={tmp_path}/bad"], ["train.max_norm=1e-9"])
    with pytest.raises(TrainingError, match=r"^with train.max_norm=1e-09: the gradient's norm"):  # exit code 1, not 2
        run_sweep(failing)


def test_drafters_are_swept_too_and_values_may_be_mappings(drafter_recipe: Path, tmp_path: Path, capsys: Any) -> None:
    sizes = "model.config.num_hidden_layers=1,2"
    decays = "train.betas=[0.9, 0.99],[0.8, 0.9]"
    sweep = plan_sweep(str(drafter_recipe), ["train.steps=2"], [sizes, decays])
    recipes = [combination.recipe for combination in sweep.combinations]
    assert all(isinstance(recipe, DrafterRecipe) for recipe in recipes)
    assert [(r.model.config["num_hidden_layers"], r.train.betas) for r in recipes] == [  # type: ignore[union-attr,index]
        (1, [0.9, 0.99]),
        (1, [0.8, 0.9]),
        (2, [0.9, 0.99]),
        (2, [0.8, 0.9]),
    ]
    outs = [Path(recipe.out) for recipe in recipes]
    assert len(set(outs)) == 4
    assert all(out.parent == tmp_path and set(out.name) <= set("-=._") | set(map(chr, range(48, 123))) for out in outs)
    run_sweep(plan_sweep(str(drafter_recipe), ["train.steps=2"], [sizes]))
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "drafter-sweep.json").read_text())["rows"]
    assert rows[1]["parameters"] > rows[0]["parameters"]
    assert all(f"{row['metrics']['heldout_loss']:.3f}" in shown for row in rows)


def test_tables_of_growing_parts_are_swept(corpus: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "table.yaml"
    recipe.write_text(
        f"{{kind: table, out: {tmp_path}/table, tokenizer: {corpus}/tokenizer, saturation: {{sizes: [3]}}, "
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


def test_names_of_folders_are_short_and_differ(heads: Path) -> None:
    long = ",".join(f"/some/where/{'x' * 90}{place}" for place in range(3))
    sweep = plan_sweep(str(heads), [], [f"measure.table={long}"])
    names = [Path(combination.recipe.out).name for combination in sweep.combinations]
    assert len(set(names)) == 3
    assert all(len(name) < 100 and "/" not in name for name in names)
    assert plan_sweep(str(heads), [], ["num_heads=3"]).combinations[0].recipe.out.endswith("heads-num_heads=3")


def test_plans_of_all_combinations(heads: Path, capsys: Any) -> None:
    sweep = plan_sweep(str(heads), ["measure.prompts=0"], ["num_heads=2,3"])
    show_plans(sweep)
    shown = capsys.readouterr().out
    assert shown.index("num_heads=2") < shown.index("plan: heads") < shown.index("num_heads=3")
    assert shown.count("memory at most") == 2
    assert not sweep.results.exists()
    assert not Path(sweep.combinations[0].recipe.out).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["num_head=2,3"], r"num_head=2: .*'num_heads'"),
        (["num_heads=2,many"], "num_heads=many: .*'many'"),
        (["num_heads=2,0"], "num_heads=0: "),
        (["num_heads="], "'num_heads='"),
        (["num_heads"], "'num_heads'"),
        (["num_heads=2,2"], "'num_heads=2,2' .* 2 "),
        (["num_heads=2,[3"], r"'num_heads=2,\[3'"),
        (["num_heads=2", "num_heads=3"], "'num_heads'"),
        (["num_layers=1,2"], "'num_layers'"),
        (["out=a,b"], "'out'"),
        (["kind=drafter,heads"], "'kind'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(heads: Path, options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_sweep(str(heads), ["num_layers=1"], options)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.yaml"]


def test_a_sweep_of_one_recipe_is_that_recipe(heads: Path) -> None:
    (one,) = plan_sweep(str(heads), [], ["num_heads=3"]).combinations
    alone = load_recipe(str(heads), ["num_heads=3", f"out={one.recipe.out}"])
    assert one.recipe == alone
    assert one.words == "num_heads=3"

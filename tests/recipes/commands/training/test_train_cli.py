"""Training of drafters from recipes: trackers, models without a target, and early errors."""

import itertools
import json
import re
from pathlib import Path

import pytest
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import (
    launch_settings,
    load_recipe,
    load_training,
    shipped_models,
    shipped_recipes,
)
from typer.testing import CliRunner


def test_trackers_get_the_logged_metrics(drafter_recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_train(load_training(str(drafter_recipe), ["train.trackers=[tensorboard]", "train.evaluate_every=6"]))
    lines = [json.loads(line) for line in (tmp_path / "drafter.state" / "log.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "drafter.state" / "draftsmith"))
    events.Reload()
    losses = [(line["step"], pytest.approx(line["loss"])) for line in lines if "loss" in line]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == losses
    measured = [(e["step"], pytest.approx(e["evaluation"]["perplexity"])) for e in lines if "evaluation" in e]
    assert [(event.step, event.value) for event in events.Scalars("perplexity")] == measured
    assert {"tokens_per_second", "grad_norm", "learning_rate"} <= set(events.Tags()["scalars"])


def test_a_recipe_without_target_trains_a_target(
    drafter_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_train(load_training(str(drafter_recipe)))
    run_train(load_training(str(drafter_recipe), [f"target={tmp_path / 'drafter'}", f"out={tmp_path / 'own'}"]))
    run_train(load_training(str(drafter_recipe)))  # this run is finished already
    log_lines = re.findall("^(target|drafter): (.*)", capsys.readouterr().err, re.MULTILINE)
    turns = [title for title, _ in itertools.groupby(log_lines, lambda line: line[0])]
    assert turns == ["target", "drafter", "target"]
    first_words = {text.split()[0] for title, text in log_lines if title == "target"}
    assert first_words >= {"1", "step", "wrote", str(tmp_path / "drafter")}
    names = ("drafter", "own")
    verified = [CliRunner().invoke(app, ["doctor", str(tmp_path / name)]).stdout for name in names]
    assert [line.partition(": ")[2].split(",")[0] for line in verified] == ["target", "drafter"]
    output = CliRunner().invoke(app, ["show", str(tmp_path / "drafter")]).stdout
    assert output.split()[:2] == ["what", "target,"]
    cards = [(tmp_path / name / "README.md").read_text() for name in names]
    assert [("draft-model" in card, "assistant_model" in card) for card in cards] == [(False, False), (True, True)]
    assert [load_manifest(tmp_path / name).kind for name in names] == ["drafter"] * 2


def test_every_shipped_recipe_can_be_copied_and_listed(tmp_path: Path) -> None:
    run = CliRunner().invoke  # separate processes for all commands would take minutes
    listed = run(app, ["recipes", "ls"]).stdout
    for name in shipped_recipes():
        copy = tmp_path / f"{name.replace('/', '-')}.yaml"
        assert run(app, ["recipes", "copy", name, str(copy)]).exit_code == 0
        assert load_recipe(str(copy)) == load_recipe(name)
        assert name in listed
    assert "distilled from Vicuna-7B" in listed
    assert all(name in listed for name in shipped_models())
    for name, path in (launch_settings() | shipped_models()).items():
        assert run(app, ["recipes", "copy", name, str(tmp_path)]).exit_code == 0
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective={forward-lk: 1.0}", "'forward-lk'.*'forward-kl'"),
        ("objective={cross-entropy: [1.0, 0.0]}", "0 at the end"),
        ("train.global_batch=5", "5.*2"),
        ("model.config.hiden_size=3", "'hidden_size'"),
        ("model.config.vocab_size=100", "320.*100"),
        ("data.template=t5", "`data.template: t5`"),
        ("train.precision=fp16", "fp16.*auto"),
        ("train.trackers=[mlflow]", "'mlflow'.*pip install mlflow"),
    ],
)
def test_errors_are_found_before_the_data_is_prepared(
    change: str, message: str, drafter_recipe: Path, tiny_pair: Path, tmp_path: Path
) -> None:
    recipe = load_training(str(drafter_recipe), [change, f"target={tiny_pair / 'target'}"])
    with pytest.raises(ValueError, match=message):
        run_train(recipe)
    assert not (tmp_path / "prepared").exists()
    assert not (tmp_path / "drafter.state").exists()

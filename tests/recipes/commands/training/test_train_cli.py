"""Training drafters on the command line: trackers, bad data named, recipes that extend others, wrong settings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.artifact import fit_recipe
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.drafter import drafter_parts
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.train import accelerator_for, run_train
from draftsmith.recipes.schema.loading import accelerate_configs, load_recipe, read_extended, shipped_recipes
from draftsmith.recipes.schema.training import DrafterRecipe
from draftsmith.train.loop.fit import TrainingError

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_trackers_get_what_the_log_gets(drafter_recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe(str(drafter_recipe), ["train.trackers=[tensorboard]", "train.evaluate_every=6"])
    assert isinstance(recipe, DrafterRecipe)
    run_train(recipe)
    lines = [json.loads(line) for line in (tmp_path / "drafter.state" / "log.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "drafter.state" / "draftsmith"))
    found.Reload()
    losses = [(line["step"], pytest.approx(line["loss"])) for line in lines if "loss" in line]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == losses
    measured = [(e["step"], pytest.approx(e["evaluation"]["perplexity"])) for e in lines if "evaluation" in e]
    assert [(event.step, event.value) for event in found.Scalars("perplexity")] == measured
    assert {"mfu", "tokens_per_second", "grad_norm", "learning_rate"} <= set(found.Tags()["scalars"])


def test_a_tracker_that_is_missing_is_named(drafter_recipe: Path) -> None:
    recipe = load_recipe(str(drafter_recipe), ["train.trackers=[mlflow]"])
    assert isinstance(recipe, DrafterRecipe)
    with pytest.raises(ValueError, match="'mlflow', which is not installed: pip install mlflow"):
        accelerator_for(recipe)


def test_a_bad_step_names_the_documents(drafter_recipe: Path, tmp_path: Path) -> None:
    """One token whose embedding is not a number spoils the step in which a document holds it."""
    recipe = load_recipe(str(drafter_recipe), ["train.global_batch=2", "train.micro_batch=1"])
    assert isinstance(recipe, DrafterRecipe)
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = prepare_data(recipe.data, tokenizer, quiet=True)
    accelerator = accelerator_for(recipe)
    parts = drafter_parts(recipe, tokenizer, prepared, accelerator.device)
    document = next(prepared.train.iter_documents())
    counts = {
        int(token): sum(int((ids == token).sum()) for ids in prepared.train.iter_documents()) for token in document
    }
    rare = min(counts, key=counts.__getitem__)
    with torch.no_grad():
        parts.trained.model.get_input_embeddings().weight[rare] = float("nan")
    with pytest.raises(TrainingError, match="the loss is nan at step") as caught:
        fit_recipe(parts.task, prepared, recipe, tmp_path / "out", accelerator, tokenizer, False)
    batch = prepared.train.batch(caught.value.blocks)
    numbers = batch.documents_BT
    assert (batch.tokens_BT == rare).any(1).all(), "only blocks that hold the token"
    text = str(caught.value)
    assert "Its documents begin: '<|im_start|>user" in text
    assert text.count(" …") == min(3, len(numbers[numbers >= 0].unique()))


def test_a_recipe_lies_over_the_one_it_extends(tmp_path: Path) -> None:
    base = {"kind": "drafter", "objective": {"cross-entropy": 1.0}, "train": {"steps": 3, "seed": 1}, "out": "a"}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    middle = {"extends": "base.yaml", "objective": {"forward-kl": 1.0}, "train": {"seed": 2}}
    (tmp_path / "middle.yaml").write_text(yaml.safe_dump(middle))
    (tmp_path / "top.yaml").write_text(yaml.safe_dump({"extends": "middle.yaml", "train": {"steps": 9}}))
    expected = base | {"objective": {"forward-kl": 1.0}, "train": {"steps": 9, "seed": 2}}
    assert read_extended(tmp_path / "top.yaml") == expected
    (tmp_path / "shipped.yaml").write_text("extends: drafter/vicuna-68m\nout: mine\n")
    mine = load_recipe(str(tmp_path / "shipped.yaml"))
    assert isinstance(mine, DrafterRecipe)
    assert (mine.out, mine.train.global_batch) == ("mine", 128)
    (tmp_path / "base.yaml").write_text("extends: top.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        read_extended(tmp_path / "top.yaml")
    (tmp_path / "lost.yaml").write_text("extends: drafter/vicuna-68n\n")
    with pytest.raises(ValueError, match=r"no recipe 'drafter/vicuna-68n'. Did you mean 'drafter/vicuna-68m'"):
        read_extended(tmp_path / "lost.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["objective={forward-lk: 1.0}", "target=TARGET"], ["'forward-lk'", "did you mean 'forward-kl'"]),
        (["objective={cross-entropy: [1.0, 0.0]}"], ["all weights are 0 at the end"]),
        (["objective={forward-kl: 1.0}"], ["'forward-kl'", "needs a `target`"]),
        (["on_policy={share: 0.5}"], ["a distillation objective"]),
        (["teacher.cache=somewhere"], ["`cache` needs `top_k`"]),
        (["teacher={top_k: 4, temperature: 2.0}"], ["temperature 1, got 2.0", "renormalise"]),
        (["model.layers=[0]"], ["layers of `source`"]),
        (["train.on_bad_step=ignore"], ["'stop' or 'skip'"]),
        (["train.trackers=[wandbb]"], ["wandb"]),
    ],
)
def test_wrong_settings_are_one_message(cli: Cli, drafter_recipe: Path, changes: list[str], words: list[str]) -> None:
    found = cli("train", str(drafter_recipe), *changes)
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("error:") == 1
    assert "Traceback" not in found.stderr
    for word in words:
        assert word in found.stderr


def test_every_shipped_recipe_can_be_copied_and_listed(cli: Cli, tmp_path: Path) -> None:
    listed = cli("recipes", "ls").stdout
    for name in shipped_recipes():
        target = tmp_path / name.replace("/", "-")
        assert cli_app(["recipes", "copy", name, f"{target}.yaml"]) == 0
        assert load_recipe(f"{target}.yaml") == load_recipe(name)
        assert name in listed
    assert "taught by Vicuna-33B" in listed
    for name in accelerate_configs():
        assert cli_app(["recipes", "copy", name, str(tmp_path)]) == 0
    with pytest.raises(ValueError, match="accelerate's settings"):
        load_recipe("accelerate/zero2")


def cli_app(arguments: list[str]) -> int:
    """The command line in this process: one process for each of many commands takes minutes."""
    from typer.testing import CliRunner

    return CliRunner().invoke(app, arguments).exit_code


def test_mistakes_are_found_before_the_data_is_prepared(drafter_recipe: Path, tmp_path: Path) -> None:
    for change, words in (
        ("train.global_batch=5", "cannot be split"),
        ("model.config.hiden_size=3", "Did you mean 'hidden_size'"),
        ("train.liger=true", "needs a CUDA device"),
        ("data.template=t5", "for encoder-decoders"),
        ("train.precision=fp16", "use bf16 or no"),
    ):
        recipe = load_recipe(str(drafter_recipe), [change])
        assert isinstance(recipe, DrafterRecipe)
        with pytest.raises(ValueError, match=words):
            run_train(recipe)
        assert not (tmp_path / "prepared").exists(), change
        assert not (tmp_path / "drafter.state").exists(), change


def test_a_setting_that_is_taken_away_is_noticed(drafter_recipe: Path, tmp_path: Path) -> None:
    first = load_recipe(str(drafter_recipe), ["model.freeze_embeddings=true"])
    second = load_recipe(str(drafter_recipe), ["train.trackers=[tensorboard]"])
    assert isinstance(first, DrafterRecipe)
    assert isinstance(second, DrafterRecipe)
    run_train(first)
    (tmp_path / "drafter" / "artifact.json").rename(tmp_path / "artifact.json")
    for path in (tmp_path / "drafter").iterdir():
        path.unlink()
    tokenizer = load_tokenizer(first.tokenizer_source)
    prepared = prepare_data(first.data, tokenizer, quiet=True)
    accelerator = accelerator_for(first)
    parts = drafter_parts(first, tokenizer, prepared, accelerator.device)
    fit_recipe(parts.task, prepared, first, tmp_path / "drafter", accelerator, tokenizer, False)
    with pytest.raises(ValueError, match="other settings"):
        run_train(second)
    assert not (tmp_path / "drafter.state" / "draftsmith").exists(), "trackers begin when the run does"

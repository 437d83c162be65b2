"""Recipes for modern targets: plans without network, and three steps with tiny models of the same architectures."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, load_training, read_model, shipped_models
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

MODELS, KINDS = shipped_models(), ("heads/eagle3.1", "heads/dflash", "drafter/modern-target")
PARAMETERS = {
    "qwen3-0.6b": 0.60, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "llama-3.2-1b": 1.24,
    "llama-3.1-8b": 8.03, "gemma-3-4b": 4.3, "gpt-oss-20b": 20.9,
}  # fmt: skip
"""Billions of parameters of each target, as published."""
FAST = {("models/qwen3-8b", "heads/dflash"), ("models/qwen3-30b-a3b", "heads/eagle3.1")}
CASES = [
    pytest.param(model, kind, marks=() if (model, kind) in FAST else pytest.mark.slow)
    for model in MODELS
    for kind in KINDS
]
TINY = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "sliding_window": 128, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the sizes in a configuration by tiny ones."""
    small = {name: TINY.get(name, value) for name, value in config.items()}
    return {name: shrink(value) if name.endswith("_config") else value for name, value in small.items()}


def save_stand_in(model: str, folder: Path, stand_ins: Any) -> Path:
    """Save a tiny random model of the architecture of a model file, with a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shrink(read_model(MODELS[model]).config))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(str(stand_ins.target("llama"))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_recipes_plan_offline_and_train_tiny_models(
    model: str, kind: str, stand_ins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["train", kind, model, "--plan"])
    assert result.exit_code == 0, result.output
    for part in ("1 H100", "8 H100", "memory per GPU", "disk", "hours", "measured on one H200"):
        assert part in result.stdout
    recipe: Any = load_training(kind, [model])
    short = model.removeprefix("models/")
    assert recipe.out == f"runs/{short}/{kind.partition('/')[2]}"
    assert recipe.data.source == load_recipe("regenerate/modern-target", [model]).out, "the recipes must fit"  # type: ignore[union-attr]
    target_gb = float(re.findall(r"target ([\d.]+) GB", result.stdout)[0])
    assert target_gb == pytest.approx(2 * PARAMETERS[short], rel=0.02)
    target = save_stand_in(model, tmp_path / "target", stand_ins)
    changes = [f"out={tmp_path / 'out'}", f"data.cache={tmp_path / 'prepared'}", f"data.source={stand_ins.rows}"]
    changes += [f"target={target}", "measure.keep=last", *stand_ins.few]
    if recipe.kind == "heads":
        changes += ["vocabulary.tokens=200"] if recipe.vocabulary else ["num_layers=2", "num_heads=3", "anchors=32"]
    elif recipe.model.config is not None:
        changes += ["model.config.hidden_size=64", "model.config.num_hidden_layers=2"]
    else:
        changes.append(f"model.source={target}")
        changes += ["model.layers=[0, 2]"] if recipe.model.layers else []
    manifest = verify_artifact(run_train(load_training(kind, [model, *changes])))
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1


def test_model_files_are_checked(tmp_path: Path) -> None:
    for words, message in ((["models/qwen3-9b"], "models/qwen3-8b"), (["train.steps"], "key.path=value")):
        with pytest.raises(ValueError, match=message):
            load_training("heads/dflash", words)
    with pytest.raises(ValueError, match="'evaluate'"):
        load_recipe("all-methods", ["models/qwen3-8b"])
    path = tmp_path / "mine.yaml"
    path.write_text("kind: model\ntarget: me/mine\nheads: {num_layers: 3}\n")
    with pytest.raises(ValueError, match="config"):
        load_training("heads/dflash", [str(path)])
    path.write_text(path.read_text() + "config: {model_type: qwen3}\n")
    recipe: Any = load_training("heads/dflash", [str(path), "num_layers=2"])
    assert (recipe.target, recipe.num_layers, recipe.out) == ("me/mine", 2, "runs/mine/dflash")
    assert recipe.data.template_options == {}


@pytest.mark.parametrize("name", MODELS)
def test_model_files_state_template_and_evidence(name: str) -> None:
    head = " ".join(line.removeprefix("# ") for line in MODELS[name].read_text().splitlines() if line[0] == "#")
    for part in (f"draftsmith train RECIPE {name}", "chat template", "thinking", "not measured", "was run"):
        assert part in head or (part == "thinking" and "reasoning" in head), part

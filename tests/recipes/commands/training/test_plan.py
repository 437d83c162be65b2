"""Files, steps, parameters and memory in `train --plan` equal those of the training."""

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.recipes.assemble.artifact import state_folder
from draftsmith.recipes.commands.training import plan as planning
from draftsmith.recipes.commands.training.plan import plan_recipe
from draftsmith.recipes.commands.training.train import make_run
from draftsmith.recipes.schema.loading import load_training
from draftsmith.train.parallel.accelerate import make_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
VARIANTS = {
    "whole": ["model.config.tie_word_embeddings=false"],
    "cut": ["model.config=null", "model.source=SOURCE", "model.layers=[0, 2]"],
    "trimmed": ["model.vocabulary.tokens=48", "model.config.tie_word_embeddings=true"],
    "few tokens": ["model.vocabulary.tokens=48"],
    "trimmed adapter": [
        "model={source: SOURCE, vocabulary: {tokens: 48}, lora: {rank: 64, export: adapter}}",
        "model.config=null",
    ],
    "adapter": ["model.config=null", "model.source=SOURCE", "model.lora.rank=64", "model.lora.export=adapter"],
}


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of 0.6 million parameters with a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES)).save_pretrained(folder)
    shutil.copytree(corpus / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def recipe(drafter_recipe: Path, source: Path) -> Any:
    """Return a function that loads the tiny drafter recipe with a larger model and with the given overrides."""

    def load(*overrides: str) -> Any:
        replaced = [text.replace("SOURCE", str(source)) for text in overrides]
        sizes = [] if any("model.config=" in text for text in replaced) else [f"model.config={json.dumps(SIZES)}"]
        return load_training(str(drafter_recipe), [*sizes, *replaced])

    return load


@pytest.mark.parametrize("variant", VARIANTS)
def test_planned_files_steps_and_parameters_equal_those_of_training(recipe: Any, variant: str):
    if "adapter" in variant:
        pytest.importorskip("peft")
    loaded = recipe("train.steps=5", *VARIANTS[variant])
    plan = plan_recipe(loaded)
    out, accelerator = Path(loaded.out), make_accelerator("no")
    assert not out.exists()
    assert not state_folder(out).exists()
    run = make_run(loaded, accelerator)
    result = run.fit(accelerator)
    checkpoints = list((state_folder(out) / "checkpoints").iterdir())
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in checkpoints]
    assert len(checkpoints) == 2  # of steps 3 and 5
    assert plan.disk["checkpoints"] == pytest.approx(sum(sizes), rel=0.05)
    weights = list(run.task.module.parameters())
    assert plan.size.parameters == sum(p.numel() for p in weights)
    assert plan.size.trained == run.shapes["trained_parameters"]
    assert plan.size.memory["weights"] == sum(p.nbytes for p in weights)
    assert plan.size.memory["gradients"] == sum(p.nbytes for p in weights if p.requires_grad)
    run.save(result)
    assert plan.disk["artifact"] == pytest.approx(
        sum(file.stat().st_size for file in out.glob("*.safetensors")), rel=0.2
    )
    assert plan.steps == result.steps == 5


def test_tokens_and_epochs_follow_the_data(recipe: Any):
    plan = plan_recipe(recipe("train.steps=null", "train.epochs=2"))
    assert plan.epochs is not None
    assert 2 <= plan.epochs < 2 + 4 / (plan.steps * 4 / plan.epochs)  # the number of steps is rounded up
    assert plan.tokens <= plan.steps * 4 * 64
    assert plan.evaluations == 1
    more = plan_recipe(recipe("train.evaluate_every=5", "train.steps=12"))
    assert more.evaluations == 4  # before training and after steps 5, 10 and 12
    assert more.seconds == pytest.approx(12 * more.probe.step_seconds + 4 * more.probe.evaluation_seconds)


def test_plans_that_exceed_memory_or_disk_are_refused(recipe: Any, monkeypatch: pytest.MonkeyPatch):
    many = ["train.save_every=1", "train.steps=6", "train.keep_checkpoints=4"]
    plan = plan_recipe(recipe(*many))
    checkpoint = plan.disk["checkpoints"] // 5
    free = checkpoint * 3 + plan.disk["artifact"]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: usage(free, 0, free))
    needed = planning.gigabytes(checkpoint * 5 + plan.disk["artifact"])
    with pytest.raises(ValueError, match=f"{needed}.*{planning.gigabytes(free)}.*train.keep_checkpoints"):
        plan_recipe(recipe(*many))
    assert plan_recipe(recipe(*many[:2], "train.keep_checkpoints=2")).steps == 6

    monkeypatch.setattr(planning, "_least_free", lambda accelerator: 1_000_000)
    with pytest.raises(ValueError, match=r"1\.00 MB are free.*weights .*teacher\.cache"):
        plan_recipe(recipe(*many))


def test_heads_are_planned_and_a_table_is_refused(
    drafter_recipe: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = yaml.safe_load(drafter_recipe.read_text())
    path = tmp_path / "heads.yaml"
    heads = {"kind": "heads", "out": str(tmp_path / "heads"), "target": str(source), "num_heads": 3}
    heads |= {key: content[key] for key in ("data", "train")} | {"measure": {"prompts": 2, "new_tokens": 4}}
    path.write_text(yaml.safe_dump(heads))
    plan = plan_recipe(load_training(str(path)))
    assert plan.size.trained == 3 * (128 * 128 + 128 + 320 * 128)
    weights = AutoModelForCausalLM.from_pretrained(source).parameters()
    assert plan.size.target_parameters == sum(p.numel() for p in weights)
    assert plan.disk["artifact"] == pytest.approx(4 * plan.size.trained, rel=0.1)
    dflash = ["architecture=dflash", "num_layers=2", "anchors=5"]
    plan = plan_recipe(load_training(str(path), dflash))
    layer = 128 * (4 * 128 + 3 * 256) + 2 * 128 + 2 * 64
    assert plan.size.trained == plan.size.parameters == 2 * layer + 128 * 128 + 2 * 128
    assert plan.disk["artifact"] == pytest.approx(4 * plan.size.trained, rel=0.1)
    planning.show(plan)
    assert re.search("20 +up to 5 blocks of 4 tokens", capsys.readouterr().out)
    with pytest.raises(ValueError, match="prepare"):
        plan_recipe(load_training(str(path), [f"hidden.cache={tmp_path / 'cache'}"]))
    path.write_text(yaml.safe_dump({"kind": "table", "out": "t", "tokenizer": str(source), "data": content["data"]}))
    with pytest.raises(ValueError, match="--plan"):
        plan_recipe(load_training(str(path)))


def test_planning_writes_prepared_data_only(drafter_recipe: Path, tmp_path: Path, source: Path, capsys: Any):
    before = set(tmp_path.rglob("*"))
    overrides = [f"model={{source: {source}}}", f"target={source}", "objective={forward-kl: 1.0}", "measure.prompts=2"]
    overrides += ["on_policy={share: 0.5, new_tokens: 8}", "measure.new_tokens=8"]
    weights = (source / "model.safetensors").read_bytes()
    planning.show(plan_recipe(load_training(str(drafter_recipe), overrides)))
    output = capsys.readouterr().out
    for part in ("memory at least", "AdamW moments", "target", "artifact", "steps", "s per step", "extrapolated"):
        assert part in output
    new = set(tmp_path.rglob("*")) - before
    assert {path.relative_to(tmp_path).parts[0] for path in new} == {"prepared"}
    assert (source / "model.safetensors").read_bytes() == weights

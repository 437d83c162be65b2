"""Training on a real target's answers generalises to held-out answers."""

import json
from pathlib import Path

import pytest
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.training import DrafterRecipe

SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}


@pytest.mark.slow
@pytest.mark.shared
def test_agreement_with_held_out_answers_of_vicuna_rises(shared_data: Path, tmp_path: Path) -> None:
    model = {"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 2} | SMALL
    changes = [
        f"data.source={shared_data / 'instruct' / 'alpaca_eval' / 'vicuna-7b-v1.3.json'}",
        f"tokenizer={shared_data / 'tokenizer' / 'llama2c'}",
        "target=null", "model.source=null", f"model.config={json.dumps(model)}", f"out={tmp_path / 'drafter'}",
        f"data.cache={tmp_path / 'prepared'}", "data.block_tokens=512", "data.heldout_share=0.1", "train.steps=40",
        "train.global_batch=4", "train.micro_batch=4", "train.precision=no", "train.learning_rate=1e-3",
        "train.evaluate_every=10", "train.save_every=0",
    ]  # fmt: skip
    recipe = load_recipe("drafter/vicuna-68m", changes)
    assert isinstance(recipe, DrafterRecipe)
    run_train(recipe)
    log = [json.loads(line) for line in (tmp_path / "drafter.state" / "log.jsonl").read_text().splitlines()]
    start, *later = points = [line["evaluation"] for line in log if "evaluation" in line]
    assert start["top1_accuracy"] < 0.01, "32,000 tokens, untrained"
    assert later[-1]["top1_accuracy"] > 0.05
    assert later[-1]["top5_accuracy"] > 0.1
    losses = [point["heldout_loss"] for point in points]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 2

"""Every shipped drafter recipe takes a few steps with tiny models of the same families, and leaves what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import DrafterRecipe
from transformers import PreTrainedModel

DRAFTERS = sorted(name for name in shipped_recipes() if name.startswith("drafter/"))
SAME = [
    f"drafter/vicuna-{names}" for names in ("68m-from-13b", "68m-from-33b", "160m-from-13b", "160m-from-33b", "160m")
]
"""Which differ from others in the names of models alone."""


def stand_in(recipe: DrafterRecipe, models: Any) -> list[str]:
    """Changes that put tiny models in the place of a recipe's own."""
    changes = [f"data.source={models.rows}"]
    if recipe.model.source is not None:
        find = models.target if recipe.model.layers else models.drafter
        changes.append(f"model.source={find(recipe.model.source)}")
    else:
        changes += ["model.config.hidden_size=16", "model.config.intermediate_size=32"]
        changes += ["model.config.num_attention_heads=2"]
    assert recipe.target is not None
    return [*changes, f"target={models.target(recipe.target)}"]


@pytest.mark.parametrize("name", sorted({*DRAFTERS} - {*SAME}))
def test_it_leaves_a_drafter_for_its_target(name: str, stand_ins: Any, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, DrafterRecipe)
    changes = [*stand_in(recipe, stand_ins), f"out={tmp_path / 'out'}", f"data.cache={tmp_path / 'prepared'}"]
    small = load_recipe(name, [*changes, *stand_ins.few])
    assert isinstance(small, DrafterRecipe)
    out = run_train(small)
    manifest = load_manifest(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    assert 0 <= manifest.evaluation["overlap"] <= 1
    drafter = load_model(str(out))
    assert isinstance(drafter, PreTrainedModel)
    assert drafter.get_output_embeddings().weight.shape[0] == 320
    settings = drafter.generation_config
    if (out / "config.json").is_file():
        assert (settings.num_assistant_tokens, settings.assistant_confidence_threshold) == (4, 0)
    else:  # an adapter, whose model's settings are read
        assert manifest.shapes["base_model"] == str(stand_ins.drafter(recipe.model.source))
    assert '"PreTrainedTokenizerFast"' in (out / "tokenizer_config.json").read_text(), "as older readers take it"
    expected_layers = len(recipe.model.layers) or 2
    assert drafter.config.num_hidden_layers == expected_layers
    if recipe.model.config is not None:
        assert drafter.config.max_position_embeddings == 512, "as many as the target has"
    if recipe.model.source is not None and not recipe.model.layers:
        start = load_model(str(stand_ins.drafter(recipe.model.source)))
        pairs = zip(drafter.state_dict().values(), start.state_dict().values(), strict=True)
        changed = [not torch.equal(mine.float(), theirs.float()) for mine, theirs in pairs]
        assert any(changed) or manifest.training["kept_step"] == 0


def test_head_comment_gives_command_hardware_and_cost() -> None:
    for name, path in shipped_recipes().items():
        if name.startswith(("drafter/", "heads/")):
            text = path.read_text(encoding="utf-8")
            head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
            assert f"draftsmith train {name}" in head, name
            assert "GB" in head, name
            assert any(word in head for word in ("estimated", "not measured", "measured on")), name
            assert max(map(len, text.splitlines())) <= 120, name

"""Every shipped training recipe writes a usable artifact after a few steps with tiny models of the same families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.heads.dflash import load_dflash
from draftsmith.checkpoints.heads.eagle import load_eagle
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode_batch
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.dflash import DFlashDrafter
from draftsmith.decode.models.eagle import EagleDrafter
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.acceptance import heads_measure
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.heads import BASE
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, load_training, shipped_recipes
from draftsmith.recipes.schema.training import DrafterRecipe, HeadsRecipe

SAME = {"drafter/vicuna-160m"}
"""Recipes that differ from other recipes only in names and numbers."""
DRAFTERS, HEADS = ([name for name in shipped_recipes() if name.startswith(kind)] for kind in ("drafter/", "heads/"))
AUXILIARY: dict[str, tuple[Any, ...]] = {
    "heads/eagle3": (load_eagle, EagleDrafter, "vocabulary.tokens=200"),
    "heads/eagle3.1": (load_eagle, EagleDrafter, "vocabulary.tokens=200"),
    "heads/dflash": (load_dflash, DFlashDrafter, "anchors=64"),
}
"""Function that loads the heads, class of the drafter, and change of the recipe by recipe."""
RUNS = [(name, ()) for name in HEADS if name not in (*SAME, *AUXILIARY)]
RUNS += [("heads/vicuna-medusa-1", ("num_heads=3",))]


def output_options(stand_ins: Any, folder: Path) -> list[str]:
    return [f"out={folder / 'out'}", f"data.cache={folder / 'prepared'}", f"data.source={stand_ins.rows}"]


def small_heads(name: str, stand_ins: Any, folder: Path, *changes: str) -> HeadsRecipe:
    """Load a shipped recipe with tiny models and three training steps."""
    recipe = load_training(name, changes)
    assert isinstance(recipe, HeadsRecipe)
    overrides = [*output_options(stand_ins, folder), f"target={stand_ins.target(recipe.target)}", "measure.keep=last"]
    if recipe.measure.table is not None:  # count the table with the shipped table recipe
        tokenizer = f"tokenizer={stand_ins.target('lmsys/vicuna-7b-v1.3')}"
        table = load_training("table/vicuna-lmsys", [*output_options(stand_ins, folder / "table"), tokenizer])
        overrides.append(f"measure.table={run_train(table)}")
    shipped = load_training(name, [*overrides, *stand_ins.few, *changes])
    assert isinstance(shipped, HeadsRecipe)
    return shipped


@pytest.mark.parametrize("name", AUXILIARY)
def test_eagle_and_dflash_recipes_give_lossless_drafters(name: str, stand_ins: Any, tmp_path: Path) -> None:
    load, drafter, change = AUXILIARY[name]
    recipe = small_heads(name, stand_ins, tmp_path, change)
    out = run_train(recipe)
    manifest = verify_artifact(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    target: Any = load_model(recipe.target, dtype=torch.float32)
    heads = load(out, torch.float32)
    heads.attach(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    scorer, greedy, limits = wrap_model(target, aux_layers=heads.layers), Sampling(temperature=0.0), Limits(24, ())
    parts = Parts(drafter=drafter(heads.requires_grad_(False)))
    ways = build_method("speculative", parts, greedy), build_method("autoregressive", parts, greedy)
    for prompt in ([1, 20, 30], [1, 7, 300, 5, 9]):
        actual, expected = (decode_batch(scorer, way, greedy, 0, [prompt], limits)[0] for way in ways)
        assert actual.ids == expected.ids


@pytest.mark.parametrize("name", sorted({*DRAFTERS} - SAME))
def test_drafter_recipes_give_a_drafter_for_the_target(name: str, stand_ins: Any, tmp_path: Path) -> None:
    recipe = load_training(name)
    assert isinstance(recipe, DrafterRecipe)
    changes = [*output_options(stand_ins, tmp_path), f"target={stand_ins.target(recipe.target)}", *stand_ins.few]
    if recipe.model.source is not None:
        find = stand_ins.target if recipe.model.layers else stand_ins.drafter
        changes.append(f"model.source={find(recipe.model.source)}")
    else:
        changes += [f"model.config.{size}" for size in ("hidden_size=16", "intermediate_size=32")]
        changes.append("model.config.num_attention_heads=2")
    out = run_train(load_training(name, changes))
    manifest = load_manifest(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    assert 0 <= manifest.evaluation["overlap"] <= 1
    drafter: Any = load_model(str(out))
    assert drafter.get_output_embeddings().weight.shape[0] == 320
    settings = drafter.generation_config
    if (out / "config.json").is_file():
        assert (settings.num_assistant_tokens, settings.assistant_confidence_threshold) == (4, 0)
    else:  # an adapter, which uses the settings of its base model
        assert manifest.shapes["base_model"] == str(stand_ins.drafter(recipe.model.source))
    assert '"PreTrainedTokenizerFast"' in (out / "tokenizer_config.json").read_text(), "readable by transformers 4"
    assert drafter.config.num_hidden_layers == (len(recipe.model.layers) or 2)
    if recipe.model.config is not None:
        assert drafter.config.max_position_embeddings == 512, "the context length of the target"


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_heads_recipes_give_lossless_heads(name: str, changes: tuple[str, ...], stand_ins: Any, tmp_path: Path) -> None:
    recipe = small_heads(name, stand_ins, tmp_path, *changes)
    out = run_train(recipe)
    manifest = verify_artifact(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    assert manifest.evaluation["slim_tokens_per_step"] >= 1
    assert [f"head{k}_top1" in manifest.evaluation for k in range(recipe.num_heads + 1)][-2:] == [True, False]
    heads = load_heads(out, dtype=torch.float32)  # ties of 16-bit logits may be resolved differently in a tree
    assert (heads.num_heads, heads.num_layers) == (recipe.num_heads, recipe.num_layers)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in heads.state_dict().values())
    source = out / BASE if recipe.base is not None else Path(recipe.target)
    target: Any = load_model(str(source), dtype=torch.float32)
    before = load_model(recipe.target, dtype=torch.bfloat16).state_dict()
    start = before["lm_head.weight"].float()
    assert not any(torch.equal(heads.projection(k), start) for k in range(recipe.num_heads)), "a head was not trained"
    changed = {name for name, tensor in target.state_dict().items() if not torch.equal(tensor.bfloat16(), before[name])}
    assert (len(changed) > 0) == (recipe.base is not None)
    table = None if recipe.measure.table is None else BigramTable.load(Path(recipe.measure.table))
    parts = Parts(heads=heads, table=table or BigramTable.from_documents([], 320))
    scorer, greedy, limits = wrap_model(target), Sampling(temperature=0.0), Limits(24, ())
    plain = build_method("autoregressive", parts, greedy)
    for method, options in (("medusa", {"tree": recipe.measure.tree}), ("slim-s", {"num_sequences": 8})):
        ways = build_method(method, parts, greedy, **options), plain
        for prompt in ([1, 20, 30], [1, 7, 300, 5, 9]):
            actual, expected = (decode_batch(scorer, way, greedy, 0, [prompt], limits)[0] for way in ways)
            assert actual.ids == expected.ids, method


def test_slim_is_measured_without_a_table(stand_ins: Any, tmp_path: Path) -> None:
    """Each of three heads that always predict correctly adds one accepted token per step."""
    changes = "num_heads=3", "measure.tree=1x1x1", "measure.new_tokens=16"
    recipe = small_heads("heads/any-target", stand_ins, tmp_path, *changes)
    assert recipe.measure.table is None
    tokenizer, target = load_tokenizer(recipe.target), load_model(recipe.target, dtype=torch.float32)
    with torch.no_grad():  # all texts have the same hidden state and thus the same next token
        target.get_input_embeddings().weight.copy_(torch.linspace(-1, 1, 16).expand(320, -1))
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), 3, 1)
    shares = heads(target.model(torch.tensor([[1, 2]])).last_hidden_state[:, -1]).softmax(-1)
    assert shares.max() < 0.1, "probabilities must be small, so that wide trees are preferred to deep ones"
    metrics = heads_measure(recipe, target, tokenizer, prepare_data(recipe.data, tokenizer))(heads)
    assert metrics["tokens_per_step"] == metrics["slim_tokens_per_step"] == 4


def test_the_two_commands_of_self_distillation(stand_ins: Any, tmp_path: Path, logged: Any) -> None:
    target, answers = stand_ins.target("lmsys/vicuna-7b-v1.3"), tmp_path / "answers.jsonl"
    changes = [f"out={answers}", f"source={stand_ins.rows}", f"target={target}"]
    # a random model rarely ends an answer, and its most likely token may not be a word
    short = ["limit=40", "max_new_tokens=12", "on_length=keep", "temperature=1", "device=cpu"]
    run_regenerate(load_recipe("regenerate/vicuna-7b", [*changes, *short]))  # type: ignore[arg-type]
    assert len(answers.read_text().splitlines()) == 40
    shipped: Any = load_training("heads/self-distil")
    assert shipped.data.source == load_recipe("regenerate/vicuna-7b").out, "the recipes must use the same file"
    recipe = small_heads("heads/self-distil", stand_ins, tmp_path, f"data.source={answers}")
    run_train(recipe)
    losses = logged(recipe.out)
    assert len(losses) == 3
    assert 0 < losses[0] < 1, "the divergence of new heads, which predict the next token of the target"


@pytest.mark.parametrize("name", [*DRAFTERS, *HEADS])
def test_head_comment_gives_command_hardware_and_cost(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert f"draftsmith train {name}" in head
    assert "GB" in head
    assert any(word in head for word in ("estimated", "not measured", "measured on"))
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('measure.tree="0, 0.0, 0.0.0, 0.0.0.0, 0.0.0.0.0, 0.0.0.0.0.0"', "5 levels, got 6"),
        ("measure.tree=axb", "'axb'"),
        ("measure.table=/nowhere/table", "/nowhere/table"),
    ],
)
def test_unmeasurable_tree_is_refused_before_the_data_is_read(change: str, message: str, tmp_path: Path) -> None:
    common = ["data.source=/nowhere", f"target={tmp_path}", f"out={tmp_path / 'out'}"]
    with pytest.raises(ValueError, match=message):
        run_train(load_training("heads/vicuna-medusa-1", [*common, change]))

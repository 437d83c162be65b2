"""Every shipped recipe for prediction heads takes a few steps with tiny models of the same families, and leaves heads
with which decoding is lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.assemble.acceptance import heads_measure
from draftsmith.recipes.assemble.data import prepare_data
from draftsmith.recipes.assemble.heads import BASE
from draftsmith.recipes.commands.regenerate import run_regenerate
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import load_recipe, shipped_recipes
from draftsmith.recipes.schema.training import HeadsRecipe
from transformers import PreTrainedModel

HEADS = sorted(name for name in shipped_recipes() if name.startswith("heads/"))
SAME = [f"heads/vicuna-{size}-medusa-1" for size in ("13b", "33b")]
"""Which differ from others in names and numbers alone."""
RUNS = [(name, ()) for name in sorted({*HEADS} - {*SAME})] + [("heads/vicuna-7b-medusa-1", ("num_heads=3",))]


def count_table(stand_ins: Any, folder: Path) -> Path:
    """The table that a recipe measures with, by its own recipe."""
    target = stand_ins.target("lmsys/vicuna-7b-v1.3")
    place = [f"out={folder / 'table'}", f"tokenizer={target}", f"data.cache={folder / 'prepared'}"]
    return run_train(load_recipe("table/vicuna-lmsys", [*place, f"data.source={stand_ins.rows}"]))  # type: ignore[arg-type]


def small(name: str, stand_ins: Any, folder: Path, *changes: str) -> HeadsRecipe:
    """A shipped recipe with tiny models in the place of its own, and three steps."""
    recipe = load_recipe(name, changes)
    assert isinstance(recipe, HeadsRecipe)
    place = [f"out={folder / 'out'}", f"data.cache={folder / 'prepared'}", f"data.source={stand_ins.rows}"]
    place += [f"target={stand_ins.target(recipe.target)}", "measure.keep=last"]
    if recipe.measure.table is not None:
        place.append(f"measure.table={count_table(stand_ins, folder)}")
    found = load_recipe(name, [*place, *stand_ins.few, *changes])
    assert isinstance(found, HeadsRecipe)
    return found


def check_lossless(target: PreTrainedModel, parts: Parts, tree: str, prompts: list[list[int]]) -> None:
    """Medusa and SLiM give the target's own greedy tokens."""
    scorer, greedy, limits = wrap_model(target), Sampling(temperature=0.0), Limits(24, ())
    plain = build_method("autoregressive", parts, greedy)
    for name, options in (("medusa", {"tree": tree}), ("slim-s", {"sequences": 8})):
        method = build_method(name, parts, greedy, **options)
        for prompt in prompts:
            found, expected = (decode(scorer, way, greedy, 0, prompt, limits) for way in (method, plain))
            assert found.ids == expected.ids, name


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_it_leaves_heads_that_decode_losslessly(
    name: str, changes: tuple[str, ...], stand_ins: Any, tmp_path: Path
) -> None:
    recipe = small(name, stand_ins, tmp_path, *changes)
    out = run_train(recipe)
    manifest = verify_artifact(out)
    assert manifest.training["steps"] == 3
    assert manifest.evaluation["tokens_per_step"] >= 1
    assert manifest.evaluation["slim_tokens_per_step"] >= 1
    heads = load_heads(out, dtype=torch.float32)  # ties of 16 bits would fall otherwise in a tree than in a chain
    assert (heads.num_heads, heads.num_layers) == (recipe.num_heads, recipe.num_layers)
    assert (heads.vocab_size, heads.hidden_size) == (320, 16)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in heads.state_dict().values())
    source = out / BASE if recipe.base is not None else Path(recipe.target)
    if recipe.base is not None:
        assert '"PreTrainedTokenizerFast"' in (source / "tokenizer_config.json").read_text(), "as older readers take it"
    target = load_model(str(source), dtype=torch.float32)
    assert isinstance(target, PreTrainedModel)
    assert [f"head{k}_top1" in manifest.evaluation for k in range(recipe.num_heads + 1)][-2:] == [True, False]
    before = load_model(recipe.target, dtype=torch.bfloat16).state_dict()
    start = before["lm_head.weight"].float()
    assert not any(torch.equal(heads.projection(k), start) for k in range(recipe.num_heads)), "all heads have learnt"
    changed = {name for name, tensor in target.state_dict().items() if not torch.equal(tensor.bfloat16(), before[name])}
    assert len(changed) > 0 if recipe.base is not None else not changed
    table = None if recipe.measure.table is None else BigramTable.load(Path(recipe.measure.table))
    parts = Parts(heads=heads, table=table or BigramTable.from_documents([], 320))
    check_lossless(target, parts, recipe.measure.tree, [[1, 20, 30], [1, 7, 300, 5, 9]])


def test_slim_is_measured_without_a_table(stand_ins: Any, tmp_path: Path) -> None:
    """Heads that are always right are worth a token each, however unsure they are of it."""
    recipe = small(
        "heads/any-target", stand_ins, tmp_path, "num_heads=3", "measure.tree=1x1x1", "measure.new_tokens=16"
    )
    assert recipe.measure.table is None
    tokenizer, target = load_tokenizer(recipe.target), load_model(recipe.target, dtype=torch.float32)
    assert isinstance(target, PreTrainedModel)
    with torch.no_grad():  # every text has one and the same hidden state, and so one and the same next token
        target.get_input_embeddings().weight.copy_(torch.linspace(-1, 1, 16).expand(320, -1))
    heads = PredictionHeads.from_lm_head(target.lm_head.weight.detach(), 3, 1)
    shares = heads(target.model(torch.tensor([[1, 2]])).last_hidden_state[:, -1]).softmax(-1)
    assert shares.max() < 0.1, "so that one more level is less likely than one more candidate"
    found = heads_measure(recipe, target, tokenizer, prepare_data(recipe.data, tokenizer))(heads)
    assert found["tokens_per_step"] == found["slim_tokens_per_step"] == 4


def test_the_two_commands_of_self_distillation(stand_ins: Any, tmp_path: Path, logged: Any) -> None:
    target = stand_ins.target("lmsys/vicuna-7b-v1.3")
    answers = tmp_path / "answers.jsonl"
    changes = [f"out={answers}", f"source={stand_ins.rows}", f"target={target}"]
    # a model of random weights never ends an answer by itself, and its first choice may be no word
    short = ["limit=40", "max_new_tokens=12", "on_length=keep", "temperature=1", "device=cpu"]
    run_regenerate(load_recipe("regenerate/vicuna-7b", [*changes, *short]))  # type: ignore[arg-type]
    assert len(answers.read_text().splitlines()) == 40
    recipe = small("heads/self-distil", stand_ins, tmp_path, f"data.source={answers}")
    shipped = load_recipe("heads/self-distil")
    regenerated = load_recipe("regenerate/vicuna-7b")
    assert isinstance(shipped, HeadsRecipe)
    assert shipped.data.source == regenerated.out, "one command reads what the other writes"
    assert recipe.distils
    manifest = load_manifest(run_train(recipe))
    losses = logged(recipe.out)
    assert len(losses) == 3
    assert 0 < losses[0] < 1, "the divergence from the target's next token, of heads that begin as its projection"
    assert manifest.recipe["objective"] == {"forward-kl": 1.0}


def test_unmeasurable_tree_is_refused_before_the_data_is_read(tmp_path: Path) -> None:
    common = ["data.source=/nowhere", f"target={tmp_path}", f"out={tmp_path / 'out'}"]
    for change, message in (
        ('measure.tree="0, 0.0, 0.0.0, 0.0.0.0, 0.0.0.0.0, 0.0.0.0.0.0"', "6 .* 5 heads"),
        ("measure.tree=axb", "'axb'"),
        ("measure.table=/nowhere/table", "/nowhere/table"),
    ):
        recipe = load_recipe("heads/vicuna-7b-medusa-1", [*common, change])
        with pytest.raises(ValueError, match=message):
            run_train(recipe)  # type: ignore[arg-type]

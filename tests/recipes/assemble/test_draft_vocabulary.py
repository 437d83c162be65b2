"""Draft vocabularies of drafters and heads in training, loading, decoding and export."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY, HEADS_FILE
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.decode.models.draft_vocabulary import kept_tokens
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.data import Prepared
from draftsmith.recipes.assemble.drafter import frequent_tokens
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe
from safetensors.torch import load_file

TOKENS = 60


def test_the_most_frequent_tokens_are_trained_and_proposed(
    tiny_drafter: Callable[[Path], dict[str, Any]], tiny_pair: Path, logged: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe = tiny_drafter(tmp_path) | {"target": str(tiny_pair / "target"), "objective": {"lk-lambda": 1.0}}
    recipe["model"] = {"source": str(tiny_pair / "drafter"), "vocabulary": {"tokens": TOKENS}}
    recipe["measure"] = {"prompts": 2, "new_tokens": 4}
    run_train(parse_recipe(recipe, "the test's recipe"))
    out = Path(recipe["out"])
    ids_R = kept_tokens(load_model(str(out)))
    assert ids_R is not None
    assert ids_R.tolist() == load_file(out / DRAFT_VOCABULARY)["d2t"].tolist()
    (data,) = (PreparedData.load(path.parent) for path in (tmp_path / "prepared").rglob("train/data.json"))
    labels_BT = data.batch(range(data.blocks)).labels_BT
    often = Counter(labels_BT[labels_BT >= 0].tolist())
    assert set(ids_R.tolist()) == set(sorted(range(320), key=lambda token: (-often[token], token))[:TOKENS])
    verify_artifact(out)
    before, after = load_model(str(tiny_pair / "drafter")), load_model(str(out))
    assert logged(out)[0] > 0
    changed_V = (before.lm_head.weight != after.lm_head.weight).any(1)
    assert changed_V[ids_R].all()
    assert not changed_V[torch.isin(torch.arange(320), ids_R, invert=True)].any()

    again = recipe | {"out": str(tmp_path / "again"), "model": {"source": str(out)}}
    run_train(parse_recipe(again, "the test's recipe"))
    assert torch.equal(kept_tokens(load_model(again["out"])), ids_R), "further training must keep the draft vocabulary"


def test_heads_propose_only_the_most_frequent_tokens(
    tiny_drafter: Callable[[Path], dict[str, Any]], tiny_pair: Path, tmp_path: Path
) -> None:
    """Exports for other engines keep all rows of the projection."""
    recipe: dict[str, Any] = tiny_drafter(tmp_path)
    del recipe["tokenizer"], recipe["model"]
    target = str(tiny_pair / "target")
    heads = {"kind": "heads", "out": str(tmp_path / "heads"), "target": target, "num_heads": 2, "projection": "target"}
    recipe |= heads | {"vocabulary": {"tokens": TOKENS}, "measure": {"prompts": 2, "new_tokens": 4}}
    run_train(parse_recipe(recipe, "the test's recipe"))
    out = Path(recipe["out"])
    manifest, faults = find_faults(out)
    assert faults == []
    assert manifest is not None
    assert manifest.shapes["proposed_tokens"] == TOKENS
    matrix_VD = load_model(target).lm_head.weight.detach()
    loaded, hidden_XD = load_heads(out, lm_head=matrix_VD), torch.randn(3, matrix_VD.shape[1])
    ids_R = load_file(out / HEADS_FILE)["d2t"]
    (data,) = (PreparedData.load(path.parent) for path in (tmp_path / "prepared").rglob("train/data.json"))
    assert torch.equal(ids_R, frequent_tokens(TOKENS, 320, Prepared(data, data, tmp_path, {}), "heads"))
    with torch.inference_mode():
        logits_XKV = loaded(hidden_XD)
        whole_XKV = load_heads(out, lm_head=matrix_VD).propose(None)(hidden_XD)
    assert torch.equal(logits_XKV[..., ids_R], whole_XKV[..., ids_R])
    others_V = torch.isin(torch.arange(320), ids_R, invert=True)
    assert torch.isneginf(logits_XKV[..., others_V]).all()
    assert whole_XKV.isfinite().all()
    export_artifact(out, "medusa", tmp_path / "medusa", FORMATS, ExportOptions())
    exported = load_heads(tmp_path / "medusa")
    assert exported.proposed is None
    assert torch.equal(exported.projection(0), matrix_VD)
    with pytest.raises(ValueError, match=r"320.*321"):
        run_train(parse_recipe(recipe | {"out": str(tmp_path / "b"), "vocabulary": {"tokens": 321}}, "the test's"))


def test_encoder_decoders_have_whole_output_layers(
    tiny_drafter: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    recipe = tiny_drafter(tmp_path)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
    recipe["model"] = {"config": {"model_type": "t5"} | sizes, "vocabulary": {"tokens": 4}}
    recipe["data"] |= {"template": "t5"}
    with pytest.raises(ValueError, match=r"`model\.vocabulary`"):
        run_train(parse_recipe(recipe, "the test's recipe"))

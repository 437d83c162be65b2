"""Drafters with less than a whole output layer: trained, stopped and resumed, loaded, decoded with, exported."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.export.base import ExportOptions, export_artifact
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.decode.models.draft_vocabulary import LowRankHead, factorise, keep_tokens, kept_tokens
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe
from draftsmith.train.parallel.interrupts import Interrupted
from draftsmith.train.tasks.drafter import DrafterModule
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOKENS = 60


def test_the_most_frequent_tokens_are_learnt_and_proposed(
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
    assert torch.equal(kept_tokens(load_model(again["out"])), ids_R), "a drafter goes on with its own vocabulary"


def stopping(forward: Callable[..., Any], at: int) -> Callable[..., Any]:
    """A forward that in one of its calls has Ctrl-C pressed."""
    calls = iter(range(1, 1000))

    def counted(*arguments: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*arguments)

    return counted


@pytest.mark.parametrize("vocabulary", [{"rank": 5}, {"rank": 5, "tokens": TOKENS}])
def test_factors_are_learnt(
    vocabulary: dict[str, int],
    tiny_drafter: Callable[[Path], dict[str, Any]],
    tiny_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that ends early and goes on ends with the same weights; what others read is their product."""

    def run(name: str) -> Path:
        recipe = tiny_drafter(tmp_path) | {"target": str(tiny_pair / "target"), "objective": {"lk-lambda": 1.0}}
        recipe |= {
            "model": {"source": str(tiny_pair / "drafter"), "vocabulary": vocabulary},
            "out": str(tmp_path / name),
        }
        recipe |= {"measure": {"prompts": 2, "new_tokens": 4}}
        run_train(parse_recipe(recipe, "the test's recipe"))
        return Path(recipe["out"])

    out = run("whole")
    manifest, faults = find_faults(out)
    assert faults == []
    assert manifest is not None
    assert {key: manifest.shapes.get(key) for key in ("output_rank", "proposed_tokens")} == {
        "output_rank": 5, "proposed_tokens": vocabulary.get("tokens")
    }  # fmt: skip
    model, plain = load_model(str(out)), AutoModelForCausalLM.from_pretrained(out)
    head = model.get_output_embeddings()
    assert isinstance(head, LowRankHead)
    torch.testing.assert_close(plain.get_output_embeddings().weight, head.weight @ head.inner.weight, rtol=0, atol=1e-6)
    start = load_model(str(tiny_pair / "drafter"))
    if (ids_R := kept_tokens(model)) is not None:
        keep_tokens(start, ids_R)
    factorise(start, 5)
    first = start.get_output_embeddings()
    assert not torch.equal(first.inner.weight, head.inner.weight)
    assert not torch.equal(first.weight, head.weight)
    with monkeypatch.context() as patch:
        patch.setattr(DrafterModule, "forward", stopping(DrafterModule.forward, 13))  # of two a step
        with pytest.raises(Interrupted):
            run("halted")
    resumed = load_model(str(run("halted"))).state_dict()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in model.state_dict().items())
    exported = tmp_path / "exported"
    export_artifact(out, "vllm-sglang", exported, FORMATS, ExportOptions())
    assert find_faults(exported)[1] == []
    made = AutoModelForCausalLM.from_pretrained(exported).get_output_embeddings().weight
    kept = slice(None) if ids_R is None else ids_R
    assert torch.equal(made[kept], plain.get_output_embeddings().weight[kept])


def test_encoder_decoders_have_whole_output_layers(
    tiny_drafter: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    recipe = tiny_drafter(tmp_path)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
    recipe["model"] = {"config": {"model_type": "t5"} | sizes, "vocabulary": {"rank": 4}}
    recipe["data"] |= {"template": "t5"}
    with pytest.raises(ValueError, match=r"`model\.vocabulary`"):
        run_train(parse_recipe(recipe, "the test's recipe"))

"""Parallel drafters (PARD) in training, decoding and export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export.base import SERVING_FILE, ExportOptions, export_artifact
from draftsmith.checkpoints.storage.draft_vocabulary import mask_token
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import load_model, wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.artifacts.export import FORMATS
from draftsmith.recipes.commands.serving.engines import commands_of
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [20, 21, 22]]


def test_a_recipe_trains_a_lossless_parallel_drafter(
    tiny_drafter: Callable[[Path], dict[str, Any]], tiny_pair: Path, tmp_path: Path
) -> None:
    recipe = tiny_drafter(tmp_path) | {"target": str(tiny_pair / "target"), "objective": {"lk-lambda": 1.0}}
    recipe["model"] = {"source": str(tiny_pair / "drafter"), "vocabulary": {"tokens": 60}}
    recipe |= {"measure": {"prompts": 2, "new_tokens": 4}, "parallel": {"tokens": 4}}
    run_train(parse_recipe(recipe, "the test's recipe"))
    drafter = load_model(recipe["out"])
    (data,) = (PreparedData.load(path.parent) for path in (tmp_path / "prepared").rglob("train/data.json"))
    counts = data.token_counts(trained=False)
    token = mask_token(drafter.config)
    assert token is not None
    assert token >= len(counts) or counts[token] == counts.min()

    target_model = load_model(str(tiny_pair / "target"))
    target, limits = wrap_model(target_model), Limits(20)
    for gamma in (1, 3):
        method = build_method("speculative", Parts(wrap_model(drafter)), Sampling(), gamma=gamma, parallel=True)
        texts: list[list[int]] = [[] for _ in PROMPTS]
        for step in generate(target, *method, PROMPTS, limits, Sampling(), Rng.for_rows(0, len(PROMPTS))):
            assert step.nodes == 1 + gamma
            for text, new in zip(texts, step.new_ids, strict=True):
                text += new
        for prompt, text in zip(PROMPTS, texts, strict=True):
            ids = torch.tensor([prompt])
            plain = target_model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert text == plain[0, len(prompt) :].tolist()

    out = tmp_path / "served"
    options = ExportOptions(target=str(tiny_pair / "target"))
    export_artifact(Path(recipe["out"]), "vllm-sglang", out, FORMATS, options)
    assert '"parallel_drafting": true' in (out / SERVING_FILE).read_text()
    assert any('"parallel_drafting": true' in word for word in commands_of(out, "vllm")[0])


def test_a_drafter_without_mask_token_is_refused(tiny_pair: Path) -> None:
    parts = Parts(wrap_model(load_model(str(tiny_pair / "drafter"))))
    with pytest.raises(ValueError, match="pard_token"):
        build_method("speculative", parts, Sampling(), parallel=True)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [({"tokens": 1}, r"parallel\.tokens"), ({"token": 320}, "320"), ({"keep_share": 0.0}, r"parallel\.keep_share")],
    ids=str,
)
def test_invalid_recipes_are_refused(
    tiny_drafter: Callable[[Path], dict[str, Any]], tmp_path: Path, parallel: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        run_train(parse_recipe(tiny_drafter(tmp_path) | {"parallel": parallel}, "the test's recipe"))

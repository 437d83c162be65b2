"""A drafter that proposes the most frequent tokens alone: trained, stopped and resumed, loaded, decoded with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.data.blocks.prepared import PreparedData
from draftsmith.decode.models.draft_vocabulary import kept_tokens
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe
from safetensors.torch import load_file

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

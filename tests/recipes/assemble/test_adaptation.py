"""Training that starts from an existing draft, with its acceptance before and after, also on general prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.heads.dflash import save_dflash
from draftsmith.checkpoints.heads.dspark import load_block_drafter
from draftsmith.checkpoints.heads.eagle import load_eagle, save_eagle
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.training.train import run_train
from draftsmith.recipes.schema.loading import parse_recipe

SIZES: dict[str, dict[str, Any]] = {
    "eagle3": {"num_heads": 2, "norms": ["fc_norm"]},
    "dflash": {"num_heads": 4, "num_layers": 2},
    "dspark": {"num_heads": 4, "dspark": {"markov_rank": 6}},
}
"""Sizes of the drafts in recipes."""


@pytest.fixture
def start(request: pytest.FixtureRequest, tiny_pair: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that saves a random draft of an architecture for the tiny target."""

    def save(architecture: str) -> Path:
        build, target = request.getfixturevalue(f"make_{architecture.removesuffix('3')}"), tiny_pair / "target"
        more = {"norms": ["fc_norm"]} if architecture == "eagle3" else {}
        heads = build(load_model(str(target), dtype=torch.float32), **more)
        (save_eagle if architecture == "eagle3" else save_dflash)(heads, tmp_path / "start")
        return tmp_path / "start"

    return save


@pytest.fixture
def recipe_of(tiny_drafter: Callable[[Path], dict[str, Any]], tiny_pair: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that builds a heads recipe which starts from the saved draft."""

    def build(start: str, **more: Any) -> Any:
        values = {name: value for name, value in tiny_drafter(tmp_path).items() if name in ("data", "train", "out")}
        values |= {"kind": "heads", "architecture": start, "target": str(tiny_pair / "target")}
        measure = {"prompts": 2, "new_tokens": 4, "general": str(tiny_pair / "answers.jsonl")}
        values |= {"start": str(tmp_path / "start"), "measure": measure, **SIZES[start]}
        return parse_recipe(values | more, "the test's recipe")

    return build


@pytest.mark.parametrize("architecture", SIZES)
def test_training_starts_from_the_weights_of_a_draft(
    architecture: str, start: Any, recipe_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load: Any = load_eagle if architecture == "eagle3" else load_block_drafter
    before, same = load(start(architecture)).state_dict(), recipe_of(architecture, out=str(tmp_path / "same"))
    same = same.model_copy(update={"train": same.train.model_copy(update={"steps": 0})})
    after = load(run_train(same)).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    unchanged = load_manifest(tmp_path / "same")
    assert unchanged.training["first_metrics"] == unchanged.evaluation
    recipe = recipe_of(architecture)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 4, "evaluate_every": 4})})
    out = run_train(recipe)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in load(out).state_dict().items())
    manifest = load_manifest(out)
    log = capsys.readouterr().err
    for name in ("tokens_per_step", "general_tokens_per_step"):
        assert manifest.training["first_metrics"][name] == unchanged.evaluation[name] >= 1
        assert manifest.evaluation[name] >= 1
        numbers = f"{unchanged.evaluation[name]:.2f} before training, {manifest.evaluation[name]:.2f} after it"
        assert f"heads: {name} {numbers}" in log


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("dflash", {"num_heads": 7}, r"`num_heads` is 7.*has 4: set num_heads=4"),
        ("dflash", {"num_layers": 3}, r"`num_layers` is 3.*has 2"),
        ("dflash", {"layers": [2]}, r"`layers` is \[2\].*has \[1\]: set layers=\[1\]"),
        ("dflash", {"vocabulary": {"tokens": 60}}, r'`vocabulary` is {"tokens": 60}.*set vocabulary=null'),
        ("dspark", {"dspark": {"markov_rank": 5}}, r"`dspark.markov_rank` is 5.*has 6"),
        ("eagle3", {"norms": []}, r'`norms` is \[\].*set norms=\["fc_norm"\]'),
        ("eagle3", {"architecture": "dflash", "norms": []}, '`architecture` is "dflash".*has "eagle3"'),
    ],
)
def test_other_sizes_are_refused(
    architecture: str, changes: dict[str, Any], message: str, start: Any, recipe_of: Any
) -> None:
    start(architecture)
    with pytest.raises(ValueError, match=message):
        run_train(recipe_of(architecture, **changes))


def test_a_start_must_be_a_draft(start: Any, recipe_of: Any, tmp_path: Path) -> None:
    folder = start("dflash")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="is not that of EAGLE-3 heads"):
        run_train(recipe_of("dflash"))
    with pytest.raises(ValueError, match="`start` does not apply to `architecture: medusa`"):
        recipe_of("dflash", architecture="medusa", num_layers=1)

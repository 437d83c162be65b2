"""Targets with a revision, `user/name@revision`, behave like a folder with the same files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.artifact.locate import model_source
from draftsmith.checkpoints.artifact.model_ref import resolve_model
from draftsmith.checkpoints.storage.places import is_path, split_revision
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.evaluation import locate_part
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from huggingface_hub import constants
from typer.testing import CliRunner, Result

COMMIT = "b" * 40
TARGET = "me/target@v2"


def draftsmith(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def target(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the tiny target into the hub cache as `me/target@v2`, and disable network access."""
    repo = tmp_path / "cache" / "models--me--target"
    (repo / "refs").mkdir(parents=True)
    for revision, commit, source in (("main", "a" * 40, "drafter"), ("v2", COMMIT, "target")):
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(tiny_pair / source, repo / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for known in (model_source, locate_part):
        known.cache_clear()
    return tiny_pair / "target"


def test_names_with_a_revision(target: Path, tmp_path: Path) -> None:
    assert split_revision(TARGET) == ("me/target", "v2")
    for plain in ("me/target", "me/a/b@c", "/me/target@v2", "./target@v2", "target@v2", "me\\target@v2"):
        assert split_revision(plain) == (plain, None)
        if is_path(plain):  # no such folder exists
            with pytest.raises(ValueError, match="does not exist"):
                model_source(plain)
    assert load_tokenizer(TARGET).get_vocab() == load_tokenizer(str(target)).get_vocab()
    with pytest.raises(ValueError, match="me/target@v9"):
        load_tokenizer("me/target@v9")
    shutil.copytree(target, tmp_path / "me" / "target")
    with pytest.raises(ValueError, match="me/target@v2: me/target is a local folder"):
        load_tokenizer(TARGET)
    (tmp_path / "me" / "target@v2").mkdir(parents=True)
    assert split_revision(TARGET) == (TARGET, None), "an existing folder takes precedence"
    with pytest.raises(ValueError, match="v 3' is not a valid branch"):
        split_revision("me/target@v 3")


def test_decoding_equals_decoding_with_its_files(target: Path, tiny_pair: Path, corpus: Path) -> None:
    settings: dict[str, Any] = {"kind": "evaluate", "device": "cpu", "prompts": str(corpus / "rows.json")}
    settings |= {"template": "chatml", "limit": 2, "max_new_tokens": 8, "drafter": str(tiny_pair / "drafter")}
    settings |= {"methods": [{"method": "autoregressive"}, {"method": "speculative"}]}
    named, plain = (
        run_evaluate(EvaluateRecipe(**settings, target=target_name, out=f"{number}.json"))
        for number, target_name in enumerate((TARGET, str(target)))
    )
    assert named["recipe"]["target"] == TARGET
    for actual, expected in zip(named["methods"], plain["methods"], strict=True):
        assert actual["tokens_per_step"] == expected["tokens_per_step"]
        assert actual["identical_to_greedy"] == [2, 2]


def test_doctor_and_exports_accept_a_revision(target: Path, tiny_pair: Path) -> None:
    fine = draftsmith("doctor", TARGET, tiny_pair / "drafter", "--json")
    assert json.loads(fine.stdout)["verdicts"]["draftsmith"]["outcome"] == "works"
    done = draftsmith("export", tiny_pair / "heads", "--to", "medusa", "--out", "exported", "--target", TARGET)
    assert done.exit_code == 0, (done.output, done.exception)
    serving = Path("exported/SERVING.md").read_text()
    assert "hf download me/target --revision v2 --local-dir target" in serving
    assert TARGET not in serving, "engines and transformers do not support such names"
    assert json.loads(Path("exported/config.json").read_text())["base_model_name_or_path"] == "me/target"
    assert load_tokenizer("exported").get_vocab() == load_tokenizer(str(target)).get_vocab()


def test_artifacts_name_the_commit(target: Path, drafter_recipe: Path, corpus: Path, tmp_path: Path) -> None:
    changes = ["train.steps=2", "train.save_every=2", "data.block_tokens=64", f"target={TARGET}"]
    changes += ["model.config.vocab_size=320", "objective={lk-lambda: 1.0}"]
    done = draftsmith("train", drafter_recipe, *changes)
    assert done.exit_code == 0, (done.output, done.exception)
    made_for: Any = load_manifest(tmp_path / "drafter").target
    assert made_for == {"id": "me/target", "revision": COMMIT, "sha256": resolve_model(str(target)).sha256}
    exported = draftsmith("export", tmp_path / "drafter", "--to", "transformers", "--out", "exported")
    assert exported.exit_code == 0, (exported.output, exported.exception)
    assert f"--revision {COMMIT}" in Path("exported/SERVING.md").read_text()
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f'AutoTokenizer.from_pretrained("me/target", revision="{COMMIT}")' in card


def test_an_adapter_is_for_the_commit_that_it_was_trained_from(
    target: Path, drafter_recipe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    changes = ["train.steps=2", "train.save_every=2", "data.block_tokens=64", "train.learning_rate=0.1"]
    changes += [f"model={{source: {TARGET}, lora: {{rank: 2, export: adapter}}}}"]
    done = draftsmith("train", drafter_recipe, *changes)
    assert done.exit_code == 0, (done.output, done.exception)
    named = json.loads((tmp_path / "drafter" / "adapter_config.json").read_text())
    assert (named["base_model_name_or_path"], named["revision"]) == ("me/target", COMMIT)
    ids = torch.tensor([[1, 5, 9, 200]])
    base, adapted = (load_model(str(folder))(ids).logits for folder in (target, tmp_path / "drafter"))
    assert not torch.allclose(adapted, base, atol=1e-3), "the adapter has no effect"

"""Targets named with a revision, `user/name@revision`: used everywhere as a folder with the same files would be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, model_fingerprint, save_artifact
from draftsmith.checkpoints.artifact.locate import at_revision
from draftsmith.checkpoints.storage.places import split_revision
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.artifact import check_out
from draftsmith.recipes.assemble.evaluation import place_of
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.schema.evaluation import DrafterRecipe, EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from huggingface_hub import constants
from typer.testing import CliRunner, Result

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
COMMIT = "b" * 40
TARGET = "me/target@v2"


def draftsmith(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def target(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny pair's target in the hub's cache as `me/target@v2`; its main branch is another model. No network."""
    repo = tmp_path / "cache" / "models--me--target"
    (repo / "refs").mkdir(parents=True)
    for revision, commit, source in (("main", "a" * 40, "drafter"), ("v2", COMMIT, "target")):
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(tiny_pair / source, repo / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for known in (at_revision, place_of):
        known.cache_clear()
    return tiny_pair / "target"


def test_names_with_a_revision(target: Path, tmp_path: Path) -> None:
    assert split_revision(TARGET) == ("me/target", "v2")
    for plain in ("me/target", "me/a/b@c", "/me/target@v2", "./target@v2", "target@v2", "me\\target@v2"):
        assert split_revision(plain) == (plain, None)
        assert at_revision(plain) == plain
    shutil.copytree(target, tmp_path / "me" / "target")
    with pytest.raises(ValueError, match="me/target@v2: me/target is a folder here"):
        load_tokenizer(TARGET)
    (tmp_path / "me" / "target@v2").mkdir(parents=True)
    assert split_revision(TARGET) == (TARGET, None), "a folder that is here comes first"
    with pytest.raises(ValueError, match="v 3' is no branch"):
        split_revision("me/target@v 3")


@pytest.mark.parametrize("name", ["evaluate", "trace", "certify"])
def test_decoding_with_it_is_decoding_with_its_files(name: str, target: Path, tiny_pair: Path, corpus: Path) -> None:
    asked: dict[str, Any] = {"kind": "evaluate", "device": "cpu", "prompts": str(corpus / "rows.json")}
    asked |= {"template": "chatml", "limit": 2, "max_new_tokens": 8, "drafter": str(tiny_pair / "drafter")}
    asked |= {"methods": [{"method": "autoregressive"}, {"method": "speculative"}]}
    if name == "evaluate":
        named, plain = (
            run_evaluate(EvaluateRecipe(**asked, target=place, out=f"{number}.json"))
            for number, place in enumerate((TARGET, str(target)))
        )
        assert named["recipe"]["target"] == TARGET
        for mine, theirs in zip(named["methods"], plain["methods"], strict=True):
            assert mine["tokens_per_step"] == theirs["tokens_per_step"]
            assert mine["identical_to_greedy"] == [2, 2]
        return
    Path("recipe.json").write_text(json.dumps(asked | {"target": TARGET}))
    done = draftsmith(name, "recipe.json", f"out={Path.cwd() / 'out.json'}")
    assert done.exit_code == 0, (done.output, done.exception)


def test_the_doctor_and_exports_take_it(target: Path, tiny_pair: Path) -> None:
    fine = draftsmith("doctor", TARGET, tiny_pair / "drafter", "--json")
    assert json.loads(fine.stdout)["pair"]["verdicts"]["draftsmith"]["outcome"] == "works"
    for artifact, form in (("drafter", "transformers"), ("heads", "medusa"), ("heads", "medusa-2"), ("table", "npz")):
        options = [] if form == "npz" else ["--target", TARGET]
        out = Path(f"{artifact}-{form}")
        done = draftsmith("export", tiny_pair / artifact, "--to", form, "--out", out, *options)
        assert done.exit_code == 0, (done.output, done.exception)
        serving = (out / "SERVING.md").read_text()
        if options:
            assert "hf download me/target --revision v2 --local-dir target" in serving
            assert TARGET not in serving, "engines and transformers know no such names"
        if artifact == "heads":
            assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == "me/target"
            assert load_tokenizer(str(out)).get_vocab() == load_tokenizer(str(target)).get_vocab()
            assert "looks for the tokenizer beside the heads: the target's is there" in serving
            assert "text-generation-server download-weights me/target" in serving


def test_heads_are_exported_where_no_tokenizer_can_be_had_and_that_is_said(target: Path, tiny_pair: Path) -> None:
    """The heads' own projections need nothing of the target."""
    done = draftsmith("export", tiny_pair / "heads", "--to", "medusa", "--out", "x", "--target", "me/elsewhere@v1")
    assert done.exit_code == 0, (done.output, done.exception)
    serving = Path("x/SERVING.md").read_text()
    assert "put the target's there, or export again with" in serving
    assert "not compared: the tokenizer, as that of the target me/elsewhere" in serving
    assert not Path("x/tokenizer.json").exists()


def test_what_is_trained_for_it_names_its_commit(
    target: Path, drafter_recipe: Path, corpus: Path, tmp_path: Path
) -> None:
    changes = ["train.steps=2", "train.save_every=2", "data.block_tokens=64", f"target={TARGET}"]
    changes += ["model.config.vocab_size=320", "objective={lk-lambda: 1.0}"]
    done = draftsmith("train", drafter_recipe, *changes)
    assert done.exit_code == 0, (done.output, done.exception)
    made_for: Any = load_manifest(tmp_path / "drafter").target
    assert made_for == {"id": "me/target", "revision": COMMIT, "fingerprint": model_fingerprint(target)}
    exported = draftsmith("export", tmp_path / "drafter", "--to", "transformers", "--out", "exported")
    assert exported.exit_code == 0, (exported.output, exported.exception)
    assert f"--revision {COMMIT}" in Path("exported/SERVING.md").read_text()
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert f'AutoTokenizer.from_pretrained("me/target", revision="{COMMIT}")' in card


def recipe_for(place: str, out: Path, recipe: Path) -> DrafterRecipe:
    """A recipe whose artifact is finished: it was made for the commit `COMMIT` of `me/target`."""
    loaded = load_recipe(str(recipe), [f"target={place}", f"out={out}", "objective={lk-lambda: 1.0}"])
    assert isinstance(loaded, DrafterRecipe)
    about: dict[str, Any] = {"vocab_size": 4, "tokenizer_fingerprint": None, "shapes": {}, "data": {}, "training": {}}
    about["target"] = {"id": "me/target", "revision": COMMIT, "fingerprint": None}
    save_artifact(
        out,
        kind="drafter",
        write=lambda folder: (folder / "config.json").write_text("{}") and None,
        recipe=loaded.model_dump(mode="json"),
        **about,
    )
    return loaded


def test_a_finished_artifact_is_made_anew_when_its_branch_has_moved_on(
    drafter_recipe: Path,
    tmp_path: Path,
    load_script: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in = load_script(CHECKPOINTS / "hub_stand_in.py")
    out = tmp_path / "made"
    with stand_in.running_hub() as hub:
        stand_in.point_client(hub.url, tmp_path / "home", monkeypatch)
        repo = hub.repo("me/target", {"config.json": b"{}"})
        repo.commits[COMMIT] = repo.commits[repo.branches["main"]]
        repo.branches["v2"] = COMMIT
        recipe = recipe_for("me/target@v2", out, drafter_recipe)
        check_out(out, recipe)  # where it was
        moved = repo.branches["v2"] = repo.branches["main"]
        with pytest.raises(ValueError, match=f"for me/target at {COMMIT}, and its v2 is at {moved} now"):
            check_out(out, recipe)
        asked = hub.requests.count("info")
        check_out(tmp_path / "kept", recipe_for(f"me/target@{COMMIT}", tmp_path / "kept", drafter_recipe))
        assert hub.requests.count("info") == asked, "a commit does not move"
        assert "not compared" not in capsys.readouterr().err
        del repo.branches["v2"]
        check_out(out, recipe)
        assert "whether v2 has moved on was not compared: me/target@v2 has no such" in capsys.readouterr().err
    check_out(out, recipe)  # the hub is gone
    said = capsys.readouterr().err
    assert f"was made for me/target at {COMMIT}; whether v2 has moved on was not compared" in said


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
    exported = draftsmith("export", tmp_path / "drafter", "--to", "transformers", "--out", "exported")
    assert exported.exit_code == 0, (exported.output, exported.exception)
    ids = torch.tensor([[1, 5, 9, 200]])
    base, mine, merged = (load_model(str(place))(ids).logits for place in (target, tmp_path / "drafter", "exported"))
    assert torch.allclose(mine, merged, atol=1e-5)
    assert not torch.allclose(mine, base, atol=1e-3), "or the adapter does nothing"
    from_elsewhere = tmp_path / "elsewhere"
    from_elsewhere.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(tmp_path / "drafter" / name, from_elsewhere / name)
    imported = draftsmith("import", from_elsewhere, "--target", target, "--out", "imported")
    assert imported.exit_code == 0, (imported.output, imported.exception)
    assert torch.equal(load_model("imported")(ids).logits, mine)


def test_a_table_is_counted_with_its_tokenizer(target: Path, corpus: Path, tmp_path: Path) -> None:
    assert load_tokenizer(TARGET).get_vocab() == load_tokenizer(str(target)).get_vocab()
    recipe: dict[str, Any] = {"kind": "table", "out": str(tmp_path / "table"), "tokenizer": TARGET}
    recipe["data"] = {"source": str(corpus / "rows.json"), "template": "chatml", "cache": str(tmp_path / "prepared")}
    Path("table.json").write_text(json.dumps(recipe))
    done = draftsmith("train", "table.json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert BigramTable.load(tmp_path / "table").vocab_size == 320
    missing = draftsmith("train", "table.json", "tokenizer=me/target@v9")
    assert "me/target@v9" in str(missing.exception)

"""Changed bytes of a target or of prepared data are detected before training starts."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from draftsmith.checkpoints.artifact.model_ref import resolve_model
from draftsmith.checkpoints.storage.safe_read import file_hash
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.assemble.artifact import prepare_once
from draftsmith.recipes.assemble.teacher import open_caches, prepare_teacher
from draftsmith.recipes.commands.training.regenerate import run_regenerate
from draftsmith.recipes.commands.training.train import make_run, run_train
from draftsmith.recipes.schema.evaluation import RegenerateRecipe
from draftsmith.recipes.schema.loading import load_training
from draftsmith.recipes.schema.training import DrafterRecipe, HeadsRecipe
from draftsmith.train.parallel.accelerate import make_accelerator


@pytest.fixture
def target(tiny_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))


def flip_bits(target: Path) -> tuple[str, str]:
    """Flip forty exponent bits of the target without changing its modification time; return both hashes."""
    path, before = target / "model.safetensors", resolve_model(str(target)).sha256
    content, about = bytearray(path.read_bytes()), path.stat()
    start = 8 + int.from_bytes(content[:8], "little")
    embeddings = json.loads(content[8:start])["model.embed_tokens.weight"]
    first = start + embeddings["data_offsets"][0] + 5 * 4 * embeddings["shape"][1]  # row of token 5
    for offset in range(first, first + 40 * 4, 4):
        content[offset + 3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    now = resolve_model(str(target)).sha256
    assert before is not None
    assert now is not None
    return before, now


@pytest.mark.parametrize("kind", ["drafter", "heads"])
def test_training_is_not_resumed_with_another_target(kind: str, drafter_recipe: Path, target: Path) -> None:
    values = yaml.safe_load(drafter_recipe.read_text()) | {"target": str(target)}
    values["train"] |= {"steps": 2}
    if kind == "drafter":
        values |= {"objective": {"forward-kl": 1.0}}
    else:
        values = {name: values[name] for name in ("target", "data", "train", "out")} | {"kind": "heads", "num_heads": 1}
    drafter_recipe.write_text(yaml.safe_dump(values | {"measure": {"prompts": 1, "new_tokens": 4, "blocks": 1}}))
    recipe = load_training(str(drafter_recipe))
    assert isinstance(recipe, DrafterRecipe | HeadsRecipe)
    accelerator = make_accelerator("no")

    def fit() -> Any:
        return make_run(recipe, accelerator).fit(accelerator)

    assert fit().resumed_from is None
    assert fit().resumed_from == 2
    before, now = flip_bits(target)
    with pytest.raises(ValueError, match=rf"hash of the target: {before} before, {now} now"):
        fit()


def test_answers_of_two_targets_are_not_mixed(corpus: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    values: dict[str, Any] = {"kind": "regenerate", "out": str(out), "source": str(corpus / "rows.json")}
    values |= {"target": str(target), "template": "chatml", "max_new_tokens": 4, "on_length": "keep", "batch": 2}
    run_regenerate(RegenerateRecipe(**values, limit=2))
    before, now = flip_bits(target)
    written = out.read_bytes()
    with pytest.raises(ValueError, match=rf"target's hash '{before}', but the recipe has '{now}'"):
        run_regenerate(RegenerateRecipe(**values, limit=6))
    assert out.read_bytes() == written


def test_a_cache_of_a_changed_target_is_not_used(drafter_recipe: Path, target: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(drafter_recipe.read_text())
    values = {name: values[name] for name in ("data", "train", "out")} | {"kind": "heads", "num_heads": 1}
    values |= {"target": str(target), "hidden": {"cache": str(tmp_path / "hidden")}}
    drafter_recipe.write_text(yaml.safe_dump(values))
    recipe = load_training(str(drafter_recipe))
    assert isinstance(recipe, HeadsRecipe)
    first, tokenizer = prepare_teacher(recipe), load_tokenizer(recipe.tokenizer_source)
    prepared = prepare_once(recipe, tokenizer, make_accelerator("no"))
    open_caches(recipe, prepared)
    flip_bits(target)
    with pytest.raises(ValueError, match="--teacher"):
        open_caches(recipe, prepared)
    assert prepare_teacher(recipe) != first


def damaged(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """Change the prepared tokens in place and return the file."""
    path = folder / "tokens.npy"
    np.save(path, change(np.load(path)))
    return path


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_changed_prepared_tokens_are_refused(part: str, drafter_recipe: Path, tmp_path: Path) -> None:
    recipe = load_training(str(drafter_recipe), ["train.steps=2"])
    assert isinstance(recipe, DrafterRecipe)
    prepared = prepare_once(recipe, load_tokenizer(recipe.tokenizer_source), make_accelerator("no"))
    folder = prepared.folder / part
    whole = file_hash(folder / "tokens.npy")
    path = damaged(folder, lambda ids: ids ^ 1)
    with pytest.raises(ValueError, match=rf"{path} has SHA-256 {file_hash(path)}, .* {whole}"):
        run_train(recipe)
    assert not (tmp_path / "drafter.state").exists()
    damaged(folder, lambda ids: ids ^ 1)
    run_train(recipe)


@pytest.mark.parametrize("change", ["reversed", "deleted", "swapped"])
def test_hashes_cover_held_out_conversations_and_parts(change: str, drafter_recipe: Path) -> None:
    recipe = load_training(str(drafter_recipe), ["train.steps=2"])
    assert isinstance(recipe, DrafterRecipe)
    folder = prepare_once(recipe, load_tokenizer(recipe.tokenizer_source), make_accelerator("no")).folder
    rows = folder / "heldout.jsonl"
    if change == "reversed":
        rows.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))) + "\n")
    elif change == "deleted":
        rows.unlink()
    else:
        for name, other in (("train", "aside"), ("heldout", "train"), ("aside", "heldout")):
            (folder / name).rename(folder / other)
    named = "train/data.json" if change == "swapped" else "heldout.jsonl"
    with pytest.raises(ValueError, match=rf"{named} is missing or was changed: delete .* to prepare it again"):
        run_train(recipe)


def test_tokens_outside_the_vocabulary_are_refused(drafter_recipe: Path) -> None:
    recipe = load_training(str(drafter_recipe), ["train.steps=2"])
    assert isinstance(recipe, DrafterRecipe)
    folder = prepare_once(recipe, load_tokenizer(recipe.tokenizer_source), make_accelerator("no")).folder / "train"
    path = damaged(folder, lambda ids: np.where(np.arange(len(ids)) == 7, 320, ids).astype(ids.dtype))
    manifest = json.loads((folder / "data.json").read_text())
    manifest["sha256"]["tokens"] = file_hash(path)  # consistent hash, as if written with a different tokenizer
    (folder / "data.json").write_text(json.dumps(manifest))
    report = json.loads((folder.parent / "report.json").read_text())
    report["sha256"]["train/data.json"] = file_hash(folder / "data.json")
    (folder.parent / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=rf"{path} has the token 320, expected 0 to 319"):
        run_train(recipe)

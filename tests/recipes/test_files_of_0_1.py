"""Files that version 0.1 wrote still load: manifests, recipes, results, certificates, the state of a training run.

`tests/files_of_0_1/` holds them as they were written, by the flows of `tests/golden.py`; of weights it has names, types
and shapes (of a table, the numbers), from which the artifacts are made again here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.artifact.manifest import Manifest, record_fault
from draftsmith.checkpoints.heads.files import load_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.assemble.artifact import Run, check_out, prepare_once
from draftsmith.recipes.assemble.drafter import drafter_parts
from draftsmith.recipes.assemble.heads import heads_parts
from draftsmith.recipes.assemble.teacher import prepare_teacher
from draftsmith.recipes.report.certificate import load_certificate
from draftsmith.recipes.report.page import run_report
from draftsmith.recipes.schema.loading import dump_recipe, load_recipe, load_training
from draftsmith.recipes.schema.results import load_results
from draftsmith.recipes.schema.training import DrafterRecipe, HeadsRecipe
from draftsmith.train.parallel.accelerate import make_accelerator
from safetensors.torch import save_file

FILES = Path(__file__).parents[1] / "files_of_0_1"
WEIGHTS = {"drafter": "model.safetensors", "heads": "medusa_lm_head.safetensors", "table": "table.safetensors"}
DTYPES = {"F32": torch.float32, "I32": torch.int32, "I64": torch.int64}


@pytest.mark.parametrize("name", sorted(path.stem for path in (FILES / "recipes").iterdir()))
def test_recipe_loads_and_is_the_same_when_written_again(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(str(FILES / "recipes" / f"{name}.yaml"))
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def made_again(kind: str, folder: Path) -> Path:
    """An artifact with the manifest and the configuration of 0.1, and weights of those names, types and shapes."""
    shutil.copytree(FILES / kind, folder)
    layout = json.loads((folder / "tensors.json").read_text())
    (folder / "tensors.json").unlink()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape, *numbers) in layout["tensors"].items():
        made = torch.tensor(numbers[0]) if numbers else 0.1 * torch.randn(shape, generator=generator)
        tensors[name] = made.to(DTYPES[dtype]).reshape(shape)
    save_file(tensors, folder / WEIGHTS[kind], layout["metadata"])
    text = (folder / "artifact.json").read_text()
    manifest = Manifest.from_json(text)
    assert record_fault(text, manifest) is None
    files = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in folder.iterdir()
        if path.name != "artifact.json"
    }
    (folder / "artifact.json").write_text(dataclasses.replace(manifest, files=files).to_json())
    return folder


@pytest.mark.parametrize("kind", WEIGHTS)
def test_artifact_loads_and_is_reused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = load_manifest(FILES / kind, kind)
    folder = made_again(kind, tmp_path / "artifact")
    manifest = verify_artifact(folder, kind)
    assert manifest.shapes == recorded.shapes
    assert manifest.vocab_size == 320
    if kind == "drafter":
        logits: Any = load_model(str(folder))(torch.tensor([[1, 2, 3]])).logits
        assert logits.isfinite().all()
    elif kind == "heads":
        heads = load_heads(folder)
        assert (heads.num_heads, heads.projection_kind, heads.rank) == (2, "low-rank", 4)
        assert heads(torch.ones(1, 16)).isfinite().all()
    else:
        table = BigramTable.load(folder)
        assert table.vocab_size == 320
        assert int(table.unigram.sum()) > 0
    recipe = load_training(str(FILES / "recipes" / f"{kind}.yaml"))
    check_out(folder, recipe)
    if kind != "table":
        with pytest.raises(ValueError, match=r"train\.seed: 0 .* 1"):
            check_out(folder, load_training(str(FILES / "recipes" / f"{kind}.yaml"), ["train.seed=1"]))


def test_results_load_and_are_reported(tmp_path: Path) -> None:
    shutil.copyfile(FILES / "results.json", tmp_path / "results.json")
    results = load_results(tmp_path / "results.json")
    assert [row["label"] for row in results["methods"]][:2] == ["autoregressive", "speculative"]
    assert results["prompts"] == 2
    page = run_report([tmp_path / "results.json"])
    assert "speculative" in page.read_text()


def test_certificate_loads() -> None:
    found = load_certificate(FILES / "certificate.json")
    written = json.loads((FILES / "certificate.json").read_text())
    assert [one["label"] for one in found["certificates"]] == [one["label"] for one in written["certificates"]]


@pytest.fixture
def home(corpus: Path, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models and texts under the names that the recipes of 0.1 give them."""
    for name, source in (("target", "target"), ("near", "drafter")):
        shutil.copytree(tiny_pair / source, tmp_path / name)
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    shutil.copyfile(corpus / "rows.json", tmp_path / "rows.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_but_for_hashes(old: Any, new: Any) -> Any:
    """What 0.1 wrote, with the hashes of today's models and texts, and the number of their parameters."""
    if isinstance(old, dict):
        return {key: same_but_for_hashes(value, (new or {}).get(key)) for key, value in old.items()}
    is_hash = isinstance(old, str) and len(old) >= 32
    return new if is_hash or (isinstance(old, int) and old > 1000) else old


@pytest.mark.parametrize("name", ["drafter", "heads", "medusa-2"])
def test_state_of_a_run_is_resumed(name: str, home: Path) -> None:
    recipe = load_training(str(FILES / "recipes" / f"{name}.yaml"), ["train.steps=10", "measure.prompts=3"])
    assert isinstance(recipe, DrafterRecipe | HeadsRecipe)
    accelerator, tokenizer = make_accelerator("no"), load_tokenizer(recipe.tokenizer_source)
    if name == "heads":
        prepare_teacher(recipe)
    run = Run(recipe, home / "out", accelerator, tokenizer, prepare_once(recipe, tokenizer, accelerator))

    def fit() -> Any:
        make = drafter_parts if isinstance(recipe, DrafterRecipe) else heads_parts
        parts: Any = make(recipe, tokenizer, run.prepared, accelerator.device)  # type: ignore[arg-type]
        return run.fit(parts.task, True)

    assert fit().resumed_from is None
    file = home / "out.state" / "fit.json"
    before = json.loads((FILES / "fit" / f"{name}.json").read_text())
    file.write_text(json.dumps(same_but_for_hashes(before, json.loads(file.read_text()))))
    if name == "drafter":
        shutil.copyfile(FILES / "log.jsonl", home / "out.state" / "log.jsonl")
    assert fit().resumed_from == 10

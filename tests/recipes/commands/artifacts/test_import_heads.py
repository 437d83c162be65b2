"""`draftsmith import` converts published heads to an artifact, which passes verification and can be loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import verify_artifact
from draftsmith.checkpoints.artifact.model_ref import resolve_model, tokenizer_fingerprint
from draftsmith.checkpoints.heads.files import HEADS_FILE, PredictionHeads, load_heads
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.recipes.commands.artifacts.imports import import_heads
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

VOCAB, HIDDEN = 320, 32


@pytest.fixture
def target(corpus: Path, tmp_path: Path, make_llama: Callable[..., LlamaForCausalLM]) -> Path:
    """Save a model with its tokenizer."""
    folder = tmp_path / "target"
    make_llama(VOCAB, hidden_size=HIDDEN).save_pretrained(folder)
    load_tokenizer(str(corpus / "tokenizer")).save_pretrained(folder)
    return folder


def tensors(num_heads: int, version: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(7)
    heads = PredictionHeads(num_heads, 1, HIDDEN, VOCAB, "own" if version == 1 else "target").to(dtype)
    return {name: torch.randn_like(tensor) for name, tensor in heads.state_dict().items()}


def publish(folder: Path, state: dict[str, Tensor], pickled: bool = False, **config: object) -> Path:
    folder.mkdir(parents=True)
    torch.save(state, folder / "medusa_lm_head.pt") if pickled else save_file(state, folder / HEADS_FILE)
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"} | config))
    return folder


def test_published_heads_become_an_artifact(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are five pickled heads, but the config names two, as for vicuna-7b-v1.3."""
    state = tensors(5)
    source = str(publish(tmp_path / "published", state, pickled=True, medusa_num_heads=2, medusa_num_layers=1))
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt .*--unpickle"):
        import_heads(source, tmp_path / "heads", str(target))
    import_heads(source, tmp_path / "heads", str(target), unpickle=True)
    logged = " ".join(capsys.readouterr().err.split())
    assert f"{source}: 5 heads of 1 blocks in medusa_lm_head.pt; projection own, hidden size 32" in logged
    assert "has medusa_num_heads 2, but the tensors have 5" in logged
    manifest = verify_artifact(tmp_path / "heads", "heads")
    assert manifest.vocab_size == VOCAB
    assert manifest.target == {"id": str(target), "sha256": resolve_model(str(target)).sha256}
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(str(target)))
    assert manifest.shapes == {
        "num_heads": 5,
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "projection_kind": "own",
        "rank": 0,
        "states": "after-norm",
    }
    assert manifest.training == {"imported_from": source, "imported_file": "medusa_lm_head.pt"}
    written = load_file(tmp_path / "heads" / HEADS_FILE)
    assert set(written) == set(state)
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    assert load_heads(tmp_path / "heads").num_heads == 5


def test_heads_without_projection_have_the_vocabulary_of_the_target(target: Path, tmp_path: Path) -> None:
    source = publish(tmp_path / "published", tensors(3, version=2, dtype=torch.bfloat16), vocab_size=999)
    import_heads(str(source), tmp_path / "heads", str(target), states="before-norm")
    manifest = verify_artifact(tmp_path / "heads", "heads")
    assert (manifest.vocab_size, manifest.shapes["projection_kind"]) == (VOCAB, "target")
    heads = load_heads(tmp_path / "heads")
    assert (heads.projection_kind, heads.states, heads.vocab_size) == ("target", "before-norm", VOCAB)
    assert next(heads.parameters()).dtype == torch.bfloat16


def test_heads_inside_a_whole_model(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_file(target / "model.safetensors")
    changed = {name: tensor + 0.01 for name, tensor in model.items()}
    state = tensors(4)
    shutil.copytree(target, tmp_path / "medusa-2")
    whole = changed | {f"medusa_head.{name}": tensor for name, tensor in state.items()}
    save_file(whole, tmp_path / "medusa-2" / "model.safetensors", metadata={"format": "pt"})
    source = str(tmp_path / "medusa-2")
    import_heads(source, tmp_path / "heads")
    assert f"for {source}" in " ".join(capsys.readouterr().err.split())
    assert verify_artifact(tmp_path / "heads").target == {"id": source, "sha256": resolve_model(source).sha256}
    assert resolve_model(source).sha256 not in (None, resolve_model(str(target)).sha256)
    written = load_file(tmp_path / "heads" / HEADS_FILE)
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    import_heads(source, tmp_path / "other", str(target))
    assert verify_artifact(tmp_path / "other").target == {
        "id": str(target),
        "sha256": resolve_model(str(target)).sha256,
    }


@pytest.mark.parametrize("case", ["hidden_size", "vocab_size", "no target", "states", "no model"])
def test_an_import_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    source, options = str(publish(tmp_path / "published", tensors(2))), {"target": str(target)}
    parts = {"hidden_size": "32.*64", "vocab_size": "320.*64", "no target": "--target.*vicuna-7b-v1.3"}
    parts |= {"states": "'before'.*before-norm", "no model": "nothing"}
    changes = {"no target": {"target": None}, "states": {"states": "before"}, "no model": {"target": "./nothing"}}
    if case.endswith("_size"):
        config = json.loads((target / "config.json").read_text()) | {case: 64}
        (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=parts[case]):
        import_heads(source, tmp_path / "heads", **(options | changes.get(case, {})))
    assert not (tmp_path / "heads").exists()


def test_only_files_of_the_heads_are_downloaded(hub: Any, stand_in: ModuleType, target: Path, tmp_path: Path) -> None:
    state, someone = tensors(2), tmp_path / "someone"
    whole = {f"medusa_head.{name}": tensor for name, tensor in state.items()}
    publish(someone / "pickled", state, pickled=True)
    for name in ("shards", "one"):
        (someone / name).mkdir()
    save_file({"lm_head.weight": torch.zeros(1)}, someone / "shards" / "model-1.safetensors")
    save_file(whole, someone / "shards" / "model-2.safetensors")
    places = {"lm_head.weight": "model-1.safetensors"} | dict.fromkeys(whole, "model-2.safetensors")
    index = json.dumps({"weight_map": places})
    (someone / "shards" / "model.safetensors.index.json").write_text(index)
    save_file(whole, someone / "one" / "model.safetensors")
    for folder in someone.iterdir():
        hub.repo(f"someone/{folder.name}", stand_in.files_of(folder))
    cases = [
        ("pickled", False, "pass --unpickle", ["config.json"]),
        ("pickled", True, None, ["medusa_lm_head.pt"]),
        ("shards", False, None, ["model-2.safetensors", "model.safetensors.index.json"]),
        ("one", False, None, ["model.safetensors"]),
    ]
    for number, (name, unpickle, message, expected) in enumerate(cases):
        out = tmp_path / str(number)
        hub.got.clear()
        if message is None:
            import_heads(f"someone/{name}", out, str(target), unpickle=unpickle)
            written = load_file(out / HEADS_FILE)
            assert all(torch.equal(written[key], tensor) for key, tensor in state.items())
        else:
            with pytest.raises(ValueError, match=message):
                import_heads(f"someone/{name}", out, str(target), unpickle=unpickle)
        assert sorted(hub.got) == expected, name

"""Exports are artifacts: their contents, invalid requests, and failures that leave no files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest, verify_artifact
from draftsmith.checkpoints.export import heads as export_heads
from draftsmith.checkpoints.export.base import SERVING_FILE, export_artifact
from draftsmith.recipes.commands.artifacts.export import FORMATS
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM

VOCAB = 48
Make = Callable[..., Path]
Refused = Callable[..., str]


def test_an_export_is_an_artifact_with_its_source(make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads()
    findings = export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    exported, known = verify_artifact(tmp_path / "out"), load_manifest(heads)
    for name in ("kind", "vocab_size", "tokenizer_fingerprint", "target", "recipe", "evaluation"):
        assert getattr(exported, name) == getattr(known, name)
    assert exported.export is not None
    assert exported.export["of"] == {name: entry["sha256"] for name, entry in known.files.items()}
    text = (tmp_path / "out" / SERVING_FILE).read_text()
    assert text.startswith("# Serving out\n")
    assert FORMATS["medusa"].readers in text
    assert all(f"- {line}\n" in text for line in findings if "/" not in line)


def test_a_failed_comparison_leaves_the_former_export(
    make_heads: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = make_heads()
    export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    good = export_heads.save_file

    def err(tensors: dict[str, torch.Tensor], *rest: Any, **named: Any) -> None:
        good({name: tensor + 1e-6 for name, tensor in tensors.items()}, *rest, **named)

    monkeypatch.setattr(export_heads, "save_file", err)
    with pytest.raises(ValueError, match=r"\.weight|\.bias"):
        export_artifact(heads, "medusa", tmp_path / "out", FORMATS)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "out", "target"]


def config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def mixed_types(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(folder)


def put(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("")


def loud(heads: torch.nn.Module) -> None:
    for parameter in heads.parameters():
        parameter.mul_(3e3)


PAIR = ("target", "draftsmith doctor", "--fix")
LOUD = {"projection": "low-rank", "rank": 5, "dtype": torch.float16, "edit": loud}
Row = tuple[str, dict[str, Any], str, dict[str, Any], tuple[str, ...]]
ROWS: list[Row] = [
    ("drafter", {}, "transformer", {}, ("'transformer'", "'transformers'", "vllm-bigrams")),
    ("drafter", {}, "vllm-bigrams", {}, ("table", "drafter", "gguf", "transformers", "vllm-sglang")),
    ("table", {}, "vllm-bigrams", {"llama_cpp": Path("x")}, ("--llama-cpp",)),
    ("drafter", {"vocab_size": VOCAB + 8}, "transformers", {}, (f"{VOCAB + 8}", f"{VOCAB}", *PAIR)),
    ("drafter", {"tokenizer": "swapped"}, "vllm-sglang", {}, ("'w5'", "'w6'", *PAIR)),
    ("drafter", {"max_position_embeddings": 32}, "vllm-sglang", {}, ("positions: 64", "positions: 32", *PAIR)),
    ("drafter", {"tokenizer": None}, "vllm-sglang", {}, ("tokenizer",)),
    ("drafter", {"also": config(auto_map={"AutoModel": "x.Y"})}, "vllm-sglang", {}, ("auto_map",)),
    ("drafter", {"also": put("modeling.py")}, "vllm-sglang", {}, ("modeling.py",)),
    ("drafter", {"also": mixed_types}, "vllm-sglang", {}, ("F16", "F32")),
    ("drafter", {"also": other_model}, "vllm-sglang", {}, ("BloomForCausalLM",)),
    ("drafter", {}, "gguf", {}, ("--llama-cpp",)),
    ("drafter", {}, "gguf", {"llama_cpp": Path("/nowhere")}, ("/nowhere/convert_hf_to_gguf.py",)),
    ("heads", {"states": "before-norm"}, "medusa", {}, ("pre-norm", "after-norm")),
    ("heads", {"scale": 0.5}, "medusa", {}, ("0.5",)),
    ("heads", {"named": None, "projection": "target"}, "medusa", {}, ("--target",)),
    ("heads", {"projection": "target"}, "medusa", {"target": "./nowhere"}, ("./nowhere",)),
    ("heads", LOUD, "medusa", {}, (".1.weight", "float16")),
]


@pytest.mark.parametrize("row", ROWS)
def test_an_export_is_refused(row: Row, refused: Refused, request: pytest.FixtureRequest) -> None:
    kind, settings, form, options, parts = row
    message = refused(request.getfixturevalue(f"make_{kind}")(**settings), form, **options)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("out", ["artifact/out", "other", "file"])
def test_other_folders_are_not_replaced(out: str, make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads()
    shutil.copytree(heads, tmp_path / "other")
    (tmp_path / "file").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=out.rpartition("/")[2]):
        export_artifact(heads, "medusa", tmp_path / out, FORMATS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_damaged_artifacts_are_refused(make_heads: Make, refused: Refused, tmp_path: Path) -> None:
    heads = make_heads()
    export_artifact(heads, "medusa", tmp_path / "made", FORMATS)
    for folder in ("nowhere", "target", "made"):
        assert folder in refused(tmp_path / folder, "medusa")
    weights = heads / "medusa_lm_head.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights.name in refused(heads, "medusa")


def test_unsuitable_targets_are_refused(
    make_drafter: Make, make_heads: Make, make_llama: Any, refused: Refused, target: Path, save: Make, tmp_path: Path
) -> None:
    heads = make_heads(projection="target")
    make_llama(VOCAB, 9, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path / "other")
    assert str(tmp_path / "other") in refused(heads, "medusa", target=str(tmp_path / "other"))
    for path in target.glob("*token*"):
        path.unlink()
    assert str(target) in refused(make_drafter(), "vllm-sglang")
    heads = make_heads(projection="target")
    (target / "model.safetensors").unlink()
    assert "lm_head.weight" in refused(heads, "medusa", target=str(target))


def test_an_adapter_without_its_model(make_adapter: Make, refused: Refused, tmp_path: Path) -> None:
    artifact = make_adapter()
    shutil.rmtree(tmp_path / "base")
    assert str(tmp_path / "base") in refused(artifact, "transformers")


def test_drafters_that_llama_cpp_refuses_are_refused(make_drafter: Make, refused: Refused, llama_cpp: Path) -> None:
    artifact = make_drafter(tokenizer="swapped")
    assert "id 5 on, but id 7 differs" in refused(artifact, "gguf", llama_cpp=llama_cpp)

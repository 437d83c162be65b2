"""Exports that are refused, and leave nothing: what the message must name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.recipes.commands.artifacts.export import FORMATS
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM

VOCAB = 48
Make = Callable[..., Path]
Refused = Callable[..., str]


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
    ("table", {}, "vllm-bigrams", {"merge": True}, ("--merge",)),
    ("drafter", {}, "transformers", {"merge": False}, ("--no-merge",)),
    ("drafter", {}, "transformers", {"target": "nowhere/at/all"}, ("nowhere/at/all",)),
    ("drafter", {"vocab_size": VOCAB + 8}, "transformers", {}, (f"{VOCAB + 8}", f"{VOCAB}", *PAIR)),
    ("drafter", {"also": config(hidden_act="nope")}, "transformers", {}, ("artifact",)),
    ("drafter", {"vocab_size": VOCAB + 16}, "vllm-sglang", {}, (f"{VOCAB + 16}", f"{VOCAB}", "vocab_size", *PAIR)),
    ("drafter", {"tokenizer": "swapped"}, "vllm-sglang", {}, ("'w5'", "'w6'", *PAIR)),
    ("drafter", {"max_position_embeddings": 32}, "vllm-sglang", {}, ("64 positions", "32 positions", *PAIR)),
    ("drafter", {"tokenizer": None}, "vllm-sglang", {}, ("tokenizer",)),
    ("drafter", {"also": config(auto_map={"AutoModel": "x.Y"})}, "vllm-sglang", {}, ("auto_map",)),
    ("drafter", {"also": put("modeling.py")}, "vllm-sglang", {}, ("modeling.py",)),
    ("drafter", {"also": put("pytorch_model.bin")}, "vllm-sglang", {}, ("pytorch_model.bin",)),
    ("drafter", {"also": mixed_types}, "vllm-sglang", {}, ("F16", "F32")),
    ("drafter", {"also": config(architectures=3)}, "vllm-sglang", {}, ("architecture", "LlamaForCausalLM")),
    ("drafter", {"also": other_model}, "vllm-sglang", {}, ("BloomForCausalLM",)),
    ("drafter", {}, "gguf", {}, ("--llama-cpp",)),
    ("drafter", {}, "gguf", {"llama_cpp": Path("/nowhere")}, ("/nowhere/convert_hf_to_gguf.py",)),
    ("heads", {}, "medusa-2", {}, ("head 0", "target")),
    ("heads", {"projection": "low-rank", "rank": 5}, "medusa-2", {}, ("rank 5", "target")),
    ("heads", {"num_layers": 0}, "medusa-2", {}, ("medusa-2",)),
    ("heads", {"states": "before-norm"}, "medusa", {}, ("before", "after-norm")),
    ("heads", {"scale": 0.5}, "medusa", {}, ("0.5",)),
    ("heads", {"named": None, "projection": "target"}, "medusa", {}, ("--target",)),
    ("heads", {"projection": "target"}, "medusa", {"target": "./nowhere"}, ("./nowhere",)),
    ("heads", LOUD, "medusa", {}, (".1.weight", "float16")),
    ("heads", LOUD, "medusa-vllm", {}, (".1.weight", "float16")),
    ("drafter", {"also": put("more.safetensors")}, "vllm-sglang", {}, ("more.safetensors",)),
]


@pytest.mark.parametrize("row", ROWS)
def test_an_export_is_refused(row: Row, refused: Refused, request: pytest.FixtureRequest) -> None:
    kind, settings, form, options, parts = row
    message = refused(request.getfixturevalue(f"make_{kind}")(**settings), form, **options)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("out", ["artifact", "artifact/out", "other", "export", "target", "file"])
def test_folders_that_hold_something_else(out: str, make_heads: Make, tmp_path: Path) -> None:
    heads = make_heads()
    export_artifact(heads, "medusa-vllm", tmp_path / "export", FORMATS)
    shutil.copytree(heads, tmp_path / "other")
    (tmp_path / "file").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=out.rpartition("/")[2]):
        export_artifact(heads, "medusa", tmp_path / out, FORMATS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_artifacts_that_are_none_or_damaged(make_heads: Make, refused: Refused, tmp_path: Path) -> None:
    heads = make_heads()
    export_artifact(heads, "medusa", tmp_path / "made", FORMATS)
    for folder in ("nowhere", "target", "made"):
        assert folder in refused(tmp_path / folder, "medusa")
    weights = heads / "medusa_lm_head.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights.name in refused(heads, "medusa")


def test_targets_that_do_not_fit(
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


def test_a_drafter_that_llama_cpp_refuses(make_drafter: Make, refused: Refused, llama_cpp: Path) -> None:
    artifact = make_drafter(tokenizer="swapped")
    assert "id 5 on, 7" in refused(artifact, "gguf", llama_cpp=llama_cpp)

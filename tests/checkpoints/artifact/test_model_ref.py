"""References to models, and the files that determine the hash of a model."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.artifact.model_ref import (
    is_unchanged,
    resolve_model,
    source_hash,
    tokenizer_fingerprint,
    weight_files,
)
from draftsmith.checkpoints.storage.draft_vocabulary import write_vocabulary
from draftsmith.checkpoints.storage.names import DRAFT_VOCABULARY
from draftsmith.checkpoints.storage.safe_read import file_hash
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"
Make = Callable[..., LlamaForCausalLM]


@pytest.fixture
def model(tmp_path: Path, make_llama: Make) -> Path:
    """Save a model in a folder that also has unrelated files."""
    make_llama(320).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "README.md", "results.json"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def flip(path: Path) -> None:
    """Change the last byte of a file in place, and restore its modification time."""
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0x40]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_files_of_the_model_determine_its_hash(model: Path) -> None:
    write_vocabulary(torch.arange(4), model)
    first = resolve_model(str(model))
    assert {WEIGHTS, "config.json", "tokenizer.json", DRAFT_VOCABULARY} <= set(first.files)
    assert first.files[WEIGHTS] == file_hash(model / WEIGHTS)
    for name in ("README.md", "results.json"):
        flip(model / name)
    assert resolve_model(str(model)) == first
    for name in (WEIGHTS, "config.json", "tokenizer.json", DRAFT_VOCABULARY):
        flip(model / name)
        changed = resolve_model(str(model))
        assert {file for file in first.files if first.files[file] != changed.files[file]} == {name}
        assert changed.sha256 != first.sha256
        assert not is_unchanged(first.record())
        flip(model / name)
        assert is_unchanged(first.record())
    assert is_unchanged(first.record() | {"source": "user/name"})
    assert source_hash(str(model)) == first.sha256


def test_the_hash_of_an_adapter_covers_its_base_model(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"1")
    first = resolve_model(str(adapter))
    assert first.files[f"base/{WEIGHTS}"] == file_hash(model / WEIGHTS)
    flip(model / WEIGHTS)
    assert resolve_model(str(adapter)).sha256 != first.sha256


def test_an_artifact_has_the_hash_of_its_content(tmp_path: Path, make_llama: Make) -> None:
    about: dict[str, Any] = {"vocab_size": 320, "tokenizer_fingerprint": None, "target": None}
    folder = tmp_path / "artifact"
    save_artifact(folder, kind="drafter", write=make_llama(320).save_pretrained, **about)
    first = resolve_model(str(folder))
    save_artifact(folder, kind="drafter", write=make_llama(320).save_pretrained, command="again", **about)
    assert resolve_model(str(folder)) == first
    flip(folder / WEIGHTS)
    with pytest.raises(ValueError, match=rf"{WEIGHTS} has SHA-256 .*{first.files[WEIGHTS]}"):
        resolve_model(str(folder))


def test_weights_are_those_that_transformers_loads(tmp_path: Path, make_llama: Make) -> None:
    make_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*"))
    save_file({"x": torch.zeros(1)}, tmp_path / "model-of-another.safetensors")
    assert len(shards) > 1
    assert weight_files(tmp_path) == shards
    shutil.copy(shards[0], tmp_path / WEIGHTS)
    assert weight_files(tmp_path) == [tmp_path / WEIGHTS]


def make_tokenizer(order: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(order)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_tokenizer_fingerprints_distinguish_vocabularies() -> None:
    tokens = ["<unk>", "</s>", "a", "b"]
    fingerprint = tokenizer_fingerprint(make_tokenizer(tokens))
    assert fingerprint == tokenizer_fingerprint(make_tokenizer(tokens))
    assert fingerprint != tokenizer_fingerprint(make_tokenizer(["<unk>", "</s>", "b", "a"]))
    other = make_tokenizer(tokens)
    other.pad_token = other.eos_token
    assert fingerprint == tokenizer_fingerprint(other)
    other.eos_token = "a"
    assert fingerprint != tokenizer_fingerprint(other)

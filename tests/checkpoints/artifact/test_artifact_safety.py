"""Untrusted artifacts and models: no code is run and no pickle is read."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.heads.files import PredictionHeads, load_heads, save_heads
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.decode.models.loading import load_model
from transformers import LlamaForCausalLM

VOCAB = 16
ABOUT: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer_fingerprint": None, "target": None}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    out = tmp_path / "table"
    counted = BigramTable.from_documents([torch.tensor([1, 2, 3, 1, 2]).numpy()], VOCAB)
    save_artifact(out, kind="table", write=counted.save, **ABOUT)
    return out


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    out = tmp_path / "heads"
    module = PredictionHeads(2, 1, 8, VOCAB)
    save_artifact(out, kind="heads", write=lambda folder: save_heads(module, folder, "target"), **ABOUT)
    return out


TERABYTES = json.dumps({"unigram": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
HOSTILE_TENSORS = [struct.pack("<Q", len(TERABYTES)) + TERABYTES, pickle.dumps({"a": 1})]


@pytest.mark.parametrize("content", HOSTILE_TENSORS, ids=["claims terabytes", "a pickle"])
def test_tensor_files_that_lie_are_refused_by_all_who_read_them(
    table: Path, heads: Path, make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, content: bytes
) -> None:
    make_llama(vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    for folder, name in ((table, "table"), (heads, "medusa_lm_head"), (tmp_path / "model", "model")):
        (folder / f"{name}.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"table\.safetensors"):
        BigramTable.load(table)
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors"):
        load_heads(heads)
    with pytest.raises(ValueError, match="no language model could be loaded"):
        load_model(str(tmp_path / "model"))
    assert any("is not a safetensors file" in fault for fault in find_faults(table)[1])


CODE = """
from pathlib import Path
Path({mark!r}).write_text("run")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
"""


@pytest.mark.parametrize("model_type", ["llama", "never-heard-of"])
def test_code_that_a_model_brings_is_not_run(
    make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    make_llama(vocab_size=VOCAB).save_pretrained(folder)
    places = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": places, "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks is told to go on
    if model_type == "llama":
        assert isinstance(load_model(str(folder)), LlamaForCausalLM)
    else:
        with pytest.raises(ValueError, match="no language model could be loaded"):
            load_model(str(folder))
    assert not mark.exists()


def test_a_pickle_beside_the_weights_is_not_looked_at(
    make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str, str]]:
            return (os.symlink, ("nothing", str(mark)))

    make_llama(vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    bomb = pickle.dumps(Bomb())
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
        (tmp_path / "model" / name).write_bytes(bomb)
    load_model(str(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    for content in (bomb, pickle.dumps({"harmless": 1})):
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"its weights are pickled \(pytorch_model\.bin\)"):
            load_model(str(tmp_path / "model"))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(bomb)
    monkeypatch.setenv("DRAFTSMITH_UNPICKLE", "1")
    with pytest.raises(ValueError, match="no language model could be loaded"):
        load_model(str(tmp_path / "model"))
    assert not mark.is_symlink()

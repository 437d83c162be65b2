"""Valid safetensors files with missing, non-finite or additional tensors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.export.drafter import ASSISTANT
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.hub import push_pull as publish
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.checkpoints.verify.model_files import load_language_model
from draftsmith.decode.models.loading import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
Change = Callable[[dict[str, torch.Tensor]], object]


def make() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, intermediate_size=32))


def edit_tensors(path: Path, change: Change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt", "vocab_size": str(VOCAB)})


def artifact(out: Path, write: Callable[[Path], None], kind: str = "drafter") -> Path:
    save_artifact(out, kind=kind, write=write, vocab_size=VOCAB, tokenizer_fingerprint=None, target=None)
    return out


def save(out: Path, change: Change = lambda tensors: None) -> Path:
    """Write a Llama artifact with changed tensors and correct hashes."""

    def write(folder: Path) -> None:
        make().save_pretrained(folder)
        edit_tensors(folder / "model.safetensors", change)

    return artifact(out, write)


def lose(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def test_an_export_notices_missing_tensors(tmp_path: Path) -> None:
    out = save(tmp_path / "drafter", lose("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"the weights model\.layers\.1\.mlp\.up_proj\.weight are missing"):
        export_artifact(out, "transformers", tmp_path / "export", {"transformers": ASSISTANT})
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_verify_names_tensors_that_are_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1:] = math.nan
        tensors["lm_head.weight"][0, :1] = -math.inf if dtype.itemsize > 1 else math.nan

    (fault,) = find_faults(save(tmp_path / "drafter", spoil))[1]
    assert "2 tensors (lm_head.weight, model.layers.1.mlp.up_proj.weight)" in fault
    assert "model.safetensors" in fault


def test_additional_tensors_are_accepted(tmp_path: Path) -> None:
    """Published models may have layers for multi-token prediction or value heads."""
    more = {f"model.layers.{layer}.eh_proj.weight": torch.ones(16, 32) for layer in range(2, 7)}
    out = save(tmp_path / "drafter", lambda tensors: tensors.update(more))
    assert find_faults(out)[1] == []
    export_artifact(out, "transformers", tmp_path / "export", {"transformers": ASSISTANT})
    assert find_faults(tmp_path / "export")[1] == []
    assert "model.safetensors" in publish._files_to_push(out, lambda manifest: "a card")
    for load in (load_model, load_language_model):
        assert load(str(out)).config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("kind", "change", "needle"),
    [
        ("heads", lambda stored: None, None),
        ("heads", lose("1.0.linear.bias"), "lacks 1.0.linear.bias"),
        ("heads", lambda stored: stored["1.0.linear.bias"].__setitem__(3, math.nan), "1 tensor (1.0.linear.bias)"),
        ("table", lambda stored: None, None),
        ("table", lose("count"), "is not a table: it lacks count"),
        ("table", lambda stored: stored.update(unigram=torch.ones(5, dtype=torch.int64)), "entries for 5 tokens"),
        (
            "table",
            lambda stored: stored.update(left=torch.ones(VOCAB, dtype=torch.int64)),
            "expected only the tensors",
        ),
    ],
)
def test_faults_of_heads_and_tables_are_noticed(kind: str, change: Change, needle: str | None, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        if kind == "heads":
            save_heads(PredictionHeads(3, 1, 16, VOCAB), folder, "target")
        else:
            BigramTable.from_documents([np.arange(VOCAB)], VOCAB).save(folder)
        edit_tensors(next(folder.glob("*.safetensors")), change)

    faults = find_faults(artifact(tmp_path / "a", write, kind))[1]
    assert [needle in fault for fault in faults] == ([] if needle is None else [True])


def test_missing_tensors_are_an_error_on_loading(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lose("lm_head.weight"))
    LlamaForCausalLM.from_pretrained(tmp_path)
    message = r"no language model could be loaded from .*: the weights lm_head\.weight are missing"
    for load in (load_model, load_language_model):
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path))

"""Good safetensors that hold too few tensors, or others: noticed wherever artifacts are looked at. A model's that are
too many are told by the doctor alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draftsmith.checkpoints.artifact.artifact import save_artifact
from draftsmith.checkpoints.export.base import export_artifact
from draftsmith.checkpoints.export.drafter import ASSISTANT
from draftsmith.checkpoints.heads.files import PredictionHeads, save_heads
from draftsmith.checkpoints.hub import push_pull as publish
from draftsmith.checkpoints.hub.push_pull import plan_push
from draftsmith.checkpoints.pairs.checks import examine
from draftsmith.checkpoints.pairs.sides import open_side
from draftsmith.checkpoints.table.table import BigramTable
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.checkpoints.verify.model_files import fit_to_model, load_config, load_language_model
from draftsmith.decode.models.loading import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 24
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SIZES | {"intermediate_size": 32}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "tied llama": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2),
    "neox": lambda: transformers.GPTNeoXConfig(**LLAMA),
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=16),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, num_key_value_heads=2, num_local_experts=2),
    "t5": lambda: transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
}
Change = Callable[[dict[str, torch.Tensor]], object]


def make(family: str) -> PreTrainedModel:
    maker: Any = transformers.AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    return maker.from_config(FAMILIES[family]())


def changed(path: Path, change: Change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt", "vocab_size": str(VOCAB)})


def artifact(out: Path, write: Callable[[Path], None], kind: str = "drafter") -> Path:
    save_artifact(out, kind=kind, write=write, vocab_size=VOCAB, tokenizer_fingerprint=None, target=None)
    return out


def save(out: Path, change: Change = lambda tensors: None) -> Path:
    """An artifact of a Llama with these tensors, whose hashes are right."""

    def write(folder: Path) -> None:
        make("llama").save_pretrained(folder)
        changed(folder / "model.safetensors", change)

    return artifact(out, write)


def lose(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_a_model_is_missed_and_none_is_that_may_be_left_out(family: str, tmp_path: Path) -> None:
    """Whole files fit, in one piece or in shards, and under the names of the model without its output layer; of those
    that lack one tensor, or hold one of another shape, every one is found."""
    make(family).save_pretrained(tmp_path)
    config, shapes = load_config(tmp_path), shapes_of(tmp_path)
    whole = fit_to_model(config, shapes)
    assert (whole.lacking, dict(whole.other)) == ((), {})
    for name, shape in shapes.items():
        if ".1." in name:  # the second layer is as the first
            continue
        without = fit_to_model(config, {key: value for key, value in shapes.items() if key != name})
        other = fit_to_model(config, shapes | {name: (*shape[:-1], shape[-1] + 1)})
        assert without.lacking or without.other or without.broken, name
        assert other.other or other.broken, name
    assert fit_to_model(config, shapes | {"more.weight": (2, 2)}) == whole


def test_names_of_older_files_and_of_tied_weights_fit(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    bare = {name.removeprefix("transformer."): shape for name, shape in shapes_of(tmp_path / "gpt2").items()}
    masks = {f"h.{layer}.attn.bias": (1, 1, 1024, 1024) for layer in range(2)}
    assert not fit_to_model(load_config(tmp_path / "gpt2"), bare | masks).lacking
    make("tied llama").save_pretrained(tmp_path / "tied")
    shapes = shapes_of(tmp_path / "tied")
    assert "lm_head.weight" not in shapes
    heads = {"medusa_head.0.0.linear.weight": (16, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    both = fit_to_model(load_config(tmp_path / "tied"), shapes | heads | {"lm_head.weight": (VOCAB, 16)})
    assert (both.lacking, dict(both.other)) == ((), {})


def test_verify_export_and_push_notice_it(tmp_path: Path) -> None:
    said = r"lacks 1 tensor \(model\.layers\.1\.mlp\.up_proj\.weight\) that"
    out = save(tmp_path / "drafter", lose("model.layers.1.mlp.up_proj.weight"))
    (fault,) = find_faults(out)[1]
    with pytest.raises(ValueError, match=said) as caught:
        export_artifact(out, "transformers", tmp_path / "export", {"transformers": ASSISTANT})
    assert fault == str(caught.value)
    assert not (tmp_path / "export").exists()
    with pytest.raises(ValueError, match=said):  # before the hub is asked for anything
        plan_push(out, "me/drafter", lambda manifest: "a card")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_verify_names_tensors_that_are_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1:] = math.nan
        tensors["lm_head.weight"][0, :1] = -math.inf if dtype.itemsize > 1 else math.nan

    (fault,) = find_faults(save(tmp_path / "drafter", spoil))[1]
    assert "2 tensors (lm_head.weight, model.layers.1.mlp.up_proj.weight)" in fault
    assert "model.safetensors" in fault


def test_a_model_with_tensors_too_many_is_sound(tmp_path: Path) -> None:
    """As those with layers for multi-token prediction or a value head are."""
    more = {f"model.layers.{layer}.eh_proj.weight": torch.ones(16, 32) for layer in range(2, 7)}
    out = save(tmp_path / "drafter", lambda tensors: tensors.update(more))
    assert find_faults(out)[1] == []
    export_artifact(out, "transformers", tmp_path / "export", {"transformers": ASSISTANT})
    assert find_faults(tmp_path / "export")[1] == []
    assert "model.safetensors" in publish._files_to_push(out, lambda manifest: "a card")
    for load in (load_model, load_language_model):
        assert load(str(out)).config.num_hidden_layers == 2


def test_the_doctor_notices_it(tmp_path: Path) -> None:
    places = save(tmp_path / "target"), save(tmp_path / "few", lose("lm_head.weight"))
    sides = [open_side(str(place), lambda place: None) for place in places]
    (found,) = [finding for finding in examine(*sides).findings if finding.check == "tensors"]
    assert found.severity == "fault"
    assert set(found.effects) == {"transformers", "vllm", "sglang", "llama.cpp", "draftsmith"}
    assert "lm_head.weight" in found.drafter


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("heads", lambda held: None, None),
        ("heads", lose("1.0.linear.bias"), "lacks 1.0.linear.bias"),
        ("heads", lambda held: held["1.0.linear.bias"].__setitem__(3, math.nan), "1 tensor (1.0.linear.bias)"),
        ("table", lambda held: None, None),
        ("table", lose("count"), "is not a table: it lacks count"),
        ("table", lambda held: held.update(unigram=torch.ones(5, dtype=torch.int64)), "entries for 5 tokens"),
        ("table", lambda held: held.update(left=torch.ones(VOCAB, dtype=torch.int64)), "no table has"),
    ],
)
def test_faults_of_heads_and_tables_are_noticed(kind: str, change: Change, said: str | None, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        if kind == "heads":
            save_heads(PredictionHeads(3, 1, 16, VOCAB), folder, "target")
        else:
            BigramTable.from_documents([np.arange(VOCAB)], VOCAB).save(folder)
        changed(next(folder.glob("*.safetensors")), change)

    faults = find_faults(artifact(tmp_path / "a", write, kind))[1]
    assert [said in fault for fault in faults] == ([] if said is None else [True])


@pytest.mark.parametrize(
    ("config", "is_fault"),
    [
        ({"model_type": "llama", "hidden_size": 16, "num_attention_heads": 0}, True),
        ({"model_type": "newer-than-this-transformers"}, False),
    ],
)
def test_a_configuration_of_nothing_is_a_fault_and_of_an_unknown_model_is_not(
    config: dict[str, Any], is_fault: bool, tmp_path: Path
) -> None:
    def write(folder: Path) -> None:
        make("llama").save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))

    assert len(find_faults(artifact(tmp_path / "a", write))[1]) == is_fault


def test_what_a_model_lacks_is_not_made_up_when_it_is_loaded(tmp_path: Path) -> None:
    """By transformers alone, it would be."""
    make("llama").save_pretrained(tmp_path)
    changed(tmp_path / "model.safetensors", lose("lm_head.weight"))
    LlamaForCausalLM.from_pretrained(tmp_path)
    said = r"no language model could be loaded from .*: its files lack lm_head\.weight, for which there would be random"
    for load in (load_model, load_language_model):
        with pytest.raises(ValueError, match=said):
            load(str(tmp_path))

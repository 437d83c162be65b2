"""Fingerprints: the same model has the same one however it lies on the disk, and another model another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.checkpoints.artifact.fingerprints import model_fingerprint
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

Make = Callable[..., LlamaForCausalLM]


def add(folder: Path, **tensors: torch.Tensor) -> None:
    """More tensors in a model's file; dots in their names are written as two underscores."""
    path = folder / "model.safetensors"
    more = {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})


def test_shards_of_an_earlier_save_do_not_count(tmp_path: Path, make_llama: Make) -> None:
    model, other = make_llama(), make_llama(seed=1)
    other.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    shards = [path.name for path in (tmp_path / "m").glob("model-*")]
    model.save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "m" / "model.safetensors")
    assert len(shards) > 1
    assert model_fingerprint(tmp_path / "m") == model_fingerprint(model)
    (tmp_path / "m" / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, tmp_path / "m" / "model-of-somebody.safetensors")
    assert model_fingerprint(tmp_path / "m") == model_fingerprint(other)


def test_tied_weights_that_are_stored_twice_count_once(tmp_path: Path, make_llama: Make) -> None:
    tied, loose = make_llama(tie_word_embeddings=True), make_llama(tie_word_embeddings=False)
    tied.save_pretrained(tmp_path)
    add(tmp_path, lm_head__weight=tied.model.embed_tokens.weight.detach().clone())
    assert model_fingerprint(tmp_path) == model_fingerprint(tied)
    assert model_fingerprint(LlamaForCausalLM.from_pretrained(tmp_path)) == model_fingerprint(tied)
    add(tmp_path, lm_head__weight=torch.ones_like(tied.lm_head.weight))
    assert model_fingerprint(tmp_path) != model_fingerprint(tied)
    before = model_fingerprint(loose)
    with torch.no_grad():
        loose.lm_head.weight.copy_(loose.model.embed_tokens.weight)
    assert model_fingerprint(loose) not in (before, model_fingerprint(tied))


def test_tables_that_older_transformers_stored_do_not_count(tmp_path: Path, make_llama: Make) -> None:
    llama = make_llama()
    llama.save_pretrained(tmp_path / "llama")
    add(tmp_path / "llama", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert model_fingerprint(tmp_path / "llama") == model_fingerprint(llama)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    gpt2.save_pretrained(tmp_path / "gpt2")
    add(tmp_path / "gpt2", transformer__h__0__attn__bias=torch.ones(1, 1, 16, 16).tril())
    add(tmp_path / "gpt2", transformer__h__0__attn__masked_bias=torch.tensor(-1e4))
    assert model_fingerprint(tmp_path / "gpt2") == model_fingerprint(gpt2)
    add(tmp_path / "gpt2", transformer__h__0__attn__c_attn__bias=torch.ones(24))
    assert model_fingerprint(tmp_path / "gpt2") != model_fingerprint(gpt2)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model_type": "never-heard-of"}'])
def test_a_folder_whose_configuration_is_none_is_refused(tmp_path: Path, make_llama: Make, text: str) -> None:
    make_llama().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        model_fingerprint(tmp_path)

"""Attention by document gives what the mask gives, in value and gradient, and stays out of every other call's way."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from draftsmith.data.blocks.packing import Batch
from draftsmith.train.forward.attention import NAME
from draftsmith.train.forward.packed import PackedForward
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=2)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=32, max_position_embeddings=64, word_embed_proj_dim=16)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, intermediate_size=32)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=64)),
}


def states_and_gradient(model: Any, batch: Batch, by_document: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    forward = PackedForward(model)
    assert forward.by_document, "or nothing is compared"
    forward.by_document = by_document
    model.zero_grad()
    hidden_BTD = forward.hidden(batch)
    real = (batch.documents_BT >= 0)[..., None]
    (hidden_BTD * real * torch.linspace(-1, 1, hidden_BTD.shape[-1])).pow(2).sum().backward()
    return hidden_BTD * real, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_states_and_gradients_are_those_of_the_mask(worker: ModuleType, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("draftsmith.train.forward.packed._WORTH_IT", 1.0)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # attention of the default init is almost uniform
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    batch = worker.make_data(5, length=24).batch(range(5))
    masked, masked_gradients = states_and_gradient(model, batch, False)
    apart, gradients = states_and_gradient(model, batch, True)
    torch.testing.assert_close(apart, masked, atol=2e-5, rtol=1e-4)
    assert len(gradients) == len(masked_gradients) > 4
    for one, other in zip(gradients, masked_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3 * float(other.abs().max()) + 1e-5, rtol=1e-3)


def test_other_calls_of_the_model_do_not_notice(worker: ModuleType) -> None:
    model = worker.make_model().eval()
    tokens_BT = torch.arange(20).reshape(2, 10)
    padding_BT = torch.ones(2, 10, dtype=torch.long)
    padding_BT[1, :4] = 0
    with torch.no_grad():
        before = [model(tokens_BT).logits, model(tokens_BT, attention_mask=padding_BT).logits]
        before.append(model.generate(tokens_BT, max_new_tokens=6, do_sample=False))
        PackedForward(model)
        assert model.config._attn_implementation == NAME
        after = [model(tokens_BT).logits, model(tokens_BT, attention_mask=padding_BT).logits]
        after.append(model.generate(tokens_BT, max_new_tokens=6, do_sample=False))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)
    assert "attn_implementation" not in model.config.to_json_string()


def test_models_that_cannot_are_left_as_they_are() -> None:
    sliding = MistralForCausalLM(MistralConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, sliding_window=8))
    eager = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=32, attn_implementation="eager"))
    for model, implementation in ((sliding, "sdpa"), (eager, "eager")):
        forward = PackedForward(model)
        assert not forward.by_document
        assert model.config._attn_implementation == implementation


def test_flex_attention_keeps_documents_apart_too(worker: ModuleType) -> None:
    batch = worker.make_data(3, length=24).batch(range(3))
    real = (batch.documents_BT >= 0)[..., None]
    found = []
    for implementation in ("eager", "flex_attention"):
        torch.manual_seed(0)
        config = LlamaConfig(**(SMALL | {"hidden_size": 64}), intermediate_size=32, attn_implementation=implementation)
        with torch.no_grad():
            found.append(PackedForward(LlamaForCausalLM(config).eval()).hidden(batch) * real)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)

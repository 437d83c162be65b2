"""Module names of the supported model families, and functions that prepare their weights.

Shape letters: D hidden, F width of the MLP, E head width, H heads, I and O inputs and outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class Family:
    """Attribute names of the modules in the decoders of a model family."""

    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    """Norms before attention, after attention, before the MLP and after the MLP. None if a norm is absent."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    """True if one fused projection interleaves the queries, keys and values of each head."""
    out: str = "o_proj"
    mlp: str | None = "mlp"
    """Module of the MLP, or None if its projections are attributes of the layer."""
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Gate and up projection, or the projection before the activation."""
    gated: bool = True
    down: str = "down_proj"
    embedding: str = "embed_tokens"
    positions: str | None = None
    """Learned position embeddings, or None for rotary embeddings."""
    layers: str = "layers"
    norm: str = "norm"


_LLAMA = Family()
_GEMMA = Family(
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "phi3": Family(qkv=("qkv_proj",), up=("gate_up_proj",)),
    "olmo2": Family((None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_neox": Family(
        attention="attention",
        qkv=("query_key_value",),
        by_head=True,
        out="dense",
        up=("dense_h_to_4h",),
        gated=False,
        down="dense_4h_to_h",
        embedding="embed_in",
        norm="final_layer_norm",
    ),
    "gpt2": Family(
        ("ln_1", None, "ln_2", None),
        attention="attn",
        qkv=("c_attn",),
        out="c_proj",
        up=("c_fc",),
        gated=False,
        down="c_proj",
        embedding="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
    ),
    "opt": Family(
        ("self_attn_layer_norm", None, "final_layer_norm", None),
        out="out_proj",
        mlp=None,
        up=("fc1",),
        gated=False,
        down="fc2",
        positions="embed_positions",
        norm="final_layer_norm",
    ),
}
"""Mapping from model types to their families."""
GATES = {"silu": 1, "gelu_pytorch_tanh": 2}
"""Mapping from activations of gated MLPs to their numbers in vectors.h."""
ACTIVATIONS = {"relu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4, "gelu": 5}
"""Mapping from activations of MLPs without a gate to their numbers in vectors.h."""


def join_weights(modules: Sequence[Any], norm: Any = None) -> tuple[Tensor, Tensor | None]:
    """Concatenate the weights [O, I] and biases [O] of modules, detached, and fold a norm's bias into the biases."""
    weights = [
        module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach() for module in modules
    ]
    whole_OI = (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()
    biases = [] if modules[0].bias is None else [torch.cat([module.bias.detach() for module in modules]).float()]
    if (bias_I := getattr(norm, "bias", None)) is not None:
        biases.append(whole_OI.float() @ bias_I.detach().float())
    return whole_OI, sum(biases[1:], biases[0]) if biases else None


def split_heads(weight: Tensor, width: int) -> Tensor:
    """Reorder projections [H · 3 · E, …] to [3 · H · E, …]: all queries, then all keys, then all values."""
    return weight.unflatten(0, (-1, 3, width)).transpose(0, 1).flatten(0, 2)


def norm_weight(norm: Any) -> Tensor:
    """Return the detached weight of a norm. The norms of Gemma store the weight minus 1."""
    weight: Tensor = norm.weight.detach()
    return 1 + weight.float() if type(norm).__name__.startswith("Gemma") else weight

"""A decoder layer's weights by what they do, wherever a family's modules keep them.

Letters: D hidden, F width of the MLP, E head width, H heads, I and O inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class Family:
    """Where models of a type keep what a decoder has: names of modules, of a layer's within the layer."""

    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    """Before attention, of what attention adds, before the MLP, and of what it adds; None: there is none."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    """Each head's query, key and values lie side by side in the one module of `qkv`."""
    out: str = "o_proj"
    mlp: str | None = "mlp"
    """None: its modules are the layer's own."""
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Of the gate and what it opens, or of what goes through the activation."""
    gated: bool = True
    down: str = "down_proj"
    embedding: str = "embed_tokens"
    positions: str | None = None
    """Learned ones, which are added to the embeddings; None: queries and keys are turned."""
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
"""By type of model. A new one is a row, where its layers hold nothing new."""
GATES = {"silu": 1, "gelu_pytorch_tanh": 2}
"""Activations of a gate, as few_rows.c numbers them."""
ACTIVATIONS = {"relu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4, "gelu": 5}
"""Those of an MLP without one."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Detached. What a layer lacks is None. What norms add is in the biases of the products behind them."""

    qkv_OI: Tensor
    """Of queries, keys and values, side by side."""
    bias_O: Tensor | None
    """Theirs; biases are float32."""
    norm_query: Tensor | None
    """[E], each head's own, or of all heads together."""
    norm_key: Tensor | None
    out_OI: Tensor
    bias_out_D: Tensor | None
    up_OI: Tensor
    """Of the MLP's gate, if it has one, and values."""
    bias_up_F: Tensor | None
    down_OI: Tensor
    bias_down_D: Tensor | None
    norm_in_D: Tensor | None
    """Before attention."""
    norm_attended_D: Tensor | None
    """Of what attention adds to the residual stream."""
    norm_mlp_D: Tensor | None
    """Before the MLP."""
    norm_made_D: Tensor | None
    """Of what it adds."""
    parts: tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]
    """The modules whose weights `qkv_OI` and `up_OI` are copies of; none where they are a module's own."""

    @classmethod
    def of(cls, layer: Any, family: Family) -> LayerWeights:
        """Those of a layer, which may be EAGLE-3's."""
        attention, mlp = getattr(layer, family.attention), layer if family.mlp is None else getattr(layer, family.mlp)
        parts: Any = [[getattr(attention, name) for name in family.qkv], [getattr(mlp, name) for name in family.up]]
        norms = [None if name is None else getattr(layer, name) for name in family.norms]
        (qkv, bias), (up, bias_up) = (_matrix(side, norm) for side, norm in zip(parts, norms[::2], strict=True))
        if family.by_head:
            qkv = _by_kind(qkv, attention.head_size)
            bias = None if bias is None else _by_kind(bias, attention.head_size)
        norm_query = _weight(getattr(attention, "q_norm", None))
        if norm_query is not None and len(norm_query) == attention.head_dim:
            norm_query = norm_query * (attention.scaling * attention.head_dim**0.5)
        out, bias_out = _matrix([getattr(attention, family.out)])
        down, bias_down = _matrix([getattr(mlp, family.down)])
        norm_key = _weight(getattr(attention, "k_norm", None))
        products = qkv, bias, norm_query, norm_key, out, bias_out, up, bias_up, down, bias_down
        norm_in, norm_attended, norm_mlp, norm_made = map(_weight, norms)
        joined_qkv, joined_up = (tuple(side) if len(side) > 1 else () for side in parts)
        return cls(*products, norm_in, norm_attended, norm_mlp, norm_made, (joined_qkv, joined_up))


def _matrix(modules: Sequence[Any], norm: Any = None) -> tuple[Tensor, Tensor | None]:
    """The modules' weights [O, I], and their biases with what comes of those of a norm before them."""
    weights = [
        module.weight.detach().t() if isinstance(module, Conv1D) else module.weight.detach() for module in modules
    ]
    whole_OI = (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()
    biases = [] if modules[0].bias is None else [torch.cat([module.bias.detach() for module in modules]).float()]
    if (bias_I := getattr(norm, "bias", None)) is not None:
        biases.append(whole_OI.float() @ bias_I.detach().float())
    return whole_OI, sum(biases[1:], biases[0]) if biases else None


def _by_kind(weight: Tensor, width: int) -> Tensor:
    """[H · 3 · E, …] of heads as [3 · H · E, …] of queries, keys and values."""
    return weight.unflatten(0, (-1, 3, width)).transpose(0, 1).flatten(0, 2)


def _weight(norm: Any) -> Tensor | None:
    return None if norm is None else norm_weight(norm)


def norm_weight(norm: Any) -> Tensor:
    """What a norm multiplies by, detached: Gemma's keep what it is above 1."""
    weight: Tensor = norm.weight.detach()
    return 1 + weight.float() if type(norm).__name__.startswith("Gemma") else weight

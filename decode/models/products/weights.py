"""A decoder layer's weights by what they do, wherever a family's modules keep them.

Letters: D hidden, F width of the MLP, E head width, I and O inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "gemma3_text"})
"""Types of models whose layers `LayerWeights.of` describes: RMSNorm before and behind attention and a gated MLP, or on
one side; queries and keys turned in halves, by one rotation, one of each type of layers, or none; biases of queries,
keys and values, and norms of queries and keys, where they have them."""
ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}
"""Of the MLP's gate, as few_rows.c numbers them."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Detached. What a layer lacks is None."""

    qkv_OI: Tensor
    """Of queries, keys and values."""
    bias_O: Tensor | None
    """Theirs."""
    norm_query: Tensor | None
    """[E], each head's own, or of all heads together."""
    norm_key: Tensor | None
    out_OI: Tensor
    gate_up_OI: Tensor
    """Of the MLP's gate and values."""
    down_OI: Tensor
    norm_in_D: Tensor | None
    """Before attention."""
    norm_attended_D: Tensor | None
    """Of what attention adds to the residual stream."""
    norm_mlp_D: Tensor | None
    """Before the MLP."""
    norm_made_D: Tensor | None
    """Of what it adds."""
    parts: tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]
    """The modules whose weights `qkv_OI` and `gate_up_OI` are copies of; none where they are a module's own."""

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """Those of a layer of one of `FAMILIES`, or of EAGLE-3's."""
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            parts: Any = ((), ())
            qkv, gate_up, biases = attention.qkv_proj.weight.detach(), mlp.gate_up_proj.weight.detach(), [None]
        else:
            parts = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
            qkv, gate_up = (torch.cat([part.weight.detach() for part in side]) for side in parts)
            biases = [part.bias for part in parts[0]]
        norm_in, norm_mlp = _norm(layer, "input_layernorm"), _norm(layer, "pre_feedforward_layernorm")
        norm_attended = _norm(layer, "post_attention_layernorm")
        if norm_in is not None and norm_mlp is None:  # the name says where it stands, not what it is of
            norm_attended, norm_mlp = None, norm_attended
        norm_query = _norm(attention, "q_norm")
        if norm_query is not None and len(norm_query) == attention.head_dim:
            norm_query = norm_query * (attention.scaling * attention.head_dim**0.5)
        return cls(
            qkv,
            None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
            norm_query,
            _norm(attention, "k_norm"),
            attention.o_proj.weight.detach(),
            gate_up,
            mlp.down_proj.weight.detach(),
            norm_in,
            norm_attended,
            norm_mlp,
            _norm(layer, "post_feedforward_layernorm"),
            parts,
        )


def _norm(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm_weight(norm)


def norm_weight(norm: Any) -> Tensor:
    """What an RMSNorm multiplies by, detached: Gemma's keep what it is above 1."""
    weight: Tensor = norm.weight.detach()
    return 1 + weight.float() if type(norm).__name__.startswith("Gemma") else weight


def rotations(config: Any) -> list[str | None]:
    """By which rotation each layer turns queries and keys: that of a type of layers, "" if there is one, or None."""
    turned = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers  # 1 where there is one
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = config.layer_types if any(isinstance(each, dict) for each in rope.values()) else [""] * len(turned)
    return [kind if turns else None for kind, turns in zip(kinds, turned, strict=True)]

"""A decoder layer's weights by what they do, wherever a family's modules keep them.

Letters: D hidden, F width of the MLP, E head width, I and O inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"})
"""Types of models whose layers `LayerWeights.of` describes: RMSNorm before or behind attention and a SiLU-gated MLP,
queries and keys turned in halves; biases of queries, keys and values, and norms of queries and keys, where they have
them."""


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
        norm_in = _norm(layer, "input_layernorm")
        norm_between = _norm(layer, "post_attention_layernorm")
        return cls(
            qkv,
            None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
            _norm(attention, "q_norm"),
            _norm(attention, "k_norm"),
            attention.o_proj.weight.detach(),
            gate_up,
            mlp.down_proj.weight.detach(),
            norm_in,
            norm_between if norm_in is None else None,
            norm_between if norm_in is not None else None,
            _norm(layer, "post_feedforward_layernorm"),
            parts,
        )


def _norm(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()

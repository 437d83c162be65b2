"""A thin forward over the weights of Llama-type decoders, equal to transformers' and free of its overhead.

A small model's forward on a CPU, and a drafter's anywhere, is mostly the cost of launching operations. Here a layer is
fourteen of them: projections that share an input are one product, residual sums ride on products, and the rotation of
queries and keys is one complex multiplication.

Shape letters: B batch, M new tokens, S cache slots, D hidden, H heads, E head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from .kv_cache import KVCache
from .models import LanguageModel, _max_positions


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_D: Tensor
    qkv_weight: Tensor
    out_weight_t: Tensor
    norm_mlp_D: Tensor
    gate_up_weight: Tensor
    down_weight_t: Tensor


class LeanLlama(LanguageModel):
    """Llama, Mistral and others of the same layout (no biases, SiLU-gated MLP, rotary positions of fixed frequency)."""

    @staticmethod
    def covers(model: PreTrainedModel) -> bool:
        """Whether this forward computes what the model computes."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in {"llama", "mistral"}
            and getattr(config, "hidden_act", None) == "silu"
            and not getattr(config, "attention_bias", False)
            and not getattr(config, "mlp_bias", False)
            and rope.get("rope_type", "default") in {"default", "linear", "llama3"}
            and model.get_output_embeddings().bias is None
            and len({parameter.device for parameter in model.parameters()}) == 1
            and not getattr(model, "is_quantized", False)
        )

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        decoder: Any = model.model
        embedding: Tensor = decoder.embed_tokens.weight.detach()
        self.vocab_size, self.hidden_size = model.get_output_embeddings().weight.shape
        self.max_positions = _max_positions(config)
        self.device, self.dtype = embedding.device, embedding.dtype
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.key_width = self.value_width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._grouped = self.heads != self.kv_heads
        self._eps = config.rms_norm_eps
        self._embedding_VD = embedding
        self._norm_D = decoder.norm.weight.detach()
        self._head_VD = model.get_output_embeddings().weight.detach()
        # One complex product turns a pair of neighbours; transformers pairs element e with e + E/2. Queries and keys
        # are therefore projected in interleaved order, which leaves their inner products as they were.
        self._complex = self.dtype == torch.float32
        self._layers = [self._fuse(layer) for layer in decoder.layers]
        self._rotary = decoder.rotary_emb
        self._turns_SE = torch.empty(0, 0)
        self._sin_SE = torch.empty(0, 0)

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query, key = attention.q_proj.weight.detach(), attention.k_proj.weight.detach()
        if self._complex:
            query, key = self._interleave(query), self._interleave(key)
        return _Layer(
            layer.input_layernorm.weight.detach(),
            torch.cat((query, key, attention.v_proj.weight.detach())),
            attention.o_proj.weight.detach().t(),
            layer.post_attention_layernorm.weight.detach(),
            torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
            mlp.down_proj.weight.detach().t(),
        )

    def _interleave(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        halves = weight.view(rows // self.key_width, 2, self.key_width // 2, columns)
        return halves.transpose(1, 2).reshape(rows, columns)

    def _rotation(self, positions_BM: Tensor, needed: int) -> tuple[Tensor, Tensor | None]:
        """Turns for each position, shaped to multiply [B, M, H, E]; tables grow to the longest position seen."""
        if needed > len(self._turns_SE):
            size = max(256, 2 * needed)
            positions = torch.arange(size, device=self.device)[None]
            cos_1SE, sin_1SE = self._rotary(torch.empty(0, dtype=torch.float32, device=self.device), positions)
            if self._complex:
                half = self.key_width // 2
                self._turns_SE = torch.complex(cos_1SE[0, :, :half], sin_1SE[0, :, :half])
            else:
                self._turns_SE, self._sin_SE = cos_1SE[0].to(self.dtype), sin_1SE[0].to(self.dtype)
        cos_BM1E = F.embedding(positions_BM, self._turns_SE)[:, :, None]
        return cos_BM1E, None if self._complex else F.embedding(positions_BM, self._sin_SE)[:, :, None]

    def _rotate(self, x_BMHE: Tensor, turns_BM1E: Tensor, sin_BM1E: Tensor | None) -> Tensor:
        if sin_BM1E is None:
            pairs = torch.view_as_complex(x_BMHE.unflatten(-1, (self.key_width // 2, 2)))
            return torch.view_as_real(pairs * turns_BM1E).flatten(-2)
        first, second = x_BMHE.chunk(2, -1)
        return torch.addcmul(x_BMHE * turns_BM1E, torch.cat((-second, first), -1), sin_BM1E)

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        batch, count = tokens_BM.shape
        rotated_heads = self.heads + self.kv_heads
        hidden_XD = F.embedding(tokens_BM.reshape(-1), self._embedding_VD)
        turns_BM1E, sin_BM1E = self._rotation(positions_BM, end)
        for index, layer in enumerate(self._layers):
            normed_XD = F.rms_norm(hidden_XD, (self.hidden_size,), layer.norm_in_D, self._eps)
            qkv_BMHE = F.linear(normed_XD, layer.qkv_weight).view(batch, count, -1, self.key_width)
            qk_BHME = self._rotate(qkv_BMHE[:, :, :rotated_heads], turns_BM1E, sin_BM1E).transpose(1, 2)
            cache.write(index, qk_BHME[:, self.heads :], qkv_BMHE[:, :, rotated_heads:].transpose(1, 2), start)
            key_BHSE, value_BHSE = cache.view(index, end)
            attended_BHME = F.scaled_dot_product_attention(
                qk_BHME[:, : self.heads], key_BHSE, value_BHSE, attn_mask=mask_B1MS, enable_gqa=self._grouped
            )
            attended_XD = attended_BHME.transpose(1, 2).reshape(batch * count, -1)
            hidden_XD = torch.addmm(hidden_XD, attended_XD, layer.out_weight_t)
            normed_XD = F.rms_norm(hidden_XD, (self.hidden_size,), layer.norm_mlp_D, self._eps)
            gate_XF, up_XF = F.linear(normed_XD, layer.gate_up_weight).chunk(2, -1)
            hidden_XD = torch.addmm(hidden_XD, F.silu(gate_XF) * up_XF, layer.down_weight_t)
        return F.rms_norm(hidden_XD, (self.hidden_size,), self._norm_D, self._eps).view(batch, count, -1)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return F.linear(hidden_XD, self._head_VD)

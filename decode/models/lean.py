"""A thin forward over the weights of Llama-type decoders, equal to transformers' and free of its overhead.

Projections that share an input are one product, the rotation of queries and keys is one complex multiplication, norms
take three small operations, and weights lie as the CPU's library likes them for the number of rows (`Product`).

Shape letters: B batch, M new tokens, X = B · M, S cache slots, D hidden, F width of the MLP, H heads, E head width,
I and O inputs and outputs of a product, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoints.storage.draft_vocabulary import widen
from .base import LanguageModel, position_limit
from .draft_vocabulary import LowRankHead, head_weights, kept_tokens
from .kv_cache import IndexedCache, KVCache
from .products.few_rows import FEW_ROWS
from .products.layers import DecoderLayers
from .products.native import compiled, fused_kernels
from .products.product import Product

_PADDING = 1 << 15  # masked elements of keys, in the mean of the rows, that cost more than attention row by row


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_D: Tensor
    qkv: Product
    out: Product
    norm_mlp_D: Tensor
    gate_up: Product
    down: Product


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
            # Hooks that move or load weights run in the modules' own forwards, which are bypassed here.
            # Adapters (LoRA) wrap the projections: the weights within are not all there is.
            and not any(hasattr(module, "_hf_hook") or hasattr(module, "base_layer") for module in model.modules())
        )

    def __init__(self, model: PreTrainedModel, states: str = "after-norm", given_layers: Sequence[int] = ()) -> None:
        decoder, output = model.model, model.get_output_embeddings()
        self.states, self.given_layers = states, tuple(given_layers)
        self._kept_R, self.head_weights = kept_tokens(model), head_weights(model)
        self._inner = Product(output.inner.weight.detach()) if isinstance(output, LowRankHead) else None
        embedding_VD, head = decoder.embed_tokens.weight.detach(), output.weight.detach()
        self.vocab_size = len(head)
        rows = head if self._kept_R is None else head[self._kept_R]
        self._hold(model.config, embedding_VD, rows, decoder, decoder.layers)

    def _hold(self, config: Any, embedding: Tensor, head: Tensor, decoder: Any, layers: Iterable[Any]) -> None:
        """Take weights, and lay them out: of `head` all rows, of `decoder` its final `norm` and its `rotary_emb`."""
        self.config = config
        self.hidden_size = embedding.shape[1]
        self.max_positions = position_limit(config)
        # Over weights of bfloat16 the processor's own work is fastest, and most exact, in float32.
        wide = embedding.dtype == torch.bfloat16 and embedding.device.type == "cpu" and compiled() is not None
        self.device, self.dtype = embedding.device, torch.float32 if wide else embedding.dtype
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.key_width = self.value_width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._grouped = self.heads != self.kv_heads
        self._eps = config.rms_norm_eps
        self._embedding_VD = embedding
        self._head = Product(head)
        # One complex product turns a pair of neighbours; transformers pairs element e with e + E/2. Queries and keys
        # are therefore projected in interleaved order, which leaves their inner products as they were.
        # On GPUs there are kernels for what is not a product.
        self._complex = self.dtype == torch.float32 and self.device.type == "cpu"
        self._fused = fused_kernels() if self.device.type == "cuda" else None
        self._now: Any = None  # the kernels that the forward of this moment uses
        self.finds_ends = self._fused is not None
        # ‖x‖₂ with a constant √(D ε) beside it is √D times the root mean square that RMSNorm divides by. In float32 the
        # √D and the norm's weight are multiplied into the product that follows.
        self._folded = self._complex and embedding.dtype == torch.float32
        self._offset_value = (self.hidden_size * self._eps) ** 0.5
        self._offset = torch.tensor(self._offset_value, device=self.device)
        self._norm_D = decoder.norm.weight.detach()
        if self._complex:
            self._norm_D = self._scaled(self._norm_D)
        self._layers = [self._fuse(layer) for layer in layers]
        self.layers = len(self._layers)
        sizes = (self.heads, self.kv_heads, self.key_width)
        self._few = (
            DecoderLayers.made(self._layers, *sizes, self._offset_value, self._folded) if self._complex else None
        )
        self._rotary = decoder.rotary_emb
        self._turns_SE = torch.empty(0, 0)
        self._sin_SE = torch.empty(0, 0)
        self._outgrown: list[Tensor] = []

    @property
    def weights_dtype(self) -> torch.dtype:
        return self._embedding_VD.dtype

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query, key = attention.q_proj.weight.detach(), attention.k_proj.weight.detach()
        if self._complex:
            query, key = self._interleave(query), self._interleave(key)
        value, gate, up = (part.weight.detach() for part in (attention.v_proj, mlp.gate_proj, mlp.up_proj))
        norm_in_D, norm_mlp_D = self._norm_in(layer), layer.post_attention_layernorm.weight.detach()
        qkv, gate_up = torch.cat((query, key, value)), torch.cat((gate, up))
        if self._folded:
            qkv *= norm_in_D * self.hidden_size**0.5
            gate_up *= norm_mlp_D * self.hidden_size**0.5
        elif self._complex:
            norm_in_D, norm_mlp_D = self._scaled(norm_in_D), self._scaled(norm_mlp_D)
        elif not attention.q_proj.weight.requires_grad:
            # Frozen, the module's weights become views of these, and are held once; trained ones may lie in others'
            # memory, such as DeepSpeed's.
            modules = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
            parts = (*qkv.split([len(query), len(key), len(value)]), *gate_up.chunk(2))
            for module, part in zip(modules, parts, strict=True):
                module.weight.data = part
        return _Layer(
            norm_in_D,
            Product(qkv),
            Product(attention.o_proj.weight.detach()),
            norm_mlp_D,
            Product(gate_up),
            Product(mlp.down_proj.weight.detach()),
        )

    def _norm_in(self, layer: Any) -> Tensor:
        """The weight of the norm before a layer's attention."""
        weight_D: Tensor = layer.input_layernorm.weight.detach()
        return weight_D

    def _scaled(self, norm_D: Tensor) -> Tensor:
        """A norm's weight with the √D that `_norm` leaves out."""
        return norm_D.to(self.dtype) * self.hidden_size**0.5

    def _norm(self, x_XD: Tensor, weight_D: Tensor) -> Tensor:
        """RMSNorm; with weights of float32 without its weight and its √D, which the next product holds."""
        if self._now is not None:
            normed_XD: Tensor = self._now.normed(x_XD, weight_D, self._eps)
            return normed_XD
        if not self._complex:
            return F.rms_norm(x_XD, (self.hidden_size,), weight_D, self._eps)
        x_XD = x_XD / torch.hypot(torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True), self._offset)
        return x_XD if self._folded else x_XD * weight_D

    def _final_norm(self, x_XD: Tensor) -> Tensor:
        """RMSNorm with its weight: what follows may be no product of ours."""
        x_XD = self._norm(x_XD, self._norm_D)
        return x_XD * self._norm_D if self._folded else x_XD

    def _interleave(self, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        halves = weight.view(rows // self.key_width, 2, self.key_width // 2, columns)
        return halves.transpose(1, 2).reshape(rows, columns)

    def _rotation(self, positions_BM: Tensor, needed: int) -> tuple[Tensor, Tensor | None]:
        """Turns for each position, shaped to multiply [B, M, H, E]; tables grow to the longest position seen."""
        if needed > len(self._turns_SE):
            # A CUDA graph reads the table that it was captured with: tables that were outgrown stay where they are.
            self._outgrown += (self._turns_SE, self._sin_SE)
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

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> Tensor | None:
        """As of `LanguageModel`; None also for over `FEW_ROWS` tokens of an empty cache: attention is causal then."""
        if bias_BMn is None and start == 0 and stop > FEW_ROWS and not any(cache.lengths):
            return None
        return super()._mask(cache, bias_BMn, start, stop, end)

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        batch, count = tokens_BM.shape
        # Few kernels that do much pay where they are replayed; to launch one takes the host longer than an operation.
        self._now = self._fused if isinstance(cache, IndexedCache) else None
        hidden_XD = self._first(F.embedding(tokens_BM.reshape(-1), self._embedding_VD).to(self.dtype))
        if self._few is not None and type(cache) is KVCache and self._few.takes(len(hidden_XD)):
            turns_BM1E, _ = self._rotation(positions_BM, end)
            seen = (turns_BM1E, mask_B1MS, cache, start, end)
            hidden_XD, given = self._few(hidden_XD, self._read_apart(hidden_XD), *seen, self.given_layers)
        else:
            hidden_XD, given = self._through_layers(hidden_XD, cache, tokens_BM, positions_BM, mask_B1MS, start, end)
        if self.states == "after-norm":
            hidden_XD = self._final_norm(hidden_XD)
        if given:
            hidden_XD = torch.cat((*given, hidden_XD), -1)
        self._now = None
        return hidden_XD.view(batch, count, -1)

    def _through_layers(self, hidden_XD: Tensor, cache: KVCache, *seen: Any) -> tuple[Tensor, list[Tensor]]:
        """What comes out of the last layer, and what went into `given_layers`; `seen` as of `_attention`."""
        given = list[Tensor]()
        attend = self._attention(cache, *seen)
        for index, layer in enumerate(self._layers):
            if index in self.given_layers:
                given.append(hidden_XD.clone() if hidden_XD.is_cuda else hidden_XD)
            qkv_XO = self._read(layer.qkv, hidden_XD, layer.norm_in_D)
            hidden_XD = layer.out.add_to(hidden_XD, attend(index, qkv_XO))
            gate_up_XF = layer.gate_up(self._norm(hidden_XD, layer.norm_mlp_D))
            hidden_XD = layer.down.add_to(hidden_XD, self._gated(gate_up_XF))
        return hidden_XD, given

    def _gated(self, gate_up_XF: Tensor) -> Tensor:
        if self._now is not None:
            found_XF: Tensor = self._now.gated(gate_up_XF)
            return found_XF
        gate_XF, up_XF = gate_up_XF.chunk(2, -1)
        return F.silu(gate_XF) * up_XF

    def _fused_attention(
        self, cache: KVCache, positions_BM: Tensor, mask_B1MS: Tensor | None, end: int
    ) -> Callable[[int, Tensor], Tensor]:
        """`_attention` in kernels for GPUs."""
        fused = self._now
        assert isinstance(cache, IndexedCache)
        assert fused is not None
        assert mask_B1MS is not None
        slots_BM, mask_BMS = cache.slots_BM, mask_B1MS[:, 0]
        cos_BM1E, sin_BM1E = self._rotation(positions_BM, end)
        assert sin_BM1E is not None
        turns = cos_BM1E.reshape(-1, self.key_width), sin_BM1E.reshape(-1, self.key_width)

        def attended(index: int, qkv_XO: Tensor) -> Tensor:
            query_XHE = fused.rotate_and_keep(qkv_XO, *turns, cache.keys[index], cache.values[index], slots_BM)
            found_XO: Tensor = fused.attend(query_XHE, *cache.view(index, end), mask_BMS, slots_BM)
            return found_XO

        return attended

    def _attention(
        self,
        cache: KVCache,
        tokens_BM: Tensor,
        positions_BM: Tensor,
        mask_B1MS: Tensor | None,
        start: int,
        end: int,
    ) -> Callable[[int, Tensor], Tensor]:
        """What a layer reads [X, H · E], by its number and its queries, keys and values [X, O], which are kept."""
        if self._now is not None:
            return self._fused_attention(cache, positions_BM, mask_B1MS, end)
        batch, count = tokens_BM.shape
        turns_BM1E, sin_BM1E = self._rotation(positions_BM, end)
        rotated_heads = self.heads + self.kv_heads
        # Query heads that share keys become rows of one head, which every attention kernel takes, with any mask.
        group = self.heads // self.kv_heads if count <= FEW_ROWS else 1
        if mask_B1MS is not None and group > 1:
            mask_B1MS = mask_B1MS.repeat(1, 1, group, 1)
        causal = mask_B1MS is None and count > 1
        attend = partial(F.scaled_dot_product_attention, enable_gqa=self._grouped and group == 1, is_causal=causal)
        stops = [length + 1 for length in cache.lengths]
        padding = self.kv_heads * self.key_width * (end - sum(stops) / batch)
        apart = self.device.type == "cpu" and count == 1 and start == 0 and padding > _PADDING  # a root sees all slots

        def attended(index: int, qkv_XO: Tensor) -> Tensor:
            qkv_BMHE = qkv_XO.view(batch, count, -1, self.key_width)
            qk_BHME = self._rotate(qkv_BMHE[:, :, :rotated_heads], turns_BM1E, sin_BM1E).transpose(1, 2)
            cache.write(index, qk_BHME[:, self.heads :], qkv_BMHE[:, :, rotated_heads:].transpose(1, 2), start)
            query_BHME = qk_BHME[:, : self.heads]
            if group > 1:
                query_BHME = query_BHME.reshape(batch, self.kv_heads, group * count, -1)
            sides = (query_BHME, *cache.view(index, end))
            if apart:
                rows = zip(*(side.split(1) for side in sides), stops, strict=True)
                attended_BHME = torch.cat([attend(q, k[:, :, :stop], v[:, :, :stop]) for q, k, v, stop in rows])
            else:
                attended_BHME = attend(*sides, attn_mask=mask_B1MS)
            attended_BKGME = attended_BHME.unflatten(2, (group, count))
            return attended_BKGME.permute(0, 3, 1, 2, 4).reshape(batch * count, -1)

        return attended

    def _first(self, embedded_XD: Tensor) -> Tensor:
        """What the first layer reads, of the tokens' embeddings."""
        return embedded_XD

    def _read(self, product: Product, hidden_XD: Tensor, weight_D: Tensor) -> Tensor:
        """A layer's queries, keys and values."""
        return product(self._norm(hidden_XD, weight_D))

    def _read_apart(self, hidden_XD: Tensor) -> Tensor | None:
        """The first layer's queries, keys and values, where they are read from more than what goes into it."""
        return None

    def logits(self, hidden_XD: Tensor) -> Tensor:
        logits_XR, kept_R = self.proposed_logits(hidden_XD)
        return logits_XR if kept_R is None else widen(logits_XR, kept_R, self.vocab_size)

    def proposed_logits(self, hidden_XD: Tensor) -> tuple[Tensor, Tensor | None]:
        rows_XD = hidden_XD.flatten(0, -2)[:, -self.hidden_size :].contiguous()
        if self.states == "before-norm":
            rows_XD = self._final_norm(rows_XD)
        if self._inner is not None:
            rows_XD = self._inner(rows_XD)
        return self._head(rows_XD).view(*hidden_XD.shape[:-1], -1), self._kept_R

"""Optimised forward pass for common decoder families, equivalent to that of transformers with less overhead.

Projections with the same input are fused, rotary embeddings are one complex multiplication, norms take three small
operations, and on a CPU matrix products with few rows are computed in C (`Product`).

Shape letters: B batch, M new tokens, X = B · M, S cache slots, D hidden, F width of the MLP, H heads, E head width, I
and O inputs and outputs of a product, R draft vocabulary, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoints.storage.draft_vocabulary import widen
from ...checkpoints.verify.windows import position_limit, windows
from .base import NO_LIMIT, LanguageModel
from .draft_vocabulary import kept_tokens
from .kv_cache import IndexedCache, KVCache
from .products.layers import DecoderLayers, Kind
from .products.native import compiled, fused_kernels
from .products.product import FEW_ROWS, FOURS, FewRows, Product, is_int8, rounded
from .products.rotation import Rotation, Turns, rotations
from .products.shared import is_shared, pack_layers, share, stored_weights
from .products.weights import ACTIVATIONS, FAMILIES, GATES, join_weights, norm_weight, split_heads

ACTIVATED: dict[int, Callable[..., Tensor]] = {
    1: F.silu,
    2: partial(F.gelu, approximate="tanh"),
    3: F.relu,
    4: partial(F.gelu, approximate="tanh"),
    5: F.gelu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in_D: Tensor | None
    qkv: Product
    norm_heads_O: Tensor | None
    """Weights of the query and key norms, followed by ones for the values."""
    out: Product
    norm_attended_D: Tensor | None
    norm_mlp_D: Tensor | None
    up: Product
    down: Product
    norm_made_D: Tensor | None


class LeanDecoder(LanguageModel):
    """Decoder with an optimised forward pass for the model families in `FAMILIES`."""

    _embedding_scale = 1.0
    _positions_SD: Tensor | None = None
    _shares = False

    @staticmethod
    def covers(model: PreTrainedModel) -> bool:
        """Return whether the optimised forward pass supports a model."""
        config = model.config
        if (family := FAMILIES.get(config.model_type)) is None or _activation(config) is None:
            return False
        decoder = _decoder(model)
        norm = getattr(decoder, family.norm)
        attentions = [getattr(layer, family.attention) for layer in getattr(decoder, family.layers)]
        rope = getattr(config, "rope_parameters", None) or {}
        ropes = [each for each in rope.values() if isinstance(each, dict)] or [rope]
        return (
            all(each.get("rope_type", "default") in {"default", "linear", "llama3"} for each in ropes)
            and all(each.get("partial_rotary_factor", 1.0) == 1 or each is rope for each in ropes)
            and not getattr(config, "use_bidirectional_attention", None)
            and getattr(norm, "weight", None) is not None
            and getattr(config, "do_layer_norm_before", True)
            and getattr(config, "word_embed_proj_dim", config.hidden_size) == config.hidden_size
            and all(hasattr(each, "q_norm") or each.scaling == _width(config) ** -0.5 for each in attentions)
            and model.get_output_embeddings().bias is None
            and len({parameter.device for parameter in model.parameters()}) == 1
            and not getattr(model, "is_quantized", False)
            # Hooks and adapters (LoRA) act in the forward methods of modules, which are bypassed here.
            and not any(hasattr(module, "_hf_hook") or hasattr(module, "base_layer") for module in model.modules())
        )

    def __init__(
        self, model: PreTrainedModel, states: str = "after-norm", aux_layers: Sequence[int] = (), share: bool = False
    ) -> None:
        decoder, output, family = _decoder(model), model.get_output_embeddings(), FAMILIES[model.config.model_type]
        self.states, self.aux_layers, self._shares = states, tuple(aux_layers), share
        self._kept_R = kept_tokens(model)
        embedding = getattr(decoder, family.embedding)
        if share and self._kept_R is None:
            pack_layers([output, embedding], is_int8(model))
        head, embedding_VD = stored_weights(output), stored_weights(embedding)
        if (scale := getattr(embedding, "embed_scale", None)) is not None:
            self._embedding_scale = float(scale.to(embedding_VD.dtype))  # rounded as in transformers
        if family.positions is not None:
            positions = getattr(decoder, family.positions)
            self._positions_SD = positions.weight.detach()[getattr(positions, "offset", 0) :]
        self.vocab_size = head.shape[0]
        if self._kept_R is not None:
            head = head.rows(self._kept_R) if isinstance(head, FewRows) else head[self._kept_R]
        self._hold(model.config, embedding_VD, head, decoder, getattr(decoder, family.layers), is_int8(model))

    def _hold(self, config: Any, embedding: Any, head: Any, decoder: Any, layers: Iterable[Any], int8: bool) -> None:
        """Prepare a decoder's weights, norms and rotary embeddings for the optimised forward pass."""
        self.config, self._family = config, FAMILIES[config.model_type]
        self.hidden_size = embedding.shape[1]
        self.max_positions = position_limit(config) or NO_LIMIT
        # On a CPU, activations of bfloat16 models are faster and more exact in float32.
        wide = embedding.dtype == torch.bfloat16 and embedding.device.type == "cpu" and compiled() is not None
        self.device, self.dtype = embedding.device, torch.float32 if wide else embedding.dtype
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.key_width = self.value_width = _width(config)
        self._grouped = self.heads != self.kv_heads
        norm = getattr(decoder, self._family.norm)
        self._centred = isinstance(norm, nn.LayerNorm)
        self._eps = norm.eps if self._centred else config.rms_norm_eps
        caps = (getattr(config, f"{name}_logit_softcapping", None) or 0.0 for name in ("attn", "final"))
        self._cap, self._final_cap = caps
        self._parallel = getattr(config, "use_parallel_residual", False)
        self._embedding_VD = embedding
        self._int8, self._product = int8, partial(Product, int8=int8)
        self._head = self._product(head)
        # One complex product rotates adjacent elements, while transformers pairs element e with e + E/2. Queries and
        # keys are therefore projected in interleaved order, which does not change their inner products. GPUs use
        # kernels instead.
        self._complex = self.dtype == torch.float32 and self.device.type == "cpu"
        self._fused = fused_kernels() if self.device.type == "cuda" and not self._cap else None
        rotary = getattr(decoder, "rotary_emb", None)
        self._rotation = Rotation(config, rotary, self.key_width, self._complex, self.dtype)
        self._now: Any = None  # kernels of the current forward
        self.supports_any_length = self._fused is not None
        # hypot(‖x‖₂, √(D ε)) is √D times the root mean square that RMSNorm divides by.
        self._offset_value = (self.hidden_size * self._eps) ** 0.5
        self._offset = torch.tensor(self._offset_value, device=self.device)
        norm_D = norm_weight(norm)
        self._norm_bias_D = norm.bias.detach().to(self.dtype) if getattr(norm, "bias", None) is not None else None
        self._norm_D = self._scaled(norm_D) if self._complex else norm_D.to(self.dtype)
        self._norms_heads_apart = False
        self._layers = [self._fuse(layer) for layer in layers]
        self.layers = len(self._layers)
        self.windows = windows(config)[: self.layers]
        self._activation = _activation(config) or 0
        # Window and rotation of each layer.
        sides = list(zip(self.windows, rotations(config), strict=False))
        self._sides = list(dict.fromkeys(sides))
        self._side_of = [self._sides.index(side) for side in sides]
        self._few = None
        if self._complex and DecoderLayers.fit(self._layers, self.key_width):
            sizes, settings = (self.heads, self.kv_heads, self.key_width), (self._activation, self._eps, self._centred)
            kind = Kind(*sizes, *settings, self._parallel, self._cap, self._norms_heads_apart)
            self._few = DecoderLayers(self._layers, self._side_of, kind)

    def _hold_heads(self, heads: Any, layers: Iterable[Any], rotary: Any) -> None:
        """Prepare heads with attached target weights (see `AuxiliaryHeads.attach`) and `rotary`, a module class."""
        self.required_aux_layers, self.vocab_size, self._kept_R = heads.layers, heads.vocab_size, heads.proposed
        weight_DG, int8 = heads.fc.weight.detach(), is_int8(heads)
        head_RD = heads.projection().to(weight_DG.dtype)
        if int8:
            head_RD = rounded(head_RD)
        # Frequencies in 16 bits would be too inexact for distant positions.
        heads.rotary_emb = rotary(heads.config).to(weight_DG.device)
        self._hold(heads.config, heads.embedding.to(weight_DG.dtype), head_RD, heads, layers, int8)
        self._fuse_aux = self._product(weight_DG)

    @property
    def weights_dtype(self) -> torch.dtype:
        return self._embedding_VD.dtype

    @property
    def precision(self) -> float:
        few_rows = self._head.few_rows
        if few_rows is not None and few_rows.kind == FOURS:  # it rounds inputs to 16 bits, relative to a row's maximum
            return 2.0**-15
        return super().precision

    def _fuse(self, layer: Any) -> _Layer:
        """Prepare the weights of a layer, and fuse projections with the same input."""
        family = self._family
        attention, mlp = getattr(layer, family.attention), layer if family.mlp is None else getattr(layer, family.mlp)
        modules = [[getattr(attention, name) for name in family.qkv], [getattr(mlp, name) for name in family.up]]
        norms = [None if name is None else getattr(layer, name) for name in family.norms]
        (qkv_OI, bias_O), (up_OI, bias_F) = (join_weights(*side) for side in zip(modules, norms[::2], strict=True))
        weights = [None if norm is None else norm_weight(norm) for norm in norms]
        norm_in_D, norm_mlp_D, norm_heads_O = self._norm_in(layer, weights[0]), weights[2], self._head_norms(attention)
        order_O = torch.arange(len(qkv_OI)) if family.by_head or self._rotation.reorders else None
        if family.by_head:
            qkv_OI, bias_O, order_O = _each(partial(split_heads, width=self.key_width), qkv_OI, bias_O, order_O)
        if self._rotation.reorders:
            reorder = partial(self._rotation.reorder, heads=self.heads + self.kv_heads)
            qkv_OI, bias_O, order_O, norm_heads_O = _each(reorder, qkv_OI, bias_O, order_O, norm_heads_O)
        if self._complex:
            norm_in_D, norm_mlp_D = _each(self._scaled, norm_in_D, norm_mlp_D)
        norms = [norm_in_D, weights[1], norm_mlp_D, weights[3]]
        in_D, attended_D, mlp_D, made_D = _each(lambda norm_D: norm_D.to(self.dtype), *norms)
        qkv, up = self._product(qkv_OI, bias_O), self._product(up_OI, bias_F)
        self._share(modules[0], qkv, order_O)
        self._share(modules[1], up)
        out, down = (self._alone(module) for module in (getattr(attention, family.out), getattr(mlp, family.down)))
        return _Layer(in_D, qkv, norm_heads_O, out, attended_D, mlp_D, up, down, made_D)

    def _share(self, modules: Sequence[Any], whole: Product, order_O: Tensor | None = None) -> None:
        if whole.few_rows is not None and (self._shares or is_shared(modules[0])):
            share(modules, whole.few_rows, order_O)
        elif whole.few_rows is None and order_O is None and len(modules) > 1 and not modules[0].weight.requires_grad:
            sizes = [len(module.weight) for module in modules]  # frozen weights only: DeepSpeed may manage trained ones
            for module, part in zip(modules, whole.weight_OI.split(sizes), strict=True):
                module.weight.data = part

    def _alone(self, module: Any) -> Product:
        if self._shares:
            pack_layers([module], self._int8)
        weight_OI, bias_O = (stored_weights(module), module.bias) if is_shared(module) else join_weights([module])
        return self._product(weight_OI, bias_O)

    def _norm_in(self, layer: Any, norm_D: Tensor | None) -> Tensor | None:
        """Return the weight of the norm before a layer's attention."""
        return norm_D

    def _head_norms(self, attention: Any) -> Tensor | None:
        """Return the weights of query and key norms, followed by ones for the values, or None if there are no norms."""
        if getattr(attention, "q_norm", None) is None:
            return None
        query_O, key_O = norm_weight(attention.q_norm), norm_weight(attention.k_norm)
        self._norms_heads_apart = len(query_O) == self.key_width
        if self._norms_heads_apart:
            query_O = query_O * (attention.scaling * self.key_width**0.5)
        query, key = (heads * self.key_width for heads in (self.heads, self.kv_heads))
        sides = query_O.repeat(query // len(query_O)), key_O.repeat(key // len(key_O))
        return torch.cat((*sides, torch.ones_like(sides[1]))).to(self.dtype)

    def _scaled(self, norm_D: Tensor) -> Tensor:
        """Multiply the weight of a norm by √D, a factor that `_norm` omits."""
        return norm_D.to(self.dtype) * self.hidden_size**0.5

    def _norm(self, x_XD: Tensor, weight_D: Tensor | None) -> Tensor:
        """Apply a norm without its bias, which the next product adds. Return the input if the weight is None."""
        if weight_D is None:
            return x_XD
        if self._centred and self._complex:
            x_XD = x_XD - x_XD.mean(-1, keepdim=True)
        elif self._centred:
            return F.layer_norm(x_XD, (self.hidden_size,), weight_D, None, self._eps)
        if self._now is not None:
            normed_XD: Tensor = self._now.normed(x_XD, weight_D, self._eps)
            return normed_XD
        if not self._complex:
            return F.rms_norm(x_XD, (self.hidden_size,), weight_D, self._eps)
        x_XD = x_XD / torch.hypot(torch.linalg.vector_norm(x_XD, dim=-1, keepdim=True), self._offset)
        return x_XD * weight_D

    def _final_norm(self, x_XD: Tensor) -> Tensor:
        """Apply the final norm including its bias."""
        x_XD = self._norm(x_XD, self._norm_D)
        return x_XD if self._norm_bias_D is None else x_XD + self._norm_bias_D

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> Tensor | None:
        """Return the attention mask, or None if the layers apply a causal mask themselves.

        The layers do so for chains that run in C, and for prompts of more than `FEW_ROWS` tokens if there is no
        attention window or soft cap.
        """
        if bias_BMn is None and self._in_c(cache, stop - start):
            return None
        whole = all(window is None or end <= window for window in self.windows)
        if bias_BMn is None and start == 0 and stop > FEW_ROWS and not any(cache.lengths) and whole and not self._cap:
            return None
        return super()._mask(cache, bias_BMn, start, stop, end)

    def _in_c(self, cache: KVCache, count: int) -> bool:
        """Return whether the C implementation of the layers supports `count` tokens per row."""
        return self._few is not None and type(cache) is KVCache and self._few.takes(len(cache.lengths), count)

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        batch, count = tokens_BM.shape
        # Fused kernels are faster only in graph replays, since launching one takes longer than a PyTorch operation.
        self._now = self._fused if isinstance(cache, IndexedCache) else None
        tokens_X, held_VD = tokens_BM.reshape(-1), self._embedding_VD
        embedded_XD = held_VD.rows(tokens_X) if isinstance(held_VD, FewRows) else F.embedding(tokens_X, held_VD)
        embedded_XD = embedded_XD.to(self.dtype)
        if self._positions_SD is not None:
            # Rows that have ended may run beyond the last learned position. Their output is ignored.
            clamped_BM = positions_BM.expand(batch, -1).clamp(max=len(self._positions_SD) - 1)
            embedded_XD = embedded_XD + F.embedding(clamped_BM.reshape(-1), self._positions_SD)
        hidden_XD = self._first(embedded_XD if self._embedding_scale == 1 else embedded_XD * self._embedding_scale)
        turned = self._rotation.at(positions_BM, end, {by for _, by in self._sides})
        sides = [(turned[by], self._windowed(mask_B1MS, positions_BM, end, window)) for window, by in self._sides]
        if self._in_c(cache, count):
            assert self._few is not None
            seen = ([(turns, mask) for (turns, _), mask in sides], cache, start, end)
            hidden_XD, aux_states = self._few(hidden_XD, self._read_apart(hidden_XD), *seen, self.aux_layers)
        else:
            attends = [self._attention(cache, turns, mask, count, start, end) for turns, mask in sides]
            hidden_XD, aux_states = self._through_layers(hidden_XD, [attends[side] for side in self._side_of])
        if self.states == "after-norm":
            hidden_XD = self._final_norm(hidden_XD)
        if aux_states:
            hidden_XD = torch.cat((*aux_states, hidden_XD), -1)
        self._now = None
        return hidden_XD.view(batch, count, -1)

    def _through_layers(
        self, hidden_XD: Tensor, attends: Sequence[Callable[[int, Tensor], Tensor]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers with the given attention functions. Return the output and the inputs of `aux_layers`."""
        aux_states = list[Tensor]()
        for index, (layer, attend) in enumerate(zip(self._layers, attends, strict=True)):
            if index in self.aux_layers:
                aux_states.append(hidden_XD.clone() if hidden_XD.is_cuda else hidden_XD)
            qkv_XO = self._read(layer.qkv, hidden_XD, layer.norm_in_D)
            attended_XO = attend(index, qkv_XO)
            if self._parallel:  # before the sum, which modifies `hidden_XD` in place on a GPU
                up_XF = layer.up(self._norm(hidden_XD, layer.norm_mlp_D))
            hidden_XD = self._added(hidden_XD, layer.out, attended_XO, layer.norm_attended_D)
            if not self._parallel:
                up_XF = layer.up(self._norm(hidden_XD, layer.norm_mlp_D))
            hidden_XD = self._added(hidden_XD, layer.down, self._activated(up_XF), layer.norm_made_D)
        return hidden_XD, aux_states

    def _added(self, hidden_XD: Tensor, product: Product, x_XI: Tensor, norm_D: Tensor | None) -> Tensor:
        if norm_D is None:
            return product.add_to(hidden_XD, x_XI)
        return hidden_XD + F.rms_norm(product(x_XI), norm_D.shape, norm_D, self._eps)

    def _norm_heads(self, qkv_XO: Tensor, layer: _Layer) -> Tensor:
        """Apply the query and key norms, if the layer has them."""
        if layer.norm_heads_O is None:
            return qkv_XO
        query, key = (heads * self.key_width for heads in (self.heads, self.kv_heads))
        *turned, value_XO = qkv_XO.split([query, key, key], -1)
        spans = [self.key_width] * 2 if self._norms_heads_apart else [query, key]
        normed = [
            F.rms_norm(side.unflatten(-1, (-1, span)), (span,), None, self._eps).flatten(-2)
            for side, span in zip(turned, spans, strict=True)
        ]
        return torch.cat((*normed, value_XO), -1) * layer.norm_heads_O

    def _activated(self, up_XF: Tensor) -> Tensor:
        if self._now is not None and self._activation == GATES["silu"]:
            gated_XF: Tensor = self._now.gated(up_XF)
            return gated_XF
        opened = ACTIVATED[self._activation]
        if not self._family.gated:
            return opened(up_XF)
        gate_XF, up_XF = up_XF.chunk(2, -1)
        return opened(gate_XF) * up_XF

    def _fused_attention(
        self, cache: KVCache, turns: Turns, mask_B1MS: Tensor | None, end: int
    ) -> Callable[[int, Tensor], Tensor]:
        """Return the same function as `_attention`, implemented with fused GPU kernels."""
        fused = self._now
        assert isinstance(cache, IndexedCache)
        assert fused is not None
        assert mask_B1MS is not None
        slots_BM, mask_BMS = cache.slots_BM, mask_B1MS[:, 0]
        cos_BM1E, sin_BM1E = turns
        assert sin_BM1E is not None
        cos_sin = cos_BM1E.reshape(-1, self.key_width), sin_BM1E.reshape(-1, self.key_width)

        def attended(index: int, qkv_XO: Tensor) -> Tensor:
            norms_O = self._layers[index].norm_heads_O
            if not self._norms_heads_apart:
                qkv_XO, norms_O = self._norm_heads(qkv_XO, self._layers[index]), None
            kept = cache.keys[index], cache.values[index], slots_BM
            query_XHE = fused.rotate_and_keep(qkv_XO, *cos_sin, *kept, norms_O, self._eps)
            attended_XO: Tensor = fused.attend(query_XHE, *cache.view(index, end), mask_BMS, slots_BM)
            return attended_XO

        return attended

    def _attention(
        self, cache: KVCache, turns: Turns, mask_B1MS: Tensor | None, count: int, start: int, end: int
    ) -> Callable[[int, Tensor], Tensor]:
        """Return a function that maps a layer's index and QKV projections [X, O] to attention outputs [X, H · E]."""
        if self._now is not None:
            return self._fused_attention(cache, turns, mask_B1MS, end)
        batch = len(cache.lengths)
        rotated_heads = self.heads + self.kv_heads
        # Query heads that share keys become rows of one head, which every attention kernel supports with any mask.
        group = self.heads // self.kv_heads if count <= FEW_ROWS else 1
        if mask_B1MS is not None and group > 1:
            mask_B1MS = mask_B1MS.repeat(1, 1, group, 1)
        causal = mask_B1MS is None and count > 1
        attend: Callable[..., Tensor] = partial(
            F.scaled_dot_product_attention, enable_gqa=self._grouped and group == 1, is_causal=causal
        )
        if self._cap:
            attend = partial(_capped_attention, cap=self._cap)

        def attended(index: int, qkv_XO: Tensor) -> Tensor:
            qkv_XO = self._norm_heads(qkv_XO, self._layers[index])
            qkv_BMHE = qkv_XO.view(batch, count, -1, self.key_width)
            qk_BHME = self._rotation.turn(qkv_BMHE[:, :, :rotated_heads], turns).transpose(1, 2)
            cache.write(index, qk_BHME[:, self.heads :], qkv_BMHE[:, :, rotated_heads:].transpose(1, 2), start)
            query_BHME = qk_BHME[:, : self.heads]
            if group > 1:
                query_BHME = query_BHME.reshape(batch, self.kv_heads, group * count, -1)
            attended_BHME = attend(query_BHME, *cache.view(index, end), attn_mask=mask_B1MS)
            attended_BKGME = attended_BHME.unflatten(2, (group, count))
            return attended_BKGME.permute(0, 3, 1, 2, 4).reshape(batch * count, -1)

        return attended

    def _first(self, embedded_XD: Tensor) -> Tensor:
        """Compute the input of the first layer from the token embeddings."""
        return embedded_XD

    def _read(self, product: Product, hidden_XD: Tensor, weight_D: Tensor | None) -> Tensor:
        return product(self._norm(hidden_XD, weight_D))

    def _read_apart(self, hidden_XD: Tensor) -> Tensor | None:
        """Return the first layer's queries, keys and values if they are computed separately (EAGLE-3), or None."""
        return None

    def logits(self, hidden_XD: Tensor) -> Tensor:
        logits_XR, kept_R = self.draft_logits(hidden_XD)
        return logits_XR if kept_R is None else widen(logits_XR, kept_R, self.vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size if self._kept_R is None else len(self._kept_R)

    def draft_logits(self, hidden_XD: Tensor) -> tuple[Tensor, Tensor | None]:
        rows_XD = hidden_XD.flatten(0, -2)[:, -self.hidden_size :].contiguous()
        if self.states == "before-norm":
            rows_XD = self._final_norm(rows_XD)
        logits_XR = _capped(self._head(rows_XD), self._final_cap)
        return logits_XR.view(*hidden_XD.shape[:-1], -1), self._kept_R


def _each(function: Callable[[Tensor], Tensor], *tensors: Tensor | None) -> Iterator[Any]:
    return (None if tensor is None else function(tensor) for tensor in tensors)


def _decoder(model: Any) -> Any:
    """Return the submodule of a model that contains its layers."""
    return getattr(model.base_model, "decoder", model.base_model)


def _width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _activation(config: Any) -> int | None:
    """Return the number of a model's MLP activation in vectors.h, or None if it is not supported."""
    names = (getattr(config, name, None) for name in ("hidden_activation", "hidden_act", "activation_function"))
    name = next(filter(None, names), None)
    return (GATES if FAMILIES[config.model_type].gated else ACTIVATIONS).get(str(name))


def _capped(x: Tensor, cap: float) -> Tensor:
    """Apply soft capping as in Gemma 2: cap · tanh(x / cap). A cap of 0 disables it."""
    return cap * torch.tanh(x / cap) if cap else x


def _capped_attention(
    query_BHME: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, *, cap: float, attn_mask: Tensor | None = None
) -> Tensor:
    """Compute attention with soft-capped scores, which PyTorch's attention function does not support."""
    group = query_BHME.shape[1] // key_BKSE.shape[1]
    key_BHSE, value_BHSE = (each.repeat_interleave(group, 1) for each in (key_BKSE, value_BKSE))
    scores_BHMS = _capped(query_BHME @ key_BHSE.mT * query_BHME.shape[-1] ** -0.5, cap)
    return (scores_BHMS if attn_mask is None else scores_BHMS + attn_mask).softmax(-1) @ value_BHSE

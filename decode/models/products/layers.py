"""Decoder layers that run in one call of a C function on a CPU. Long inputs are split into several calls.

Shape letters: L layers, B batch, M new tokens, X = B · M, D hidden, O queries, keys and values, S cache slots, E head
width.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .native import compiled, in_use
from .product import AT_ONCE, FewRows, Product

Side = tuple[Tensor, Tensor | None]
"""Rotary factors of a layer, complex [1 or B, M, 1, E / 2], and its mask [1 or B, 1, M, S] or None."""

_WIDTH = 16


class Kind(NamedTuple):
    """Architecture of decoder layers."""

    heads: int
    kv_heads: int
    width: int
    activation: int
    """Number of the MLP's activation in `GATES` or `ACTIVATIONS`."""
    eps: float
    """Epsilon of the norms."""
    centred: bool
    """True for LayerNorm, False for RMSNorm."""
    parallel: bool
    """True if attention and MLP have the same input."""
    cap: float
    """Soft cap of attention scores, or 0 to disable it."""
    norms_apart: bool
    """True if the query and key norms are applied to each head separately."""


class DecoderLayers:
    """Decoder layers that compute in float32 with weights stored as float32, bfloat16 or int8."""

    @staticmethod
    def fit(layers: Sequence[Any], width: int) -> bool:
        """Return whether the C function supports these layers and this head width."""
        products = [product for layer in layers for product in _products(layer)]
        fits = all(each.fits and not any(n % _WIDTH for n in each.shape) for each in products) and width % _WIDTH == 0
        return fits and len({each is None for layer in layers for each in (layer.norm_in_D, layer.norm_mlp_D)}) == 1

    def __init__(self, layers: Sequence[Any], sides: Sequence[int], kind: Kind) -> None:
        """Prepare layers for which `fit` returns True. Layer i uses the `Side` with index `sides[i]` in each call."""
        self._sides, self._architecture = tuple(sides), kind
        hidden = layers[0].up.shape[1]  # the QKV projection may have a wider input
        self._offset = -1.0 if layers[0].norm_in_D is None else (hidden * kind.eps) ** 0.5
        few = [[each.few_rows or FewRows(each.weight_OI, each.int8) for each in _products(layer)] for layer in layers]
        kept = [[None if each is None else each.float().contiguous() for each in _vectors(layer)] for layer in layers]
        self._held = few, kept
        """Objects that own the memory to which `_table` points."""
        self._table = torch.zeros(len(layers), 18, dtype=torch.int64)
        self._table[:, :4] = torch.tensor([[product.pointer for product in products] for products in few])
        self._table[:, 4:13] = torch.tensor([[_address(each) for each in of_layer] for of_layer in kept])
        self._kind = few[0][0].kind
        assert all(product.kind == self._kind for products in few for product in products)
        self._mlp = layers[0].down.shape[1]
        self.most_tokens = min(product.at_once for products in few for product in products)
        self._most_rows = few[0][0].most_rows
        self._call = compiled().layers

    def takes(self, rows: int, count: int) -> bool:
        """Return whether the C function is enabled and supports `rows` rows of `count` tokens each."""
        return in_use() and 0 < rows <= self.most_tokens and rows * count <= self._most_rows

    def __call__(
        self,
        hidden_XD: Tensor,
        first_qkv_XO: Tensor | None,
        sides: Sequence[Side],
        cache: Any,
        start: int,
        end: int,
        aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers. Return the output [X, D] and the inputs of `aux_layers`, which must be increasing.

        Keys and values are written to the cache. The tokens are the nodes of each row's tree from `start` on.
        `first_qkv_XO` contains the queries, keys and values of the first layer if they are already computed.
        """
        batch, count = len(cache.lengths), sides[0][0].shape[1]
        if batch * count <= self.most_tokens:
            return self._few(hidden_XD, first_qkv_XO, sides, cache, start, end, aux_layers)
        parts = -(-count // max(1, min(AT_ONCE, self.most_tokens) // batch))
        hidden_BMD = hidden_XD.view(batch, count, -1)
        first_qkv_BMO = None if first_qkv_XO is None else first_qkv_XO.view(batch, count, -1)
        outputs = list[Tensor]()  # [number of auxiliary layers + 1, B, tokens of the part, D]
        for part in range(parts):
            span = slice(count * part // parts, count * (part + 1) // parts)
            one_XD, given = self._few(
                hidden_BMD[:, span].flatten(0, 1),
                None if first_qkv_BMO is None else first_qkv_BMO[:, span].flatten(0, 1),
                [(turns[:, span], None if mask is None else mask[:, :, span]) for turns, mask in sides],
                cache,
                start + span.start,
                end,
                aux_layers,
            )
            outputs.append(torch.stack((*given, one_XD)).unflatten(1, (batch, -1)))
        *given, hidden_XD = torch.cat(outputs, 2).flatten(1, 2)
        return hidden_XD, given

    def _few(
        self,
        hidden_XD: Tensor,
        first_qkv_XO: Tensor | None,
        sides: Sequence[Side],
        cache: Any,
        start: int,
        end: int,
        aux_layers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers (see `__call__`) on at most `most_tokens` tokens."""
        kind = self._architecture
        heads, kv_heads, width = kind[:3]
        sides = [(turns.contiguous(), None if mask is None else mask.contiguous()) for turns, mask in sides]
        batch, (rows_of_turns, count) = len(cache.lengths), sides[0][0].shape[:2]
        rows, inputs = hidden_XD.shape
        keys_BHSE = cache.keys[0]
        row_apart, head_apart, slot_apart, _ = keys_BHSE.stride()
        hidden_XD = hidden_XD.contiguous()
        assert hidden_XD.dtype == keys_BHSE.dtype == torch.float32
        assert keys_BHSE.stride() == cache.values[-1].stride()
        assert slot_apart == width
        assert all(mask is None or mask.dtype == torch.float32 for _, mask in sides)
        assert first_qkv_XO is None or first_qkv_XO.is_contiguous()
        seen = [(turns.data_ptr(), _address(mask), 1 if mask is None else len(mask)) for turns, mask in sides]
        slots = zip(cache.keys, cache.values, self._sides, strict=True)
        self._table[:, 13:] = torch.tensor([(k.data_ptr(), v.data_ptr(), *seen[side]) for k, v, side in slots])
        work = hidden_XD.new_empty(rows * ((2 * heads + 2 * kv_heads) * width + 2 * self._mlp + inputs))
        given = list[Tensor]()
        bounds = (0, *aux_layers, len(self._table))
        for part, (first, last) in enumerate(pairwise(bounds)):
            if part:
                given.append(hidden_XD)
            made_XD = torch.empty_like(hidden_XD)
            qkv = None if first or first_qkv_XO is None else first_qkv_XO.data_ptr()
            data = hidden_XD.data_ptr(), qkv, work.data_ptr(), made_XD.data_ptr(), cache.lengths_B.data_ptr()
            sizes = (inputs, self._mlp, last - first, self._kind, batch, count, heads, kv_heads, width, start, end)
            how = torch.get_num_threads(), kind.norms_apart, kind.activation, kind.centred, kind.parallel
            numbers = self._offset, kind.eps, kind.cap
            apart = rows_of_turns, row_apart, head_apart
            self._call(self._table[first:].data_ptr(), *data, *apart, *sizes, *how, *numbers)
            if last > first:
                hidden_XD = made_XD
        return hidden_XD, given


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vectors(layer: Any) -> tuple[Tensor | None, ...]:
    """Return a layer's norm weights and biases in the order that layers.c expects."""
    biases = (product.added_O for product in _products(layer))
    return layer.norm_in_D, layer.norm_mlp_D, *biases, layer.norm_heads_O, layer.norm_attended_D, layer.norm_made_D


def _products(layer: Any) -> tuple[Product, Product, Product, Product]:
    return layer.qkv, layer.out, layer.up, layer.down

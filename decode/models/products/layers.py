"""Whole decoder layers on a CPU, by one call of C for all of them; of many new tokens some at a time.

Letters: L layers, B batch, M new tokens, X = B · M, D hidden, O queries, keys and values side by side, S cache slots,
E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .few_rows import WIDE, FewRows, fits
from .native import compiled, in_use
from .product import Product

_WIDTH = 16
_AT_ONCE = 60  # tokens: whole groups of rows, as few_rows.c has them


class DecoderLayers:
    """Layers of norms, attention and gated MLPs in float32; their weights are float32 or bfloat16, and a copy of them
    is kept. See `made`."""

    @classmethod
    def made(
        cls, layers: Sequence[Any], heads: int, kv_heads: int, width: int, offset: float, folded: bool, apart: bool
    ) -> DecoderLayers | None:
        """Those of layers that each have the products `qkv`, `out`, `gate_up` and `down` and the norms' weights
        `norm_in_D` and `norm_mlp_D`, which the products hold if `folded`; norms divide by √(x² + offset²). Norms of
        queries and keys, `norm_heads_O`, are each head's own if `apart`. None where there is no such function for them
        here."""
        weights = [product.weight_OI for layer in layers for product in _products(layer)]
        right = all(fits(each) and each.shape[1] % _WIDTH == 0 for each in weights) and width % _WIDTH == 0
        return cls(layers, (heads, kv_heads, width), offset, folded, apart) if right else None

    def __init__(
        self, layers: Sequence[Any], sizes: tuple[int, int, int], offset: float, folded: bool, apart: bool
    ) -> None:
        self._sizes, self._offset, self._norms_apart = sizes, offset, apart
        few = [[product.few_rows or FewRows(product.weight_OI) for product in _products(layer)] for layer in layers]
        norms = [[None, None] if folded else [layer.norm_in_D, layer.norm_mlp_D] for layer in layers]
        kept = [
            [
                None if each is None else each.float().contiguous()
                for each in (*of_layer, layer.qkv.bias_O, layer.norm_heads_O)
            ]
            for of_layer, layer in zip(norms, layers, strict=True)
        ]
        self._held = few, kept
        """What the table points to."""
        self._table = torch.zeros(len(layers), 10, dtype=torch.int64)
        self._table[:, :4] = torch.tensor([[product.pointer for product in products] for products in few])
        pointers = [[0 if each is None else each.data_ptr() for each in of_layer] for of_layer in kept]
        self._table[:, 4:8] = torch.tensor(pointers)
        self._kind = few[0][0].kind
        assert all(product.kind == self._kind for products in few for product in products)
        self._mlp = layers[0].down.weight_OI.shape[1]
        self._most_tokens = min(product.most_rows for products in few for product in products)
        self._call = compiled().layers
        # The library multiplies bfloat16 by the processor's matrix unit, where it has one.
        self._reads = self._kind == WIDE or not torch.cpu._is_amx_tile_supported()

    def takes(self, rows: int, count: int) -> bool:
        """Whether it is for so many tokens of so many rows, now."""
        return in_use() and 0 < rows <= self._most_tokens and (self._reads or rows * count <= self._most_tokens)

    def __call__(
        self,
        hidden_XD: Tensor,
        first_qkv_XO: Tensor | None,
        turns_BM1E: Tensor,
        mask_B1MS: Tensor | None,
        cache: Any,
        start: int,
        end: int,
        given_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """What comes out of the last layer [X, D], and what went into `given_layers`, which rise; keys and values are
        written to the cache, a `KVCache`. The tokens are nodes `start` and on of each row's tree, and see themselves
        and what the mask, as of `LanguageModel.extend`, lets them see of the slots before; without one all. The first
        layer's queries, keys and values may be given."""
        batch, count = len(cache.lengths), turns_BM1E.shape[1]
        if batch * count <= self._most_tokens:
            return self._few(hidden_XD, first_qkv_XO, turns_BM1E, mask_B1MS, cache, start, end, given_layers)
        parts = -(-count // max(1, min(_AT_ONCE, self._most_tokens) // batch))
        hidden_BMD = hidden_XD.view(batch, count, -1)
        first_qkv_BMO = None if first_qkv_XO is None else first_qkv_XO.view(batch, count, -1)
        made = list[Tensor]()  # [number of given layers + 1, B, tokens of the part, D]
        for part in range(parts):
            here = slice(count * part // parts, count * (part + 1) // parts)
            one_XD, given = self._few(
                hidden_BMD[:, here].flatten(0, 1),
                None if first_qkv_BMO is None else first_qkv_BMO[:, here].flatten(0, 1),
                turns_BM1E[:, here],
                None if mask_B1MS is None else mask_B1MS[:, :, here].contiguous(),
                cache,
                start + here.start,
                end,
                given_layers,
            )
            made.append(torch.stack((*given, one_XD)).unflatten(1, (batch, -1)))
        *given, hidden_XD = torch.cat(made, 2).flatten(1, 2)
        return hidden_XD, given

    def _few(
        self,
        hidden_XD: Tensor,
        first_qkv_XO: Tensor | None,
        turns_BM1E: Tensor,
        mask_B1MS: Tensor | None,
        cache: Any,
        start: int,
        end: int,
        given_layers: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """`__call__` of at most `_most_tokens` tokens."""
        heads, kv_heads, width = self._sizes
        batch, count = len(cache.lengths), turns_BM1E.shape[1]
        rows, inputs = hidden_XD.shape
        keys_BHSE = cache.keys[0]
        row_apart, head_apart, slot_apart, _ = keys_BHSE.stride()
        hidden_XD, turns_BM1E = hidden_XD.contiguous(), turns_BM1E.contiguous()
        assert hidden_XD.dtype == keys_BHSE.dtype == torch.float32
        assert keys_BHSE.stride() == cache.values[-1].stride()
        assert slot_apart == width
        assert mask_B1MS is None or (mask_B1MS.is_contiguous() and mask_B1MS.dtype == torch.float32)
        assert first_qkv_XO is None or first_qkv_XO.is_contiguous()
        caches = [[key.data_ptr(), value.data_ptr()] for key, value in zip(cache.keys, cache.values, strict=True)]
        self._table[:, 8:] = torch.tensor(caches)
        work = hidden_XD.new_empty(rows * ((2 * heads + 2 * kv_heads) * width + 2 * self._mlp + inputs))
        masks = (None, 1) if mask_B1MS is None else (mask_B1MS.data_ptr(), len(mask_B1MS))
        given = list[Tensor]()
        bounds = (0, *given_layers, len(self._table))
        for part, (first, last) in enumerate(pairwise(bounds)):
            if part:
                given.append(hidden_XD)
            made_XD = torch.empty_like(hidden_XD)
            qkv = None if first or first_qkv_XO is None else first_qkv_XO.data_ptr()
            data = (hidden_XD.data_ptr(), qkv, work.data_ptr(), made_XD.data_ptr(), turns_BM1E.data_ptr(), masks[0])
            apart = (len(turns_BM1E), masks[1], row_apart, head_apart)
            sizes = (inputs, self._mlp, last - first, self._kind, batch, count, heads, kv_heads, width, start, end)
            table = self._table[first:].data_ptr()
            threads = torch.get_num_threads()
            self._call(
                table, *data, cache.lengths_B.data_ptr(), *apart, *sizes, threads, self._norms_apart, self._offset
            )
            if last > first:
                hidden_XD = made_XD
        return hidden_XD, given


def _products(layer: Any) -> tuple[Product, Product, Product, Product]:
    return layer.qkv, layer.out, layer.gate_up, layer.down

"""Layers of transformers that read the weights of optimised products, which are stored once.

Shape letters: X rows, I and O inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .product import FewRows, pack


class _Shared(nn.Module):
    few: FewRows
    places_O: Tensor | None
    """Rows of `few` that are the weights; None for all in order."""

    @property
    def weight(self) -> Tensor:
        """Copy of the weights, [O, I]; int8 in float32."""
        return self.few.rows(self.places_O)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class SharedLinear(_Shared, nn.Linear):  # type: ignore[override]
    """Linear layer that reads the weights of a product, and is computed by it if compiled functions are enabled."""

    def forward(self, input: Tensor) -> Tensor:
        x_XI = input.reshape(-1, self.in_features)
        if self.few.takes(len(x_XI)) and not (torch.is_grad_enabled() and input.requires_grad):
            y_XO = self.few(x_XI.float())
            y_XO = y_XO if self.places_O is None else y_XO[:, self.places_O]
            y_XO = y_XO if self.bias is None else y_XO + self.bias
        else:
            y_XO = self.few.by_library(x_XI, self.bias, self.places_O)
        return y_XO.to(input.dtype).view(*input.shape[:-1], -1)


class SharedEmbedding(_Shared, nn.Embedding):  # type: ignore[override]
    """Embedding layer that reads the weights of a product."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.places_O is None
        return self.few.rows(input.flatten()).view(*input.shape, -1)


_SHARED = {nn.Linear: SharedLinear, nn.Embedding: SharedEmbedding}
_SHARED |= {kind: kind for kind in _SHARED.values()}
"""Classes of layers that can share weights, which excludes the scaled embeddings of Gemma."""


def share(modules: Sequence[Any], few: FewRows | None, order_O: Tensor | None = None) -> None:
    """Replace the weights of layers by those of a product, if all are linear layers or embeddings.

    Row r of the product is row `order_O[r]` of the joined weights (default: r).
    """
    if few is None or not all(type(module) in _SHARED for module in modules):
        return
    places_O, start = torch.arange(few.shape[0]) if order_O is None else order_O.argsort(), 0
    for module in modules:
        size = module.out_features if isinstance(module, nn.Linear) else module.num_embeddings
        places, start = places_O[start : start + size], start + size
        low, high = int(places.min()) // 16 * 16, -(-int(places.max() + 1) // 16) * 16
        module.few, places = few if size == few.shape[0] else few.part(low, high), places - low
        module.places_O = None if places.equal(torch.arange(module.few.shape[0])) else places
        if not is_shared(module):
            del module.weight
            module.__class__ = _SHARED[type(module)]


def pack_layers(modules: Sequence[Any], int8: bool) -> None:
    """Store the weights of linear layers and embeddings in the layout of products; a tied weight once."""
    made = dict[int, FewRows | None]()
    for module in modules:
        if type(module) in (nn.Linear, nn.Embedding):
            weight = module.weight
            if id(weight) not in made:
                made[id(weight)] = pack(weight.detach(), int8)
            share([module], made[id(weight)])


def is_shared(module: Any) -> bool:
    """Return whether a layer reads the weights of a product."""
    return isinstance(module, _Shared)


def held(module: Any) -> Any:
    """Return a layer's detached weights [O, I], as `FewRows` if they are shared in order."""
    return module.few if is_shared(module) and module.places_O is None else module.weight.detach()

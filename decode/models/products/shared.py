"""Layers of transformers that share the weights of the optimised forward, so that they are stored only once.

Shape letters: X rows, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .product import FewRows, pack


class _Shared(nn.Module):
    few: FewRows
    places_O: Tensor | None
    """Rows of `few` that are the weights of this layer, or None for all rows."""
    weight = property(lambda self: self.few.rows(self.places_O), doc="Copy of the weights, [O, I], dequantised.")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class SharedLinear(_Shared, nn.Linear):
    """Linear layer that shares the weights of a `FewRows` and uses its C function if it is enabled."""

    def forward(self, input: Tensor) -> Tensor:
        x_XI = input.reshape(-1, self.in_features)
        if self.few.takes(len(x_XI)) and not (torch.is_grad_enabled() and input.requires_grad):
            y_XO = self.few(x_XI.float())[:, slice(None) if self.places_O is None else self.places_O]
            y_XO = y_XO if self.bias is None else y_XO + self.bias
        else:
            y_XO = self.few.by_library(x_XI, self.bias, self.places_O)
        return y_XO.to(input.dtype).view(*input.shape[:-1], -1)


class SharedEmbedding(_Shared, nn.Embedding):
    """Embedding layer that shares the weights of a `FewRows`."""

    def forward(self, input: Tensor) -> Tensor:
        return self.few.rows(input.flatten()).view(*input.shape, -1)


_SHARED = {nn.Linear: SharedLinear, nn.Embedding: SharedEmbedding}  # not the scaled embeddings of Gemma
_SHARED |= {kind: kind for kind in _SHARED.values()}


def share(modules: Sequence[Any], few: FewRows, order_O: Tensor | None = None) -> None:
    """Make linear layers and embeddings share the weights of a `FewRows`. Other layers are not changed.

    Row r of the `FewRows` is row `order_O[r]` of the concatenated layers, or row r if `order_O` is None.
    """
    if not all(type(module) in _SHARED for module in modules):
        return
    places_O = torch.arange(few.shape[0]) if order_O is None else order_O.argsort()
    sizes = [module.out_features if isinstance(module, nn.Linear) else module.num_embeddings for module in modules]
    for module, places in zip(modules, places_O.split(sizes), strict=True):
        low, high = int(places.min()) // 16 * 16, -(-int(places.max() + 1) // 16) * 16
        is_whole = len(sizes) == 1 and order_O is None
        module.few, module.places_O = (few, None) if is_whole else (few.part(low, high), places - low)
        if not is_shared(module):
            del module.weight
            module.__class__ = _SHARED[type(module)]


def pack_layers(modules: Sequence[Any], int8: bool, progress: Callable[[int, int], None] | None = None) -> None:
    """Convert the weights of linear layers and embeddings to `FewRows`. Tied weights are converted once."""
    packed = dict[int, FewRows | None]()
    for number, module in enumerate(modules):
        if progress:
            progress(100 * number // len(modules), 100)
        if type(module) in (nn.Linear, nn.Embedding):
            key = id(module.weight)
            packed[key] = few = packed[key] if key in packed else pack(module.weight.detach(), int8)
            if few is not None:
                share([module], few)


def is_shared(module: Any) -> bool:
    """Return whether a layer shares the weights of a `FewRows`."""
    return isinstance(module, _Shared)


def stored_weights(module: Any) -> Any:
    """Return a layer's detached weights [O, I], or its `FewRows` if the layer uses all rows in order."""
    return module.few if is_shared(module) and module.places_O is None else module.weight.detach()

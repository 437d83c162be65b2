"""EAGLE-3 drafter: a one-layer language model whose inputs are tokens and hidden states of the target.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3.1.

Shape letters: B batch, M new tokens, X = B · M, D hidden, G auxiliary hidden states of the target.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...checkpoints.heads.eagle import NORM_OUTPUT, EagleHeads
from .lean import LeanDecoder
from .products.product import Product


class EagleDrafter(LeanDecoder):
    """Drafter that runs EAGLE-3 heads with attached target weights (see `EagleHeads.attach`).

    The weights are prepared once, so create a new drafter after changing them.
    """

    def __init__(self, heads: EagleHeads) -> None:
        # the states that `extend` returns are also the input of the next drafting step
        self.states = "after-norm" if NORM_OUTPUT in heads.norms else "before-norm"
        self._norm_aux = heads.norm_aux
        self._normed_D = heads.midlayer.hidden_norm.weight.detach() if heads.normed else None
        self._hold_heads(heads, [heads.midlayer], LlamaRotaryEmbedding)
        self._above_XD: Tensor | None = None
        self._embedded_XD: Tensor | None = None

    def fuse_aux(self, aux_BMG: Tensor) -> Tensor:
        rows_XG = aux_BMG.reshape(-1, aux_BMG.shape[-1]).to(self.dtype)
        return self._fuse_aux(self._norm_aux(rows_XG)).view(*aux_BMG.shape[:2], -1)

    def set_aux_input(self, above_BMD: Tensor) -> None:
        self._above_XD = above_BMD.reshape(-1, self.hidden_size)

    def _norm_in(self, layer: Any, norm_D: Tensor | None) -> Tensor:
        assert norm_D is not None
        above_D = layer.hidden_norm.weight.detach()
        if self._normed_D is not None:  # `_first` has already applied this norm
            above_D = torch.full_like(above_D, self.hidden_size**-0.5)
        return torch.cat((norm_D, above_D))

    def _first(self, embedded_XD: Tensor) -> Tensor:
        # timing runs have no target, so zeros are used
        above_XD, self._above_XD = self._above_XD, None
        self._embedded_XD = embedded_XD
        if above_XD is None:
            return torch.zeros_like(embedded_XD)
        if self._normed_D is None:
            return above_XD.clone()  # on a GPU the layers modify it in place
        return F.rms_norm(above_XD, self._normed_D.shape, self._normed_D, self._eps)

    def _read_apart(self, hidden_XD: Tensor) -> Tensor:
        layer = self._layers[0]
        return self._read(layer.qkv, hidden_XD, layer.norm_in_D)

    def _read(self, product: Product, hidden_XD: Tensor, weight_D: Tensor | None) -> Tensor:
        assert self._embedded_XD is not None
        assert weight_D is not None
        embedded_D, above_D = weight_D.chunk(2)
        above_XD = self._norm(hidden_XD, above_D) if self._normed_D is None else hidden_XD
        sides = (self._norm(self._embedded_XD, embedded_D), above_XD)
        self._embedded_XD = None
        return product(torch.cat(sides, -1))

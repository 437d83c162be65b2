"""Attention of few new tokens on a CPU in float32, with all that stands around it, by one small C function a layer.

Letters: B batch, M new tokens, X = B · M, O queries, keys and values side by side, S cache slots, H heads, E width of
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import compiled, in_use

_MOST_TOKENS = 64
_WIDTH = 16


class FewQueries:
    """Turns queries and keys, writes keys and values to the cache, and attends; for models of these heads."""

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        self._sizes = (heads, kv_heads, width)

    def takes(self, keys_BHSE: Tensor, tokens_BM: Tensor) -> bool:
        """Whether it is for so many tokens on a cache of such keys, now."""
        if keys_BHSE.dtype != torch.float32 or keys_BHSE.device.type != "cpu":
            return False
        return in_use() and tokens_BM.numel() <= _MOST_TOKENS and not self._sizes[2] % _WIDTH and compiled() is not None

    def __call__(
        self,
        qkv_XO: Tensor,
        turns_BM1E: Tensor,
        mask_B1MS: Tensor | None,
        keys_BHSE: Tensor,
        values_BHSE: Tensor,
        lengths_B: Tensor,
        start: int,
        end: int,
    ) -> Tensor:
        """What the tokens read, [X, H · E]. They are nodes `start` and on of each row's tree, and see what the mask, as
        of `LanguageModel.extend`, lets them see of `end` slots; without one all up to the last of them."""
        heads, kv_heads, width = self._sizes
        batch, count = len(lengths_B), turns_BM1E.shape[1]
        out_XD = qkv_XO.new_empty(batch * count, heads * width)
        row_apart, head_apart, slot_apart, _ = keys_BHSE.stride()
        assert keys_BHSE.stride() == values_BHSE.stride()
        assert slot_apart == width
        assert qkv_XO.is_contiguous()
        assert turns_BM1E.is_contiguous()
        assert mask_B1MS is None or (mask_B1MS.is_contiguous() and mask_B1MS.dtype == torch.float32)
        pointers = [qkv_XO, turns_BM1E, mask_B1MS, keys_BHSE, values_BHSE, lengths_B, out_XD]
        rows = (len(turns_BM1E), 1 if mask_B1MS is None else len(mask_B1MS), row_apart, head_apart)
        ends = (start, start + count, end, torch.get_num_threads())
        given = [None if tensor is None else tensor.data_ptr() for tensor in pointers]
        compiled().attend(*given, *rows, batch, count, heads, kv_heads, width, *ends)
        return out_XD

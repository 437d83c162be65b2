"""Rotary position embeddings (RoPE), with the elements of each head in an order that is fast to rotate.

Shape letters: B batch, M new tokens, S positions, H heads, E head width, O queries, keys and values.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Turns = tuple[Tensor, Tensor | None]
"""Rotary factors, broadcastable to [B, M, H, E]: cosines and sines, or complex numbers and None."""


class Rotation:
    """Rotary embedding of queries and keys, with the angles of a model's `rotary_emb` module.

    transformers pairs element e with element e + R / 2, where R is the number of rotated elements of a head. Here the
    elements of a pair are adjacent for complex products, and half a head apart otherwise. Their order does not affect
    the inner products of queries and keys.
    """

    def __init__(self, config: Any, rotary: Any, width: int, as_complex: bool, dtype: torch.dtype) -> None:
        """Compute the order of elements. `rotary` is the model's `rotary_emb`, or None if it has none."""
        self._rotary, self._width, self._complex, self._dtype = rotary, width, as_complex, dtype
        rope = getattr(config, "rope_parameters", None) or {}
        turned = int(width * rope.get("partial_rotary_factor", 1.0))
        self._half, between = turned // 2, (width + turned) // 2
        half = range(self._half)
        if as_complex:
            self.order = [each for e in half for each in (e, e + self._half)] + [*range(turned, width)]
        else:
            self.order = [*half, *range(turned, between), *range(self._half, turned), *range(between, width)]
        self.reorders = self.order != sorted(self.order)
        self._length = 0
        self.tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        """Tables of each kind of rotation: cosines and sines [S, E], or complex factors [S, E / 2] and an empty
        tensor."""
        self.outgrown: list[Any] = []

    def reorder(self, weight: Tensor, heads: int) -> Tensor:
        """Reorder the elements of the first `heads` heads of projections [O, …]. Only these heads are rotated."""
        turned = weight[: heads * self._width].unflatten(0, (-1, self._width))
        return torch.cat((turned[:, self.order].flatten(0, 1), weight[heads * self._width :]))

    def at(self, positions_BM: Tensor, needed: int, kinds: Collection[str | None]) -> dict[str | None, Turns]:
        """Return the rotary factors of positions for each kind of rotation (see `rotations`).

        The tables are enlarged if they have fewer than `needed` positions.
        """
        if needed > self._length:
            # CUDA graphs read the tables that they were captured with, so old tables are kept.
            self.outgrown.append(self.tables)
            self._length = max(256, 2 * needed)
            self.tables = {kind: self._table(kind, positions_BM.device) for kind in kinds}

        def turns(cos_SE: Tensor, sin_SE: Tensor) -> Turns:
            cos_BM1E = F.embedding(positions_BM, cos_SE)[:, :, None]
            return cos_BM1E, None if self._complex else F.embedding(positions_BM, sin_SE)[:, :, None]

        return {kind: turns(*self.tables[kind]) for kind in kinds}

    def _table(self, kind: str | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Compute the table of rotary factors for one kind of rotation."""
        half, turned = self._width // 2, 0 if kind is None else self._half
        tables = [torch.ones(self._length, half, device=device), torch.zeros(self._length, half, device=device)]
        if kind is not None:  # other elements are not rotated
            positions, sample = torch.arange(self._length, device=device)[None], torch.empty(0, device=device)
            rotations = self._rotary(sample, positions, *((kind,) if kind else ()))
            for table_Sh, values_1SE in zip(tables, rotations, strict=True):
                table_Sh[:, :turned] = values_1SE[0, :, :turned]
        cos_Sh, sin_Sh = tables
        if self._complex:
            return torch.complex(cos_Sh, sin_Sh), sin_Sh[:0]
        return cos_Sh.repeat(1, 2).to(self._dtype), sin_Sh.repeat(1, 2).to(self._dtype)

    def turn(self, x_BMHE: Tensor, turns: Turns) -> Tensor:
        turns_BM1E, sin_BM1E = turns
        if sin_BM1E is None:
            pairs = torch.view_as_complex(x_BMHE.unflatten(-1, (self._width // 2, 2)))
            return torch.view_as_real(pairs * turns_BM1E).flatten(-2)
        first, second = x_BMHE.chunk(2, -1)
        return torch.addcmul(x_BMHE * turns_BM1E, torch.cat((-second, first), -1), sin_BM1E)


def rotations(config: Any) -> list[str | None]:
    """Return each layer's kind of rotation: its layer type, "" if there is only one kind, or None for no rotation."""
    rope = getattr(config, "rope_parameters", None) or {}
    turned = getattr(config, "no_rope_layers", None) or [bool(rope)] * config.num_hidden_layers  # 1 for rotated layers
    kinds = config.layer_types if any(isinstance(each, dict) for each in rope.values()) else [""] * len(turned)
    return [kind if turns else None for kind, turns in zip(kinds, turned, strict=True)]

"""Rotary positions: which numbers of a head are turned with each other, and by how much at each position.

Letters: B batch, M new tokens, S positions, H heads, E head width, O queries, keys and values side by side.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Turns = tuple[Tensor, Tensor | None]
"""Of some tokens, shaped to multiply [B, M, H, E]: cosines and sines, or complex ones of pairs and nothing."""


class Rotation:
    """Turns queries and keys as a model's `rotary_emb` does, in an order of a head's numbers that is ours.

    transformers turns number e of the first R with number e + R / 2. As a complex product a pair are neighbours;
    otherwise they are half a head apart, whatever R. In any order queries and keys have the same inner products.
    """

    def __init__(self, config: Any, rotary: Any, width: int, as_complex: bool, dtype: torch.dtype) -> None:
        """Args:
        rotary: the model's module; None: it turns nothing, as with learned positions."""
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
        """Cosine and sine of positions by rotation, [S, E]; complex ones [S, E / 2] and nothing."""
        self.outgrown: list[Any] = []

    def reorder(self, weight: Tensor, heads: int) -> Tensor:
        """Of queries, keys and values [O, …], with the numbers of the first `heads`, which are turned, in our order."""
        turned = weight[: heads * self._width].unflatten(0, (-1, self._width))
        return torch.cat((turned[:, self.order].flatten(0, 1), weight[heads * self._width :]))

    def at(self, positions_BM: Tensor, needed: int, kinds: Collection[str | None]) -> dict[str | None, Turns]:
        """The turns of tokens by kind of rotation, of `rotations`; tables grow to the longest position seen."""
        if needed > self._length:
            # A CUDA graph reads the table that it was captured with: tables that were outgrown stay where they are.
            self.outgrown.append(self.tables)
            self._length = max(256, 2 * needed)
            self.tables = {kind: self._table(kind, positions_BM.device) for kind in kinds}

        def turns(cos_SE: Tensor, sin_SE: Tensor) -> Turns:
            cos_BM1E = F.embedding(positions_BM, cos_SE)[:, :, None]
            return cos_BM1E, None if self._complex else F.embedding(positions_BM, sin_SE)[:, :, None]

        return {kind: turns(*self.tables[kind]) for kind in kinds}

    def _table(self, kind: str | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the first positions."""
        half, turned = self._width // 2, 0 if kind is None else self._half
        sides = [torch.ones(self._length, half, device=device), torch.zeros(self._length, half, device=device)]
        if kind is not None:  # what is not turned stays so
            positions, sample = torch.arange(self._length, device=device)[None], torch.empty(0, device=device)
            found = self._rotary(sample, positions, *((kind,) if kind else ()))
            for side_Sh, found_1SE in zip(sides, found, strict=True):
                side_Sh[:, :turned] = found_1SE[0, :, :turned]
        cos_Sh, sin_Sh = sides
        if self._complex:
            return torch.complex(cos_Sh, sin_Sh), sin_Sh[:0]
        return cos_Sh.repeat(1, 2).to(self._dtype), sin_Sh.repeat(1, 2).to(self._dtype)

    def turn(self, x_BMHE: Tensor, turns: Turns) -> Tensor:
        """Queries or keys, turned."""
        turns_BM1E, sin_BM1E = turns
        if sin_BM1E is None:
            pairs = torch.view_as_complex(x_BMHE.unflatten(-1, (self._width // 2, 2)))
            return torch.view_as_real(pairs * turns_BM1E).flatten(-2)
        first, second = x_BMHE.chunk(2, -1)
        return torch.addcmul(x_BMHE * turns_BM1E, torch.cat((-second, first), -1), sin_BM1E)


def rotations(config: Any) -> list[str | None]:
    """By which rotation each layer turns queries and keys: that of a type of layers, "" if there is one, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    turned = getattr(config, "no_rope_layers", None) or [bool(rope)] * config.num_hidden_layers  # 1 where there is one
    kinds = config.layer_types if any(isinstance(each, dict) for each in rope.values()) else [""] * len(turned)
    return [kind if turns else None for kind, turns in zip(kinds, turned, strict=True)]

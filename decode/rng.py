"""Explicit randomness: one generator a row, so that a row's sample does not depend on its neighbours.

Shape letters: B batch, C draws, V vocabulary, U numbers of a row, X any further shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_AHEAD = 1024
"""Numbers that are drawn at once for a row."""


class Rng:
    """Random numbers for a batch of rows. The same seeds give the same numbers, whatever the other rows do."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generators = [torch.Generator(device=self.device).manual_seed(seed) for seed in seeds]
        self._ahead_BU = torch.empty(len(seeds), 0, dtype=torch.float64, device=self.device)

    @classmethod
    def for_rows(cls, seed: int, rows: int, device: torch.device | str = "cpu") -> Rng:
        """Row b is seeded by `seed + b`: a prompt decoded alone with that seed draws the same numbers."""
        return cls([seed + row for row in range(rows)], device)

    def uniform(self, *shape: int) -> Tensor:
        """[B, *shape] float64 in [0, 1). Few numbers are drawn ahead: one launch for all rows, not one for each."""
        count = math.prod(shape)
        if count > _AHEAD:
            return self._draw(count).unflatten(1, shape)
        if count > self._ahead_BU.shape[1]:
            self._ahead_BU = self._draw(_AHEAD)
        found_BU, self._ahead_BU = self._ahead_BU.tensor_split([count], 1)
        return found_BU.reshape(-1, *shape)

    def _draw(self, count: int) -> Tensor:
        draws = [
            torch.rand(count, generator=each, dtype=torch.float64, device=self.device) for each in self._generators
        ]
        return torch.stack(draws)

    def exponential(self, *shape: int) -> Tensor:
        """[B, *shape] float32, Exp(1); logarithms of uniform numbers, which is several times faster than one by one."""
        return self.uniform(*shape).log().neg_().float()


def categorical(probs_XV: Tensor, uniform_X: Tensor) -> Tensor:
    """One token a row, [...] int64, by inverting the distribution function of [..., V], which need not be normalised;
    never one of probability 0. `uniform_X` lies in [0, 1)."""
    return draw_many(probs_XV, uniform_X[..., None])[0][..., 0]


def draw_many(probs_XV: Tensor, uniform_XC: Tensor) -> tuple[Tensor, Tensor]:
    """Independent draws [..., C] from each distribution, as `categorical` does, and what was searched for, which is NaN
    where the probabilities were: there the last token is drawn, for an id beyond it could not be looked up."""
    cdf_XV = probs_XV.cumsum(-1, dtype=torch.float64)
    wanted_XC = uniform_XC * cdf_XV[..., -1:]
    return torch.searchsorted(cdf_XV, wanted_XC, right=True).clamp_(max=cdf_XV.shape[-1] - 1), wanted_XC

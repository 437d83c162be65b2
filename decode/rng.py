"""Random numbers with one generator per row, so that the samples of a row do not depend on the other rows.

Shape letters: B batch, C draws, V vocabulary, U numbers of a row, X any leading shape.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

_AHEAD = 1024
"""Number of values that are generated in advance per row."""


class Rng:
    """Random number generators of a batch, one for each row. The numbers of a row depend only on its seed."""

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generators = [torch.Generator(device=self.device).manual_seed(seed) for seed in seeds]
        self._buffer_BU = torch.empty(len(seeds), 0, dtype=torch.float64, device=self.device)

    @classmethod
    def for_rows(cls, seed: int, rows: int, device: torch.device | str = "cpu") -> "Rng":
        """Create an `Rng` that seeds row b with `seed + b`, as if each prompt were decoded separately."""
        return cls([seed + row for row in range(rows)], device)

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform float64 numbers in [0, 1), [B, *shape]. They are drawn in blocks to save kernel launches."""
        count = math.prod(shape)
        if count > _AHEAD:
            return self._draw(count).unflatten(1, shape)
        if count > self._buffer_BU.shape[1]:
            self._buffer_BU = self._draw(_AHEAD)
        numbers_BU, self._buffer_BU = self._buffer_BU.tensor_split([count], 1)
        return numbers_BU.reshape(-1, *shape)

    def _draw(self, count: int) -> Tensor:
        draw = partial(torch.rand, count, dtype=torch.float64, device=self.device)
        draws = [draw(generator=generator) for generator in self._generators]
        return torch.stack(draws)

    def exponential(self, *shape: int) -> Tensor:
        """Return float32 samples of the exponential distribution with rate 1, [B, *shape]."""
        return self.uniform(*shape).log().neg_().float()


def categorical(probs_XV: Tensor, uniform_X: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        probs_XV: Probabilities, which need not be normalised. Tokens with probability 0 are never drawn.
        uniform_X: Uniform numbers in [0, 1).

    Returns:
        Token ids, [...] int64.
    """
    return draw_many(probs_XV, uniform_X[..., None])[0][..., 0]


def draw_many(probs_XV: Tensor, uniform_XC: Tensor) -> tuple[Tensor, Tensor]:
    """Draw several independent tokens from each distribution in the same way as `categorical`.

    Returns:
        Token ids [..., C], and the values that were looked up in the cumulative distribution. If the probabilities are
        NaN, these values are NaN, and the last token of the vocabulary is drawn.
    """
    cdf_XV = probs_XV.cumsum(-1, dtype=torch.float64)
    value_XC = uniform_XC * cdf_XV[..., -1:]
    return torch.searchsorted(cdf_XV, value_XC, right=True).clamp_(max=cdf_XV.shape[-1] - 1), value_XC

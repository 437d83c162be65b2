"""Conversion of logits to probabilities. Target and drafter use the same functions.

Shape letters: X any leading shape, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST = 1e-30  # lower temperatures scale logits beyond the range of float32


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters: temperature, top-k and top-p."""

    temperature: float = 0.0
    """Divisor of the logits. 0 selects the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to keep. Ties with the last one are also kept. 0 keeps all tokens."""
    top_p: float = 1.0
    """Probability mass to keep: the smallest set of most likely tokens with at least this mass. 1 keeps all tokens."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or _LOWEST <= self.temperature < math.inf):
            raise ValueError(f"temperature must be 0, or finite and at least {_LOWEST}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def warp(logits_XV: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k and top-p to logits, in this order. Return probabilities [..., V], float32.

    A method is lossless if its output follows this distribution of the target.
    """
    if sampling.greedy:
        return torch.zeros_like(logits_XV, dtype=torch.float32).scatter_(-1, logits_XV.argmax(-1, keepdim=True), 1.0)
    logits_XV = logits_XV.float()
    if sampling.temperature != 1:
        logits_XV = logits_XV / sampling.temperature
    if 0 < sampling.top_k < logits_XV.shape[-1]:
        kth_X1 = logits_XV.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_XV = logits_XV.masked_fill(logits_XV < kth_X1, -torch.inf)
    probs_XV = logits_XV.softmax(-1)
    if sampling.top_p < 1:
        sorted_XV, order_XV = probs_XV.sort(dim=-1, descending=True, stable=True)
        # A token is dropped if the tokens before it already reach p.
        dropped_XV = sorted_XV.cumsum(-1) - sorted_XV >= sampling.top_p
        dropped_XV[..., 0] = False  # rounding of the sum must not drop the most likely token
        probs_XV = probs_XV.masked_fill(dropped_XV.scatter(-1, order_XV, dropped_XV), 0.0)
        probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
    return probs_XV

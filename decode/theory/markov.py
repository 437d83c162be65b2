"""Markov chains as language models, so that what the engine and the verifiers do can be held against exact sums.

Yin et al. 2024 simulate in the same way (`theory.md`, point 6a): another table stands at every position, and drafts are
free and as long as the text. `closed_forms.py` has the sums.

Shape letters: B batch, M new tokens, T positions, V states, X anything. In tables [T, V, V] the last index is the next
state, the one before it the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine import Limits, generate
from ..evaluation.metrics import Tally
from ..methods import Method
from ..models.base import LanguageModel
from ..models.kv_cache import KVCache
from ..rng import Rng
from ..warpers import Sampling


class MarkovModel(LanguageModel):
    """A model whose distributions are known: `tables_TVV[n, x]` is what follows state x at position n.

    Positions beyond the last table use the last one. There are no layers, so the cache holds lengths and nothing else;
    a hidden state is the number of a table's row, which float32 holds exactly.
    """

    def __init__(self, tables_TVV: Tensor) -> None:
        self.positions, self.vocab_size, _ = tables_TVV.shape
        self.max_positions = 1 << 30
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.layers = 0
        self.hidden_size = self.kv_heads = self.key_width = self.value_width = 1
        self._logits_XV = tables_TVV.log().float().flatten(0, 1)

    def _mask(self, cache: KVCache, bias_BMn: Tensor | None, start: int, stop: int, end: int) -> None:
        return

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        row_BM = positions_BM.clamp(max=self.positions - 1) * self.vocab_size + tokens_BM
        return row_BM[..., None].float()

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return self._logits_XV[hidden_XD[..., 0].long()]


class OneStream(Rng):
    """Random numbers of all rows from one generator: rows depend on their neighbours, and thousands cost little."""

    def __init__(self, seed: int, rows: int) -> None:
        self.device = torch.device("cpu")
        self._rows, self._generator = rows, torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self._rows, *shape, generator=self._generator, dtype=torch.float64)


class Decoded(NamedTuple):
    """Texts decoded side by side, and their counts."""

    texts: list[list[int]]
    rejections_B: np.ndarray
    """float64 [B]; of drafts whose replacement is in the text: one that the limit cut off is not counted."""
    tally: list[Tally]


def decode_side_by_side(
    target: LanguageModel,
    method: Method,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    rng: Rng,
) -> Decoded:
    """Decode all prompts in one batch, and count rejections as `theory.md` does."""
    rejections_B = np.zeros(len(prompts))
    texts: list[list[int]] = [[] for _ in prompts]
    tallies = [Tally() for _ in prompts]
    for step in generate(target, *method, prompts, limits, sampling, rng):
        kept_B = np.array([len(ids) for ids in step.new_ids])
        rejections_B += step.active & step.rejected & (kept_B == step.accepted + 1)
        for row, new in enumerate(step.new_ids):
            texts[row] += new
            tallies[row].add_step(step, row)
    return Decoded(texts, rejections_B, tallies)

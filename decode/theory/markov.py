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

_SHARPNESS = 1.2
_LEAN = 0.8


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


def random_chains(positions: int, states: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """A target's and a drafter's chain, float64 [T, V, V] each.

    The target leans to high states. The drafter is the target with `share` of another chain mixed in, which leans to
    low ones; more after high states and less after low ones, so that it matters which chain weighs the prefixes.
    """
    if positions < 1 or states < 2:
        raise ValueError(f"a chain needs 1 position and 2 states or more, got {positions} and {states}")
    if not 0 <= share <= 1:
        raise ValueError(f"the share of another chain must lie in [0, 1], got {share}")
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(positions, states, states, generator=generator, dtype=torch.float64) for _ in range(2)]
    lean_V = torch.linspace(-_LEAN, _LEAN, states, dtype=torch.float64)
    target_TVV, other_TVV = (_SHARPNESS * draws[0] + lean_V).softmax(-1), (_SHARPNESS * draws[1] - lean_V).softmax(-1)
    spread = min(share, 1 - share)
    weight_V1 = torch.linspace(share - spread, share + spread, states, dtype=torch.float64)[:, None]
    return target_TVV, torch.lerp(target_TVV, other_TVV, weight_V1)


def even_chains(states: int, alpha: float, seed: int) -> tuple[Tensor, Tensor]:
    """Chains of one table each, float64 [1, V, V], whose drafts are accepted with probability `alpha` everywhere.

    The drafter is the target with 1 - α of something that the target never says: Σ min(p, q) = Σ αp = α.
    """
    if states < 4:
        raise ValueError(f"these chains need 4 states or more, got {states}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"an acceptance rate must lie in [0, 1], got {alpha}")
    generator = torch.Generator().manual_seed(seed)
    logits_1VV = _SHARPNESS * torch.randn(1, states, states, generator=generator, dtype=torch.float64)
    said_V = torch.arange(states) < states // 2
    target_1VV = logits_1VV.masked_fill(~said_V, -torch.inf).softmax(-1)
    never_1VV = logits_1VV.masked_fill(said_V, -torch.inf).softmax(-1)
    return target_1VV, alpha * target_1VV + (1 - alpha) * never_1VV


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

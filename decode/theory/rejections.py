"""Rejections counted as Yin et al. 2024 count them, in texts that are decoded side by side.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..engine import Limits, generate
from ..evaluation.metrics import Tally
from ..methods import Method
from ..models.base import LanguageModel
from ..rng import Rng
from ..warpers import Sampling


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

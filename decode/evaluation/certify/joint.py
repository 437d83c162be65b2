"""The joint law of a text's first tokens, enumerated: for vocabularies so small that every continuation can be run.

Shape letters: L continuations, X tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import chi2

from ...models.base import LanguageModel
from ...warpers import Sampling
from .rescoring import judged, read_back
from .uniformity import Result

LENGTH = 3
MOST = 1000
"""Continuations that are enumerated at most."""
_PER_CELL = 20  # expected counts below which outcomes are counted together


def joint_law(model: LanguageModel, prompt: Sequence[int], sampling: Sampling, stops: Sequence[int]) -> np.ndarray:
    """float64 [L]: the probability of each continuation of `LENGTH` tokens; behind a stop token all others are 0."""
    paths = list(itertools.product(range(model.vocab_size), repeat=LENGTH))
    hidden_XD = read_back(model, [prompt] * len(paths), paths).hidden_XD
    path_LX = torch.tensor(paths, device=hidden_XD.device)
    probs_LXV = judged(model.logits(hidden_XD), sampling).unflatten(0, path_LX.shape)
    own_LX = probs_LXV.gather(2, path_LX[..., None])[..., 0]
    stopped_LX = torch.isin(path_LX, torch.tensor(stops, device=path_LX.device)).cummax(1).values
    own_LX[:, 1:] = torch.where(stopped_LX[:, :-1], (path_LX[:, 1:] == 0).double(), own_LX[:, 1:])
    return own_LX.prod(1).cpu().numpy()


def outcome(output: Sequence[int], vocab: int) -> int:
    """The number of a text's continuation in `joint_law`."""
    return sum(token * vocab**place for token, place in zip(output, range(LENGTH - 1, -1, -1), strict=False))


def joint_test(laws: Sequence[np.ndarray], outcomes: Sequence[Sequence[int]]) -> Result:
    """Chi-square of the outcomes after each prompt, those with few expected counted together."""
    statistic, freedom = 0.0, 0
    for law, found in zip(laws, outcomes, strict=True):
        counts, wanted = np.bincount(found, minlength=len(law)), law / law.sum() * len(found)
        rare = wanted < _PER_CELL
        observed, expected = (np.append(each[~rare], each[rare].sum()) for each in (counts, wanted))
        kept = expected >= _PER_CELL
        observed, expected = observed[kept], expected[kept]
        statistic += float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
        freedom += max(0, len(expected) - 1)
    return Result("joint law", statistic, float(chi2.sf(statistic, freedom)) if freedom else 1.0)

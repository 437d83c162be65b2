"""How long adaptive chains are on a recorded text: the policies of `adaptive.py`, replayed.

A policy looks at the distributions along its own draft, which is the text as long as everything is accepted. So what a
step accepts is known exactly; how far a chain goes on after its first refused token is taken from the text, which says
a little too much or too little about nodes, and nothing about tokens.

Shape letters: B texts, T positions (padded to the longest text, or all texts' one after another), K depth, W walks
through a text, R walks through all of them, C classes of confidence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...proposers.adaptive import ExpectedGain
from .recording import Drafts, Recording
from .steps import Floats, Prediction, by_text, ratio_error, shift

Flags = NDArray[np.bool_]
_CLASSES = ExpectedGain.classes
_WALKED = 200_000
"""Tokens that chains which learn by chance are walked over, in all."""


def confident_lengths(recording: Recording, drafts: Drafts, gamma: int, threshold: float) -> Floats:
    """[B, T] draft tokens of a step from every position: `Confidence`."""
    sure_BT = by_text((drafts.confidence_T >= threshold).astype(np.float64), recording.lengths)
    open_BT, drafted_BT = np.ones_like(sure_BT), np.zeros_like(sure_BT)
    for level in range(gamma):
        open_BT = open_BT * shift(sure_BT, level)
        drafted_BT += open_BT
    return drafted_BT


def oracle_lengths(recording: Recording, drafts: Drafts, gamma: int, cost: float) -> Floats:
    """[B, T] the same for `Oracle`, whose predictions are 1 - TV(p, q)."""
    accept_BT = by_text(1 - drafts.variation_T.astype(np.float64), recording.lengths)
    open_BT, drafted_BT = np.ones_like(accept_BT), np.zeros_like(accept_BT)
    reach_BT, expected_BT = np.ones_like(accept_BT), np.ones_like(accept_BT)
    for level in range(gamma):
        reach_BT = reach_BT * shift(accept_BT, level)
        open_BT = open_BT * (reach_BT / cost > expected_BT / (1 + cost * level))
        expected_BT = expected_BT + reach_BT
        drafted_BT += open_BT
    return drafted_BT


def replay_expected_gain(
    recording: Recording, drafts: Drafts, accept_T: Floats, gamma: int, cost: float, walks: int | None = None
) -> Prediction:
    """`ExpectedGain`, step after step: what it learns from is what a step accepts and where it is refused.

    Given the text, a draft token is accepted with a chance of its own (`replay.py`), whatever was drafted before, and
    no walk looks at a place twice. So each text is walked through many times, the draft of every place decided by a
    draw: the mean over walks has no bias, and an error that is small beside that of the texts. At temperature 0 there
    is but one walk.

    Args:
        accept_T: P(the token of a position is an accepted draft | the text).
        walks: through each text; None: as many as make `_WALKED` tokens in all, 8 at least.
    """
    lengths_B = recording.lengths
    greedy = recording.sampling.greedy
    count = 1 if greedy else walks or max(8, round(_WALKED / recording.positions))
    # The same draws for every setting, so that settings differ by what they do.
    right_WT = np.random.default_rng(0).random((count, recording.positions), np.float32) < accept_T
    walk_R = np.tile(np.arange(count), len(lengths_B))
    first_R, end_R = (np.repeat(ends, count) for ends in (np.cumsum(lengths_B) - lengths_B, np.cumsum(lengths_B)))
    learned = _Learned(len(first_R))
    class_T = np.minimum((drafts.confidence_T * np.float32(_CLASSES)).astype(np.int64), _CLASSES - 1)
    place_R, steps_R = first_R.copy(), np.zeros(len(first_R), dtype=np.int64)
    tried_K, accepted_K, drafted = np.zeros(gamma), np.zeros(gamma), 0
    while (row_X := np.flatnonzero(place_R < end_R)).size:
        ahead_XK = place_R[row_X, None] + np.arange(gamma)
        inside_XK = ahead_XK < end_R[row_X, None]
        ahead_XK = np.minimum(ahead_XK, recording.positions - 1)
        class_XK = class_T[ahead_XK]
        open_XK = _worth_drafting(learned.predict(row_X, class_XK), cost) & inside_XK
        good_XK = open_XK & right_WT[walk_R[row_X, None], ahead_XK]
        accepted_XK = np.logical_and.accumulate(good_XK, 1)
        # Of what was drafted, decoding looks at the accepted tokens and at the first one that is refused.
        tried_XK = open_XK & np.pad(accepted_XK[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        learned.add(row_X, class_XK, tried_XK, accepted_XK)
        steps_R[row_X] += 1
        place_R[row_X] += 1 + accepted_XK.sum(1)
        tried_K += tried_XK.sum(0)
        accepted_K += accepted_XK.sum(0)
        drafted += int(open_XK.sum())
    steps_B = steps_R.reshape(-1, count).mean(1)
    rate = float(lengths_B.sum() / steps_B.sum())
    by_depth = [float(good / tried) for good, tried in zip(accepted_K, tried_K, strict=True) if tried]
    nodes = 1 + drafted / int(steps_R.sum())
    error = ratio_error(lengths_B, steps_B)
    return Prediction(rate, error, float(steps_B.sum()), tuple(steps_B.tolist()), by_depth, nodes)


class _Learned:
    """What each walk has seen accepted and examined, class of confidence by class; begins as the policy does."""

    def __init__(self, walks: int) -> None:
        middle_C = (np.arange(_CLASSES, dtype=np.float32) + np.float32(0.5)) / np.float32(_CLASSES)
        self._accepted_RC = np.tile(2 * middle_C, (walks, 1))
        self._examined_RC = np.full((walks, _CLASSES), 2, dtype=np.float32)

    def predict(self, row_X: NDArray[np.int64], class_XK: NDArray[np.int64]) -> NDArray[np.float32]:
        """[X, K] in 32 bits as the policy, for there are ties."""
        accepted_XC, examined_XC = self._accepted_RC[row_X], self._examined_RC[row_X]
        return np.asarray(np.take_along_axis(accepted_XC / examined_XC, class_XK, 1))

    def add(self, row_X: NDArray[np.int64], class_XK: NDArray[np.int64], tried_XK: Flags, accepted_XK: Flags) -> None:
        """Count a step of some walks."""
        for level in range(class_XK.shape[1]):
            self._examined_RC[row_X, class_XK[:, level]] += tried_XK[:, level]
            self._accepted_RC[row_X, class_XK[:, level]] += accepted_XK[:, level]


def _worth_drafting(predicted_XK: NDArray[np.float32], cost: float) -> Flags:
    """[X, K] as far as each token raises the expected tokens per unit of time."""
    reach_X = expected_X = np.ones(len(predicted_XK), dtype=np.float32)
    pays_XK = np.zeros(predicted_XK.shape, dtype=np.bool_)
    for level, accepted_X in enumerate(predicted_XK.T):
        reach_X = reach_X * accepted_X
        pays_XK[:, level] = reach_X / cost > expected_X / (1 + cost * level)
        expected_X = expected_X + reach_X
    return np.logical_and.accumulate(pays_XK, 1)

"""How long adaptive chains are on a recorded text: the policies of `adaptive.py`, replayed.

A policy looks at the distributions along its own draft, which is the text as long as everything is accepted. So what a
step accepts is known exactly; how far a chain goes on after its first refused token is taken from the text, which says
a little too much or too little about nodes, and nothing about tokens.

Shape letters: B texts, T positions (padded to the longest text, or all texts' one after another), C classes of
confidence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .adaptive import ExpectedGain
from .recording import Drafts, Recording
from .replay_steps import Floats, Prediction, by_text, replay_tokens, shift


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


def replay_expected_gain(recording: Recording, drafts: Drafts, gamma: int, cost: float) -> Prediction:
    """`ExpectedGain` at temperature 0, step after step: what it learns from, accepted tokens, is then known."""
    assert recording.sampling.greedy
    accepted_T, drafted_T = (np.zeros(recording.positions, dtype=np.int64) for _ in range(2))
    classes, start = ExpectedGain.classes, 0
    class_T = np.minimum((drafts.confidence_T * np.float32(classes)).astype(np.int64), classes - 1)
    right_T = drafts.rank_T < 1
    for length in recording.lengths.tolist():
        # Places that no step begins at keep a 0, which is never looked at.
        middle_C = (np.arange(classes, dtype=np.float32) + np.float32(0.5)) / np.float32(classes)
        accepted_C, examined_C, place = 2 * middle_C, np.full(classes, 2, dtype=np.float32), start
        while place < start + length:
            ahead = slice(place, min(place + gamma, start + length))
            drafted = _worth_drafting(accepted_C[class_T[ahead]] / examined_C[class_T[ahead]], cost)
            right_K = right_T[ahead][:drafted]
            accepted = int(right_K.cumprod().sum())
            np.add.at(accepted_C, class_T[ahead][:accepted], 1)
            np.add.at(examined_C, class_T[ahead][: min(accepted + 1, drafted)], 1)
            accepted_T[place], drafted_T[place] = accepted, drafted
            place += accepted + 1
        start += length
    tried_T = np.minimum(accepted_T + 1, drafted_T)
    return replay_tokens(recording, accepted_T, tried_T, gamma, 1 + drafted_T.astype(np.float64))


def _worth_drafting(predicted_K: NDArray[np.float32], cost: float) -> int:
    """How many tokens raise the expected tokens per unit of time; in 32 bits as the policy, for there are ties."""
    reach = expected = np.float32(1)
    for level, accepted in enumerate(predicted_K):
        reach *= accepted
        if not reach / cost > expected / (1 + cost * level):
            return level
        expected += reach
    return len(predicted_K)

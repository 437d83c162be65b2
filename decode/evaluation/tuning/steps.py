"""Expected steps of recorded texts, from what a step accepts at every position (see `replay.py`).

Shape letters: B texts, T positions (padded to the longest text, or all texts' one after another), K depth, J tokens a
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .recording import Recording

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """What decoding the recorded texts is expected to take."""

    tokens_per_step: float
    standard_error: float
    """Of `tokens_per_step`, over texts: how far another set of as many texts would lie, about. 0 for one text."""
    steps: float
    """Expected target forwards of all texts together."""
    steps_by_text: tuple[float, ...]
    acceptance_by_depth: list[float]
    """Of the steps that reached a depth within the text, the share that accepted there."""
    nodes_per_step: float
    """Tree nodes that the target scores a step, the root included."""

    def metrics(self) -> dict[str, Any]:
        """The names of `metrics.py`."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "standard_error": self.standard_error,
            "acceptance_by_depth": self.acceptance_by_depth,
            "nodes_per_step": self.nodes_per_step,
        }


def replay_chances(recording: Recording, accept_KT: Floats, nodes: float) -> Prediction:
    """Steps whose token at depth i is accepted with a chance of its own at every position: [K, T] P(the token of
    position t is an accepted draft | the text), if drafted at depth i."""
    longest = int(recording.lengths.max())
    reach_BT = np.ones((len(recording.lengths), longest))
    yields, reached = [], []
    for level, accept_T in enumerate(accept_KT):
        later_BT = by_text(accept_T, recording.lengths)[:, level:]
        chance_BT = np.pad(later_BT, ((0, 0), (0, longest - later_BT.shape[1])))  # beyond the end, where it counts not
        yields.append(reach_BT * (1 - chance_BT))
        reached.append(reach_BT)
        reach_BT = reach_BT * chance_BT
    return summary(recording, np.stack([*yields, reach_BT], -1), np.stack([*reached, reach_BT], -1), nodes)


def replay_tokens(
    recording: Recording,
    accepted_T: NDArray[np.int64],
    tried_T: NDArray[np.int64],
    depth: int,
    nodes: float | Floats,
) -> Prediction:
    """Steps that accept so many tokens from every position, without any chance.

    Args:
        accepted_T: how many of the tokens from position t on a step there accepts.
        tried_T: at how many levels it had candidates to look at; as many, or one more.
        depth: of the trees.
        nodes: of a step, or of a step from every position [T].
    """
    accepted_BT = by_text(accepted_T, recording.lengths).astype(np.int64)
    levels_J = np.arange(depth + 1)
    yield_BTJ = (accepted_BT[..., None] == levels_J).astype(np.float64)
    reached_BTK = (accepted_BT[..., None] >= levels_J).astype(np.float64)
    return summary(recording, yield_BTJ, reached_BTK, nodes, by_text(tried_T, recording.lengths))


def visits(lengths_B: NDArray[np.int64], yield_BTJ: Floats) -> Floats:
    """U [B, T]: the probability that a step begins at a position. `yield_BTJ[b, t, j]`: it yields j + 1 tokens."""
    rows, longest, most = yield_BTJ.shape
    begin_BT = np.zeros((rows, longest + most))
    begin_BT[:, 0] = lengths_B > 0
    for index in range(longest):
        begin_BT[:, index + 1 : index + 1 + most] += begin_BT[:, index, None] * yield_BTJ[:, index]
    inside_BT = np.arange(longest) < lengths_B[:, None]
    return begin_BT[:, :longest] * inside_BT


def summary(
    recording: Recording,
    yield_BTJ: Floats,
    reached_BTK: Floats,
    nodes: float | Floats,
    drafted_BT: NDArray[Any] | None = None,
) -> Prediction:
    """`reached_BTK[..., i]`: the probability that a step from there accepts i tokens or more."""
    lengths_B = recording.lengths
    begin_BT = visits(lengths_B, yield_BTJ)
    steps_B = begin_BT.sum(1)
    steps = float(steps_B.sum())
    by_depth = []
    left_B1 = lengths_B[:, None] - np.arange(begin_BT.shape[1])
    for level in range(reached_BTK.shape[2] - 1):
        # Beyond the end of the text nobody knows what would have been accepted.
        weight_BT = begin_BT * (left_B1 > level)
        if drafted_BT is not None:
            weight_BT = weight_BT * (drafted_BT > level)
        tried = float((weight_BT * reached_BTK[..., level]).sum())
        if tried <= 0:
            break
        by_depth.append(float((weight_BT * reached_BTK[..., level + 1]).sum()) / tried)
    if isinstance(nodes, np.ndarray):
        nodes = float((begin_BT * by_text(nodes, lengths_B)).sum()) / steps
    rate = float(lengths_B.sum()) / steps
    return Prediction(rate, ratio_error(lengths_B, steps_B), steps, tuple(steps_B.tolist()), by_depth, nodes)


def ratio_error(tokens_B: NDArray[np.int64], steps_B: NDArray[Any]) -> float:
    """Standard error of Σ tokens / Σ steps over texts, by the delta method."""
    rows = len(tokens_B)
    if rows < 2:
        return 0.0
    rate = tokens_B.sum() / steps_B.sum()
    spread_B = tokens_B - rate * steps_B
    return float(np.sqrt(rows / (rows - 1) * (spread_B**2).sum()) / steps_B.sum())


def by_text(values_T: NDArray[Any], lengths_B: NDArray[np.int64]) -> NDArray[Any]:
    """[B, T] the values of each text, padded with zeros."""
    padded_BT = np.zeros((len(lengths_B), int(lengths_B.max())), dtype=values_T.dtype)
    padded_BT[np.arange(padded_BT.shape[1]) < lengths_B[:, None]] = values_T
    return padded_BT

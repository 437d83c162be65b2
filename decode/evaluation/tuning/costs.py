"""Measured latency of a model's forward pass as a function of the number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from ...models.base import LanguageModel
from ..profile import raw_forward, time_in_turns

NODES = (1, 2, 3, 5, 9, 17, 33, 65)


@dataclass(frozen=True)
class Curve:
    """Non-decreasing, piecewise linear function from the number of tree nodes to the seconds of a forward."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, nodes: Sequence[int], seconds: Sequence[float]) -> "Curve":
        """Fit a non-decreasing curve to measured seconds by isotonic regression."""
        return cls(tuple(nodes), tuple(float(value) for value in isotonic_regression(seconds).x))

    def __call__(self, nodes: float) -> float:
        """Return the seconds for a number of nodes. The last segment is extrapolated to larger numbers."""
        if nodes > self.nodes[-1] and len(self.nodes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.nodes[-1] - self.nodes[-2])
            return self.seconds[-1] + slope * (nodes - self.nodes[-1])
        return float(np.interp(nodes, self.nodes, self.seconds))


@torch.inference_mode()
def measure_forwards(model: LanguageModel, context: int, nodes: Sequence[int] = NODES, runs: int = 24) -> Curve:
    """Measure forwards with each number of nodes after `context` tokens, and fit a curve to the lower quartiles."""
    calls = [raw_forward(model, count, context) for count in nodes]
    seconds = time_in_turns(model, calls, runs)
    # The lower quartile is used because other processes can only increase the time.
    return Curve.through(nodes, np.quantile(np.array(seconds), 0.25, axis=1))

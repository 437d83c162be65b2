"""Plan for training drafters: candidates, their potential speedup, and the training that fits the time budget.

With draft tokens accepted at rates α_1, α_2, …, a step with γ draft tokens yields 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j tokens.
Its cost is a target forward over γ + 1 tokens per sequence, plus the cost of drafting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal

Kind = Literal["drafter", "parallel", "eagle", "dflash", "heads"]
Seconds = Callable[[float], float]
"""Function that maps a number of tokens to the seconds of a target forward."""

BUDGET_SHARES = {"answers": 0.25, "measure": 0.05, "tune": 0.19, "certify": 0.05}
"""Shares of the time budget for each phase. The rest is for training."""
SELECTION_SHARE = 0.5
"""Share of the training time in which all candidates are trained. The rest is for the best candidates."""
MIN_ANSWERS, MIN_STEPS = 20, 32
"""Minimum number of responses to train on, and minimum number of training steps."""
MIN_BATCHES = 4
"""Minimum number of batches on which a method is measured."""
EVALUATION_OVERHEAD = 2.0
"""Ratio of the time of an evaluation, with prefill, repeats and profiles, to the time of decoding."""
OPTIMISTIC_ACCEPTANCE: dict[Kind, tuple[float, ...]] = {
    "drafter": (0.95, 0.95, 0.95, 0.95, 0.95),
    "parallel": (0.95, 0.9, 0.85, 0.8),
    "eagle": (0.95, 0.92, 0.89, 0.86, 0.83),
    "dflash": (0.95, 0.92, 0.89, 0.86, 0.83, 0.8, 0.77),
    "heads": (0.9, 0.75, 0.6),
}
"""Optimistic acceptance rates at each depth, for each kind of candidate."""
EXPECTED_ACCEPTANCE = 0.65
"""Acceptance rate after little training, used to choose draft lengths before they are tuned."""
_ONE_FORWARD = ("parallel", "dflash", "heads")  # kinds that draft all tokens with one forward
_MIN_SPEEDUP = 1.02  # minimum optimistic speedup of a trained candidate


@dataclass(frozen=True)
class Candidate:
    """Drafter or heads that can be trained."""

    name: str
    kind: Kind
    layers: tuple[int, ...]
    """Layers of the target from which a drafter is initialised."""
    cost: float
    """Cost of a draft token relative to a one-token target forward. For parallel drafting and DFlash, cost of all
    tokens."""

    @property
    def slug(self) -> str:
        return f"{self.kind}-{len(self.layers)}" if self.layers else self.kind


@dataclass(frozen=True)
class ModelShape:
    """Model sizes that determine the cost of a forward."""

    layers: int
    layer_parameters: float
    hidden: int
    vocabulary: int

    @property
    def parameters(self) -> float:
        """Return the number of parameters that a forward pass uses."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden


def list_candidates(
    shape: ModelShape, draft_vocabulary: int, supports_eagle: bool, supports_dflash: bool
) -> list[Candidate]:
    """List the trainable candidates: pruned drafters, a parallel drafter, EAGLE-3, DFlash and Medusa heads."""
    last, head = shape.layers - 1, min(draft_vocabulary, shape.vocabulary) * shape.hidden
    items = []
    for layers in ((0, last), (0, 1, last - 1, last)):
        if len(layers) * 2 <= shape.layers:
            cost = (len(layers) * shape.layer_parameters + head) / shape.parameters
            items.append(Candidate(f"{len(layers)}-layer drafter", "drafter", layers, cost))
    if items:
        items.append(Candidate(f"{items[-1].name}, parallel (PARD)", "parallel", items[-1].layers, items[-1].cost))
    if supports_eagle:  # its layer has inputs of twice the width, and it projects the target's hidden states
        cost = (1.3 * shape.layer_parameters + head) / shape.parameters
        items.append(Candidate("EAGLE-3", "eagle", (), cost))
    if supports_dflash:  # one layer, and the projection of three hidden states of the target
        cost = (shape.layer_parameters + 3 * shape.hidden**2 + head) / shape.parameters
        items.append(Candidate("DFlash", "dflash", (), cost))
    blocks = 3 * (2 * shape.hidden**2 + head)
    return [*items, Candidate("Medusa heads", "heads", (), blocks / shape.parameters)]


def best_draft(candidate: Candidate, seconds: Seconds, acceptance: Sequence[float] | None = None) -> tuple[int, float]:
    """Return the draft length with the largest estimated speedup, and this speedup. Default rates are optimistic."""
    rates = OPTIMISTIC_ACCEPTANCE[candidate.kind] if acceptance is None else acceptance
    speedups = {}
    for length, accepted in enumerate(accumulate(accumulate(rates, mul)), 1):
        drafting = candidate.cost * (1 if candidate.kind in _ONE_FORWARD else length)
        speedups[length] = (1 + accepted) / (seconds(length + 1) / seconds(1) + drafting)
    best = max(speedups, key=lambda length: speedups[length])
    return best, speedups[best]


def is_worth_training(candidate: Candidate, seconds: Seconds, batch: int = 1) -> tuple[bool, str]:
    """Return whether a candidate could be faster than autoregressive decoding, and the reason."""
    best = best_draft(candidate, lambda tokens: seconds(batch * tokens))[1]
    reason = f"{candidate.name}: at most {best:.2f}x"
    return best >= _MIN_SPEEDUP, reason + (
        "" if best >= _MIN_SPEEDUP else ": not trained, since autoregressive decoding is as fast"
    )


def affordable_candidates(step_seconds: Mapping[str, float], seconds: float) -> tuple[list[str], str]:
    """Return the candidates whose minimum training fits into `seconds`, and the reason for dropping the others."""
    names = sorted(step_seconds, key=lambda name: step_seconds[name])
    while names and MIN_STEPS * (sum(map(step_seconds.__getitem__, names)) + step_seconds[names[-1]]) > seconds:
        names.pop()
    dropped = [f"{name} {MIN_STEPS * step_seconds[name]:.0f} s" for name in step_seconds if name not in names]
    reason = f"only {seconds:.0f} s are left for training, too few for {MIN_STEPS} steps of: {', '.join(dropped)}"
    return names, reason if dropped else ""


def count_batches(seconds: float, rows: int, batch_seconds: float, most: int) -> int:
    """Return how many batches, from `MIN_BATCHES` to `most`, `rows` methods can decode in `seconds`."""
    return min(most, max(MIN_BATCHES, int(seconds / (EVALUATION_OVERHEAD * rows * batch_seconds))))


def count_rows(seconds: float, batch_seconds: float, least: int) -> int:
    """Return how many methods besides the baseline can decode `MIN_BATCHES` batches in `seconds`, at least `least`."""
    return max(least, int(seconds / (EVALUATION_OVERHEAD * MIN_BATCHES * batch_seconds)) - 1)

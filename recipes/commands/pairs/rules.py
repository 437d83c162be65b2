"""How `draftsmith forge` decides: pure functions of what was measured, so that the same measurements decide alike.

Of a draft of γ tokens with acceptance α_1, α_2 … a step keeps 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j tokens, and takes a
forward of the target over γ + 1 tokens of each text and the draft's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal

from ....decode.evaluation.metrics import speedup_interval

Kind = Literal["drafter", "parallel", "eagle", "heads"]
SHARES = {"answers": 0.25, "measure": 0.16, "decide": 0.08, "certify": 0.05}
"""Of the budget: the target's answers, measuring each candidate, the best ones side by side, the winner's certificate.
The rest is for training."""
RIVALS = 4
"""Rows at most that are measured side by side in the end."""
RACE = 0.55
"""Of what is left for training, the part that chooses; the other trains what was chosen."""
RUNGS = 2
"""Rounds of the race: after each, half of those that run are left."""
LEAST_ANSWERS, LEAST_STEPS = 20, 32
"""That training begins with."""
_HOPES: dict[Kind, tuple[float, ...]] = {
    "drafter": (0.95, 0.95, 0.95, 0.95, 0.95),
    "parallel": (0.95, 0.9, 0.85, 0.8),
    "eagle": (0.95, 0.92, 0.89, 0.86, 0.83),
    "heads": (0.9, 0.75, 0.6),
}
"""Acceptance by depth at the optimistic end."""
_SHORTEST: dict[Kind, int] = {"drafter": 1, "parallel": 2, "eagle": 1, "heads": 4}
"""Tokens of the shortest draft that is measured."""
_WORTH = 1.02  # times plain decoding, at the optimistic end: less is not worth any training
_LARGEST_GROWTH = 0.12  # of tokens a step by a doubling of the training, where only one amount was seen


@dataclass(frozen=True)
class Candidate:
    """What may be trained."""

    name: str
    kind: Kind
    layers: tuple[int, ...]
    """Of a drafter, the target's that it is cut from."""
    cost: float
    """A draft token, in forwards of the target over one token; of what drafts at once, a whole draft."""

    @property
    def at_once(self) -> bool:
        return self.kind in ("heads", "parallel")

    @property
    def slug(self) -> str:
        return f"{self.kind}-{len(self.layers)}" if self.layers else self.kind


@dataclass(frozen=True)
class Place:
    """Where a set-up shall be fast."""

    batch: int
    temperature: float

    @property
    def words(self) -> str:
        return f"{self.batch} at a time, temperature {self.temperature:g}"

    @property
    def slug(self) -> str:
        return f"{self.batch}-{str(self.temperature).removesuffix('.0')}"


@dataclass(frozen=True)
class Shape:
    """What decides costs of a model: layers, and numbers that a forward reads."""

    layers: int
    of_layer: float
    hidden: int
    vocabulary: int

    @property
    def numbers(self) -> float:
        return self.layers * self.of_layer + self.vocabulary * self.hidden


@dataclass(frozen=True)
class Measured:
    """The fastest row of a candidate after so many steps of training, 0 for what costs none."""

    name: str
    label: str
    steps: int
    tokens_per_step: float
    speedup: float
    interval: tuple[float, float]


def candidates_of(shape: Shape, proposed: int, has_eagle: bool) -> list[Candidate]:
    """What could be trained for a target: drafters cut from its ends, the larger of them at once too, EAGLE-3's layer,
    heads; each proposes as many tokens."""
    last, head = shape.layers - 1, min(proposed, shape.vocabulary) * shape.hidden
    found = []
    for layers in ((0, last), (0, 1, last - 1, last)):
        if len(layers) * 2 <= shape.layers:
            cost = (len(layers) * shape.of_layer + head) / shape.numbers
            found.append(Candidate(f"drafter of {len(layers)} layers", "drafter", layers, cost))
    if found:  # over as many mask tokens as it drafts, where a forward of few takes what one takes
        found.append(Candidate(f"{found[-1].name} at once (PARD)", "parallel", found[-1].layers, found[-1].cost))
    if has_eagle:  # its one layer reads twice the width, and the target's states through a product of their own
        cost = (1.3 * shape.of_layer + head) / shape.numbers
        found.append(Candidate("EAGLE-3's layer", "eagle", (), cost))
    blocks = 3 * (2 * shape.hidden**2 + head)
    return [*found, Candidate("Medusa's heads", "heads", (), blocks / shape.numbers)]


def ceiling(candidate: Candidate, seconds: Callable[[float], float]) -> float:
    """The speedup at the optimistic end, by the best length of a draft; `seconds` of the target's forward by tokens."""
    kept = list(accumulate(accumulate(_HOPES[candidate.kind], mul)))
    speeds = []
    for length, more in enumerate(kept, 1):
        drafting = candidate.cost * (1 if candidate.at_once else length)
        speeds.append((1 + more) / (seconds(length + 1) / seconds(1) + drafting))
    return max(speeds)


def floor(candidate: Candidate, seconds: Callable[[float], float]) -> float:
    """The speedup where nothing is kept, by the shortest draft that is measured."""
    return 1 / (seconds(_SHORTEST[candidate.kind] + 1) / seconds(1) + candidate.cost)


def worth_training(candidate: Candidate, seconds: Callable[[float], float], batch: int = 1) -> tuple[bool, str]:
    """Whether it could be faster than plain decoding with so many texts at a time, and why; if not, with how many it
    could. What repeats earlier text is drafted by look-up beside it, so that look-up's gain is no reason against it."""

    def best_of(texts: int) -> float:
        return ceiling(candidate, lambda tokens: seconds(texts * tokens))

    said = f"{candidate.name}: at best {best_of(batch):.2f} x"
    if best_of(batch) >= _WORTH:
        return True, said
    said += ": not trained, plain decoding is as fast"
    halves = (batch >> times for times in range(1, batch.bit_length()))
    fewer = next((texts for texts in halves if best_of(texts) >= _WORTH), None)
    return False, said + (f"; with {fewer} at a time it could be {best_of(fewer):.2f} x" if fewer else "")


def affordable(rates: Mapping[str, float], seconds: float) -> tuple[list[str], str]:
    """Whose training a budget pays for, each the fewest steps in each round and one to the end, by the seconds that a
    step takes; the dearest are left out first. And why."""
    known = sorted(rates, key=lambda name: rates[name])
    while known and LEAST_STEPS * (RUNGS * sum(rates[name] for name in known) + rates[known[-1]]) > seconds:
        known.pop()
    left = [name for name in rates if name not in known]
    if not left:
        return known, ""
    said = f"{seconds:.0f} s are left for training, {LEAST_STEPS} steps each round take"
    return known, f"{said} " + ", ".join(f"{LEAST_STEPS * rates[name]:.0f} s ({name})" for name in left) + ": left out"


def best_row(name: str, steps: int, results: Mapping[str, Any]) -> Measured:
    """The fastest lossless row of an evaluation beside its baseline, which stands first, and alone where no other
    measurement can be true."""
    baseline, *rows = (row for row in results["methods"] if row["lossless"])
    return measured_of(name, steps, max(rows, key=lambda row: float(row["speedup"]), default=baseline))


def measured_of(name: str, steps: int, row: Mapping[str, Any]) -> Measured:
    """A row of an evaluation."""
    low, high = row["speedup_interval"] or (row["speedup"], row["speedup"])
    return Measured(name, row["label"], steps, row["tokens_per_step"], row["speedup"], (low, high))


def outlook(history: Sequence[Measured], steps: int) -> tuple[float, float]:
    """The range of a candidate's speedup when it is measured after so many steps: tokens a step grow with the logarithm
    of the training, by no more than they did, nor less than nothing; both ends with the errors of two measurements."""
    last = history[-1]
    low, high = (last.speedup + math.sqrt(2) * (end - last.speedup) for end in last.interval)
    doublings = max(0.0, math.log2(max(steps, 1) / last.steps))
    growth = _LARGEST_GROWTH
    if len(history) > 1 and last.steps > history[-2].steps:
        each = math.log2(last.steps / history[-2].steps)
        growth = min(growth, max(0.0, last.tokens_per_step / history[-2].tokens_per_step - 1) / each)
    return low, high * (1 + growth) ** doublings


def survivors(
    history: Mapping[str, Sequence[Measured]], steps: Mapping[str, int], best: float
) -> tuple[list[str], str]:
    """Who may go on at a place: those whose outlook's upper end is above `best`, what costs no training, the highest
    first; and why. `merged` says how many do."""
    ends = {name: outlook(found, steps[name]) for name, found in history.items()}
    ranked = sorted((name for name in ends if ends[name][1] > best), key=lambda name: -ends[name][1])
    lines = []
    for name, (low, high) in ends.items():
        behind = "" if name in ranked else f", behind what costs no training ({best:.2f})"
        lines.append(f"{name} {history[name][-1].speedup:.2f} x, in the end {low:.2f} to {high:.2f}{behind}")
    return ranked, "; ".join(lines)


def merged(ranked: Sequence[Sequence[str]], count: int) -> list[str]:
    """So many at most of several places' rankings: the first of each, then the second of each …, the first of each in
    any case."""
    rounds = [[each[at] for each in ranked if at < len(each)] for at in range(max(map(len, ranked), default=0))]
    found: dict[str, None] = {}
    for number, names in enumerate(rounds):
        for name in names:
            if number == 0 or len(found) < count:
                found[name] = None
    return list(found)


def rivals(finalists: Sequence[Measured]) -> list[Measured]:
    """Those that may be the fastest, the fastest first: above plain decoding, and their intervals reach that of the
    first."""
    ranked = sorted((each for each in finalists if each.speedup > 1), key=lambda each: -each.speedup)
    return [each for each in ranked if each.interval[1] >= ranked[0].interval[0]][:RIVALS]


def share_of(row: Mapping[str, Any], other: Mapping[str, Any], batch: int) -> tuple[float, Any]:
    """A row's speed over that of another which was measured in turns with it, and its 95 % interval, None of
    too few."""
    sides = [[each[key] for each in one["by_prompt"]] for one in (row, other) for key in ("tokens", "seconds")]
    return speedup_interval(*([sum(side[at : at + batch]) for at in range(0, len(side), batch)] for side in sides))


def winner_of(finalists: Sequence[Measured]) -> tuple[Measured | None, str]:
    """The fastest, where it is faster than plain decoding beyond its interval; with whom it is tied."""
    ranked = sorted(finalists, key=lambda each: -each.speedup)
    first = ranked[0]
    said = f"{first.label} ({first.name}): {first.speedup:.2f} x ({first.interval[0]:.2f}–{first.interval[1]:.2f})"
    if first.interval[0] <= 1:
        cost = first.tokens_per_step / first.speedup
        surely, more = ("", "") if first.speedup <= 1 else ("surely ", "; more hours measure on more questions")
        return None, (
            f"nothing is {surely}faster than plain decoding; the best is {said}: a step of it writes "
            f"{first.tokens_per_step:.2f} tokens, and pays with more than {cost:.2f}{more}"
        )
    tied = [each.label for each in ranked[1:] if each.interval[1] >= first.speedup]
    if tied:
        said += f"; within its interval: {', '.join(tied)}"
    return first, said

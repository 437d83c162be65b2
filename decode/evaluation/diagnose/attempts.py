"""Every draft token that decoding looked at: whether it was accepted, and what the refused ones have in common.

Shape letters: C tokens of a chunk, V vocabulary, P passages, X attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.base import LanguageModel
from ..bootstrap import percentile_interval, resampled_ratios
from ..certify.rescoring import chunks, read_back
from ..trace import TracedStep
from .agreement import Passage, Source


class DraftAttempt(NamedTuple):
    """A draft token that decoding looked at."""

    position: int
    """Of the text's tokens, from 0."""
    depth: int
    """From 0."""
    drafted: int
    written: int
    """The token that the text has there."""
    accepted: bool


def draft_attempts(steps: Iterable[TracedStep]) -> list[DraftAttempt]:
    """The draft tokens that steps looked at, in order; of the last step those that the text still holds. Of several
    candidates in a tree the accepted one, or the first if all were refused."""
    found, start = [], 0
    for step in steps:
        count = len(step.accepted)
        for depth, token in enumerate(step.accepted):
            found.append(DraftAttempt(start + depth, depth, token, token, True))
        if step.rejected and step.next_id is not None:
            found.append(DraftAttempt(start + count, count, step.rejected[0], step.next_id, False))
        start += count + (step.next_id is not None)
    return found


class Odds(NamedTuple):
    """Unwarped probabilities of an attempt."""

    target_drafted: float
    source_drafted: float
    target_written: float


@torch.inference_mode()
def odds_of(
    target: LanguageModel, source: Source, passages: Sequence[Passage], attempts: Sequence[Sequence[DraftAttempt]]
) -> list[list[Odds]]:
    """How likely the drafted token and the written one were, of each attempt in each passage."""
    found: list[list[Odds]] = []
    for passage, tokens in zip(passages, attempts, strict=True):
        odds: list[Odds] = []
        found.append(odds)
        if not tokens:
            continue
        reading = read_back(target, [passage.prompt], [passage.text])
        view = source.view([passage], reading)
        for span in chunks(len(passage.text), target.vocab_size):
            target_CV = target.logits(reading.hidden_XD[span]).float().softmax(-1)
            rows = [logits_CV.float().softmax(-1) for logits_CV in view(span)]
            for each in tokens:
                if span.start <= each.position < span.stop:
                    at, row_CV = each.position - span.start, rows[min(each.depth, len(rows) - 1)]
                    picks = target_CV[at, each.drafted], row_CV[at, each.drafted], target_CV[at, each.written]
                    odds.append(Odds(*map(float, picks)))
    return found


@dataclass(frozen=True)
class Cell:
    """Draft tokens that have something in common."""

    name: str
    examined: int
    accepted: int
    rejections_share: float
    """Of all rejections."""
    excess: float
    """Of all rejections, how many there would not be if the cell were like the average; below 0: it is better."""
    interval: tuple[float, float] | None
    """95 %, of the accepted share."""
    members: NDArray[np.int64]
    """Indices of its tokens among all attempts."""

    @property
    def share(self) -> float:
        """Accepted of examined."""
        return self.accepted / self.examined

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the members."""
        names = ("name", "examined", "accepted", "share", "rejections_share", "excess", "interval")
        return {name: getattr(self, name) for name in names}


def cells(
    names: Sequence[str], accepted_X: NDArray[np.bool_], passage_X: NDArray[np.int64], passages: int
) -> list[Cell]:
    """Attempts by name, those first that cost most."""
    name_X = np.asarray(names, dtype=object)
    rate, rejections = (1 - accepted_X.mean(), int((~accepted_X).sum())) if len(accepted_X) else (0.0, 0)
    found = []
    for name in dict.fromkeys(names):
        member_X = name_X == name
        good, count = int(accepted_X[member_X].sum()), int(member_X.sum())
        over_P1, under_P1 = (
            np.bincount(passage_X, each_X, passages)[:, None].astype(np.float64)
            for each_X in (accepted_X & member_X, member_X)
        )
        ratios_RG = resampled_ratios(over_P1, under_P1)
        span = percentile_interval(None if ratios_RG is None else ratios_RG[:, 0])
        lost, expected, of = count - good, rate * count, max(rejections, 1)
        members = np.flatnonzero(member_X)
        found.append(Cell(name, count, good, lost / of, float(lost - expected) / of, span, members))
    return sorted(found, key=lambda cell: -cell.excess)

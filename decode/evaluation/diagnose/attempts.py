"""Every draft token that decoding looked at: whether it was accepted, and what the refused ones have in common.

Shape letters: X attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bootstrap import binomial_interval
from ..trace import TracedStep


class DraftAttempt(NamedTuple):
    """A draft token that decoding looked at."""

    position: int
    """Of the text's tokens, from 0."""
    depth: int
    """From 0."""
    drafted: int
    accepted: bool


def draft_attempts(steps: Iterable[TracedStep]) -> list[DraftAttempt]:
    """The draft tokens that steps looked at, in order; of the last step those that the text still holds. Of several
    candidates in a tree the accepted one, or the first if all were refused."""
    found, start = [], 0
    for step in steps:
        count = len(step.accepted)
        found += [DraftAttempt(start + depth, depth, token, True) for depth, token in enumerate(step.accepted)]
        if step.rejected and step.next_id is not None:
            found.append(DraftAttempt(start + count, count, step.rejected[0], False))
        start += count + (step.next_id is not None)
    return found


def cells(names: Sequence[str], accepted_X: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Attempts by name, those first that cost most: how many were `examined` and `accepted`, its `share` and the
    `interval` of that (95 %, exact), its `rejections_share` of all rejections, and its `excess`, how many of all
    rejections there would not be if it were like the average."""
    name_X = np.asarray(names, dtype=object)
    rate, rejections = (1 - accepted_X.mean(), int((~accepted_X).sum())) if len(accepted_X) else (0.0, 0)
    found = []
    for name in dict.fromkeys(names):
        member_X = name_X == name
        good, count = int(accepted_X[member_X].sum()), int(member_X.sum())
        lost, of = count - good, max(rejections, 1)
        cell: dict[str, Any] = {"name": name, "examined": count, "accepted": good, "share": good / count}
        cell |= {"rejections_share": lost / of, "excess": float(lost - rate * count) / of}
        found.append(cell | {"interval": binomial_interval(good, count)})
    return sorted(found, key=lambda cell: -cell["excess"])

"""Chains of several drafters, recorded and replayed: what SpecInfer accepts of a text of the target.

Chains are tried drafter by drafter, each against what those before it left of p. Those of one drafter are alike, so
that what happens at a position depends only on how many chains of each are in play there: a state is such a count for
each drafter, and a history how many of each were refused so far. A token is accepted with a chance that the recorded
distributions give exactly, and the chains that hold it make the next state.

Shape letters: T positions, V vocabulary, D drafters, X histories with the drafter that is tried next, S states.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...verifiers.lossless import residual

MOST_STATES = 32
"""Tables of moves between more states would not fit."""

Floats = NDArray[np.float64]
Counts = tuple[int, ...]


@dataclass(frozen=True)
class SeveralDrafts:
    """What several drafters say at every position; y is the token that stands there."""

    target_T: NDArray[np.float32]
    """p(y), warped."""
    draft_TD: NDArray[np.float32]
    """q(y) of each drafter, warped."""
    accept_TX: NDArray[np.float32]
    """P(the chain that is tried holds y and is accepted), by `trials`."""
    refused_TX: NDArray[np.float32]
    """P(it is refused)."""

    @property
    def per_drafter(self) -> int:
        """Chains of each drafter at most."""
        return round((self.accept_TX.shape[1] + 1) ** (1 / self.draft_TD.shape[1])) - 1


def most_chains(drafters: int, wanted: int) -> int:
    """So many chains of each drafter, or as many as can be followed; 0 where none can."""
    return next((count for count in range(wanted, 0, -1) if (count + 1) ** drafters - 1 <= MOST_STATES), 0)


def states_of_chains(drafters: int, per_drafter: int) -> list[Counts]:
    """All states but the one without chains, the full one last."""
    return list(itertools.product(range(per_drafter + 1), repeat=drafters))[1:]


def trials(drafters: int, per_drafter: int) -> list[tuple[Counts, int]]:
    """Histories, each with a drafter whose chain is tried next: as many as there are states."""
    found = []
    for history in itertools.product(range(per_drafter + 1), repeat=drafters):
        last = max((place for place, count in enumerate(history) if count), default=0)
        found += [(history, drafter) for drafter in range(last, drafters) if history[drafter] < per_drafter]
    return found


def judge_several(target_TV: Tensor, drafts: Sequence[Tensor], token_T: Tensor, per_drafter: int) -> dict[str, Tensor]:
    """The parts of `SeveralDrafts` at some positions, from whole distributions (`drafts`: [T, V] each, warped)."""
    token_T1, places = token_T[:, None], {each: place for place, each in enumerate(trials(len(drafts), per_drafter))}
    accept_XT: list[Tensor] = [token_T.double()] * len(places)
    refused_XT = list(accept_XT)

    def visit(left_TV: Tensor, history: Counts, first: int) -> None:
        for drafter in range(first, len(drafts)):
            if history[drafter] < per_drafter:
                draft_TV = drafts[drafter].double()
                overlap_TV = torch.minimum(left_TV, draft_TV)
                place = places[history, drafter]
                accept_XT[place] = overlap_TV.gather(1, token_T1)[:, 0]
                refused_XT[place] = (1 - overlap_TV.sum(1)).clamp(min=0)
                visit(residual(left_TV, draft_TV), _more(history, drafter), drafter)

    visit(target_TV.double(), (0,) * len(drafts), 0)
    return {
        "target_T": target_TV.gather(1, token_T1)[:, 0],
        "draft_TD": torch.cat([draft_TV.gather(1, token_T1) for draft_TV in drafts], 1),
        "accept_TX": torch.stack(accept_XT, 1),
        "refused_TX": torch.stack(refused_XT, 1),
    }


def moves_of(drafts: SeveralDrafts, per_drafter: int) -> Floats:
    """[T, S, S]: from a state, P(y accepted, the chains that hold it make another state | y).

    Raises:
        ValueError: more chains than were recorded.
    """
    known = drafts.per_drafter
    if per_drafter > known:
        raise ValueError(f"{per_drafter} chains of each drafter: {known} were recorded")
    positions, drafters = drafts.draft_TD.shape
    states = states_of_chains(drafters, per_drafter)
    number = {state: place for place, state in enumerate(states)}
    column = {each: place for place, each in enumerate(trials(drafters, known))}
    draft_TD = drafts.draft_TD.astype(np.float64)
    moves_TSS = np.zeros((positions, len(states), len(states)))
    for state in states:
        refused: dict[Counts, Floats] = {(0,) * drafters: np.ones(positions)}
        history: Counts = (0,) * drafters
        for drafter in (each for each, count in enumerate(state) for _ in range(count)):
            place = column[history, drafter]
            accept_T = drafts.accept_TX[:, place].astype(np.float64)
            same_T = np.maximum(draft_TD[:, drafter] - accept_T, 0)
            other_T = np.maximum(drafts.refused_TX[:, place] - same_T, 0)
            holding = {_more(held, drafter): chance_T * accept_T for held, chance_T in refused.items()}
            refused = _one_more(refused, drafter, same_T, other_T)
            history = _more(history, drafter)
            for later in (each for each in range(drafters) for _ in range(state[each] - history[each])):
                holding = _one_more(holding, later, draft_TD[:, later], 1 - draft_TD[:, later])
            for held, chance_T in holding.items():
                moves_TSS[:, number[state], number[held]] += chance_T
    return np.asarray(moves_TSS / np.maximum(drafts.target_T.astype(np.float64), 1e-300)[:, None, None])


def _more(counts: Counts, place: int) -> Counts:
    return (*counts[:place], counts[place] + 1, *counts[place + 1 :])


def _one_more(chances: dict[Counts, Floats], drafter: int, same_T: Floats, other_T: Floats) -> dict[Counts, Floats]:
    """A distribution over how many chains of each drafter hold the token, after one more chain."""
    found: dict[Counts, Floats] = {}
    for held, chance_T in chances.items():
        for after, factor_T in ((held, other_T), (_more(held, drafter), same_T)):
            found[after] = found.get(after, 0.0) + chance_T * factor_T
    return found

"""Which place each prediction head speaks of: its own, or that of another, as where heads are stored in another order.

Shape letters: X predicted tokens of all passages, C tokens of a chunk, K heads, J places, P passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...models.base import LanguageModel
from ...proposers.head_trees import HeadModule
from ..certify.rescoring import chunks, read_back
from .agreement import Floats, Passage, Resamples, interval

_FEWEST = 8
"""Passages that are judged. Of fewer, all may lean the same way by chance."""
_NEARLY = 0.9
"""Of the hits that a place's own head has there: from so many on another head may be meant for that place."""


@dataclass(frozen=True)
class Places:
    """How often each head's best guess is the token of each place, by passage."""

    hits_PKJ: Floats
    """Place j of 0 … K + 1; head k is to guess that of place k + 1. Place 0 holds the last token that is known where
    heads are asked, which the target's own projection guesses; K + 1 one that no head is to guess."""
    own_P: Floats
    """How often the target's own guess is the token of place 0."""
    judged_P: Floats
    """Tokens of each passage that have all places within it."""

    @property
    def share_KJ(self) -> Floats:
        """Of all passages."""
        return np.asarray(self.hits_PKJ.sum(0) / max(self.judged_P.sum(), 1.0))

    def better(self, least: float, level: float) -> list[tuple[int, int, float]]:
        """Heads that guess another place's token better than their own's: (head, place, by how much), heads from 1 on.

        That alone is no fault: what a sound head expects further on may well stand nearer, as in a run of one token. So
        a head must also guess that place's token nearly as well as the head that is there for it, or the target itself.

        Args:
            least: share of the guesses that it must be better by.
            level: of the intervals over passages, which must lie above 0, for all heads and places together.
        """
        if (self.judged_P > 0).sum() < _FEWEST:
            return []
        share_KJ, found = self.share_KJ, []
        there_J = np.array([self.own_P.sum() / self.judged_P.sum(), *share_KJ.diagonal(1), 0.0])
        resamples = Resamples(len(self.judged_P))
        level = 1 - (1 - level) / share_KJ[:, 1:].size  # each head is held against all places but its own
        for head in range(len(share_KJ)):
            share_J = share_KJ[head]
            place = int(np.where(share_J >= _NEARLY * there_J, share_J, -1.0).argmax())
            gain = float(share_J[place] - share_J[head + 1])
            if gain < least:
                continue
            more_P1 = (self.hits_PKJ[:, head, place] - self.hits_PKJ[:, head, head + 1])[:, None]
            drawn_RG = resamples.ratios(more_P1, self.judged_P[:, None])
            span = interval(None if drawn_RG is None else drawn_RG[:, 0], level)
            if span is not None and span[0] > 0:
                found.append((head + 1, place, gain))
        return found


@torch.inference_mode()
def places_of(
    target: LanguageModel, heads: HeadModule, dtype: torch.dtype, passages: Sequence[Passage], batch: int = 16
) -> Places:
    """Ask heads at every token of some passages, and compare their guesses with the tokens of all places around it."""
    count = heads.num_heads
    hits_PKJ = np.zeros((len(passages), count, count + 2))
    own_P, judged_P = np.zeros((2, len(passages)))
    for first in range(0, len(passages), batch):
        some = passages[first : first + batch]
        if not any(passage.text for passage in some):
            continue
        reading = read_back(target, [passage.prompt for passage in some], [passage.text for passage in some])
        states = [reading.before_XD[place] for place in chunks(len(reading.last_X), target.vocab_size)]
        guess_XK = torch.cat([heads(state_XD.to(dtype)).argmax(-1) for state_XD in states]).cpu().numpy()
        own_X = torch.cat([target.logits(state_XD).argmax(-1) for state_XD in states]).cpu().numpy()
        start = 0
        for row, passage in enumerate(some, first):
            length = len(passage.text)
            known_S = np.array([int(reading.last_X[start]) if length else 0, *passage.text])
            # After a prompt of one token there is no state before.
            earliest = 1 if len(reading.prefixes[row - first]) < 2 else 0
            asked_T = np.arange(earliest, length - count)
            if len(asked_T):
                guess_TK = guess_XK[start + asked_T]
                held_TJ = known_S[asked_T[:, None] + np.arange(count + 2)]
                hits_PKJ[row] = (guess_TK[:, :, None] == held_TJ[:, None]).sum(0)
                own_P[row] = (own_X[start + asked_T] == held_TJ[:, 0]).sum()
                judged_P[row] = len(asked_T)
            start += length
    return Places(hits_PKJ, own_P, judged_P)

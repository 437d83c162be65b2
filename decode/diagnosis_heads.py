"""Which place each prediction head speaks of: its own, or that of another, as where heads are stored in another order.

Shape letters: X predicted tokens of all passages, C tokens of a chunk, K heads, J places, P passages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .diagnosis import Floats, Passage, Resamples, interval
from .head_trees import HeadModule
from .models import LanguageModel
from .reading_back import chunks, read_back


@dataclass(frozen=True)
class Places:
    """How often each head's best guess is the token of each place, by passage."""

    hits_PKJ: Floats
    """Place j of 0 … K + 1; head k is to guess that of place k + 1. Place 0 holds the last token that is known where
    heads are asked, which the target's own projection guesses; K + 1 one that no head is to guess."""
    judged_P: Floats
    """Tokens of each passage that have all places within it."""

    @property
    def share_KJ(self) -> Floats:
        """Of all passages."""
        return np.asarray(self.hits_PKJ.sum(0) / max(self.judged_P.sum(), 1.0))

    def better(self, least: float, level: float) -> list[tuple[int, int, float]]:
        """Heads that guess another place's token better than their own's: (head, place, by how much), heads from 1 on.

        Args:
            least: share of the guesses that it must be better by.
            level: of the interval over passages, which must lie above 0.
        """
        share_KJ, found = self.share_KJ, []
        resamples = Resamples(len(self.judged_P))
        for head in range(len(share_KJ)):
            place = int(share_KJ[head].argmax())
            gain = float(share_KJ[head, place] - share_KJ[head, head + 1])
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
    hits_PKJ, judged_P = np.zeros((len(passages), count, count + 2)), np.zeros(len(passages))
    for first in range(0, len(passages), batch):
        some = passages[first : first + batch]
        if not any(passage.text for passage in some):
            continue
        reading = read_back(target, [passage.prompt for passage in some], [passage.text for passage in some])
        guesses = [
            heads(reading.before_XD[place].to(dtype)).argmax(-1)
            for place in chunks(len(reading.last_X), target.vocab_size)
        ]
        guess_XK = torch.cat(guesses).cpu().numpy()
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
                judged_P[row] = len(asked_T)
            start += length
    return Places(hits_PKJ, judged_P)

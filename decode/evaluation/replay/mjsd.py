"""MJSD at any threshold from one recording of its beams: what it would accept, step by step, without decoding again.

MJSD's text is not the target's, so replay is not exact here: the contexts that beams are grown from are positions of
the target's own text, an approximation. `tune` confirms what is chosen by decoding.

Shape letters: B batch, S sampled positions, N tree nodes, K depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine import Limits, Proposal, Verdict, generate
from ...models.base import LanguageModel
from ...proposers.beams import DraftBeam
from ...rng import Rng
from ...verifiers.lossy import JointLikelihood
from .recording import Recording


@dataclass(frozen=True)
class JointRecord:
    """Beams grown from sampled positions of the target's text."""

    gamma: int
    beams: int
    log_ratio_SK: NDArray[np.float32]
    """log p(x1..j) - log q(x1..j) of the likeliest beam's prefixes."""

    def tokens_per_step(self, threshold: float) -> tuple[float, float]:
        """Expected tokens a step at this threshold (`mjsd.txt`, Algorithm 1), and the mean's standard error.

        Raises:
            ValueError: a threshold outside [0, 1].
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"the threshold of joint likelihood must lie in [0, 1], got {threshold}")
        floor = math.log(threshold) if threshold else -math.inf
        passes_SK = np.minimum(self.log_ratio_SK, 0) > floor
        accepted_S = (passes_SK * np.arange(1, passes_SK.shape[1] + 1)).max(1)
        return 1 + float(accepted_S.mean()), float(accepted_S.std() / max(1, len(accepted_S) - 1) ** 0.5)


class _Noting(JointLikelihood):
    """The verifier, which writes down what it judges."""

    def __init__(self, greedy: bool) -> None:
        super().__init__(0.0, greedy)
        self.seen: list[Tensor] = []

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        assert proposal.draft_scores_BN is not None
        target_BK = target_BNV[:, :-1].gather(2, proposal.tokens_BN[:, 1:, None])[..., 0]
        self.seen.append((target_BK.log().cumsum(1) - proposal.draft_scores_BN[:, 1:]).cpu())
        return super().verify(proposal, target_BNV, rng)


def record_joint(
    target: LanguageModel,
    drafter: LanguageModel,
    recording: Recording,
    gamma: int,
    beams: int,
    *,
    positions: int = 64,
    batch: int = 16,
    seed: int = 0,
) -> JointRecord:
    """Grow a beam from positions spread over the recorded texts, and note how target and drafter judge it.

    Args:
        positions: how many, at most; the same ones for the same recording, whatever `gamma` and `beams` are.

    Raises:
        ValueError: an encoder-decoder target, whose text cannot be gone on with from the middle.
    """
    contexts = _contexts(recording, positions)
    start = [list(map(int, row)) for row in target.begin(contexts[:1], 0)[0]]
    if start != contexts[:1]:
        raise ValueError("joint decoding is replayed for decoders; the target is an encoder-decoder")
    verifier = _Noting(recording.sampling.greedy)
    for first in range(0, len(contexts), batch):
        rows = contexts[first : first + batch]
        rng = Rng.for_rows(seed + first, len(rows), target.device)
        proposer = DraftBeam(drafter, gamma, beams)
        next(generate(target, proposer, verifier, rows, Limits(gamma + 1), recording.sampling, rng))
    return JointRecord(gamma, beams, torch.cat(verifier.seen).numpy().astype(np.float32))


def _contexts(recording: Recording, count: int) -> list[Sequence[int]]:
    """Prompts with the beginnings of their texts, evenly spread over all positions."""
    places = [(row, place) for row, text in enumerate(recording.texts) for place in range(len(text))]
    chosen = np.unique(np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(int))
    return [[*recording.prompts[row], *recording.texts[row][:place]] for row, place in (places[i] for i in chosen)]

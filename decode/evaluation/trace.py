"""Traces of decoding: the proposed, accepted and rejected tokens of each step.

The engine's steps only contain counts. The tokens are recorded by a wrapper around the verifier.

Shape letters: B batch, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engine import Limits, Proposal, Verdict, Verifier, generate
from ..methods import Method
from ..models.base import LanguageModel
from ..rng import Rng
from ..warpers import Sampling


@dataclass(frozen=True)
class TracedStep:
    """Accepted and rejected draft tokens of one step of a row."""

    accepted: tuple[int, ...]
    """Accepted draft tokens, in order."""
    rejected: tuple[int, ...]
    """Draft tokens rejected after the accepted ones. In a chain, these are the remaining tokens that the verifier
    examined, at least one. In a tree, these are all children of the last accepted node."""
    next_id: int | None
    """Token added by the target. None if a stop token or the limit came first."""


class _Watched(Verifier):
    """Wrapper that records the last proposal and verdict of a verifier."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner
        self.lossless, self.score_type = inner.lossless, inner.score_type

    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        verdict = self._inner.verify(proposal, target_BNV, rng)
        self.last = proposal, verdict
        return verdict


def trace(
    target: LanguageModel, method: Method, prompt: Sequence[int], limits: Limits, sampling: Sampling, seed: int = 0
) -> list[TracedStep]:
    """Decode one prompt as `engine.generate` does, and return the accepted and rejected draft tokens of each step."""
    watched = _Watched(method.verifier)
    steps = []
    rng = Rng([seed], target.device)
    for step in generate(target, method.proposer, watched, [prompt], limits, sampling, rng):
        proposal, verdict = watched.last
        steps.append(_traced(proposal, verdict, len(step.new_ids[0]), bool(step.rejected[0]), int(step.examined[0])))
    return steps


def _traced(proposal: Proposal, verdict: Verdict, num_kept: int, rejected: bool, examined: int) -> TracedStep:
    """Create the traced step of the first row, which committed `num_kept` tokens and examined `examined` drafts."""
    tokens, parents = proposal.tokens_BN[0].tolist(), proposal.tree.parents_BN[0].tolist()
    exists = [True] * len(tokens) if proposal.valid_BN is None else proposal.valid_BN[0].tolist()
    path = verdict.path_BK[0, : int(verdict.accepted_B[0])].tolist()
    last = path[-1] if path else 0
    rejected_nodes = (
        [node for node in range(1, len(tokens)) if exists[node] and parents[node] == last] if rejected else []
    )
    if proposal.tree.is_chain and rejected_nodes:
        rejected_nodes = list(range(rejected_nodes[0], rejected_nodes[0] + max(1, examined - len(path))))
    is_complete = num_kept > len(path)
    return TracedStep(
        accepted=tuple(tokens[node] for node in path[:num_kept]),
        rejected=tuple(tokens[node] for node in rejected_nodes) if is_complete else (),
        next_id=int(verdict.next_B[0]) if is_complete else None,
    )

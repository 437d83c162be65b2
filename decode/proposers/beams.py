"""Proposers that run a beam search and propose the best beam as a chain. Beams are stored as a tree in the cache.

Shape letters: B batch, N tree nodes, M beams, V vocabulary, D hidden, X flattened.
"""

from typing import Any

import torch
from torch import Tensor

from ..engine import Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DraftState, draft_state, own_path


class _Beam(Proposer):
    """Base class of proposers that propose the best beam as a chain.

    `_nodes_BN` maps the nodes of the chain to nodes of the tree of all beams, which is stored in the model's cache.
    """

    _state: DraftState
    _nodes_BN: Tensor

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._state.keep(context, own_path_BK=own_path(self._nodes_BN, verdict.path_BK, verdict.accepted_B))

    def stop(self) -> None:
        del self._state


class DraftBeam(_Beam):
    """Proposer of the most likely sequence of a beam search with the drafter (arXiv 2407.09722, Algorithm 1).

    At each level, beams are sampled without replacement in proportion to their warped joint probabilities. At
    temperature 0, the beam search is deterministic and uses unwarped probabilities, and the next token is the target's
    most likely token. The paper uses temperature 1, top-k 20 and top-p 0.9 (appendix D).
    """

    def __init__(self, model: LanguageModel, gamma: int, num_beams: int) -> None:
        self.model, self.gamma, self.num_beams = model, gamma, num_beams

    def start(self, context: Context) -> None:
        self._state = draft_state(self.model, context, 1 + self.num_beams * self.gamma, self.gamma)
        self._chain = Tree.chain(self.gamma).to(self.model.device)

    def propose(self, context: Context) -> Proposal:
        tokens_BN, scores_BN, self._nodes_BN = best_beam(self._state, context, self.gamma, self.num_beams)
        return Proposal(self._chain, tokens_BN, draft_scores_BN=scores_BN)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [*self.model.draft_forwards([1] + [self.num_beams] * (self.gamma - 1))]


class TargetBeam(_Beam):
    """Proposer that runs a beam search with the target for `gamma` tokens per step (0: all new tokens).

    This is multi-token joint greedy decoding (arXiv 2407.09722, definition 3.1). The likelihood of beams that have
    ended does not change. A step takes γ + 1 forwards of the target, so this method is a reference for quality, not for
    speed.
    """

    def __init__(self, gamma: int, num_beams: int) -> None:
        self.gamma, self.num_beams = gamma, num_beams

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return (self.gamma or limits.max_new_tokens) + 1, self.gamma or 1

    def start(self, context: Context) -> None:
        self._depth = gamma = self.gamma or context.limits.max_new_tokens
        self._state = DraftState(context.target, context, 1 + self.num_beams * gamma, self.gamma or 1)
        self._chain = Tree.chain(gamma).to(context.target.device)
        self._stop_ids = torch.tensor(context.limits.stop_ids, dtype=torch.int64, device=context.target.device)

    def propose(self, context: Context) -> Proposal:
        tokens_BN, _, self._nodes_BN = best_beam(self._state, context, self._depth, self.num_beams, self._stop_ids)
        return Proposal(self._chain, tokens_BN, target_forwards=self._depth)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(None, 1)] + [(None, self.num_beams)] * (round(nodes) - 2)


def best_beam(
    state: DraftState, context: Context, gamma: int, beams: int, stop_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a beam search. Return tokens, joint log-probabilities and nodes of the best beam, [B, gamma + 1] each.

    A beam whose last token is in `stop_ids` has ended: it repeats that token with an unchanged score.
    """
    model, rows = state.model, len(context.lengths)
    source = "the target's" if model is context.target else "the drafter's"
    tokens_BN, scores_BN = context.root_B1, torch.zeros(rows, 1, device=model.device)
    hidden_BMD = state.read_root(context)[:, None]
    tree = Tree.chain(0).to(model.device)
    first, ended_BM = 0, None
    for level in range(gamma):
        joint_BMV = _joint(model.logits(hidden_BMD), scores_BN[:, first:], context.sampling)
        if ended_BM is not None:
            last_BM1 = tokens_BN[:, first:, None]
            stay_BMV = torch.full_like(joint_BMV, -torch.inf).scatter_(2, last_BM1, scores_BN[:, first:, None])
            joint_BMV = torch.where(ended_BM[..., None], stay_BMV, joint_BMV)
        scores_BM, picked_BM = _pick(joint_BMV.flatten(1), beams, context)
        context.watch(source, scores_BM[:, :1], level)
        vocab = joint_BMV.shape[-1]
        tree = tree.grow(first + picked_BM // vocab)
        first = tree.nodes - picked_BM.shape[1]
        tokens_BN = torch.cat((tokens_BN, picked_BM % vocab), 1)
        scores_BN = torch.cat((scores_BN, scores_BM), 1)
        if stop_ids is not None and len(stop_ids):
            ended_BM = torch.isin(tokens_BN[:, first:], stop_ids)
        if level + 1 < gamma:
            hidden_BMD = state.grow(tokens_BN[:, first:], tree, first)
    best_B = first + scores_BN[:, first:].argmax(1)
    # Paths of the last level need no padding, so the reversed path starts with the root.
    nodes_BN = tree.line_BNP[torch.arange(rows, device=model.device), best_B].flip(1)
    return tokens_BN.gather(1, nodes_BN), scores_BN.gather(1, nodes_BN), nodes_BN


def _joint(logits_BMV: Tensor, scores_BM: Tensor, sampling: Sampling) -> Tensor:
    """Return the joint log-probabilities of all continuations of each beam (unwarped at temperature 0)."""
    if sampling.greedy:
        return logits_BMV.float().log_softmax(-1) + scores_BM[..., None]
    return warp(logits_BMV, sampling).log() + scores_BM[..., None]


def _pick(joint_BX: Tensor, beams: int, context: Context) -> tuple[Tensor, Tensor]:
    """Return scores and indices of the next beams, sampled without replacement (the best beams at temperature 0)."""
    beams = min(beams, joint_BX.shape[1])
    if context.sampling.greedy:
        top = joint_BX.topk(beams, 1)
        return top.values, top.indices
    race_BX = joint_BX - context.rng.exponential(joint_BX.shape[1]).log()
    picked_BM = race_BX.topk(beams, 1).indices
    return joint_BX.gather(1, picked_BM), picked_BM

"""Chains whose length is chosen while they are drafted, and the policies that choose it.

A policy sees distributions only, never the token that is drawn from the last of them, so that the output stays exact.

Shape letters: B batch, K depth, V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine import Context, Proposal, Verdict
from ..models.base import LanguageModel
from ..rng import categorical
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DrafterProposer, DraftState


class Policy(ABC):
    """Rule that decides for each row whether one more token is drafted; its methods are called like a proposer's."""

    stop_costs_forward: bool = True
    """Whether the drafter's forward that only made the policy stop is counted."""
    key: Hashable | None = None
    """Identifies a stateless policy, whose levels can be drafted in one captured graph."""

    def start(self, context: Context, gamma: int) -> None:
        return

    def begin_step(self, context: Context) -> None:
        return

    @abstractmethod
    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        """Return bool [B]: whether to draft the token of this level, given its (warped) distribution."""

    def drafted(self, tokens_B1: Tensor, level: int) -> None:
        return

    def commit(self, context: Context) -> None:
        return

    def stop(self) -> None:
        return


class Confidence(Policy):
    """Stops where the drafter's most likely token falls below a probability (BiLD, arXiv 2302.07863)."""

    def __init__(self, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"confidence_threshold must be in [0, 1], got {threshold}")
        self._threshold = threshold
        self.key = "confidence", threshold

    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        return confidence_B >= self._threshold


class Oracle(Policy):
    """Continues while one more token raises the expected tokens per unit of time: an upper bound for analysis.

    With acceptance rates β₁, β₂ … a chain of γ tokens yields 1 + Σ β₁⋯βᵢ tokens in 1 + cγ target forwards (arXiv
    2211.17192, section 3.5). The true rates Σ min(p, q) are known before a token is drafted: the forwards of the target
    and of the drafter that compute them are not counted among the proposal's forwards.

    Args:
        draft_cost: c, the cost of a forward of the drafter, in forwards of the target.
        token_cost: Cost of one more token in a forward of the target, in such forwards.
    """

    stop_costs_forward = False

    def __init__(self, draft_cost: float, token_cost: float) -> None:
        if draft_cost <= 0 or token_cost < 0:
            raise ValueError(f"draft_cost must be above 0 and token_cost at least 0, got {draft_cost} and {token_cost}")
        self._draft_cost, self._token_cost = draft_cost, token_cost

    def start(self, context: Context, gamma: int) -> None:
        self._peek = DraftState(context.target, context, gamma + 1, gamma)
        self._sampling, self._watch = context.sampling, context.watch
        self._tree = Tree.chain(gamma).to(context.ids_BS.device)

    def begin_step(self, context: Context) -> None:
        self._reach_B = torch.ones(len(context.lengths), device=context.ids_BS.device)
        self._expected_B = torch.ones_like(self._reach_B)
        self._hidden_BD = self._peek.read_root(context)

    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        logits_BV = self._peek.model.logits(self._hidden_BD[:, None])[:, 0]
        self._watch("the target's", logits_BV.amax(-1, True), level)
        gain_B = self._reach_B * torch.minimum(warp(logits_BV, self._sampling), draft_BV).sum(-1)
        cost = self._draft_cost + self._token_cost
        pays_B = gain_B * (1 + cost * level) > cost * self._expected_B
        self._reach_B, self._expected_B = gain_B, self._expected_B + gain_B
        return pays_B

    def drafted(self, tokens_B1: Tensor, level: int) -> None:
        self._hidden_BD = self._peek.grow(tokens_B1, self._tree, level + 1)[:, -1]

    def commit(self, context: Context) -> None:
        self._peek.keep(context)

    def stop(self) -> None:
        del self._peek


class AdaptiveChain(DrafterProposer):
    """A chain of at most `gamma` draft tokens that ends where the policy decides, row by row.

    On a CPU nothing is drafted after the last row's end. Elsewhere the host would have to wait to know of it, once a
    token: there all are drafted, and what stands behind a row's end counts for nothing.
    """

    def __init__(self, model: LanguageModel, gamma: int, policy: Policy) -> None:
        self.model, self.gamma, self.policy = model, gamma, policy
        self._tree = Tree.chain(gamma).to(model.device)

    def start(self, context: Context) -> None:
        super().start(context)
        self.policy.start(context, self.gamma)

    def propose(self, context: Context) -> Proposal:
        chances = [] if context.sampling.greedy else [context.rng.uniform(self.gamma)]
        self.policy.begin_step(context)
        all_B = torch.ones(len(context.lengths), dtype=torch.bool, device=self.model.device)
        hidden_BD, grow = self._draft.read_root(context), partial(self._grow, context.sampling)
        if self.policy.key is None or not self.model.is_async:
            found = grow(hidden_BD, all_B, *chances)
        else:
            key = self.policy.key, context.sampling
            found = self._draft.run_captured(self._tree, key, grow, hidden_BD, all_B, *chances)
        sure_BK, tokens_BK, open_BK, *probs = found
        context.watch("the drafter's", sure_BK, range(sure_BK.shape[1]))
        depth = tokens_BK.shape[1]
        proposal = Proposal(Tree.chain(depth).to(self.model.device), torch.cat((context.root_B1, tokens_BK), 1))
        proposal.levels, proposal.valid_BN = self.gamma, torch.cat((all_B[:, None], open_BK), 1)
        if depth and probs:
            proposal.draft_probs_BMV = probs[0]
        return proposal

    def _grow(self, sampling: Sampling, hidden_BD: Tensor, open_B: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        """How sure the drafter was at each level, the tokens, in which rows they count, and, above temperature 0, the
        distributions that they come from."""
        stops = not self.model.is_async
        sure, tokens, valid, probs = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        hidden_BMD = hidden_BD[:, None]
        for level in range(self.gamma):
            logits_BMV = self.model.logits(hidden_BMD)
            draft_BMV = warp(logits_BMV, sampling)
            sure_BMV = warp(logits_BMV, Sampling(temperature=1.0)) if sampling.greedy else draft_BMV
            sure.append(sure_BMV.amax(-1))
            open_B = open_B & self.policy.go_on(draft_BMV[:, 0], sure[-1][:, 0], level)
            if stops and not bool(open_B.any()):
                break
            tokens.append(categorical(draft_BMV, chances[0][:, level, None]) if chances else draft_BMV.argmax(-1))
            valid.append(open_B)
            probs.append(draft_BMV)
            if level + 1 == self.gamma:
                break
            self.policy.drafted(tokens[-1], level)
            hidden_BMD = self._draft.grow(tokens[-1], self._tree, level + 1)
        none_B0 = torch.zeros(len(open_B), 0, dtype=torch.int64, device=open_B.device)
        found = torch.cat(sure, 1), torch.cat((none_B0, *tokens), 1), torch.stack(valid or [open_B], 1)[:, : len(valid)]
        return found if sampling.greedy else (*found, torch.cat(probs or [draft_BMV[:, :0]], 1))

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        super().commit(context, proposal, verdict)
        self.policy.commit(context)

    def stop(self) -> None:
        super().stop()
        self.policy.stop()

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.model, 1)] * min(self.gamma, round(nodes) - (not self.policy.stop_costs_forward))

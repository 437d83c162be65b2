"""Chains whose length is chosen while they are drafted, and the policies that choose it.

A policy looks at distributions only, never at the token that was drawn from the last of them, so that the output stays
exact whatever it decides. What is looked up in the text costs nothing to draft, and text that repeats its own beginning
is what small models draft worst: `LookupOrDrafter` decides between the two by committed tokens alone, row by row.

Shape letters: B batch, K depth, V vocabulary, D hidden, C classes of confidence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine import Context, Limits, Proposal, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import sent
from ..rng import categorical
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DrafterProposer, DraftState
from .ngrams import PromptLookup


class Policy(ABC):
    """Decides for each row whether one more token is worth drafting; its methods are called like a proposer's."""

    key: Hashable | None = None
    """Names a policy that remembers nothing, whose levels can be drafted in one launch."""

    def start(self, context: Context, gamma: int) -> None:
        return

    def begin_step(self, context: Context) -> None:
        return

    def looks(self, open_B: Tensor, level: int) -> Tensor:
        """bool [B]: of rows that are open, whether to ask the drafter at all which token might come at this level."""
        return open_B

    @abstractmethod
    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        """bool [B]: whether to draft the token of this level, given the (warped) distribution it would come from."""

    def drafted(self, tokens_B1: Tensor, level: int) -> None:
        return

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        return

    def stop(self) -> None:
        return


class Confidence(Policy):
    """Stop where the drafter's most likely token falls below a threshold (BiLD, arXiv 2302.07863)."""

    def __init__(self, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"confidence_threshold must be in [0, 1], got {threshold}")
        self._threshold = threshold
        self.key = "confidence", threshold

    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        return confidence_B >= self._threshold


class ExpectedGain(Policy):
    """Go on while one more token raises the expected tokens per unit of time.

    With predicted acceptances β₁, β₂ … a chain of γ tokens yields 1 + Σ β₁⋯βᵢ tokens in 1 + cγ target forwards (arXiv
    2211.17192, section 3.5): the next token pays while β₁⋯βᵢ₊₁ / c exceeds what the chain so far yields a
    forward. `draft_cost` c is the drafter's forward and `token_cost` one more token in the target's, in forwards
    of the target. Once the drafter has run only the latter is still to be decided, by β, the share accepted in this row
    before, by class of the drafter's confidence. Whether it runs is decided before, by what looking at that level has
    lately brought this row: where that is too little it rests, and is asked again now and then.
    """

    classes = 10
    _memory = 0.95
    """What an observation counts a step later."""
    _asked_again = 16
    """Steps without the drafter, at most."""

    def __init__(self, draft_cost: float, token_cost: float) -> None:
        if draft_cost <= 0 or token_cost < 0:
            raise ValueError(f"draft_cost must be above 0 and token_cost at least 0, got {draft_cost} and {token_cost}")
        self._draft_cost, self._token_cost = draft_cost, token_cost

    def start(self, context: Context, gamma: int) -> None:
        rows, device = len(context.lengths), context.ids_BS.device
        # A prior of two observations, at the middle of each class.
        middle_C = (torch.arange(self.classes, device=device) + 0.5) / self.classes
        self._accepted_BC = (2 * middle_C).expand(rows, -1).clone()
        self._examined_BC = torch.full_like(self._accepted_BC, 2.0)
        self._class_BK = torch.zeros(rows, gamma, dtype=torch.int64, device=device)
        self._looked_BK = torch.full((rows, gamma), 2.0, device=device)
        self._brought_BK = torch.ones_like(self._looked_BK)
        self._rested_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def begin_step(self, context: Context) -> None:
        self._reach_B = torch.ones(len(context.lengths), device=context.ids_BS.device)
        self._expected_B = torch.ones_like(self._reach_B)
        self._looks_BK = torch.zeros_like(self._looked_BK)

    def looks(self, open_B: Tensor, level: int) -> Tensor:
        brought_B = self._brought_BK[:, level] / self._looked_BK[:, level]
        each = self._draft_cost + self._token_cost
        looks_B = self._reach_B * brought_B * (1 + each * level) > each * self._expected_B
        if level == 0:
            looks_B = looks_B | (self._rested_B == self._asked_again)
            self._rested_B = torch.where(looks_B, 0, self._rested_B + 1)
        looks_B = looks_B & open_B
        self._looks_BK[:, level] = looks_B.float()
        return looks_B

    def go_on(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        self._class_BK[:, level] = (confidence_B * self.classes).long().clamp(0, self.classes - 1)
        gain_B = self._reach_B * self.predict(draft_BV, level)
        spent = 1 + self._draft_cost * (level + 1) + self._token_cost * level
        pays_B = gain_B * spent > self._token_cost * self._expected_B
        self._reach_B, self._expected_B = gain_B, self._expected_B + gain_B
        return pays_B

    def predict(self, draft_BV: Tensor, level: int) -> Tensor:
        """[B] the probability that the next draft token is accepted."""
        place_B1 = self._class_BK[:, level, None]
        return (self._accepted_BC.gather(1, place_B1) / self._examined_BC.gather(1, place_B1))[:, 0]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        depth = proposal.tree.max_depth
        assert proposal.valid_BN is not None
        place_K = torch.arange(depth, device=verdict.accepted_B.device)
        accepted_BK = (place_K < verdict.accepted_B[:, None]).float()
        examined_BK = (place_K <= verdict.accepted_B[:, None]) * proposal.valid_BN[:, 1:].float()
        self._accepted_BC.scatter_add_(1, self._class_BK[:, :depth], accepted_BK)
        self._examined_BC.scatter_add_(1, self._class_BK[:, :depth], examined_BK)
        brought_BK = torch.nn.functional.pad(accepted_BK * examined_BK, (0, self._looked_BK.shape[1] - depth))
        # A level is known for those that reached it: all before it were kept.
        known_BK = self._looks_BK * (
            torch.arange(brought_BK.shape[1], device=place_K.device) <= verdict.accepted_B[:, None]
        )
        kept_BK = 1 - (1 - self._memory) * known_BK
        self._looked_BK = self._looked_BK * kept_BK + known_BK
        self._brought_BK = self._brought_BK * kept_BK + brought_BK * known_BK


class Oracle(ExpectedGain):
    """The same rule with the true acceptance, Σ min(p, q): an upper bound for analysis.

    See arXiv 2211.17192, section 3.5. It runs the target with the drafter to know p, which is not
    counted among the proposal's forwards.
    """

    def start(self, context: Context, gamma: int) -> None:
        super().start(context, gamma)
        self._peek = DraftState(context.target, context, gamma + 1, gamma)
        self._sampling, self._watch = context.sampling, context.watch
        self._tree = Tree.chain(gamma).to(context.ids_BS.device)

    def begin_step(self, context: Context) -> None:
        super().begin_step(context)
        self._hidden_BD = self._peek.read_root(context)

    def looks(self, open_B: Tensor, level: int) -> Tensor:
        return open_B

    def predict(self, draft_BV: Tensor, level: int) -> Tensor:
        logits_BV = self._peek.model.logits(self._hidden_BD[:, None])[:, 0]
        self._watch("the target's", logits_BV.amax(-1, True), level)
        target_BV = warp(logits_BV, self._sampling)
        return torch.minimum(target_BV, draft_BV).sum(-1)

    def drafted(self, tokens_B1: Tensor, level: int) -> None:
        self._hidden_BD = self._peek.grow(tokens_B1, self._tree, level + 1)[:, -1]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
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
        looks_B = self.policy.looks(all_B, 0)
        # What the policy leaves as it is needs not be asked for, which on a GPU would be a wait.
        self._rests = looks_B is not all_B and not bool(looks_B.any())
        if self._rests:
            proposal = Proposal(Tree.chain(0).to(self.model.device), context.root_B1, levels=self.gamma)
            proposal.valid_BN = all_B[:, None]
            return proposal
        hidden_BD, grow = self._draft.read_root(context), partial(self._grow, context.sampling)
        if self.policy.key is None or not self.model.is_async:
            found = grow(hidden_BD, looks_B, *chances)
        else:
            key = self.policy.key, context.sampling
            found = self._draft.run_captured(self._tree, key, grow, hidden_BD, looks_B, *chances)
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
            open_B = self.policy.looks(open_B, level + 1)
            if stops and not bool(open_B.any()):
                break
            self.policy.drafted(tokens[-1], level)
            hidden_BMD = self._draft.grow(tokens[-1], self._tree, level + 1)
        none_B0 = torch.zeros(len(open_B), 0, dtype=torch.int64, device=open_B.device)
        found = torch.cat(sure, 1), torch.cat((none_B0, *tokens), 1), torch.stack(valid or [open_B], 1)[:, : len(valid)]
        return found if sampling.greedy else (*found, torch.cat(probs or [draft_BMV[:, :0]], 1))

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if not self._rests:
            self._draft.keep(context)
        self.policy.commit(context, proposal, verdict)

    def stop(self) -> None:
        super().stop()
        self.policy.stop()

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        # As many as there are tokens, and one whose distribution made the policy stop.
        return [(self.model, 1)] * min(self.gamma, round(nodes))


class LookupOrDrafter(AdaptiveChain):
    """A chain of what is looked up; in rows where nothing is found a drafter's, which ends where it is unsure.

    Where every row has found something the drafter does not run, and reads what it missed later.
    """

    def __init__(self, model: LanguageModel, gamma: int, policy: Confidence, lookup: PromptLookup) -> None:
        super().__init__(model, gamma, policy)
        self.lookup = lookup
        self._steps, self._forwards = 0, 0

    def capacity(self, limits: Limits) -> tuple[int, int]:
        longest = max(self.gamma, self.lookup.gamma)
        return longest + 1, longest

    def propose(self, context: Context) -> Proposal:
        found_B, copied_BK = self.lookup.find(context)
        self._copied_B = found_B | np.array(context.ended)
        self._steps += 1
        if self._copied_B.all():
            if not context.sampling.greedy:
                context.rng.uniform(self.gamma)  # a row's numbers do not depend on its neighbours
            proposal = self.lookup.chain(context, found_B, copied_BK)
        else:
            proposal = super().propose(context)
            self._forwards += min(self.gamma, proposal.tree.max_depth + 1)
            if found_B.any():
                proposal = self._mixed(context, proposal, found_B, copied_BK)
        proposal.levels = self.capacity(context.limits)[1]
        return proposal

    def _mixed(self, context: Context, drafted: Proposal, found_B: np.ndarray, copied_BK: np.ndarray) -> Proposal:
        """The drafter's chains, and in the rows of `found_B` what was looked up."""
        device, copied = context.ids_BS.device, copied_BK.shape[1]
        depth = max(drafted.tree.max_depth, copied)
        found_B1 = sent(torch.from_numpy(found_B), device)[:, None]
        chain_BK = F.pad(sent(torch.from_numpy(copied_BK), device), (0, depth - copied))
        more = depth - drafted.tree.max_depth
        tokens_BK = torch.where(found_B1, chain_BK, F.pad(drafted.tokens_BN[:, 1:], (0, more)))
        assert drafted.valid_BN is not None
        there_K = torch.arange(depth, device=device) < copied
        valid_BK = torch.where(found_B1, there_K, F.pad(drafted.valid_BN[:, 1:], (0, more)))
        mixed = Proposal(Tree.chain(depth).to(device), torch.cat((context.root_B1, tokens_BK), 1))
        mixed.valid_BN = F.pad(valid_BK, (1, 0), value=True)
        if not context.sampling.greedy:
            probs_BKV = torch.zeros(*tokens_BK.shape, context.target.vocab_size, device=device)
            if drafted.draft_probs_BMV is not None:
                probs_BKV[:, : depth - more] = drafted.draft_probs_BMV
            certain_BKV = torch.zeros_like(probs_BKV).scatter_(2, tokens_BK[..., None], 1.0)
            mixed.draft_probs_BMV = torch.where(found_B1[..., None], certain_BKV, probs_BKV)
        return mixed

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if not self._copied_B.all():
            kept = zip(context.accepted, self._copied_B, strict=True)
            self._draft.keep(context, [0 if copied else count for count, copied in kept])

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.model, 1)] * round(self._forwards / max(1, self._steps))

"""Proposers of draft chains whose length is determined during drafting.

Whether a token is drafted depends on its distribution but not on its sampled value, so the output remains exact.

Shape letters: B batch, K depth, V vocabulary, D hidden.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine import Context, Proposal, Verdict
from ..models.base import LanguageModel
from ..models.dflash import DSparkDrafter
from ..rng import categorical
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DrafterProposer, DraftState


class AdaptiveChain(DrafterProposer):
    """Proposer of at most `gamma` draft tokens, which stops when the drafter's top probability is below a threshold.

    Source: BiLD (arXiv 2302.07863). On a CPU, drafting stops when the chains of all rows have ended. On GPUs this would
    need one synchronisation per token, so all tokens are drafted, and those after the end of a chain are masked.

    Args:
        keep_last: Also draft the token below the threshold, which takes no further forward of the drafter.
    """

    def __init__(self, model: LanguageModel, gamma: int, confidence_threshold: float, keep_last: bool = False) -> None:
        if not 0 <= confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold must be in [0, 1], got {confidence_threshold}")
        self.model, self.gamma, self._threshold = model, gamma, confidence_threshold
        self._keep_last = keep_last
        self._tree = Tree.chain(gamma).to(model.device)

    def propose(self, context: Context) -> Proposal:
        chances = [] if context.sampling.greedy else [context.rng.uniform(self.gamma)]
        all_B = torch.ones(len(context.lengths), dtype=torch.bool, device=self.model.device)
        results = self._run(context, self._draft.read_root(context), all_B, *chances)
        confidence_BK, tokens_BK, valid_BK, *probs = results
        context.watch("the drafter's", confidence_BK, range(confidence_BK.shape[1]))
        depth = tokens_BK.shape[1]
        proposal = Proposal(Tree.chain(depth).to(self.model.device), torch.cat((context.root_B1, tokens_BK), 1))
        proposal.levels, proposal.valid_BN = self.gamma, torch.cat((all_B[:, None], valid_BK), 1)
        if depth and probs:
            proposal.draft_probs_BMV = probs[0]
        return proposal

    def _run(self, context: Context, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run `_grow`, in a captured graph if the model supports it."""
        grow = partial(self._grow, context.sampling)
        if not self.model.is_async:
            return grow(*inputs)
        return self._draft.run_captured(self._tree, (self._threshold, context.sampling), grow, *inputs)

    def _grow(self, sampling: Sampling, hidden_BD: Tensor, open_B: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        """Draft a chain in the rows `open_B`, sampled with the random numbers `chances` above temperature 0.

        Returns confidences, tokens, a mask of valid tokens and, above temperature 0, distributions.
        """
        stops = not self.model.is_async
        confidences, tokens, valid, probs = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        hidden_BMD = hidden_BD[:, None]
        for level in range(self.gamma):
            logits_BMV = self.model.logits(hidden_BMD)
            draft_BMV = warp(logits_BMV, sampling)
            confidences.append(self._confidence(hidden_BMD, logits_BMV, draft_BMV, sampling))
            continues_B = open_B & self._continues(draft_BMV[:, 0], confidences[-1][:, 0], level)
            valid.append(open_B if self._keep_last else continues_B)
            open_B = continues_B
            if stops and not bool(valid[-1].any()):
                valid.pop()
                break
            tokens.append(categorical(draft_BMV, chances[0][:, level, None]) if chances else draft_BMV.argmax(-1))
            probs.append(draft_BMV)
            if level + 1 == self.gamma or (stops and not bool(open_B.any())):
                break
            self._after_draft(tokens[-1], level)
            hidden_BMD = self._draft.grow(tokens[-1], self._tree, level + 1)
        none_B0 = torch.zeros(len(open_B), 0, dtype=torch.int64, device=open_B.device)
        valid_BK = torch.stack(valid or [open_B], 1)[:, : len(valid)]
        results = torch.cat(confidences, 1), torch.cat((none_B0, *tokens), 1), valid_BK
        return results if sampling.greedy else (*results, torch.cat(probs or [draft_BMV[:, :0]], 1))

    def _confidence(self, hidden_BMD: Tensor, logits_BMV: Tensor, draft_BMV: Tensor, sampling: Sampling) -> Tensor:
        """Return the confidence [B, M] in the next token, which must not depend on its sampled value."""
        certain_BMV = warp(logits_BMV, Sampling(temperature=1.0)) if sampling.greedy else draft_BMV
        return certain_BMV.amax(-1)

    def _continues(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        """Return a bool mask [B] of the rows that draft a token at this level, given its warped distribution."""
        return confidence_B >= self._threshold

    def _after_draft(self, tokens_B1: Tensor, level: int) -> None:
        return

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        # One forward per token and, unless `keep_last`, one whose distribution ended the chain.
        count = self.gamma if self.model.max_draft_tokens else min(self.gamma, round(nodes) - self._keep_last)
        return [*self.model.draft_forwards([1] * count)]


class _OptimalChain(AdaptiveChain):
    """Base class of chains that grow as long as the expected number of tokens per unit of time increases.

    A chain of γ tokens with acceptance rates β₁, β₂ … yields 1 + Σ β₁⋯βᵢ tokens (arXiv 2211.17192, section 3.5) in the
    time of `fixed_cost` + γ · `cost` target forwards.
    """

    _fixed_cost: float
    _cost: float

    def __init__(self, model: LanguageModel, gamma: int, draft_cost: float, token_cost: float) -> None:
        if draft_cost <= 0 or token_cost < 0:
            raise ValueError(f"draft_cost must be above 0 and token_cost at least 0, got {draft_cost} and {token_cost}")
        super().__init__(model, gamma, 0.0)

    def _run(self, context: Context, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._reach_B = torch.ones(len(context.lengths), device=context.ids_BS.device)
        self._expected_B = torch.ones_like(self._reach_B)
        return self._grow(context.sampling, *inputs)

    def _pays(self, rate_B: Tensor, level: int) -> Tensor:
        """Return a mask of the rows to extend by a token with acceptance rates `rate_B`, which are then recorded."""
        gain_B = self._reach_B * rate_B
        pays_B = gain_B * (self._fixed_cost + self._cost * level) > self._cost * self._expected_B
        self._reach_B, self._expected_B = gain_B, self._expected_B + gain_B
        return pays_B


class ConfidenceChain(_OptimalChain):
    """Proposer of chains of optimal length for the acceptance rates that a drafter's confidence head predicts (DSpark).

    Drafting takes one forward for any length, so that an additional token costs `token_cost` only.

    Raises:
        ValueError: The drafter has no confidence head, or a cost is out of range.
    """

    model: DSparkDrafter

    def __init__(self, model: LanguageModel, gamma: int, draft_cost: float, token_cost: float) -> None:
        if not isinstance(model, DSparkDrafter):
            raise ValueError("`policy: confidence-head` requires a drafter with a confidence head (DSpark)")
        super().__init__(model, gamma, draft_cost, token_cost)
        self._fixed_cost, self._cost = 1 + draft_cost, token_cost

    def _confidence(self, hidden_BMD: Tensor, logits_BMV: Tensor, draft_BMV: Tensor, sampling: Sampling) -> Tensor:
        return self.model.confidence(hidden_BMD)

    def _continues(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        return self._pays(confidence_B, level)


class OracleChain(_OptimalChain):
    """Proposer of chains of optimal length for the true acceptance rates, an upper bound for adaptive drafting.

    The forwards that compute the true rates Σ min(p, q) are not counted.

    Args:
        draft_cost: Cost c of a forward of the drafter, relative to a forward of the target.
        token_cost: Cost of each additional token in a forward of the target, relative to a forward of one token.
    """

    def __init__(self, model: LanguageModel, gamma: int, draft_cost: float, token_cost: float) -> None:
        super().__init__(model, gamma, draft_cost, token_cost)
        self._fixed_cost, self._cost = 1.0, draft_cost + token_cost

    def start(self, context: Context) -> None:
        super().start(context)
        self._peek = DraftState(context.target, context, self.gamma + 1, self.gamma)
        self._sampling, self._watch = context.sampling, context.watch

    def _run(self, context: Context, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._hidden_BD = self._peek.read_root(context)
        return super()._run(context, *inputs)

    def _continues(self, draft_BV: Tensor, confidence_B: Tensor, level: int) -> Tensor:
        logits_BV = self._peek.model.logits(self._hidden_BD[:, None])[:, 0]
        self._watch("the target's", logits_BV.amax(-1, True), level)
        return self._pays(torch.minimum(warp(logits_BV, self._sampling), draft_BV).sum(-1), level)

    def _after_draft(self, tokens_B1: Tensor, level: int) -> None:
        self._hidden_BD = self._peek.grow(tokens_B1, self._tree, level + 1)[:, -1]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        super().commit(context, proposal, verdict)
        self._peek.keep(context)

    def stop(self) -> None:
        super().stop()
        del self._peek

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return super().forwards(nodes - 1)

"""Look-up and a drafter together: what followed the same words before, where they were said; elsewhere a draft.

What is looked up costs nothing to draft, and text that repeats its own beginning is what small models draft worst.
Each row decides by itself, by committed tokens alone, so that the output stays exact.

Shape letters: B batch, K depth, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..engine import Context, Limits, Proposal, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import sent
from ..tree import Tree
from .adaptive import AdaptiveChain, Confidence
from .ngrams import PromptLookup


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

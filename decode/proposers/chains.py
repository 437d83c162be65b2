"""Several chains per step: independent chains of one drafter (SpecTr), or one chain of each drafter (SpecInfer).

Shape letters: B batch, N tree nodes, M chains, K depth, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine import Chains, Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import to_device
from ..rng import draw_many
from ..tree import Tree
from ..warpers import warp
from .draft_state import DraftState, draft_state


class DraftChains(Proposer):
    """Proposer that merges `num_drafts` independent chains of `gamma` tokens from each draft model into a tree.

    At temperature 0 each model drafts one greedy chain, because all its chains would be equal.
    """

    def __init__(self, models: Sequence[LanguageModel], gamma: int, num_drafts: int, greedy: bool) -> None:
        self.models, self.gamma = tuple(models), gamma
        self.num_drafts = 1 if greedy else num_drafts
        self._own_tree = Tree.k_ary((self.num_drafts,) + (1,) * (gamma - 1))

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + len(self.models) * self.num_drafts * self.gamma, self.gamma

    def start(self, context: Context) -> None:
        self._states = [draft_state(model, context, self._own_tree.nodes, self.gamma) for model in self.models]
        self._own_tree = self._own_tree.to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        is_single = len(self._states) == 1
        drafts = [
            self._draft(state, context, "the drafter's" if is_single else f"drafter {number}'s")
            for number, state in enumerate(self._states, 1)
        ]
        tokens_BMK = torch.cat([tokens for tokens, _ in drafts], 1)
        tree, nodes_BMK = merge_chains(tokens_BMK)
        tokens_BN = torch.zeros_like(tree.parents_BN).scatter_(1, nodes_BMK.flatten(1), tokens_BMK.flatten(1))
        tokens_BN[:, 0] = context.root_B1[:, 0]
        proposal = Proposal(tree, tokens_BN, chains=Chains(nodes_BMK, torch.cat([probs for _, probs in drafts], 1)))
        proposal.valid_BN = tree.parents_BN >= 0
        return proposal

    def _draft(self, state: DraftState, context: Context, source: str) -> tuple[Tensor, Tensor]:
        """Draft the chains of one model. Return tokens [B, M, K] and their distributions (empty at temperature 0)."""
        hidden_BMD = state.read_root(context)[:, None]
        tokens, probs, count = [], [], self.num_drafts
        for level in range(self.gamma):
            logits_BMV = state.model.logits(hidden_BMD)
            if context.sampling.greedy:
                value_BM, tokens_BM = logits_BMV.max(-1)
                probs.append(logits_BMV.new_zeros(len(logits_BMV), 1, 0))
            else:
                probs_BMV = warp(logits_BMV, context.sampling)
                at_root = probs_BMV.shape[1] == 1
                uniform_BMC = context.rng.uniform(1, count) if at_root else context.rng.uniform(count, 1)
                tokens_BM, value_BM = (part_BMC.flatten(1) for part_BMC in draw_many(probs_BMV, uniform_BMC))
                probs.append(probs_BMV.expand(-1, count, -1))
            context.watch(source, value_BM, level)
            tokens.append(tokens_BM)
            if level + 1 < self.gamma:
                hidden_BMD = state.grow(tokens_BM, self._own_tree, 1 + level * count)
        return torch.stack(tokens, 2), torch.stack(probs, 2)

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        # The host already has paths and chains, so this needs no synchronisation.
        path_BK = np.array([[*path, *[-1] * (self.gamma - len(path))] for path in context.paths])
        matched_BM = (np.array(context.chains) == path_BK[:, None]).cumprod(2).sum(2)
        depth_K = np.arange(self.gamma)
        for state, model_matches_BM in zip(self._states, np.split(matched_BM, len(self._states), 1), strict=True):
            accepted_B, chain_B = model_matches_BM.max(1), model_matches_BM.argmax(1)
            node_BK = 1 + chain_B[:, None] + self.num_drafts * depth_K
            path_BK1 = torch.from_numpy(np.where(depth_K < accepted_B[:, None], node_BK, depth_K + 1))
            moves = self.num_drafts > 1
            state.keep(context, accepted_B.tolist(), to_device(path_BK1, context.ids_BS.device) if moves else None)

    def stop(self) -> None:
        del self._states

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        widths = [1] + [self.num_drafts] * (self.gamma - 1)
        return [each for model in self.models for each in model.draft_forwards(widths)]


def merge_chains(tokens_BMK: Tensor) -> tuple[Tree, Tensor]:
    """Merge M chains into a tree. Return the tree, and the node of each token of each chain, [B, M, K].

    Common prefixes share nodes. Smaller trees are padded with parent -1. On GPUs, all trees have M · K + 1 nodes.
    """
    rows, chains, depth = tokens_BMK.shape
    device = tokens_BMK.device
    equal_BMMK = tokens_BMK[:, :, None] == tokens_BMK[:, None]
    # The first chain with the same prefix represents all of them.
    first_BMK = equal_BMMK.int().cumprod(3).argmax(2)
    used_BMK = first_BMK == torch.arange(chains, device=device)[:, None]
    number_BKM = used_BMK.transpose(1, 2).flatten(1).cumsum(1).view(rows, depth, chains)
    nodes_BMK = number_BKM.transpose(1, 2).gather(1, first_BMK)
    parent_BMK = torch.nn.functional.pad(nodes_BMK[:, :, :-1], (1, 0))
    # On a GPU a few more nodes cost less than synchronising to count them.
    nodes = 1 + (int(number_BKM[:, -1, -1].max()) if device.type == "cpu" else chains * depth)
    parents_BN = torch.full((rows, nodes), -1, dtype=torch.int64, device=device)
    parents_BN.scatter_(1, nodes_BMK.flatten(1), parent_BMK.flatten(1))
    return Tree.from_parents(parents_BN, depth), nodes_BMK

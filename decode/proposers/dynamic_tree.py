"""Dynamic draft trees, which are deep where the drafter is confident and wide elsewhere.

Source: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), sections 3.1 and 3.2. Each level extends the nodes with the highest
joint probabilities, and the target scores the best nodes. Proposals are a deterministic function of the committed
tokens, so `SampleAndMatch` is exact.

Shape letters: B batch, T known nodes, S nodes of the suffix tree, A nodes of a level that were run, W candidates of a
node, X candidates of a level, N best nodes, D hidden, R vocabulary of the drafter.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine import Context, Limits, Proposal, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import to_device
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DrafterProposer, draft_state
from .suffix import SuffixTree

_UNWARPED = Sampling(temperature=1.0)


class _Nodes(NamedTuple):
    """Candidate nodes of each row, with parents first: the root, suffix tree nodes, then nodes of the drafter."""

    joint_BT: Tensor
    """Joint probability of the path to each node, float32. 0 if the node does not exist."""
    parents_BT: Tensor
    tokens_BT: Tensor
    depth_BT: Tensor

    def concat(self, *fields: Tensor) -> "_Nodes":
        return _Nodes(*(torch.cat(pair, 1) for pair in zip(self, fields, strict=True)))


class DynamicTree(DrafterProposer):
    """Proposer of a tree of the continuations with the highest joint probability under the drafter.

    Each level extends the best `width` nodes of the previous level with `width` candidates each. On a CPU, levels that
    no row needs are skipped. On a GPU, all levels are drafted, because skipping would require a synchronisation.

    Args:
        max_nodes: Maximum number of nodes, without the root.
        max_depth: Number of levels that are drafted.
        min_prob: Minimum joint probability of a node.
        expand_prob: Minimum joint probability of a node that is expanded.
        suffix: Suffix tree that adds nodes. The probability of a token is the maximum of both sources.
        confidence_threshold: The drafter skips a node if `suffix` has a continuation with at least this probability.

    Raises:
        ValueError: A probability is out of range or, when decoding starts, `width` exceeds the drafter's vocabulary.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_nodes: int,
        max_depth: int,
        width: int,
        min_prob: float,
        expand_prob: float,
        suffix: SuffixTree | None = None,
        confidence_threshold: float = 1.0,
    ) -> None:
        if not 0 < min_prob < 1:
            raise ValueError(f"min_prob must be above 0 and below 1, got {min_prob}")
        if not 0 <= expand_prob <= 1:
            raise ValueError(f"expand_prob must be in [0, 1], got {expand_prob}")
        if not 0 < confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold must be above 0 and at most 1, got {confidence_threshold}")
        self.model, self.suffix = model, suffix
        self.max_nodes, self.max_depth, self.width = max_nodes, max_depth, width
        self.min_prob, self.expand_prob, self.confidence_threshold = min_prob, expand_prob, confidence_threshold
        self._levels = max_depth if suffix is None else max(max_depth, suffix.max_depth)
        self._settings = max_nodes, max_depth, width, min_prob, expand_prob, confidence_threshold
        self._grown = Tree.chain(width * (max_depth - 1)).to(model.device)  # maximum number of nodes run
        self._ran: list[int] = []

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + max(self.max_nodes, self.width * (self.max_depth - 1)), self._levels

    def start(self, context: Context) -> None:
        if self.width > self.model.draft_vocab_size:
            raise ValueError(
                f"width must be at most the drafter's vocabulary size, {self.model.draft_vocab_size}, got {self.width}"
            )
        self._draft = draft_state(self.model, context, *self.capacity(context.limits), self.max_depth)
        if self.suffix is not None:
            self.suffix.start(context)
        zeros_BT = torch.zeros(len(context.lengths), 1, dtype=torch.int64, device=self.model.device)
        self._root = _Nodes(torch.ones_like(zeros_BT, dtype=torch.float32), zeros_BT - 1, zeros_BT, zeros_BT)

    def propose(self, context: Context) -> Proposal:
        nodes, open_B = self._suffix_nodes(context)
        self._drafted, self._ran = bool(open_B.any()), []
        sampling = _UNWARPED if context.sampling.greedy else context.sampling
        if self._drafted:
            draft = partial(self._draft_levels, sampling)
            if self.model.is_async:
                draft = partial(self._draft.run_captured, self._grown, (*self._settings, sampling), draft)
            hidden_BD = self._draft.read_root(context)
            watched_BA, *best = draft(hidden_BD, to_device(torch.from_numpy(open_B), self.model.device), *nodes)
            if self.model.is_async:  # a replay does not run the Python code
                self._ran = [1] + [min(self.width, 1 + self.max_nodes)] * (self.max_depth - 1)
            levels = [level for level, count in enumerate(self._ran) for _ in range(count)]
            context.watch("the drafter's", watched_BA, levels)
        else:
            best = [*self._best(nodes)]
        tokens_BN, parents_BN, depth_BN = best
        all_BN, most = torch.cat((context.root_B1, tokens_BN[:, 1:]), 1), tokens_BN.shape[1] - 1
        if self.model.is_async:
            tree = Tree.from_parents(parents_BN, min(self._levels, most), depth_BN)
        elif len(parents_BN) == 1 and parents_BN[0].tolist() == [*range(-1, most)]:
            tree = Tree.chain(most)
        else:
            tree = Tree.from_parents(parents_BN, int(depth_BN.max()), depth_BN)
        return Proposal(tree, all_BN, levels=self._levels)

    def _suffix_nodes(self, context: Context) -> tuple[_Nodes, np.ndarray]:
        """Return the root and the nodes of the suffix tree, and a mask of the rows that need the drafter."""
        rows, device = range(len(context.lengths)), self.model.device
        if self.suffix is None:
            return self._root, ~np.array(context.ended)
        texts = [context.host_ids_BS[row, : context.lengths[row]] for row in rows]
        grown = [[] if context.ended[row] else self.suffix.grow(row, texts[row]) for row in rows]
        most = self.suffix.max_nodes if self.model.is_async else max(map(len, grown))
        joint_BT = np.zeros((len(grown), 1 + most), dtype=np.float32)
        whole_3BT = np.zeros((3, *joint_BT.shape), dtype=np.int64)
        joint_BT[:, 0], whole_3BT[0] = 1.0, -1
        for row, nodes in enumerate(grown):
            for number, (joint, parent, token) in enumerate(nodes, 1):
                joint_BT[row, number] = joint
                whole_3BT[:, row, number] = parent, token, whole_3BT[2, row, parent] + 1
        max_prob_B = np.where(whole_3BT[0] == 0, joint_BT, 0.0).max(1)
        open_B = ~np.array(context.ended) & (max_prob_B < self.confidence_threshold)
        fields = to_device(torch.from_numpy(joint_BT), device), *to_device(torch.from_numpy(whole_3BT), device)
        return _Nodes(*fields), open_B

    def _draft_levels(
        self, sampling: Sampling, hidden_BD: Tensor, open_B: Tensor, *fields: Tensor
    ) -> tuple[Tensor, ...]:
        """Draft all levels. Return the top probability after each node, followed by the result of `_best`."""
        nodes, stops, num_suffix = _Nodes(*fields), not self.model.is_async, fields[0].shape[1]
        hidden_BAD, tree, watched = hidden_BD[:, None], Tree.chain(0).to(hidden_BD.device), list[Tensor]()
        parent_BA, share_BA = torch.zeros_like(open_B, dtype=torch.int64)[:, None], open_B[:, None].float()
        for level in range(self.max_depth):
            self._ran.append(parent_BA.shape[1])
            logits_BAR, vocab_ids_R = self.model.draft_logits(hidden_BAD)
            top = warp(logits_BAR, sampling).topk(self.width, -1)
            watched.append(top.values[..., 0])
            tokens_BAW = top.indices if vocab_ids_R is None else vocab_ids_R[top.indices]
            joint_BAW = share_BA[..., None] * top.values
            joint_BAW = torch.where(joint_BAW >= self.min_prob, joint_BAW, 0.0)  # NaN also becomes 0
            nodes = self._add(nodes, num_suffix, level + 1, parent_BA, tokens_BAW, joint_BAW)
            if level + 1 == self.max_depth:
                break
            parent_BA, share_BA, position_BA = self._next_level(nodes, num_suffix, parent_BA, share_BA)
            if stops:
                # Rows with fewer nodes are padded with nodes that are ignored.
                used = [index for index, shares in enumerate(zip(*share_BA.tolist(), strict=True)) if any(shares)]
                if not used:
                    break
                if len(used) < share_BA.shape[1]:
                    used_A = torch.tensor(used)
                    level_BA = (parent_BA, share_BA, position_BA)
                    parent_BA, share_BA, position_BA = (field.index_select(1, used_A) for field in level_BA)
            start = tree.nodes
            tree = tree.grow(position_BA + start - hidden_BAD.shape[1])
            hidden_BAD = self._draft.grow(nodes.tokens_BT.gather(1, parent_BA), tree, start)
        return torch.cat(watched, 1), *self._best(nodes)

    def _add(
        self, nodes: _Nodes, num_suffix: int, depth: int, parent_BA: Tensor, tokens_BAW: Tensor, joint_BAW: Tensor
    ) -> _Nodes:
        """Add candidates of a level to `nodes`. If one is already a suffix node, only its probability is raised."""
        tokens_BX, joint_BX = tokens_BAW.flatten(1), joint_BAW.flatten(1)
        parents_BX = parent_BA[..., None].expand_as(tokens_BAW).flatten(1)
        if num_suffix > 1:
            equal_BXS = parents_BX[..., None] == nodes.parents_BT[:, None, 1:num_suffix]
            equal_BXS &= tokens_BX[..., None] == nodes.tokens_BT[:, None, 1:num_suffix]
            raised_BS = torch.where(equal_BXS, joint_BX[..., None], 0.0).amax(1)
            joint_BT = nodes.joint_BT.clone()
            joint_BT[:, 1:num_suffix] = torch.maximum(joint_BT[:, 1:num_suffix], raised_BS)
            nodes, joint_BX = nodes._replace(joint_BT=joint_BT), joint_BX.masked_fill(equal_BXS.any(2), 0.0)
        return nodes.concat(joint_BX, parents_BX, tokens_BX, torch.full_like(tokens_BX, depth))

    def _next_level(
        self, nodes: _Nodes, num_suffix: int, parent_BA: Tensor, share_BA: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best children of the previous level's nodes, at most `width`.

        Returns the children's node numbers, their joint probabilities (0 if they are not extended), and the indices of
        their parents in the previous level, [B, A] each.
        """
        order_BN = self._order(nodes)
        parents_BN = nodes.parents_BT.gather(1, order_BN)
        under_BNA = (parents_BN[..., None] == parent_BA[:, None]) & (share_BA > 0)[:, None]
        joint_BN = nodes.joint_BT.gather(1, order_BN) * under_BNA.any(2)
        joint_BN = torch.where(joint_BN >= self.expand_prob, joint_BN, 0.0)
        first_BA = joint_BN.sort(dim=1, descending=True, stable=True).indices[:, : self.width]
        parent_BA, share_BA = order_BN.gather(1, first_BA), joint_BN.gather(1, first_BA)
        if num_suffix > 1:  # the suffix tree already continues some of these nodes
            follows_BAS = nodes.parents_BT[:, None, 1:num_suffix] == parent_BA[..., None]
            max_prob_BA = torch.where(follows_BAS, nodes.joint_BT[:, None, 1:num_suffix], 0.0).amax(2)
            share_BA = share_BA.masked_fill(max_prob_BA >= self.confidence_threshold * share_BA, 0.0)
        return parent_BA, share_BA, under_BNA.int().argmax(2).gather(1, first_BA)

    def _order(self, nodes: _Nodes) -> Tensor:
        """Return the indices of the root and the best nodes, [B, N], by descending joint probability, parents first."""
        return nodes.joint_BT.sort(dim=1, descending=True, stable=True).indices[:, : 1 + self.max_nodes]

    def _best(self, nodes: _Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, parents and depths of the best nodes, [B, N] each. Parents are indices into the best nodes."""
        order_BN, total = self._order(nodes), nodes.joint_BT.shape[1]
        exists_BN = nodes.joint_BT.gather(1, order_BN) > 0
        numbers_BN = torch.where(exists_BN, order_BN, total).sort(1).values
        if not self.model.is_async:
            numbers_BN = numbers_BN[:, : int(exists_BN.sum(1).max())]
        index_N = torch.arange(numbers_BN.shape[1], device=numbers_BN.device).expand_as(numbers_BN)
        index_BT = numbers_BN.new_zeros(len(numbers_BN), total + 1).scatter_(1, numbers_BN, index_N)
        exists_BN, numbers_BN = numbers_BN < total, numbers_BN.clamp(max=total - 1)
        parent_BN, tokens_BN, depth_BN = (field.gather(1, numbers_BN) * exists_BN for field in nodes[1:])
        parents_BN = index_BT.gather(1, parent_BN.clamp(min=0)).masked_fill(~exists_BN | (parent_BN < 0), -1)
        return tokens_BN, parents_BN, depth_BN

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if self._drafted:
            self._draft.keep(context, [0] * len(context.lengths))
        if self.suffix is not None:
            self.suffix.commit(context, proposal, verdict)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """Return the forward passes of the last proposal, because `nodes` does not determine their number."""
        widths = [1] * self.max_depth if self.model.max_draft_tokens else self._ran
        return [*self.model.draft_forwards(widths)] if self._ran else []

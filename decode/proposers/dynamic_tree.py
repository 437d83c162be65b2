"""Trees of the draft tokens that are likeliest to be kept: where a drafter is sure they are long, elsewhere wide.

Source: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), sections 3.1 and 3.2: levels grow from the nodes of the highest
joint probability, and of all nodes the best are scored. What is proposed depends on committed tokens alone, not on
chance, so that matching the target's own choice is exact.

Shape letters: B batch, M nodes of a level, W candidates of a node, D hidden, R tokens that are
proposed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine import Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import sent, to_host
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DraftState
from .suffix import Node, SuffixTree, proposal_of

_UNWARPED = Sampling(temperature=1.0)


class DynamicTree(Proposer):
    """The likeliest continuations by a drafter's joint probability, at most `nodes`, none below `least`.

    Each level grows from the best `width` nodes of the one before, with `width` candidates each. The host decides after
    each level whether another pays.

    Args:
        depth: levels that are drafted.
        suffix: what follows the same words elsewhere stands in the tree too, a token being as likely as the surer of
            both holds it; nothing is drafted after a node of which it is `sure` how the text goes on.

    Raises ValueError: a size below 1; a probability that is none.
    """

    def __init__(
        self,
        model: LanguageModel,
        nodes: int,
        depth: int,
        width: int,
        least: float,
        suffix: SuffixTree | None = None,
        sure: float = 1.0,
    ) -> None:
        for name, size in (("nodes", nodes), ("depth", depth), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1")
        for name, share, most in (("least", least, 1.0), ("sure", sure, 1.1)):
            if not 0 < share < most:
                raise ValueError(f"{name} is a probability: expected above 0 and at most 1, got {share}")
        self.model, self.nodes, self.depth, self.width, self.least = model, nodes, depth, width, least
        self.suffix, self.sure = suffix, sure
        self._levels = depth if suffix is None else max(depth, suffix.depth)
        self._ran: list[int] = []

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + max(self.nodes, self.width * (self.depth - 1)), self._levels

    def start(self, context: Context) -> None:
        self._draft = DraftState(self.model, context, *self.capacity(context.limits))
        if self.suffix is not None:
            self.suffix.start(context)

    def propose(self, context: Context) -> Proposal:
        device, sampling = self.model.device, _UNWARPED if context.sampling.greedy else context.sampling
        rows = [self._known(context, row) for row in range(len(context.lengths))]
        # the nodes of the level, by their numbers
        grown = [[] if context.ended[row] else self._open([0], nodes) for row, nodes in enumerate(rows)]
        tree = Tree.chain(0).to(device)
        self._drafted = any(grown)
        self._ran = [1] if self._drafted else []
        if self._drafted:
            hidden_BMD = self._draft.read_root(context)[:, None]
        for level in range(self.depth if self._drafted else 0):
            logits_BMR, kept_R = self.model.proposed_logits(hidden_BMD)
            top = warp(logits_BMR, sampling).topk(min(self.width, logits_BMR.shape[-1]), -1)
            context.watch("the drafter's", top.values[..., 0], level)
            tokens_BMW, probs_BMW = to_host(top.indices if kept_R is None else kept_R[top.indices], top.values)
            parents = list[list[int]]()
            for row, nodes in enumerate(rows):
                above = grown[row]
                for place, parent in enumerate(above):
                    joint = nodes[parent - 1].joint if parent else 1.0
                    self._add(nodes, parent, joint, tokens_BMW[row][place], probs_BMW[row][place])
                best = [number for number in self._best(nodes) if nodes[number - 1].parent in above]
                grown[row] = self._open(best[: self.width], nodes)
                parents.append([above.index(nodes[number - 1].parent) for number in grown[row]])
            widest = max(map(len, grown))
            if not widest or level + 1 == self.depth:
                break
            # rows of fewer nodes are filled with what nobody reads
            filled = [[*places, *[0] * (widest - len(places))] for places in parents]
            tokens = [
                [*(nodes[number - 1].token for number in numbers), *[0] * (widest - len(numbers))]
                for nodes, numbers in zip(rows, grown, strict=True)
            ]
            parents_BM, tokens_BM = sent(torch.tensor([filled, tokens]), device)
            start = tree.nodes
            tree = tree.grow(parents_BM + start - hidden_BMD.shape[1])
            hidden_BMD = self._draft.grow(tokens_BM, tree, start)
            self._ran.append(widest)
        return proposal_of([self._chosen(*each) for each in enumerate(rows)], context.root_B1, self._levels)

    def _known(self, context: Context, row: int) -> list[Node]:
        """What follows a row's words elsewhere."""
        if self.suffix is None or context.ended[row]:
            return []
        return self.suffix.grow(row, context.host_ids_BS[row, : context.lengths[row]])

    def _add(self, nodes: list[Node], parent: int, joint: float, tokens: list[int], probs: list[float]) -> None:
        """Put a node's candidates among a row's nodes, or make those that are there as likely."""
        known = {node.token: place for place, node in enumerate(nodes) if node.parent == parent}
        for token, p in zip(tokens, probs, strict=True):
            if joint * p < self.least:
                continue
            if token in known:
                node = nodes[known[token]]
                nodes[known[token]] = node._replace(joint=max(node.joint, joint * p))
            else:
                nodes.append(Node(joint * p, parent, token))

    def _best(self, nodes: list[Node]) -> list[int]:
        """Numbers of the nodes to propose, the best first; parents stand before children that are as likely."""
        return sorted(range(1, len(nodes) + 1), key=lambda number: -nodes[number - 1].joint)[: self.nodes]

    def _open(self, numbers: list[int], nodes: list[Node]) -> list[int]:
        """Those of some nodes after which it is not sure how the text goes on."""
        if self.suffix is None:
            return numbers
        surest = dict.fromkeys(numbers, 0.0)
        for node in nodes:
            if node.parent in surest:
                surest[node.parent] = max(surest[node.parent], node.joint)
        joints = {number: nodes[number - 1].joint if number else 1.0 for number in numbers}
        return [number for number in numbers if surest[number] < self.sure * joints[number]]

    def _chosen(self, row: int, nodes: list[Node]) -> tuple[list[int], list[int]]:
        """Parents and tokens of a row's best nodes, whose parents are among them."""
        numbers = sorted(self._best(nodes))
        places = {0: 0} | {number: place for place, number in enumerate(numbers, 1)}
        if self.suffix is not None:
            self.suffix.renumber(row, places)
        return [places[nodes[number - 1].parent] for number in numbers], [nodes[number - 1].token for number in numbers]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if self._drafted:
            self._draft.keep(context, [0] * len(context.lengths))
        if self.suffix is not None:
            self.suffix.commit(context, proposal, verdict)

    def stop(self) -> None:
        del self._draft

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """Those of the last proposal: how many it takes does not follow from its size."""
        return [(self.model, count) for count in self._ran]

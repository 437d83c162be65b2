"""Trees of the draft tokens that are likeliest to be kept: where a drafter is sure they are long, elsewhere wide.

Source: EAGLE-2 (Li et al. 2024, arXiv 2406.16858), sections 3.1 and 3.2: levels grow from the nodes of the highest
joint probability, and of all nodes the best are scored. What is proposed depends on committed tokens alone, not on
chance, so that matching the target's own choice is exact.

Shape letters: B batch, M nodes of a level, W candidates of a node, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..engine import Context, Limits, Proposal, Proposer, Verdict
from ..models.base import LanguageModel
from ..models.kv_cache import sent, to_host
from ..tree import Tree
from ..warpers import Sampling, warp
from .draft_state import DraftState
from .suffix import proposal_of

_UNWARPED = Sampling(temperature=1.0)


class _Node(NamedTuple):
    joint: float
    """The drafter's probability of the path to it."""
    parent: int
    """Its parent's number among the row's nodes, from 1; 0: the root."""
    token: int


class DynamicTree(Proposer):
    """The likeliest continuations by a drafter's joint probability, at most `nodes`, none below `least`.

    Each level grows from the best `width` nodes of the one before, with `width` candidates each. The host decides after
    each level whether another pays. Raises ValueError: a size below 1; a probability that is none.
    """

    def __init__(self, model: LanguageModel, nodes: int, depth: int, width: int, least: float) -> None:
        for name, size in (("nodes", nodes), ("depth", depth), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} is {size}, expected at least 1")
        if not 0 < least < 1:
            raise ValueError(f"least is the smallest probability of a node: expected above 0 and below 1, got {least}")
        self.model, self.nodes, self.depth, self.width, self.least = model, nodes, depth, width, least

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + max(self.nodes, self.width * (self.depth - 1)), self.depth

    def start(self, context: Context) -> None:
        self._draft = DraftState(self.model, context, *self.capacity(context.limits))

    def propose(self, context: Context) -> Proposal:
        device, sampling = self.model.device, _UNWARPED if context.sampling.greedy else context.sampling
        hidden_BMD = self._draft.read_root(context)[:, None]
        rows: list[list[_Node]] = [[] for _ in context.lengths]
        grown = [[0] for _ in rows]  # the nodes of the level, by their numbers
        tree, width = Tree.chain(0).to(device), min(self.width, self.model.vocab_size)
        for level in range(self.depth):
            top = warp(self.model.logits(hidden_BMD), sampling).topk(width, -1)
            context.watch("the drafter's", top.values[..., 0], level)
            tokens_BMW, probs_BMW = to_host(top.indices, top.values)
            parents = list[list[int]]()
            for row, nodes in enumerate(rows):
                above, first = grown[row], len(nodes)
                for place, parent in enumerate(above):
                    joint = nodes[parent - 1].joint if parent else float(not context.ended[row])
                    pairs = zip(tokens_BMW[row][place], probs_BMW[row][place], strict=True)
                    nodes += [_Node(joint * p, parent, token) for token, p in pairs if joint * p >= self.least]
                grown[row] = self._best(nodes, first)
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
        kept = [sorted(self._best(nodes, 0, self.nodes)) for nodes in rows]
        return proposal_of([_chosen(*each) for each in zip(rows, kept, strict=True)], context.root_B1, self.depth)

    def _best(self, nodes: list[_Node], first: int, most: int | None = None) -> list[int]:
        """Numbers of the best nodes from place `first` on, `width` or `most` of those among the `nodes` best of all."""
        order = sorted(range(len(nodes)), key=lambda place: -nodes[place].joint)[: self.nodes]
        return [place + 1 for place in order if place >= first][: most or self.width]

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context, [0] * len(context.lengths))

    def stop(self) -> None:
        del self._draft

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.model, 1), *[(self.model, self.width)] * (min(self.depth, round(nodes)) - 1)]


def _chosen(nodes: list[_Node], numbers: list[int]) -> tuple[list[int], list[int]]:
    """Parents and tokens of these nodes, whose parents are among them."""
    places = {0: 0} | {number: place for place, number in enumerate(numbers, 1)}
    return [places[nodes[number - 1].parent] for number in numbers], [nodes[number - 1].token for number in numbers]

"""Beam search with fewer forwards of the target, because a drafter predicts the beams of later levels.

Each level of the search needs the target's distribution after each beam. A forward of the target also scores the
drafter's most likely continuations, and the search advances while they contain all beams. The beams equal those of
`TargetBeam` at temperature 0, up to rounding. Both caches contain all nodes that were run, as one tree.

Shape letters: B batch, M new nodes, D hidden, V vocabulary, W candidates of a node.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine import Context, Limits, Proposal, Proposer
from ..models.base import LanguageModel
from ..models.kv_cache import to_device, to_host
from ..tree import Tree
from .draft_state import DraftState

_Continuations = dict[int, list[tuple[np.float32, int]]]
"""Mapping from a node to its most likely continuations, (log-probability, token) pairs in descending order."""


_Sequence = tuple[np.float32, int | None, int, tuple[int, ...]]
"""Score of a sequence, node of its last token (None if it was not run), parent node, and tuple of the last token."""


class _Beam(NamedTuple):
    score: np.float32
    node: int | None
    """Node of the last token, or None if neither model has run this token."""
    parent: int
    tokens: tuple[int, ...]
    ended: bool


@dataclass
class _Row:
    """State of the beam search for one row."""

    beams: list[_Beam]
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Mapping from (parent node, token) to node."""
    target: _Continuations = field(default_factory=dict)
    drafter: _Continuations = field(default_factory=dict)

    def advance(self, most: int, levels: int, stop_ids: frozenset[int]) -> None:
        """Extend the `most` best beams, up to `levels` tokens, while the target has been run on all of them."""
        while not self.ended(levels) and all(beam.ended or beam.node is not None for beam in self.beams):
            candidates: list[tuple[np.float32, int, int]] = []
            for number, beam in enumerate(self.beams):
                if beam.ended:
                    candidates.append((beam.score, number, beam.tokens[-1]))
                else:
                    assert beam.node is not None
                    candidates += [(beam.score + p, number, token) for p, token in self.target[beam.node]]
            candidates = sorted(candidates, key=lambda item: (-item[0], item[1:]))[:most]
            self.beams = [self._next(self.beams[number], score, token, stop_ids) for score, number, token in candidates]

    def _next(self, beam: _Beam, score: np.float32, token: int, stop_ids: frozenset[int]) -> _Beam:
        if beam.ended:
            return beam._replace(tokens=(*beam.tokens, token))
        assert beam.node is not None
        node = self.nodes.get((beam.node, token))
        return _Beam(score, node, beam.node, (*beam.tokens, token), token in stop_ids)

    def look_up(self) -> None:
        """Set the tree node of each beam on whose last token the models have run since the beam was created."""
        for number, beam in enumerate(self.beams):
            if beam.node is None and not beam.ended:
                self.beams[number] = beam._replace(node=self.nodes.get((beam.parent, beam.tokens[-1])))

    def ended(self, levels: int) -> bool:
        return len(self.beams[0].tokens) == levels or all(beam.ended for beam in self.beams)


class SpeculativeBeam(Proposer):
    """Proposer that runs the beam search of `TargetBeam` over all new tokens, with fewer target forwards.

    The drafter uses `draft_beams` beams and runs `draft_gamma` levels before each forward of the target.
    """

    def __init__(self, model: LanguageModel, num_beams: int, draft_beams: int, draft_gamma: int) -> None:
        if draft_beams < num_beams:
            raise ValueError(f"draft_beams must be at least num_beams ({num_beams}), got {draft_beams}")
        self.model, self.num_beams, self.draft_beams, self.draft_gamma = model, num_beams, draft_beams, draft_gamma
        self._ran: list[tuple[Any, int]] = []

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return limits.max_new_tokens + 1, 1

    def start(self, context: Context) -> None:
        self._levels = context.limits.max_new_tokens
        most = 1 + self._levels * (self.num_beams + self.draft_beams * self.draft_gamma)
        self._target, self._draft = (DraftState(model, context, most, 1) for model in (context.target, self.model))
        self._stop_ids = frozenset(context.limits.stop_ids)

    def propose(self, context: Context) -> Proposal:
        rows = [_Row([_Beam(np.float32(0), 0, 0, (), False)]) for _ in context.lengths]
        self._context, self._parents, self._depths = context, [[-1] for _ in rows], [[0] for _ in rows]
        hiddens = [state.read_root(context)[:, None] for state in (self._target, self._draft)]
        forwards, roots = 1, [[0]] * len(rows)
        self._store([row.target for row in rows], self._target, hiddens[0], self.num_beams, roots)
        self._store([row.drafter for row in rows], self._draft, hiddens[1], self.draft_beams, roots)
        self._ran = [(self.model, 1)]
        while True:
            for row in rows:
                row.advance(self.num_beams, self._levels, self._stop_ids)
            if all(row.ended(self._levels) for row in rows):
                break
            self._look_ahead(rows)
            forwards += 1
        self._ran.append((None, 1))
        best = [max(row.beams, key=lambda beam: beam.score).tokens for row in rows]
        padded = [[*tokens, *[tokens[-1]] * (self._levels - len(tokens))] for tokens in best]
        device = context.target.device
        tokens_BN = torch.cat((context.root_B1, to_device(torch.tensor(padded), device)), 1)
        return Proposal(Tree.chain(self._levels).to(device), tokens_BN, target_forwards=forwards)

    def _look_ahead(self, rows: list[_Row]) -> None:
        """Run both models on the last tokens of new beams, and on the drafter's likely continuations of all beams."""
        start, tokens = len(self._parents[0]), [list[int]() for _ in rows]
        new_nodes = [list[int]() for _ in rows]
        searched = [[] if row.ended(self._levels) else [beam for beam in row.beams if not beam.ended] for row in rows]
        reached: list[list[tuple[np.float32, int]]] = [[] for _ in rows]
        for level in range(1 + self.draft_gamma):
            group = [list[tuple[int, int]]() for _ in rows]
            for number, row in enumerate(rows):
                sequences = [(beam.score, beam.node, beam.parent, beam.tokens[-1:]) for beam in searched[number]]
                if level:
                    deep = len(row.beams[0].tokens) + level >= self._levels
                    sequences = [] if deep else self._best_continuations(row, reached[number])
                reached[number] = []
                for score, node, parent, last in sequences:
                    if node is None:
                        node = row.nodes[parent, last[0]] = len(self._parents[number]) + len(group[number])
                        group[number].append((parent, last[0]))
                        new_nodes[number].append(node)
                    reached[number].append((score, node))
            self._run(rows, group, tokens)
        tree = self._tree()
        hidden_BMD = self._target.grow(to_device(torch.tensor(tokens), self.model.device), tree, start)
        self._ran.append((None, tree.nodes - start))
        self._store([row.target for row in rows], self._target, hidden_BMD, self.num_beams, new_nodes, start)
        for row in rows:
            row.look_up()

    def _best_continuations(self, row: _Row, reached: list[tuple[np.float32, int]]) -> list[_Sequence]:
        """Return the drafter's most likely continuations of the nodes `reached`, without stop tokens."""
        candidates = [
            (score + p, parent, token)
            for score, parent in reached
            for p, token in row.drafter[parent]
            if token not in self._stop_ids
        ]
        best = sorted(candidates, key=lambda item: (-item[0], item[1:]))[: self.draft_beams]
        return [(score, row.nodes.get((parent, token)), parent, (token,)) for score, parent, token in best]

    def _run(self, rows: list[_Row], group: list[list[tuple[int, int]]], tokens: list[list[int]]) -> None:
        """Run the drafter on new nodes of one level, given as (parent, token). Rows with fewer nodes are padded."""
        widest, start = max(map(len, group)), len(self._parents[0])
        if not widest:
            return
        for number, pairs in enumerate(group):
            missing = widest - len(pairs)
            depths = [1 + self._depths[number][parent] for parent, _ in pairs]
            self._parents[number] += [*(parent for parent, _ in pairs), *[0] * missing]
            self._depths[number] += [*depths, *[1] * missing]
            tokens[number] += [*(token for _, token in pairs), *[0] * missing]
        tree = self._tree()
        newest = torch.tensor([values[-widest:] for values in tokens])
        hidden_BMD = self._draft.grow(to_device(newest, self.model.device), tree, start)
        self._ran.append((self.model, widest))
        nodes = [[start + index for index in range(len(pairs))] for pairs in group]
        self._store([row.drafter for row in rows], self._draft, hidden_BMD, self.draft_beams, nodes, start)

    def _tree(self) -> Tree:
        device = self.model.device
        parents_BN, depth_BN = (to_device(torch.tensor(rows), device) for rows in (self._parents, self._depths))
        return Tree.from_parents(parents_BN, int(max(map(max, self._depths))), depth_BN)

    def _store(
        self,
        continuations: list[_Continuations],
        state: DraftState,
        hidden_BMD: Tensor,
        most: int,
        nodes: list[list[int]],
        start: int = 0,
    ) -> None:
        """Store the `most` likeliest next tokens of `nodes`. `hidden_BMD` are hidden states from node `start` on."""
        logits_BMV = state.model.logits(hidden_BMD).float()
        source = "the target's" if state is self._target else "the drafter's"
        top = logits_BMV.log_softmax(-1).topk(min(most, logits_BMV.shape[-1]), -1)
        self._context.watch(source, top.values[:, :1, 0], 0)
        values_BMW, tokens_BMW = to_host(top.values, top.indices)
        for row, numbers in enumerate(nodes):
            for node in numbers:
                pairs = zip(values_BMW[row][node - start], tokens_BMW[row][node - start], strict=True)
                continuations[row][node] = [(np.float32(p), token) for p, token in pairs]

    def stop(self) -> None:
        del self._target, self._draft

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """Return the forward passes of the last proposal, because `nodes` does not determine their number."""
        return self._ran

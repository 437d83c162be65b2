"""Trees of what followed the same words before: in the text itself, in texts of a table; and of what heads guess.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which proposes the likeliest continuations of the longest
context that was seen, by how often each followed it. Here texts lie in a suffix array instead of trees, and a token may
have several sources, of which the surest counts. What is proposed depends on committed tokens alone, not on chance, so
that matching the target's own choice is exact.

Shape letters: B batch, N tree nodes, K depth or heads, C candidates of a head, S slots, M places, L lengths of a match.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...checkpoints.table.texts import CONTEXT, TextStore
from ..engine import Context, Limits, Proposal, Proposer, Verdict, hidden_after
from ..models.kv_cache import sent, to_host
from ..tree import Tree
from .head_trees import HeadModule, check_heads

Ints = NDArray[np.integer[Any]]
_LONGEST = 16
"""Tokens of a match in the text itself, at most."""
_MOST_PLACES = 2048
"""Places of the texts that are looked at, at most."""
_WIDTH = 4
"""Different tokens that are taken from the texts after a path, at most."""
_PRIOR = 4.0
"""How many observations the prior acceptance of a match counts."""
_NOWHERE = np.zeros(0, dtype=np.int32)


class Node(NamedTuple):
    """A token that may follow."""

    joint: float
    """The probability of the path to it."""
    parent: int
    """Its parent's number among the row's nodes, from 1; 0: the root."""
    token: int


class _Path(NamedTuple):
    """What is known of the tokens after a path from the root."""

    depth: int
    match: int
    """How many tokens up to its end stand before in the text itself, where it follows these; else 0."""
    places_M: Ints
    """Where the texts have it."""
    next_M: Ints
    """The token after it at each of them."""


class SuffixTree(Proposer):
    """The likeliest continuations of a row's text, grown best first.

    A token is as likely as the likeliest of: the token after the longest earlier match in the row's own text, by the
    share of such proposals that were accepted in this row so far; a token's share of what followed the longest match in
    the texts; a head's probability of it.

    Args:
        max_nodes: Maximum number of nodes, without the root.
        min_prob: Minimum joint probability of a node.
        texts: Further source of tokens: a datastore of earlier texts.
        heads: Further source of tokens: prediction heads, with `num_candidates` of each.

    Raises:
        ValueError: A `min_prob` outside (0, 1). At the start of decoding: heads of another target.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        min_prob: float,
        texts: TextStore | None = None,
        heads: HeadModule | None = None,
        num_candidates: int = 4,
    ) -> None:
        if not 0 < min_prob < 1:
            raise ValueError(f"min_prob must be above 0 and below 1, got {min_prob}")
        self.max_nodes, self.max_depth, self.min_prob = max_nodes, max_depth, min_prob
        self.texts, self.heads, self.num_candidates = texts, heads, num_candidates

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + self.max_nodes, self.max_depth

    def start(self, context: Context) -> None:
        if self.heads is not None:
            check_heads(self.heads, context)
        # the longer a match, the likelier the same token follows: 0.2 after one token, 0.5 after two, 0.8 after eight
        prior_L = 1 - 0.8 / np.arange(1, 1 + _LONGEST + self.max_depth) ** 0.7
        self._kept_BL = _PRIOR * np.tile(prior_L, (len(context.lengths), 1))
        self._tried_BL = np.full_like(self._kept_BL, _PRIOR)
        self._own = [(list[int](), 0) for _ in context.lengths]
        """What follows each row's last tokens in its own text, and how many of these stand before it there."""
        self._watched_BK: Tensor | None = None
        self._guesses = [list[dict[int, float]]() for _ in context.lengths]
        if self.heads is not None:
            self._guess(to_host(*self._candidates(context.hidden_BD)))

    def propose(self, context: Context) -> Proposal:
        if self._watched_BK is not None:
            context.watch("head {}'s", self._watched_BK, range(self._watched_BK.shape[1]))
        rows = list[tuple[list[int], list[int]]]()
        for row, length in enumerate(context.lengths):
            text_S = context.host_ids_BS[row, :length]
            nodes = [] if context.ended[row] else self.grow(row, text_S, self._guesses[row])
            rows.append(([node.parent for node in nodes], [node.token for node in nodes]))
        return proposal_of(rows, context.root_B1, self.max_depth)

    def _candidates(self, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' candidates and their probabilities, [B, K, C]."""
        assert self.heads is not None
        probs_BKV = self.heads(hidden_BD)[:, : self.max_depth].softmax(-1, dtype=torch.float32)
        top = probs_BKV.topk(min(self.num_candidates, probs_BKV.shape[-1]), -1)
        self._watched_BK = top.values[..., 0]
        return top.indices, top.values

    def _guess(self, candidates: list[Any]) -> None:
        """Take over, by row and depth, what `_candidates` found."""
        pairs = zip(*candidates, strict=True)
        self._guesses = [[dict(zip(*level, strict=True)) for level in zip(*row, strict=True)] for row in pairs]

    def ahead(self, context: Context, verdict: Verdict, hidden_BND: Tensor) -> tuple[Tensor, ...]:
        if self.heads is None:
            return ()
        return self._candidates(hidden_after(verdict, hidden_BND, context.target.hidden_size))

    def grow(self, row: int, text_S: Ints, guesses: Sequence[dict[int, float]] = ()) -> list[Node]:
        """The nodes after a row's text, in the order of their probability; `guesses`: the heads' of each depth."""
        start, match = longest_match(text_S)
        own_K = text_S[start + np.arange(self.max_depth) % (len(text_S) - start)].tolist() if match else []
        self._own[row] = own_K, match
        places_M: Ints = _NOWHERE
        if self.texts is not None:
            places_M = self.texts.matches(text_S[-CONTEXT:])[1]
            places_M = places_M[:: 1 + len(places_M) // _MOST_PLACES]
        nodes: list[Node] = []
        numbers, waiting = count(), list[tuple[float, int, int, int, _Path]]()

        def go_on(node: int, joint: float, depth: int, match: int, places_M: Ints) -> None:
            path = _Path(depth, match, places_M, _NOWHERE if self.texts is None else self.texts.ids_T[places_M + depth])
            likely: defaultdict[int, float] = defaultdict(float)
            if match:
                likely[own_K[depth]] = self._kept_BL[row, match - 1] / self._tried_BL[row, match - 1]
            for token, share in [*_shares(path.next_M), *(guesses[depth].items() if depth < len(guesses) else ())]:
                likely[token] = max(likely[token], share)
            for token, share in likely.items():
                if joint * share >= self.min_prob:
                    heapq.heappush(waiting, (-joint * share, next(numbers), node, token, path))

        go_on(0, 1.0, 0, match, places_M)
        while waiting and len(nodes) < self.max_nodes:
            joint, _, parent, token, path = heapq.heappop(waiting)
            nodes.append(Node(-joint, parent, token))
            follows = path.match > 0 and token == own_K[path.depth]
            if path.depth + 1 < self.max_depth:
                on_M = path.places_M[path.next_M == token]
                go_on(len(nodes), -joint, path.depth + 1, path.match + 1 if follows else 0, on_M)
        return nodes

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if self.heads is not None:
            self._guess(context.ahead)
        for row, (own_K, match) in enumerate(self._own):
            (tokens, parents), path, node = context.proposed[row], context.paths[row], 0
            for length, token in enumerate(own_K, match):
                pairs = enumerate(zip(tokens, parents, strict=True))
                node = next((child for child, pair in pairs if pair == (token, node)), 0)
                if not node:
                    break
                self._tried_BL[row, length - 1] += 1
                if node not in path:
                    break
                self._kept_BL[row, length - 1] += 1

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [] if self.heads is None else [(self.heads, 1)]


def proposal_of(rows: Sequence[tuple[list[int], list[int]]], root_B1: Tensor, levels: int) -> Proposal:
    """Trees of parents and tokens of each row's nodes, the root not counted, parents before their children."""
    device, most = root_B1.device, max(len(tokens) for _, tokens in rows)
    parents_BN = np.full((len(rows), 1 + most), -1)
    tokens_BN = np.zeros((len(rows), most), dtype=np.int64)
    for row, (parents, tokens) in enumerate(rows):
        parents_BN[row, 1 : 1 + len(tokens)], tokens_BN[row, : len(tokens)] = parents, tokens
    all_BN = torch.cat((root_B1, sent(torch.from_numpy(tokens_BN), device)), 1)
    if len(rows) == 1 and (parents_BN[0] == np.arange(-1, most)).all():
        return Proposal(Tree.chain(most).to(device), all_BN, levels=levels)
    depth_BN = np.zeros_like(parents_BN)
    for node in range(1, 1 + most):
        above_B = parents_BN[:, node]
        depth_BN[:, node] = np.where(above_B < 0, 0, 1 + depth_BN[np.arange(len(rows)), above_B])
    sides = [sent(torch.from_numpy(side), device) for side in (parents_BN, depth_BN)]
    return Proposal(Tree.from_parents(sides[0], int(depth_BN.max()), sides[1]), all_BN, levels=levels)


def longest_match(text_S: Ints) -> tuple[int, int]:
    """Where a text goes on after the latest of the longest earlier occurrences of its end, and how many tokens of it
    these are, at most 16; (0, 0): its last token is new."""
    ends_M, length = np.flatnonzero(text_S[:-1] == text_S[-1]), 0
    start = 0
    while len(ends_M) and length < _LONGEST:
        start, length = int(ends_M[-1]) + 1, length + 1
        ends_M = ends_M[ends_M >= length]
        ends_M = ends_M[text_S[ends_M - length] == text_S[-1 - length]] if length < len(text_S) else ends_M[:0]
    return start, length


def _shares(next_M: Ints) -> Iterator[tuple[int, float]]:
    """The commonest tokens, each with its share; one observation more than there are keeps what was seen once from
    being sure."""
    if not len(next_M):
        return
    found, counts = np.unique(next_M, return_counts=True)
    for index in np.argsort(-counts, kind="stable")[:_WIDTH].tolist():
        if found[index] >= 0:
            yield int(found[index]), int(counts[index]) / (len(next_M) + 1)

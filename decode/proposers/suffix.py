"""Suffix decoding: draft trees from earlier matches in the text and in a datastore, and from prediction heads.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), which proposes the most frequent continuations of the
longest matching context. This implementation stores texts in a suffix array instead of trees. If several sources
propose a token, its largest probability is used. Proposals are a deterministic function of the committed tokens, so
`SampleAndMatch` is exact.

Shape letters: B batch, N tree nodes, K depth or heads, C candidates of a head, S slots, M matches, L match lengths.
"""

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
from ..models.kv_cache import to_device, to_host
from ..tree import Tree
from .head_trees import HeadModule, check_heads

Ints = NDArray[np.integer[Any]]
_MAX_MATCH = 16
"""Maximum length of a match in the row's own text, in tokens."""
_MAX_POSITIONS = 2048
"""Maximum number of matches in the datastore that are examined."""
_MAX_CHILDREN = 4
"""Maximum number of distinct continuations of a path that are taken from the datastore."""
_PRIOR_WEIGHT = 4.0
"""Weight of the prior acceptance rate of a match, as a number of observations."""
_NO_POSITIONS = np.zeros(0, dtype=np.int32)


class Node(NamedTuple):
    """Draft token of a tree."""

    joint: float
    """Joint probability of the path to the node."""
    parent: int
    """Number of the parent node. 0 is the root, and the nodes of a row are numbered from 1."""
    token: int


class _Path(NamedTuple):
    """Path from the root, and the earlier matches that are followed by the tokens of this path."""

    depth: int
    match: int
    """Length of the match in the row's own text that this path continues, or 0."""
    positions_M: Ints
    """Positions of the path's matches in the datastore."""
    next_M: Ints
    """Token that follows each match in the datastore."""


class SuffixTree(Proposer):
    """Proposer of a tree of the most likely continuations of each row, grown in best-first order.

    The probability of a token is the maximum of three values: the observed acceptance rate after matches of the same
    length in the row's own text; the relative frequency of the token after the longest match in the datastore; and its
    probability under a head.

    Args:
        max_nodes: Maximum number of nodes, without the root.
        max_depth: Maximum depth.
        min_prob: Minimum joint probability of a node.
        texts: Datastore of earlier texts.
        heads: Prediction heads that also propose tokens, `num_candidates` each.

    Raises:
        ValueError: `min_prob` is not in (0, 1) or, at the start of decoding, the heads do not fit the target.
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
        # Longer matches are more reliable: the prior is 0.2 after one token, 0.5 after two and 0.8 after eight.
        prior_L = 1 - 0.8 / np.arange(1, 1 + _MAX_MATCH + self.max_depth) ** 0.7
        self._accepted_BL = _PRIOR_WEIGHT * np.tile(prior_L, (len(context.lengths), 1))
        self._examined_BL = np.full_like(self._accepted_BL, _PRIOR_WEIGHT)
        self._matches = [(list[int](), 0) for _ in context.lengths]
        """Continuation of the longest match in each row's own text, and the length of this match."""
        self._watched_BK: Tensor | None = None
        self._guesses = [list[dict[int, float]]() for _ in context.lengths]
        if self.heads is not None:
            check_heads(self.heads, context)
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
        """Return the heads' most likely tokens and their probabilities, [B, K, C] each."""
        assert self.heads is not None
        probs_BKV = self.heads(hidden_BD)[:, : self.max_depth].softmax(-1, dtype=torch.float32)
        top = probs_BKV.topk(min(self.num_candidates, probs_BKV.shape[-1]), -1)
        self._watched_BK = top.values[..., 0]
        return top.indices, top.values

    def _guess(self, candidates: list[Any]) -> None:
        """Store the result of `_candidates` as one mapping from token to probability per row and depth."""
        pairs = zip(*candidates, strict=True)
        self._guesses = [[dict(zip(*level, strict=True)) for level in zip(*row, strict=True)] for row in pairs]

    def prefetch(self, context: Context, verdict: Verdict, hidden_BND: Tensor) -> tuple[Tensor, ...]:
        if self.heads is None:
            return ()
        return self._candidates(hidden_after(verdict, hidden_BND, context.target.hidden_size))

    def grow(self, row: int, text_S: Ints, guesses: Sequence[dict[int, float]] = ()) -> list[Node]:
        """Grow a row's tree. Return its nodes by descending probability. `guesses` are tokens proposed by the heads."""
        start, match = longest_match(text_S)
        next_K = text_S[start + np.arange(self.max_depth) % (len(text_S) - start)].tolist() if match else []
        self._matches[row] = next_K, match
        matches_M: Ints = _NO_POSITIONS
        if self.texts is not None:
            matches_M = self.texts.matches(text_S[-CONTEXT:])[1]
            matches_M = matches_M[:: 1 + len(matches_M) // _MAX_POSITIONS]
        nodes: list[Node] = []
        numbers, waiting = count(), list[tuple[float, int, int, int, _Path]]()

        def expand(node: int, joint: float, depth: int, match: int, positions_M: Ints) -> None:
            next_M = _NO_POSITIONS if self.texts is None else self.texts.ids_T[positions_M + depth]
            path = _Path(depth, match, positions_M, next_M)
            likely: defaultdict[int, float] = defaultdict(float)
            if match:
                likely[next_K[depth]] = self._accepted_BL[row, match - 1] / self._examined_BL[row, match - 1]
            for token, share in [*_shares(path.next_M), *(guesses[depth].items() if depth < len(guesses) else ())]:
                likely[token] = max(likely[token], share)
            for token, share in likely.items():
                if joint * share >= self.min_prob:
                    heapq.heappush(waiting, (-joint * share, next(numbers), node, token, path))

        expand(0, 1.0, 0, match, matches_M)
        while waiting and len(nodes) < self.max_nodes:
            joint, _, parent, token, path = heapq.heappop(waiting)
            nodes.append(Node(-joint, parent, token))
            follows = path.match > 0 and token == next_K[path.depth]
            if path.depth + 1 < self.max_depth:
                next_positions_M = path.positions_M[path.next_M == token]
                expand(len(nodes), -joint, path.depth + 1, path.match + 1 if follows else 0, next_positions_M)
        return nodes

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        if self.heads is not None:
            self._guess(context.prefetched)
        for row, (next_K, match) in enumerate(self._matches):
            (tokens, parents), path, node = context.proposed[row], context.paths[row], 0
            for length, token in enumerate(next_K, match):
                pairs = enumerate(zip(tokens, parents, strict=True))
                node = next((child for child, pair in pairs if pair == (token, node)), 0)
                if not node:
                    break
                self._examined_BL[row, length - 1] += 1
                if node not in path:
                    break
                self._accepted_BL[row, length - 1] += 1

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [] if self.heads is None else [(self.heads, 1)]


def proposal_of(rows: Sequence[tuple[list[int], list[int]]], root_B1: Tensor, levels: int) -> Proposal:
    """Create a proposal with `levels` levels from each row's nodes (parents and tokens), parents before children."""
    device, most = root_B1.device, max(len(tokens) for _, tokens in rows)
    parents_BN = np.full((len(rows), 1 + most), -1)
    tokens_BN = np.zeros((len(rows), most), dtype=np.int64)
    for row, (parents, tokens) in enumerate(rows):
        parents_BN[row, 1 : 1 + len(tokens)], tokens_BN[row, : len(tokens)] = parents, tokens
    all_BN = torch.cat((root_B1, to_device(torch.from_numpy(tokens_BN), device)), 1)
    if len(rows) == 1 and (parents_BN[0] == np.arange(-1, most)).all():
        return Proposal(Tree.chain(most).to(device), all_BN, levels=levels)
    depth_BN = np.zeros_like(parents_BN)
    for node in range(1, 1 + most):
        parent_B = parents_BN[:, node]
        depth_BN[:, node] = np.where(parent_B < 0, 0, 1 + depth_BN[np.arange(len(rows)), parent_B])
    arrays = [to_device(torch.from_numpy(array), device) for array in (parents_BN, depth_BN)]
    return Proposal(Tree.from_parents(arrays[0], int(depth_BN.max()), arrays[1]), all_BN, levels=levels)


def longest_match(text_S: Ints) -> tuple[int, int]:
    """Find the longest earlier match of a text's last tokens. Return the position after it, and its length.

    Matches have at most 16 tokens, and the latest match is used. The result is (0, 0) if the last token is new.
    """
    ends_M, length = np.flatnonzero(text_S[:-1] == text_S[-1]), 0
    start = 0
    while len(ends_M) and length < _MAX_MATCH:
        start, length = int(ends_M[-1]) + 1, length + 1
        ends_M = ends_M[ends_M >= length]
        ends_M = ends_M[text_S[ends_M - length] == text_S[-1 - length]] if length < len(text_S) else ends_M[:0]
    return start, length


def _shares(next_M: Ints) -> Iterator[tuple[int, float]]:
    """Yield the most frequent next tokens and their relative frequencies, with 1 added to the total count."""
    if not len(next_M):
        return
    tokens, counts = np.unique(next_M, return_counts=True)
    for index in np.argsort(-counts, kind="stable")[:_MAX_CHILDREN].tolist():
        if tokens[index] >= 0:
            yield int(tokens[index]), int(counts[index]) / (len(next_M) + 1)

"""Expected steps of recorded texts, from what a step accepts at every position (see `replay.py`).

Shape letters: B texts or rows, T positions (padded to the longest text, or of all texts in a row), K depth, J tokens
per step, H heads, C candidates, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...tree import Tree
from .recording import Recording

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_PRUNED_ROWS = 256  # positions whose trees are searched at a time


@dataclass(frozen=True)
class Prediction:
    """Predicted steps of decoding the recorded texts."""

    tokens_per_step: float
    standard_error: float
    """Standard error of `tokens_per_step` over texts; 0 for one text."""
    steps_by_text: tuple[float, ...]
    """Expected number of steps of each text."""
    nodes_per_step: float
    """Tree nodes that the target scores per step, including the root."""


def replay_chances(recording: Recording, accept_KT: Floats, nodes: float) -> Prediction:
    """Predict steps whose draft token of depth i is accepted with probability `accept_KT[i, t]` at position t."""
    longest, yields = int(recording.lengths.max()), []
    reach_BT = np.ones((len(recording.lengths), longest))
    for level, accept_T in enumerate(accept_KT):
        later_BT = by_text(accept_T, recording.lengths)[:, level:]
        chance_BT = np.pad(later_BT, ((0, 0), (0, longest - later_BT.shape[1])))
        yields.append(reach_BT * (1 - chance_BT))
        reach_BT = reach_BT * chance_BT
    return _summarize(recording, np.stack([*yields, reach_BT], -1), nodes)


def replay_tokens(recording: Recording, accepted_T: Integers, depth: int, nodes: float | Floats) -> Prediction:
    """Predict steps that accept a known number of tokens from every position.

    Args:
        depth: depth of the trees.
        nodes: number of nodes of a step, or of a step from every position [T].
    """
    return _summarize(recording, yields_of(recording, accepted_T, depth), nodes)


def yields_of(recording: Recording, accepted_T: Integers, depth: int) -> Floats:
    """Return the one-hot distributions [B, T, J] of a step's number of tokens, less one."""
    return (by_text(accepted_T, recording.lengths)[..., None] == np.arange(depth + 1)).astype(np.float64)


def visits(lengths_B: Integers, yield_BTJ: Floats) -> Floats:
    """Return the probability [B, T] that a step begins at a position.

    Args:
        yield_BTJ: probability that a step from a position yields j + 1 tokens.
    """
    rows, longest, most = yield_BTJ.shape
    begin_BT = np.zeros((rows, longest + most))
    begin_BT[:, 0] = lengths_B > 0
    for index in range(longest):
        begin_BT[:, index + 1 : index + 1 + most] += begin_BT[:, index, None] * yield_BTJ[:, index]
    return begin_BT[:, :longest] * (np.arange(longest) < lengths_B[:, None])


def _summarize(recording: Recording, yield_BTJ: Floats, nodes: float | Floats) -> Prediction:
    lengths_B = recording.lengths
    begin_BT = visits(lengths_B, yield_BTJ)
    steps_B = begin_BT.sum(1)
    steps = float(steps_B.sum())
    if isinstance(nodes, np.ndarray):
        nodes = float((begin_BT * by_text(nodes, lengths_B)).sum()) / steps
    rate = float(lengths_B.sum()) / steps
    return Prediction(rate, ratio_error(lengths_B, steps_B), tuple(steps_B.tolist()), nodes)


def ratio_error(tokens_B: Integers, steps_B: NDArray[Any]) -> float:
    """Return the standard error of Σ tokens / Σ steps over texts, by the delta method."""
    rows = len(tokens_B)
    if rows < 2:
        return 0.0
    spread_B = tokens_B - tokens_B.sum() / steps_B.sum() * steps_B
    return float(np.sqrt(rows / (rows - 1) * (spread_B**2).sum()) / steps_B.sum())


def by_text(values_T: NDArray[Any], lengths_B: Integers) -> NDArray[Any]:
    """Return the values of each text [B, T], padded with zeros."""
    padded_BT = np.zeros((len(lengths_B), int(lengths_B.max())), dtype=values_T.dtype)
    padded_BT[np.arange(padded_BT.shape[1]) < lengths_B[:, None]] = values_T
    return padded_BT


def head_ranks(recording: Recording) -> Integers:
    """Return the rank [T, H] of each following token in its head; C if it is no candidate, or the text ends."""
    assert recording.heads is not None
    token_THC = recording.heads.token_THC
    match_THC = token_THC == _following(recording, token_THC.shape[1])[..., None]
    return np.where(match_THC.any(2), match_THC.argmax(2), token_THC.shape[2])


def _following(recording: Recording, depth: int) -> Integers:
    """Return the tokens [T, K] from each position on; -1 beyond the end of the text."""
    rows = []
    for text in recording.texts:
        padded = np.array([*text, *[-1] * depth], dtype=np.int64)
        rows += [padded[index : index + depth] for index in range(len(text))]
    return np.stack(rows)


def replay_head_tree(recording: Recording, proposer: HeadTree) -> Prediction:
    """Predict steps with a fixed tree of heads."""
    assert recording.heads is not None
    width, known = 1 + int(proposer.ranks_N.max()), recording.heads.token_THC.shape[2]
    if width > known:
        raise ValueError(f"the tree needs {width} candidates per head, but {known} were recorded")
    walked_T = walk_tree(recording, proposer.tree, proposer.ranks_N)
    return replay_tokens(recording, walked_T, proposer.tree.max_depth, proposer.tree.nodes)


def walk_tree(recording: Recording, tree: Tree, ranks_N: Tensor) -> Integers:
    """Return the number of tokens [T] that a tree of recorded candidates accepts from every position."""
    assert recording.heads is not None
    head_N = (tree.depth_BN[0] - 1).clamp(min=0)
    tokens_TN = torch.from_numpy(recording.heads.token_THC[:, head_N.numpy(), ranks_N.numpy()])
    return _walk(tree.parents_BN, tokens_TN, torch.from_numpy(_following(recording, tree.max_depth)))


def replay_pruned_tree(recording: Recording, proposer: PrunedHeadTree) -> Prediction:
    """Predict steps of SLiM with its own search over the recorded candidates."""
    heads = recording.heads
    assert heads is not None
    width = heads.token_THC.shape[2]
    if proposer.num_candidates > width:
        raise ValueError(f"the search needs {proposer.num_candidates} candidates per head, but {width} were recorded")
    follows_TK = torch.from_numpy(_following(recording, proposer.max_depth))
    walked, nodes = [], []
    for first in range(0, len(follows_TK), _PRUNED_ROWS):
        rows = slice(first, first + _PRUNED_ROWS)
        kept = rows, slice(proposer.max_depth), slice(proposer.num_candidates)
        candidates_BKC = torch.from_numpy(heads.token_THC[kept]).long()
        root_B1 = torch.from_numpy(heads.root_T[rows]).long()[:, None]
        parents_BN, _, place_BN = proposer.search(root_B1, candidates_BKC, torch.from_numpy(heads.log_prob_THC[kept]))
        walked.append(_walk(parents_BN, candidates_BKC.flatten(1).gather(1, place_BN), follows_TK[rows]))
        nodes.append(1 + (parents_BN >= 0).sum(1).numpy())
    nodes_T = np.concatenate(nodes).astype(np.float64)
    return replay_tokens(recording, np.concatenate(walked), proposer.max_depth, nodes_T)


def _walk(parents_BN: Tensor, tokens_BN: Tensor, follows_BK: Tensor) -> Integers:
    """Return the number of tokens that each row's tree accepts."""
    node_B1 = torch.zeros(len(tokens_BN), 1, dtype=torch.int64)
    accepted_B, alive_B = torch.zeros(len(tokens_BN), dtype=torch.int64), torch.ones(len(tokens_BN), dtype=torch.bool)
    for level in range(follows_BK.shape[1]):
        matches_BN = (parents_BN == node_B1) & (tokens_BN == follows_BK[:, level, None])
        alive_B = alive_B & matches_BN.any(1)
        accepted_B += alive_B
        node_B1 = torch.where(alive_B[:, None], matches_BN.int().argmax(1, keepdim=True), node_B1)
    return np.asarray(accepted_B.numpy())

"""Trees that prediction heads fill, replayed: what they accept of a recorded text is known without any chance.

Shape letters: B texts or rows, T positions (all texts' one after another), K depth, H heads, C candidates, N nodes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...tree import Tree
from .recording import Recording
from .steps import Prediction, replay_tokens

_PRUNED_ROWS = 256  # positions whose trees are searched at a time


def head_ranks(recording: Recording) -> NDArray[np.int64]:
    """[T, H] the place of each following token among the head's candidates; C where it is not one, or the text ends."""
    assert recording.heads is not None
    token_THC = recording.heads.token_THC
    follows_TH = _following(recording, token_THC.shape[1])
    match_THC = token_THC == follows_TH[..., None]
    return np.where(match_THC.any(2), match_THC.argmax(2), token_THC.shape[2])


def _following(recording: Recording, depth: int) -> NDArray[np.int64]:
    """[T, H] the tokens from each position on; -1 beyond the end of the text."""
    rows = []
    for text in recording.texts:
        padded = np.array([*text, *[-1] * depth], dtype=np.int64)
        rows += [padded[index : index + depth] for index in range(len(text))]
    return np.stack(rows)


def head_tree(recording: Recording, proposer: HeadTree) -> Prediction:
    assert recording.heads is not None
    width, known = 1 + int(proposer.ranks_N.max()), recording.heads.token_THC.shape[2]
    if width > known:
        raise ValueError(f"the tree asks for {width} candidates of a head: {known} were recorded")
    walked = walk_tree(recording, proposer.tree, proposer.ranks_N)
    return replay_tokens(recording, *walked, proposer.tree.max_depth, proposer.tree.nodes)


def walk_tree(recording: Recording, tree: Tree, ranks_N: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many tokens a tree of the recorded candidates of these ranks accepts from every position, and at how many
    levels it had candidates, [T] each."""
    assert recording.heads is not None
    head_N = (tree.depth_BN[0] - 1).clamp(min=0)
    tokens_TN = torch.from_numpy(recording.heads.token_THC[:, head_N.numpy(), ranks_N.numpy()])
    return _walk(tree.parents_BN, tokens_TN, torch.from_numpy(_following(recording, tree.max_depth)))


def pruned_tree(recording: Recording, proposer: PrunedHeadTree) -> Prediction:
    """SLiM: the real search over the recorded candidates, a few hundred positions at a time."""
    heads = recording.heads
    assert heads is not None
    width = min(proposer.candidates, heads.token_THC.shape[2])
    if proposer.candidates > width:
        raise ValueError(f"{proposer.candidates} candidates of a head: {width} were recorded")
    follows_TK = torch.from_numpy(_following(recording, proposer.depth))
    walked, nodes = [], []
    for first in range(0, len(follows_TK), _PRUNED_ROWS):
        rows = slice(first, first + _PRUNED_ROWS)
        candidates_BKC = torch.from_numpy(heads.token_THC[rows, : proposer.depth, :width]).long()
        log_probs_BKC = torch.from_numpy(heads.log_prob_THC[rows, : proposer.depth, :width])
        root_B1 = torch.from_numpy(heads.root_T[rows]).long()[:, None]
        parents_BN, _, place_BN = proposer.search(root_B1, candidates_BKC, log_probs_BKC)
        tokens_BN = candidates_BKC.flatten(1).gather(1, place_BN)
        walked.append(_walk(parents_BN, tokens_BN, follows_TK[rows]))
        nodes.append(1 + (parents_BN >= 0).sum(1).numpy())
    accepted_T, tried_T = (np.concatenate(column) for column in zip(*walked, strict=True))
    nodes_T = np.concatenate(nodes).astype(np.float64)
    return replay_tokens(recording, accepted_T, tried_T, proposer.depth, nodes_T)


def _walk(parents_BN: Tensor, tokens_BN: Tensor, follows_BK: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many tokens each row's tree accepts, and at how many levels it had candidates."""
    node_B1 = torch.zeros(len(tokens_BN), 1, dtype=torch.int64)
    accepted_B, alive_B = torch.zeros(len(tokens_BN), dtype=torch.int64), torch.ones(len(tokens_BN), dtype=torch.bool)
    for level in range(follows_BK.shape[1]):
        matches_BN = (parents_BN == node_B1) & (tokens_BN == follows_BK[:, level, None])
        alive_B = alive_B & matches_BN.any(1)
        accepted_B += alive_B
        node_B1 = torch.where(alive_B[:, None], matches_BN.int().argmax(1, keepdim=True), node_B1)
    return accepted_B.numpy(), (accepted_B + (parents_BN == node_B1).any(1)).numpy()

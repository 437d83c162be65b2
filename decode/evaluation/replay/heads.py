"""Trees that prediction heads fill, replayed: what they accept of a recorded text is known without any chance.

Shape letters: B texts or rows, T positions (all texts' one after another), K depth, H heads, C candidates, N nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine import Verifier
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from .recording import Recording
from .steps import Prediction, replay_tokens

_PRUNED_ROWS = 256  # positions whose trees are searched at a time


def head_ranks(recording: Recording) -> NDArray[np.int64]:
    """[T, H] the place of each following token among the head's candidates; C where it is not one, or the text ends.
    Raises ValueError: a recording without heads."""
    if recording.heads is None:
        raise ValueError("no prediction heads were recorded")
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


def head_tree(recording: Recording, proposer: HeadTree, verifier: Verifier) -> Prediction:
    assert recording.heads is not None
    paths = _paths(proposer)
    width = 1 + max(max(path) for path in paths)
    known = recording.heads.token_THC.shape[2]
    if width > known:
        raise ValueError(f"the tree asks for {width} candidates of a head: {known} were recorded")
    walked = match_paths(head_ranks(recording), paths)
    return replay_tokens(recording, *walked, proposer.tree.max_depth, proposer.tree.nodes)


def _paths(proposer: HeadTree) -> list[tuple[int, ...]]:
    """The ranks on the way to each of the tree's nodes but the root."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(proposer.tree.parents_BN[0].tolist()[1:], proposer.ranks_N.tolist()[1:], strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def match_paths(
    rank_TH: NDArray[np.int64], paths: Iterable[tuple[int, ...]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many tokens a tree of these paths (prefixes included) accepts from every position, and tries, [T] each."""
    known = sorted(set(paths), key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate([(), *known])}
    most = int(rank_TH.max()) + 2
    next_NC = np.full((len(number), most), -1, dtype=np.int64)
    inner_N = np.zeros(len(number), dtype=np.int64)
    for path in known:
        inner_N[number[path[:-1]]] = 1
        if path[-1] < most:
            next_NC[number[path[:-1]], path[-1]] = number[path]
    node_T, open_T = np.zeros(len(rank_TH), dtype=np.int64), np.ones(len(rank_TH), dtype=bool)
    accepted_T = np.zeros(len(rank_TH), dtype=np.int64)
    for level in range(min(rank_TH.shape[1], len(known[-1]) if known else 0)):
        child_T = np.where(open_T, next_NC[node_T, rank_TH[:, level]], -1)
        open_T = child_T >= 0
        node_T = np.where(open_T, child_T, node_T)
        accepted_T += open_T
    return accepted_T, accepted_T + inner_N[node_T]


def pruned_tree(recording: Recording, proposer: PrunedHeadTree, verifier: Verifier) -> Prediction:
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


def _walk(
    parents_BN: torch.Tensor, tokens_BN: torch.Tensor, follows_BK: torch.Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many tokens each row's tree accepts, and at how many levels it had candidates."""
    node_B1 = torch.zeros(len(tokens_BN), 1, dtype=torch.int64)
    accepted_B, alive_B = torch.zeros(len(tokens_BN), dtype=torch.int64), torch.ones(len(tokens_BN), dtype=torch.bool)
    for level in range(follows_BK.shape[1]):
        matches_BN = (parents_BN == node_B1) & (tokens_BN == follows_BK[:, level, None])
        alive_B = alive_B & matches_BN.any(1)
        accepted_B += alive_B
        node_B1 = torch.where(alive_B[:, None], matches_BN.int().argmax(1, keepdim=True), node_B1)
    return accepted_B.numpy(), (accepted_B + (parents_BN == node_B1).any(1)).numpy()

"""Search for the most likely paths through a lattice of candidates, without enumerating all paths.

Shape letters: B batch, K depth, C candidates per level, R stored paths per candidate, W best paths, N nodes, T the root
and all stored paths, X flattened.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Level:
    """Views of the buffers that are read and written by one level of the search."""

    scores_B1CR: Tensor
    """Scores of the paths of the previous level, grouped by their last candidate."""
    longer_BCCR: Tensor
    """Scores of these paths after extension by each candidate, [B, C to, C from, R]."""
    best: tuple[Tensor, Tensor] | None
    """Output buffers for the scores and indices of the best paths, [B, C, W] each. None if all paths are kept."""
    offset: int
    """Index of the first path of the previous level."""


class Lattice:
    """Search for the `num_paths` best paths of lengths 1 to K, which are merged into a tree by their prefixes.

    The score of a path is the sum of the scores of its edges (SLiM, Lin et al. 2024, eq. 3, in logarithms). Each level
    keeps the best `num_paths` paths that end in each candidate. Every prefix of a best path is among them, so the
    result is exact. Memory grows with K · C² · num_paths. Paths with a score of minus infinity are excluded.

    Paths are numbered level by level after the root, which is 0. All levels write their scores and parents into two
    shared buffers, because copies would take as long as these small operations. A lattice is not thread-safe.

    Args:
        full: Search only among paths of length K.
        floor: Minimum score of a path (exclusive).
    """

    def __init__(
        self,
        rows: int,
        levels: int,
        width: int,
        num_paths: int,
        device: torch.device | str,
        full: bool = False,
        floor: float = -math.inf,
    ) -> None:
        self.sizes = (rows, levels, width)
        """Sizes B, K and C."""
        self._num_paths, self._floor = num_paths, floor
        counts, offsets, is_pruned = [width], [1], [False]
        for level in range(1, levels):
            # Paths of the last level are not extended, so all of them compete with those of other lengths.
            is_pruned.append(counts[-1] > num_paths and level + 1 < levels)
            offsets.append(offsets[-1] + counts[-1])
            counts.append(width * (num_paths if is_pruned[-1] else counts[-1]))
        total = offsets[-1] + counts[-1]
        scores_BT = torch.full((rows, total), -torch.inf, device=device)
        self._parents_BT = torch.zeros(rows, total, dtype=torch.int64, device=device)
        self._candidate_T, self._depth_T = torch.zeros(2, total, dtype=torch.int64, device=device)
        self._first_BC = scores_BT[:, 1 : 1 + width]
        self._levels: list[_Level] = []
        previous_B1CR = self._first_BC[:, None, :, None]
        for level, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            part = slice(offset, offset + count)
            index_X = torch.arange(count, device=device)
            self._candidate_T[part] = level * width + index_X // (count // width)
            self._depth_T[part] = level + 1
            scores_BCX = scores_BT[:, part].unflatten(1, (width, -1))
            parents_BX = self._parents_BT[:, part]
            if level and is_pruned[level]:
                longer_BCCR = torch.empty(rows, width, width, counts[level - 1] // width, device=device)
                best = (scores_BCX, parents_BX.unflatten(1, (width, -1)))
                self._levels.append(_Level(previous_B1CR, longer_BCCR, best, offsets[level - 1]))
            elif level:
                parents_BX.copy_(index_X % counts[level - 1] + offsets[level - 1])
                longer_BCCR = scores_BCX.unflatten(2, (width, -1))
                self._levels.append(_Level(previous_B1CR, longer_BCCR, None, offsets[level - 1]))
            previous_B1CR = scores_BCX[:, None]
        self._first = offsets[-1] if full else 0
        self._competing_BX = scores_BT[:, self._first :]
        self._num_kept = min(num_paths, total - max(1, self._first))
        self._number_BT = torch.zeros_like(self._parents_BT)
        used_BX = torch.zeros(rows, 1 + levels * self._num_kept, dtype=torch.int64, device=device)
        self._used_BX, self._line = used_BX, list(used_BX[:, 1:].split(self._num_kept, 1))

    def best_paths(self, first_BC: Tensor, edges_BKCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the best paths, and return them as a tree.

        Args:
            first_BC: Scores of the edges from the root to the candidates of the first level.
            edges_BKCC: Scores of the edges between levels, [B, K - 1, C, C]. Row t, column f is the edge to candidate t
                from candidate f of the previous level.

        Returns:
            `parents_BN`, which is -1 at the root; `depth_BN`; and `place_BN`, the candidate of each node as level · C +
            candidate (0 at the root). Parents precede children. N is the size of the largest tree of the batch or, on a
            GPU, the largest possible size. Smaller trees are padded with parent -1 and depth 0.
        """
        self._first_BC.copy_(first_BC)
        for edges_BCC1, level in zip(edges_BKCC[..., None].unbind(1), self._levels, strict=True):
            # Extend every kept path to every candidate.
            longer_BCCR = torch.add(level.scores_B1CR, edges_BCC1, out=level.longer_BCCR)
            if level.best is not None:
                torch.topk(longer_BCCR.flatten(2), self._num_paths, 2, sorted=False, out=level.best)
                level.best[1].add_(level.offset)
        top = self._competing_BX.topk(self._num_kept, 1, sorted=False)
        path_BW = top.indices + self._first if self._first else top.indices
        self._line[0].copy_(path_BW.masked_fill_(top.values <= self._floor, 0))
        return self._merge()

    def _merge(self) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the best paths and their prefixes into a tree. Return its parents, depths and candidates."""
        parents_BT, used_BX = self._parents_BT, self._used_BX
        for longer_BW, shorter_BW in zip(self._line, self._line[1:], strict=False):
            torch.gather(parents_BT, 1, longer_BW, out=shorter_BW)
        on_cpu = used_BX.device.type == "cpu"  # the number of nodes is not read from a GPU
        if len(used_BX) == 1 and on_cpu:
            node_N = used_BX.unique()
            parent_N = parents_BT[0].take(node_N)
            parents_1N = torch.searchsorted(node_N, parent_N)[None]
            parents_1N[0, 0] = -1
            return parents_1N, self._depth_T.take(node_N)[None], self._candidate_T.take(node_N)[None]
        number_BT = torch.cumsum(self._number_BT.zero_().scatter_(1, used_BX, 1), 1)
        nodes = int(number_BT[:, -1].max()) if on_cpu else used_BX.shape[1]
        # Numbers start at 1. Column 0 collects unused entries and is dropped.
        node_BN = used_BX.new_zeros(len(used_BX), nodes + 1).scatter_(1, number_BT.gather(1, used_BX), used_BX)[:, 1:]
        parents_BN = number_BT.gather(1, parents_BT.gather(1, node_BN)).sub_(1)
        return parents_BN.masked_fill_(node_BN == 0, -1), self._depth_T.take(node_BN), self._candidate_T.take(node_BN)

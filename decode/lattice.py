"""The most likely paths through a lattice of candidates, found without enumerating them.

Shape letters: B batch, K depth, C candidates a level, R paths kept a candidate, W paths wanted, N nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_paths(
    log_probs_BKC: Tensor, first_BC: Tensor, links_BKCC: Tensor | None, wanted: int, full: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The `wanted` paths of highest score among those of all lengths 1..K, merged into a tree by their prefixes.

    The score of a path is the sum of its candidates' log-probabilities and of the links between neighbours
    (`slim.txt`, eq. 3, in logarithms). At each level the best `wanted` paths into each candidate are kept: a better
    path's prefix is among the best into its own candidate, so the result is exact. Memory grows with K x C x wanted,
    not with C to the power of K. A score of minus infinity is never wanted.

    Args:
        log_probs_BKC: log-probabilities of the candidates.
        first_BC: links from the root to the first level's candidates.
        links_BKCC: [B, K - 1, C, C] links from level k's candidates (rows) to those of level k + 1; None: all 0.
        full: only paths of length K compete.

    Returns:
        `parents_BN`, `depth_BN` and `place_BN` (which candidate of its level) of the tree's nodes, the root first and
        parents before children. N is the largest tree of the batch; smaller ones are padded with parent -1.
    """
    batch, depth = log_probs_BKC.shape[:2]
    scores_BCR = (first_BC + log_probs_BKC[:, 0])[..., None]
    levels, backs = [scores_BCR], [torch.zeros_like(scores_BCR, dtype=torch.int64)]
    for level in range(1, depth):
        # [B, C from, R, C to]: every kept path, extended by every candidate.
        extended = levels[-1][..., None] + log_probs_BKC[:, level, None, None]
        if links_BKCC is not None:
            extended = extended + links_BKCC[:, level - 1, :, None]
        flat_BXC = extended.flatten(1, 2)
        top = flat_BXC.topk(min(wanted, flat_BXC.shape[1]), dim=1)
        levels.append(top.values.transpose(1, 2))
        backs.append(top.indices.transpose(1, 2))

    sizes = [level.shape[1] * level.shape[2] for level in levels]
    if full:
        levels[:-1] = [torch.full_like(level, -torch.inf) for level in levels[:-1]]
    all_BX = torch.cat([level.flatten(1) for level in levels], 1)
    top = all_BX.topk(min(wanted, all_BX.shape[1]), 1)
    used_BX = torch.zeros_like(all_BX, dtype=torch.bool).scatter_(1, top.indices, top.values > -torch.inf)
    used = list(used_BX.split(sizes, 1))
    parents = [back.flatten(1) for back in backs]
    for level in range(depth - 1, 0, -1):
        # A used path's prefix is used too, whether it was wanted for itself or not.
        # Unused paths point at a column of their own behind the level, which is cut off again.
        target = torch.where(used[level], parents[level], sizes[level - 1])
        marked = torch.nn.functional.pad(used[level - 1], (0, 1)).scatter_(1, target, True)
        used[level - 1] = marked[:, :-1]
    return _compact(used, parents, [level.shape[2] for level in levels], batch)


def _compact(used: list[Tensor], parents: list[Tensor], kept: list[int], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number the used paths from 1, level by level, and lay them out as nodes."""
    used_BX = torch.cat(used, 1)
    number_BX = used_BX.long().cumsum(1)
    nodes = 1 + int(number_BX[:, -1].max())
    device = used_BX.device
    parents_BN = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=device)
    depth_BN, place_BN = torch.zeros_like(parents_BN), torch.zeros_like(parents_BN)
    column_BX = torch.where(used_BX, number_BX, nodes)  # unused paths fall on a last column that is cut off
    above, depths, places, before = [torch.zeros_like(parents[0])], [], [], 0
    for level, level_used in enumerate(used):
        size = level_used.shape[1]
        if level:
            above.append(number_BX.gather(1, before + parents[level]))
            before += used[level - 1].shape[1]
        depths.append(torch.full((size,), level + 1, device=device))
        places.append(torch.arange(size, device=device) // kept[level])
    parents_BN.scatter_(1, column_BX, torch.cat(above, 1))
    depth_BN.scatter_(1, column_BX, torch.cat(depths).expand(batch, -1))
    place_BN.scatter_(1, column_BX, torch.cat(places).expand(batch, -1))
    return parents_BN[:, :nodes], depth_BN[:, :nodes], place_BN[:, :nodes]

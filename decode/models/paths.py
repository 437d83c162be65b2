"""Scoring a tree without tree attention: every path as a row of a batch, with its own copy of the cache.

Tree attention is compared with it (multi-candidate paper, section 3.3 and table 4), and leaves the same cache behind.

Shape letters: B batch, N tree nodes, L leaves, P nodes of a path, S cache slots, D hidden, H heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import Tree
from .base import LanguageModel
from .kv_cache import KVCache


def extend_by_path(model: LanguageModel, cache: KVCache, tokens_BN: Tensor, tree: Tree) -> Tensor:
    """Run all nodes of a tree whose leaves lie equally deep, [B, N, D]; `LanguageModel.extend` does the same by tree
    attention. Keys and values stand behind the committed ones, node by node."""
    if tree.is_chain:
        return model.extend(cache, tokens_BN, tree)
    assert len(tree.parents_BN) == 1, "one topology for all rows"
    path_LP, leaf_N = tree.leaf_paths
    leaves, rows = len(path_LP), len(tokens_BN)
    by_leaf = model.new_cache(rows * leaves, cache.capacity)
    end = max(cache.lengths)
    for layer in range(model.layers):
        for copies, originals in ((by_leaf.keys, cache.keys), (by_leaf.values, cache.values)):
            copies[layer][:, :, :end] = originals[layer][:, :, :end].repeat_interleave(leaves, 0)
    by_leaf.set_lengths([length for length in cache.lengths for _ in range(leaves)])
    tokens_XP = tokens_BN[:, path_LP].flatten(0, 1)
    hidden_BLPD = model.extend(by_leaf, tokens_XP).unflatten(0, (rows, leaves))
    depth_N = tree.depth_BN[0]
    # Each node's keys and values, as the path of the first leaf below it has them.
    row_BN = torch.arange(rows, device=leaf_N.device)[:, None] * leaves + leaf_N
    source_BN = by_leaf.lengths_B[row_BN] + depth_N
    target_BN = cache.lengths_B[:, None] + torch.arange(tree.nodes, device=leaf_N.device)
    rows_B1 = torch.arange(rows, device=leaf_N.device)[:, None]
    for layer in range(model.layers):
        cache.keys[layer][rows_B1, :, target_BN] = by_leaf.keys[layer][row_BN, :, source_BN]
        cache.values[layer][rows_B1, :, target_BN] = by_leaf.values[layer][row_BN, :, source_BN]
    return hidden_BLPD[:, leaf_N, depth_N]

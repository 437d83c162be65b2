"""Token trees, which the target scores in one forward. Chains and single roots are special cases.

Shape letters: B batch (1 if all rows share the topology), N tree nodes (node 0 is the root: the last committed token,
whose key and value are not cached yet), P nodes of a path to the root, C children of a node, K depth.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """Topology of one tree, or of one tree per row. Parents precede their children."""

    parents_BN: Tensor
    """Parent of each node, int64. It is -1 for the root and for padding nodes, which no path reaches."""
    depth_BN: Tensor
    """Depth of each node, int64. It is 0 for the root and for padding nodes."""
    line_BNP: Tensor
    """Path from each node to the root, int64: the node, its parent, and so on, padded with the root."""
    max_depth: int
    is_chain: bool = False
    _copies: dict[torch.device, "Tree"] = field(default_factory=dict, init=False)
    _biases: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    @property
    def nodes(self) -> int:
        return self.parents_BN.shape[1]

    @classmethod
    def from_parents(cls, parents_BN: Tensor, max_depth: int, depth_BN: Tensor | None = None) -> "Tree":
        """Create a tree from the parent of each node. Depths are computed if `depth_BN` is None."""
        parent_BN = parents_BN.clamp(min=0)
        line = [torch.arange(parents_BN.shape[1], device=parents_BN.device).expand_as(parents_BN)]
        for _ in range(max_depth):
            line.append(parent_BN.gather(1, line[-1]))
        line_BNP = torch.stack(line, -1)
        if depth_BN is None:
            depth_BN = torch.where(parents_BN >= 0, (line_BNP > 0).sum(-1), 0)
        return cls(parents_BN, depth_BN, line_BNP, max_depth)

    def grow(self, parents_BM: Tensor) -> "Tree":
        """Return a tree with M additional nodes in a new level. Their parents must be in the deepest level."""
        rows, count = parents_BM.shape
        index_BM1 = torch.arange(self.nodes, self.nodes + count, device=parents_BM.device).expand(rows, -1)[..., None]
        wide_BNP = self.line_BNP.expand(rows, -1, -1)
        lines_BMP = wide_BNP.gather(1, parents_BM[..., None].expand(-1, -1, wide_BNP.shape[2]))
        pad = torch.nn.functional.pad
        return Tree(
            torch.cat((self.parents_BN.expand(rows, -1), parents_BM), 1),
            pad(self.depth_BN.expand(rows, -1), (0, count), value=self.max_depth + 1),
            torch.cat((pad(wide_BNP, (0, 1)), torch.cat((index_BM1, lines_BMP), 2)), 1),
            self.max_depth + 1,
        )

    @classmethod
    @cache
    def chain(cls, gamma: int) -> "Tree":
        """Return a tree that consists of a chain of `gamma` nodes after the root."""
        if gamma < 0:
            raise ValueError(f"the length of a chain must be at least 0, got {gamma}")
        depth_N = torch.arange(gamma + 1)
        line_NP = (depth_N[:, None] - depth_N).clamp(min=0)
        return cls((depth_N - 1)[None], depth_N[None], line_NP[None], gamma, is_chain=True)

    @classmethod
    @cache
    def k_ary(cls, branching: tuple[int, ...]) -> "Tree":
        """Return a tree with `branching[i]` >= 1 children per node at depth i. Nodes are numbered level by level."""
        if any(width < 1 for width in branching):
            text = "x".join(map(str, branching))
            raise ValueError(f"each level of a tree needs at least 1 child per node, got {text}")
        if all(width == 1 for width in branching):
            return cls.chain(len(branching))
        parents, level = [-1], [0]
        for width in branching:
            children = [parent for parent in level for _ in range(width)]
            level = list(range(len(parents), len(parents) + len(children)))
            parents += children
        return cls.from_parents(torch.tensor([parents]), len(branching))

    def to(self, device: torch.device) -> "Tree":
        """Copy this tree to a device, or return the cached copy."""
        if self.parents_BN.device == device:
            return self
        if device not in self._copies:
            tensors = [self.parents_BN, self.depth_BN, self.line_BNP]
            if device.type == "cuda":  # only copies from pinned memory are asynchronous
                tensors = [tensor.pin_memory() for tensor in tensors]
            parents_BN, depth_BN, line_BNP = (tensor.to(device, non_blocking=True) for tensor in tensors)
            self._copies[device] = Tree(parents_BN, depth_BN, line_BNP, self.max_depth, self.is_chain)
        return self._copies[device]

    @cached_property
    def leaf_paths(self) -> tuple[Tensor, Tensor]:
        """Return the path to each leaf of the first row. All leaves must have the same depth.

        Returns:
            Nodes of the path to each leaf, [leaves, K + 1]; and the index of a leaf below each node, [N].
        """
        leaves_L = torch.nonzero(self.depth_BN[0] == self.max_depth)[:, 0]
        on_path_LN = self.ancestors_BNN[0, leaves_L]
        path_LP = torch.nonzero(on_path_LN)[:, 1].view(len(leaves_L), self.max_depth + 1)
        return path_LP, on_path_LN.int().argmax(0)

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """Return a bool mask that is True at [b, i, j] if node j is node i or an ancestor of node i."""
        none_BNN = torch.zeros(*self.parents_BN.shape, self.nodes, dtype=torch.bool, device=self.line_BNP.device)
        return none_BNN.scatter_(2, self.line_BNP, True)

    @cached_property
    def rank_BN(self) -> Tensor:
        """Return the zero-based index of each node among its siblings, int64."""
        siblings_BNN = self.parents_BN[:, :, None] == self.parents_BN[:, None, :]
        return siblings_BNN.tril(-1).sum(-1)

    @cached_property
    def inner_children(self) -> tuple[Tensor, Tensor]:
        """Return the children of each inner node of the first row. Inner nodes must precede all leaves.

        Returns:
            Children [M, C], int64, padded with 0; and a bool mask that is False for padding.
        """
        is_child_NN = self.parents_BN[0] == torch.arange(self.nodes, device=self.parents_BN.device)[:, None]
        count_N = is_child_NN.sum(1)
        exists_MC = torch.arange(int(count_N.max()), device=count_N.device) < count_N[count_N > 0, None]
        children_first_NN = is_child_NN.int().sort(dim=1, descending=True, stable=True).indices
        return children_first_NN[: len(exists_MC), : exists_MC.shape[1]] * exists_MC, exists_MC

    @cached_property
    def children(self) -> list[list[int]]:
        """Return the children of each node of the first row."""
        parents = self.parents_BN[0].tolist()
        return [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]

    @cached_property
    def widths(self) -> list[int]:
        """Return the maximum number of children of the first row's inner nodes at each depth."""
        count_M = self.inner_children[1].sum(1)
        depth_M = self.depth_BN[0, : len(count_M)]
        return [int(count_M[depth_M == depth].max()) for depth in range(self.max_depth)]

    def bias(self, start: int, stop: int) -> Tensor:
        """Return the attention bias of nodes start..stop-1, [B, stop - start, stop]: 0 for visible nodes, else -inf."""
        if (start, stop) not in self._biases:
            line_BMP = self.line_BNP[:, start:stop]
            shape = (*line_BMP.shape[:2], stop)
            hidden_BMN = torch.full(shape, -torch.inf, dtype=torch.float32, device=line_BMP.device)
            self._biases[start, stop] = hidden_BMN.scatter_(2, line_BMP, 0.0)
        return self._biases[start, stop]


def parse_branching(text: str) -> tuple[int, ...]:
    """Parse a k-configuration such as `4x2x2x1` (arXiv 2401.06706, section 4.3).

    Raises:
        ValueError: The text is invalid.
    """
    parts = str(text).lower().split("x")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"k-configuration {text!r} is invalid: use positive integers joined by x, such as 4x2x1")
    return tuple(int(part) for part in parts)


MEDUSA_63 = (
    "0.0.0.0, 0.0.0.1, 0.0.1, 0.0.2, 0.0.3, 0.0.4, 0.0.5, 0.0.6, 0.0.7, 0.0.8, 0.0.9, 0.1.0, 0.1.1, 0.1.2, 0.2.0, "
    "0.2.1, 0.3.0, 0.4.0, 0.5.0, 0.6.0, 0.7.0, 0.8, 0.9, 1.0.0, 1.0.1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 2.0.0, 2.1, "
    "2.2, 3.0, 3.1, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0"
)
"""Paths to the 42 leaves of the tree of 63 nodes that Medusa published for 7B models (arXiv 2401.10774, appendix)."""


def parse_tree(text: str) -> tuple[Tree, Tensor]:
    """Parse a tree of candidate ranks, given as a k-configuration or as a list of paths.

    A list such as `0, 1, 0.0, 0.2` identifies each node by the candidate ranks on its path. In this example, the first
    two candidates of head 1 follow the root, and candidates 0 and 2 of head 2 follow candidate 0. Prefixes that are
    missing in the list are added. `medusa-63` is the tree that Medusa published.

    Returns:
        The tree, and the rank of each node [N] (0 for the root).

    Raises:
        ValueError: The text is invalid.
    """
    text = MEDUSA_63 if text == "medusa-63" else text
    if not set(text) & set(",."):
        tree = Tree.k_ary(parse_branching(text))
        return tree, tree.rank_BN[0]
    paths = set()
    for part in text.split(","):
        steps = part.strip().split(".")
        if not all(step.isdigit() for step in steps):
            raise ValueError(f"tree {text!r} is invalid at {part.strip()!r}: use ranks joined by dots, such as 0.2")
        path = tuple(int(step) for step in steps)
        paths |= {path[:length] for length in range(len(path) + 1)}
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(ordered)}
    parents = torch.tensor([[-1] + [number[path[:-1]] for path in ordered[1:]]])
    depth = len(ordered[-1])
    tree = Tree.chain(depth) if len(ordered) == depth + 1 else Tree.from_parents(parents, depth)
    return tree, torch.tensor([0] + [path[-1] for path in ordered[1:]])

"""Trees of candidates from prediction heads: fixed trees (Medusa), or the most likely sequences (SLiM).

Shape letters: B batch, N tree nodes, C candidates, K depth or heads, V vocabulary, D hidden.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoints.heads.logits import LogitShape
from ...checkpoints.heads.module import PredictionHeads
from ...checkpoints.table.table import BigramTable, check_add_k
from ..engine import Context, Limits, Proposal, Proposer
from ..models.base import check_same_vocabulary
from ..models.products.product import Product
from ..tree import Tree, parse_tree
from .lattice import Lattice


class HeadModule(Protocol):
    """Interface of prediction heads, which map hidden states [..., D] to logits [..., K, V] of later tokens."""

    num_heads: int

    def __call__(self, hidden_XD: Tensor) -> Tensor: ...


class HeadTree(Proposer):
    """Proposer of a fixed tree of candidate ranks (see `tree.parse_tree`), with candidates of head k at depth k.

    Source: Medusa (arXiv 2401.10774). With one candidate per level this is blockwise parallel decoding.

    Raises:
        ValueError: The tree is invalid or has more levels than there are heads, or the heads do not fit the target.
    """

    def __init__(self, heads: HeadModule, shape: str) -> None:
        self.tree, self.ranks_N = parse_tree(shape)
        if self.tree.max_depth > heads.num_heads:
            raise ValueError(f"the tree has {self.tree.max_depth} levels, but there are only {heads.num_heads} heads")
        self.heads = heads

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return self.tree.nodes, self.tree.max_depth

    def start(self, context: Context) -> None:
        check_heads(self.heads, context)
        self.tree = self.tree.to(context.ids_BS.device)
        self._width = 1 + int(self.ranks_N.max())
        if self._width > context.target.vocab_size:
            raise ValueError(
                f"the tree has {self._width} candidates per head, but the vocabulary has "
                f"{context.target.vocab_size} tokens: use a narrower tree"
            )
        candidate_N = (self.tree.depth_BN[0].cpu() - 1) * self._width + self.ranks_N
        self._candidate_N = candidate_N[1:].to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        logits_BKV = self.heads(context.hidden_BD)[:, : self.tree.max_depth]
        most = logits_BKV.topk(self._width, -1)
        context.watch("head {}'s", most.values[..., 0], range(self.tree.max_depth))
        candidates_BX = most.indices.flatten(1)
        return Proposal(self.tree, torch.cat((context.root_B1, candidates_BX[:, self._candidate_N]), 1))

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.heads, 1)]


class PrunedHeadTree(Proposer):
    """Proposer of a tree that contains the candidate sequences with the highest posterior under the heads.

    Source: Lin et al., SLiM, Findings of NAACL 2024, eq. 2 and 3.

    The posterior of a sequence is the product of its tokens' head probabilities and of the correlations r of
    neighbouring tokens, including the root. Without a table, r is 1.

    Args:
        num_candidates: Number of candidates of each head.
        unseen_correlation: Value of r for pairs that are not in the table. Ignored if `add_k` is set. The paper uses 0
            (eq. 5), which excludes these pairs.
        lengths: "full" selects among sequences of all heads, as in eq. 2 and Algorithm 1. "all" also includes their
            prefixes (appendix C, section 4.3), which have a higher posterior unless r exceeds 1.
        add_k: Number added to each count of the table before r is computed.
        min_prob: Minimum posterior of a sequence (exclusive), which keeps the tree small if the heads are not confident
            (as in EAGLE-2, arXiv 2406.16858). 0 disables the limit.

    Raises:
        ValueError: A setting is out of range or, at the start of decoding, heads or table do not fit the target.
    """

    def __init__(
        self,
        heads: HeadModule,
        table: BigramTable | None,
        num_sequences: int,
        num_candidates: Sequence[int],
        unseen_correlation: float,
        max_depth: int,
        lengths: Literal["all", "full"] = "all",
        add_k: float = 0.0,
        min_prob: float = 0.0,
    ) -> None:
        if not 1 <= max_depth <= heads.num_heads:
            raise ValueError(f"max_depth must be between 1 and the number of heads, {heads.num_heads}, got {max_depth}")
        if len(num_candidates) != max_depth or min(num_candidates) < 1:
            raise ValueError(f"num_candidates must contain {max_depth} positive numbers, got {[*num_candidates]}")
        if unseen_correlation < 0:
            raise ValueError(f"unseen_correlation must be at least 0, got {unseen_correlation}")
        if not 0 <= min_prob < 1:
            raise ValueError(f"min_prob must be at least 0 and below 1, got {min_prob}")
        check_add_k(add_k)
        self.heads, self.table, self.full, self.add_k = heads, table, lengths == "full", add_k
        self.num_sequences, self.num_candidates, self.max_depth = num_sequences, num_candidates, max_depth
        self._floor = math.log(min_prob) if min_prob else -math.inf
        self._lattice: Lattice | None = None
        self._log_unseen = torch.tensor(math.log(unseen_correlation) if unseen_correlation else -math.inf)

    def capacity(self, limits: Limits) -> tuple[int, int]:
        return 1 + self.num_sequences * self.max_depth, self.max_depth

    def start(self, context: Context) -> None:
        check_heads(self.heads, context)
        self._lattice = None
        if self.table is not None:
            check_same_vocabulary(context.target, self.table, "table")
            self.table = self.table.to(context.ids_BS.device)
            self._log_unseen = self._log_unseen.to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        probs_BKV = self.heads(context.hidden_BD)[:, : self.max_depth].softmax(-1, dtype=torch.float32)
        top = probs_BKV.topk(min(max(self.num_candidates), probs_BKV.shape[-1]), -1)
        context.watch("head {}'s", top.values[..., 0], range(self.max_depth))
        tree, tokens_BN = self.prune(context.root_B1, top.indices, top.values.log())
        return Proposal(tree, tokens_BN, levels=self.max_depth)

    def prune(self, root_B1: Tensor, candidates_BKC: Tensor, log_probs_BKC: Tensor) -> tuple[Tree, Tensor]:
        """Return the tree of the best sequences and its tokens [B, N]."""
        for head, count in enumerate(self.num_candidates):
            if count < log_probs_BKC.shape[-1]:
                log_probs_BKC[:, head, count:] = -math.inf
        parents_BN, depth_BN, index_BN = self.search(root_B1, candidates_BKC, log_probs_BKC)
        tokens_BN = candidates_BKC.flatten(1).gather(1, index_BN)
        tokens_BN[:, 0] = root_B1[:, 0]
        if self.num_sequences == 1 and len(tokens_BN) == 1:  # chains are cheaper to score and verify
            return Tree.chain(tokens_BN.shape[1] - 1).to(tokens_BN.device), tokens_BN
        return Tree.from_parents(parents_BN, self.max_depth, depth_BN), tokens_BN

    def search(self, root_B1: Tensor, candidates_BKC: Tensor, log_probs_BKC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return parents, depths and candidate indices of the best sequences, [B, N] each (see `best_paths`)."""
        if self.table is None:
            first_BC = log_probs_BKC[:, 0]
            edges_BKCC = log_probs_BKC[:, 1:, :, None].expand(-1, -1, -1, log_probs_BKC.shape[2])
        else:
            before_BKC = torch.cat((root_B1[:, :, None].expand_as(candidates_BKC[:, :1]), candidates_BKC[:, :-1]), 1)
            log_r_BKCC = self.table.look_up(
                before_BKC[:, :, None], candidates_BKC[..., None], self._log_unseen, self.add_k
            )
            edges_BKCC = log_r_BKCC + log_probs_BKC[..., None]
            first_BC, edges_BKCC = edges_BKCC[:, 0, :, 0], edges_BKCC[:, 1:]
        if self._lattice is None or self._lattice.sizes != log_probs_BKC.shape:
            rows, levels, width = log_probs_BKC.shape
            self._lattice = Lattice(rows, levels, width, self.num_sequences, root_B1.device, self.full, self._floor)
        return self._lattice.best_paths(first_BC, edges_BKCC)

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        return [(self.heads, 1)]


def states_of(heads: Any) -> str:
    """Return the kind of hidden states that the heads take as input, by default "after-norm"."""
    return getattr(heads, "states", "after-norm")


def attach_projection(heads: Any, model: PreTrainedModel, device: torch.device) -> None:
    """Attach the target's output projection, copied to `device`, to heads with `projection_kind` "target".

    Raises:
        ValueError: The projection is offloaded, or its hidden size or vocabulary differs from the heads'.
    """
    if getattr(heads, "projection_kind", None) != "target":
        return
    head = model.get_output_embeddings()
    if head.weight.device.type == "meta":
        raise ValueError("the heads use the target's output projection, which is offloaded: move it to a device")
    bias_V = getattr(head, "bias", None)
    shape = LogitShape.of(model.config.get_text_config(decoder=True))
    heads.attach(head.weight.detach().to(device), None if bias_V is None else bias_V.detach().to(device), shape)


def check_heads(heads: HeadModule, context: Context) -> None:
    """Check that the heads fit the target, and set the implementation of their matrix products.

    Raises:
        ValueError: The heads have a different vocabulary, hidden size or kind of hidden states from the target.
    """
    if hasattr(heads, "vocab_size"):
        check_same_vocabulary(context.target, heads, "prediction heads")
    size, expected = getattr(heads, "hidden_size", context.target.hidden_size), context.target.hidden_size
    if size != expected:
        raise ValueError(f"the heads require hidden states of size {size}, but the target's have size {expected}")
    if states_of(heads) != context.target.states:
        raise ValueError(
            f"the heads require {states_of(heads)} states, but the target returns {context.target.states} states: wrap "
            f"the target with wrap_model(model, states={states_of(heads)!r})"
        )
    if isinstance(heads, PredictionHeads):
        heads.multiply_by(Product)

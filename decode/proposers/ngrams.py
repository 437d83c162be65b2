"""Drafting without a draft model: unigram and bigram tables, and prompt lookup.

Shape letters: B batch, S buffer slots, K depth, V vocabulary, X any shape.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.table.table import BigramTable, NextToken, check_add_k
from ..engine import Context, Proposal, Proposer
from ..models.base import check_same_vocabulary
from ..models.kv_cache import to_device
from ..rng import categorical
from ..tree import Tree
from ..warpers import warp


class TableDrafts:
    """Next-token distributions of a table of counts. With `order` 1, they do not depend on the previous token."""

    def __init__(self, rows: NextToken, order: int) -> None:
        self._rows, self._order = rows, order
        self._unigram_V = rows.unigram_V.log()
        self._commonest = self._unigram_V.argmax()

    def logits(self, last_X: Tensor) -> Tensor:
        """Return the next-token log-probabilities after each token, [..., V]."""
        return self._rows.after(last_X).log() if self._order == 2 else self._unigram_V.expand(*last_X.shape, -1)

    def best(self, last_X: Tensor) -> Tensor:
        """Return the most likely next token after each token, in the shape of `last_X`."""
        return self._rows.most_likely(last_X) if self._order == 2 else self._commonest.expand_as(last_X)


class TableSource(NamedTuple):
    """Order and smoothing of the next-token distributions of a table of counts."""

    order: Literal[1, 2]
    prior: float = 1.0
    """Weight of the unigram distribution in the smoothed bigram distribution. Not used with `add_k`."""
    add_k: float = 0.0
    """Number added to each bigram count (add-k smoothing). If 0, `prior` is used instead."""

    def drafts(self, table: BigramTable, device: torch.device) -> TableDrafts:
        """Return the smoothed distributions of a table on a device."""
        return TableDrafts(table.distributions(device, *self[1:]), self.order)


class TableChain(Proposer):
    """Proposer of `gamma` tokens from a table of counts, as in the n-gram baselines of arXiv 2211.17192 (table 3).

    Raises:
        ValueError: A setting is out of range or, in `start`, the table's vocabulary differs from the target's.
    """

    def __init__(self, table: BigramTable, gamma: int, source: TableSource) -> None:
        if source.prior <= 0:
            raise ValueError(f"prior must be above 0, got {source.prior}")
        check_add_k(source.add_k)
        self.table, self.gamma, self.source = table, gamma, source

    def start(self, context: Context) -> None:
        check_same_vocabulary(context.target, self.table, "table")
        self._drafts = self.source.drafts(self.table, context.ids_BS.device)
        self._tree = Tree.chain(self.gamma).to(context.ids_BS.device)

    def propose(self, context: Context) -> Proposal:
        tokens, probs = [context.root_B1], []
        uniform_BK = None if context.sampling.greedy else context.rng.uniform(self.gamma)
        for level in range(self.gamma):
            if uniform_BK is None:
                tokens.append(self._drafts.best(tokens[-1]))
                continue
            probs.append(warp(self._drafts.logits(tokens[-1]), context.sampling))
            tokens.append(categorical(probs[-1], uniform_BK[:, level, None]))
        return Proposal(self._tree, torch.cat(tokens, 1), torch.cat(probs, 1) if probs else None)


class PromptLookup(Proposer):
    """Proposer of the tokens that followed the latest earlier match of a row's last tokens (prompt lookup).

    The longest match of `min_ngram` to `max_ngram` tokens is used. A continuation that reaches the end of the row is
    repeated. Rows without a match have no draft tokens.
    """

    def __init__(self, gamma: int, max_ngram: int, min_ngram: int = 1) -> None:
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram must be at most max_ngram ({max_ngram}), got {min_ngram}")
        self.gamma, self.max_ngram, self.min_ngram = gamma, max_ngram, min_ngram

    def propose(self, context: Context) -> Proposal:
        # The host already has all committed tokens, so this needs no synchronisation.
        position_B = lookup(context.host_ids_BS, np.array(context.lengths), self.max_ngram, self.min_ngram)
        has_match_B = position_B >= 0
        depth, device = self.gamma if has_match_B.any() else 0, context.ids_BS.device
        lengths_B1, position_B1 = np.array(context.lengths)[:, None], position_B[:, None]
        source_BK = position_B1 + np.arange(depth) % np.maximum(lengths_B1 - position_B1, 1)
        copied_BK = np.take_along_axis(context.host_ids_BS, np.where(has_match_B[:, None], source_BK, 0), 1)
        tokens_BN = torch.cat((context.root_B1, to_device(torch.from_numpy(copied_BK), device)), 1)
        proposal = Proposal(Tree.chain(depth).to(device), tokens_BN, levels=self.gamma)
        if depth and not has_match_B.all():
            proposal.valid_BN = to_device(torch.from_numpy(has_match_B), device)[:, None].expand(-1, depth + 1)
        return proposal


def lookup(ids_BS: np.ndarray, lengths_B: np.ndarray, longest: int, shortest: int = 1) -> np.ndarray:
    """Find the latest earlier match of each row's last tokens. Return the position after it, int64 [B], or -1.

    The match has as many tokens as possible, from `shortest` to `longest`.
    """
    rows_B, slots_S = np.arange(len(ids_BS)), np.arange(ids_BS.shape[1])
    matches_BS = slots_S < lengths_B[:, None] - 1  # slots at which the match ends
    position_B = np.full(len(ids_BS), -1)
    for back in range(min(longest, ids_BS.shape[1])):
        last_B = ids_BS[rows_B, np.maximum(lengths_B - 1 - back, 0)]
        shifted_BS = np.full_like(ids_BS, -1)
        shifted_BS[:, back:] = ids_BS[:, : ids_BS.shape[1] - back]
        matches_BS &= (shifted_BS == last_B[:, None]) & (back < lengths_B[:, None])
        if back + 1 >= shortest:
            latest_B = ids_BS.shape[1] - 1 - matches_BS[:, ::-1].argmax(1)
            position_B = np.where(matches_BS.any(1), latest_B + 1, position_B)
    return position_B

"""A drafter's own key/value cache, kept in step with what the target commits.

Shape letters: B batch, M new nodes, K depth, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine import Context, prefill
from ..models.base import LanguageModel, check_same_vocabulary
from ..tree import Tree


class DraftState:
    """Grows a tree of the drafter's own on top of the committed tokens.

    Its node i lies `i` slots behind the root, as the target's does. What was committed but not read is read first.
    Raises ValueError: a drafter of another vocabulary, on another device, with too few positions, or that begins
    otherwise than the target.
    """

    def __init__(self, model: LanguageModel, context: Context, max_nodes: int, max_depth: int) -> None:
        check_same_vocabulary(context.target, model, "drafter")
        if model.device != context.target.device:
            raise ValueError(f"the drafter is on {model.device}, the target on {context.target.device}: move one")
        self.model = model
        longest = max(context.lengths) + context.limits.max_new_tokens
        if longest - 1 + max_depth > model.max_positions:
            raise ValueError(
                f"the drafter has {model.max_positions} positions; prompt, new tokens and a look-ahead of {max_depth} "
                f"need {longest - 1 + max_depth}"
            )
        ids, self.cache = model.begin(context.prompts, context.limits.max_new_tokens + max_nodes)
        committed = [row[:length].tolist() for row, length in zip(context.host_ids_BS, context.lengths, strict=True)]
        if [list(row) for row in ids] != committed:
            raise ValueError(
                "target and drafter must both be decoders, or both be encoder-decoders that start from the same token"
            )
        prefill(model, self.cache, context.ids_BS, context.lengths)
        self._read = list(self.cache.lengths)
        self._levels = 0

    def read_root(self, context: Context) -> Tensor:
        """Read what was committed since the last proposal. Returns [B, D], the hidden state of the root (node 0)."""
        # A row that is ahead of the others reads some tokens again: same values, same slots. One that has fewer tokens
        # than the others must read begins at its start, and reads beyond its end what is never looked at.
        pending = max(length - read for length, read in zip(context.lengths, self._read, strict=True))
        starts = [max(0, length - pending) for length in context.lengths]
        self.cache.set_lengths(starts)
        if pending <= min(context.lengths):
            hidden_BD = self.model.extend(self.cache, context.last_ids(pending))[:, -1]
        else:
            places_BM = self.cache.lengths_B[:, None] + torch.arange(pending, device=self.model.device)
            hidden_BMD = self.model.extend(self.cache, context.ids_BS.gather(1, places_BM))
            roots_B = context.cache.lengths_B - self.cache.lengths_B
            hidden_BD = hidden_BMD[torch.arange(len(starts), device=self.model.device), roots_B]
        self.cache.set_lengths([length - 1 for length in context.lengths])
        self._levels = 0
        return hidden_BD

    def grow(self, tokens_BM: Tensor, tree: Tree, start: int) -> Tensor:
        """Run nodes start..start+M-1, all of one level. Returns [B, M, D] hidden states."""
        self._levels += 1
        return self.model.extend(self.cache, tokens_BM, tree, start)

    def keep(self, context: Context, kept: Sequence[int] | None = None, own_path_BK: Tensor | None = None) -> None:
        """Keep the accepted nodes that were run.

        Args:
            kept: how many nodes of its path each row keeps, at most; None: all that were accepted.
            own_path_BK: the path in the drafter's own numbering; None where it needs no move.
        """
        if own_path_BK is not None and self._levels:
            self.cache.move_to_front(own_path_BK[:, : self._levels])
        counts = context.accepted if kept is None else kept
        self._read = [
            min(root + 1 + min(count, self._levels), length - 1)
            for root, count, length in zip(self.cache.lengths, counts, context.lengths, strict=True)
        ]


def own_path(nodes_BN: Tensor, path_BK: Tensor, kept_B: Tensor) -> Tensor:
    """A verdict's path in a drafter's numbering, [B, K]: `nodes_BN[b, i]` is the drafter's node behind proposal node i.

    Columns that are not kept name themselves, as `KVCache.move_to_front` asks.
    """
    place_K = torch.arange(1, path_BK.shape[1] + 1, device=path_BK.device)
    known_BK = path_BK.clamp(max=nodes_BN.shape[1] - 1)
    return torch.where(place_K <= kept_B[:, None], nodes_BN.gather(1, known_BK), place_K)

"""Key-value cache of a drafter, synchronised with the committed tokens.

Drafters that use the target's hidden states (EAGLE) skip the first token, because no hidden state precedes it. Their
token j is stored in slot j − 1. Accepted draft tokens are run again with the target's hidden states.

Shape letters: B batch, M new nodes, N nodes that were run, K depth, D hidden, V vocabulary, R draft vocabulary, Y
outputs of a slot of a block.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..engine import PREFILL_TOKENS, Context, Proposal, Proposer, Verdict, prefill
from ..models.base import LanguageModel, check_same_vocabulary
from ..models.dflash import DFlashDrafter
from ..tree import Tree


def check_drafter(model: LanguageModel, context: Context, max_depth: int) -> None:
    """Raise ValueError if the drafter does not fit the target, or has too few positions for `max_depth` tokens."""
    check_same_vocabulary(context.target, model, "drafter")
    if model.device != context.target.device:
        raise ValueError(
            f"the drafter is on {model.device}, but the target is on {context.target.device}: "
            "move both to the same device"
        )
    longest = max(context.lengths) + context.limits.max_new_tokens
    if longest - 1 + max_depth > model.max_positions:
        raise ValueError(
            f"the drafter has {model.max_positions} positions, but the prompt, the new tokens and "
            f"{max_depth} draft tokens need {longest - 1 + max_depth}: reduce max_new_tokens"
        )


def check_aux(context: Context, required: tuple[int, ...]) -> None:
    """Raise ValueError if the target does not return the hidden states that a drafter requires."""
    if context.aux_BSG is None or context.target.aux_layers != required:
        raise ValueError(
            f"the drafter requires the target's aux_layers to be {required}, got {context.target.aux_layers}: "
            f"wrap the target with wrap_model(model, aux_layers={required})"
        )


class DraftState:
    """Key-value cache of a drafter, which contains the committed tokens and the drafter's own token tree.

    Node i of the tree is stored i slots after the root, as in the target's cache.

    Raises:
        ValueError: Drafter and target differ in vocabulary, device or start token. The drafter has too few positions.
            It requires hidden states that the target does not return, or prompts of more than one token.
    """

    def __init__(self, model: LanguageModel, context: Context, max_nodes: int, max_depth: int) -> None:
        check_drafter(model, context, max_depth)
        self.model = model
        ids, self.cache = model.begin(context.prompts, context.limits.max_new_tokens + max_nodes)
        committed = [row[:length].tolist() for row, length in zip(context.host_ids_BS, context.lengths, strict=True)]
        if [list(row) for row in ids] != committed:
            raise ValueError(
                "target and drafter must both be decoders, or both be encoder-decoders with the same start token"
            )
        self._lag = 0 if model.required_aux_layers is None else 1
        if model.required_aux_layers is None:
            prefill(model, self.cache, context.ids_BS, context.lengths)
        else:
            self._prefill_aux(context, model.required_aux_layers)
        self._read = [length - 1 for length in context.lengths]
        self._levels = 0

    def _prefill_aux(self, context: Context, required: tuple[int, ...]) -> None:
        """Prefill the cache of a drafter that uses the target's hidden states."""
        check_aux(context, required)
        assert context.aux_BSG is not None
        longest, shortest = max(context.lengths), min(context.lengths)
        if shortest < 2:
            raise ValueError(
                f"prompt {context.lengths.index(shortest)} has {shortest} token, but this drafter needs at least 2, "
                "because its input includes the target's hidden state of the preceding token"
            )
        if longest > 2:
            states_BTD = self.model.fuse_aux(context.aux_BSG[:, : longest - 2])
            self.model.extend_with_aux(states_BTD, self.cache, context.ids_BS[:, 1 : longest - 1])

    def read_root(self, context: Context) -> Tensor:
        """Run the drafter on the tokens committed since the last proposal. Return the root's hidden state [B, D]."""
        return self.read_with(context)[:, 0]

    def read_with(self, context: Context, extra_BM: Tensor | None = None) -> Tensor:
        """Run the drafter on new committed tokens, then `extra_BM`. Return states [B, 1 + M, D] from the root on."""
        # All rows run the same number of tokens. Rows with fewer new tokens run some again, with the same result. Rows
        # that are too short start at 0, and the tokens after their end are ignored.
        pending = max(length - length_read for length, length_read in zip(context.lengths, self._read, strict=True))
        starts = [max(0, length - self._lag - pending) for length in context.lengths]
        self.cache.set_lengths(starts)
        extend = self.model.extend
        if pending + self._lag <= min(context.lengths):
            if self._lag:
                extend = partial(self.model.extend_with_aux, self.model.fuse_aux(context.aux_before(pending)))
            tokens_BM = context.last_ids(pending)
            if extra_BM is not None:
                tokens_BM, extra_BM = torch.cat((tokens_BM, extra_BM), 1), None
            hidden_BMD = extend(self.cache, tokens_BM)[:, pending - 1 :]
        else:
            slots_BM = self.cache.lengths_B[:, None] + torch.arange(pending, device=self.model.device)
            if self._lag:
                extend = partial(self.model.extend_with_aux, self.model.fuse_aux(context.aux_at(slots_BM)))
            hidden_BMD = extend(self.cache, context.ids_BS.gather(1, slots_BM + self._lag))
            roots_B = context.cache.lengths_B - self._lag - self.cache.lengths_B
            hidden_BMD = hidden_BMD[torch.arange(len(starts), device=self.model.device), roots_B][:, None]
        self.cache.set_lengths([length - 1 - self._lag for length in context.lengths])
        if extra_BM is not None:  # in some rows, `extra_BM` does not follow the last token that was run
            hidden_BMD = torch.cat((hidden_BMD, self.model.extend(self.cache, extra_BM, start=1)), 1)
        self._levels = 0
        self._states_BND = hidden_BMD[:, :1]
        return hidden_BMD

    def grow(self, tokens_BM: Tensor, tree: Tree, start: int) -> Tensor:
        """Run the drafter on nodes start to start + M - 1 of one level. Return their hidden states [B, M, D]."""
        self._levels += 1
        if not self._lag:
            return self.model.extend(self.cache, tokens_BM, tree, start)
        parents_BM = tree.parents_BN[:, start : start + tokens_BM.shape[1]].expand(len(tokens_BM), -1)
        states_BMD = self._states_BND.gather(1, parents_BM[..., None].expand(-1, -1, self._states_BND.shape[2]))
        hidden_BMD = self.model.extend_with_aux(states_BMD, self.cache, tokens_BM, tree, start)
        self._states_BND = torch.cat((self._states_BND, hidden_BMD), 1)
        return hidden_BMD

    def run_captured(
        self, tree: Tree, key: Hashable, run: Callable[..., tuple[Tensor, ...]], hidden_BD: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Call `LanguageModel.run_captured` with the root's hidden state as the first input. `run` must grow `tree`."""

        def run_tree(hidden_BD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            self._states_BND = hidden_BD[:, None]
            return run(hidden_BD, *inputs)

        outputs = self.model.run_captured(self.cache, tree, key, run_tree, hidden_BD, *inputs)
        self._levels = max(0, tree.max_depth - 1)
        return outputs

    def keep(self, context: Context, accepted: Sequence[int] | None = None, own_path_BK: Tensor | None = None) -> None:
        """Keep the first `accepted` nodes (None: all) of each row's accepted path in the cache.

        `own_path_BK` is this path as nodes of the drafter's tree, or None if the nodes need not be moved.
        """
        if self._lag:
            self._read = [root + 2 for root in self.cache.lengths]
            return
        if own_path_BK is not None and self._levels:
            self.cache.move_to_front(own_path_BK[:, : self._levels])
        counts = context.accepted if accepted is None else accepted
        self._read = [
            min(root + 1 + min(count, self._levels), length - 1)
            for root, count, length in zip(self.cache.lengths, counts, context.lengths, strict=True)
        ]


class BlockState(DraftState):
    """Cache of a drafter that drafts a block of tokens with one forward (`DFlashDrafter`).

    The outputs of a slot, which include the logits, belong to all nodes of a level, and are then changed by
    `DFlashDrafter.after`. `read_root` and `grow` return these outputs instead of hidden states.
    """

    model: DFlashDrafter

    def __init__(self, model: DFlashDrafter, context: Context, max_depth: int) -> None:
        if max_depth > model.max_draft_tokens:
            raise ValueError(
                f"the drafter drafts at most {model.max_draft_tokens} tokens per step, got {max_depth}: "
                "reduce gamma, or the depth of the tree"
            )
        check_drafter(model, context, max_depth)
        check_aux(context, model.required_aux_layers)
        self.model, self._depth = model, max_depth
        longest = max(context.lengths) + context.limits.max_new_tokens + max_depth
        self.cache = model.new_cache(len(context.lengths), longest + 1)
        assert context.aux_BSG is not None
        for start in range(0, max(context.lengths) - 1, PREFILL_TOKENS):
            self.cache.set_lengths([start] * len(context.lengths))
            stop = min(start + PREFILL_TOKENS, max(context.lengths) - 1)
            model.add_context(self.cache, context.aux_BSG[:, start:stop])
        self._read = [length - 1 for length in context.lengths]

    def read_root(self, context: Context) -> Tensor:
        """Add newly committed tokens to the cache, and draft a block. Return the outputs [B, Y] of its first token."""
        ends = [length - 1 for length in context.lengths]
        if pending := max(end - read for end, read in zip(ends, self._read, strict=True)):
            # Rows with fewer new tokens add some again. What short rows add after their end is overwritten.
            self.cache.set_lengths([max(0, end - pending) for end in ends])
            slots_BM = self.cache.lengths_B[:, None] + torch.arange(pending, device=self.model.device)
            self.model.add_context(self.cache, context.aux_at(slots_BM))
        self.cache.set_lengths(ends)
        self._read, self._levels = ends, 0
        self._outputs_BKY = self.model.draft_block(self.cache, context.root_B1, self._depth)
        return self.model.after(self._outputs_BKY[:, :1], context.root_B1)[:, 0]

    def grow(self, tokens_BM: Tensor, tree: Tree, start: int) -> Tensor:
        """Return the outputs [B, M, Y] after nodes start to start + M - 1, given their depths and tokens."""
        depth_BM = tree.depth_BN[:, start : start + tokens_BM.shape[1]].clamp(max=self._depth - 1)
        rows_B1 = torch.arange(len(tokens_BM), device=tokens_BM.device)[:, None]
        return self.model.after(self._outputs_BKY[rows_B1, depth_BM], tokens_BM)

    def run_captured(
        self, tree: Tree, key: Hashable, run: Callable[..., tuple[Tensor, ...]], hidden_BD: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return run(hidden_BD, *inputs)

    def keep(self, context: Context, accepted: Sequence[int] | None = None, own_path_BK: Tensor | None = None) -> None:
        """Do nothing: no draft token stays in the cache."""


def draft_state(
    model: LanguageModel, context: Context, max_nodes: int, max_depth: int, own_depth: int | None = None
) -> DraftState:
    """Return the state of a drafter for trees of `max_nodes` nodes and `max_depth` levels.

    `own_depth` is the number of levels that the drafter drafts, if nodes of another source precede these levels.
    """
    if isinstance(model, DFlashDrafter):
        return BlockState(model, context, own_depth or max_depth)
    return DraftState(model, context, max_nodes, max_depth)


class DrafterProposer(Proposer):
    """Base class of proposers that draft at most `gamma` levels with one draft model."""

    model: LanguageModel
    _draft: DraftState

    def start(self, context: Context) -> None:
        self._draft = draft_state(self.model, context, *self.capacity(context.limits))

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        self._draft.keep(context)

    def stop(self) -> None:
        del self._draft


def own_path(nodes_BN: Tensor, path_BK: Tensor, accepted_B: Tensor) -> Tensor:
    """Convert the accepted path of a verdict from nodes of the proposal to nodes of the drafter's tree.

    `nodes_BN` maps nodes of the proposal to nodes of the drafter's tree. In the returned path [B, K], a rejected column
    i contains i + 1, as `KVCache.move_to_front` requires.
    """
    position_K = torch.arange(1, path_BK.shape[1] + 1, device=path_BK.device)
    valid_BK = path_BK.clamp(max=nodes_BN.shape[1] - 1)
    return torch.where(position_K <= accepted_B[:, None], nodes_BN.gather(1, valid_BK), position_K)

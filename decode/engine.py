"""The one decoding loop: propose, score, verify, commit. It knows token ids only, and reads no clock.

Shape letters: B batch, N tree nodes, M nodes that have children, K depth, S buffer slots, V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .kv_cache import KVCache
from .models import LanguageModel
from .paths import extend_by_path
from .rng import Rng
from .tree import Tree
from .warpers import Sampling, warp


@dataclass(frozen=True, slots=True)
class Limits:
    """When a row ends."""

    max_new_tokens: int = 128
    """Tokens to generate at most; never one more."""
    stop_ids: tuple[int, ...] = ()
    """A row ends with the first of these tokens, which is kept; nothing after it is."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains that were drafted side by side and share the nodes of their common prefixes."""

    nodes_BMK: Tensor
    """int64; the node that holds the k-th token of chain m."""
    probs_BMKV: Tensor
    """float32; the distribution that the k-th token of chain m was drawn from."""


@dataclass(slots=True)
class Proposal:
    """A token tree to be scored, with what the verifier needs to know of how it was drawn."""

    tree: Tree
    tokens_BN: Tensor
    """int64; node 0 is the root."""
    draft_probs_BMV: Tensor | None = None
    """float32; the distribution that a node's children were drawn from, for the first M nodes. None: no chance was
    involved, all of it lies on the tokens themselves."""
    valid_BN: Tensor | None = None
    """bool; False at nodes that the drafter could not fill, or did not want to. None: all are."""
    draft_scores_BN: Tensor | None = None
    """float32; log of the drafter's joint probability of the path to a node."""
    chains: Chains | None = None
    levels: int = 0
    """For trees whose depth varies: how many levels random numbers are drawn for, so that a row's numbers do not
    depend on how far its neighbours were drafted. 0: the tree's depth."""
    target_forwards: int = 0
    """Forwards of the target itself that this proposal took."""
    by_path: bool = False
    """Score each path of the tree as a row of its own, with copies of the cache, instead of by tree attention."""


@dataclass(slots=True)
class Verdict:
    """What the verifier kept of a proposal."""

    path_BK: Tensor
    """int64; the accepted path's nodes by depth. Column i holds i + 1 where nothing is accepted at that depth."""
    accepted_B: Tensor
    """int64; how many columns of the path are accepted."""
    next_B: Tensor
    """int64; the token after the path: a correction, or an extra one."""
    examined_B: Tensor | None = None
    """int64; draft tokens looked at. None: each accepted node's siblings up to itself, and all children of the last."""
    rejected_B: Tensor | None = None
    """bool; the path ended because no child was accepted. None: if the last node has children."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration did, on the host. All arrays have one entry a row."""

    new_ids: list[list[int]]
    """The tokens that each row gained; empty for rows that had ended before."""
    forwards: int
    """Forwards of the target: one that scored the tree, and those that the proposal took."""
    nodes: int
    """Tree nodes that the target scored for each row."""
    active: np.ndarray
    """bool; the row had not ended before this step."""
    accepted: np.ndarray
    examined: np.ndarray
    rejected: np.ndarray


class Proposer(ABC):
    """Grows a token tree from a context."""

    @abstractmethod
    def room(self, limits: Limits) -> tuple[int, int]:
        """The most nodes of a proposal, the root included (slots that the cache must have), and how far its deepest
        node may reach beyond the last token that is kept (positions that the models must have)."""

    def start(self, context: Context) -> None:
        """Read the prompts: called once, before the first proposal. By default nothing is done."""
        return

    @abstractmethod
    def propose(self, context: Context) -> Proposal:
        """The next tree; its root is the last committed token of each row."""

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        """Called after the context has taken the verdict in. By default nothing is remembered."""
        return

    def stop(self) -> None:
        """Called when decoding has ended: let go of what was made for it. By default there is nothing."""
        return

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """The forwards behind a proposal of `nodes` nodes for one row: each a model, heads or None for the target, and
        how many tokens it runs. By default none."""
        return []


class Verifier(ABC):
    """Decides which path of a scored tree is kept."""

    lossless: bool
    """Whether the output follows the target's warped distribution."""
    judges: Literal["probabilities", "unwarped", "logits"]
    """What it judges by: the target's warped probabilities, its unwarped ones, or its logits, if order is enough."""

    @abstractmethod
    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        """Pure but for the numbers it draws. `target_BNV[:, i]` is what the target says after node i's path."""


class Profile(Protocol):
    """Told by `generate` where a step stands; `profile.StepProfile` reads clocks at these points."""

    def start(self) -> None:
        """A step begins."""

    def mark(self, phase: str) -> None:
        """A phase of it has ended: draft, score, verify or commit."""


class Context:
    """The committed tokens of a batch, and what the target computed for them."""

    def __init__(
        self,
        target: LanguageModel,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling,
        rng: Rng,
        room: tuple[int, int] = (1, 0),
    ) -> None:
        max_nodes, max_depth = room
        _check_prompts(target, prompts)
        self.target, self.prompts = target, prompts
        self.sampling, self.limits, self.rng = sampling, limits, rng
        ids, self.cache = target.begin(prompts, limits.max_new_tokens + max_nodes)
        self.lengths = [len(row) for row in ids]
        _check_positions(target, self.lengths, limits, max_depth)
        self._ends = np.array(self.lengths) + limits.max_new_tokens
        self.capacity = max(self.lengths) + limits.max_new_tokens + max_nodes
        self.host_ids_BS = np.zeros((len(ids), self.capacity), dtype=np.int64)
        for row, row_ids in enumerate(ids):
            self.host_ids_BS[row, : len(row_ids)] = row_ids
        # On a CPU both are the same memory.
        self.ids_BS = torch.from_numpy(self.host_ids_BS).to(target.device)
        self.ended = np.zeros(len(ids), dtype=bool)
        self.accepted = np.zeros(len(ids), dtype=np.int64)
        self._stop_ids = np.array(limits.stop_ids, dtype=np.int64)
        self._hidden: tuple[Tensor, Verdict | None]
        self._hidden = prefill(target, self.cache, self.ids_BS, self.lengths)[:, None], None

    @property
    def hidden_BD(self) -> Tensor:
        """[B, D] hidden state that the last committed token was read from; zeros where there is none."""
        hidden_BND, verdict = self._hidden
        if verdict is None:
            return hidden_BND[:, 0]
        node_B1 = torch.nn.functional.pad(verdict.path_BK, (1, 0)).gather(1, verdict.accepted_B[:, None])
        return hidden_BND.gather(1, node_B1[..., None].expand(-1, 1, hidden_BND.shape[2]))[:, 0]

    @property
    def root_B1(self) -> Tensor:
        """[B, 1] last committed token of each row."""
        return self.last_ids(1)

    def last_ids(self, count: int) -> Tensor:
        """[B, count] last committed tokens of each row; each row must have as many."""
        if len(self.lengths) == 1:
            return self.ids_BS[:, self.lengths[0] - count : self.lengths[0]]
        after_B1 = self.cache.lengths_B[:, None] + 1  # the cache holds all but the root
        return self.ids_BS.gather(1, after_B1 - count + torch.arange(count, device=self.ids_BS.device))

    def commit(self, proposal: Proposal, verdict: Verdict, hidden_BND: Tensor) -> Step:
        """Keep the accepted path and the token after it; the one host synchronisation of a step.

        Rows that had ended keep their state. A row never gains a token past its stop token or its limit.
        """
        tree, depth = proposal.tree, verdict.path_BK.shape[1]
        optional = (proposal.valid_BN, verdict.examined_B, verdict.rejected_B)
        tokens, path, accepted, next_token, parents, valid, examined, rejected = _to_host(
            proposal.tokens_BN, verdict.path_BK, verdict.accepted_B, verdict.next_B, tree.parents_BN, *optional
        )
        rows = np.arange(len(tokens))
        new = np.empty((len(tokens), depth + 1), dtype=np.int64)
        # A pruned tree may have fewer nodes than levels: columns that are not kept may then name nodes beyond it.
        new[:, :depth] = tokens[rows[:, None], np.minimum(path, tokens.shape[1] - 1)]
        new[rows, accepted] = next_token
        kept = self._count_kept(new, accepted)
        if examined is None and tree.is_chain:
            reach = depth if valid is None else (valid[:, 1:] > 0).cumprod(1).sum(1)
            rejected = accepted < reach
            examined = accepted + rejected
        elif examined is None:
            examined, rejected = _account(path, accepted, parents, valid)

        deepest = int(accepted.max())
        if not tree.is_chain and (path[:, :deepest] != np.arange(1, deepest + 1)).any():
            self.cache.move_to_front(verdict.path_BK[:, :deepest])
        self._hidden = hidden_BND, verdict

        active = ~self.ended
        new_ids = [row[:count].tolist() for row, count in zip(new, kept.tolist(), strict=True)]
        for row, ids in enumerate(new_ids):
            self.host_ids_BS[row, self.lengths[row] : self.lengths[row] + len(ids)] = ids
        if self.ids_BS.device.type != "cpu":
            self._append(torch.from_numpy(new))
        self.lengths = [length + len(ids) for length, ids in zip(self.lengths, new_ids, strict=True)]
        self.ended = self.ended | (np.array(self.lengths) >= self._ends) | self._ends_with_stop(new, kept)
        self.cache.set_lengths([length - 1 for length in self.lengths])
        self.accepted = accepted
        forwards, nodes = 1 + proposal.target_forwards, proposal.tokens_BN.shape[1]
        return Step(new_ids, forwards, nodes, active, accepted, examined, rejected > 0)

    def _count_kept(self, new: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        kept = np.minimum(accepted + 1, self._ends - np.array(self.lengths))
        if len(self._stop_ids):
            stops = (new[..., None] == self._stop_ids).any(-1)
            first_stop = np.where(stops.any(1), stops.argmax(1), new.shape[1])
            kept = np.minimum(kept, first_stop + 1)
        return np.where(self.ended, 0, kept)

    def _ends_with_stop(self, new: np.ndarray, kept: np.ndarray) -> np.ndarray:
        if not len(self._stop_ids):
            return np.zeros_like(self.ended)
        last = new[np.arange(len(new)), np.maximum(kept - 1, 0)]
        return (last[:, None] == self._stop_ids).any(1) & (kept > 0)

    def _append(self, new_BK1: Tensor) -> None:
        """Write all new tokens; those beyond a row's new length are never read and are written over later."""
        # From pinned memory the copy is queued; from other memory the host would wait for the device.
        new_BK1 = new_BK1.pin_memory().to(self.ids_BS.device, non_blocking=True)
        count = new_BK1.shape[1]
        if len(self.lengths) == 1:
            room = min(count, self.capacity - self.lengths[0])
            self.ids_BS[:, self.lengths[0] : self.lengths[0] + room] = new_BK1[:, :room]
            return
        slots_BK1 = self.cache.lengths_B[:, None] + torch.arange(1, count + 1, device=self.ids_BS.device)
        self.ids_BS.scatter_(1, slots_BK1.clamp(max=self.capacity - 1), new_BK1)


def _to_host(*tensors: Tensor | None) -> list[Any]:
    """Arrays of small integers or truth values; from a device in one copy, the one synchronisation of a step."""
    given = [tensor for tensor in tensors if tensor is not None]
    if given[0].device.type == "cpu":
        return [None if tensor is None else tensor.numpy() for tensor in tensors]
    parts = iter(torch.cat([tensor.flatten() for tensor in given]).cpu().split([tensor.numel() for tensor in given]))
    return [None if tensor is None else next(parts).view(tensor.shape).numpy() for tensor in tensors]


def _account(
    path: np.ndarray, accepted: np.ndarray, parents: np.ndarray, valid: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """How many draft tokens each row examined in a tree, and whether its path ended by a rejection; see `Verdict`."""
    rows, depth = path.shape
    nodes, places = parents.shape[1], np.arange(depth + 1)
    reached = places <= accepted[:, None]
    above = np.zeros((rows, depth + 1), dtype=np.int64)
    above[:, 1:] = path
    up_to = np.full((rows, depth + 1), nodes, dtype=np.int64)
    up_to[:, :-1] = np.where(reached[:, 1:], path, nodes)
    children = parents[:, None] == np.where(reached, above, -2)[..., None]
    if valid is not None:
        children = children & (valid > 0)[:, None]
    tried = children & (np.arange(nodes) <= up_to[..., None])
    return tried.sum((1, 2)), children[np.arange(rows), accepted].any(1)


def prefill(model: LanguageModel, cache: KVCache, ids_BS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run all committed tokens but the last of each row; the last becomes the root of the first tree.

    Returns:
        [B, D] hidden state of the last token that was run (zeros for a row of one token). Nothing is projected.
    """
    longest = max(lengths) - 1
    rows = len(lengths)
    hidden_BD = torch.zeros(rows, model.hidden_size, dtype=model.dtype, device=model.device)
    if longest > 0:
        hidden_BTD = model.extend(cache, ids_BS[:, :longest])
        last_B = torch.tensor([max(length - 2, 0) for length in lengths], device=model.device)
        hidden_BD = hidden_BTD.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BTD.shape[-1]))[:, 0]
    cache.set_lengths([length - 1 for length in lengths])
    return hidden_BD


def generate(
    target: LanguageModel,
    proposer: Proposer,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    rng: Rng,
    profile: Profile | None = None,
) -> Iterator[Step]:
    """Decode a batch of prompts; yields after each forward of the target.

    Args:
        target: the model whose output is wanted.
        proposer: grows token trees. It is started anew by each call.
        verifier: decides what is kept.
        prompts: token ids of each row, at least one token each; what the encoder reads, where there is one.
        rng: one generator a row.
        profile: is told when the phases of a step end.

    Raises:
        ValueError: an empty batch or prompt, a token outside the vocabulary, or a prompt that leaves no room in the
            model's positions for the new tokens and the tree.
    """
    warping = {"probabilities": sampling, "unwarped": Sampling(temperature=1.0), "logits": None}[verifier.judges]
    mark: Callable[[str], None] = profile.mark if profile else lambda phase: None
    with torch.inference_mode():
        context = Context(target, prompts, limits, sampling, rng, proposer.room(limits))
        proposer.start(context)
    try:
        while not context.ended.all():
            with torch.inference_mode():
                if profile:
                    profile.start()
                proposal = proposer.propose(context)
                mark("draft")
                extend = extend_by_path if proposal.by_path else type(target).extend
                hidden_BND = extend(target, context.cache, proposal.tokens_BN, proposal.tree)
                logits_BNV = target.logits(hidden_BND)
                mark("score")
                verdict = verifier.verify(proposal, warp(logits_BNV, warping) if warping else logits_BNV, rng)
                mark("verify")
                step = context.commit(proposal, verdict, hidden_BND)
                proposer.commit(context, proposal, verdict)
                mark("commit")
            yield step
    finally:
        proposer.stop()


def _check_prompts(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ValueError("there is no prompt to decode: the batch is empty")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(
                f"prompt {row} has no tokens: give at least one, such as the tokenizer's first special token"
            )
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < target.vocab_size)
            raise ValueError(
                f"prompt {row} holds token {wrong}; the target's vocabulary has {target.vocab_size} tokens"
            )


def _check_positions(target: LanguageModel, lengths: Sequence[int], limits: Limits, max_depth: int) -> None:
    for row, length in enumerate(lengths):
        # The last tree's root may be the last token but one; its deepest node is scored all the same.
        needed = length + limits.max_new_tokens - 1 + max_depth
        if needed > target.max_positions:
            raise ValueError(
                f"prompt {row} has {length} tokens; with {limits.max_new_tokens} new ones and a look-ahead of "
                f"{max_depth} that is {needed} positions, and the target has {target.max_positions}"
            )

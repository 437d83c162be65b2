"""The one decoding loop: propose, score, verify, commit. It knows token ids only, and reads no clock.

Shape letters: B batch, N tree nodes, M nodes that have children, K depth, S buffer slots, V vocabulary, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .models.base import LanguageModel, extend_by_path
from .models.finite import Watch
from .models.kv_cache import KVCache, sent, to_host
from .rng import Rng
from .tree import Tree
from .warpers import Sampling, warp

READ_AT_ONCE = 2048
"""Tokens of a prompt."""


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
    def capacity(self, limits: Limits) -> tuple[int, int]:
        """The most nodes of a proposal, the root included (slots that the cache must have), and how far its deepest
        node may reach beyond the last token that is kept (positions that the models must have)."""

    def start(self, context: Context) -> None:
        """Read the prompts: called once, before the first proposal."""
        return

    @abstractmethod
    def propose(self, context: Context) -> Proposal:
        """The next tree; its root is the last committed token of each row."""

    def ahead(self, context: Context, verdict: Verdict, hidden_BND: Tensor) -> tuple[Tensor, ...]:
        """What the next proposal wants to know on the host, of the hidden states of this one's nodes: it comes with the
        verdict, as `Context.ahead`, so that the host waits for nothing else. A profile counts it to the commit."""
        return ()

    def commit(self, context: Context, proposal: Proposal, verdict: Verdict) -> None:
        """Called after the context has taken the verdict in."""
        return

    def stop(self) -> None:
        """Called when decoding has ended: free what was made for it."""
        return

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """The forwards behind a proposal of `nodes` nodes for one row: each a model, heads or None for the target, and
        how many tokens it runs. By default none."""
        return []


class Verifier(ABC):
    """Decides which path of a scored tree is kept."""

    lossless: bool = True
    """Whether the output follows the target's warped distribution."""
    judges: Literal["probabilities", "unwarped", "logits"] = "probabilities"
    """What it judges by: the target's warped probabilities, its unwarped ones, or its logits, if order is enough."""

    @abstractmethod
    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        """Pure but for the numbers it draws. `target_BNV[:, i]` is the target's scores after node i's path."""


class Profile(Protocol):
    """Called by `generate` as a step proceeds; `profile.StepProfile` reads clocks at these points."""

    def start(self) -> None:
        """A step begins."""

    def mark(self, phase: str) -> None:
        """A phase of it has ended: draft, score, verify or commit."""


class Context:
    """The committed tokens of a batch, and what the target computed for them. `reach`: see `Proposer.capacity`."""

    def __init__(
        self,
        target: LanguageModel,
        prompts: Sequence[Sequence[int]],
        limits: Limits,
        sampling: Sampling,
        rng: Rng,
        reach: tuple[int, int] = (1, 0),
    ) -> None:
        max_nodes, max_depth = reach
        check_prompts(target, prompts)
        self.target, self.prompts = target, prompts
        self.sampling, self.limits, self.rng = sampling, limits, rng
        ids, self.cache = target.begin(prompts, limits.max_new_tokens + max_nodes)
        self.lengths = [len(row) for row in ids]
        _check_positions(target, self.lengths, limits, max_depth)
        self._ends = [length + limits.max_new_tokens for length in self.lengths]
        self.capacity = max(self.lengths) + limits.max_new_tokens + max_nodes
        self.host_ids_BS = np.zeros((len(ids), self.capacity), dtype=np.int64)
        for row, row_ids in enumerate(ids):
            self.host_ids_BS[row, : len(row_ids)] = row_ids
        # On a CPU both are the same memory.
        self.ids_BS = torch.from_numpy(self.host_ids_BS).to(target.device)
        self.ended = [False] * len(ids)
        self.accepted = [0] * len(ids)
        self.paths: list[list[int]] = []
        """The nodes that each row accepted in the last step."""
        self.chains: list[list[list[int]]] | None = None
        """Where its proposal had chains, their nodes, [B, M, K]."""
        self.proposed: list[tuple[list[int], list[int]]] = []
        """Of each row the tokens and parents of all that was proposed."""
        self.ahead: list[Any] = []
        """What the proposer asked for."""
        self._stop_ids = frozenset(limits.stop_ids)
        self._last_node = 0  # the first row's, known on the host
        self.watch = Watch()
        """Is shown the largest of all logits that a token is chosen by."""
        read_BTG = prefill(target, self.cache, self.ids_BS, self.lengths)
        self._hidden: tuple[Tensor, Verdict | None] = _last(read_BTG, self.lengths)[:, None], None
        self.aux_BSG: Tensor | None = None
        """The target's auxiliary states at each committed token but the root; None: it gives none."""
        if target.aux_layers:
            self.aux_BSG = read_BTG.new_zeros(len(ids), self.capacity, read_BTG.shape[2] - target.hidden_size)
            self.aux_BSG[:, : read_BTG.shape[1]] = read_BTG[:, :, : -target.hidden_size]

    @property
    def hidden_BD(self) -> Tensor:
        """[B, D] hidden state that the last committed token was read from; zeros where there is none."""
        hidden_BND, verdict = self._hidden
        if verdict is None or len(self.accepted) == 1:
            return hidden_BND[:, self._last_node, -self.target.hidden_size :]
        return hidden_after(verdict, hidden_BND, self.target.hidden_size)

    @property
    def root_B1(self) -> Tensor:
        """[B, 1] last committed token of each row."""
        return self.last_ids(1)

    def aux_before(self, count: int) -> Tensor:
        """[B, count, G] what the target gives behind the tokens that stand before each of `last_ids(count)`."""
        assert self.aux_BSG is not None
        if len(self.lengths) == 1:
            return self.aux_BSG[:, self.lengths[0] - count - 1 : self.lengths[0] - 1]
        first_B1 = self.cache.lengths_B[:, None] - count
        places_BM1 = (first_B1 + torch.arange(count, device=first_B1.device))[..., None]
        return self.aux_BSG.gather(1, places_BM1.expand(-1, -1, self.aux_BSG.shape[2]))

    def last_ids(self, count: int) -> Tensor:
        """[B, count] last committed tokens of each row; each row must have as many."""
        if len(self.lengths) == 1:
            return self.ids_BS[:, self.lengths[0] - count : self.lengths[0]]
        after_B1 = self.cache.lengths_B[:, None] + 1  # the cache holds all but the root
        return self.ids_BS.gather(1, after_B1 - count + torch.arange(count, device=self.ids_BS.device))

    def commit(self, proposal: Proposal, verdict: Verdict, hidden_BND: Tensor, ahead: Sequence[Tensor] = ()) -> Step:
        """Keep the accepted path and the token after it; the one host synchronisation of a step, with which the numbers
        `ahead` come."""
        tree, depth = proposal.tree, verdict.path_BK.shape[1]
        chains_BMK = None if proposal.chains is None else proposal.chains.nodes_BMK
        optional = (proposal.valid_BN, verdict.examined_B, verdict.rejected_B, chains_BMK)
        kept = (proposal.tokens_BN, verdict.path_BK, verdict.accepted_B, verdict.next_B, tree.parents_BN)
        tokens, paths, accepted, next_tokens, parents, watched, valid, examined, rejected, chains, *self.ahead = (
            to_host(*kept, self.watch.seen(), *optional, *ahead)
        )
        self.watch.end_step(watched, self.ended, self.lengths)
        active, before = np.array([not ended for ended in self.ended]), list(self.lengths)
        paths = [path[:count] for path, count in zip(paths, accepted, strict=True)]
        new_ids = [
            self._append(row, [*(own[node] for node in path), token])
            for row, (own, path, token) in enumerate(zip(tokens, paths, next_tokens, strict=True))
        ]
        above = parents if len(parents) > 1 else parents * len(paths)
        self.proposed = list(zip(tokens, above, strict=True))
        if examined is None:
            exists = valid or [None] * len(paths)
            tried = [_tried(*row) for row in zip(paths, above, exists, strict=True)]
            examined, rejected = zip(*tried, strict=True)

        deepest = max(accepted)
        if not tree.is_chain and any(path != list(range(1, len(path) + 1)) for path in paths):
            self.cache.move_to_front(verdict.path_BK[:, :deepest])
        if self.ids_BS.device.type != "cpu":
            self._send(before, depth + 1)
        if self.aux_BSG is not None:
            # Columns that are not kept may name nodes that are not there.
            known_BK = verdict.path_BK.clamp(max=hidden_BND.shape[1] - 1)
            path_BK1 = torch.nn.functional.pad(known_BK, (1, 0))[..., None]
            aux_BKG = hidden_BND[..., : self.aux_BSG.shape[2]]
            aux_BKG = aux_BKG.gather(1, path_BK1.expand(-1, -1, aux_BKG.shape[2]))
            slots_BK1 = (self.cache.lengths_B[:, None] + torch.arange(depth + 1, device=path_BK1.device))[..., None]
            self.aux_BSG.scatter_(1, slots_BK1.expand_as(aux_BKG), aux_BKG)
        self.cache.set_lengths([length - 1 for length in self.lengths])
        self.accepted, self._hidden = accepted, (hidden_BND, verdict)
        self.paths, self.chains = paths, chains
        self._last_node = paths[0][-1] if paths[0] else 0
        forwards, nodes = 1 + proposal.target_forwards, len(tokens[0])
        counts = (np.array(values) for values in (accepted, examined, rejected))
        return Step(new_ids, forwards, nodes, active, *counts)

    def _append(self, row: int, ids: list[int]) -> list[int]:
        """Write a row's new tokens, up to its stop token or its limit; returns those that are kept."""
        if self.ended[row]:
            return []
        length = self.lengths[row]
        ids = ids[: self._ends[row] - length]
        for index, token in enumerate(ids):
            if token in self._stop_ids:
                ids = ids[: index + 1]
                self.ended[row] = True
                break
        self.lengths[row] = length + len(ids)
        self.host_ids_BS[row, length : length + len(ids)] = ids
        self.ended[row] |= self.lengths[row] == self._ends[row]
        return ids

    def _send(self, lengths: list[int], count: int) -> None:
        """Copy the `count` tokens behind each row's former end to the device: what is kept, and what is never read."""
        slots = np.minimum(np.array(lengths)[:, None] + np.arange(count), self.capacity - 1)
        packed = torch.from_numpy(np.stack((slots, np.take_along_axis(self.host_ids_BS, slots, 1))))
        slots_BK1, new_BK1 = sent(packed, self.ids_BS.device)
        self.ids_BS.scatter_(1, slots_BK1, new_BK1)


def hidden_after(verdict: Verdict, hidden_BND: Tensor, hidden_size: int) -> Tensor:
    """[B, D] the hidden states that the token after the path was read from."""
    hidden_BND = hidden_BND[..., -hidden_size:]
    node_B1 = torch.nn.functional.pad(verdict.path_BK, (1, 0)).gather(1, verdict.accepted_B[:, None])
    return hidden_BND.gather(1, node_B1[..., None].expand(-1, 1, hidden_BND.shape[2]))[:, 0]


def _tried(path: list[int], parents: list[int], valid: list[bool] | None) -> tuple[int, bool]:
    """How many draft tokens a row examined, and whether its path ended by a rejection; see `Verdict`."""
    last_tried = dict(zip([0, *path], [*path, len(parents)], strict=True))  # of each node's children, by number
    end = path[-1] if path else 0
    tried, refused = 0, False
    for node, parent in enumerate(parents):
        if node <= last_tried.get(parent, -1) and (valid is None or valid[node]):
            tried += 1
            refused |= parent == end
    return tried, refused


def prefill(model: LanguageModel, cache: KVCache, ids_BS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run all committed tokens but the last of each row, `READ_AT_ONCE` at most at a time, which bounds what a layer
    holds of them; the last becomes the root of the first tree. Returns what `extend` does; nothing is projected."""
    longest, width = max(lengths) - 1, model.hidden_size * (len(model.aux_layers) + 1)
    read = [torch.zeros(len(lengths), 0, width, dtype=model.dtype, device=model.device)]
    parts = -(-longest // READ_AT_ONCE)
    for part in range(parts):
        first, last = longest * part // parts, longest * (part + 1) // parts
        cache.set_lengths([first] * len(lengths))
        read.append(model.extend(cache, ids_BS[:, first:last]))
    cache.set_lengths([length - 1 for length in lengths])
    return torch.cat(read, 1) if parts != 1 else read[1]


def _last(read_BTG: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, G] behind the last token that was run of each row; zeros for a row of one token."""
    if not read_BTG.shape[1]:
        return read_BTG.new_zeros(len(lengths), read_BTG.shape[2])
    last_B = torch.tensor([max(length - 2, 0) for length in lengths], device=read_BTG.device)
    last_BG = read_BTG.gather(1, last_B[:, None, None].expand(-1, 1, read_BTG.shape[2]))[:, 0]
    alone_B1 = torch.tensor(lengths, device=read_BTG.device)[:, None] < 2
    return last_BG.masked_fill(alone_B1, 0.0)


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
    """Decode a batch of prompts (token ids of each row; what the encoder reads, where there is one); yields after each
    step: a forward of the target, and those that its proposal took.

    Raises ValueError: an empty batch or prompt, a token outside the vocabulary, a prompt that leaves no space in the
    model's positions for the new tokens and the tree; a drafter, heads or a table of another target; logits that are
    NaN, infinite, or all minus infinity.
    """
    warping = {"probabilities": sampling, "unwarped": Sampling(temperature=1.0), "logits": None}[verifier.judges]
    mark: Callable[[str], None] = profile.mark if profile else lambda phase: None
    with torch.inference_mode():
        context = Context(target, prompts, limits, sampling, rng, proposer.capacity(limits))
        proposer.start(context)
    try:
        while not all(context.ended):
            with torch.inference_mode():
                if profile:
                    profile.start()
                proposal = proposer.propose(context)
                mark("draft")
                extend = partial(extend_by_path, target) if proposal.by_path else target.extend
                hidden_BND = extend(context.cache, proposal.tokens_BN, proposal.tree)
                logits_BNV = target.logits(hidden_BND)
                mark("score")
                context.watch("the target's", logits_BNV.amax(-1), proposal.tree.depth_BN)
                verdict = verifier.verify(proposal, warp(logits_BNV, warping) if warping else logits_BNV, rng)
                mark("verify")
                step = context.commit(proposal, verdict, hidden_BND, proposer.ahead(context, verdict, hidden_BND))
                proposer.commit(context, proposal, verdict)
                mark("commit")
            yield step
    finally:
        proposer.stop()


def decode_texts(
    target: LanguageModel,
    proposer: Proposer,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    rng: Rng,
) -> list[list[int]]:
    """The new tokens of each prompt, all that `generate` yields for it."""
    texts = [list[int]() for _ in prompts]
    for step in generate(target, proposer, verifier, prompts, limits, sampling, rng):
        for text, new in zip(texts, step.new_ids, strict=True):
            text += new
    return texts


def check_prompts(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError: an empty batch or prompt, a token outside the vocabulary."""
    if not prompts:
        raise ValueError("there is no prompt to decode: the batch is empty")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} has no tokens: give at least one")
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

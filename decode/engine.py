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
    examined_B: Tensor
    """int64; draft tokens looked at until the path ended."""
    rejected_B: Tensor
    """bool; the path ended because no child was accepted, not because there were none."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration did, on the host. All arrays have one entry a row."""

    new_ids: list[list[int]]
    """The tokens that each row gained; empty for rows that had ended before."""
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

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """The forwards behind a proposal of `nodes` nodes for one row: each a model or heads, and how many tokens it
        runs. By default none."""
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
        self.ids_BS = torch.from_numpy(self.host_ids_BS).to(target.device, copy=True)
        self.ended = np.zeros(len(ids), dtype=bool)
        self.accepted = np.zeros(len(ids), dtype=np.int64)
        self._rows_B1 = torch.arange(len(ids), device=target.device)[:, None]
        self._stop_ids = np.array(limits.stop_ids, dtype=np.int64)
        self.hidden_BD = prefill(target, self.cache, self.ids_BS, self.lengths)

    @property
    def root_B1(self) -> Tensor:
        """[B, 1] last committed token of each row."""
        return self.last_ids(1)

    def last_ids(self, count: int) -> Tensor:
        """[B, count] last committed tokens of each row; each row must have as many."""
        if len(self.lengths) == 1:
            return self.ids_BS[:, self.lengths[0] - count : self.lengths[0]]
        lengths_B1 = torch.tensor(self.lengths, device=self.ids_BS.device)[:, None]
        return self.ids_BS.gather(1, lengths_B1 - count + torch.arange(count, device=self.ids_BS.device))

    def commit(self, proposal: Proposal, verdict: Verdict, hidden_BND: Tensor) -> Step:
        """Keep the accepted path and the token after it; the one host synchronisation of a step.

        Rows that had ended keep their state. A row never gains a token past its stop token or its limit.
        """
        depth = verdict.path_BK.shape[1]
        # A pruned tree may have fewer nodes than levels: columns that are not kept may then name nodes beyond it.
        path_tokens_BK = proposal.tokens_BN.gather(1, verdict.path_BK.clamp(max=proposal.tokens_BN.shape[1] - 1))
        new_BK1 = torch.cat((path_tokens_BK, verdict.next_B[:, None]), 1)
        new_BK1.scatter_(1, verdict.accepted_B[:, None], verdict.next_B[:, None])
        counts_B3 = torch.stack((verdict.accepted_B, verdict.examined_B, verdict.rejected_B.long()), 1)
        host = torch.cat((new_BK1, counts_B3), 1).cpu().numpy()
        new, accepted = host[:, : depth + 1], host[:, depth + 1]
        kept = self._count_kept(new, accepted)

        if depth and not proposal.tree.is_chain:
            self.cache.move_to_front(verdict.path_BK)
        last_B1 = verdict.path_BK.gather(1, (verdict.accepted_B[:, None] - 1).clamp(min=0)) if depth else None
        root_B1 = torch.zeros_like(verdict.accepted_B[:, None])
        node_B1 = root_B1 if last_B1 is None else torch.where(verdict.accepted_B[:, None] > 0, last_B1, root_B1)
        self.hidden_BD = hidden_BND.gather(1, node_B1[..., None].expand(-1, -1, hidden_BND.shape[-1]))[:, 0]

        self._append(new_BK1)
        active = ~self.ended
        new_ids = [row[:count].tolist() for row, count in zip(new, kept, strict=True)]
        for row, ids in enumerate(new_ids):
            self.host_ids_BS[row, self.lengths[row] : self.lengths[row] + len(ids)] = ids
        self.lengths = [length + int(count) for length, count in zip(self.lengths, kept, strict=True)]
        self.ended = self.ended | (np.array(self.lengths) >= self._ends) | self._ends_with_stop(new, kept)
        self.cache.set_lengths([length - 1 for length in self.lengths])
        self.accepted = accepted
        return Step(new_ids, proposal.tokens_BN.shape[1], active, accepted, host[:, depth + 2], host[:, depth + 3] > 0)

    def _count_kept(self, new: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        kept = np.minimum(accepted + 1, self._ends - np.array(self.lengths))
        if len(self._stop_ids):
            stops = np.isin(new, self._stop_ids)
            first_stop = np.where(stops.any(1), stops.argmax(1), new.shape[1])
            kept = np.minimum(kept, first_stop + 1)
        return np.where(self.ended, 0, kept)

    def _ends_with_stop(self, new: np.ndarray, kept: np.ndarray) -> np.ndarray:
        if not len(self._stop_ids):
            return np.zeros_like(self.ended)
        last = new[np.arange(len(new)), np.maximum(kept - 1, 0)]
        return np.isin(last, self._stop_ids) & (kept > 0)

    def _append(self, new_BK1: Tensor) -> None:
        """Write all new tokens; those beyond a row's new length are never read and are written over later."""
        count = new_BK1.shape[1]
        if len(self.lengths) == 1:
            room = min(count, self.capacity - self.lengths[0])
            self.ids_BS[:, self.lengths[0] : self.lengths[0] + room] = new_BK1[:, :room]
            return
        lengths_B1 = torch.tensor(self.lengths, device=new_BK1.device)[:, None]
        slots_BK1 = (lengths_B1 + torch.arange(count, device=new_BK1.device)).clamp(max=self.capacity - 1)
        self.ids_BS[self._rows_B1, slots_BK1] = new_BK1


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

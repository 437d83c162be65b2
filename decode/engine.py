"""Decoding loop shared by all methods. Each step proposes, scores, verifies and commits tokens.

Shape letters: B batch, N tree nodes, M nodes that have children, K depth, S buffer slots, V vocabulary, D hidden size,
G width of a token's auxiliary hidden states, with or without its final hidden state.
"""

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
from .models.kv_cache import KVCache, to_device, to_host
from .rng import Rng
from .tree import Tree
from .warpers import Sampling, warp

PREFILL_TOKENS = 2048
"""Maximum number of prompt tokens of each row in a forward pass of the prefill."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Conditions that stop the generation of a sequence."""

    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a sequence. The stop token is included in the output."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, slots=True)
class Chains:
    """Draft chains stored in one tree, where chains share the nodes of their common prefixes."""

    nodes_BMK: Tensor
    """Index of the tree node that holds token k of chain m, int64."""
    probs_BMKV: Tensor
    """Distribution from which token k of chain m was sampled, float32."""


@dataclass(slots=True)
class Proposal:
    """Tree of draft tokens to score, with the data that the verifier needs."""

    tree: Tree
    tokens_BN: Tensor
    """Token id of each node, int64. Node 0 is the root."""
    draft_probs_BMV: Tensor | None = None
    """Drafter's distribution after each of the first M nodes, float32. None if draft tokens are deterministic."""
    valid_BN: Tensor | None = None
    """Bool mask of the nodes that contain a draft token. None if all nodes contain one."""
    draft_scores_BN: Tensor | None = None
    """Drafter's joint log-probability of the path to each node, float32."""
    chains: Chains | None = None
    levels: int = 0
    """Number of tree levels for which the verifier draws random numbers. 0 stands for the depth of the tree."""
    target_forwards: int = 0
    """Number of target forward passes that were needed to create this proposal."""
    by_path: bool = False
    """True to score each path of the tree as a separate row with its own cache, instead of using tree attention."""


@dataclass(slots=True)
class Verdict:
    """Accepted path of a proposal and the token that follows the path."""

    path_BK: Tensor
    """Accepted node at each depth, int64. Column i contains i + 1 if no node is accepted at that depth."""
    accepted_B: Tensor
    """Number of accepted draft tokens, int64."""
    next_B: Tensor
    """Token after the accepted path, int64: a replacement for a rejected token, or a bonus token."""
    examined_B: Tensor | None = None
    """Number of draft tokens that were examined, int64. If None, it is computed from the path."""
    rejected_B: Tensor | None = None
    """True for rows whose path ended with a rejection, bool. If None, it is computed from the path."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one decoding step, stored on the host. Each array contains one value per row."""

    new_ids: list[list[int]]
    """New tokens of each row. Empty for rows that had already ended."""
    forwards: int
    """Number of target forward passes, including those needed for the proposal."""
    nodes: int
    """Number of tree nodes that the target scored in each row."""
    active: np.ndarray
    """True for rows that had not ended before this step, bool."""
    accepted: np.ndarray
    examined: np.ndarray
    rejected: np.ndarray


class Proposer(ABC):
    """Base class of proposers, which draft a tree of tokens that continues the committed tokens."""

    gamma: int
    """Maximum number of draft tokens per step, for proposers that draft chains."""

    def capacity(self, limits: Limits) -> tuple[int, int]:
        """Return the maximum size and depth of a proposal (default: size and depth of a chain of `gamma` tokens).

        Returns:
            Maximum number of nodes, including the root, and number of positions needed after the last new token.
        """
        return self.gamma + 1, self.gamma

    def start(self, context: "Context") -> None:
        """Prepare to decode the prompts of `context`. `generate` calls this once, before the first proposal."""
        return

    @abstractmethod
    def propose(self, context: "Context") -> Proposal:
        """Draft the next token tree. Its root is the last committed token of each row."""

    def prefetch(self, context: "Context", verdict: Verdict, hidden_BND: Tensor) -> tuple[Tensor, ...]:
        """Compute tensors that the next proposal needs on the host, from the hidden states of the current tree.

        The engine copies these tensors to `Context.prefetched`. Profilers count their time as part of the commit phase.
        """
        return ()

    def commit(self, context: "Context", proposal: Proposal, verdict: Verdict) -> None:
        """Update the proposer's state after the context has committed the verdict."""
        return

    def stop(self) -> None:
        """Free the state of this decoding run."""
        return

    def forwards(self, nodes: float) -> list[tuple[Any, int]]:
        """List the forward passes needed to propose a tree of `nodes` nodes for one row (default: none).

        Returns:
            One pair for each forward pass: the model or heads (None for the target), and the number of tokens.
        """
        return []


class Verifier(ABC):
    """Base class of verifiers, which select the accepted path of a scored tree."""

    lossless: bool = True
    """True if the output follows the target's warped distribution."""
    score_type: Literal["probabilities", "unwarped", "logits"] = "probabilities"
    """Target scores that `verify` receives: warped probabilities, unwarped probabilities, or logits."""

    @abstractmethod
    def verify(self, proposal: Proposal, target_BNV: Tensor, rng: Rng) -> Verdict:
        """Select the accepted path of a proposal and the next token.

        Args:
            proposal: Scored token tree.
            target_BNV: Target scores of the token after each node, in the form that `score_type` specifies.
            rng: Random number generators of the batch.
        """


class Profile(Protocol):
    """Protocol of profilers, whose methods `generate` calls during each step."""

    def start(self) -> None:
        """Mark the start of a step."""

    def mark(self, phase: str) -> None:
        """Mark the end of a phase: draft, score, verify or commit."""


class Context:
    """State of a batch: committed tokens, KV cache and hidden states. `reach` is the result of `Proposer.capacity`."""

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
        # On a CPU, this tensor shares the memory of `host_ids_BS`.
        self.ids_BS = torch.from_numpy(self.host_ids_BS).to(target.device)
        self.ended = [False] * len(ids)
        self.accepted = [0] * len(ids)
        self.paths: list[list[int]] = []
        """Accepted nodes of each row in the last step."""
        self.chains: list[list[list[int]]] | None = None
        """Nodes of each chain of the last proposal, [B, M, K]. None if the proposal has no chains."""
        self.proposed: list[tuple[list[int], list[int]]] = []
        """Tokens and parents of the nodes of the last proposal, for each row."""
        self.prefetched: list[Any] = []
        """Host copies of the tensors that `Proposer.prefetch` returned."""
        self._stop_ids = frozenset(limits.stop_ids)
        self._last_node = 0  # last accepted node of the first row
        self.watch = Watch()
        """Detector of NaN and infinite logits."""
        states_BTG = prefill(target, self.cache, self.ids_BS, self.lengths)
        self._hidden: tuple[Tensor, Verdict | None] = _last_states(states_BTG, self.lengths)[:, None], None
        self.aux_BSG: Tensor | None = None
        """Auxiliary hidden states of all committed tokens except the root. None if the target does not return them."""
        if target.aux_layers:
            self.aux_BSG = states_BTG.new_zeros(len(ids), self.capacity, states_BTG.shape[2] - target.hidden_size)
            self.aux_BSG[:, : states_BTG.shape[1]] = states_BTG[:, :, : -target.hidden_size]

    @property
    def hidden_BD(self) -> Tensor:
        """Return the hidden state [B, D] that predicted the last committed token (zeros for a prompt of one token)."""
        hidden_BND, verdict = self._hidden
        if verdict is None or len(self.accepted) == 1:
            return hidden_BND[:, self._last_node, -self.target.hidden_size :]
        return hidden_after(verdict, hidden_BND, self.target.hidden_size)

    @property
    def root_B1(self) -> Tensor:
        """Return the last committed token of each row, [B, 1]."""
        return self.last_ids(1)

    def aux_at(self, slots_BM: Tensor) -> Tensor:
        """Return the auxiliary hidden states [B, M, G] of the committed tokens at the positions `slots_BM`."""
        assert self.aux_BSG is not None
        return self.aux_BSG.gather(1, slots_BM[..., None].expand(-1, -1, self.aux_BSG.shape[2]))

    def aux_before(self, count: int) -> Tensor:
        """Return the auxiliary hidden states [B, count, G] one position before each of the last `count` tokens."""
        assert self.aux_BSG is not None
        if len(self.lengths) == 1:
            return self.aux_BSG[:, self.lengths[0] - count - 1 : self.lengths[0] - 1]
        first_B1 = self.cache.lengths_B[:, None] - count
        return self.aux_at(first_B1 + torch.arange(count, device=first_B1.device))

    def last_ids(self, count: int) -> Tensor:
        """Return the last `count` committed tokens of each row, [B, count]. Rows must have at least `count` tokens."""
        if len(self.lengths) == 1:
            return self.ids_BS[:, self.lengths[0] - count : self.lengths[0]]
        after_B1 = self.cache.lengths_B[:, None] + 1  # the root is not in the cache
        return self.ids_BS.gather(1, after_B1 - count + torch.arange(count, device=self.ids_BS.device))

    def commit(self, proposal: Proposal, verdict: Verdict, hidden_BND: Tensor, prefetch: Sequence[Tensor] = ()) -> Step:
        """Commit the accepted paths and copy `prefetch` to the host, which is the only synchronisation of a step."""
        tree, depth = proposal.tree, verdict.path_BK.shape[1]
        chains_BMK = None if proposal.chains is None else proposal.chains.nodes_BMK
        optional = (proposal.valid_BN, verdict.examined_B, verdict.rejected_B, chains_BMK)
        required = (proposal.tokens_BN, verdict.path_BK, verdict.accepted_B, verdict.next_B, tree.parents_BN)
        tokens, paths, accepted, next_tokens, parents, watched, valid, examined, rejected, chains, *self.prefetched = (
            to_host(*required, self.watch.numbers(), *optional, *prefetch)
        )
        self.watch.end_step(watched, self.ended, self.lengths)
        active, before = np.array([not ended for ended in self.ended]), list(self.lengths)
        paths = [path[:count] for path, count in zip(paths, accepted, strict=True)]
        new_ids = [
            self._append(row, [*(row_tokens[node] for node in path), token])
            for row, (row_tokens, path, token) in enumerate(zip(tokens, paths, next_tokens, strict=True))
        ]
        row_parents = parents if len(parents) > 1 else parents * len(paths)
        self.proposed = list(zip(tokens, row_parents, strict=True))
        if examined is None:
            exists = valid or [None] * len(paths)
            counted = [_count_examined(*row) for row in zip(paths, row_parents, exists, strict=True)]
            examined, rejected = zip(*counted, strict=True)

        deepest = max(accepted)
        if not tree.is_chain and any(path != list(range(1, len(path) + 1)) for path in paths):
            self.cache.move_to_front(verdict.path_BK[:, :deepest])
        if self.ids_BS.device.type != "cpu":
            self._copy_to_device(before, depth + 1)
        if self.aux_BSG is not None:
            # Columns that are not accepted may refer to nodes that do not exist.
            path_BK = verdict.path_BK.clamp(max=hidden_BND.shape[1] - 1)
            path_BK1 = torch.nn.functional.pad(path_BK, (1, 0))[..., None]
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
        """Append new tokens to a row up to its stop token or length limit, and return the appended tokens."""
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

    def _copy_to_device(self, lengths: list[int], count: int) -> None:
        """Copy `count` tokens of each row to the device, starting at position `lengths[row]`."""
        slots = np.minimum(np.array(lengths)[:, None] + np.arange(count), self.capacity - 1)
        packed = torch.from_numpy(np.stack((slots, np.take_along_axis(self.host_ids_BS, slots, 1))))
        slots_BK1, new_BK1 = to_device(packed, self.ids_BS.device)
        self.ids_BS.scatter_(1, slots_BK1, new_BK1)


def hidden_after(verdict: Verdict, hidden_BND: Tensor, hidden_size: int) -> Tensor:
    """Return the hidden states [B, D] that predict the token after the accepted path. D is `hidden_size`."""
    hidden_BND = hidden_BND[..., -hidden_size:]
    node_B1 = torch.nn.functional.pad(verdict.path_BK, (1, 0)).gather(1, verdict.accepted_B[:, None])
    return hidden_BND.gather(1, node_B1[..., None].expand(-1, 1, hidden_BND.shape[2]))[:, 0]


def _count_examined(path: list[int], parents: list[int], valid: list[bool] | None) -> tuple[int, bool]:
    """Count the examined draft tokens of a row, and return whether its path ended with a rejection."""
    # Accepted nodes, their earlier siblings, and all children of the last node were examined.
    last_tried = dict(zip([0, *path], [*path, len(parents)], strict=True))  # last examined child by node
    end = path[-1] if path else 0
    examined, rejected = 0, False
    for node, parent in enumerate(parents):
        if node <= last_tried.get(parent, -1) and (valid is None or valid[node]):
            examined += 1
            rejected |= parent == end
    return examined, rejected


def prefill(model: LanguageModel, cache: KVCache, ids_BS: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run a model on all committed tokens except the last of each row, which is the root of the first tree.

    To limit activation memory, each forward has at most `PREFILL_TOKENS` tokens per row. Returns all hidden states.
    """
    longest, width = max(lengths) - 1, model.hidden_size * (len(model.aux_layers) + 1)
    states = [torch.zeros(len(lengths), 0, width, dtype=model.dtype, device=model.device)]
    parts = -(-longest // PREFILL_TOKENS)
    for part in range(parts):
        first, last = longest * part // parts, longest * (part + 1) // parts
        cache.set_lengths([first] * len(lengths))
        states.append(model.extend(cache, ids_BS[:, first:last]))
    cache.set_lengths([length - 1 for length in lengths])
    return torch.cat(states, 1) if parts != 1 else states[1]


def _last_states(states_BTG: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the hidden states [B, G] of the second-to-last token of each row (zeros for rows of one token)."""
    if not states_BTG.shape[1]:
        return states_BTG.new_zeros(len(lengths), states_BTG.shape[2])
    last_B = torch.tensor([max(length - 2, 0) for length in lengths], device=states_BTG.device)
    last_BG = states_BTG.gather(1, last_B[:, None, None].expand(-1, 1, states_BTG.shape[2]))[:, 0]
    is_single_B1 = torch.tensor(lengths, device=states_BTG.device)[:, None] < 2
    return last_BG.masked_fill(is_single_B1, 0.0)


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
    """Decode a batch of prompts and yield a `Step` after each iteration.

    Args:
        target: Target model.
        proposer: Proposer of the method.
        verifier: Verifier of the method.
        prompts: Token ids of each prompt. For encoder-decoders, these are the encoder inputs.
        limits: Stopping conditions.
        sampling: Temperature, top-k and top-p, which apply to the target and the drafter.
        rng: Random numbers, with one generator per row.
        profile: Profiler that is called during each step.

    Raises:
        ValueError: The batch or a prompt is empty. A token is outside the vocabulary. A prompt leaves too few positions
            for the new tokens and the tree. The drafter, heads or table belong to a different target. Logits are NaN or
            plus infinity, or all minus infinity.
    """
    warping = {"probabilities": sampling, "unwarped": Sampling(temperature=1.0), "logits": None}[verifier.score_type]
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
                step = context.commit(proposal, verdict, hidden_BND, proposer.prefetch(context, verdict, hidden_BND))
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
    """Decode a batch of prompts, and return the new tokens of each prompt."""
    texts = [list[int]() for _ in prompts]
    for step in generate(target, proposer, verifier, prompts, limits, sampling, rng):
        for text, new in zip(texts, step.new_ids, strict=True):
            text += new
    return texts


def check_prompts(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the batch or a prompt is empty, or a token is outside the target's vocabulary."""
    if not prompts:
        raise ValueError("the batch is empty: pass at least one prompt")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} has no tokens: pass at least one")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            invalid = next(token for token in prompt if not 0 <= token < target.vocab_size)
            raise ValueError(
                f"prompt {row} contains token {invalid}, but the target's vocabulary has {target.vocab_size} tokens"
            )


def _check_positions(target: LanguageModel, lengths: Sequence[int], limits: Limits, max_depth: int) -> None:
    for row, length in enumerate(lengths):
        # The root of the last tree may be the second-to-last token, and its deepest node is always scored.
        needed = length + limits.max_new_tokens - 1 + max_depth
        if needed > target.max_positions:
            raise ValueError(
                f"prompt {row} has {length} tokens; with {limits.max_new_tokens} new tokens and {max_depth} draft "
                f"tokens it needs {needed} positions, but the target has {target.max_positions}: reduce max_new_tokens"
            )

"""Predicted tokens per step of a method with any settings, from one recording of the target's texts.

For a given text it matters only which of its tokens were accepted drafts. A token at depth i of a step is one with a
probability that depends on its position and on the number of candidates (`recording.py`). So the number of steps of a
text is a Markov chain over its positions, with the exact expectation Σ U(t): U(0) = 1,
U(t) = Σ U(t - j) P(a step from t - j yields j tokens). At temperature 0 and for prediction heads the steps of the text
are counted.

Shape letters: T positions (of all texts in a row), K depth, S a whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...engine import Verifier
from ...methods import Parts, build_method
from ...proposers.draft_tree import DraftTree, NoDraft
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...proposers.ngrams import PromptLookup, TableChain, lookup
from ...verifiers.lossless import ExactBlock, ExactChain, GreedyMatch, MultiCandidate, Traversal
from .recording import Recording
from .steps import Floats, Prediction, replay_chances, replay_head_tree, replay_pruned_tree, replay_tokens


def predict(recording: Recording, parts: Parts, name: str, options: Mapping[str, Any]) -> Prediction | None:
    """Replay a method with these settings; return None if it cannot be replayed.

    Lossy, adaptive and multi-chain methods cannot, nor those with a part, or a second drafter, that was not recorded.

    Raises:
        ValueError: As `build_method`; more candidates than were recorded.
    """
    proposer, verifier = build_method(name, parts, recording.sampling, **options)
    if not verifier.lossless or options.get("drafter", 1) > 1:
        return None
    match proposer:
        case NoDraft():
            return replay_chances(recording, np.zeros((0, recording.positions)), 1)
        case DraftTree() if "drafter" in recording.drafts:
            return _replay_draft_tree(recording, proposer, verifier)
        case TableChain() if proposer.source.name in recording.drafts:
            rule = "without" if recording.sampling.greedy else "with"
            accept_T = chances(recording, proposer.source.name, 1, rule)
            return replay_chances(recording, np.tile(accept_T, (proposer.gamma, 1)), proposer.gamma + 1)
        case PromptLookup():
            return _replay_prompt_lookup(recording, proposer)
        case HeadTree() if recording.heads is not None:
            return replay_head_tree(recording, proposer)
        case PrunedHeadTree() if recording.heads is not None:
            return replay_pruned_tree(recording, proposer)
    return None


def chances(recording: Recording, source: str, candidates: int, rule: str) -> Floats:
    """Return P(the token of a position is an accepted draft | the text) with so many candidates, [T].

    Args:
        source: one of `Recording.drafts`.
        rule: `with` or `without` replacement.

    Raises:
        ValueError: More candidates than were recorded.
    """
    drafts = recording.drafts[source]
    if recording.sampling.greedy:
        # Independent draws from a one-hot distribution are all the same token.
        return np.asarray(drafts.rank_T < (candidates if rule == "without" else 1), dtype=np.float64)
    target_T, draft_T = drafts.target_T.astype(np.float64), drafts.draft_T.astype(np.float64)
    if candidates == 1:
        return np.asarray(np.minimum(1, draft_T / target_T))
    known = drafts.scale_TK.shape[1]
    if candidates > known:
        raise ValueError(f"{candidates} candidates per position are needed, but {known} were recorded")
    if rule == "with":
        return np.asarray(np.minimum(1, drafts.scale_TK[:, candidates - 1] * draft_T / target_T))
    return drafts.without_TK[:, candidates - 1].astype(np.float64)


def block_chances(recording: Recording, gamma: int) -> Floats:
    """Return, for block verification, P(a token at depth i is accepted | those before it are, the text), [K, T].

    Source: Sun et al. 2024, arXiv 2403.10444, algorithm 2. A draft of i tokens is kept with probability
    p_i = min(1, p_{i-1} p(x_i) / q(x_i)). So the first i tokens of a text are an accepted draft, given the text, with
    the minimum over j ≤ i of Π_{k ≤ j} q(x_k) / p(x_k), or 1.
    """
    drafts = recording.drafts["drafter"]
    ratio_T = drafts.draft_T.astype(np.float64) / drafts.target_T
    product_T, kept_T, accept_KT = np.ones_like(ratio_T), np.ones_like(ratio_T), np.zeros((gamma, len(ratio_T)))
    for level, accept_T in enumerate(accept_KT[:, : len(ratio_T)]):
        begins = slice(len(ratio_T) - level)  # steps that begin so far before a token
        product_T = product_T[begins] * ratio_T[level:]
        now_T = np.minimum(kept_T[begins], product_T)
        accept_T[level:] = np.divide(now_T, kept_T[begins], out=np.zeros_like(now_T), where=kept_T[begins] > 0)
        kept_T = now_T
    return accept_KT


def _replay_draft_tree(recording: Recording, proposer: DraftTree, verifier: Verifier) -> Prediction | None:
    if isinstance(verifier, (ExactBlock, Traversal)) and max(proposer.branching) == 1:
        return replay_chances(recording, block_chances(recording, len(proposer.branching)), proposer.tree.nodes)
    replacement = "with" if proposer.replacement else "without"
    rule = {GreedyMatch: "without", ExactChain: "with", MultiCandidate: replacement}.get(type(verifier))
    if rule is None:
        return None
    widths = {width: chances(recording, "drafter", width, rule) for width in set(proposer.branching)}
    return replay_chances(recording, np.stack([widths[width] for width in proposer.branching]), proposer.tree.nodes)


def _replay_prompt_lookup(recording: Recording, proposer: PromptLookup) -> Prediction:
    accepted, nodes = [], []
    for prompt, text in zip(recording.prompts, recording.texts, strict=True):
        ids_1S = np.array([[*prompt, *text]], dtype=np.int64)
        for length in range(len(prompt), ids_1S.shape[1]):
            index = int(lookup(ids_1S[:, :length], np.array([length]), proposer.max_ngram, proposer.min_ngram)[0])
            nodes.append(1 if index < 0 else 1 + proposer.gamma)
            source_K = index + np.arange(proposer.gamma) % max(length - index, 1)
            held_K = ids_1S[0, length : length + proposer.gamma]
            agrees_K = ids_1S[0, source_K[: len(held_K)]] == held_K if index >= 0 else np.zeros(1, dtype=bool)
            accepted.append(int(agrees_K.cumprod().sum()))
    return replay_tokens(recording, np.array(accepted), proposer.gamma, np.array(nodes, dtype=np.float64))

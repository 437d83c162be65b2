"""Tokens per step of any method with any settings, from one recording of the target's texts: nothing is decoded again.

On the way to a given text it matters only which of its tokens were accepted drafts. A token at depth i of a step is one
with a probability that depends on its position and on how many candidates stand there (`acceptance.py`), so the number
of steps that a text takes is a Markov chain over its positions with the exact expectation Σ U(t): U(0) = 1,
U(t) = Σ U(t - j) P(a step from t - j yields j tokens). Where nothing is left to chance, at temperature 0 and for
prediction heads, the steps of this very text are counted.

Shape letters: T positions (all texts' one after another), K depth, S a whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...engine import Proposer, Verifier
from ...methods import Parts, build_method
from ...models.base import LanguageModel
from ...proposers.chains import DraftChains
from ...proposers.draft_tree import DraftTree, NoDraft
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...proposers.ngrams import PromptLookup, TableChain, lookup
from ...verifiers.lossless import ExactBlock, ExactChain, GreedyMatch, MultiCandidate, SampleAndMatch, Traversal
from ...warpers import Sampling
from ..measure import Entry
from .heads import head_tree, pruned_tree
from .recording import Recording, record
from .steps import Floats, Prediction, replay_chances, replay_tokens


def predict_entries(recordings: Iterable[Recording], parts: Parts, entries: Iterable[Entry]) -> dict[str, Any]:
    """By label, what replay predicts of each entry: `Prediction.metrics`, or None.

    Nothing is predicted of lossy methods, of methods without a recording of their part, and of sampling that was not
    recorded (`recordings` holds one for each way of sampling, at most).
    """
    by_sampling = {recording.sampling: recording for recording in recordings}
    found: dict[str, Any] = {}
    for entry in entries:
        recording = by_sampling.get(entry.sampling)
        prediction = None if recording is None else predict(recording, parts, entry.method, entry.options)
        found[entry.label] = None if prediction is None else prediction.metrics()
    return found


def record_entries(
    target: LanguageModel,
    parts: Parts,
    entries: Sequence[Entry],
    prompts: Sequence[Sequence[int]],
    texts: Mapping[Sampling, Sequence[Sequence[int]]],
    *,
    seed: int = 0,
) -> list[Recording]:
    """What `predict_entries` needs: a recording for each way of sampling of `texts`, the target's own new tokens after
    each prompt, as autoregressive decoding wrote them."""
    recordings = []
    for sampling, written in texts.items():
        wanted = [build_method(each.method, parts, sampling, **each.options) for each in entries]
        proposers = [method.proposer for method, each in zip(wanted, entries, strict=True) if each.sampling == sampling]
        tables = [proposer.source for proposer in proposers if isinstance(proposer, TableChain)]
        needs = [_needs(proposer) for proposer in proposers]
        recordings.append(
            record(
                target,
                parts,
                prompts,
                written,
                sampling,
                candidates=max((need[0] for need in needs), default=1),
                head_candidates=max((need[1] for need in needs), default=1),
                tables=tuple(dict.fromkeys(tables)),
                seed=seed,
            )
        )
    return recordings


def _needs(proposer: Proposer) -> tuple[int, int]:
    """How many candidates, and candidates of a head, replay must know of."""
    if isinstance(proposer, DraftTree):
        return max(proposer.branching), 1
    if isinstance(proposer, PrunedHeadTree):
        return 1, proposer.candidates
    return 1, proposer.tree.nodes if isinstance(proposer, HeadTree) else 1


def predict(recording: Recording, parts: Parts, name: str, options: Mapping[str, Any]) -> Prediction | None:
    """Replay a method with these settings; None for methods that cannot be replayed: lossy ones, adaptive chains,
    look-up beside a model, chains of several drafters, above temperature 0 several chains of one, and those whose part
    was not recorded, as all drafters but the first. Raises ValueError: what `build_method` raises; more candidates than
    were recorded."""
    proposer, verifier = build_method(name, parts, recording.sampling, **options)
    if not verifier.lossless or options.get("drafter", 1) > 1:
        return None
    match proposer:
        case NoDraft():
            return replay_chances(recording, np.zeros((0, recording.positions)), 1)
        case DraftTree() if "drafter" in recording.drafts:
            return _draft_tree(recording, proposer, verifier)
        case DraftChains() if "drafter" in recording.drafts:
            return _chains(recording, proposer)
        case TableChain() if proposer.source.name in recording.drafts:
            return _table_chain(recording, proposer)
        case PromptLookup():
            return _prompt_lookup(recording, proposer)
        case HeadTree() if recording.heads is not None:
            return head_tree(recording, proposer)
        case PrunedHeadTree() if recording.heads is not None:
            return pruned_tree(recording, proposer)
    return None


def chances(recording: Recording, source: str, candidates: int, rule: str) -> Floats:
    """P(the token of a position is an accepted draft | the text) with so many candidates, [T].

    Args:
        source: of the drafts, one of `Recording.drafts`.
        rule: `with` or `without` replacement (residual sampling), `naive with` or `naive without` (MCNS).

    Raises ValueError: more candidates than were recorded.
    """
    drafts = recording.drafts[source]
    if recording.sampling.greedy:
        # Independent draws from a one-hot distribution are all the same token.
        return np.asarray(drafts.rank_T < (1 if "without" not in rule else candidates), dtype=np.float64)
    target_T, draft_T = drafts.target_T.astype(np.float64), drafts.draft_T.astype(np.float64)
    if rule == "naive with":
        return np.asarray(1 - (1 - draft_T) ** candidates)
    if candidates == 1 and not rule.startswith("naive"):
        return np.asarray(np.minimum(1, draft_T / target_T))
    known = drafts.scale_TK.shape[1]
    if candidates > known:
        raise ValueError(f"{candidates} candidates a position: {known} were recorded")
    if rule == "with":
        return np.asarray(np.minimum(1, drafts.scale_TK[:, candidates - 1] * draft_T / target_T))
    column_TK = drafts.without_TK if rule == "without" else drafts.drawn_TK
    return column_TK[:, candidates - 1].astype(np.float64)


def block_chances(recording: Recording, gamma: int) -> Floats:
    """As `chances` of a chain that is verified as a block: of a token at each depth, if those before it were accepted,
    [K, T].

    Source: Sun et al. 2024, arXiv 2403.10444, algorithm 2: a draft of i tokens is kept with a probability p_i = min(1,
    p_{i-1} p(x_i) / q(x_i)), whatever follows it. So the first i tokens of a text are an accepted draft, given the
    text, with min over j up to i of Π_{k ≤ j} q(x_k) / p(x_k), or 1; and what follows them is the target's."""
    drafts = recording.drafts["drafter"]
    ratio_T = drafts.draft_T.astype(np.float64) / drafts.target_T
    product_T, kept_T, accept_KT = np.ones_like(ratio_T), np.ones_like(ratio_T), np.zeros((gamma, len(ratio_T)))
    for level, accept_T in enumerate(accept_KT[:, : len(ratio_T)]):
        begins = slice(len(ratio_T) - level)  # steps that begin so far before a token; what crosses texts counts not
        product_T = product_T[begins] * ratio_T[level:]
        now_T = np.minimum(kept_T[begins], product_T)
        accept_T[level:] = np.divide(now_T, kept_T[begins], out=np.zeros_like(now_T), where=kept_T[begins] > 0)
        kept_T = now_T
    return accept_KT


def _draft_tree(recording: Recording, proposer: DraftTree, verifier: Verifier) -> Prediction | None:
    if isinstance(verifier, (ExactBlock, Traversal)) and max(proposer.branching) == 1:
        return replay_chances(recording, block_chances(recording, len(proposer.branching)), proposer.tree.nodes)
    replacement = "with" if proposer.replacement else "without"
    rules = {GreedyMatch: "without", ExactChain: "with", MultiCandidate: replacement}
    rule = (rules | {SampleAndMatch: f"naive {replacement}"}).get(type(verifier))
    if rule is None:
        return None
    widths = {width: chances(recording, "drafter", width, rule) for width in set(proposer.branching)}
    return replay_chances(recording, np.stack([widths[width] for width in proposer.branching]), proposer.tree.nodes)


def _table_chain(recording: Recording, proposer: TableChain) -> Prediction:
    accept_T = chances(recording, proposer.source.name, 1, "without" if recording.sampling.greedy else "with")
    return replay_chances(recording, np.tile(accept_T, (proposer.gamma, 1)), proposer.gamma + 1)


def _chains(recording: Recording, proposer: DraftChains) -> Prediction | None:
    """Chains of one drafter at temperature 0, where all of them are the same."""
    if len(proposer.models) > 1 or not recording.sampling.greedy:
        return None
    accept_T = chances(recording, "drafter", 1, "without")
    nodes = 1 + proposer.per_model * proposer.gamma
    return replay_chances(recording, np.tile(accept_T, (proposer.gamma, 1)), nodes)


def _prompt_lookup(recording: Recording, proposer: PromptLookup) -> Prediction:
    accepted, nodes = [], []
    for prompt, text in zip(recording.prompts, recording.texts, strict=True):
        ids_1S = np.array([[*prompt, *text]], dtype=np.int64)
        for length in range(len(prompt), ids_1S.shape[1]):
            index = int(lookup(ids_1S[:, :length], np.array([length]), proposer.longest, proposer.shortest)[0])
            nodes.append(1 if index < 0 else 1 + proposer.gamma)
            source_K = index + np.arange(proposer.gamma) % max(length - index, 1)
            held_K = ids_1S[0, length : length + proposer.gamma]
            agrees_K = ids_1S[0, source_K[: len(held_K)]] == held_K if index >= 0 else np.zeros(1, dtype=bool)
            accepted.append(int(agrees_K.cumprod().sum()))
    accepted_T, nodes_T = np.array(accepted), np.array(nodes)
    tried_T = np.minimum(accepted_T + 1, nodes_T - 1)
    return replay_tokens(recording, accepted_T, tried_T, proposer.gamma, nodes_T.astype(np.float64))

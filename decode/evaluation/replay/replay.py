"""Tokens per step of any method with any settings, from one recording of the target's texts: nothing is decoded again.

Lossless decoding writes text that the target could have written by itself, and on the way to a given text it matters
only which of its tokens were accepted drafts. Given the text, a token at depth i of a step is one with a probability
that depends on its position and on how many candidates stand there (`acceptance.py`); whatever was proposed beside the
text is never looked at again. So the number of steps that a text takes is a Markov chain over its positions, and its
expectation is an exact sum: U(0) = 1, U(t) = Σ U(t - j) P(a step from t - j yields j tokens), steps = Σ U(t). Where
nothing is left to chance, at temperature 0 and for prediction heads, the steps of this very text are counted.

Shape letters: B texts, T positions (padded to the longest text, or all texts' one after another), K depth, M chains,
A attempts, N how many chains hold a token, X anything, S states of the chains in play.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...engine import Proposer, Verifier
from ...methods import Parts, build_method, method_options
from ...models.base import LanguageModel
from ...proposers.adaptive import AdaptiveChain
from ...proposers.chains import DraftChains
from ...proposers.draft_tree import DraftTree, NoDraft
from ...proposers.head_trees import HeadTree, PrunedHeadTree
from ...proposers.ngrams import PromptLookup, TableChain, lookup
from ...verifiers.lossless import ExactChain, GreedyMatch, KSequential, MultiCandidate, SampleAndMatch
from ...warpers import Sampling
from ..measure import Entry
from .heads import head_tree, pruned_tree
from .recording import Drafts, Recording, TableSource, record
from .steps import Floats, Prediction, by_text, replay_chances, replay_tokens, shift, summary


def predict_entries(recordings: Iterable[Recording], parts: Parts, entries: Iterable[Entry]) -> dict[str, Any]:
    """By label, what replay says of each entry: `Prediction.metrics`, or None where it says nothing.

    Nothing is said of lossy methods, whose text is not the target's, of methods without a recording of their part, and
    of sampling that was not recorded.

    Args:
        recordings: one for each way of sampling among the entries, at most.
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
    """What `predict_entries` needs for these entries: a recording for each way of sampling.

    Args:
        texts: by sampling, the target's own new tokens after each prompt, as autoregressive decoding wrote them.
    """
    recordings = []
    for sampling, written in texts.items():
        wanted = [build_method(each.method, parts, sampling, **each.options) for each in entries]
        proposers = [method.proposer for method, each in zip(wanted, entries, strict=True) if each.sampling == sampling]
        tables = [TableSource.of(proposer) for proposer in proposers if isinstance(proposer, TableChain)]
        needs = [_needs(proposer) for proposer in proposers]
        recordings.append(
            record(
                target,
                parts,
                prompts,
                written,
                sampling,
                candidates=max((need[0] for need in needs), default=1),
                chains=max((need[1] for need in needs), default=1),
                head_candidates=max((need[2] for need in needs), default=1),
                tables=tuple(dict.fromkeys(tables)),
                seed=seed,
            )
        )
    return recordings


def _needs(proposer: Proposer) -> tuple[int, int, int]:
    """How many candidates, chains and candidates of a head replay must know of."""
    if isinstance(proposer, DraftTree):
        return max(proposer.branching), 1, 1
    if isinstance(proposer, DraftChains):
        return proposer.per_model, proposer.per_model, 1
    if isinstance(proposer, PrunedHeadTree):
        return 1, 1, proposer.candidates
    if isinstance(proposer, HeadTree):
        return 1, 1, proposer.tree.nodes
    return 1, 1, 1


def predict(recording: Recording, parts: Parts, name: str, options: Mapping[str, Any]) -> Prediction | None:
    """Replay a method with these settings; None for methods that cannot be replayed.

    Those are lossy methods, chains of several drafters, chains that learn while they draft, candidates without
    replacement that are matched with a sample, and whatever drafts from a part that was not recorded.

    Raises:
        ValueError: what `build_method` raises; more candidates or chains than were recorded.
    """
    proposer, verifier = build_method(name, parts, recording.sampling, **options)
    if not verifier.lossless:
        return None
    replay = _REPLAYS.get(type(proposer))
    if replay is None or not _recorded(recording, proposer):
        return None
    return replay(recording, proposer, verifier, method_options(name, dict(options)))


def _recorded(recording: Recording, proposer: Proposer) -> bool:
    """Whether what the proposer drafts from was looked at."""
    if isinstance(proposer, (DraftTree, DraftChains, AdaptiveChain)):
        return "drafter" in recording.drafts
    if isinstance(proposer, TableChain):
        return TableSource.of(proposer).name in recording.drafts
    return recording.heads is not None or not isinstance(proposer, (HeadTree, PrunedHeadTree))


def chances(recording: Recording, source: str, candidates: int, rule: str) -> Floats:
    """P(the token of a position is an accepted draft | the text) with so many candidates, [T].

    Args:
        source: of the drafts, one of `Recording.drafts`.
        rule: `with` or `without` replacement (residual sampling), `naive` with replacement (MCNS).

    Raises:
        ValueError: more candidates than were recorded.
    """
    drafts = _drafts(recording, source)
    if recording.sampling.greedy:
        # Independent draws from a one-hot distribution are all the same token.
        return np.asarray(drafts.rank_T < (1 if "without" not in rule else candidates), dtype=np.float64)
    target_T, draft_T = drafts.target_T.astype(np.float64), drafts.draft_T.astype(np.float64)
    if rule == "naive":
        return np.asarray(1 - (1 - draft_T) ** candidates)
    if candidates == 1:
        return np.asarray(np.minimum(1, draft_T / target_T))
    known = drafts.scale_TK.shape[1]
    if candidates > known:
        raise ValueError(f"{candidates} candidates a position: {known} were recorded")
    if rule == "with":
        return np.asarray(np.minimum(1, drafts.scale_TK[:, candidates - 1] * draft_T / target_T))
    return drafts.without_TK[:, candidates - 1].astype(np.float64)


def _drafts(recording: Recording, source: str) -> Drafts:
    if source not in recording.drafts:
        raise ValueError(f"no drafts of {source!r} were recorded; there are: {', '.join(recording.drafts) or 'none'}")
    return recording.drafts[source]


def _nothing(recording: Recording, proposer: NoDraft, verifier: Verifier, options: Mapping[str, Any]) -> Prediction:
    return replay_chances(recording, np.zeros((0, recording.positions)), 1)


def _draft_tree(
    recording: Recording, proposer: DraftTree, verifier: Verifier, options: Mapping[str, Any]
) -> Prediction | None:
    replacement = proposer.replacement
    rules = {GreedyMatch: "without", ExactChain: "with", MultiCandidate: "with" if replacement else "without"}
    if replacement:
        rules[SampleAndMatch] = "naive"
    rule = rules.get(type(verifier))
    if rule is None:
        return None
    widths = {width: chances(recording, "drafter", width, rule) for width in set(proposer.branching)}
    return replay_chances(recording, np.stack([widths[width] for width in proposer.branching]), proposer.tree.nodes)


def _table_chain(
    recording: Recording, proposer: TableChain, verifier: Verifier, options: Mapping[str, Any]
) -> Prediction | None:
    source = TableSource.of(proposer).name
    accept_T = chances(recording, source, 1, "without" if recording.sampling.greedy else "with")
    return replay_chances(recording, np.tile(accept_T, (proposer.gamma, 1)), proposer.gamma + 1)


def _adaptive(
    recording: Recording, proposer: AdaptiveChain, verifier: Verifier, options: Mapping[str, Any]
) -> Prediction | None:
    """Chains that end where a policy says so.

    A policy looks at the distributions along its own draft, which is the text as long as everything is accepted: what a
    step accepts is known exactly. How far a chain goes on after its first refused token is taken from the text, which
    says a little too much or too little of nodes, and nothing of tokens.
    """
    drafts, gamma = _drafts(recording, "drafter"), proposer.gamma
    accept_T = chances(recording, "drafter", 1, "with")
    if options["policy"] == "confidence":
        drafted_BT = _confident_lengths(recording, drafts, gamma, options["threshold"])
    elif options["policy"] == "oracle":
        drafted_BT = _oracle_lengths(recording, drafts, gamma, options["cost"])
    else:
        return None
    inside_BT = np.arange(drafted_BT.shape[1]) < recording.lengths[:, None]
    accept_KT = np.tile(accept_T, (gamma, 1))
    return replay_chances(recording, accept_KT, 1 + drafted_BT[inside_BT], drafted_BT)


def _confident_lengths(recording: Recording, drafts: Drafts, gamma: int, threshold: float) -> Floats:
    """[B, T] draft tokens of a step from every position: `adaptive.Confidence`."""
    sure_BT = by_text((drafts.confidence_T >= threshold).astype(np.float64), recording.lengths)
    open_BT, drafted_BT = np.ones_like(sure_BT), np.zeros_like(sure_BT)
    for level in range(gamma):
        open_BT = open_BT * shift(sure_BT, level)
        drafted_BT += open_BT
    return drafted_BT


def _oracle_lengths(recording: Recording, drafts: Drafts, gamma: int, cost: float) -> Floats:
    """[B, T] the same for `adaptive.Oracle`, whose predictions are 1 - TV(p, q)."""
    accept_BT = by_text(1 - drafts.variation_T.astype(np.float64), recording.lengths)
    open_BT, drafted_BT = np.ones_like(accept_BT), np.zeros_like(accept_BT)
    reach_BT, expected_BT = np.ones_like(accept_BT), np.ones_like(accept_BT)
    for level in range(gamma):
        reach_BT = reach_BT * shift(accept_BT, level)
        open_BT = open_BT * (reach_BT / cost > expected_BT / (1 + cost * level))
        expected_BT = expected_BT + reach_BT
        drafted_BT += open_BT
    return drafted_BT


def _chains(
    recording: Recording, proposer: DraftChains, verifier: Verifier, options: Mapping[str, Any]
) -> Prediction | None:
    """Chains of one drafter, of which those that agree with what was accepted stay in play.

    Nodes are counted as if no two chains shared one.
    """
    if len(proposer.models) > 1:
        return None
    nodes = 1 + proposer.per_model * proposer.gamma
    if recording.sampling.greedy:
        accept_T = chances(recording, "drafter", 1, "without")
        return replay_chances(recording, np.tile(accept_T, (proposer.gamma, 1)), nodes)
    drafts, count = _drafts(recording, "drafter"), proposer.per_model
    known = min(drafts.rho_TM.shape[1], drafts.scale_TK.shape[1])
    if count > known:
        raise ValueError(f"{count} chains: {known} were recorded")
    attempts = _k_seq_attempts if type(verifier) is KSequential else _residual_attempts
    moves_TMM = agreeing(drafts, count, attempts)
    return _through_states(recording, moves_TMM, proposer.gamma, nodes)


def _through_states(recording: Recording, moves_TSS: Floats, gamma: int, nodes: int) -> Prediction:
    """Steps that begin in the last state, and whose every accepted token leads from a state to another."""
    states = moves_TSS.shape[1]
    moves_BTX = np.stack([by_text(column, recording.lengths) for column in moves_TSS.reshape(-1, states**2).T], -1)
    state_BTS = np.zeros((*moves_BTX.shape[:2], states))
    state_BTS[..., -1] = 1.0
    reached, yields = [state_BTS.sum(-1)], []
    for level in range(gamma):
        shifted = np.stack([shift(moves_BTX[..., each], level) for each in range(states**2)], -1)
        state_BTS = np.einsum("bts,btsn->btn", state_BTS, shifted.reshape(*shifted.shape[:2], states, states))
        reached.append(state_BTS.sum(-1))
        yields.append(reached[-2] - reached[-1])
    return summary(recording, np.stack([*yields, reached[-1]], -1), np.stack(reached, -1), nodes)


Attempts = Callable[[Drafts, int], tuple[Floats, Floats, Floats]]


def agreeing(drafts: Drafts, count: int, attempts: Attempts) -> Floats:
    """[T, M, M]: with m + 1 chains in play, P(one of them accepted, n + 1 of them hold its token | the token).

    Chains are tried one after another. One that is refused may hold the token all the same, or another chance gave it
    another; those after the accepted one hold it with probability q(y).
    """
    draft_T = drafts.draft_T.astype(np.float64)
    moves_TMM = np.zeros((len(draft_T), count, count))
    for chains in range(1, count + 1):
        accept_TA, same_TA, other_TA = attempts(drafts, chains)
        before_TN = np.ones((len(draft_T), 1))  # refused so far, by how many of them hold the token
        for place in range(chains):
            holding_TN = accept_TA[:, place, None] * before_TN
            for _ in range(chains - place - 1):
                holding_TN = _one_more(holding_TN, draft_T, 1 - draft_T)
            moves_TMM[:, chains - 1, : holding_TN.shape[1]] += holding_TN
            before_TN = _one_more(before_TN, same_TA[:, place], other_TA[:, place])
    target_T = drafts.target_T.astype(np.float64)
    return np.asarray(moves_TMM / target_T[:, None, None])


def _one_more(counts_TN: Floats, same_T: Floats, other_T: Floats) -> Floats:
    """A distribution over how many hold the token, after one more chain."""
    wider_TN = np.zeros((len(counts_TN), counts_TN.shape[1] + 1))
    wider_TN[:, :-1] += counts_TN * other_T[:, None]
    wider_TN[:, 1:] += counts_TN * same_T[:, None]
    return wider_TN


def _k_seq_attempts(drafts: Drafts, chains: int) -> tuple[Floats, Floats, Floats]:
    """P(accepted with y), P(refused with y), P(refused with another) of each chain in turn: SpecTr's rule."""
    target_T, draft_T = drafts.target_T.astype(np.float64), drafts.draft_T.astype(np.float64)
    rho_T, beta_T = (part_TM[:, chains - 1].astype(np.float64) for part_TM in (drafts.rho_TM, drafts.beta_TM))
    accept_T = np.minimum(draft_T, target_T / rho_T)
    same_T = draft_T - accept_T
    other_T = np.maximum(1 - beta_T - same_T, 0)
    return tuple(np.tile(part_T[:, None], (1, chains)) for part_T in (accept_T, same_T, other_T))  # type: ignore[return-value]


def _residual_attempts(drafts: Drafts, chains: int) -> tuple[Floats, Floats, Floats]:
    """The same where each chain is tried against what the ones before it left of p (SpecInfer with one drafter)."""
    target_T1: Floats = drafts.target_T.astype(np.float64)[:, None]
    draft_T1: Floats = drafts.draft_T.astype(np.float64)[:, None]
    scale_TA: Floats = np.concatenate((np.zeros_like(target_T1), drafts.scale_TK[:, : chains - 1]), 1)
    mass_TA: Floats = np.concatenate((np.ones_like(target_T1), drafts.left_TK[:, :chains]), 1)
    left_TA = np.maximum(target_T1 - scale_TA * draft_T1, 0) / np.maximum(mass_TA[:, :-1], 1e-300)
    accept_TA = np.minimum(draft_T1, left_TA)
    refused_TA: Floats = mass_TA[:, 1:] / np.maximum(mass_TA[:, :-1], 1e-300)
    same_TA = draft_T1 - accept_TA
    # In terms of what is drawn from p: what came before is part of the chance.
    return accept_TA, same_TA, np.maximum(refused_TA - same_TA, 0)


def _prompt_lookup(
    recording: Recording, proposer: PromptLookup, verifier: Verifier, options: Mapping[str, Any]
) -> Prediction:
    accepted, nodes = [], []
    for prompt, text in zip(recording.prompts, recording.texts, strict=True):
        ids_1S = np.array([[*prompt, *text]], dtype=np.int64)
        for length in range(len(prompt), ids_1S.shape[1]):
            place = int(lookup(ids_1S[:, :length], np.array([length]), proposer.longest)[0])
            nodes.append(1 if place < 0 else 1 + proposer.gamma)
            source_K = place + np.arange(proposer.gamma) % max(length - place, 1)
            held_K = ids_1S[0, length : length + proposer.gamma]
            agrees_K = ids_1S[0, source_K[: len(held_K)]] == held_K if place >= 0 else np.zeros(1, dtype=bool)
            accepted.append(int(agrees_K.cumprod().sum()))
    accepted_T, nodes_T = np.array(accepted), np.array(nodes)
    tried_T = np.minimum(accepted_T + 1, nodes_T - 1)
    return replay_tokens(recording, accepted_T, tried_T, proposer.gamma, nodes_T.astype(np.float64))


_REPLAYS: dict[type[Proposer], Callable[..., Prediction | None]] = {
    NoDraft: _nothing,
    DraftTree: _draft_tree,
    TableChain: _table_chain,
    AdaptiveChain: _adaptive,
    DraftChains: _chains,
    PromptLookup: _prompt_lookup,
    HeadTree: head_tree,
    PrunedHeadTree: pruned_tree,
}

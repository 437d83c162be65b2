"""Trees that draft from a part, decoded: what its accuracy in training comes to at each depth, and what trees left out.

A tree holds several candidates a place, so that a draft may be right where the best guess is not; and not all of them
behind every path, so that a candidate may be right and not be there. Both are told apart depth by depth.

Shape letters: T positions of all texts, H heads, K depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....decode.evaluation.diagnose.agreement import Passage, Tried, bands, interval, tried
from ....decode.evaluation.measure import Entry
from ....decode.evaluation.replay.heads import head_ranks, paths_of
from ....decode.evaluation.replay.recording import Recording
from ....decode.evaluation.replay.replay import chances, predict, record_entries
from ....decode.evaluation.trace import trace
from ....decode.methods import Method, Parts, build_method, method_options, needs_of
from ....decode.proposers.draft_tree import DraftTree
from ....decode.proposers.head_trees import HeadTree, PrunedHeadTree
from ...assemble.evaluation import entries_of
from ...schema.evaluation import EvaluateRecipe
from .case import Case
from .cells import cells_of, entropies
from .stages import LEVEL, Measured

TREES = {"drafter": ("multi-candidate",), "heads": ("medusa", "slim-ss", "slim-s", "slim-l"), "table": ()}
"""What drafts trees from a part."""
_RANKS = (0, 1, 2, 4, 8, 16, 32, 64)


Share = tuple[float, tuple[float, float] | None]
"""With the interval of 99 %, over prompts."""


@dataclass(frozen=True)
class Tree:
    """A tree that was decoded, as the file has it, and what the verdict needs of it."""

    told: dict[str, Any]
    width: int
    """So many candidates of a head were looked at."""
    passed_over: Share
    """Of the drafts that decoding tried, the share that was refused where the token was among those candidates."""
    off: float
    """Tokens per step that are missing where decoding should take the very steps that are foretold; else 0."""


def asked_for(recipe: EvaluateRecipe, part: str) -> list[Entry]:
    """The recipe's rows that draft trees from a part."""
    return [
        entry
        for entry in entries_of(recipe)
        if entry.method in TREES[part] and all(getattr(recipe, need) for need in needs_of(entry.method, entry.options))
    ]


def trees_of(case: Case, found: Measured, asked: Sequence[Entry], trained_K: Sequence[float | None]) -> list[Tree]:
    """Every tree that is asked for; of heads, if there is none, Medusa's own as far as there are heads for it.

    Args:
        trained_K: how often each head's best guess was right in training.
    """
    heads = case.opened.parts.heads
    if found.part == "heads" and heads is not None and not asked:
        shape = "x".join(["4", "2", "1", "1"][: heads.num_heads])
        asked = [Entry("medusa", "medusa", {"tree": shape}, found.entry.sampling)]
    return [_tree(case, found, entry, trained_K) for entry in asked]


def _tree(case: Case, found: Measured, entry: Entry, trained_K: Sequence[float | None]) -> Tree:
    opened = case.opened.parts
    parts = Parts(**{need: getattr(opened, need) for need in needs_of(entry.method, entry.options)})
    method = build_method(entry.method, parts, entry.sampling, **entry.options)
    texts, rows, steps = _decoded(case, method, entry)
    recording = _recorded(case, parts, method, entry, texts)
    prediction = None if recording is None else predict(recording, parts, entry.method, entry.options)
    more: dict[str, list[str]] = {}
    passed: Share = (0.0, None)
    width = 0
    if recording is not None and recording.heads is not None and any(rows):
        rank_X, width = _ranks_of(recording, rows), recording.heads.token_THC.shape[2]
        more["head's rank of the token"] = [
            f"beyond {width}" if rank == width else name for rank, name in zip(rank_X, _named(rank_X), strict=True)
        ]
        passed = _passed_over(case, rows, rank_X, width)
    own = replace(found, entry=entry, texts=texts, tried=rows)
    examined = sum(map(len, rows))
    accepted = sum(each.accepted for row in rows for each in row)
    per_step = sum(len(passage.text) for passage in texts) / steps
    foretold = None if prediction is None else prediction.tokens_per_step
    told = {
        "label": entry.label,
        "method": entry.method,
        "options": entry.options,
        "temperature": entry.sampling.temperature,
        "tokens_per_step": per_step,
        "foretold": foretold,
        "nodes_per_step": None if prediction is None else prediction.nodes_per_step,
        "examined": examined,
        "accepted": accepted,
        "rejections": examined - accepted,
        "depths": _depths(method, method_options(entry.method, entry.options), recording, rows, trained_K),
        "cells": cells_of(case, own, entropies(case, own), None, more),
    }
    exact = foretold is not None and recording is not None and recording.heads is not None
    return Tree(told, width, passed, foretold - per_step if exact and foretold is not None else 0.0)


def _decoded(case: Case, method: Method, entry: Entry) -> tuple[list[Passage], list[list[Tried]], int]:
    """Texts, the drafts that were looked at, and the number of steps."""
    texts, rows, steps = [], [], 0
    with case.bar(f"decoding with {entry.label}", "prompts") as advance:
        for place, question in enumerate(case.questions):
            seed = case.recipe.seed + place
            traced = trace(case.target, method, question.ids, case.limits, entry.sampling, seed)
            text = [token for step in traced for token in (*step.accepted, step.next_id) if token is not None]
            texts.append(Passage(question.ids, text))
            rows.append(tried(traced))
            steps += len(traced)
            advance(place + 1, len(case.questions))
    return texts, rows, steps


def _recorded(case: Case, parts: Parts, method: Method, entry: Entry, texts: Sequence[Passage]) -> Recording | None:
    """The very texts that were decoded; None where they are not the target's own."""
    if not method.verifier.lossless:
        return None
    prompts, written = [list(each.prompt) for each in texts], [list(each.text) for each in texts]
    return record_entries(case.target, parts, [entry], prompts, {entry.sampling: written})[0]


def _ranks_of(recording: Recording, rows: Sequence[Sequence[Tried]]) -> NDArray[np.int64]:
    """What rank its head gave the text's token, of every draft that was looked at."""
    rank_TH = head_ranks(recording)
    starts = np.cumsum(recording.lengths) - recording.lengths
    flat = [(starts[number] + each.place - each.depth, each.depth) for number, row in enumerate(rows) for each in row]
    place_X, depth_X = np.array(flat, dtype=np.int64).T
    return rank_TH[place_X, depth_X]


def _named(rank_X: NDArray[np.int64]) -> list[str]:
    """Bands of ranks, counted from 1."""
    return bands(rank_X + 1, [edge + 1 for edge in _RANKS])


def _passed_over(case: Case, rows: Sequence[Sequence[Tried]], rank_X: NDArray[np.int64], width: int) -> Share:
    accepted_X = np.array([each.accepted for row in rows for each in row])
    passage_X = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    left_X = (rank_X < width) & ~accepted_X
    weights = (left_X.astype(np.float64), np.ones(len(left_X)))
    over_P, under_P = (np.bincount(passage_X, each_X, len(rows)).astype(np.float64) for each_X in weights)
    drawn_RG = case.resamples.ratios(over_P[:, None], under_P[:, None])
    return float(left_X.mean()), interval(None if drawn_RG is None else drawn_RG[:, 0], LEVEL)


def _depths(
    method: Method,
    options: Mapping[str, Any],
    recording: Recording | None,
    rows: Sequence[Sequence[Tried]],
    trained_K: Sequence[float | None],
) -> list[dict[str, Any]]:
    """Depth by depth: accuracy in training, of the best guess and of all candidates at every place of the text, and
    what was accepted of the drafts that decoding got to."""
    flat = [each for row in rows for each in row]
    told = []
    shares = [] if recording is None else _shares(method, options, recording)
    for depth in range(max(len(shares), 1 + max((each.depth for each in flat), default=-1))):
        here = [each.accepted for each in flat if each.depth == depth]
        best, among, width = shares[depth] if depth < len(shares) else (None, None, None)
        trained = trained_K[depth] if depth < len(trained_K) else None
        examined = {"examined": len(here), "accepted": sum(here) / len(here) if here else None}
        told.append(
            {"depth": depth + 1, "trained": trained, "best": best, "candidates": width, "among": among} | examined
        )
    return told


def _shares(
    method: Method, options: Mapping[str, Any], recording: Recording
) -> list[tuple[float | None, float | None, int]]:
    """By depth: how often the best guess is the text's token, how often one of the candidates, and how many these are;
    of every place of the text, whether or not decoding gets there."""
    proposer = method.proposer
    if isinstance(proposer, DraftTree):
        rule = "with" if proposer.replacement and not recording.sampling.greedy else "without"
        pairs = [(chances(recording, "drafter", width, rule), width) for width in proposer.branching]
        first = float(chances(recording, "drafter", 1, rule).mean())
        return [(first, float(chance_T.mean()), width) for chance_T, width in pairs]
    assert isinstance(proposer, (HeadTree, PrunedHeadTree))
    assert recording.heads is not None
    rank_TH, most = head_ranks(recording), recording.heads.token_THC.shape[2]
    if isinstance(proposer, PrunedHeadTree):
        widths = [min(proposer.candidates, most)] * proposer.depth
    else:
        paths = paths_of(proposer, options)
        depths = range(1, 1 + proposer.tree.max_depth)
        widths = [1 + max(path[-1] for path in paths if len(path) == depth) for depth in depths]
    left_T = np.concatenate([np.arange(length, 0, -1) for length in recording.lengths])
    told: list[tuple[float | None, float | None, int]] = []
    for head, width in enumerate(widths):
        inside_T = left_T > head
        rank_T = rank_TH[inside_T, head]
        told.append(
            (float((rank_T < 1).mean()), float((rank_T < width).mean()), width) if len(rank_T) else (None, None, width)
        )
    return told


def chain_depths(found: Measured) -> list[dict[str, Any]]:
    """Of heads: each head's accuracy by stage, and what was accepted of its drafts in real decoding."""
    told: list[dict[str, Any]] = []
    if found.part != "heads":
        return told
    flat = [each for row in found.tried for each in row]
    for depth in range(found.drafted):
        here = [each.accepted for each in flat if each.depth == depth]
        shares = {
            stage.key: stage.by_depth[depth]
            for stage in found.stages
            if depth < len(stage.by_depth) and stage.by_depth[depth] is not None
        }
        decoding = {"decoding": sum(here) / len(here)} if here else {}
        told.append({"head": depth + 1, "stages": shares | decoding, "examined": len(here)})
    return told

"""Search spaces: the settings of each method that the tuner tries.

Settings of most lossless methods are judged by replay. Those of `DECODED` are judged by decoding a few prompts.

Shape letters: B texts, T positions, H heads, J tokens per step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....checkpoints.storage.draft_vocabulary import mask_token
from ...methods import Options, Parts, method_config
from ...tree import parse_tree
from ...warpers import Sampling
from .recording import Recording
from .steps import head_ranks, visits, walk_tree, yields_of

Paths = list[tuple[int, ...]]

SAME_WHEN_GREEDY = {
    "batch-speculative": "speculative",
    "spectr": "speculative",
    "specinfer": "speculative",
    "relaxed-uno": "relaxed-opt",
}
"""Methods that do the same as another method at temperature 0."""
TYPICAL = "medusa, typical"
PARALLEL = "speculative, parallel"
VARIANTS: dict[str, tuple[str, Options]] = {
    TYPICAL: ("medusa", {"acceptance": "typical"}),
    PARALLEL: ("speculative", {"parallel": True}),
    "suffix, drafter": ("suffix", {"fallback": "drafter"}),
    "suffix, heads": ("suffix", {"fallback": "heads"}),
}
"""Variants that are tuned separately from their method: the method and the options that select them."""
LOSSY = ("bild", "relaxed-opt", "relaxed-uno", TYPICAL, "mjsd")
CHAINS = ("batch-speculative", "spectr", "specinfer")
TREES = ("dynamic-tree", "suffix", "suffix, drafter", "suffix, heads")
"""Methods whose trees grow with the draft probabilities."""
DECODED = ("adaptive", PARALLEL, *TREES, *CHAINS, *LOSSY)
"""Methods whose settings are judged by decoding."""
SLIM = ("slim-ss", "slim-s", "slim-l")

_WIDTHS = (1, 2, 3, 4, 6, 8)
_TREES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 63)
"""Sizes of Medusa's trees."""


@dataclass(frozen=True)
class Space:
    """Bounds of the search."""

    nodes: int = 64
    """Maximum number of tree nodes per step, including the root."""
    gamma: int = 12
    """Maximum length of a draft chain."""
    depth: int = 6
    """Maximum number of levels of a k-configuration."""
    candidates: int = 8
    """Maximum number of candidates per node, and of parallel chains."""
    head_candidates: int = 20
    """Maximum number of candidates per prediction head."""
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """Thresholds of MJSD."""
    confidences: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    """Confidence thresholds at which adaptive chains stop."""
    posteriors: tuple[float, ...] = (0.05, 0.02, 0.1, 0.2)
    """Minimum path probabilities of SLiM's trees and of `TREES`."""
    fallbacks: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    """Fallback thresholds τ₁ of BiLD."""
    rollbacks: tuple[float, ...] = (1.0, 2.0, 3.0, 5.0)
    """Rollback thresholds τ₂ of BiLD."""
    tolerances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    """ε of over-acceptance and of typical acceptance."""
    decoded_prompts: int = 8
    """Number of prompts with which settings of `DECODED` are judged."""
    probed_prompts: int = 4
    """Number of prompts with which the overhead of steps is measured."""


@dataclass(frozen=True)
class Setting:
    """A method with its options, and what is predicted for it."""

    method: str
    options: Options
    tokens_per_step: float
    standard_error: float
    nodes_per_step: float
    step_seconds: float = 0.0
    speedup: float = 0.0
    """Predicted speedup over autoregressive decoding, without prefill."""
    lossless: bool = True
    found_by: Literal["replay", "decoding"] = "replay"
    perplexity: float | None = None
    """Perplexity of the decoded text under the unwarped target; None if nothing was decoded."""


def k_configurations(nodes: int, depth: int, widths: Sequence[int] = _WIDTHS) -> Iterator[tuple[int, ...]]:
    """Generate all k-configurations that never widen within a node budget (root included), except chains.

    Source: multi-candidate paper, section 4.4 (monotonic rule, budget).
    """

    def deeper(branching: tuple[int, ...], level: int, total: int) -> Iterator[tuple[int, ...]]:
        for width in widths:
            wider = level * width
            if (branching and width > branching[-1]) or total + wider > nodes:
                continue
            longer = (*branching, width)
            if longer[0] > 1:
                yield longer
                if len(longer) < depth:
                    yield from deeper(longer, wider, total + wider)

    yield from deeper((), 1, 1)


def best_head_trees(recording: Recording, sizes: Sequence[int], rounds: int = 3) -> dict[int, Paths]:
    """Return, for each size (root not counted), the Medusa tree that accepts most of the recorded texts.

    The value of a path is how often the text follows it from the positions where steps begin. Those positions depend
    on the tree, so the tree is rebuilt a few times.
    """
    rank_TH = head_ranks(recording)
    assert recording.heads is not None
    width, found = recording.heads.token_THC.shape[2], {}
    for size in sizes:
        weight_T = np.ones(len(rank_TH))
        for _ in range(rounds):
            if not (paths := _best_paths(rank_TH, weight_T, width, size)):
                break
            found[size] = paths
            accepted_T = walk_tree(recording, *parse_tree(format_tree(paths)))
            begin_BT = visits(recording.lengths, yields_of(recording, accepted_T, rank_TH.shape[1]))
            weight_T = begin_BT[np.arange(begin_BT.shape[1]) < recording.lengths[:, None]]
    return found


def _best_paths(rank_TH: NDArray[np.int64], weight_T: NDArray[np.float64], width: int, size: int) -> Paths:
    values: list[tuple[float, int, tuple[int, ...]]] = []
    for depth in range(1, rank_TH.shape[1] + 1):
        known_T = (rank_TH[:, :depth] < width).all(1)
        rows, inverse = np.unique(rank_TH[known_T, :depth], axis=0, return_inverse=True)
        sums = np.bincount(inverse.ravel(), weight_T[known_T], minlength=len(rows))
        values += [
            (-value, depth, tuple(row)) for value, row in zip(sums.tolist(), rows.tolist(), strict=True) if value
        ]
    return [path for _, _, path in sorted(values)[:size]]


def format_tree(paths: Paths) -> str:
    """Write paths in the notation of `tree.parse_tree`."""
    text = ", ".join(".".join(map(str, path)) for path in paths)
    return text if set(text) & set(",.") else f"{text}, {text}"  # a single number would be a k-configuration


def is_decoded(name: str, parts: Parts) -> bool:
    """Return whether the settings of a method are judged by decoding, not by replay.

    Replay needs a drafter that reads only tokens of the target's vocabulary, unlike EAGLE-3.
    """
    drafter = parts.drafter
    if name != "speculative" or drafter is None:
        return name in DECODED
    return drafter.required_aux_layers is not None or drafter.translation is not None


def list_settings(
    name: str,
    sampling: Sampling,
    parts: Parts,
    space: Space,
    recording: Recording | None = None,
) -> list[Options]:
    """List the options of a method that the tuner tries.

    The recording selects the trees of heads. Without it placeholders are returned, which have the right count.
    """
    grid = (
        _decoded_grid(name, parts, sampling, space) if is_decoded(name, parts) else _replayed_grid(name, parts, space)
    )
    if "tree" in grid:
        sizes = [size for size in grid["tree"] if size < space.nodes]
        grid["tree"] = sizes if recording is None else map(format_tree, best_head_trees(recording, sizes).values())
    own = VARIANTS.get(name, (name, {}))[1]
    found = [own | dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if name == "speculative" and not sampling.greedy:  # block verification never accepts fewer tokens
        return [options | {"verification": "block"} for options in found]
    if name == TYPICAL:  # Medusa's rule: δ is the square root of ε
        return [options | {"delta": options["epsilon"] ** 0.5} for options in found]
    found = [each for each in found if each.get("min_ngram", 1) <= each.get("max_ngram", 3)]
    return [each for each in found if 1 + each.get("gamma", 0) * each.get("num_drafts", 1) <= space.nodes]


def _replayed_grid(name: str, parts: Parts, space: Space) -> dict[str, Iterable[Any]]:
    gammas = range(1, space.gamma + 1)
    if name == "prompt-lookup":
        return {"gamma": gammas, "max_ngram": (1, 2, 3, 4), "min_ngram": (1, 2, 3)}
    if name == "multi-candidate":
        widths = [width for width in _WIDTHS if width <= space.candidates]
        found = k_configurations(space.nodes, space.depth, widths)
        return {"k_config": ["x".join(map(str, branching)) for branching in found]}
    if name == "bpd":
        assert parts.heads is not None
        return {"max_depth": range(1, parts.heads.num_heads + 1)}
    if name == "medusa":
        return {"tree": _TREES}
    if name in SLIM:
        candidates = [count for count in (2, 4, 6, 10, 20) if count <= space.head_candidates]
        sequences = (1,) if name == "slim-ss" else (1, 2, 3, 4, 6, 8, 12, 16, 20, 32, 40)
        return {"num_sequences": sequences, "num_candidates": candidates, "min_prob": (0.0, space.posteriors[0])}
    assert name in ("speculative", "unigram", "bigram")
    return {"gamma": gammas}


def _decoded_grid(name: str, parts: Parts, sampling: Sampling, space: Space) -> dict[str, Iterable[Any]]:
    gammas = sorted({min(gamma, space.gamma) for gamma in (2, 4, 6)})
    if name in TREES:
        stores = ("none", "table") if parts.table is not None and parts.table.texts is not None else ("none",)
        own: dict[str, dict[str, Iterable[Any]]] = {
            "dynamic-tree": {"max_nodes": (4, 12), "width": (2, 4)},
            "suffix, drafter": {"draft_depth": (1, 3), "datastore": stores},
        }
        return own.get(name, {"max_nodes": (4, 8, 16), "datastore": stores}) | {"min_prob": space.posteriors}
    if name in CHAINS:
        several = [count for count in (2, 4, 8) if count <= space.candidates and not sampling.greedy]
        return {"gamma": gammas, "num_drafts": several or [1]}
    few = [gamma for gamma in (1, 2, 3, 4, 6, 8) if gamma <= space.gamma]
    grids: dict[str, dict[str, Iterable[Any]]] = {
        "speculative": {"gamma": few},
        "bild": {"fallback_threshold": space.fallbacks, "rollback_threshold": space.rollbacks},
        "adaptive": {"gamma": gammas, "policy": ("confidence",), "confidence_threshold": space.confidences},
        PARALLEL: {"gamma": few},
        "mjsd": {"gamma": gammas, "num_beams": (4,), "likelihood_threshold": space.thresholds},
        TYPICAL: {"tree": (4, 16, 48), "epsilon": space.tolerances},
    }
    return grids.get(name, {"gamma": gammas, "epsilon": space.tolerances})


def method_name(name: str) -> str:
    """Return the method that is tuned under a name such as `TYPICAL`."""
    return VARIANTS.get(name, (name, {}))[0]


def tunable_methods(parts: Parts, sampling: Sampling) -> list[str]:
    """List the methods worth tuning with these parts, without those that equal another one at temperature 0."""
    names = ["speculative", "multi-candidate", "adaptive", "unigram", "bigram", "prompt-lookup"]
    names += TREES
    names += [PARALLEL] if mask_token(getattr(parts.drafter, "config", None)) is not None else []
    names += ["bpd", "medusa", *SLIM, *LOSSY]
    names += [name for name in SAME_WHEN_GREEDY if name not in LOSSY]
    if sampling.greedy:
        names = [name for name in names if name not in (*SAME_WHEN_GREEDY, TYPICAL)]
    missing = {part for part in ("drafter", "heads", "table") if getattr(parts, part) is None}
    return [name for name in names if not missing & set(method_config(*VARIANTS.get(name, (name, {}))).needs)]

"""Search space of the tuner: the settings of each method, starting with the most promising ones."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...methods import Options, method_config

SAME_WHEN_GREEDY = {
    "batch-speculative": "speculative",
    "spectr": "speculative",
    "specinfer": "speculative",
    "relaxed-uno": "relaxed-opt",
}
"""Mapping from methods to the method that they are equivalent to at temperature 0."""
TYPICAL = "medusa, typical"
PARALLEL = "speculative, parallel"
VARIANTS: dict[str, tuple[str, Options]] = {
    TYPICAL: ("medusa", {"acceptance": "typical"}),
    PARALLEL: ("speculative", {"parallel": True}),
    "suffix, drafter": ("suffix", {"fallback": "drafter"}),
    "suffix, heads": ("suffix", {"fallback": "heads"}),
}
"""Mapping from variants that are tuned separately to their method and the options that select them."""

Grid = Mapping[str, Sequence[Any]]
_GAMMAS = (3, 2, 4, 1, 6, 8)
_TREES = ("2x1", "4x2x1x1", "3x2x1", "6x3x2x1", "10x4x3x2")
_EPSILONS = (0.1, 0.2, 0.05, 0.4)
_CONFIDENCES = (0.4, 0.6, 0.2, 0.8)
_CHAINS: Grid = {"gamma": (4, 2, 6), "num_drafts": (2, 4, 8)}
_RELAXED: Grid = {"gamma": (4, 2, 6), "epsilon": _EPSILONS}
GRIDS: dict[str, Grid] = {
    "speculative": {"gamma": _GAMMAS},
    PARALLEL: {"gamma": (3, 4, 2, 6, 8)},
    "suffix": {"max_nodes": (8, 4, 16), "min_prob": (0.1, 0.05, 0.2)},
    "suffix, drafter": {"max_nodes": (6, 11), "draft_depth": (2, 1, 3), "min_prob": (0.1, 0.03)},
    "suffix, heads": {"max_nodes": (8, 4, 16), "min_prob": (0.1, 0.05, 0.2)},
    "dynamic-tree": {"max_nodes": (6, 12, 24), "width": (2, 4), "min_prob": (0.1, 0.03), "expand_prob": (0.0, 0.5)},
    "multi-candidate": {"k_config": ("2x1x1", "2x2x1", "4x2x1x1", "3x1", "4x2x2x1", "8x2x1")},
    "adaptive": {"policy": ("confidence",), "gamma": (8, 4), "confidence_threshold": _CONFIDENCES},
    "prompt-lookup": {"gamma": (4, 8, 2), "min_ngram": (2, 1, 3)},
    "unigram": {"gamma": (1, 2)},
    "bigram": {"gamma": (1, 2, 3)},
    "medusa": {"tree": _TREES},
    TYPICAL: {"tree": _TREES, "epsilon": _EPSILONS},
    "bpd": {"max_depth": (1, 2, 3, 4, 5)},
    "slim-ss": {"num_candidates": (10, 4, 20), "min_prob": (0.0, 0.05)},
    "slim-s": {"num_sequences": (8, 4, 2, 16, 20), "min_prob": (0.05, 0.0)},
    "slim-l": {"num_sequences": (40, 32), "min_prob": (0.0, 0.05)},
    "spectr": _CHAINS,
    "specinfer": _CHAINS,
    "batch-speculative": _CHAINS,
    "relaxed-opt": _RELAXED,
    "relaxed-uno": _RELAXED,
    "bild": {"fallback_threshold": _CONFIDENCES, "rollback_threshold": (2.0, 1.0, 3.0, 5.0)},
    "mjsd": {"gamma": (4, 2, 6), "num_beams": (4,), "likelihood_threshold": (0.1, 0.2, 0.4, 0.8)},
}
"""Mapping from methods and variants to the candidate values of their options."""


@dataclass(frozen=True)
class Available:
    """Artifacts that are available to the tuned methods."""

    parts: frozenset[str]
    """Available artifacts: a subset of `drafter`, `heads` and `table`."""
    num_heads: int = 0
    has_texts: bool = False
    """True if the table contains texts for suffix decoding."""
    is_parallel: bool = False
    """True if the drafter was trained to draft all tokens with one forward (PARD)."""
    block_tokens: int | None = None
    """Number of draft tokens of a drafter that drafts blocks (DFlash); None for other drafters."""


def tunable_methods(available: Available, temperature: float) -> list[str]:
    """List the names in `GRIDS` that the artifacts allow, without methods that temperature 0 makes redundant."""
    names = [name for name in GRIDS if temperature > 0 or name not in (*SAME_WHEN_GREEDY, TYPICAL)]
    names = [name for name in names if name != PARALLEL or available.is_parallel]
    return [name for name in names if available.parts.issuperset(method_config(*VARIANTS.get(name, (name, {}))).needs)]


def list_settings(name: str, available: Available, temperature: float) -> list[tuple[str, Options]]:
    """List the settings to tune for a name in `GRIDS`, each as a method and its options."""
    method, options = VARIANTS.get(name, (name, {}))
    grid = dict(GRIDS[name])
    if "tree" in grid:
        grid["tree"] = list(dict.fromkeys("x".join(tree.split("x")[: available.num_heads]) for tree in grid["tree"]))
    if available.block_tokens is not None and "drafter" in method_config(method, options).needs:
        grid = _limit_depth(name, grid, available.block_tokens)
    if name == "bpd":
        grid["max_depth"] = range(1, available.num_heads + 1)
    if method == "suffix" and available.has_texts:
        options = options | {"datastore": "table"}
    if name == "speculative" and temperature > 0:  # block verification never accepts fewer tokens
        options = options | {"verification": "block"}
    settings = [options | dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if name == TYPICAL:  # Medusa's rule: δ is the square root of ε
        settings = [setting | {"delta": setting["epsilon"] ** 0.5} for setting in settings]
    return [(method, setting) for setting in settings]


def _limit_depth(name: str, grid: Grid, most: int) -> dict[str, Sequence[Any]]:
    """Limit the drafts of a grid to `most` tokens or levels, for drafters that draft them all with one forward."""
    if name == "speculative":
        return {"gamma": sorted(range(1, most + 1), key=lambda gamma: abs(gamma - 4))}
    limited = dict(grid) | ({"max_depth": (4, 8)} if name == "dynamic-tree" else {})
    for option in limited.keys() & {"gamma", "draft_depth", "max_depth"}:
        limited[option] = list(dict.fromkeys(min(value, most) for value in limited[option]))
    if "k_config" in limited:
        limited["k_config"] = list(dict.fromkeys("x".join(tree.split("x")[:most]) for tree in limited["k_config"]))
    return limited


def tuned_name(method: str, options: Mapping[str, Any], temperature: float) -> str:
    """Return the name of the method or variant in `GRIDS` to which a method with these options belongs."""
    for name, (base, selecting) in VARIANTS.items():
        if base == method and selecting.items() <= options.items() and not (name == TYPICAL and temperature == 0):
            return name
    return method


def interleave(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Interleave lists: the first items of all lists, then the second items, and so on."""
    return [item for row in itertools.zip_longest(*lists) for item in row if item is not None]


def format_setting(method: str, options: Mapping[str, Any]) -> str:
    """Return the label of a setting, such as `speculative gamma=4`."""
    values = [f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()]
    return " ".join([method, *values])

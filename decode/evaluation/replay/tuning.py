"""The best settings of each method: by replay under measured costs, or by decoding a small grid with a few prompts.

Of lossy methods, adaptive chains and several chains replay knows nothing: their settings are decoded, and a lossy
method's text is judged by the target.

Shape letters: B texts, T positions, H heads, J tokens a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....checkpoints.storage.draft_vocabulary import mask_token
from ...engine import Limits
from ...methods import Options, Parts, build_method, needs_of
from ...models.base import LanguageModel
from ...tree import parse_tree
from ...warpers import Sampling
from ..measure import decode
from ..metrics import total
from ..quality import perplexity
from .costs import CostModel
from .heads import head_ranks, walk_tree
from .recording import Recording
from .replay import predict
from .steps import by_text, ratio_error, visits

Paths = list[tuple[int, ...]]

SAME_WHEN_GREEDY = {
    "naive-multi-candidate": "multi-candidate",
    "batch-speculative": "speculative",
    "spectr": "speculative",
    "specinfer": "speculative",
    "relaxed-uno": "relaxed-opt",
}
"""Methods that at temperature 0 do the same as another."""
TYPICAL = "medusa, typical"
PARALLEL = "speculative, parallel"
VARIANTS: dict[str, tuple[str, Options]] = {
    TYPICAL: ("medusa", {"acceptance": "typical"}),
    PARALLEL: ("speculative", {"parallel": True}),
    "prompt-lookup, drafter": ("prompt-lookup", {"fallback": "drafter"}),
    "suffix, drafter": ("suffix", {"fallback": "drafter"}),
    "suffix, heads": ("suffix", {"fallback": "heads"}),
}
"""Variants that are tuned separately from their method: the method and the options that select them."""
LOSSY = ("bild", "relaxed-opt", "relaxed-uno", TYPICAL, "mjsd")
"""Lossy methods."""
PROBE_SETTINGS = 3
"""Settings of a method whose steps are timed, at most (`probes`)."""
CHAINS = ("batch-speculative", "spectr", "specinfer")
TREES = ("dynamic-tree", "suffix", "suffix, drafter", "suffix, heads")
"""As large as probabilities warrant."""
DECODED = ("adaptive", "prompt-lookup, drafter", PARALLEL, *TREES, *CHAINS, *LOSSY)
"""Methods whose settings are decoded to be judged."""
SLIM = ("slim-ss", "slim-s", "slim-l")

_WIDTHS = (1, 2, 3, 4, 6, 8)
_TREES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 63)
"""Nodes of Medusa's."""


@dataclass(frozen=True)
class Space:
    """How far the search goes."""

    nodes: int = 64
    """Tree nodes a step at most, the root included."""
    gamma: int = 12
    """The longest chain."""
    depth: int = 6
    """Levels of k-configurations."""
    candidates: int = 8
    """Of a node, and chains, at most."""
    head_candidates: int = 20
    """Of a head."""
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """Of MJSD."""
    confidences: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    """Below which adaptive chains stop."""
    posteriors: tuple[float, ...] = (0.05, 0.02, 0.1, 0.2)
    """Not above which paths are left out of SLiM's trees, and of `TREES`."""
    fallbacks: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    """Of BiLD: its τ₁."""
    rollbacks: tuple[float, ...] = (1.0, 2.0, 3.0, 5.0)
    """Of BiLD: its τ₂."""
    tolerances: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    """The ε of over-acceptance and of typical acceptance."""
    decoded_prompts: int = 8
    """Prompts that a setting is decoded with, where it must be."""


@dataclass(frozen=True)
class Choice:
    """A method with settings, and what is predicted of it."""

    method: str
    options: Options
    tokens_per_step: float
    standard_error: float
    nodes_per_step: float
    step_seconds: float
    speedup: float
    """Over autoregressive decoding, the reading of prompts left out."""
    lossless: bool = True
    found_by: Literal["replay", "decoding"] = "replay"
    perplexity: float | None = None
    """Of what was decoded, under the unwarped target; None where nothing was."""


def k_configurations(nodes: int, depth: int, widths: Sequence[int] = _WIDTHS) -> Iterator[tuple[int, ...]]:
    """All k-configurations that never widen, with at most so many nodes (the root included), chains left out.

    Source: multi-candidate paper, section 4.4 (monotonic rule, budget).
    """

    def deeper(branching: tuple[int, ...], level: int, total: int) -> Iterator[tuple[int, ...]]:
        for width in widths:
            if branching and width > branching[-1]:
                continue
            wider = level * width
            if total + wider > nodes:
                continue
            longer = (*branching, width)
            if longer[0] > 1:
                yield longer
                if len(longer) < depth:
                    yield from deeper(longer, wider, total + wider)

    yield from deeper((), 1, 1)


def best_head_trees(recording: Recording, sizes: Sequence[int], rounds: int = 3) -> dict[int, Paths]:
    """Medusa trees of so many nodes (the root not counted) that accept the most of the recorded texts.

    A path is worth how often the text follows it from where steps begin; the worthiest paths make a tree. Where steps
    begin depends on the tree, so it is built a few times over.
    """
    rank_TH = head_ranks(recording)
    assert recording.heads is not None
    width = recording.heads.token_THC.shape[2]
    found = {}
    for size in sizes:
        weight_T = np.ones(len(rank_TH))
        paths: Paths = []
        for _ in range(rounds):
            paths = _worthiest(rank_TH, weight_T, width, size)
            if not paths:
                break
            accepted_BT = by_text(walk_tree(recording, *parse_tree(tree_text(paths)))[0], recording.lengths)
            yield_BTJ = (accepted_BT[..., None] == np.arange(rank_TH.shape[1] + 1)).astype(np.float64)
            begin_BT = visits(recording.lengths, yield_BTJ)
            weight_T = begin_BT[np.arange(begin_BT.shape[1]) < recording.lengths[:, None]]
        if paths:
            found[size] = paths
    return found


def _worthiest(rank_TH: NDArray[np.int64], weight_T: NDArray[np.float64], width: int, size: int) -> Paths:
    worth: list[tuple[float, int, tuple[int, ...]]] = []
    for depth in range(1, rank_TH.shape[1] + 1):
        known_T = (rank_TH[:, :depth] < width).all(1)
        rows, inverse = np.unique(rank_TH[known_T, :depth], axis=0, return_inverse=True)
        sums = np.bincount(inverse.ravel(), weight_T[known_T], minlength=len(rows))
        worth += [(-value, depth, tuple(row)) for value, row in zip(sums.tolist(), rows.tolist(), strict=True) if value]
    return [path for _, _, path in sorted(worth)[:size]]


def tree_text(paths: Paths) -> str:
    """The paths as `tree.parse_tree` reads them."""
    text = ", ".join(".".join(map(str, path)) for path in paths)
    return text if set(text) & set(",.") else f"{text}, {text}"  # a number alone would be a k-configuration


def settings_of(
    name: str,
    sampling: Sampling,
    parts: Parts,
    space: Space,
    recording: Recording | None = None,
    costs: CostModel | None = None,
) -> list[Options]:
    """Settings of a method to be tried: by replay, or decoded for those of `DECODED`. The recording says which of the
    heads' trees, the costs what a draft token costs; without them others stand for both, to be counted."""
    grid = _decoded_grid(name, parts, sampling, space) if name in DECODED else _replayed_grid(name, parts, space)
    if "tree" in grid:
        sizes = [size for size in grid["tree"] if size < space.nodes]
        grid["tree"] = sizes if recording is None else map(tree_text, best_head_trees(recording, sizes).values())
    own = VARIANTS.get(name, (name, {}))[1]
    found = [own | dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if name == "adaptive":
        gamma = max(grid["gamma"])
        cost, width = costs.draft_token(gamma) if costs is not None else (0.1, 0.03)
        found.append({"gamma": gamma, "policy": "expected-gain", "draft_cost": cost, "token_cost": width})
    if name == "speculative" and not sampling.greedy:  # which never keeps fewer
        return [options | {"verification": "block"} for options in found]
    if name == TYPICAL:  # Medusa's own rule: δ is the root of ε
        return [options | {"delta": options["epsilon"] ** 0.5} for options in found]
    found = [each for each in found if each.get("min_ngram", 1) <= each.get("max_ngram", 3)]
    return [each for each in found if 1 + each.get("gamma", 0) * each.get("num_drafts", 1) <= space.nodes]


def _replayed_grid(name: str, parts: Parts, space: Space) -> dict[str, Iterable[Any]]:
    gammas = range(1, space.gamma + 1)
    if name == "prompt-lookup":
        return {"gamma": gammas, "max_ngram": (1, 2, 3, 4), "min_ngram": (1, 2, 3)}
    if name in ("multi-candidate", "naive-multi-candidate"):
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
    if name == "bild":
        return {"fallback_threshold": space.fallbacks, "rollback_threshold": space.rollbacks}
    if name == "adaptive":
        return {"gamma": gammas, "policy": ("confidence",), "confidence_threshold": space.confidences}
    if name == PARALLEL:
        return {"gamma": [gamma for gamma in (1, 2, 3, 4, 6, 8) if gamma <= space.gamma]}
    if name == "prompt-lookup, drafter":
        return {"min_ngram": (2, 3), "confidence_threshold": space.confidences}
    if name in TREES:
        stores = ("none", "table") if parts.table is not None and parts.table.texts is not None else ("none",)
        own: dict[str, dict[str, Iterable[Any]]] = {
            "dynamic-tree": {"max_nodes": (4, 12), "width": (2, 4)},
            "suffix, drafter": {"draft_depth": (1, 3), "datastore": stores},
        }
        return own.get(name, {"max_nodes": (4, 8, 16), "datastore": stores}) | {"min_prob": space.posteriors}
    if name == "mjsd":
        return {"gamma": gammas, "num_beams": (4,), "likelihood_threshold": space.thresholds}
    if name == TYPICAL:
        return {"tree": (4, 16, 48), "epsilon": space.tolerances}
    if name in CHAINS:
        several = [count for count in (2, 4, 8) if count <= space.candidates and not sampling.greedy]
        return {"gamma": gammas, "num_drafts": several or [1]}
    return {"gamma": gammas, "epsilon": space.tolerances}


def tune_method(
    recording: Recording,
    parts: Parts,
    costs: CostModel,
    name: str,
    fixed: Mapping[str, Any] | None = None,
    space: Space | None = None,
) -> list[Choice]:
    """Every setting of a method that was tried, the fastest first; of equally fast ones the smaller tree. `fixed` are
    settings that are not tuned, such as `replacement`; those that are tuned replace them."""
    choices = []
    space = space or Space()
    for options in settings_of(name, recording.sampling, parts, space, recording):
        given = dict(fixed or {}) | options
        prediction = predict(recording, parts, name, given)
        if prediction is None or prediction.nodes_per_step > space.nodes:
            continue
        rates = prediction.tokens_per_step, prediction.standard_error, prediction.nodes_per_step
        choices.append(Choice(name, given, *rates, 0.0, 0.0))
    return with_costs(choices, parts, recording.sampling, costs)


def with_costs(choices: Sequence[Choice], parts: Parts, sampling: Sampling, costs: CostModel) -> list[Choice]:
    """The same choices under these costs, the fastest first; of equally fast ones the smaller tree."""
    found = []
    for choice in choices:
        method = build_method(choice.method, parts, sampling, **choice.options)
        seconds = costs.step_seconds(choice.method, method, choice.nodes_per_step)
        speedup = costs.speedup(choice.tokens_per_step, seconds)
        found.append(replace(choice, step_seconds=seconds, speedup=speedup))
    return sorted(found, key=lambda choice: (-choice.speedup, choice.nodes_per_step))


def probes(choices: Sequence[Choice]) -> list[Choice]:
    """Settings of a method whose steps are worth timing: what looks best, the smallest tree, and one twice as large."""
    best = choices[0]
    smallest = min(choices, key=lambda choice: (choice.nodes_per_step, -choice.speedup))
    larger = min(choices, key=lambda choice: abs(choice.nodes_per_step - 2 * best.nodes_per_step))
    return list({choice.nodes_per_step: choice for choice in (larger, smallest, best)}.values())


def tune_decoded(
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    costs: CostModel,
    name: str,
    limits: Limits,
    fixed: Mapping[str, Any] | None = None,
    space: Space | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[int, Callable[[], Choice | None]], Choice | None] = lambda _, work: work(),
) -> list[Choice]:
    """Every setting of a method that was decoded, the fastest first; of lossy ones with the perplexity. Prompts and
    sampling are the recording's, `limits` those of its texts, `fixed` as in `tune_method`; prompt i draws from seed +
    i. `keep` does the work of a setting, by its number, or knows what came of it."""
    space, sampling = space or Space(), recording.sampling
    prompts = recording.prompts[: space.decoded_prompts]

    def judged(options: Options) -> Choice | None:
        """None: more nodes than the search goes to."""
        given = dict(fixed or {}) | options
        method = build_method(method_of(name), parts, sampling, **given)
        runs = [decode(target, method, sampling, seed + row, prompt, limits) for row, prompt in enumerate(prompts)]
        counts = total(run.tally for run in runs)
        if counts.nodes > space.nodes * counts.steps:
            return None
        tokens_B, steps_B = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
        rates = counts.tokens / counts.steps, ratio_error(tokens_B, steps_B), counts.nodes / counts.steps
        lossless = method.verifier.lossless
        surprise = None if lossless else perplexity(target, prompts, [run.ids for run in runs])
        return Choice(method_of(name), given, *rates, 0.0, 0.0, lossless, "decoding", surprise)

    settings, choices = settings_of(name, sampling, parts, space, recording, costs), []
    for done, options in enumerate(settings):
        if progress:
            progress(done, len(settings))
        choices.append(keep(done, partial(judged, options)))
    return with_costs([choice for choice in choices if choice is not None], parts, sampling, costs)


def frontier(choices: Sequence[Choice], most: int) -> list[Choice]:
    """Choices that no other beats in both speed and perplexity, the one that gives up least first; `most`, spread
    evenly."""
    best: list[Choice] = []

    def order(choice: Choice) -> tuple[float, float]:
        return math.inf if choice.perplexity is None else choice.perplexity, -choice.speedup

    for choice in sorted(choices, key=order):
        if not best or choice.speedup > best[-1].speedup:
            best.append(choice)
    chosen = np.linspace(0, len(best) - 1, min(most, len(best))).round().astype(int)
    return [best[index] for index in chosen]


def method_of(name: str) -> str:
    """The method that is tuned under a name."""
    return VARIANTS.get(name, (name, {}))[0]


def tuned_methods(parts: Parts, sampling: Sampling) -> list[str]:
    """What is worth tuning with these parts. At temperature 0 methods that do the same as another are left out, and so
    is typical acceptance."""
    names = ["speculative", "multi-candidate", "adaptive", "unigram", "bigram", "prompt-lookup"]
    names += ["prompt-lookup, drafter", *TREES]
    names += [PARALLEL] if mask_token(getattr(parts.drafter, "config", None)) is not None else []
    names += ["bpd", "medusa", *SLIM, *LOSSY]
    names += [name for name in SAME_WHEN_GREEDY if name not in LOSSY]
    if sampling.greedy:
        names = [name for name in names if name not in (*SAME_WHEN_GREEDY, TYPICAL)]
    return [
        name
        for name in names
        if all(getattr(parts, part) is not None for part in needs_of(*VARIANTS.get(name, (name, {}))))
    ]

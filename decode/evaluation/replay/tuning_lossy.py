"""Settings of lossy methods, decoded: what they are worth and what they give up.

What a lossy method writes is not the target's own text, so that no recording of that text says exactly what its
settings would do: each of a small grid is decoded with a few prompts, and its text is judged by the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...engine import Limits
from ...methods import Parts, build_method
from ...models.base import LanguageModel
from ..measure import decode
from ..metrics import total
from ..quality import perplexity
from .costs import CostModel
from .recording import Recording
from .steps import ratio_error
from .tuning import TYPICAL, Choice, Options, Space, best_head_trees, method_of, tree_text, with_costs

_GAMMAS = (2, 4, 6)
_TREES = (4, 16, 48)


def lossy_settings(name: str, recording: Recording, space: Space) -> Iterator[Options]:
    """Settings of a lossy method to be decoded."""
    if name == "bild":
        for fallback in space.fallbacks:
            yield from ({"fallback": fallback, "rollback": rollback} for rollback in space.rollbacks)
    elif name in ("relaxed-opt", "relaxed-uno"):
        for gamma in sorted({min(gamma, space.gamma) for gamma in _GAMMAS}):
            yield from ({"gamma": gamma, "epsilon": epsilon} for epsilon in space.tolerances)
    else:
        assert name == TYPICAL
        sizes = [size for size in _TREES if size < space.nodes]
        for paths in best_head_trees(recording, sizes).values():
            for epsilon in space.tolerances:
                # Medusa's own rule: δ is the root of ε.
                yield {"tree": tree_text(paths), "acceptance": "typical", "epsilon": epsilon, "delta": epsilon**0.5}


def tune_lossy(
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
    progress: Callable[[], None] | None = None,
) -> list[Choice]:
    """Every setting of a lossy method that was decoded, with its perplexity, the fastest first.

    Args:
        recording: gives the prompts and the sampling.
        limits: those of the recorded texts.
        fixed: settings that are not tuned; those that are replace them.
        seed: prompt i draws from seed + i.
    """
    space, sampling, choices = space or Space(), recording.sampling, []
    prompts = recording.prompts[: space.lossy_prompts]
    for options in lossy_settings(name, recording, space):
        given = dict(fixed or {}) | options
        method = build_method(method_of(name), parts, sampling, **given)
        runs = [decode(target, method, sampling, seed + row, prompt, limits) for row, prompt in enumerate(prompts)]
        counts = total(run.tally for run in runs)
        if counts.nodes <= space.nodes * counts.steps:
            tokens_B, steps_B = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
            rates = counts.tokens / counts.steps, ratio_error(tokens_B, steps_B), counts.nodes / counts.steps
            surprise = perplexity(target, prompts, [run.ids for run in runs])
            about: dict[str, Any] = {"lossless": False, "found_by": "decoding", "perplexity": surprise}
            choices.append(Choice(method_of(name), given, *rates, 0.0, 0.0, **about))
        if progress:
            progress()
    return with_costs(choices, parts, sampling, costs)


def frontier(choices: Sequence[Choice], most: int) -> list[Choice]:
    """Choices that no other beats in both speed and perplexity, the one that gives up least first; of many so many,
    spread evenly from one end to the other."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (_finite(each.perplexity), -each.speedup)):
        if not best or choice.speedup > best[-1].speedup:
            best.append(choice)
    places = np.linspace(0, len(best) - 1, min(most, len(best))).round().astype(int)
    return [best[place] for place in places]


def _finite(perplexity: float | None) -> float:
    return math.inf if perplexity is None else perplexity

"""Predicted speedups of a method's settings: by replay, or by decoding a few prompts, under measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...engine import Limits
from ...methods import Options, Parts, build_method
from ...models.base import LanguageModel
from ...warpers import Sampling
from ..measure import decode
from ..metrics import total
from ..quality import perplexity
from .costs import CostModel
from .recording import Recording
from .replay import predict
from .space import Setting, Space, list_settings, method_name
from .steps import ratio_error

PROBES = 3
"""Maximum number of settings of a method whose steps are timed (`select_probes`)."""


def search_by_replay(
    recording: Recording,
    parts: Parts,
    costs: CostModel,
    name: str,
    fixed: Mapping[str, Any] | None = None,
    space: Space | None = None,
) -> list[Setting]:
    """Predict every setting of a method from a recording, the fastest first.

    Args:
        fixed: options that are not tuned, such as `replacement`; tuned options override them.
    """
    settings, space = [], space or Space()
    for options in list_settings(name, recording.sampling, parts, space, recording):
        given = dict(fixed or {}) | options
        prediction = predict(recording, parts, name, given)
        if prediction is not None and prediction.nodes_per_step <= space.nodes:
            rates = prediction.tokens_per_step, prediction.standard_error, prediction.nodes_per_step
            settings.append(Setting(name, given, *rates))
    return apply_costs(settings, parts, recording.sampling, costs)


def search_by_decoding(
    target: LanguageModel,
    parts: Parts,
    recording: Recording,
    costs: CostModel,
    name: str,
    limits: Limits,
    fixed: Mapping[str, Any],
    space: Space,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, work: None,
    keep: Callable[[int, Callable[[], Setting | None]], Setting | None] = lambda _, work: work(),
) -> list[Setting]:
    """Decode the recording's first prompts with every setting of a method; return the fastest first.

    Args:
        limits: limits of the recorded texts.
        fixed: as in `search_by_replay`.
        seed: prompt i draws from seed + i.
        keep: runs the work of a setting, by its number, or returns the result of an earlier process.
    """
    sampling, prompts = recording.sampling, recording.prompts[: space.decoded_prompts]

    def decode_setting(options: Options) -> Setting | None:
        """Return None for a setting with more nodes than the space allows."""
        given = {**fixed, **options}
        method = build_method(method_name(name), parts, sampling, **given)
        runs = [decode(target, method, sampling, seed + row, prompt, limits) for row, prompt in enumerate(prompts)]
        counts = total(run.tally for run in runs)
        if counts.nodes > space.nodes * counts.steps:
            return None
        tokens_B, steps_B = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
        rates = counts.tokens / counts.steps, ratio_error(tokens_B, steps_B), counts.nodes / counts.steps
        lossless = method.verifier.lossless
        quality = None if lossless else perplexity(target, prompts, [run.ids for run in runs])
        return Setting(method_name(name), given, *rates, 0.0, 0.0, lossless, "decoding", quality)

    options, settings = list_settings(name, sampling, parts, space, recording), []
    for done, each in enumerate(options):
        progress(done, len(options))
        settings += [setting] if (setting := keep(done, partial(decode_setting, each))) is not None else []
    return apply_costs(settings, parts, sampling, costs)


def apply_costs(settings: Sequence[Setting], parts: Parts, sampling: Sampling, costs: CostModel) -> list[Setting]:
    """Return the settings with speedups under these costs, the fastest first; of equals the smaller tree first."""
    found = []
    for setting in settings:
        method = build_method(setting.method, parts, sampling, **setting.options)
        seconds = costs.step_seconds(setting.method, method, setting.nodes_per_step)
        speedup = costs.speedup(setting.tokens_per_step, seconds)
        found.append(replace(setting, step_seconds=seconds, speedup=speedup))
    return sorted(found, key=lambda setting: (-setting.speedup, setting.nodes_per_step))


def select_probes(settings: Sequence[Setting]) -> list[Setting]:
    """Select the settings of a method to time: the best one, the smallest tree, and one twice as large as the best."""
    best = settings[0]
    smallest = min(settings, key=lambda setting: (setting.nodes_per_step, -setting.speedup))
    larger = min(settings, key=lambda setting: abs(setting.nodes_per_step - 2 * best.nodes_per_step))
    return list({setting.nodes_per_step: setting for setting in (larger, smallest, best)}.values())


def pareto_frontier(settings: Sequence[Setting], most: int) -> list[Setting]:
    """Select settings that no other setting beats in both speed and perplexity, at most `most`, evenly spread."""
    best: list[Setting] = []

    def order(setting: Setting) -> tuple[float, float]:
        return math.inf if setting.perplexity is None else setting.perplexity, -setting.speedup

    for setting in sorted(settings, key=order):
        if not best or setting.speedup > best[-1].speedup:
            best.append(setting)
    chosen = np.linspace(0, len(best) - 1, min(most, len(best))).round().astype(int)
    return [best[index] for index in chosen]

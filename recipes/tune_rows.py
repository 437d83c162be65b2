"""Which methods `draftsmith tune` tunes, with which settings fixed, and why it leaves the others out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..decode.evaluation.measure import BASELINE
from ..decode.evaluation.replay.recording import Recording
from ..decode.evaluation.replay.replay import predict
from ..decode.evaluation.replay.tuning import (
    DECODED,
    SAME_WHEN_GREEDY,
    SLIM,
    TYPICAL,
    Space,
    settings_of,
    tuned_methods,
)
from ..decode.evaluation.replay.tuning_lossy import lossy_settings
from ..decode.methods import METHODS, Parts
from ..decode.warpers import Sampling
from .config import EvaluateRecipe, MethodSection
from .opening import Opened

LeftOut = dict[str, str]
"""Why, by method, or by the name of a row."""

_SAME = dict.fromkeys(SAME_WHEN_GREEDY, "speculative") | {
    "naive-multi-candidate": "multi-candidate",
    "relaxed-uno": "relaxed-opt",
}
"""What methods of `SAME_WHEN_GREEDY` do the same as."""


def rows_of(recipe: EvaluateRecipe, opened: Opened, sampling: Sampling) -> tuple[dict[str, dict[str, Any]], LeftOut]:
    """The settings that the recipe fixes, of each method to tune; and of the others that it names, or that its parts
    allow if it names none, why they are not tuned.

    Raises:
        ValueError: no method that can be tuned.
    """
    known = tuned_methods(opened.parts, sampling)
    left_out: LeftOut = {}
    if opened.model.config.is_encoder_decoder and "mjsd" in known:
        known.remove("mjsd")
        left_out["mjsd"] = "joint decoding is replayed for decoders, and the target is an encoder-decoder"
    asked = [row for row in recipe.methods if row.method != BASELINE]
    if not asked:
        if not known:
            raise ValueError("there is nothing to tune: the recipe names neither a drafter nor heads nor a table")
        return {name: {} for name in known}, left_out | _same_as_others(opened.parts, known)
    here = [row.temperature in (None, recipe.temperature) for row in asked]
    last = {_name(row, sampling): place for place, row in enumerate(asked) if here[place]}
    rows, why = {}, {}
    for place, row in enumerate(asked):
        name = _name(row, sampling)
        if not here[place]:
            at = row.temperature
            why[_named(row)] = f"its temperature is {at:g}, the recipe's {recipe.temperature:g}: `temperature={at:g}`"
        elif name not in (*known, *SAME_WHEN_GREEDY, *SLIM):  # one without correlation needs no table
            why[_named(row)] = left_out.get(name, "none of its settings is searched")
        elif place != last[name]:
            why[_named(row)] = f"{name} is tuned once, with what the last of its rows fixes"
        else:
            rows[name] = dict(row.options)
    if not rows:
        said = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        raise ValueError(f"none of the recipe's methods can be tuned ({said}). Known: {', '.join(known)}")
    return rows, why


def _name(row: MethodSection, sampling: Sampling) -> str:
    """What a row is tuned as."""
    typical = row.method == "medusa" and row.options.get("acceptance") == "typical" and not sampling.greedy
    return TYPICAL if typical else row.method


def _named(row: MethodSection) -> str:
    """A row for people."""
    told = ", ".join(f"{key} {value}" for key, value in row.options.items())
    words = row.label or (f"{row.method} ({told})" if told else row.method)
    return words if row.temperature is None else f"{words} at temperature {row.temperature:g}"


def _same_as_others(parts: Parts, known: list[str]) -> LeftOut:
    """Methods that these parts allow, and that at temperature 0 do what another does."""
    allowed = [name for name in _SAME if all(getattr(parts, part) is not None for part in METHODS[name].needs)]
    return {name: f"at temperature 0 it does the same as {_SAME[name]}" for name in allowed if name not in known}


def why_nothing(name: str, fixed: Mapping[str, Any], recording: Recording, parts: Parts, space: Space) -> str:
    """Why a search found no setting of a method."""
    if name == "specinfer" and parts.more_drafters and recording.several is None:
        return f"replay cannot follow the chains of {1 + len(parts.more_drafters)} drafters"
    if name in (TYPICAL, "medusa"):
        if space.nodes < 2:
            return f"no tree has {space.nodes} nodes"
        if not any(True for _ in settings_of("medusa", recording, parts, space)):
            return "no candidate of the heads ever was the token that the target wrote"
    decoded = name in DECODED
    tried = lossy_settings(name, recording, space) if decoded else settings_of(name, recording, parts, space)
    first = next(tried, None)
    if first is None:
        return "no setting lies within the bounds of the search"
    if not decoded and predict(recording, parts, name, dict(fixed) | first) is None:
        told = ", ".join(f"{key} {value}" for key, value in fixed.items())
        return f"replay cannot follow it with what its row fixes ({told})" if told else "replay cannot follow it"
    return f"every setting that was tried has more than {space.nodes} nodes a step"

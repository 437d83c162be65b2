"""What EAGLE-3 heads are worth fed with other layers than their config means: by decoding as an engine would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....checkpoints.artifact.compat import read_config
from ....checkpoints.heads.eagle import NORMED, default_layers, load_eagle
from ....checkpoints.heads.published import layers_named
from ....checkpoints.pairs.eagle import layers_read
from ....checkpoints.storage.names import CONFIG_FILE
from ....data.prompts import stop_ids
from ....data.tokenizers import load_tokenizer
from ....decode.engine import Limits
from ....decode.evaluation.measure import decode
from ....decode.evaluation.metrics import total
from ....decode.evaluation.replay.steps import ratio_error
from ....decode.methods import Parts, build_method
from ....decode.models.eagle import EagleDrafter
from ....decode.models.loading import wrap_model
from ....decode.warpers import Sampling
from ...assemble.evaluation import load_target, prompts_of
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import bar
from ..evaluation.recipe import template_of

_PROMPTS, _TOKENS, _GAMMA = 8, 48, 3
_ERRORS = 3.0
"""Standard errors by which a reading must be better than the config's to be named."""


class Reading(NamedTuple):
    """Heads fed in one way."""

    layers: tuple[int, ...]
    normed: bool
    who: list[str]
    """Engines that feed so, and what else the reading is."""
    tokens_per_step: float = 0.0
    error: float = 0.0


def readings(config: dict[str, Any], count: int) -> list[Reading]:
    """Every way in which heads of this config may be fed from a target of `count` layers: as the config means first,
    as engines do, and with the usual mistakes."""
    named, normed = layers_named(config, count), bool(config.get(NORMED))
    tried = [("as the config says", named, normed)]
    tried += [(name, layers, normed and name != "sglang") for name, layers in layers_read(config, count).items()]
    tried += [
        ("one layer later", [layer + 1 for layer in named], normed),
        ("one layer earlier", [layer - 1 for layer in named], normed),
        ("the usual layers", default_layers(count), normed),
        ("the other norm", named, not normed),
    ]
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for who, layers, is_normed in tried:
        if all(0 <= layer < count for layer in layers) and len(layers) == len(named):
            found.setdefault((tuple(layers), is_normed), []).append(who)
    return [Reading(*way, who) for way, who in found.items()]


def decoded(target: str, folder: Path, prompts: str, template: str | None = None) -> list[Reading]:
    """The readings with tokens per step of greedy chains of three, on the first prompts of a file or a known set."""
    config = read_config(folder / CONFIG_FILE)
    values: dict[str, Any] = {"kind": "evaluate", "out": "", "target": target, "prompts": prompts, "limit": _PROMPTS}
    values |= {"template": template or template_of(target), "methods": [{"method": "autoregressive"}]}
    recipe = EvaluateRecipe.model_validate(values)
    tokenizer, model, measured = load_tokenizer(target), load_target(recipe), list[Reading]()
    asked, limits = [ids for _, ids in prompts_of(recipe, tokenizer)], Limits(_TOKENS, stop_ids(tokenizer))
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    ways = readings(config, model.config.num_hidden_layers)
    with bar("decoding as engines would", "readings") as advance:
        for done, way in enumerate(ways, 1):
            heads = load_eagle(folder)
            heads.layers, heads.normed = way.layers, way.normed
            wrapped = wrap_model(model, given_layers=way.layers)
            drafter = EagleDrafter(heads.to(wrapped.device, wrapped.weights_dtype).attach(*weights))
            method = build_method("speculative", Parts(drafter), Sampling(), gamma=_GAMMA)
            runs = [decode(wrapped, method, Sampling(), 0, ids, limits) for ids in asked]
            counts = total(run.tally for run in runs)
            tokens_B, steps_B = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
            rate = counts.tokens / counts.steps
            measured.append(way._replace(tokens_per_step=rate, error=ratio_error(tokens_B, steps_B)))
            advance(done, len(ways))
    return measured


def better(found: list[Reading]) -> Reading | None:
    """The best reading where it is plainly better than the first, which is the config's."""
    best = max(found, key=lambda reading: reading.tokens_per_step)
    margin = _ERRORS * float(np.hypot(best.error, found[0].error))
    return best if best.tokens_per_step - found[0].tokens_per_step > margin else None

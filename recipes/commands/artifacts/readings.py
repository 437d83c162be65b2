"""What EAGLE-3 heads are worth fed otherwise than their config means: by decoding as an engine would, and as they would
have been trained by the usual mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....checkpoints.artifact.compat import read_config
from ....checkpoints.heads.eagle import NORMED, EagleHeads, default_layers, load_eagle
from ....checkpoints.heads.published import layers_named
from ....checkpoints.pairs.eagle import layers_read, rotary_base
from ....checkpoints.storage.names import CONFIG_FILE
from ....data.prompts import stop_ids
from ....data.tokenizers import load_tokenizer
from ....decode.engine import Limits
from ....decode.evaluation.measure import decode
from ....decode.evaluation.metrics import total
from ....decode.evaluation.replay.steps import ratio_error
from ....decode.methods import Parts, build_method
from ....decode.models.eagle import EagleDrafter
from ....decode.models.kv_cache import KVCache
from ....decode.models.loading import wrap_model
from ....decode.warpers import Sampling
from ...assemble.evaluation import load_target, prompts_of
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import bar
from ..evaluation.recipe import template_of

_PROMPTS, _TOKENS, _GAMMA = 16, 48, 3
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
    apart: float = 0.0
    """Standard error of the difference from the config's reading, which decodes the same prompts."""
    base: float | None = None
    """Of rotary positions; None: the config's."""
    behind: bool = False
    """Whether embeddings are those of the token before: heads learn so if their training does not shift the tokens."""

    def __str__(self) -> str:
        parts = [f"layers {', '.join(map(str, self.layers))}"]
        parts += ["normed"] if self.normed else []
        parts += [] if self.base is None else [f"rope_theta {self.base:,.0f}"]
        parts += ["the token before"] if self.behind else []
        return ", ".join(parts)


class TokenBefore(EagleDrafter):
    """Reads beside a state the embedding of the token one place earlier. One text at a time, in chains."""

    def __init__(self, heads: EagleHeads) -> None:
        super().__init__(heads)
        self._text_P = torch.zeros(self.max_positions + 1, dtype=torch.int64, device=self.device)

    def _forward(
        self, cache: KVCache, tokens_BM: Tensor, positions_BM: Tensor, mask_B1MS: Tensor | None, start: int, end: int
    ) -> Tensor:
        self._text_P[positions_BM + 1] = tokens_BM
        return super()._forward(cache, self._text_P[positions_BM], positions_BM, mask_B1MS, start, end)


def readings(config: dict[str, Any], target: Any) -> list[Reading]:
    """Every way in which heads of this config may be fed from a target of this configuration: as the config means
    first, as engines do, and with the usual mistakes."""
    count = target.num_hidden_layers
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
    ways = [Reading(*way, who) for way, who in found.items()]
    own = config.get("transformer_layer_config", config)
    bases = {"the target's positions": rotary_base(vars(target)), "the usual positions": rotary_base({})}
    others = {base: who for who, base in reversed(bases.items()) if base != rotary_base(own)}
    ways += [ways[0]._replace(who=[who], base=base) for base, who in others.items()]
    return [*ways, ways[0]._replace(who=["tokens not shifted"], behind=True)]


def drafter_of(heads: EagleHeads, way: Reading, weights: tuple[Tensor, Tensor], like: Any) -> EagleDrafter:
    """A drafter that is fed in this way, with its target's embeddings and output rows."""
    heads.layers, heads.normed = way.layers, way.normed
    if way.base is not None:
        heads.config.rope_parameters = {**heads.config.rope_parameters, "rope_theta": way.base}
    heads = heads.to(like.device, like.weights_dtype).attach(*weights)
    return TokenBefore(heads) if way.behind else EagleDrafter(heads)


def decoded(target: str, folder: Path, prompts: str, template: str | None = None) -> list[Reading]:
    """The readings with tokens per step of greedy chains of three, on the first prompts of a file or a known set."""
    config = read_config(folder / CONFIG_FILE)
    values: dict[str, Any] = {"kind": "evaluate", "out": "", "target": target, "prompts": prompts, "limit": _PROMPTS}
    values |= {"template": template or template_of(target), "methods": [{"method": "autoregressive"}]}
    recipe = EvaluateRecipe.model_validate(values)
    tokenizer, model, measured = load_tokenizer(target), load_target(recipe), list[Reading]()
    asked, limits = [ids for _, ids in prompts_of(recipe, tokenizer)], Limits(_TOKENS, stop_ids(tokenizer))
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    ways, off = readings(config, model.config), list[np.ndarray]()
    with bar("decoding as engines would", "readings") as advance:
        for done, way in enumerate(ways, 1):
            wrapped = wrap_model(model, given_layers=way.layers)
            drafter = drafter_of(load_eagle(folder), way, weights, wrapped)
            method = build_method("speculative", Parts(drafter), Sampling(), gamma=_GAMMA)
            runs = [decode(wrapped, method, Sampling(), 0, ids, limits) for ids in asked]
            counts = total(run.tally for run in runs)
            tokens_B, steps_B = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
            rate = counts.tokens / counts.steps
            off.append((tokens_B - rate * steps_B) / steps_B.mean())
            apart = float(np.std(off[-1] - off[0], ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else rate
            measured.append(way._replace(tokens_per_step=rate, error=ratio_error(tokens_B, steps_B), apart=apart))
            advance(done, len(ways))
    return measured


def better(found: list[Reading]) -> Reading | None:
    """The best reading where it is plainly better than the first, which is the config's."""
    best = max(found, key=lambda reading: reading.tokens_per_step)
    return best if best.tokens_per_step - found[0].tokens_per_step > _ERRORS * best.apart else None

"""Agreement of EAGLE-3 heads with their target for inputs other than those of their config.

These are the inputs that engines would use, and those of common training mistakes.

Shape letters: P passages, T tokens of a text but its last, X new tokens, K steps, D hidden, G auxiliary hidden states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student_t
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....checkpoints.heads.eagle import NORMED, EagleHeads, default_layers, load_eagle
from ....checkpoints.heads.published import layers_named
from ....checkpoints.pairs.eagle import layers_read, rotary_base
from ....checkpoints.pairs.sides import Finding
from ....checkpoints.storage.names import CONFIG_FILE
from ....checkpoints.storage.safe_read import read_json
from ...models.base import LanguageModel, TransformersModel
from ..bootstrap import Floats
from ..certify.rescoring import chunks
from .agreement import Passage, chains, draft_logits, given_states
from .stages import make_finding

_MIN_TEXTS, _MIN_DIFFERENCE, _FALSE_ALARMS = 8, 0.005, 0.01
"""Minimum number of texts and difference for a finding, and probability of a false finding over all readings."""
_MIN_SECOND_STEP = 0.5
"""Share of the first step's agreement that the second step should reach. It is 0.90 for heads that learned to read
their own states, and 0.18 for heads that learned a single step."""


class Reading(NamedTuple):
    """Inputs of heads, and the resulting agreement with the target."""

    layers: tuple[int, ...]
    normed: bool
    who: list[str]
    """Engines that use these inputs, and descriptions of the reading."""
    base: float | None = None
    """Base of the rotary positions. None uses the config's."""
    behind: bool = False
    """True if embeddings are those of the previous token, as in training without shifted tokens."""
    by_step: tuple[float, ...] = ()
    """Share of positions where each step's most likely token is the target's, teacher-forced."""
    agrees: float = 0.0
    """The same share over all steps."""
    apart: float = 0.0
    """Standard error of the difference from the config's reading on the same texts."""
    dropped: tuple[float, float] = (0.0, 0.0)
    """Amount by which the second step's agreement is below half of the first's, and its standard error."""
    texts: int = 0

    def __str__(self) -> str:
        parts = [f"layers {', '.join(map(str, self.layers))}"]
        parts += ["normed"] if self.normed else []
        parts += [] if self.base is None else [f"rope_theta {self.base:,.0f}"]
        parts += ["the token before"] if self.behind else []
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the reading as JSON, without the errors, which are infinite for a single text."""
        values = {name: value for name, value in self._asdict().items() if name not in ("apart", "dropped")}
        return {"reading": str(self)} | values


def readings(config: dict[str, Any], target: Any) -> list[Reading]:
    """Return all inputs that heads of this config may receive from a target of this configuration.

    The config's own reading comes first, then those of engines and of common mistakes.
    """
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
    ways: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for who, layers, is_normed in tried:
        if all(0 <= layer < count for layer in layers) and len(layers) == len(named):
            ways.setdefault((tuple(layers), is_normed), []).append(who)
    found = [Reading(*way, who) for way, who in ways.items()]
    own = config.get("transformer_layer_config", config)
    bases = {"the target's positions": rotary_base(vars(target)), "the usual positions": rotary_base({})}
    others = {base: who for who, base in reversed(bases.items()) if base != rotary_base(own)}
    found += [found[0]._replace(who=[who], base=base) for base, who in others.items()]
    return [*found, found[0]._replace(who=["tokens not shifted"], behind=True)]


def attached_heads(folder: Path, model: Any, target: LanguageModel, dtype: torch.dtype | None = None) -> EagleHeads:
    """Load heads with the embeddings and output rows of a target (`model`), by default in its dtype."""
    heads = load_eagle(folder)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    heads = heads.to(target.device, dtype or target.weights_dtype).attach(*weights)
    heads.rotary_emb = _rotary(heads, None)
    heads.config = heads.rotary_emb.config
    return heads


def _rotary(heads: EagleHeads, base: float | None) -> LlamaRotaryEmbedding:
    config = copy.deepcopy(heads.config)
    if base is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    return LlamaRotaryEmbedding(config).to(heads.fc.weight.device)


@torch.inference_mode()
def agreements(
    model: Any, folder: Path, passages: Sequence[Passage], progress: Callable[[int, int], None]
) -> list[Reading]:
    """Return every reading with its agreement on given texts.

    Raises:
        ValueError: There is no token to predict.
    """
    if not any(passage.text for passage in passages):
        raise ValueError(f"the {len(passages)} passages contain no token to predict")
    ways = readings(read_json(folder / CONFIG_FILE), model.config)
    layers = sorted({layer for way in ways for layer in way.layers})
    target = TransformersModel(model, aux_layers=layers)  # this wrapper does not change the layout of the weights
    heads, judged_P = attached_heads(folder, model, target), list[Floats]()
    rotary = [_rotary(heads, way.base) for way in ways]
    counts_WP: list[list[Floats]] = [[] for _ in ways]
    for done, passage in enumerate(passages, 1):
        new, steps = len(passage.text), heads.num_heads
        given_1TG, last_1TD, ids_1T = given_states(target, passage)
        spans = [*chunks(new, target.vocab_size * steps)]
        best_X1 = torch.cat([target.logits(last_1TD[0, -new:][span]).argmax(-1) for span in spans])[:, None]
        place_XK = len(ids_1T[0]) - new - 1 + torch.arange(new)[:, None] - torch.arange(steps)
        judged_XK = (place_XK >= 0) & torch.tensor(passage.judged or [True] * new)[:, None]
        judged_P.append(judged_XK.sum(0).numpy())
        given = dict(zip(layers, given_1TG.chunk(len(layers), -1), strict=True))
        for counts, way, heads.rotary_emb in zip(counts_WP, ways, rotary, strict=True):
            heads.normed = way.normed
            read_1TG = torch.cat([given[layer] for layer in way.layers], -1)
            made_XKD = chains(heads, read_1TG, ids_1T, new, way.behind)
            drafted_XK = torch.cat([draft_logits(heads, made_XKD[span]).argmax(-1) for span in spans])
            counts.append(((drafted_XK == best_X1).cpu() & judged_XK).sum(0).numpy())
        progress(done, len(passages))
    return _summarise(ways, np.array(counts_WP, dtype=np.float64), np.array(judged_P, dtype=np.float64))


def _summarise(ways: Sequence[Reading], same_WPK: Floats, judged_PK: Floats) -> list[Reading]:
    """Return the readings with their agreement and its standard errors over passages."""
    judged_P, count = judged_PK.sum(1), len(judged_PK)
    found, off = list[Reading](), list[Floats]()

    def error(values_P: Floats) -> float:
        return float(np.std(values_P, ddof=1)) / math.sqrt(count) if count > 1 else math.inf

    for way, same_PK in zip(ways, same_WPK, strict=True):
        agrees, by_step_K = float(same_PK.sum() / judged_P.sum()), same_PK.sum(0) / judged_PK.sum(0)
        off.append((same_PK.sum(1) - agrees * judged_P) / judged_P.mean())
        off_PK = (same_PK - by_step_K * judged_PK) / judged_PK.mean(0)
        dropped = float(_MIN_SECOND_STEP * by_step_K[0] - by_step_K[1])
        found.append(
            way._replace(
                by_step=tuple(by_step_K.tolist()),
                agrees=agrees,
                apart=error(off[-1] - off[0]),
                dropped=(dropped, error(_MIN_SECOND_STEP * off_PK[:, 0] - off_PK[:, 1])),
                texts=count,
            )
        )
    return found


def better(found: Sequence[Reading]) -> Reading | None:
    """Return the best reading if it is significantly better than the config's."""
    best = max(found, key=lambda reading: reading.agrees)
    is_better = _is_significant(best.agrees - found[0].agrees, best.apart, best.texts, len(found))
    return best if is_better else None


def _is_significant(difference: float, error: float, texts: int, tried: int) -> bool:
    """Return whether a difference is significant, by Student's t with a Bonferroni correction."""
    if texts < _MIN_TEXTS:
        return False
    return difference > max(_MIN_DIFFERENCE, float(student_t.isf(_FALSE_ALARMS / tried, texts - 1)) * error)


def reading_findings(found: Sequence[Reading], depth: int) -> list[Finding]:
    """Return the findings from the readings of heads that draft `depth` tokens."""
    best, faults = better(found), []
    if best is not None:
        lost, error = best.agrees - found[0].agrees, float(student_t.isf(0.005, best.texts - 1)) * best.apart
        numbers = f": {best} ({'; '.join(best.who)}), {best.agrees:.3f} instead of {found[0].agrees:.3f}"
        faults.append(make_finding("fed", lost, [lost - error, lost + error], numbers))
    read = best or found[0]
    first, second = read.by_step[:2]
    if depth > 1 and _is_significant(*read.dropped, read.texts, 1):
        faults.append(
            make_finding("steps", first - second, None, f": {first:.3f} in the first, {second:.3f} in the second")
        )
    return faults

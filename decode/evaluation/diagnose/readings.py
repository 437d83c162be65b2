"""Agreement of EAGLE-3 heads with their target for different inputs of the heads.

A reading is a choice of inputs: as in the config, in a serving engine, or after a common training mistake.

Shape letters: P passages, T tokens of a text except the last, X new tokens, K steps, D hidden, G auxiliary states.
"""

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
from ....checkpoints.heads.published import trained_layers
from ....checkpoints.pairs.eagle import layers_by_engine, rotary_base
from ....checkpoints.pairs.sides import Finding
from ....checkpoints.storage.names import CONFIG_FILE
from ....checkpoints.storage.safe_read import read_json
from ...models.base import LanguageModel, TransformersModel
from ..bootstrap import Floats
from ..certify.rescoring import chunks
from .agreement import Passage, chains, draft_logits, target_states
from .stages import make_finding

_MIN_TEXTS, _MIN_DIFFERENCE, _FALSE_ALARMS = 8, 0.005, 0.01
"""Minimum number of texts, minimum difference for a finding, and maximum probability of a false finding."""
_MIN_SECOND_STEP = 0.5
"""Minimum agreement of the second step relative to the first. It is 0.90 for heads that were trained on their own
states, and 0.18 for heads that were trained for a single step."""


class Reading(NamedTuple):
    """Choice of inputs for EAGLE-3 heads, and the resulting agreement with the target."""

    layers: tuple[int, ...]
    normed: bool
    names: list[str]
    """Engines and training mistakes that lead to these inputs."""
    rope_theta: float | None = None
    """Base of the rotary embeddings, or None to use the config's."""
    unshifted: bool = False
    """True if the heads embed the previous token, as after training without shifted tokens."""
    agreement_by_step: tuple[float, ...] = ()
    """Share of positions where each step's most likely token is the target's, with teacher forcing."""
    agreement: float = 0.0
    """Share of positions where the most likely tokens agree, over all steps."""
    error: float = 0.0
    """Standard error of the difference in agreement from the config's reading on the same texts."""
    second_step_drop: tuple[float, float] = (0.0, 0.0)
    """Half of the first step's agreement minus the second step's agreement, and the standard error of this value."""
    texts: int = 0

    def __str__(self) -> str:
        parts = [f"layers {', '.join(map(str, self.layers))}"]
        parts += ["normed"] if self.normed else []
        parts += [] if self.rope_theta is None else [f"rope_theta {self.rope_theta:,.0f}"]
        parts += ["previous token"] if self.unshifted else []
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the reading as a JSON object, without standard errors, which are infinite for a single text."""
        errors = ("error", "second_step_drop")
        return {"reading": str(self)} | {name: value for name, value in self._asdict().items() if name not in errors}


def list_readings(config: dict[str, Any], target: Any) -> list[Reading]:
    """List the readings (input choices) to test for heads with this config and a target with this configuration.

    The reading in the config comes first, followed by readings that engines use or that result from common mistakes.
    """
    count = target.num_hidden_layers
    named, normed = trained_layers(config, count), bool(config.get(NORMED))
    sources = [("as configured", named, normed)]
    sources += [(name, layers, normed and name != "sglang") for name, layers in layers_by_engine(config, count).items()]
    sources += [
        ("one layer later", [layer + 1 for layer in named], normed),
        ("one layer earlier", [layer - 1 for layer in named], normed),
        ("default layers", default_layers(count), normed),
        ("opposite norm", named, not normed),
    ]
    names_by_input: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for source, layers, is_normed in sources:
        if all(0 <= layer < count for layer in layers) and len(layers) == len(named):
            names_by_input.setdefault((tuple(layers), is_normed), []).append(source)
    readings = [Reading(*setting, names) for setting, names in names_by_input.items()]
    own_config = config.get("transformer_layer_config", config)
    bases = {"rope_theta of the target": rotary_base(vars(target)), "default rope_theta": rotary_base({})}
    others = {base: name for name, base in reversed(bases.items()) if base != rotary_base(own_config)}
    readings += [readings[0]._replace(names=[name], rope_theta=base) for base, name in others.items()]
    return [*readings, readings[0]._replace(names=["unshifted tokens"], unshifted=True)]


def attach_heads(folder: Path, model: Any, target: LanguageModel, dtype: torch.dtype | None = None) -> EagleHeads:
    """Load EAGLE-3 heads, and attach the target's embedding and output weights (default dtype: the target's)."""
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
def measure_readings(
    model: Any, folder: Path, passages: Sequence[Passage], progress: Callable[[int, int], None]
) -> list[Reading]:
    """Measure the agreement of every reading on passages.

    Raises:
        ValueError: There is no token to predict.
    """
    if not any(passage.text for passage in passages):
        raise ValueError(f"the {len(passages)} passages contain no token to predict")
    readings = list_readings(read_json(folder / CONFIG_FILE), model.config)
    layers = sorted({layer for reading in readings for layer in reading.layers})
    target = TransformersModel(model, aux_layers=layers)  # this wrapper does not change the layout of the weights
    heads, judged_P = attach_heads(folder, model, target), list[Floats]()
    rotary = [_rotary(heads, reading.rope_theta) for reading in readings]
    counts_WP: list[list[Floats]] = [[] for _ in readings]
    for done, passage in enumerate(passages, 1):
        new, steps = len(passage.text), heads.num_heads
        aux_1TG, last_1TD, ids_1T = target_states(target, passage)
        spans = [*chunks(new, target.vocab_size * steps)]
        best_X1 = torch.cat([target.logits(last_1TD[0, -new:][span]).argmax(-1) for span in spans])[:, None]
        position_XK = len(ids_1T[0]) - new - 1 + torch.arange(new)[:, None] - torch.arange(steps)
        judged_XK = (position_XK >= 0) & torch.tensor(passage.judged or [True] * new)[:, None]
        judged_P.append(judged_XK.sum(0).numpy())
        aux = dict(zip(layers, aux_1TG.chunk(len(layers), -1), strict=True))
        for counts, reading, heads.rotary_emb in zip(counts_WP, readings, rotary, strict=True):
            heads.normed = reading.normed
            input_1TG = torch.cat([aux[layer] for layer in reading.layers], -1)
            states_XKD = chains(heads, input_1TG, ids_1T, new, reading.unshifted)
            drafted_XK = torch.cat([draft_logits(heads, states_XKD[span]).argmax(-1) for span in spans])
            counts.append(((drafted_XK == best_X1).cpu() & judged_XK).sum(0).numpy())
        progress(done, len(passages))
    return _summarise(readings, np.array(counts_WP, dtype=np.float64), np.array(judged_P, dtype=np.float64))


def _summarise(readings: Sequence[Reading], agreeing_WPK: Floats, judged_PK: Floats) -> list[Reading]:
    """Return the readings with their measured agreement with the target, and standard errors over passages."""
    judged_P, count = judged_PK.sum(1), len(judged_PK)
    summaries, off = list[Reading](), list[Floats]()

    def error(values_P: Floats) -> float:
        return float(np.std(values_P, ddof=1)) / math.sqrt(count) if count > 1 else math.inf

    for reading, agreeing_PK in zip(readings, agreeing_WPK, strict=True):
        agrees, by_step_K = float(agreeing_PK.sum() / judged_P.sum()), agreeing_PK.sum(0) / judged_PK.sum(0)
        off.append((agreeing_PK.sum(1) - agrees * judged_P) / judged_P.mean())
        off_PK = (agreeing_PK - by_step_K * judged_PK) / judged_PK.mean(0)
        dropped = float(_MIN_SECOND_STEP * by_step_K[0] - by_step_K[1])
        summaries.append(
            reading._replace(
                agreement_by_step=tuple(by_step_K.tolist()),
                agreement=agrees,
                error=error(off[-1] - off[0]),
                second_step_drop=(dropped, error(_MIN_SECOND_STEP * off_PK[:, 0] - off_PK[:, 1])),
                texts=count,
            )
        )
    return summaries


def best_reading(readings: Sequence[Reading]) -> Reading | None:
    """Return the best reading if it is significantly better than the config's, otherwise None."""
    best = max(readings, key=lambda reading: reading.agreement)
    gain = best.agreement - readings[0].agreement
    return best if _is_significant(gain, best.error, best.texts, len(readings)) else None


def _is_significant(difference: float, error: float, texts: int, comparisons: int) -> bool:
    """Return whether a difference is significant, by Student's t with a Bonferroni correction."""
    if texts < _MIN_TEXTS:
        return False
    return difference > max(_MIN_DIFFERENCE, float(student_t.isf(_FALSE_ALARMS / comparisons, texts - 1)) * error)


def reading_findings(readings: Sequence[Reading], depth: int) -> list[Finding]:
    """Create findings if another reading fits better, or if heads that draft `depth` tokens agree less in step 2."""
    best, faults = best_reading(readings), []
    if best is not None:
        lost, quantile = best.agreement - readings[0].agreement, student_t.isf(0.005, best.texts - 1)
        error = float(quantile) * best.error
        numbers = f": {best} ({'; '.join(best.names)}), {best.agreement:.3f} instead of {readings[0].agreement:.3f}"
        faults.append(make_finding("inputs", lost, [lost - error, lost + error], numbers))
    reading = best or readings[0]
    first, second = reading.agreement_by_step[:2]
    if depth > 1 and _is_significant(*reading.second_step_drop, reading.texts, 1):
        faults.append(
            make_finding("steps", first - second, None, f": {first:.3f} in the first, {second:.3f} in the second")
        )
    return faults

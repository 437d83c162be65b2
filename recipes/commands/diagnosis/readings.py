"""What EAGLE-3 heads are worth fed otherwise than their config means: as an engine would feed them, and as they would
have been trained by the usual mistakes.

Letters: P passages, T tokens of a text but its last, X its new ones, K steps, D hidden, G the inner layers' states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student_t
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....checkpoints.artifact.compat import read_config
from ....checkpoints.heads.eagle import NORMED, EagleHeads, default_layers, load_eagle
from ....checkpoints.heads.published import layers_named
from ....checkpoints.pairs.eagle import READERS, layers_read, rotary_base
from ....checkpoints.pairs.sides import Diagnosis
from ....checkpoints.storage.names import CONFIG_FILE
from ....data.prompts import stop_ids
from ....data.tokenizers import load_tokenizer
from ....decode.engine import Limits
from ....decode.evaluation.bootstrap import Floats
from ....decode.evaluation.certify.rescoring import chunks
from ....decode.evaluation.diagnose.agreement import Passage, chains, draft_logits, given_states
from ....decode.evaluation.diagnose.stages import finding
from ....decode.evaluation.measure import decode
from ....decode.evaluation.tuning.steps import ratio_error
from ....decode.methods import Parts, build_method
from ....decode.models.base import LanguageModel, TransformersModel
from ....decode.models.eagle import EagleDrafter
from ....decode.models.loading import wrap_model
from ....decode.warpers import Sampling
from ...assemble.evaluation import load_target, prompts_of
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import Advance, bar
from ..evaluation.recipe import template_of

_PROMPTS, _TOKENS, _GAMMA = 32, 48, 3
_LEAST_TEXTS, _LEAST_SHARE, _CHANCE = 8, 0.005, 0.01
"""What is named must be seen in so many texts, be as large, and come by chance as seldom, all readings together."""
_LEAST_KEPT = 0.5
"""Share of the first step's agreement that the second keeps in heads that learned to read their own states: of the
real pair's 0.90, of heads that learned a single step 0.18."""


class Reading(NamedTuple):
    """Heads fed in one way."""

    layers: tuple[int, ...]
    normed: bool
    who: list[str]
    """Engines that feed so, and what else the reading is."""
    base: float | None = None
    """Of rotary positions; None: the config's."""
    behind: bool = False
    """Whether embeddings are those of the token before: heads learn so if their training does not shift the tokens."""
    by_step: tuple[float, ...] = ()
    """How often each step's best token is the target's, the text given."""
    agrees: float = 0.0
    """The same, of all steps."""
    apart: float = 0.0
    """Standard error of the difference of that from the config's reading, of the same texts."""
    dropped: tuple[float, float] = (0.0, 0.0)
    """How far the second step's agreement is below the half of the first's, and the error of that."""
    texts: int = 0
    """How many were read."""
    tokens_per_step: float | None = None
    """In real decoding; only of what engines do."""
    error: float = 0.0

    def __str__(self) -> str:
        parts = [f"layers {', '.join(map(str, self.layers))}"]
        parts += ["normed"] if self.normed else []
        parts += [] if self.base is None else [f"rope_theta {self.base:,.0f}"]
        parts += ["the token before"] if self.behind else []
        return ", ".join(parts)


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


def fed(
    folder: Path, way: Reading | None, model: Any, target: LanguageModel, dtype: torch.dtype | None = None
) -> EagleHeads:
    """The heads of a folder as this reading has them (None: the config), with the embeddings and output rows of a
    target (`model`), by default in its type."""
    heads = load_eagle(folder)
    if way is not None:
        heads.layers, heads.normed = way.layers, way.normed
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    heads = heads.to(target.device, dtype or target.weights_dtype).attach(*weights)
    heads.rotary_emb = _turning(heads, None if way is None else way.base)
    heads.config = heads.rotary_emb.config
    return heads


def _turning(heads: EagleHeads, base: float | None) -> LlamaRotaryEmbedding:
    """The rotary positions of heads with another base; None: with their own."""
    config = copy.deepcopy(heads.config)
    if base is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    return LlamaRotaryEmbedding(config).to(heads.fc.weight.device)


@torch.inference_mode()
def agreements(model: Any, folder: Path, passages: Sequence[Passage], advance: Advance) -> list[Reading]:
    """Every reading with how often the heads' best token is the target's, step by step, the text given. Raises
    ValueError: no text at all."""
    if not any(passage.text for passage in passages):
        raise ValueError(f"{len(passages)} passages without any token to predict")
    ways = readings(read_config(folder / CONFIG_FILE), model.config)
    layers = sorted({layer for way in ways for layer in way.layers})
    target = TransformersModel(model, aux_layers=layers)  # with no weights laid out anew
    heads, judged_P = fed(folder, None, model, target), list[Floats]()
    turns = [_turning(heads, way.base) for way in ways]
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
        for counts, way, heads.rotary_emb in zip(counts_WP, ways, turns, strict=True):
            heads.normed = way.normed
            read_1TG = torch.cat([given[layer] for layer in way.layers], -1)
            made_XKD = chains(heads, read_1TG, ids_1T, new, way.behind)
            drafted_XK = torch.cat([draft_logits(heads, made_XKD[span]).argmax(-1) for span in spans])
            counts.append(((drafted_XK == best_X1).cpu() & judged_XK).sum(0).numpy())
        advance(done, len(passages))
    return _compared(ways, np.array(counts_WP, dtype=np.float64), np.array(judged_P, dtype=np.float64))


def _compared(ways: Sequence[Reading], same_WPK: Floats, judged_PK: Floats) -> list[Reading]:
    """The readings with their shares, and the errors of these over passages."""
    judged_P, count = judged_PK.sum(1), len(judged_PK)
    found, off = list[Reading](), list[Floats]()
    for way, same_PK in zip(ways, same_WPK, strict=True):
        agrees = float(same_PK.sum() / judged_P.sum())
        off.append((same_PK.sum(1) - agrees * judged_P) / judged_P.mean())
        apart = float(np.std(off[-1] - off[0], ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        by_step_K = same_PK.sum(0) / judged_PK.sum(0)
        off_PK = (same_PK - by_step_K * judged_PK) / judged_PK.mean(0)
        lost_P = _LEAST_KEPT * off_PK[:, 0] - off_PK[:, 1]
        error = float(np.std(lost_P, ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        dropped = (float(_LEAST_KEPT * by_step_K[0] - by_step_K[1]), error)
        steps = tuple(by_step_K.tolist())
        found.append(way._replace(by_step=steps, agrees=agrees, apart=apart, dropped=dropped, texts=count))
    return found


def decoded(target: str, folder: Path, prompts: str, template: str | None = None) -> list[Reading]:
    """The readings on the target's own answers to the first prompts of a file or a known set, those of engines with
    tokens per step of greedy chains of three."""
    config = read_config(folder / CONFIG_FILE)
    values: dict[str, Any] = {"kind": "evaluate", "out": "", "target": target, "prompts": prompts, "limit": _PROMPTS}
    values |= {"template": template or template_of(target), "methods": [{"method": "autoregressive"}]}
    recipe = EvaluateRecipe.model_validate(values)
    tokenizer, model = load_tokenizer(target), load_target(recipe)
    asked, limits = [ids for _, ids in prompts_of(recipe, tokenizer)], Limits(_TOKENS, stop_ids(tokenizer))
    ways = [way for way in readings(config, model.config) if {"as the config says", *READERS} & {*way.who}]
    rates, answers = list[tuple[float, float]](), list[Passage]()
    with bar("decoding as engines would", "readings") as advance:
        for done, way in enumerate(ways, 1):
            wrapped = wrap_model(model, aux_layers=way.layers)
            drafter = EagleDrafter(fed(folder, way, model, wrapped))
            method = build_method("speculative", Parts(drafter), Sampling(), gamma=_GAMMA)
            runs = [decode(wrapped, method, Sampling(), 0, ids, limits) for ids in asked]
            tokens_P, steps_P = (np.array([getattr(run.tally, part) for run in runs]) for part in ("tokens", "steps"))
            rates.append((float(tokens_P.sum() / steps_P.sum()), ratio_error(tokens_P, steps_P)))
            answers = answers or [Passage(ids, run.ids) for ids, run in zip(asked, runs, strict=True) if run.ids]
            advance(done, len(ways))
    with bar("reading the answers in every way", "prompts") as advance:
        found = agreements(model, folder, answers, advance)
    by_way = {str(way): rate for way, rate in zip(ways, rates, strict=True)}
    return [
        way._replace(tokens_per_step=by_way[str(way)][0], error=by_way[str(way)][1]) if str(way) in by_way else way
        for way in found
    ]


def better(found: list[Reading]) -> Reading | None:
    """The best reading where it is plainly better than the first, which is the config's."""
    best = max(found, key=lambda reading: reading.agrees)
    return best if _is_plain(best.agrees - found[0].agrees, best.apart, best.texts, len(found)) else None


def _is_plain(difference: float, error: float, texts: int, tried: int) -> bool:
    """Whether a difference is larger than chance explains, by Student's t of so many texts, of so many that were
    tried."""
    if texts < _LEAST_TEXTS:
        return False
    return difference > max(_LEAST_SHARE, float(student_t.isf(_CHANCE / tried, texts - 1)) * error)


def in_readings(found: list[Reading], drafted: int) -> list[dict[str, Any]]:
    """What a diagnosis of heads that draft so many tokens finds in their readings."""
    best, faults = better(found), []
    if best is not None:
        lost, error = best.agrees - found[0].agrees, float(student_t.isf(0.005, best.texts - 1)) * best.apart
        numbers = f": {best} ({'; '.join(best.who)}), {best.agrees:.3f} instead of {found[0].agrees:.3f}"
        faults.append(finding("fed", lost, [lost - error, lost + error], numbers))
    read = best or found[0]
    first, second = read.by_step[:2]
    if drafted > 1 and _is_plain(*read.dropped, read.texts, 1):
        faults.append(finding("steps", first - second, None, f": {first:.3f} in the first, {second:.3f} in the second"))
    return faults


def in_files(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What the doctor finds in the files of heads that this engine minds, or that no engine can know."""
    return [
        finding("files", None, None, f": {one.check}: {one.what} (target {one.target}, heads {one.drafter})")
        | {"fault": bool(one.effects)}
        for one in diagnosis.findings
        if not one.effects or "draftsmith" in one.effects
    ]

"""Checks of EAGLE-3 heads and their target: how each engine reads their config, and what their files lack.

The engines' rules were read in their own code: vLLM 0.33's `config/speculative.py` and its two model runners, SGLang
0.5.23's `models/llama_eagle3.py`, llama.cpp's `conversion/llama.py` and `common/speculative.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..heads.eagle import HEAD, LAYER_IDS, NORMED, default_layers, proposed_in
from ..heads.published import SPECULATORS, layers_named
from ..storage.draft_vocabulary import TOKENS, check_tokens
from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .sides import Diagnosis, Effect, Finding, Side, refused, works_but

READERS = {
    "vllm": "vLLM 0.33, method eagle3",
    "vllm, runner V1": "vLLM 0.33 with VLLM_USE_V2_MODEL_RUNNER=0, method eagle3",
    "sglang": "SGLang 0.5.23, EAGLE3",
    "llama.cpp": "llama.cpp (b11434), draft-eagle3",
    "draftsmith": "this engine, as an evaluation's `drafter`",
}
"""Engines that decode with EAGLE-3 heads, and the versions whose rules are checked."""
Config = Mapping[str, Any]


def layers_read(config: Config, count: int) -> dict[str, list[int]]:
    """Return the layers (by their inputs, from 0) of a target with `count` layers that each engine reads."""
    nested, top, usual = config.get("eagle_config") or {}, config.get(LAYER_IDS), default_layers(count)
    own = nested.get(LAYER_IDS)
    return {
        "vllm": list(top or nested.get("layer_ids") or usual),
        "vllm, runner V1": list(top or own or usual),
        "sglang": [layer + 1 for layer in own] if own else usual,
        "llama.cpp": list(top or usual),
    }


def rotary_base(config: Config) -> float:
    """Return the base of rotary positions under any of transformers' keys (default: 10,000)."""
    rope: Config = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # some models have settings per layer type
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10_000)


def examine_eagle(target: Side, source: str, folder: Path) -> Diagnosis:
    """Run all checks of EAGLE-3 heads in a folder and their target. Raises ValueError if layer ids are invalid."""
    config = read_json(folder / CONFIG_FILE)
    stored = load_file(folder / WHOLE_FILES[0]) if (folder / WHOLE_FILES[0]).is_file() else {}
    trained = layers_named(config, target.config.num_hidden_layers)
    findings = [
        *_form(config, folder, stored),
        *_layers(config, trained, target),
        *_sizes(config, target),
        *_vocabulary(config, stored, target),
    ]
    return Diagnosis(target.source, source, tuple(findings), READERS)


def _inner(config: Config) -> Config:
    """Return the settings of the layer, which the form of speculators nests."""
    found: Config = config.get("transformer_layer_config", config)
    return found


def _form(config: Config, folder: Path, stored: Mapping[str, Any]) -> Iterator[Finding]:
    if SPECULATORS in config:
        effects = refused("it does not know this form", "sglang")
        effects |= refused("`draftsmith import` makes it the form of all", "draftsmith")
        what = "the config is in the form of speculators"
        yield Finding("form", what, "", str(config[SPECULATORS]), effects)
    elif not any(name.startswith("midlayer.") for name in stored):
        reason = "it reads its own names alone: `draftsmith import` gives them"
        value = next(iter(sorted(stored)), "no safetensors")
        yield Finding("form", "tensors have other names", "", value, refused(reason, "draftsmith"))
    if _inner(config).get("tie_word_embeddings", SPECULATORS not in config):
        effects = works_but("it takes the embeddings for the output layer: set tie_word_embeddings: false", "sglang")
        yield Finding("tied", "the config says, or leaves it open, that embeddings are tied", "", "true", effects)
    if config.get(NORMED, SPECULATORS in config):
        effects = works_but(f"it does not know {NORMED}: the layer's residual stream is another", "sglang")
        yield Finding("norm", "the residual stream begins behind a norm", "", f"{NORMED}: true", effects)
    if not (folder / WHOLE_FILES[0]).is_file():
        effects = refused("it reads safetensors alone: `draftsmith import --unpickle`", "draftsmith")
        yield Finding("weights", f"there is no {WHOLE_FILES[0]}", "", "", effects)


def _layers(config: Config, trained: list[int], target: Side) -> Iterator[Finding]:
    if len(trained) != 3:
        effects = refused(f"it takes heads that read three layers, not {len(trained)}", "llama.cpp")
        yield Finding("number of layers", "not every engine takes this many", "3", str(len(trained)), effects)
    read = layers_read(config, target.config.num_hidden_layers)
    wrong = {name: layers for name, layers in read.items() if layers != trained}
    if wrong:
        effects = dict[str, Effect]()
        for name, layers in wrong.items():
            effects |= works_but(f"it feeds layers {', '.join(map(str, layers))}: little is accepted", name)
        if LAYER_IDS not in config:
            effects |= refused(f"it looks for {LAYER_IDS} beside the sizes: `draftsmith import`", "draftsmith")
        what = f"engines find other layers in the config than {LAYER_IDS} means"
        mine, theirs = (", ".join(map(str, layers)) for layers in (next(iter(wrong.values())), trained))
        yield Finding("layers", what, mine, theirs, effects)


def _sizes(config: Config, target: Side) -> Iterator[Finding]:
    for name in ("hidden_size", "vocab_size"):
        mine, theirs = getattr(target.config, name), _inner(config).get(name)
        if mine != theirs:
            reason = "the heads are of another target"
            yield Finding(name, reason, str(mine), str(theirs), refused(reason, *READERS))
    mine, theirs = rotary_base(vars(target.config)), rotary_base(_inner(config))
    if mine != theirs:
        reason = "positions turn otherwise than in the target: right only if the heads were trained so"
        yield Finding("rotary positions", reason, f"{mine:,.0f}", f"{theirs:,.0f}", {})


def _vocabulary(config: Config, stored: Mapping[str, Any], target: Side) -> Iterator[Finding]:
    if not stored:
        return
    rows = len(stored[HEAD]) if HEAD in stored else target.vocab_size
    named = config.get("draft_vocab_size") or target.vocab_size
    if rows != named:
        reason = "sizes of the output layer do not agree"
        yield Finding("draft vocabulary", reason, str(named), str(rows), refused(reason, *READERS))
    if HEAD not in stored and config.get("draft_vocab_size") is not None:
        reason = "it drafts with random rows, since it takes the target's output layer only if draft_vocab_size is null"
        what = "the files have no output layer"
        yield Finding("output layer", what, "", f"draft_vocab_size: {named}", works_but(reason, "sglang"))
    if named < target.vocab_size and TOKENS not in stored:
        reason = "nothing says which tokens the output rows are of"
        yield Finding("draft vocabulary", reason, "", f"no {TOKENS}", works_but(reason, *READERS))
    if (ids_R := proposed_in(stored)) is None:
        return
    known = [number for number, kept in enumerate(stored["t2d"].tolist()) if kept] if "t2d" in stored else None
    try:
        check_tokens(ids_R, target.vocab_size)
        wrong = "" if known in (None, ids_R.tolist()) else "t2d names other tokens"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        effects = works_but(f"{TOKENS} has it draft other tokens than it learned", *READERS)
        yield Finding("draft vocabulary", f"{TOKENS} does not hold offsets to the ids", "", wrong, effects)

"""Static checks of EAGLE-3 heads and their target: missing tensors, and how each engine interprets the config.

The rules follow the code of the engines: vLLM 0.33's `config/speculative.py` and its two model runners, SGLang
0.5.23's `models/llama_eagle3.py`, llama.cpp's `conversion/llama.py` and `common/speculative.cpp`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..heads.auxiliary import HEAD, draft_tokens_in
from ..heads.eagle import FC_NORM, LAYER_IDS, NORM_BEFORE_FC, NORM_OUTPUT, NORMED, NORMS, default_layers
from ..heads.published import SPECULATORS, trained_layers, trained_norms
from ..storage.draft_vocabulary import TOKENS, check_tokens
from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .sides import Diagnosis, Effect, Finding, ModelInfo, check_sizes, degrade, refuse

READERS = {
    "vllm": "vLLM 0.33, method eagle3",
    "vllm, runner V1": "vLLM 0.33 with VLLM_USE_V2_MODEL_RUNNER=0, method eagle3",
    "sglang": "SGLang 0.5.23, EAGLE3",
    "llama.cpp": "llama.cpp (b11434), draft-eagle3",
    "draftsmith": "draftsmith, as `drafter` of an evaluation",
}
"""Engines that decode with EAGLE-3 heads, and the versions whose rules are checked."""
NORM_VERSIONS = (
    "vLLM 0.32 and SGLang 0.5.23 read fc_norm, norm_before_fc and norm_output; vLLM before pull request 42764 (May "
    "2026) reads only norm_before_fc"
)
"""Versions of engines that read the norms of EAGLE-3.1 (see `NORMS`)."""
Config = Mapping[str, Any]


def layers_by_engine(config: Config, count: int) -> dict[str, list[int]]:
    """Return the target layers whose inputs each engine passes to the heads, for a target with `count` layers."""
    nested, top, usual = config.get("eagle_config") or {}, config.get(LAYER_IDS), default_layers(count)
    own = nested.get(LAYER_IDS)
    return {
        "vllm": list(top or nested.get("layer_ids") or usual),
        "vllm, runner V1": list(top or own or usual),
        "sglang": [layer + 1 for layer in own] if own else usual,
        "llama.cpp": list(top or usual),
    }


def rotary_base(config: Config) -> float:
    """Return the RoPE base from any of the config keys that transformers uses (default: 10,000)."""
    rope: Config = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # some models have settings per layer type
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10_000)


def examine_eagle(target: ModelInfo, source: str, folder: Path) -> Diagnosis:
    """Run all checks of the EAGLE-3 heads in a folder. Raises ValueError if their layer ids are invalid."""
    config = read_json(folder / CONFIG_FILE)
    stored = load_file(folder / WHOLE_FILES[0]) if (folder / WHOLE_FILES[0]).is_file() else {}
    trained = trained_layers(config, target.config.num_hidden_layers)
    findings = [
        *_form(config, folder, stored),
        *_norms(config),
        *_layers(config, trained, target),
        *_sizes(config, target),
        *_vocabulary(config, stored, target),
    ]
    return Diagnosis(target.source, source, tuple(findings), READERS)


def _layer_settings(config: Config) -> Config:
    """Return the config of the decoder layer, which the speculators format stores in a nested dictionary."""
    return config.get("transformer_layer_config", config)


def _form(config: Config, folder: Path, stored: Mapping[str, Any]) -> Iterator[Finding]:
    if SPECULATORS in config:
        effects = refuse("the speculators format is not supported", "sglang")
        effects |= refuse("convert it with `draftsmith import`", "draftsmith")
        problem = "the config is in the speculators format"
        yield Finding("form", problem, "", str(config[SPECULATORS]), effects)
    elif not any(name.startswith("midlayer.") for name in stored):
        reason = "rename the tensors with `draftsmith import`"
        value = next(iter(sorted(stored)), "no safetensors")
        yield Finding("form", "the tensors have unknown names", "", value, refuse(reason, "draftsmith"))
    if _layer_settings(config).get("tie_word_embeddings", SPECULATORS not in config):
        effects = degrade("the embeddings are used as the output layer: set tie_word_embeddings: false", "sglang")
        yield Finding("tied", "the config ties the embeddings, explicitly or by default", "", "true", effects)
    if config.get(NORMED, SPECULATORS in config):
        effects = degrade(f"{NORMED} is not supported, so the residual stream differs", "sglang")
        yield Finding("norm", "the residual stream starts after the norm", "", f"{NORMED}: true", effects)
    if not (folder / WHOLE_FILES[0]).is_file():
        effects = refuse("only safetensors are read: convert it with `draftsmith import --unpickle`", "draftsmith")
        yield Finding("weights", f"there is no {WHOLE_FILES[0]}", "", "", effects)


def _norms(config: Config) -> Iterator[Finding]:
    if not (norms := trained_norms(config)):
        return
    effects, named = dict[str, Effect](), [name for name in NORMS if config.get(name)]
    if FC_NORM in norms:
        effects |= refuse(f"{FC_NORM} is not supported", "llama.cpp")
        if FC_NORM not in named:
            effects |= refuse(f"the config does not name {FC_NORM}: use `draftsmith import`", "vllm", "vllm, runner V1")
    elif NORM_OUTPUT in norms:
        effects |= degrade(f"{NORM_OUTPUT} is not supported, so the second draft token differs", "llama.cpp")
    elif NORM_BEFORE_FC in norms:
        effects |= degrade(f"{NORM_BEFORE_FC} has not been tested", "llama.cpp")
    if norms != named and SPECULATORS not in config:
        effects |= refuse(f"the config does not name {', '.join(norms)}: use `draftsmith import`", "draftsmith")
    problem, advice = "only some engines read these config keys", f"check the version of the engine: {NORM_VERSIONS}"
    yield Finding("norms of EAGLE-3.1", problem, "", ", ".join(norms), effects, advice)


def _layers(config: Config, trained: list[int], target: ModelInfo) -> Iterator[Finding]:
    if len(trained) != 3:
        effects = refuse(f"heads must read 3 layers, got {len(trained)}", "llama.cpp")
        yield Finding("number of layers", "not all engines support this number", "3", str(len(trained)), effects)
    read = layers_by_engine(config, target.config.num_hidden_layers)
    if wrong := {name: layers for name, layers in read.items() if layers != trained}:
        effects = dict[str, Effect]()
        for name, layers in wrong.items():
            effects |= degrade(f"it reads layers {', '.join(map(str, layers))}, so the acceptance rate is low", name)
        if LAYER_IDS not in config:
            effects |= refuse(f"the config has no {LAYER_IDS}: use `draftsmith import`", "draftsmith")
        problem = "not all engines read the layers that the heads were trained on"
        of_engine, of_heads = (", ".join(map(str, layers)) for layers in (next(iter(wrong.values())), trained))
        yield Finding("layers", problem, of_engine, of_heads, effects)


def _sizes(config: Config, target: ModelInfo) -> Iterator[Finding]:
    yield from check_sizes(target, _layer_settings(config), READERS)
    of_heads, of_target = _layer_settings(config).get("max_position_embeddings"), target.positions
    if of_heads and of_target and of_heads < of_target:
        effects = degrade(f"texts with more than {of_heads:,} tokens are drafted poorly or fail", "vllm", "sglang")
        problem = "the heads have fewer positions than the target"
        yield Finding("context length", problem, str(of_target), str(of_heads), effects)
    bases = [rotary_base(each) for each in (vars(target.config), _layer_settings(config))]
    if bases[0] != bases[1]:
        reason = "the base of rotary positions differs from the target's"
        yield Finding("rotary positions", reason, f"{bases[0]:,.0f}", f"{bases[1]:,.0f}")


def _vocabulary(config: Config, stored: Mapping[str, Any], target: ModelInfo) -> Iterator[Finding]:
    if not stored:
        return
    rows = len(stored[HEAD]) if HEAD in stored else target.vocab_size
    named = config.get("draft_vocab_size") or target.vocab_size
    if rows != named:
        reason = "the size of the output layer differs from the config's"
        yield Finding("draft vocabulary", reason, str(named), str(rows), refuse(reason, *READERS))
    if HEAD not in stored and config.get("draft_vocab_size") is not None:
        reason = "it drafts with a random output layer: set draft_vocab_size to null to use the target's"
        problem = "the files contain no output layer"
        yield Finding("output layer", problem, "", f"draft_vocab_size: {named}", degrade(reason, "sglang"))
    if named < target.vocab_size and TOKENS not in stored:
        reason = "the files do not list the tokens of the output layer"
        yield Finding("draft vocabulary", reason, "", f"no {TOKENS}", degrade(reason, *READERS))
    if (ids_R := draft_tokens_in(stored)) is None:
        return
    known = [number for number, is_draft in enumerate(stored["t2d"].tolist()) if is_draft] if "t2d" in stored else None
    try:
        check_tokens(ids_R, target.vocab_size)
        wrong = "" if known in (None, ids_R.tolist()) else "t2d lists different tokens"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        effects = degrade("it drafts tokens that it was not trained on", *READERS)
        yield Finding("draft vocabulary", f"{TOKENS} is not valid", "", wrong, effects)

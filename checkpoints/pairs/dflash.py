"""Static checks of a DFlash or DSpark drafter and its target: tensors, and how each engine interprets the config.

The rules follow the code of the engines: vLLM 0.33's `models/qwen3_dflash.py`, `models/qwen3_dspark.py` and its two
model runners, SGLang 0.5.23's `models/dflash.py`, `models/dspark.py` and `speculative/dflash_utils.py`, and
`generation/candidate_generator.py` of transformers 5.24. Those of TensorRT-LLM follow its documentation.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..artifact.artifact import load_manifest
from ..heads.auxiliary import HEAD
from ..heads.dflash import BLOCK, LAYER_IDS, MASK, SETTINGS, setting_faults, settings_section
from ..heads.dspark import ANCHOR, CONFIDENCE, KIND, RANK
from ..heads.eagle import LAYER_IDS as INPUT_IDS
from ..heads.layouts import drafts_blocks
from ..heads.published import MASK_EMBEDDING, SPECULATORS, common_settings, published_kind
from ..storage.draft_vocabulary import TOKENS
from ..storage.names import CONFIG_FILE, MANIFEST_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .sides import Diagnosis, Effect, Finding, ModelInfo, check_sizes, degrade, diagnose, refuse

READERS = {
    "vllm": "vLLM 0.33, method dflash",
    "sglang": "SGLang 0.5.23, DFLASH",
    "tensorrt-llm": "TensorRT-LLM, DFlash (rules of its documentation)",
    "transformers": "transformers 5.24, after an export to dflash-transformers",
    "draftsmith": "draftsmith, as `drafter` of an evaluation",
}
DSPARK_READERS = {
    "vllm": "vLLM 0.33, method dspark (model runner V2)",
    "sglang": "SGLang 0.5.23, DSPARK",
    "draftsmith": READERS["draftsmith"],
}
"""Engines that decode with DFlash and DSpark drafters, and the versions whose rules are checked."""
SGLANG_TARGETS = (
    *("llama", "mistral", "ministral3", "phi3", "internlm3", "nanbeige", "gpt_oss", "gemma4", "lfm2", "qwen3"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "nemotron_h", "mimo_v2", "muse"),
)
"""Beginnings of the model types of targets whose hidden states SGLang passes to DFlash drafters."""
_SGLANG_BLOCK, _SGLANG_MASK = 16, "<|MASK|>"  # defaults
_LAYER = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
)
_MARKOV = {"first": "markov_head.markov_w1.weight", "second": "markov_head.markov_w2.weight"}
_DSPARK_TENSORS = {*_MARKOV.values(), "confidence_head.proj.weight", "confidence_head.proj.bias"}
_OPTIONAL, _EMBEDDINGS = {HEAD, TOKENS, "t2d"}, "embed_tokens.weight"
_OWN = ("transformers", "draftsmith")  # engines that read what this package loads
Config = Mapping[str, Any]


def examine_dflash(target: ModelInfo, source: str, folder: Path) -> Diagnosis:
    """Run all checks of the DFlash or DSpark drafter in a folder. `source` is its name in the result."""
    config, whole = read_json(folder / CONFIG_FILE), folder / WHOLE_FILES[0]
    common, stored = common_settings(config), load_file(whole) if whole.is_file() else {}
    trained = dict(load_manifest(folder).shapes) if (folder / MANIFEST_FILE).is_file() else {}
    is_spark = published_kind(folder) == "dspark"
    checks = [
        *_check_form(config, folder, is_spark),
        *_check_layers(config, common, trained, target),
        *_check_mask(common[SETTINGS], trained, target),
        *_check_block(config, trained, is_spark),
        *_check_settings(common),
        *_check_tensors(common, stored, target, is_spark),
        *_check_vocabulary(common, stored, target, is_spark),
        *_check_family(target.config.model_type),
        *(_check_markov(config, trained, stored) if is_spark else ()),
    ]
    return diagnose(target, source, checks, DSPARK_READERS if is_spark else READERS)


def _check_form(config: Config, folder: Path, is_spark: bool) -> Iterator[Finding]:
    if (folder / MASK_EMBEDDING).is_file():
        effects = degrade("it embeds the mask token with the target's embedding", "transformers")
        effects |= refuse("it does not support trained mask embeddings", "draftsmith")
        yield Finding("mask embedding", "not all engines read the trained mask embedding", "", MASK_EMBEDDING, effects)
    kind = str((config.get(SPECULATORS) and "speculators") or config.get("model_type"))
    if not drafts_blocks(folder):
        effects = refuse(f"{kind} is not supported" if is_spark else "convert it with `draftsmith import`", *READERS)
        del effects["vllm" if kind == "speculators" else "transformers"]
        yield Finding("form", "the config is in a format that few engines read", "", kind, effects)
    elif not settings_section(config) and not is_spark:
        effects = refuse("convert it with `draftsmith import`", *_OWN)
        effects |= degrade(f"one of its model runners ignores layer ids outside of {SETTINGS}", "vllm")
        yield Finding("form", f"the config has no {SETTINGS}", "", kind, effects)


def _check_layers(config: Config, common: Config, trained: Config, target: ModelInfo) -> Iterator[Finding]:
    ids, count = common[SETTINGS][LAYER_IDS], target.config.num_hidden_layers
    if not isinstance(ids, list) or not ids or not all(type(layer) is int and 0 <= layer < count for layer in ids):
        reason = f"{LAYER_IDS} must list layers of the target"
        yield Finding("layers", reason, f"0 to {count - 1}", str(ids), refuse(reason, *READERS))
        return
    if max(ids) == count - 1:
        effects = refuse("it does not return the outputs of the last layer", *READERS)
        effects |= degrade("it returns the outputs before the final norm", "vllm")
        effects |= degrade("it returns the outputs after the final norm", "transformers")
        yield Finding("last layer", "engines disagree about its outputs", f"{count} layers", str(max(ids)), effects)
    expected = [int(each) - 1 for each in str(trained.get("states", "")).split("-")[1:]] or ids
    read = dict.fromkeys(READERS, ids) | {"vllm": sorted(set(ids))}
    if (inputs := config.get(INPUT_IDS)) is not None:
        read["vllm"] = [layer - 1 for layer in inputs]
    if wrong := {name: layers for name, layers in read.items() if layers != expected}:
        effects = degrade(f"it reads other layers than {expected}, so the acceptance rate is low", *wrong)
        problem = "not all engines read the layers that the drafter was trained on"
        yield Finding("layers", problem, str(next(iter(wrong.values()))), str(expected), effects)


def _check_mask(section: Config, trained: Config, target: ModelInfo) -> Iterator[Finding]:
    mask, size = section[MASK], target.vocab_size
    expected: Any
    text = section.get("mask_token") or _SGLANG_MASK
    if type(mask) is not int or not 0 <= mask < size:
        problem, expected = f"{MASK} is not a token of the target", f"{size:,} tokens"
        effects = refuse(f"{MASK} must be in 0 to {size - 1}, got {mask}", *READERS)
    elif (expected := trained.get("mask_token", mask)) != mask:
        problem = f"{MASK} differs from the training's"
        effects = degrade(f"{MASK} was {expected} in training", *READERS)
    elif (expected := target.vocab.get(text, mask)) != mask:
        problem = f"{MASK} is not the id of {text!r} in the target's tokenizer"
        effects = refuse(f"the id of mask_token {text} is {expected}, not {mask}", "sglang")
    else:
        return
    yield Finding("mask token", problem, str(expected), str(mask), effects)


def _check_block(config: Config, trained: Config, is_spark: bool) -> Iterator[Finding]:
    anchors = 0 if is_spark else 1  # a block of DSpark counts draft tokens, one of DFlash also the anchor
    section, top = settings_section(config).get(BLOCK), config.get(BLOCK)
    first = section or top
    read = {"sglang": first or _SGLANG_BLOCK, "tensorrt-llm": top, **dict.fromkeys(_OWN, first)}
    expected = trained.get("num_heads", (first or _SGLANG_BLOCK) - anchors) + anchors
    effects = dict[str, Effect]()
    for name, size in read.items():
        if size is None:
            effects |= refuse(f"the config has no {BLOCK} at the top level", name)
        elif size != expected:
            effects |= degrade(f"it drafts with a block of {size} tokens, trained with {expected}", name)
    values = f"{top}, in {SETTINGS} {section}"
    yield Finding("block size", f"{BLOCK} is missing or differs", f"{expected} trained", values, effects)


def _check_settings(common: Config) -> Iterator[Finding]:
    for name, fault in setting_faults(common).items():
        effects = degrade("drafters that were trained without this setting have a low acceptance rate", *READERS)
        effects |= refuse(f"{fault}, which is not supported", *_OWN)
        yield Finding(name, "the setting changes the forward pass", "", fault, effects)


def _check_tensors(common: Config, stored: Config, target: ModelInfo, is_spark: bool) -> Iterator[Finding]:
    yield from check_sizes(target, common, READERS)
    if not any(name.startswith("layers.") for name in stored):
        if not stored:
            effects = refuse("use `draftsmith import --unpickle`, since only safetensors are read", *_OWN)
            yield Finding("weights", f"there is no {WHOLE_FILES[0]}", "", "", effects)
        return
    fed = len(common[SETTINGS][LAYER_IDS] or ()) * target.config.hidden_size
    if (width := stored["fc.weight"].shape[1] if "fc.weight" in stored else fed) != fed:
        reason = f"fc.weight has {width} columns, but the target's states have {fed}"
        yield Finding("target width", "the drafter reads other states", str(fed), str(width), refuse(reason, *READERS))
    layers = [f"layers.{layer}.{name}" for layer in range(common.get("num_hidden_layers", 0)) for name in _LAYER]
    expected = {f"{name}.weight" for name in ("fc", "hidden_norm", "norm", *layers)}
    expected |= _DSPARK_TENSORS if is_spark else set()
    if other := sorted(set(stored) - expected - _OPTIONAL):
        effects = refuse(f"unknown tensor {other[0]}", *_OWN, *(["vllm"] if other != [_EMBEDDINGS] else []))
        yield Finding("tensors", "the files contain unknown tensors", "", other[0], effects)
    if missing := sorted(expected - set(stored)):
        effects = degrade(f"{missing[0]} remains uninitialised", *READERS) | refuse(f"{missing[0]} is missing", *_OWN)
        yield Finding("tensors", "tensors are missing", "", missing[0], effects)


def _check_vocabulary(common: Config, stored: Config, target: ModelInfo, is_spark: bool) -> Iterator[Finding]:
    if HEAD not in stored and TOKENS not in stored:
        return
    rows, named = len(stored.get(HEAD, ())), common.get("draft_vocab_size") or target.vocab_size
    ignored = "it ignores the drafter's output layer, and drafts all tokens with the target's"
    effects = degrade(ignored, "sglang", "transformers")
    if is_spark:
        effects |= refuse("its Markov head requires all tokens", "sglang")
    wrong = "" if rows == named else f"{HEAD} has {rows} rows, but draft_vocab_size is {named}"
    if rows < target.vocab_size and TOKENS not in stored:
        wrong = f"the files contain no {TOKENS}"
    if wrong:
        effects |= refuse(wrong, "vllm", "draftsmith")
    problem = "the draft vocabulary is not valid" if wrong else "not all engines support a draft vocabulary"
    yield Finding("draft vocabulary", problem, f"{target.vocab_size:,}", wrong or f"{rows:,}", effects)


def _check_markov(config: Config, trained: Config, stored: Config) -> Iterator[Finding]:
    anchor, kind, rank = (config.get(name) for name in (ANCHOR, KIND, RANK))
    expected = trained.get("block_size") == trained.get("num_heads") if trained else anchor
    if anchor is None and SPECULATORS not in config:
        problem = "the config does not say whether the first slot of a block predicts a token"
        effects = degrade(f"it assumes {ANCHOR}: true; otherwise hardly any token is accepted", "vllm", "sglang")
        yield Finding("anchor", problem, "", f"no {ANCHOR}", effects | refuse(f"{ANCHOR} is missing", "draftsmith"))
    elif anchor != expected:
        effects = degrade(f"{ANCHOR} was {str(expected).lower()} in training", *DSPARK_READERS)
        yield Finding("anchor", f"{ANCHOR} differs from the training's", "", str(anchor).lower(), effects)
    if kind != "vanilla":
        fault = f"{KIND} is missing" if kind is None else f"{KIND} {kind} is not supported"
        effects = refuse(fault, "sglang" if kind is None else "vllm", "draftsmith")
        yield Finding("Markov head", "not all engines support the type of the Markov head", "", str(kind), effects)
    for name, tensor in _MARKOV.items():
        if tensor in stored and (columns := stored[tensor].shape[1]) != rank:
            effects = refuse(f"{RANK} must be {columns}, got {rank}", *DSPARK_READERS)
            yield Finding("Markov head", f"the rank differs from the {name} matrix", "", f"{columns} columns", effects)
    if not config.get(CONFIDENCE):
        effects = degrade("it does not use the confidence head", "vllm") | refuse(f"set {CONFIDENCE}", "draftsmith")
        yield Finding("confidence head", f"the config does not set {CONFIDENCE}", "", "", effects)


def _check_family(kind: str) -> Iterator[Finding]:
    effects = dict[str, Effect]()
    if kind.startswith("gemma"):
        effects |= degrade("it does not scale the embeddings of the block, unlike the training", "vllm")
    if not kind.startswith(SGLANG_TARGETS):
        effects |= refuse(f"it does not return hidden states of {kind} targets to DFlash drafters", "sglang")
    yield Finding("family", "not all engines support this target", kind, "", effects)

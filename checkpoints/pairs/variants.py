"""Corrected configs of EAGLE-3 heads and block drafters, and variants that a wrong config may have replaced.

Shape letters: R draft vocabulary.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..heads import published
from ..heads.auxiliary import HEAD, draft_tokens_in
from ..heads.dflash import LAYER_IDS, MASK, SETTINGS, setting_faults
from ..heads.dspark import ANCHOR, CONFIDENCE, KIND, RANK, WITH_MARKOV
from ..heads.eagle import LAYER_IDS as INPUT_IDS
from ..heads.eagle import NORM_BEFORE_FC, NORM_OUTPUT, NORMED, default_layers
from ..heads.layouts import DFLASH, EAGLE, is_dspark
from ..storage.draft_vocabulary import TOKENS, check_tokens
from ..storage.names import CONFIG_FILE, WHOLE_FILES
from ..storage.safe_read import read_json
from .eagle import layers_by_engine, rotary_base
from .sides import ModelInfo

Config = dict[str, Any]
_USUAL: Config = dict.fromkeys(("is_causal", "causal", "use_sliding_window", "use_swa"), False)
_USUAL |= {"is_neox_style": True, "partial_rotary_factor": 1}
"""Values of attention settings with which a block drafter can be loaded."""
_MASKS = ("mask_token_id", "pad_token_id", "eos_token_id", "unk_token_id")


def correct(folder: Path, target: ModelInfo) -> tuple[Config, Config, dict[str, Tensor], list[str]]:
    """Correct settings and draft tokens that contradict the tensors of EAGLE-3 heads or of a block drafter.

    Returns:
        Config in the format of serving engines, the same with corrected settings, tensors, and descriptions of
        corrected tensors.

    Raises ValueError if the format is not supported.
    """
    kind, path, done = published.published_kind(folder), folder / WHOLE_FILES[0], list[str]()
    if (kind == "dspark" and not is_dspark(folder)) or (folder / published.MASK_EMBEDDING).is_file():
        what = "DSpark drafters of speculators and trained mask embeddings"
        raise ValueError(f"{folder}: {what} are only checked: omit --fix and --prompts")
    if not path.is_file():
        raise ValueError(f"{folder} has no {path.name}: convert it with `draftsmith import`")
    config, weights, facts = read_json(folder / CONFIG_FILE), load_file(path), Config()
    if kind == "eagle3":
        norms, normed = published.trained_norms(config), bool(config.get(NORMED, published.SPECULATORS in config))
        nested = {name: value for name, value in (config.get("eagle_config") or {}).items() if name != NORM_BEFORE_FC}
        config |= {**config.pop("transformer_layer_config", {}), "architectures": [EAGLE], "eagle_config": nested}
        config |= {name: name in norms for name in published.NORM_TENSORS}
        config |= {NORMED: normed, published.OTHER_FC_NORM: None}
        stored = {published.rename_tensor(name) for name in weights}
        facts = {name: tensor in stored for name, tensor in published.NORM_TENSORS.items()}
    elif kind == "dspark":
        names = ("markov_head.markov_w1.weight", "confidence_head.proj.weight")
        first, confidence = (weights.get(name) for name in names)
        if first is not None and confidence is not None:
            with_markov = confidence.shape[1] == config["hidden_size"] + first.shape[1]
            facts = {RANK: first.shape[1], KIND: "vanilla", CONFIDENCE: True, WITH_MARKOV: with_markov}
        facts |= {ANCHOR: config.get(ANCHOR, True)}  # the default of engines
        config = published.common_settings(config)
    else:
        config = published.common_settings(config) | {"architectures": [DFLASH], "model_type": "qwen3"}
    config.pop(published.SPECULATORS, None)
    if (ids_R := _listed_tokens(weights, target.vocab_size)) is not None:
        weights[TOKENS] = ids_R - torch.arange(len(ids_R))
        done.append(f"{TOKENS}: offsets of {len(ids_R):,} draft tokens")
    return config, config | facts, weights, done


def _listed_tokens(stored: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Return the draft tokens if the files do not list them as offsets: from `t2d`, or from ids instead of offsets."""
    ids_R = draft_tokens_in(stored)
    if "t2d" in stored:
        known_R = stored["t2d"].bool().nonzero()[:, 0]
        is_same = ids_R is not None and torch.equal(ids_R, known_R)
        return known_R if len(known_R) == len(stored.get(HEAD, ())) and not is_same else None
    for each_R in () if ids_R is None else (ids_R, stored[TOKENS]):
        try:
            check_tokens(each_R, vocab_size)
            return None if each_R is ids_R else each_R
        except ValueError:
            continue
    return None


def describe_changes(before: Config, after: Config) -> list[str]:
    """Describe the settings that differ between two configs, including those in nested sections."""

    def flatten(config: Config) -> dict[tuple[str, str], Any]:
        parts = [(part, each) for part, each in (("", config), *config.items()) if isinstance(each, dict)]
        return {(part, name): each[name] for part, each in parts for name in each if not isinstance(each[name], dict)}

    old, new = flatten(before), flatten(after)
    keys = [key for key in old | new if old.get(key) != new.get(key)]
    changed = {name: new.get((part, name)) for part, name in keys}
    return [f"without {name}" if value is None else f"{name}: {json.dumps(value)}" for name, value in changed.items()]


def list_variants(config: Config, target: ModelInfo) -> Iterator[Config]:
    """Yield configs that differ by one setting. Of two that are equally good, the likelier one comes first."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"}
    yield from _eagle_variants(config, target) if SETTINGS not in config else _block_variants(config, target, rope)
    for base in sorted({rotary_base(vars(target.config)), rotary_base({})} - {rotary_base(config)}):
        yield {**config, "rope_parameters": {**rope, "rope_theta": base}}


def _eagle_variants(config: Config, target: ModelInfo) -> Iterator[Config]:
    count = target.config.num_hidden_layers
    own = published.trained_layers(config, count)
    others = [[layer + step for layer in own] for step in (1, -1)]
    for ids in dict.fromkeys(map(tuple, (*others, default_layers(count), *layers_by_engine(config, count).values()))):
        if [*ids] != own and len(ids) == len(own) and all(0 <= layer < count for layer in ids):
            yield {**config, INPUT_IDS: [*ids]}
    switched = [{**config, name: not config.get(name)} for name in (NORM_OUTPUT, NORMED)]
    # heads with one norm of EAGLE-3.1 usually have all of them
    yield from switched if published.trained_norms(config) else reversed(switched)


def _block_variants(config: Config, target: ModelInfo, rope: Config) -> Iterator[Config]:
    section, last, vocab = config[SETTINGS], target.config.num_hidden_layers - 1, target.vocab
    for step in (1, -1):
        ids = [layer + step for layer in section[LAYER_IDS] or ()]
        if ids and all(0 <= layer < last for layer in ids):
            yield {**config, INPUT_IDS: None, SETTINGS: {**section, LAYER_IDS: ids}}
    masks = {getattr(target.tokenizer, name, None) for name in _MASKS} | {vocab.get("<|MASK|>"), len(vocab)}
    for mask in sorted({each for each in masks if each is not None and each < target.vocab_size} - {section[MASK]}):
        yield {**config, SETTINGS: {**section, MASK: mask}}
    if ANCHOR in config:
        yield {**config, ANCHOR: not config[ANCHOR]}
    if setting_faults(config):
        plain, section, rope = (
            {name: _USUAL.get(name, each[name]) for name in each} for each in (config, section, rope)
        )
        plain["layer_types"] = ["full_attention" for _ in config.get("layer_types") or ()] or None
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}
        yield {**plain, SETTINGS: section, "rope_parameters": rope, "rope_scaling": None}

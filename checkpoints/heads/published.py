"""Loading of published EAGLE-3 heads and DFlash drafters, in the formats of serving engines and of speculators.

See `pairs/eagle.py` and `pairs/dflash.py` for what each engine reads from a config.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from ..storage.draft_vocabulary import TOKENS
from ..storage.names import CONFIG_FILE, PICKLED_WHOLE_FILES, WHOLE_FILES
from ..storage.safe_read import read_json
from .auxiliary import HEAD, AuxiliaryHeads, check_layers, draft_tokens_in, fill_heads
from .dflash import BLOCK, MASK, SETTINGS, DFlashHeads, build_dflash, settings_section
from .dflash import LAYER_IDS as OUTPUT_IDS
from .dspark import load_dspark
from .eagle import FC_NORM, LAYER_IDS, NORM_BEFORE_FC, NORMED, NORMS, EagleHeads, default_layers
from .layouts import DFLASH, DSPARK, EAGLE, is_dspark, read_pickled

SPECULATORS = "speculators_model_type"
TRANSFORMERS_DFLASH = "muse_glimmer_assistant"
"""`model_type` of DFlash drafters in transformers, with other names of two tensors."""
MASK_EMBEDDING = "mask_embedding.pt"
"""File with a trained embedding of the mask token."""
ENCODER = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Mapping from prefixes of tensor names in transformers to those of serving engines."""
DFLASH_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters"),
)
"""Config keys that the drafter's layers are built from."""
_EMBEDDINGS = "embed_tokens.weight"
_IGNORED = re.compile(r"t2d|.*rotary_emb\.inv_freq")
_VARIANTS = ("mask_hidden", "layers.1.", "q_norm", "k_norm", "bias")
"""Substrings of tensor names in unsupported variants only: P-EAGLE, several or non-Llama layers."""
NORM_TENSORS = {FC_NORM: "fc_norm.0.weight", NORM_BEFORE_FC: "input_norm.weight"}
"""Tensors of the norms of EAGLE-3.1 that have one."""
OTHER_FC_NORM = "use_aux_norm"
_OTHER_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""Other names of `fc_norm` in the config and tensors of published heads, which only SGLang reads."""


def published_kind(directory: Path) -> str | None:
    """Return `eagle3`, `dflash` or `dspark` for a drafter in any supported format, and None for other folders.

    Raises ValueError if the config is invalid.
    """
    path = directory / CONFIG_FILE
    config = read_json(path) if path.is_file() else {}
    kinds = {EAGLE: "eagle3", DFLASH: "dflash", DSPARK: "dspark", TRANSFORMERS_DFLASH: "dflash"}
    named = [kinds.get(name) for name in (*(config.get("architectures") or ()), config.get("model_type"))]
    return next((kind for kind in (config.get(SPECULATORS), *named) if kind in kinds.values()), None)


def read_auxiliary(
    directory: Path, target: Any, embedding_VD: Tensor | None = None, *, unpickle: bool = False
) -> AuxiliaryHeads:
    """Load a drafter of any `published_kind`. Raises ValueError as the function for this kind does."""
    if is_dspark(directory):
        return load_dspark(directory)
    read = read_published if published_kind(directory) == "eagle3" else read_published_dflash
    return read(directory, target, embedding_VD, unpickle=unpickle)


def trained_layers(config: Mapping[str, Any], count: int) -> list[int]:
    """Return the target layers whose inputs published heads were trained on, for a target with `count` layers.

    The ids are read from the top level of the config, or else from `eagle_config`. The ids in `eagle_config` follow
    SGLang's convention of counting the outputs of layers, so they are increased by one. If there are no ids, the
    default of the serving engines applies. Raises ValueError if ids are invalid.
    """
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    named = config.get(LAYER_IDS) or (nested and [layer + 1 for layer in nested if type(layer) is int])
    layers = named or default_layers(count)
    if not all(type(layer) is int and 0 <= layer < count for layer in layers) or layers != sorted(set(layers)):
        raise ValueError(f"{LAYER_IDS} must be distinct, ascending and between 0 and {count - 1}, got {layers!r}")
    return list(layers)


def trained_norms(config: Mapping[str, Any]) -> list[str]:
    """Return the norms of EAGLE-3.1 (see `NORMS`) that a config enables, read as in SGLang."""
    nested = config.get("eagle_config") or {}
    enabled = {name: config.get(name) for name in NORMS} | {
        FC_NORM: config.get(FC_NORM) or config.get(OTHER_FC_NORM),
        NORM_BEFORE_FC: nested.get(NORM_BEFORE_FC, config.get(NORM_BEFORE_FC)),
    }
    return [name for name, is_enabled in enabled.items() if is_enabled]


def read_published(
    directory: Path, target: Any, embedding_VD: Tensor | None = None, *, unpickle: bool = False
) -> EagleHeads:
    """Load published EAGLE-3 heads for a target, given its configuration and optionally its embeddings.

    Raises ValueError if the heads are of an unsupported variant, or their embeddings differ from the target's.
    """
    config = read_json(directory / CONFIG_FILE)
    inner = config.get("transformer_layer_config") if SPECULATORS in config else config
    if not isinstance(inner, dict):
        raise ValueError(f"{directory / CONFIG_FILE}: transformer_layer_config must be a mapping, got {inner!r}")
    stored = _tensors(directory, unpickle)
    if variant := [name for name in stored for part in _VARIANTS if part in name]:
        raise ValueError(f"{directory}: {variant[0]} is not supported: EAGLE-3 heads must have exactly one Llama layer")
    sizes = LlamaConfig(**{name: value for name, value in inner.items() if name not in ("architectures", "dtype")})
    sizes.num_hidden_layers, sizes.tie_word_embeddings = 1, False
    setattr(sizes, NORMED, bool(config.get(NORMED, SPECULATORS in config)))
    norms = trained_norms(config)
    for name in NORMS:
        setattr(sizes, name, name in norms)
    for name, tensor in NORM_TENSORS.items():
        if (name in norms) != (tensor in stored):
            problem = f"{tensor} is missing" if name in norms else f"there is {tensor}, but the config has no {name}"
            raise ValueError(f"{directory}: {problem}: set {name} to {str(name not in norms).lower()}")
    for name in ("vocab_size", "hidden_size"):
        if getattr(sizes, name) != getattr(target, name):
            raise ValueError(f"{directory}: {name} is {getattr(sizes, name)}, expected {getattr(target, name)}")
    _check_embeddings(stored.pop(_EMBEDDINGS, None), embedding_VD, directory)
    layers = trained_layers(config, target.num_hidden_layers)
    fed = stored["fc.weight"].shape[1] if "fc.weight" in stored else 0
    if fed != len(layers) * sizes.hidden_size:
        expected = f"{len(layers)} layers of {sizes.hidden_size}"
        raise ValueError(f"{directory}: fc.weight has {fed} columns, but the config implies {expected}")
    return fill_heads(EagleHeads(sizes, layers, draft_tokens_in(stored)), stored, directory).eval()


def _tensors(directory: Path, unpickle: bool) -> dict[str, Tensor]:
    """Load the tensors of published heads under the names of `EagleHeads`. Raises ValueError if they are incomplete."""
    whole, pickled = directory / WHOLE_FILES[0], directory / PICKLED_WHOLE_FILES[0]
    if whole.is_file():
        tensors = load_file(whole)
    elif not pickled.is_file():
        raise ValueError(f"{directory} contains no heads: expected {whole.name} or {pickled.name}")
    elif not unpickle:
        raise ValueError(f"{pickled} is pickled: pass `unpickle=True`, or use `draftsmith import --unpickle`")
    else:
        tensors = read_pickled(pickled)
    renamed = {rename_tensor(name): tensor for name, tensor in tensors.items()}
    if TOKENS in renamed and HEAD not in renamed:
        raise ValueError(f"{directory}: {TOKENS} has offsets of draft tokens, but {HEAD} is missing")
    return {name: tensor for name, tensor in renamed.items() if not _IGNORED.fullmatch(name)}


def rename_tensor(name: str) -> str:
    """Return the name in `EagleHeads` of a published tensor."""
    name = re.sub(r"^(model\.)?(layers\.0\.)?", lambda match: "midlayer." if match[2] else "", name)
    first, dot, rest = name.partition(".")
    return _OTHER_NAMES.get(first, first) + dot + rest


def _check_embeddings(stored_VD: Tensor | None, embedding_VD: Tensor | None, directory: Path) -> None:
    """Raise ValueError if the published embeddings differ from the target's by more than rounding errors."""
    if stored_VD is None or embedding_VD is None:
        return
    if stored_VD.shape == embedding_VD.shape:
        gap = float((stored_VD.float() - embedding_VD.float()).abs().max())
        if gap <= float(embedding_VD.float().abs().max()) * 2**-7:
            return
        raise ValueError(f"{directory}: {_EMBEDDINGS} differs from the target's by up to {gap:.3g}: check the target")
    raise ValueError(f"{directory}: {_EMBEDDINGS} is {list(stored_VD.shape)}, expected {list(embedding_VD.shape)}")


def common_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config of a DFlash drafter in any format to the keys that `save_dflash` writes.

    The ids of target layers then follow the convention of `dflash_config`, which counts the outputs of layers.
    """
    common: dict[str, Any] = {**config, **(config.get("transformer_layer_config") or {})}
    section = {name: config.get(name) for name in (OUTPUT_IDS, MASK, BLOCK)} | settings_section(config)
    inputs = config.get("aux_hidden_state_layer_ids") or config.get(LAYER_IDS)
    if section[OUTPUT_IDS] is None and inputs:
        section[OUTPUT_IDS] = [layer - 1 for layer in inputs if type(layer) is int]
    if config.get("model_type") == TRANSFORMERS_DFLASH:  # its layers are sliding by default
        common.setdefault("layer_types", ["sliding_attention"])
    return common | {SETTINGS: section}


def read_published_dflash(
    directory: Path, target: Any, embedding_VD: Tensor | None = None, *, unpickle: bool = False
) -> DFlashHeads:
    """Load a published DFlash drafter for a target, given its configuration and optionally its embeddings.

    Raises ValueError if the drafter is of an unsupported variant, or does not fit the target.
    """
    path, config = directory / CONFIG_FILE, read_json(directory / CONFIG_FILE)
    if (directory / MASK_EMBEDDING).is_file():
        raise ValueError(f"{directory}: {MASK_EMBEDDING} (a trained mask embedding) is not supported")
    common, inputs, count = common_settings(config), config.get(LAYER_IDS), target.num_hidden_layers
    ids = common[SETTINGS][OUTPUT_IDS]
    if not isinstance(ids, list) or not ids or not all(type(layer) is int and 0 <= layer < count - 1 for layer in ids):
        raise ValueError(f"{path}: {SETTINGS}.{OUTPUT_IDS} must be a list of layers in 0 to {count - 2}, got {ids!r}")
    check_layers(ids, count)
    if inputs is not None and inputs != [layer + 1 for layer in ids]:
        raise ValueError(f"{path}: {LAYER_IDS} {inputs} (inputs) and {OUTPUT_IDS} {ids} (outputs) are different layers")
    for name in ("vocab_size", "hidden_size"):
        if common.get(name) != getattr(target, name):
            raise ValueError(f"{directory}: {name} is {common.get(name)}, expected {getattr(target, name)}")
    stored = {}
    for name, tensor in _tensors(directory, unpickle).items():
        prefix = next((prefix for prefix in (*ENCODER, "midlayer.") if name.startswith(prefix)), "")
        stored[ENCODER.get(prefix, "layers.0." if prefix else "") + name.removeprefix(prefix)] = tensor
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith("verifier_")}  # of the target
    _check_embeddings(stored.pop(_EMBEDDINGS, None), embedding_VD, directory)
    names = (*DFLASH_SIZES, "rope_theta", "rope_scaling")
    sizes = Qwen3Config(**{name: common[name] for name in names if common.get(name) is not None})
    sizes.num_target_layers, sizes.tie_word_embeddings = count, False
    sizes.layer_types = ["full_attention"] * sizes.num_hidden_layers
    return build_dflash(sizes, common, stored, directory).eval()

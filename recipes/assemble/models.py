"""The model that a recipe trains: an existing one, a part of one, a new one, or low-rank changes to one; and its files.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...checkpoints.artifact.compat import patch_model
from ...checkpoints.artifact.locate import at_revision, target_record
from ...checkpoints.storage.messages import did_you_mean
from ...checkpoints.verify.model_files import UNLOADABLE, check_config, names_of_embeddings, read_tensors
from ...decode.models.loading import ADAPTER_CONFIG, load_model
from ...decode.models.seq2seq import Seq2SeqModel
from ..schema.training import LoraSection, ModelSection

_ADAPTER_NAME = "default"  # peft's
_WRAPPER = "base_model.model."  # what peft's names begin with
_SHARED_BIAS = "relative_attention_bias.weight"  # T5's first layer holds it for all


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model as it is trained, and how it becomes files."""

    model: PreTrainedModel
    """What the task is given: with LoRA, the model whose layers have adapters in them."""
    lora: LoraSection | None = None
    adapter: Any = None
    """peft's wrapper around `model`, where there is one."""

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write what `AutoModelForCausalLM.from_pretrained` and `decode.loading.load_model` read.

        That is a whole model, with changes merged into it, or the adapter alone. The model in training stays as it is.

        Args:
            state: its weights under the names of `model.state_dict()`, where they are not in the model itself (as with
                ZeRO-3, or for an earlier checkpoint); one name is enough for tied weights.
        """
        if self.lora is None:
            self.model.save_pretrained(folder, state_dict=None if state is None else dict(state))
        elif self.lora.export == "adapter":
            _save_adapter(self.adapter, folder, state or self.model.state_dict())
        else:
            _merged(self.model, self.adapter, state or self.model.state_dict()).save_pretrained(folder)
        patch_model(folder)

    def shapes(self) -> dict[str, Any]:
        """What an artifact says of the model: vocabulary, parameters of the artifact and those trained, type; of an
        adapter, the model that it changes."""
        added = {name for name, _ in self.model.named_parameters() if "lora_" in name}
        counted = {name: weight.numel() for name, weight in self.model.named_parameters()}
        trained = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        alone = self.lora is not None and self.lora.export == "adapter"
        return {
            "vocab_size": self.model.get_output_embeddings().weight.shape[0],
            "parameters": sum(count for name, count in counted.items() if (name in added) == alone),
            "trained_parameters": trained,
            "model_type": self.model.config.model_type,
            **({"base_model": self.adapter.peft_config[_ADAPTER_NAME].base_model_name_or_path} if alone else {}),
        }


def build_model(section: ModelSection, target: str | None, seed: int) -> TrainableModel:
    """The model of a recipe, on the CPU; `target` is that of `embeddings: target`, `seed` that of new weights. Raises
    ValueError: no such model; a configuration that makes none; layers that the source does not have; embeddings of
    other sizes; LoRA targets that are no linear layers; an attention kernel that cannot be used."""
    torch.manual_seed(seed)
    dtype = getattr(torch, section.dtype)
    attention = None if section.attention == "auto" else section.attention
    if section.source is None:
        model = model_from_config(section, attention).to(dtype)
    elif section.layers:
        # In the type of the files, and only what is kept in that of the training.
        model = cut_layers(load_trainable(section.source), section.layers, section.source, attention).to(dtype)
    else:
        model = load_trainable(section.source, dtype=dtype, attention=attention)
    if section.embeddings == "target":
        assert target is not None, "the recipe's schema asks for a target"
        copy_embeddings(model, target)
    return made_trainable(model, section)


def made_trainable(model: PreTrainedModel, section: ModelSection) -> TrainableModel:
    """A model with what its section freezes and adds; raises ValueError for LoRA that cannot be had."""
    if section.freeze_embeddings:
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(False)
    if section.lora is None:
        return TrainableModel(model)
    return TrainableModel(model, section.lora, add_lora(model, section))


def load_trainable(source: str, *, decoder: bool = False, **options: Any) -> PreTrainedModel:
    """A model to train, or to learn from; options as `load_model` has them. Raises ValueError for an encoder-decoder of
    another family than T5's, or of any with `decoder`."""
    model = load_model(source, **options)
    if model.config.is_encoder_decoder:
        if decoder:
            raise ValueError(f"{source} is an encoder-decoder ({model.config.model_type}), and a decoder is needed")
        Seq2SeqModel(model)
    return model


def check_vocabulary(tokens: int, model: PreTrainedModel, what: str) -> None:
    """Raises ValueError where a model has no embedding for some of a tokenizer's `tokens`."""
    rows = model.get_output_embeddings().weight.shape[0]
    if tokens > rows:
        raise ValueError(f"the tokenizer has {tokens} tokens, and {what} has embeddings for {rows}")


def model_from_config(section: ModelSection, attention: str | None) -> PreTrainedModel:
    """A new model; ValueError for fields that its type does not have, or values that make no model."""
    settings = dict(section.config or {})
    kind = settings.pop("model_type")
    try:
        known = vars(AutoConfig.for_model(kind))
        names = [*known, *type(AutoConfig.for_model(kind)).attribute_map]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} of {kind}.{did_you_mean(unknown[0], names)}")
        config = AutoConfig.for_model(kind, **settings)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # T5's own
        model = new_model(config, attention)
        if config.is_encoder_decoder:
            Seq2SeqModel(model)
    except (ValueError, TypeError, RuntimeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"model.config makes no model: {' '.join(str(error).split())}") from error
    return model


def new_model(config: Any, attention: str | None) -> PreTrainedModel:
    """The model of a transformers configuration; ValueError where the attention kernel is missing."""
    maker = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        return maker.from_config(config, **({} if attention is None else {"attn_implementation": attention}))
    except ImportError as error:
        raise ValueError(f"`model.attention` is {attention}, which cannot be used: {error}") from error


def cut_layers(model: PreTrainedModel, layers: list[int], name: str, attention: str | None = None) -> PreTrainedModel:
    """A new model of some of a model's layers (from 0, rising); of an encoder-decoder, of both sides' layers.

    It is made from the configuration with that many layers, so that it is what loading its files will give. Raises
    ValueError: a layer that the model (called `name`) does not have; a model whose layers do not stand in one list, or
    that its configuration does not tell apart."""
    config = model.config
    depths = {key: getattr(config, key) for key in _depth_keys(config)}
    count = min(depths.values())
    if layers[-1] >= count:
        raise ValueError(f"`layers` has {layers[-1]}, and {name} has {count} layers, 0 to {count - 1}")
    prefixes = _layer_lists(model, set(depths.values()))
    if len(prefixes) != len(depths):
        raise ValueError(f"{name} ({config.model_type}) keeps its layers in {len(prefixes)} lists: it cannot be cut")
    settings = config.to_dict()
    for key, value in settings.items():
        if isinstance(value, list) and "layer" in key and len(value) in depths.values():
            settings[key] = [value[layer] for layer in layers]
    settings |= dict.fromkeys(depths, len(layers))
    try:
        small = new_model(type(config).from_dict(settings), attention).to(model.dtype)
        old = model.state_dict()
        pattern = re.compile(rf"^({'|'.join(map(re.escape, prefixes))})\.(\d+)\.")
        state = {key: old[_old_name(key, pattern, layers, old)] for key in small.state_dict()}
        small.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} ({config.model_type}) cannot be cut to layers {layers}: {reason}") from error
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _depth_keys(config: Any) -> list[str]:
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return [key, "num_decoder_layers"] if config.is_encoder_decoder else [key]


def _layer_lists(model: nn.Module, counts: set[int]) -> list[str]:
    """Names of the lists of layers; lists inside layers (experts) are not looked at."""
    found: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(part, nn.ModuleList) and len(part) in counts and not inside:
            found.append(name)
    return found


def _old_name(name: str, pattern: re.Pattern[str], layers: list[int], old: Mapping[str, Tensor]) -> str:
    """The name in the whole model of a weight of the cut one."""
    found = pattern.match(name)
    if found is None:
        return name
    moved = f"{found[1]}.{layers[int(found[2])]}.{name[found.end() :]}"
    return name if moved not in old and name.endswith(_SHARED_BIAS) else moved


def copy_embeddings(model: PreTrainedModel, target: str) -> None:
    """Start from a target's token embeddings and output projection [V, D], which alone are read from its files. Raises
    ValueError: sizes that differ, both named; a model that ties the two where the target does not."""
    embeddings_VD, projection_VD, bias_V = _target_embeddings(target)
    mine = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    pairs = [("token embeddings", mine, embeddings_VD), ("output projection", head.weight, projection_VD)]
    for what, weight, theirs in pairs:
        if weight.shape != theirs.shape:
            sizes = " and ".join(" x ".join(map(str, shape)) for shape in (weight.shape, theirs.shape))
            raise ValueError(f"`embeddings: target`: the {what} of the model and of {target} differ in size: {sizes}")
    if mine is head.weight and embeddings_VD is not projection_VD:
        raise ValueError(f"`embeddings: target`: {target} has two matrices: set `tie_word_embeddings: false`")
    with torch.no_grad():
        for _, weight, theirs in pairs:
            weight.copy_(theirs)
        if bias_V is not None and getattr(head, "bias", None) is not None:
            head.bias.copy_(bias_V)


def _target_embeddings(target: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A target's token embeddings, its output projection (the same tensor where they are tied) and that one's bias."""
    target = at_revision(target)
    meta = _meta_model(target)
    if meta is not None:
        names = names_of_embeddings(meta)
        prefix = f"{meta.base_model_prefix}."
        found = read_tensors(target, [name for name in names if name is not None], prefix)
        if found is not None:
            embeddings, projection, bias = (None if name is None else found[name] for name in names)
            assert embeddings is not None
            assert projection is not None
            return embeddings, projection, bias
    model = load_model(target)
    head = model.get_output_embeddings()
    embeddings_VD, projection_VD = model.get_input_embeddings().weight.detach(), head.weight.detach()
    if head.weight is model.get_input_embeddings().weight:
        projection_VD = embeddings_VD
    return embeddings_VD, projection_VD, getattr(head, "bias", None)


def _meta_model(target: str) -> PreTrainedModel | None:
    """A model without weights; None where its configuration alone does not make one."""
    if (Path(target) / ADAPTER_CONFIG).is_file():
        return None
    try:
        check_config(Path(target) / "config.json")
        config = AutoConfig.from_pretrained(target, trust_remote_code=False)
        with torch.device("meta"):
            return new_model(config, None)
    except UNLOADABLE:  # loading it says why
        return None


def add_lora(model: PreTrainedModel, section: ModelSection) -> Any:
    """Put adapters into a model's linear layers; peft's wrapper around it."""
    lora, source = section.lora, section.source
    assert lora is not None
    if lora.export == "adapter" and (section.layers or section.embeddings == "target"):
        raise ValueError(f"`lora.export: adapter` is for {source} as it is, in all its layers: use `export: merged`")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("`model.lora` needs peft: pip install draftsmith[train]") from error
    changed = _lora_targets(model, lora.targets)
    parts = dict(model.named_modules())
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted({name.rpartition(".")[2] for name in changed}) if not lora.targets else lora.targets,
        fan_in_fan_out=isinstance(parts[changed[0]], Conv1D),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    wrapper = get_peft_model(model, config)
    named = target_record(str(source), None)
    config.base_model_name_or_path, config.revision = named["id"], named.get("revision")
    return wrapper


def _lora_targets(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Full names of the linear layers that `targets` end in; of all but the output projection where there are none."""
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    linear = [
        name
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, Conv1D)) and not (part is head and (tied or not targets))
    ]
    found: list[str] = []
    for target in targets:
        ends = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not ends:
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = did_you_mean(target, known)
            raise ValueError(f"`lora.targets`: no linear layer ends in {target!r}.{near} There are: {', '.join(known)}")
        found += ends
    return found if targets else linear


def _save_adapter(wrapper: Any, folder: Path, state: Mapping[str, Tensor]) -> None:
    from peft import get_peft_model_state_dict

    named = {f"{_WRAPPER}{name}": tensor for name, tensor in state.items()}
    adapter = get_peft_model_state_dict(wrapper, state_dict=named, save_embedding_layers=False)
    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(wrapper.peft_config[_ADAPTER_NAME])
    config.inference_mode = True
    config.save_pretrained(folder)


def _merged(model: PreTrainedModel, wrapper: Any, state: Mapping[str, Tensor]) -> PreTrainedModel:
    """A plain model with the adapter added to its weights. It shares all that the adapter leaves alone."""
    from peft import get_peft_model

    config = copy.deepcopy(model.config)
    config._attn_implementation = None
    lora = copy.deepcopy(wrapper.peft_config[_ADAPTER_NAME])
    lora.base_model_name_or_path = None
    with torch.device("meta"):
        plain = type(model)(config)
        outer = get_peft_model(plain, lora, low_cpu_mem_usage=True)
    # Merging adds to the weights in place: those are copied.
    own = {name: tensor.detach().clone() if ".base_layer." in name else tensor for name, tensor in state.items()}
    missing = plain.load_state_dict(own, strict=False, assign=True).missing_keys
    plain.tie_weights()
    hollow = sorted(name for name, weight in plain.named_parameters() if weight.device.type == "meta")
    if hollow:
        raise ValueError(f"weights are missing from the state to be saved: {', '.join((*missing, *hollow)[:3])}")
    merged = outer.merge_and_unload()
    merged.generation_config = model.generation_config
    return merged

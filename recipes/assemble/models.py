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
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...checkpoints.artifact.compat import patch_model
from ...checkpoints.artifact.model_ref import target_record
from ...checkpoints.storage.messages import did_you_mean, install_hint
from ...checkpoints.verify.model_files import check_memory, model_class
from ...decode.models.draft_vocabulary import keep_tokens, kept_tokens
from ...decode.models.loading import load_model
from ...decode.models.seq2seq import Seq2SeqModel
from ..schema.training import LoraSection, ModelSection

_ADAPTER_NAME = "default"  # peft's
_SHARED_BIAS = "relative_attention_bias.weight"  # T5's first layer holds it for all


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model as it is trained, and how it becomes files."""

    model: PreTrainedModel
    """What the task is given: with LoRA, the model whose layers have adapters in them."""
    lora: LoraSection | None = None
    adapter: Any = None
    """peft's wrapper around `model`, where there is one."""

    def save(self, folder: Path) -> None:
        """Write what `AutoModelForCausalLM.from_pretrained` and `decode.loading.load_model` read: a whole model, with
        changes merged into it (after which there is no adapter any more), or the adapter alone."""
        if self.lora is None:
            self.model.save_pretrained(folder)
        elif self.lora.export == "adapter":
            self.adapter.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink()  # peft's card, with its own name for a model
        else:
            self.adapter.merge_and_unload().save_pretrained(folder)
        patch_model(folder)

    def saved_bytes(self) -> int:
        """Return the size of the weights that `save` writes."""
        weights = sum(p.nbytes for p in self.model.parameters())
        if self.lora is None:
            return weights
        added = sum(p.nbytes for name, p in self.model.named_parameters() if "lora_" in name)
        return added if self.lora.export == "adapter" else weights - added

    def shapes(self) -> dict[str, Any]:
        """What an artifact says of the model: vocabulary, parameters of the artifact and those trained, type; of an
        adapter, the model that it changes."""
        head = self.model.get_output_embeddings()
        added = {name for name, _ in self.model.named_parameters() if "lora_" in name}
        counted = {name: weight.numel() for name, weight in self.model.named_parameters()}
        trained = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        alone = self.lora is not None and self.lora.export == "adapter"
        return {
            "vocab_size": head.weight.shape[0],
            "parameters": sum(count for name, count in counted.items() if (name in added) == alone),
            "trained_parameters": trained,
            "model_type": self.model.config.model_type,
            **({} if (proposed_R := kept_tokens(self.model)) is None else {"proposed_tokens": len(proposed_R)}),
            **({"base_model": self.adapter.peft_config[_ADAPTER_NAME].base_model_name_or_path} if alone else {}),
        }


def build_model(section: ModelSection, seed: int) -> TrainableModel:
    """Return the model of a recipe on the CPU; `seed` is that of new weights."""
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
    if section.freeze_embeddings:
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(False)
    return TrainableModel(model, section.lora, None if section.lora is None else add_lora(model, section))


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
        trains_here = not torch.accelerator.is_available()
        # float32 weights and, on the host, gradients and both moments of AdamW
        check_memory(config, 16 if trains_here else 4, "make the model smaller")
        model = new_model(config, attention)
        if config.is_encoder_decoder:
            Seq2SeqModel(model)
    except (ValueError, TypeError, RuntimeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"model.config makes no model: {' '.join(str(error).split())}") from error
    return model


def new_model(config: Any, attention: str | None) -> PreTrainedModel:
    """The model of a transformers configuration; ValueError where the attention kernel is missing."""
    try:
        return model_class(config).from_config(
            config, **({} if attention is None else {"attn_implementation": attention})
        )
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
    if (ids_R := kept_tokens(model)) is not None:
        keep_tokens(small, ids_R)
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


def add_lora(model: PreTrainedModel, section: ModelSection) -> Any:
    """Put adapters into a model's linear layers; peft's wrapper around it."""
    lora, source = section.lora, section.source
    assert lora is not None
    if lora.export == "adapter" and section.layers:
        raise ValueError(f"`lora.export: adapter` is for {source} as it is, in all its layers: use `export: merged`")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"`model.lora` needs peft: {install_hint('train')}") from error
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    linear = {name.rpartition(".")[2] for name, part in layers if part is not head}
    known = linear if tied else linear | {name for name, part in layers if part is head}
    for target in lora.targets:
        if target.rpartition(".")[2] not in known:
            near, names = did_you_mean(target, known), ", ".join(sorted(known))
            raise ValueError(f"`lora.targets`: no linear layer ends in {target!r}.{near} There are: {names}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets or sorted(linear),
        fan_in_fan_out=any(isinstance(part, Conv1D) for _, part in layers),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    wrapper = get_peft_model(model, config)
    named = target_record(str(source))
    config.base_model_name_or_path, config.revision = named["id"], named.get("revision")
    return wrapper

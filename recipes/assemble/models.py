"""Creation and saving of the model to train: an existing model, some of its layers, a new model, or a LoRA adapter.

Shape suffixes: V vocabulary size, D hidden size.
"""

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
from ...checkpoints.verify.families import check_family
from ...checkpoints.verify.model_files import check_memory, model_class
from ...decode.models.draft_vocabulary import keep_tokens, kept_tokens
from ...decode.models.loading import load_model
from ...decode.models.seq2seq import Seq2SeqModel
from ..schema.training import LoraSection, ModelSection

_ADAPTER_NAME = "default"  # default name of peft
_SHARED_BIAS = "relative_attention_bias.weight"  # stored in T5's first layer for all layers


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """Model to train, with its LoRA adapter if it has one."""

    model: PreTrainedModel
    """Model that is trained. With LoRA, its linear layers contain the adapters."""
    lora: LoraSection | None = None
    adapter: Any = None
    """PEFT model that wraps `model`, or None without LoRA."""

    def save(self, folder: Path) -> None:
        """Save the model with its adapter merged, or only the adapter if the recipe exports adapters."""
        if self.lora is None:
            self.model.save_pretrained(folder)
        elif self.lora.export == "adapter":
            self.adapter.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink()  # the model card of peft
        else:
            self.adapter.merge_and_unload().save_pretrained(folder)
        patch_model(folder)

    def saved_bytes(self) -> int:
        """Return the size of the weights that `save` writes, in bytes."""
        weights = sum(p.nbytes for p in self.model.parameters())
        if self.lora is None:
            return weights
        added = sum(p.nbytes for name, p in self.model.named_parameters() if "lora_" in name)
        return added if self.lora.export == "adapter" else weights - added

    def shapes(self) -> dict[str, Any]:
        """Return model dimensions and type for the manifest, and the base model of an adapter."""
        alone = self.lora is not None and self.lora.export == "adapter"
        saved = [weight for name, weight in self.model.named_parameters() if ("lora_" in name) == alone]
        return {
            "vocab_size": self.model.get_output_embeddings().weight.shape[0],
            "parameters": sum(weight.numel() for weight in saved),
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "model_type": self.model.config.model_type,
            **({} if (proposed_R := kept_tokens(self.model)) is None else {"proposed_tokens": len(proposed_R)}),
            **({"base_model": self.adapter.peft_config[_ADAPTER_NAME].base_model_name_or_path} if alone else {}),
        }


def build_model(section: ModelSection, seed: int) -> TrainableModel:
    """Load or create the model of a recipe on the CPU. New weights are initialised with `seed`."""
    torch.manual_seed(seed)
    dtype = getattr(torch, section.dtype)
    attention = None if section.attention == "auto" else section.attention
    if section.source is None:
        model = model_from_config(section, attention).to(dtype)
    elif section.layers:
        # Load in the dtype of the files, and convert only the layers that are kept.
        model = cut_layers(load_trainable(section.source), section.layers, section.source, attention).to(dtype)
    else:
        model = load_trainable(section.source, dtype=dtype, attention=attention)
    return freeze_parts(model, section)


def freeze_parts(model: PreTrainedModel, section: ModelSection) -> TrainableModel:
    """Freeze the embeddings, or add LoRA adapters, as the section says."""
    if section.freeze_embeddings:
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.requires_grad_(False)
    return TrainableModel(model, section.lora, None if section.lora is None else add_lora(model, section))


def load_trainable(source: str, *, decoder: bool = False, **options: Any) -> PreTrainedModel:
    """Load a model for training or as a teacher. `options` are passed to `load_model`.

    Raises ValueError for an encoder-decoder model if `decoder` is True or the model is not a T5 model.
    """
    model = load_model(source, **options)
    if model.config.is_encoder_decoder:
        if decoder:
            raise ValueError(f"{source} is an encoder-decoder ({model.config.model_type}), but a decoder is required")
        Seq2SeqModel(model)
    return model


def check_vocabulary(tokens: int, model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if a tokenizer has more tokens than a model has embeddings."""
    rows = model.get_output_embeddings().weight.shape[0]
    if tokens > rows:
        raise ValueError(f"the tokenizer has {tokens} tokens, but {name} has embeddings for {rows}")


def model_from_config(section: ModelSection, attention: str | None) -> PreTrainedModel:
    """Create a model from the configuration in a recipe. Raise ValueError if the configuration is invalid."""
    settings = dict(section.config or {})
    kind = settings.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
        names = [*vars(default), *default.attribute_map]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} of {kind}.{did_you_mean(unknown[0], names)}")
        config = AutoConfig.for_model(kind, **settings)
        check_family(config)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id  # as in T5
        trains_here = not torch.accelerator.is_available()
        # Bytes per parameter: float32 weights, gradients and both moments of AdamW in host memory.
        check_memory(config, 16 if trains_here else 4, "reduce the sizes in `model.config`")
        model = new_model(config, attention)
        if config.is_encoder_decoder:
            Seq2SeqModel(model)
    except (ValueError, TypeError, RuntimeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"no model can be built from `model.config`: {' '.join(str(error).split())}") from error
    return model


def new_model(config: Any, attention: str | None) -> PreTrainedModel:
    """Create a model from a transformers config. Raise ValueError if the attention kernel is not available."""
    try:
        options = {} if attention is None else {"attn_implementation": attention}
        return model_class(config).from_config(config, **options)
    except ImportError as error:
        raise ValueError(f"`model.attention: {attention}` is not available: {error}") from error


def cut_layers(model: PreTrainedModel, layers: list[int], name: str, attention: str | None = None) -> PreTrainedModel:
    """Return a new model that contains only the given layers of a model.

    `layers` are ascending indices from 0. They apply to both the encoder and the decoder of an encoder-decoder.
    Raises ValueError if a layer does not exist, or if the layers are not stored in one list per stack.
    """
    config = model.config
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    keys = [depth, "num_decoder_layers"] if config.is_encoder_decoder else [depth]
    depths = {key: getattr(config, key) for key in keys}
    count = min(depths.values())
    if layers[-1] >= count:
        raise ValueError(f"`layers` must be between 0 and {count - 1} for {name}, got {layers[-1]}")
    prefixes = _layer_lists(model, set(depths.values()))
    if len(prefixes) != len(depths):
        raise ValueError(
            f"`layers` is not supported for {name} ({config.model_type}): expected {len(depths)} lists of layers, "
            f"found {len(prefixes)}"
        )
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


def _layer_lists(model: nn.Module, counts: set[int]) -> list[str]:
    """Return the names of the `nn.ModuleList`s of `counts` layers, except lists inside layers, such as experts."""
    lists: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in lists)
        if isinstance(part, nn.ModuleList) and len(part) in counts and not inside:
            lists.append(name)
    return lists


def _old_name(name: str, pattern: re.Pattern[str], layers: list[int], old: Mapping[str, Tensor]) -> str:
    """Map the name of a weight in the reduced model to its name in the full model."""
    match = pattern.match(name)
    if match is None:
        return name
    moved = f"{match[1]}.{layers[int(match[2])]}.{name[match.end() :]}"
    return name if moved not in old and name.endswith(_SHARED_BIAS) else moved


def add_lora(model: PreTrainedModel, section: ModelSection) -> Any:
    """Add LoRA adapters to the linear layers of a model, and return the PEFT model."""
    lora, source = section.lora, section.source
    assert lora is not None
    if lora.export == "adapter" and section.layers:
        raise ValueError(f"`lora.export: adapter` requires all layers of {source}: use `export: merged`")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"`model.lora` requires peft: {install_hint('train')}") from error
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]
    linear = {name.rpartition(".")[2] for name, part in layers if part is not head}
    known = linear if is_tied else linear | {name for name, part in layers if part is head}
    for target in lora.targets:
        if target.rpartition(".")[2] not in known:
            near, names = did_you_mean(target, known), ", ".join(sorted(known))
            raise ValueError(f"`lora.targets`: no linear layer is called {target!r}.{near} Known: {names}")
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

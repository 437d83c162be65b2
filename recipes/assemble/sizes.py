"""Sizes of a training recipe's models from their configurations alone: parameters, memory of states, files.

Memory counts what certainly lies in each process: weights, gradients, AdamW's state (ZeRO: Rajbhandari et al. 2020,
arXiv 1910.02054, section 3) and the target. Activations are measured by `train.loop.probe`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.heads.eagle import EagleHeads
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.storage.messages import first_line
from ...checkpoints.verify.model_files import base_of, is_adapter
from ...decode.models.draft_vocabulary import LowRankHead, factorise, keep_tokens, load_vocabulary, whole_matrix
from ...decode.models.loading import held_as
from ...train.config import micro_steps
from ...train.parallel.accelerate import zero_stage
from ..schema.training import DrafterRecipe, HeadsRecipe, ModelSection
from .drafter import complete_section
from .heads import runs_no_target
from .models import TrainableModel, cut_layers, made_trainable, model_from_config, new_model


@dataclass(frozen=True)
class RecipeSize:
    """Sizes of what a recipe trains and runs."""

    parameters: int
    trained: int
    """Number of trained parameters."""
    target_parameters: int
    """Parameters of other models in memory: the target, a reference."""
    memory: dict[str, int]
    """Bytes in each process, by purpose."""
    artifact_bytes: int
    """Bytes of the artifact's weights."""
    checkpoint_bytes: int
    """Bytes of a checkpoint's weights and optimizer state."""


def size_of(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any) -> RecipeSize:
    """Return the sizes of a recipe for the processes that were launched."""
    micro_steps(recipe.train.global_batch, recipe.train.micro_batch, accelerator.num_processes)
    return _heads(recipe, accelerator) if isinstance(recipe, HeadsRecipe) else _drafter(recipe, accelerator)


def _drafter(recipe: DrafterRecipe, accelerator: Any) -> RecipeSize:
    trained = _meta_trainable(complete_section(recipe))
    if (vocabulary := recipe.model.vocabulary) is not None:  # one that does not fit the model fails in the probe
        if vocabulary.tokens is not None:
            ids = range(trained.model.get_output_embeddings().weight.shape[0])[: vocabulary.tokens]
            keep_tokens(trained.model, torch.tensor(ids))
        if vocabulary.rank is not None:
            factorise(trained.model, vocabulary.rank)
    others = []
    if recipe.target is not None and (recipe.measure.prompts or (recipe.distils and recipe.teacher.cache is None)):
        others.append(meta_model(recipe.target, recipe.teacher.dtype))
        if recipe.teacher.load_in_8bit:
            for part in others[0].modules():
                if isinstance(part, nn.Linear) and part is not others[0].get_output_embeddings():
                    part.weight = nn.Parameter(part.weight.to(torch.int8), requires_grad=False)
    if recipe.selection is not None:
        others.append(meta_model(recipe.selection.reference, "auto"))
    parameters = list(trained.model.parameters())
    return _size(recipe, accelerator, parameters, parameters, others, _exported_bytes(trained))


def _heads(recipe: HeadsRecipe, accelerator: Any) -> RecipeSize:
    meta = meta_model(recipe.target, recipe.target_dtype)
    if meta.config.is_encoder_decoder:
        raise ValueError(f"{recipe.target} is an encoder-decoder ({meta.config.model_type}), and a decoder is needed")
    with torch.device("meta"):
        kept_P = None if recipe.vocabulary is None else torch.arange(recipe.vocabulary.tokens or 0)
        heads: PredictionHeads | EagleHeads
        if recipe.architecture == "eagle3":
            heads = EagleHeads.for_target(meta.config, recipe.layers, kept_P, recipe.num_heads)
        else:
            projection_VD = meta.get_output_embeddings().weight.float()
            forms = (recipe.projection, recipe.rank, recipe.states)
            heads = PredictionHeads.from_lm_head(projection_VD, recipe.num_heads, recipe.num_layers, *forms)
            heads.propose(kept_P)
    own = list(heads.parameters())
    exported = sum(p.numel() for p in own) * meta.dtype.itemsize
    others, parameters = [meta], own
    if recipe.base is not None:
        with torch.device("meta"):
            trained = made_trainable(meta, ModelSection(source=recipe.target, lora=recipe.base.lora))
        exported += _exported_bytes(trained)
        others, parameters = [], [*meta.parameters(), *own]
    stored = [p for p in parameters if p.requires_grad]
    size = _size(recipe, accelerator, parameters, stored, others, exported)
    if runs_no_target(recipe):
        ends = {meta.get_input_embeddings().weight, meta.get_output_embeddings().weight}
        size.memory["target"] = sum(weight.nbytes for weight in ends)
    return size


def _size(
    recipe: DrafterRecipe | HeadsRecipe,
    accelerator: Any,
    parameters: list[nn.Parameter],
    stored: list[nn.Parameter],
    others: list[PreTrainedModel],
    exported: int,
) -> RecipeSize:
    """Return the sizes for these parameters, of which checkpoints hold `stored`, and other models in memory."""
    trained = [p for p in parameters if p.requires_grad]
    count, trained_count, trained_bytes = _count(parameters), _count(trained), sum(p.nbytes for p in trained)
    stage, processes = zero_stage(accelerator), accelerator.num_processes
    if not stage:
        memory = {"weights": sum(p.nbytes for p in parameters), "gradients": trained_bytes}
        memory["AdamW's two moments"] = 2 * trained_bytes
        checkpoint = sum(p.nbytes for p in stored) + 2 * trained_bytes
    else:
        item = 4 if recipe.train.precision == "no" else 2
        memory = {
            "weights": count * item // (processes if stage == 3 else 1),
            "gradients": trained_count * item // (processes if stage >= 2 else 1),
            "AdamW's two moments": 8 * trained_count // processes,
            "weights in float32": 4 * trained_count // processes,
        }
        checkpoint = 4 * _count(stored) + 8 * trained_count  # float32, whatever it was trained in
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if accelerator.device.type != "cpu":  # what is offloaded lies in the machine's memory
            if zero.get("offload_param", {}).get("device") == "cpu":
                memory.pop("weights")
            if zero.get("offload_optimizer", {}).get("device") == "cpu":
                memory = {name: size for name, size in memory.items() if name == "weights"}
    theirs = [p for model in others for p in model.parameters()]
    if theirs:
        memory["target"] = sum(p.nbytes for p in theirs)
    return RecipeSize(count, trained_count, _count(theirs), memory, exported, checkpoint)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _meta_trainable(section: ModelSection) -> TrainableModel:
    """Return what `models.build_model` would make, without weights."""
    attention, dtype = None if section.attention == "auto" else section.attention, getattr(torch, section.dtype)
    with torch.device("meta"):
        if section.source is None:
            model = model_from_config(section, attention).to(dtype)
        else:
            model = meta_model(section.source, "auto" if section.layers else section.dtype, attention)
            if section.layers:
                model = cut_layers(model, section.layers, section.source, attention).to(dtype)
        return made_trainable(model, section)


def meta_model(source: str, dtype: str, attention: str | None = None) -> PreTrainedModel:
    """A model of a folder or hub id on the meta device, without its weights; `dtype` auto takes that of its
    configuration, or float32. Raises ValueError: there is no such model, or its configuration makes none."""
    folder = model_source(source, weights=False)
    path = model_source(base_of(Path(folder)), weights=False) if is_adapter(Path(folder)) else folder
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = new_model(config, attention)
        load_vocabulary(model, Path(folder))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the configuration of {source!r} makes no language model: {first_line(error)}") from error
    known = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    files = known if isinstance(known, torch.dtype) else torch.float32
    return model.to(files if dtype == "auto" else getattr(torch, held_as(dtype, "cpu"))).requires_grad_(True)


def _exported_bytes(trained: TrainableModel) -> int:
    lora, head = trained.lora, trained.model.get_output_embeddings()
    weights = sum(p.nbytes for p in trained.model.parameters())
    if lora is None:  # factors are written next to their product
        return weights + (whole_matrix(head).nbytes if isinstance(head, LowRankHead) else 0)
    added = sum(p.nbytes for name, p in trained.model.named_parameters() if "lora_" in name)
    return added if lora.export == "adapter" else weights - added

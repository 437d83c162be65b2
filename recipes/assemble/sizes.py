"""What a training recipe comes to before anything is loaded: sizes of its models, from their configurations alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ...checkpoints.artifact.locate import model_source
from ...checkpoints.heads.eagle import EagleHeads
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.storage.messages import first_line
from ...checkpoints.verify.model_files import base_of, is_adapter
from ...decode.models.draft_vocabulary import LowRankHead, factorise, keep_tokens, load_vocabulary, whole_matrix
from ...decode.models.loading import held_as
from ...train.config import Parallel, micro_steps
from ...train.parallel.accelerate import zero_stage
from ...train.plan.memory import Demand, Launch, ModelSize, heads_size, model_size
from ..schema.training import DrafterRecipe, HeadsRecipe, ModelSection
from .acceptance import decodes_fast
from .drafter import complete_section
from .heads import runs_no_target
from .models import TrainableModel, cut_layers, made_trainable, model_from_config, new_model


@dataclass(frozen=True)
class RecipeSize:
    """What a recipe trains and runs."""

    demand: Demand
    artifact_bytes: int
    """Of weights in the artifact."""
    stored_weights: int
    """Bytes of a checkpoint's weights, without DeepSpeed."""


def size_of(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any) -> RecipeSize:
    """The size of a recipe, for the processes that were launched."""
    launch = _launch(accelerator)
    micro_steps(recipe.train.global_batch, recipe.train.micro_batch, launch.processes)
    return _heads(recipe, launch) if isinstance(recipe, HeadsRecipe) else _drafter(recipe, launch)


def _drafter(recipe: DrafterRecipe, launch: Launch) -> RecipeSize:
    trained, loading = _meta_trainable(complete_section(recipe))
    if (vocabulary := recipe.model.vocabulary) is not None:  # one that does not fit the model fails in the probe
        if vocabulary.tokens is not None:
            ids = range(trained.model.get_output_embeddings().weight.shape[0])[: vocabulary.tokens]
            keep_tokens(trained.model, torch.tensor(ids))
        if vocabulary.rank is not None:
            factorise(trained.model, vocabulary.rank)
    model = model_size(trained.model)
    taught = recipe.distils and recipe.teacher.cache is None
    target, decodes = None, False
    if recipe.target is not None and (taught or recipe.measure.prompts):
        eight_bit = recipe.teacher.load_in_8bit
        dtype = "float16" if eight_bit and recipe.teacher.dtype == "auto" else recipe.teacher.dtype
        meta = meta_model(recipe.target, dtype)
        target = model_size(meta, eight_bit=eight_bit)
        decodes = bool(recipe.measure.prompts) and decodes_fast(meta)
    if recipe.selection is not None:
        reference = model_size(meta_model(recipe.selection.reference, "auto"))
        target = replace(target or reference, weights=reference.weights + (target.weights if target else 0))
    if recipe.target is not None and recipe.model.embeddings == "target":
        loading = max(loading, model_size(meta_model(recipe.target, "auto")).weights)
    demand = Demand(model, target, taught, 0, *_of_loop(recipe), loading, launch, decodes)
    return RecipeSize(demand, _exported_bytes(trained, model), model.weights)


def _heads(recipe: HeadsRecipe, launch: Launch) -> RecipeSize:
    meta = meta_model(recipe.target, recipe.target_dtype)
    if meta.config.is_encoder_decoder:
        raise ValueError(f"{recipe.target} is an encoder-decoder ({meta.config.model_type}), and a decoder is needed")
    target, base = model_size(meta), None
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
    exported = sum(p.numel() for p in heads.parameters()) * meta.dtype.itemsize
    if recipe.base is not None:
        with torch.device("meta"):
            trained = made_trainable(meta, ModelSection(source=recipe.target, lora=recipe.base.lora))
        base = model_size(meta)
        exported += _exported_bytes(trained, base)
    model = heads_size(heads, target, recipe.data.block_tokens, base)
    taught, loading = recipe.hidden.cache is None and base is None, 0
    if runs_no_target(recipe):
        loading = target.weights
        ends = {meta.get_input_embeddings().weight, meta.get_output_embeddings().weight}
        target = replace(target, weights=sum(weight.nbytes for weight in ends))
    decodes = base is None and bool(recipe.measure.prompts) and decodes_fast(meta)
    demand = Demand(
        model, None if base else target, taught, recipe.num_heads, *_of_loop(recipe), loading, launch, decodes
    )
    return RecipeSize(demand, exported, model.trained_weights)


def _of_loop(recipe: DrafterRecipe | HeadsRecipe) -> tuple[int, int, int, bool, str]:
    train, tokens = recipe.train, float(recipe.data.block_tokens)
    if isinstance(recipe, DrafterRecipe) and (section := recipe.parallel) is not None:
        tokens *= 1 + sum(Parallel(section.tokens, section.keep, section.least).shares())
    batches = (round(tokens), train.micro_batch, train.global_batch)
    return *batches, train.gradient_checkpointing, train.precision


def _meta_trainable(section: ModelSection) -> tuple[TrainableModel, int]:
    """What `models.build_model` would make, without weights; and the bytes of a model that layers are cut from."""
    attention, dtype = None if section.attention == "auto" else section.attention, getattr(torch, section.dtype)
    loading = 0
    with torch.device("meta"):
        if section.source is None:
            model = model_from_config(section, attention).to(dtype)
        else:
            model = meta_model(section.source, "auto" if section.layers else section.dtype, attention)
            if section.layers:
                loading = sum(p.numel() * p.element_size() for p in model.parameters())
                model = cut_layers(model, section.layers, section.source, attention).to(dtype)
        return made_trainable(model, section), loading


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


def _exported_bytes(trained: TrainableModel, model: ModelSize) -> int:
    lora, head = trained.lora, trained.model.get_output_embeddings()
    if lora is None:  # factors stand beside their product
        return model.weights + (whole_matrix(head).nbytes if isinstance(head, LowRankHead) else 0)
    added = sum(p.numel() * p.element_size() for name, p in trained.model.named_parameters() if "lora_" in name)
    return added if lora.export == "adapter" else model.weights - added


def _launch(accelerator: Any) -> Launch:
    processes, stage, device = accelerator.num_processes, zero_stage(accelerator), accelerator.device.type
    if not stage:
        return Launch(device, processes)
    zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    offloaded = (zero.get(part, {}).get("device") == "cpu" for part in ("offload_optimizer", "offload_param"))
    return Launch(device, processes, stage, *offloaded)

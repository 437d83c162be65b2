"""A training recipe's models as outlines: shapes and types from their configurations, on the meta device, unloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from ...checkpoints.artifact.locate import at_revision
from ...checkpoints.heads.files import PredictionHeads
from ...checkpoints.storage.messages import first_line
from ...checkpoints.verify.model_files import base_of, is_adapter
from ...train.config import micro_steps
from ...train.parallel.accelerate import zero_stage
from ...train.plan.memory import Demand, Launch, ModelSize, heads_size, model_size
from ..schema.training import DrafterRecipe, HeadsRecipe, ModelSection
from .acceptance import decodes_fast
from .drafter import complete_section
from .models import TrainableModel, cut_layers, made_trainable, model_from_config, new_model

_ACCELERATE = "recipes/launch/accelerate/"


@dataclass(frozen=True)
class Outline:
    """What a recipe comes to before anything is loaded."""

    demand: Demand
    artifact_bytes: int
    """Of weights in the artifact."""
    stored_weights: int
    """Bytes of a checkpoint's weights, without DeepSpeed."""
    tensors: int
    """In a checkpoint."""
    launches: tuple[tuple[str, Launch], ...]
    """accelerate's settings by name that share out more of the memory."""
    cached: Callable[[Demand], Demand] | None
    """What a cache of the target instead of the target itself makes of it; None: there is nothing to gain."""


def outline_of(recipe: DrafterRecipe | HeadsRecipe, accelerator: Any) -> Outline:
    """Shapes and sizes of what a recipe trains and runs, for the processes that were launched.

    Raises:
        ValueError: a model whose configuration cannot be read or makes no model; layers, embeddings or adapters that
            it does not have; a global batch that cannot be split.
    """
    launch = _launch(accelerator)
    micro_steps(recipe.train.global_batch, recipe.train.micro_batch, launch.processes)
    if isinstance(recipe, HeadsRecipe):
        return _heads_outline(recipe, launch)
    trained, loading = outline_trainable(complete_section(recipe))
    model = model_size(trained.model)
    taught = recipe.distils and recipe.teacher.cache is None
    target = None
    if recipe.target is not None and (taught or recipe.measure.prompts):
        dtype = "float16" if recipe.teacher.load_in_8bit and recipe.teacher.dtype == "auto" else recipe.teacher.dtype
        outlined = outline_model(recipe.target, dtype)
        measured = launch.device if recipe.measure.prompts and decodes_fast(outlined) else None
        target = model_size(outlined, eight_bit=recipe.teacher.load_in_8bit, decodes_on=measured)
    demand = _demand(recipe, launch, model, target, taught, 0, loading)

    def cached(other: Demand) -> Demand:
        return replace(other, target=None, taught=False, soft=False)

    wanted = target is not None and taught and recipe.on_policy is None and not recipe.data.streaming
    return Outline(
        demand=demand,
        artifact_bytes=_exported_bytes(trained, model),
        stored_weights=model.weights,
        tensors=len(list(trained.model.parameters())),
        launches=_launches(launch),
        cached=cached if wanted else None,
    )


def _heads_outline(recipe: HeadsRecipe, launch: Launch) -> Outline:
    outlined = outline_model(recipe.target, recipe.target_dtype)
    if outlined.config.is_encoder_decoder:
        kind = outlined.config.model_type
        raise ValueError(f"{recipe.target} is an encoder-decoder ({kind}), and a decoder is needed")
    fast = recipe.base is None and recipe.measure.prompts and decodes_fast(outlined)
    target = model_size(outlined, decodes_on=launch.device if fast else None)
    with torch.device("meta"):
        projection_VD = outlined.get_output_embeddings().weight.float()
        forms = (recipe.projection, recipe.rank, recipe.states)
        heads = PredictionHeads.from_lm_head(projection_VD, recipe.num_heads, recipe.num_layers, *forms)
    exported = sum(p.numel() for p in heads.parameters()) * outlined.dtype.itemsize
    base = None
    if recipe.base is not None:
        section = ModelSection(source=recipe.target, lora=recipe.base.lora)
        with torch.device("meta"):
            trained = made_trainable(outlined, section)
        base = model_size(outlined)
        exported += _exported_bytes(trained, base)
    model = heads_size(heads, target, base)
    tensors = [*heads.parameters(), *(p for p in outlined.parameters() if base is not None and p.requires_grad)]
    recomputed = recipe.hidden.cache is None and base is None
    demand = _demand(recipe, launch, model, None if base else target, recomputed, recipe.num_heads, 0)
    return Outline(
        demand=replace(demand, soft=recipe.distils),
        artifact_bytes=exported,
        stored_weights=model.trained_weights,
        tensors=len(tensors),
        launches=_launches(launch),
        cached=None,
    )


def _demand(
    recipe: Any, launch: Launch, model: ModelSize, target: ModelSize | None, taught: bool, heads: int, loading: int
) -> Demand:
    train = recipe.train
    return Demand(
        model=model,
        target=target,
        taught=taught,
        heads=heads,
        soft=taught,
        block_tokens=recipe.data.block_tokens,
        micro_batch=train.micro_batch,
        global_batch=train.global_batch,
        checkpointing=train.gradient_checkpointing,
        precision=train.precision,
        loading=loading,
        launch=launch,
    )


def outline_trainable(section: ModelSection) -> tuple[TrainableModel, int]:
    """What `models.build_model` would make, without weights; and the bytes of a model that layers are cut from.

    Raises:
        ValueError: as `models.build_model`, as far as configurations tell.
    """
    attention, dtype = None if section.attention == "auto" else section.attention, getattr(torch, section.dtype)
    loading = 0
    with torch.device("meta"):
        if section.source is None:
            model = model_from_config(section, attention).to(dtype)
        else:
            model = outline_model(section.source, "auto" if section.layers else section.dtype, attention)
            if section.layers:
                loading = sum(p.numel() * p.element_size() for p in model.parameters())
                model = cut_layers(model, section.layers, section.source, attention).to(dtype)
        return made_trainable(model, section), loading


def outline_model(source: str, dtype: str, attention: str | None = None) -> PreTrainedModel:
    """A model of a folder or hub id without its weights; `dtype` auto takes that of the files.

    Raises:
        ValueError: there is no such model, or its configuration makes none.
    """
    place = _adapted(at_revision(source, weights=False))
    try:
        config = AutoConfig.from_pretrained(place)
        with torch.device("meta"):
            model = new_model(config, attention)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"no language model could be outlined from {source!r}: {first_line(error)}") from error
    known = _dtype_of(place, config) if dtype == "auto" else getattr(torch, dtype)
    return model.to(known).requires_grad_(True)


def _adapted(source: str) -> str:
    """The model that an adapter in a folder is for; else the same."""
    folder = Path(source)
    return at_revision(base_of(folder), weights=False) if is_adapter(folder) else source


def _dtype_of(source: str, config: Any) -> torch.dtype:
    """As the configuration says, else that of the first tensor of files that are here; float32 where nobody knows."""
    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    quiet = {"_raise_exceptions_for_missing_entries": False, "local_files_only": True}
    path = cached_file(source, "model.safetensors", **quiet)
    if path is None:
        return torch.float32
    with safe_open(path, framework="pt") as opened:
        name = next(iter(opened.keys()))
        known = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return known.get(opened.get_slice(name).get_dtype(), torch.float32)


def _exported_bytes(trained: TrainableModel, model: ModelSize) -> int:
    lora = trained.lora
    if lora is None:
        return model.weights
    added = sum(p.numel() * p.element_size() for name, p in trained.model.named_parameters() if "lora_" in name)
    return added if lora.export == "adapter" else model.weights - added


def _launch(accelerator: Any) -> Launch:
    processes = accelerator.num_processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    stage, device = zero_stage(accelerator), accelerator.device.type
    if not stage:
        return Launch(device, processes, local)
    zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    offloaded = (zero.get(part, {}).get("device") == "cpu" for part in ("offload_optimizer", "offload_param"))
    bucket = zero.get("reduce_bucket_size")
    launch = Launch(device, processes, local, stage, *offloaded)
    return replace(launch, bucket=int(bucket)) if isinstance(bucket, int | float) else launch


def _launches(launch: Launch) -> tuple[tuple[str, Launch], ...]:
    """Settings of accelerate with which the same processes hold less; on processors one machine holds it all anyway."""
    found = []
    if launch.processes > 1:
        for stage in range(launch.zero_stage + 1, 4):
            sharded = replace(launch, zero_stage=stage, offload_optimizer=False, offload_weights=False)
            found.append((f"{_ACCELERATE}zero{stage}.yaml --num_processes {launch.processes}", sharded))
    if launch.device != "cpu" and not launch.offload_weights:
        offloaded = replace(launch, zero_stage=3, offload_optimizer=True, offload_weights=True)
        found.append((f"{_ACCELERATE}zero3-offload.yaml --num_processes {launch.processes}", offloaded))
    return tuple(found)

"""Estimates of `draftsmith train --plan` for H100 GPUs, which need no weights, data or network.

Models are built on the meta device from their configurations. Known targets have theirs in `pairs/models/`.
"""

import math
from typing import Any

import torch
from rich.table import Column, Table
from torch import nn
from transformers import AutoConfig

from ....checkpoints.storage.messages import gigabytes
from ....checkpoints.storage.names import WHOLE_FILES
from ....checkpoints.storage.places import find_local, split_revision
from ....checkpoints.verify.model_files import load_config, meta_model
from ...assemble.drafter import inherit_sizes
from ...assemble.heads import build_auxiliary
from ...assemble.models import cut_layers, freeze_parts, model_from_config
from ...schema.loading import read_model, shipped_models
from ...schema.training import DrafterRecipe, HeadsRecipe
from ...session.terminal import console

_FROZEN_RATE, _TRAINED_RATE = 440e12, 310e12
"""FLOP/s of a target's forward pass and of training, measured on one H200 with a 7B target and four Medusa heads
(`tests/bench/results/train_heads-h200.json`). An H100 has the same peak for bfloat16."""
_EPOCH_TOKENS = 100_000_000
"""Assumed number of tokens in the training data, whose size is unknown before it is prepared."""


def missing_model(recipe: DrafterRecipe | HeadsRecipe) -> str | None:
    """Return the target or initial model of a recipe whose weights are not on this machine; None if all are."""
    from huggingface_hub import try_to_load_from_cache

    for name in (recipe.target, recipe.model.source if isinstance(recipe, DrafterRecipe) else None):
        if name is not None and find_local(name) is None:
            repo, revision = split_revision(name)
            if not any(isinstance(try_to_load_from_cache(repo, file, revision=revision), str) for file in WHOLE_FILES):
                return name
    return None


def _meta(name: str) -> Any:
    """Build a model on the meta device, with the configuration in its model file if it is not on this machine."""
    known = {model.target: model.config for model in map(read_model, shipped_models().values())}
    is_known = name in known and find_local(name) is None
    return meta_model(AutoConfig.for_model(**known[name]) if is_known else load_config(name))


def print_estimate(recipe: DrafterRecipe | HeadsRecipe) -> None:
    """Print the estimated requirements of a recipe for one and eight H100 GPUs as a table on standard output."""
    train, target = recipe.train, None if recipe.target is None else _meta(recipe.target)
    module, flops = _heads(recipe, target) if isinstance(recipe, HeadsRecipe) else _drafter(recipe, target)
    weights = sum(p.nbytes for p in module.parameters())
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    memory = {"weights": weights, "gradients": gradients, "AdamW moments": 2 * gradients}
    checkpoints = train.keep_checkpoints + 2  # with the best one and the one that is being written
    disk = {"checkpoints": checkpoints * (weights + 2 * gradients), "artifact": weights}
    seconds = flops / _TRAINED_RATE
    if target is not None:
        disk["target"] = memory["target"] = 2 * sum(p.numel() for p in target.parameters())
        seconds += 2 * _active(target) / _FROZEN_RATE * (isinstance(recipe, HeadsRecipe) or recipe.distils)
    step = train.global_batch * recipe.data.block_tokens
    steps = train.steps if train.steps is not None else math.ceil(train.epochs * _EPOCH_TOKENS / step)
    hours = seconds * steps * step / 3600
    table = Table("estimate", *(Column(f"{n} H100", justify="right", no_wrap=True) for n in (1, 8)), "", box=None)
    trained = f"{sum(p.numel() for p in module.parameters() if p.requires_grad):,}"
    table.add_row("trained parameters", trained, trained)
    for name, sizes, note in (("memory per GPU", memory, ", without activations"), ("disk", disk, "")):
        total, parts = sum(sizes.values()), ", ".join(f"{part} {gigabytes(size)}" for part, size in sizes.items())
        table.add_row(name, gigabytes(total), gigabytes(total), f"at least: {parts}{note}")
    table.add_row("tokens", *[f"{steps * step:,}"] * 2, f"{steps:,} steps; {_EPOCH_TOKENS:,} per epoch are assumed")
    table.add_row("hours", f"{hours:.2g}", f"{hours / 8:.2g}", "from rates measured on one H200 with a 7B target")
    console().print(table)


def _heads(recipe: HeadsRecipe, target: Any) -> tuple[nn.Module, float]:
    """Return the heads of a recipe on the meta device, and the FLOPs to train them on a token."""
    tokens = None if recipe.vocabulary is None else recipe.vocabulary.tokens
    with torch.device("meta"):
        proposed = None if tokens is None else torch.empty(tokens, dtype=torch.int64)
        heads: Any = build_auxiliary(recipe, target.config, proposed=proposed)
    passes = recipe.num_heads if recipe.architecture == "eagle3" else recipe.anchors * heads.block_size
    passes /= 1 if recipe.architecture == "eagle3" else recipe.data.block_tokens
    output = heads.hidden_size * (tokens or heads.vocab_size)  # frozen, so that its gradient is not computed
    return heads, passes * (6 * sum(p.numel() for p in heads.parameters()) + 4 * output)


def _drafter(recipe: DrafterRecipe, target: Any) -> tuple[nn.Module, float]:
    """Return the drafter of a recipe on the meta device, and the FLOPs to train it on a token."""
    section = recipe.model
    with torch.device("meta"):
        if section.source is None:
            section = section if target is None else inherit_sizes(section, target.config.get_text_config())
            model = model_from_config(section, None)
        else:
            model = _meta(section.source)
            model = cut_layers(model, section.layers, section.source) if section.layers else model
        model = freeze_parts(model.to(getattr(torch, section.dtype)), section).model
    masks = 1 if recipe.parallel is None else recipe.parallel.tokens
    return model, 6 * masks * _active(model)


def _active(model: Any) -> float:
    """Return the number of parameters that a token uses: without input embeddings and unused experts."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    unused = {id(model.get_input_embeddings().weight)} - {id(model.get_output_embeddings().weight)}
    parameters = ((name, p.numel()) for name, p in model.named_parameters() if id(p) not in unused)
    return sum(count * (share if ".experts." in name else 1) for name, count in parameters)

"""`draftsmith train --plan`: what a training recipe will need of memory, disk and time, and whether there is as much.

The models are loaded and their states counted (ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054, section 3), so that a
recipe that cannot fit is refused before it runs. The rest is measured on a few real steps, which leave only the
prepared data in its cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import nn

from ....data.blocks.prepared import PreparedData
from ....data.tokenizers import load_tokenizer
from ....train.config import micro_steps
from ....train.loop.fit import FitConfig
from ....train.loop.probe import MemoryWatch, Probe, free_bytes, held_bytes, probe
from ....train.parallel.accelerate import make_accelerator, zero_stage
from ....train.parallel.processes import on_main, together
from ...assemble.artifact import check_out, fit_config, prepare_once, state_folder
from ...assemble.data import Prepared
from ...assemble.drafter import DrafterParts, drafter_parts
from ...assemble.heads import HeadsParts, heads_parts
from ...assemble.models import TrainableModel
from ...schema.training import DrafterRecipe, HeadsRecipe, TrainingRecipe, role_of
from ...session.launch import run_on_all
from ...session.terminal import console, duration, gigabytes, log

_SMALL_FILES = 32 << 10  # manifests, the recipe, the loop's random numbers
_LESS_MEMORY = (
    "a smaller `train.micro_batch`, `train.gradient_checkpointing=true`, `model.dtype=bfloat16`, a cache of the target "
    "(`teacher.cache`, `hidden.cache`) and ZeRO (`draftsmith recipes copy accelerate/zero3 .`) need less"
)


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


@dataclass(frozen=True)
class Plan:
    """What a training recipe comes to; sizes of one process where nothing else is said."""

    kind: str
    size: RecipeSize
    processes: int
    parallelism: str
    process_bytes: int
    """Bytes that the process itself holds, with its libraries."""
    needed_bytes: int
    """Bytes of memory beyond that: counted, or measured by the probe where that held more."""
    free: tuple[int, str]
    """Bytes of memory, and what limits them."""
    disk: dict[str, int]
    """Bytes that will be written beside and below `out`, by what they are."""
    free_disk: int
    steps: int
    tokens: int
    """In all steps."""
    epochs: float | None
    """None: streamed, nobody knows."""
    evaluations: int
    probe: Probe
    evaluation_seconds: float
    """Of one."""
    prepared: Path

    @property
    def seconds(self) -> float:
        """Of the whole run, checkpoints not counted."""
        return self.steps * self.probe.step_seconds + self.evaluations * self.evaluation_seconds


def plan_recipe(recipe: TrainingRecipe) -> Plan:
    """Plan a recipe of kind drafter or heads. Under `accelerate launch` all processes call it. Raises ValueError: it
    does not fit into memory or onto the disk, with both numbers; a recipe for a table."""
    accelerator = run_on_all(partial(_accelerator, recipe))
    assert isinstance(recipe, DrafterRecipe | HeadsRecipe)
    on_main(accelerator, partial(check_out, Path(recipe.out), recipe))
    numbers = (recipe.train.global_batch, recipe.train.micro_batch, accelerator.num_processes)
    together(accelerator, partial(micro_steps, *numbers))
    free, base = _least_free(accelerator), held_bytes(accelerator.device)
    tokenizer = together(accelerator, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, accelerator)
    measured = bool(recipe.measure.prompts) and recipe.target is not None
    config = together(accelerator, partial(fit_config, recipe, prepared, measured))
    watch = MemoryWatch(accelerator.device)
    small, shares = _with_less_evaluation(recipe, prepared)
    make_parts: Any = drafter_parts if isinstance(recipe, DrafterRecipe) else heads_parts
    parts = together(accelerator, partial(make_parts, small, tokenizer, prepared, accelerator.device))
    size = size_of(recipe, parts, accelerator)
    together(accelerator, partial(_check_memory, size.memory, free))
    out, checkpoint = Path(recipe.out), size.checkpoint_bytes + _SMALL_FILES // 2
    there = sum(path.stat().st_size for path in (state_folder(out) / "checkpoints").rglob("*") if path.is_file())
    disk = {"checkpoints": max(0, _kept(config) * checkpoint - there), "artifact": size.artifact_bytes + _SMALL_FILES}
    free_disk = shutil.disk_usage(next(path for path in out.absolute().parents if path.exists())).free
    on_main(accelerator, partial(_check_disk, out, disk, free_disk))
    needed = sum(size.memory.values())
    if accelerator.is_main_process:
        log(f"{role_of(recipe)}: trying one or two micro batches")
    try:
        found = probe(parts.task, prepared.train, config, accelerator, watch)
    except MemoryError as error:
        raise ValueError(
            f"out of memory in the probe, though {gigabytes(needed)} were counted and {gigabytes(free[0])} are "
            f"{free[1]} ({error}): {_LESS_MEMORY}"
        ) from error
    stage, blocks = zero_stage(accelerator), prepared.train.blocks
    return Plan(
        kind=role_of(recipe),
        size=size,
        processes=accelerator.num_processes,
        parallelism=f"ZeRO {stage}" if stage else accelerator.distributed_type.value,
        process_bytes=base,
        needed_bytes=max(needed, found.peak_bytes),
        free=free,
        disk=disk,
        free_disk=free_disk,
        steps=config.steps,
        tokens=_tokens(config, prepared, found),
        epochs=config.steps * config.global_batch / blocks if blocks else None,
        evaluations=len(_due(config.steps, config.evaluate_every)),
        probe=found,
        evaluation_seconds=found.evaluation_seconds * shares,
        prepared=prepared.folder,
    )


def show(plan: Plan) -> None:
    """Print a plan as a table on standard output."""
    columns = (Column("what", no_wrap=True), Column("how much", justify="right", no_wrap=True), "")
    table = Table(*columns, box=None, title=f"plan: {plan.kind}", title_justify="left")
    for row in _rows(plan):
        table.add_row(*row)
    console().print(table)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    size, found = plan.size, plan.probe
    yield "parameters", f"{size.parameters:,}", f"{size.trained:,} of them trained"
    if size.target_parameters:
        yield "target's parameters", f"{size.target_parameters:,}", "run, not trained"
    yield "processes", str(plan.processes), f"{plan.parallelism}; memory below is that of each process"
    for name, number in size.memory.items():
        yield f"  {name}", gigabytes(number), ""
    yield "  the process itself", gigabytes(plan.process_bytes), "libraries; held already"
    measured = f"the probe held {gigabytes(found.peak_bytes)} (measured)"
    yield "memory at least", gigabytes(plan.needed_bytes), f"{measured}; {gigabytes(plan.free[0])} {plan.free[1]}"
    for name, number in plan.disk.items():
        yield f"  {name}", gigabytes(number), ""
    yield "disk", gigabytes(sum(plan.disk.values())), f"{gigabytes(plan.free_disk)} free"
    epochs = "streamed" if plan.epochs is None else f"{plan.epochs:.2f} epochs"
    yield "steps", f"{plan.steps:,}", f"{plan.tokens:,} tokens, {epochs}"
    each = f"{found.step_seconds:.3g} s a step, {plan.evaluations} evaluations of {plan.evaluation_seconds:.3g} s"
    yield "time", duration(plan.seconds), f"{each}: extrapolated from one or two micro batches and a few prompts"
    yield "prepared data", "", f"stays in {plan.prepared}"


def _accelerator(recipe: TrainingRecipe) -> Any:
    """Raises ValueError where there is nothing to plan."""
    if recipe.kind == "table":
        raise ValueError(
            "--plan is for recipes that train, and a table is counted in one pass over the data, at about the speed of "
            "its tokenizer and within `count.memory_mb` of memory"
        )
    return make_accelerator(recipe.train.precision)


def _due(steps: int, every: int) -> set[int]:
    """Steps after which a run evaluates: before the first (if at all while it trains), now and then, and the last."""
    return {steps} | (set(range(0, steps + 1, every)) if every else set())


def _tokens(config: FitConfig, prepared: Prepared, found: Probe) -> int:
    each = found.step_tokens
    if isinstance(prepared.train, PreparedData):
        each = prepared.train.manifest["tokens"] / prepared.train.blocks * config.global_batch
    return round(each * config.steps)


def _least_free(accelerator: Any) -> tuple[int, str]:
    """The least free memory of all processes, and what limits it; a machine's memory is shared by those on it."""
    size, where = free_bytes(accelerator.device)
    if accelerator.device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        size //= local
        where += f" for each of {local} processes" if local > 1 else ""
    if accelerator.num_processes > 1:
        size = int(accelerator.gather(torch.tensor([size], device=accelerator.device)).min())
    return size, where


def _check_memory(parts: dict[str, int], free: tuple[int, str]) -> None:
    """Raise ValueError if training needs more memory than there is."""
    if (needed := sum(parts.values())) > free[0]:
        raise ValueError(
            f"training needs at least {gigabytes(needed)} of memory in each process, and {gigabytes(free[0])} are "
            f"{free[1]} ({', '.join(f'{name} {gigabytes(size)}' for name, size in parts.items())}): {_LESS_MEMORY}"
        )


def _kept(config: FitConfig) -> int:
    """Checkpoints that lie on disk at once: those kept, one being written, and the best."""
    saves = _due(config.steps, config.save_every) - {0}
    if config.keep_best is not None and config.evaluate_every:
        saves |= _due(config.steps, config.evaluate_every)
    return min(len(saves), config.keep_checkpoints + 1 + (config.keep_best is not None))


def _check_disk(out: Path, disk: dict[str, int], free: int) -> None:
    """Raises ValueError where a run writes more than there is room for."""
    if sum(disk.values()) > free:
        shown = ", ".join(f"{name} {gigabytes(size)}" for name, size in disk.items())
        raise ValueError(
            f"the run writes {gigabytes(sum(disk.values()))} below {out.parent} ({shown}), and {gigabytes(free)} are "
            "free there: choose a folder on another disk, or a smaller `train.keep_checkpoints`"
        )


def _with_less_evaluation(recipe: Any, prepared: Prepared) -> tuple[Any, int]:
    """Return the recipe with a part of its evaluation, and the number of such parts in the whole."""
    section = recipe.measure
    blocks = min(section.blocks, prepared.heldout.blocks)
    shares = max(1, section.prompts or blocks)
    less = section.model_copy(update={"prompts": min(1, section.prompts), "blocks": -(-blocks // shares)})
    return recipe.model_copy(update={"measure": less}), shares


def size_of(recipe: DrafterRecipe | HeadsRecipe, parts: DrafterParts | HeadsParts, accelerator: Any) -> RecipeSize:
    """Return the sizes of a recipe's loaded models for the processes that were launched."""
    others: list[nn.Module] = []
    if isinstance(parts, DrafterParts):
        parameters = stored = list(parts.trained.model.parameters())
        exported = _exported_bytes(parts.trained)
        others = parts.task.models_beside
    else:
        target, base = parts.task.target, parts.base
        parameters = list(parts.heads.parameters())
        exported = _count(parameters) * target.dtype.itemsize
        if base is None:
            others = [target]
        else:
            exported += _exported_bytes(base)
            parameters = [*target.parameters(), *parameters]
        stored = [p for p in parameters if p.requires_grad]
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


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _exported_bytes(trained: TrainableModel) -> int:
    lora, weights = trained.lora, sum(p.nbytes for p in trained.model.parameters())
    if lora is None:
        return weights
    added = sum(p.nbytes for name, p in trained.model.named_parameters() if "lora_" in name)
    return added if lora.export == "adapter" else weights - added

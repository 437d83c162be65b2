"""`draftsmith train --plan`: estimate the memory, disk space and time that a training recipe requires.

The models are loaded to count the bytes of weights, gradients and optimizer states (ZeRO: Rajbhandari et al. 2020,
arXiv 1910.02054, section 3). The time is measured with two short training steps in a temporary directory.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.table import Column, Table
from torch import nn

from ....checkpoints.storage.messages import gigabytes
from ....train.config import FitConfig, micro_steps
from ....train.loop.fit import fit
from ....train.parallel.accelerate import make_accelerator, zero_stage
from ....train.parallel.processes import from_main, on_main
from ...assemble.artifact import Run, check_out, fit_config, state_folder
from ...schema.training import DrafterRecipe, HeadsRecipe, TrainingRecipe, role_of
from ...session.precision import settle_precision
from ...session.terminal import console, duration
from .train import make_run

_SMALL_FILES = 32 << 10  # bytes of manifests, recipe and log
_LESS_MEMORY = (
    "reduce `train.micro_batch`, or use `train.gradient_checkpointing=true`, `model.dtype=bfloat16`, a cache of the "
    "target (`teacher.cache`, `hidden.cache`) or ZeRO (`draftsmith recipes copy accelerate/zero3 .`)"
)


@dataclass(frozen=True)
class RecipeSize:
    """Sizes of the models and the training states of a recipe."""

    parameters: int
    trained: int
    """Number of trainable parameters."""
    target_parameters: int
    """Number of parameters of the other models in memory, such as the target."""
    memory: dict[str, int]
    """Mapping from kinds of data, such as `gradients`, to bytes of memory in each process."""
    checkpoint_bytes: int
    """Size of the weights and optimizer states in a checkpoint, in bytes."""


@dataclass(frozen=True)
class Probe:
    """Measurements of a short training run."""

    step_seconds: float
    """Time of an optimizer step in seconds, extrapolated from one or two micro batches."""
    evaluation_seconds: float
    """Time of an evaluation in seconds, extrapolated from a smaller evaluation."""
    peak_bytes: int
    """Peak memory of a process in bytes."""


@dataclass(frozen=True)
class Plan:
    """Requirements of a training recipe. Memory is given for one process."""

    kind: str
    size: RecipeSize
    processes: int
    parallelism: str
    needed_bytes: int
    """Required memory in bytes, without activations."""
    free_bytes: int
    disk: dict[str, int]
    """Mapping from `checkpoints` and `artifact` to the bytes that will be written to disk."""
    free_disk: int
    steps: int
    tokens: int
    """Total number of training tokens."""
    epochs: float
    evaluations: int
    probe: Probe
    prepared: Path
    blocks: tuple[int, int] | None = None
    """Maximum number of blocks per row, and of tokens per block, that a DFlash drafter is trained on."""

    @property
    def seconds(self) -> float:
        """Total time of training and evaluation in seconds, without writing checkpoints."""
        return self.steps * self.probe.step_seconds + self.evaluations * self.probe.evaluation_seconds


def plan_recipe(recipe: TrainingRecipe) -> Plan:
    """Estimate the requirements of a drafter or heads recipe. All launched processes must call this function.

    Raises ValueError if there is too little memory or disk space, or if the recipe is for a table.
    """
    if not isinstance(recipe, DrafterRecipe | HeadsRecipe):
        raise ValueError("--plan requires a recipe of kind drafter or heads, got table")
    recipe = settle_precision(recipe)
    accelerator, out = make_accelerator(recipe.train.precision), Path(recipe.out)
    on_main(accelerator, partial(check_out, out, recipe))
    free = _least_free(accelerator)
    small, shares = _reduce_evaluation(recipe)
    run = make_run(small, accelerator)
    config = fit_config(recipe, run.prepared, run.measured)
    size = size_of(recipe, run, accelerator)
    _check_memory(size.memory, free)
    checkpoint = size.checkpoint_bytes + _SMALL_FILES // 2
    existing = sum(path.stat().st_size for path in (state_folder(out) / "checkpoints").rglob("*") if path.is_file())
    disk = {
        "checkpoints": max(0, _max_checkpoints(config) * checkpoint - existing),
        "artifact": run.artifact_bytes + _SMALL_FILES,
    }
    free_disk = shutil.disk_usage(next(path for path in out.absolute().parents if path.exists())).free
    _check_disk(out, disk, free_disk)
    probe = _probe(run, config, accelerator, shares)
    stage, data = zero_stage(accelerator), run.prepared.train
    step_tokens = data.manifest["tokens"] / data.blocks * config.global_batch
    return Plan(
        kind=role_of(recipe),
        size=size,
        processes=accelerator.num_processes,
        parallelism=f"ZeRO {stage}" if stage else accelerator.distributed_type.value,
        needed_bytes=sum(size.memory.values()),
        free_bytes=free,
        disk=disk,
        free_disk=free_disk,
        steps=config.steps,
        tokens=round(step_tokens * config.steps),
        epochs=config.steps * config.global_batch / data.blocks,
        evaluations=len(_evaluation_steps(config.steps, config.evaluate_every)),
        probe=probe,
        prepared=run.prepared.folder,
        blocks=_blocks_of(recipe),
    )


def _blocks_of(recipe: DrafterRecipe | HeadsRecipe) -> tuple[int, int] | None:
    """Return the maximum number of blocks per row and their size with DFlash or DSpark; None for other recipes."""
    if not isinstance(recipe, HeadsRecipe) or not recipe.drafts_blocks:
        return None
    is_first_used = recipe.architecture == "dspark" and recipe.dspark.sample_from_anchor
    return min(recipe.anchors, recipe.data.block_tokens - 1), recipe.num_heads + (not is_first_used)


def show(plan: Plan) -> None:
    """Print a plan as a table on standard output."""
    columns = (Column("what", no_wrap=True), Column("amount", justify="right", no_wrap=True), "")
    table = Table(*columns, box=None, title=f"plan: {plan.kind}", title_justify="left")
    for row in _rows(plan):
        table.add_row(*row)
    console().print(table)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    size, probe = plan.size, plan.probe
    yield "parameters", f"{size.parameters:,}", f"{size.trained:,} trainable"
    if size.target_parameters:
        yield "target parameters", f"{size.target_parameters:,}", "frozen"
    yield "processes", str(plan.processes), f"{plan.parallelism}; memory is per process"
    for name, number in size.memory.items():
        yield f"  {name}", gigabytes(number), ""
    measured = f"measured peak {gigabytes(probe.peak_bytes)}"
    yield "memory at least", gigabytes(plan.needed_bytes), f"{gigabytes(plan.free_bytes)} free; {measured}"
    for name, number in plan.disk.items():
        yield f"  {name}", gigabytes(number), ""
    yield "disk", gigabytes(sum(plan.disk.values())), f"{gigabytes(plan.free_disk)} free"
    yield "steps", f"{plan.steps:,}", f"{plan.tokens:,} tokens, {plan.epochs:.2f} epochs"
    each = f"{probe.step_seconds:.3g} s per step, {plan.evaluations} evaluations of {probe.evaluation_seconds:.3g} s"
    if plan.blocks is not None:
        blocks, size_of_block = plan.blocks
        yield "queries per row", f"{blocks * size_of_block:,}", f"up to {blocks} blocks of {size_of_block} tokens"
    yield "time", duration(plan.seconds), f"{each}, extrapolated from a few micro batches and prompts"
    yield "prepared data", "", f"cached in {plan.prepared}"


def _probe(run: Run, config: FitConfig, accelerator: Any, shares: int) -> Probe:
    """Train two steps of at most two micro batches, and measure the second. `shares` scales the evaluation time."""
    micro_batches = micro_steps(config.global_batch, config.micro_batch, accelerator.num_processes)
    tried = min(2, micro_batches)
    size = config.micro_batch * accelerator.num_processes * tried
    small = replace(config, steps=2, global_batch=size, evaluate_every=0, save_every=0, log_every=1, keep_best=None)
    seconds, evaluate = [0.0], run.task.evaluate

    def timed_evaluate(module: nn.Module) -> dict[str, float]:
        started = time.perf_counter()
        metrics = evaluate(module)
        seconds.append(time.perf_counter() - started)
        return metrics

    run.task.evaluate = timed_evaluate  # type: ignore[method-assign]
    folder = Path(from_main(accelerator, mkdtemp))
    try:
        result = fit(run.task, run.prepared.train, small, folder, accelerator)
        lines = [json.loads(line) for line in result.history.read_text().splitlines()]
    finally:
        accelerator.wait_for_everyone()
        shutil.rmtree(folder, ignore_errors=True)
    first, last = (line for line in lines if "loss" in line)
    tokens = last["tokens"] - first["tokens"]
    step = tokens / last["tokens_per_second"] * micro_batches / tried
    return Probe(step, seconds[-1] * shares, last["peak_memory_bytes"])


def _evaluation_steps(steps: int, every: int) -> set[int]:
    """Return the steps after which evaluation runs: the last one, and multiples of `every`."""
    return {steps} | (set(range(0, steps + 1, every)) if every else set())


def _least_free(accelerator: Any) -> int:
    """Return the minimum free memory in bytes over all processes. Processes on one machine share CPU memory."""
    if accelerator.device.type == "cuda":
        size = int(torch.cuda.mem_get_info(accelerator.device)[0])
    else:
        size = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if accelerator.num_processes > 1:
        size = int(accelerator.gather(torch.tensor([size], device=accelerator.device)).min())
    return size


def _check_memory(parts: dict[str, int], free: int) -> None:
    """Raise ValueError if training requires more memory than is free."""
    if (needed := sum(parts.values())) > free:
        raise ValueError(
            f"training requires at least {gigabytes(needed)} of memory per process, but {gigabytes(free)} are free "
            f"({', '.join(f'{name} {gigabytes(size)}' for name, size in parts.items())}): {_LESS_MEMORY}"
        )


def _max_checkpoints(config: FitConfig) -> int:
    """Return the maximum number of checkpoints on disk, including the best one and the one being written."""
    saves = _evaluation_steps(config.steps, config.save_every) - {0}
    if config.keep_best is not None and config.evaluate_every:
        saves |= _evaluation_steps(config.steps, config.evaluate_every)
    return min(len(saves), config.keep_checkpoints + 1 + (config.keep_best is not None))


def _check_disk(out: Path, disk: dict[str, int], free: int) -> None:
    """Raise ValueError if a run requires more disk space than is free."""
    if sum(disk.values()) > free:
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in disk.items())
        raise ValueError(
            f"the run writes {gigabytes(sum(disk.values()))} to {out.parent} ({parts}), but {gigabytes(free)} are "
            "free: choose a folder on another disk, or reduce `train.keep_checkpoints`"
        )


def _reduce_evaluation(recipe: Any) -> tuple[Any, int]:
    """Return the recipe with a smaller evaluation, and how many times larger the full evaluation is."""
    section = recipe.measure
    shares = max(1, section.prompts or section.blocks)
    less = section.model_copy(update={"prompts": min(1, section.prompts), "blocks": -(-section.blocks // shares)})
    return recipe.model_copy(update={"measure": less}), shares


def size_of(recipe: DrafterRecipe | HeadsRecipe, run: Run, accelerator: Any) -> RecipeSize:
    """Compute the sizes of the models and training states of a run for the number of launched processes."""
    parameters = list(run.task.module.parameters())
    stored = {id(tensor): tensor for tensor in run.task.module.state_dict(keep_vars=True).values()}.values()
    others = [p for model in run.task.other_models for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    count, trained_count, trained_bytes = _count(parameters), _count(trained), sum(p.nbytes for p in trained)
    stage, processes = zero_stage(accelerator), accelerator.num_processes
    if not stage:
        memory = {"weights": sum(p.nbytes for p in parameters), "gradients": trained_bytes}
        memory["AdamW moments"] = 2 * trained_bytes
        checkpoint = sum(p.nbytes for p in stored) + 2 * trained_bytes
    else:
        item = 4 if recipe.train.precision == "no" else 2
        memory = {
            "weights": count * item // (processes if stage == 3 else 1),
            "gradients": trained_count * item // (processes if stage >= 2 else 1),
            "AdamW moments": 8 * trained_count // processes,
            "float32 weights": 4 * trained_count // processes,
        }
        checkpoint = 4 * _count(stored) + 8 * trained_count  # always float32
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if accelerator.device.type != "cpu":  # offloaded states are in host memory
            if zero.get("offload_param", {}).get("device") == "cpu":
                memory.pop("weights")
            if zero.get("offload_optimizer", {}).get("device") == "cpu":
                memory = {name: size for name, size in memory.items() if name == "weights"}
    if others:
        memory["target"] = sum(p.nbytes for p in others)
    return RecipeSize(count, trained_count, _count(others), memory, checkpoint)


def _count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)

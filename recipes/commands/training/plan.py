"""`draftsmith train --plan`: what a training recipe will need of memory, disk and time, and whether there is as much.

Memory is estimated from configurations alone, so that a recipe that cannot fit is refused before anything is loaded;
the rest is measured on a few real steps, which leave nothing behind but the prepared data in its cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....data.blocks.prepared import PreparedData
from ....data.tokenizers import load_tokenizer
from ....train.loop.fit import FitConfig, Task
from ....train.parallel.accelerate import make_accelerator
from ....train.parallel.processes import on_main, together
from ....train.plan.memory import Demand, Launch, Part, checkpoint_bytes, peak, plan_memory
from ....train.plan.probe import MemoryWatch, Probe, free_bytes, held_bytes, probe
from ....train.tasks.heads import HeadsModule
from ...assemble.artifact import check_out, fit_config, prepare_once, state_folder
from ...assemble.data import Prepared
from ...assemble.drafter import drafter_parts
from ...assemble.heads import heads_parts
from ...assemble.sizes import RecipeSize, size_of
from ...assemble.teacher import NoCacheError, cache_bytes, open_cache, open_hidden
from ...schema.training import DrafterRecipe, HeadsRecipe, TableRecipe
from ...session.launch import run_on_all
from ...session.terminal import console, duration, gigabytes, log

_SMALL_FILES = 32 << 10  # manifests, the recipe, the loop's random numbers
_ACCELERATE = "recipes/launch/accelerate/"


@dataclass(frozen=True)
class DiskPart:
    """Bytes that will be written below `folder`."""

    name: str
    size_bytes: int
    folder: Path


@dataclass(frozen=True)
class Plan:
    """What a training recipe comes to; sizes of one process where nothing else is said."""

    kind: str
    device: str
    processes: int
    launch: str
    """Kind of parallelism."""
    parameters: int
    trained_parameters: int
    target_parameters: int
    """0: no target lies in memory."""
    memory: tuple[Part, ...]
    """By purpose, estimated."""
    process_bytes: int
    """What the process itself holds, with its libraries."""
    needed_bytes: int
    """Of memory, beyond that: measured where there was a probe and it took more than was estimated."""
    measured_bytes: int | None
    """What the probe held at most, beyond the process itself."""
    free_bytes: int
    free_where: str
    disk: tuple[DiskPart, ...]
    checkpoint_bytes: int
    """Of one checkpoint."""
    artifact_bytes: int
    steps: int
    tokens: int
    """In all steps."""
    epochs: float | None
    """None: streamed, nobody knows."""
    step_seconds: float | None
    """None: there was no probe; see `notes`."""
    evaluations: int
    evaluation_seconds: float | None
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        """Of the whole run, checkpoints not counted."""
        if self.step_seconds is None or self.evaluation_seconds is None:
            return None
        return self.steps * self.step_seconds + self.evaluations * self.evaluation_seconds


def plan_recipe(recipe: DrafterRecipe | HeadsRecipe | TableRecipe) -> Plan:
    """Plan a recipe of kind drafter or heads. Under `accelerate launch` all processes call it.

    Raises:
        ValueError: it does not fit into memory or onto the disk, with both numbers and the nearest setting that does;
            a recipe for a table; what checking the recipe, preparing its data and loading its models raise.
    """
    accelerator = run_on_all(partial(_accelerator, recipe))
    assert not isinstance(recipe, TableRecipe)
    on_main(accelerator, partial(check_out, Path(recipe.out), recipe))
    size = together(accelerator, partial(size_of, recipe, accelerator))
    free = _least(accelerator, free_bytes(accelerator.device))
    base = held_bytes(accelerator.device)
    together(accelerator, partial(_check_memory, recipe, size, free))
    tokenizer = together(accelerator, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, accelerator)
    measured = bool(recipe.measure.prompts) and recipe.target is not None
    config = together(accelerator, partial(fit_config, recipe, prepared, measured))
    disk, notes = together(accelerator, partial(_disk, recipe, size, config, prepared, tokenizer))
    on_main(accelerator, partial(_check_disk, disk, config))
    found, share = None, 1.0
    if notes:
        notes = [*notes, "no probe without it, hence no time and no measured memory"]
    else:
        found, share, task = _probe(recipe, config, prepared, tokenizer, accelerator, size, free)
        if isinstance(recipe, HeadsRecipe):
            notes = [*notes, *_hidden_notes(recipe, config, prepared, found, task, accelerator)]
    demand, blocks = size.demand, prepared.train.blocks
    parts = plan_memory(demand)
    return Plan(
        kind=recipe.kind,
        device=accelerator.device.type,
        processes=accelerator.num_processes,
        launch=f"ZeRO {demand.launch.zero_stage}" if demand.launch.zero_stage else accelerator.distributed_type.value,
        parameters=demand.model.parameters,
        trained_parameters=demand.model.trained,
        target_parameters=demand.target.parameters if demand.target else 0,
        memory=parts,
        process_bytes=base,
        needed_bytes=max(peak(parts, accelerator.device.type), found.peak_bytes if found else 0),
        measured_bytes=found.peak_bytes if found else None,
        free_bytes=free[0],
        free_where=free[1],
        disk=tuple(disk),
        checkpoint_bytes=_checkpoint(size),
        artifact_bytes=next(part.size_bytes for part in disk if part.name == "artifact"),
        steps=config.steps,
        tokens=_tokens(config, prepared, found),
        epochs=config.steps * config.global_batch / blocks if blocks else None,
        step_seconds=found.step_seconds if found else None,
        evaluations=evaluations(config),
        evaluation_seconds=found.evaluation_seconds / share if found else None,
        notes=(*notes, f"prepared data stays in {prepared.folder}"),
    )


def evaluations(config: FitConfig) -> int:
    """How often a run evaluates: before the first step (if at all while it trains), now and then, and at the end."""
    due = {config.steps}
    if config.evaluate_every:
        due |= set(range(0, config.steps + 1, config.evaluate_every))
    return len(due)


def show(plan: Plan) -> None:
    """Print a plan as a table on standard output."""
    from rich.table import Table

    table = Table(box=None, title=f"plan: {plan.kind}", title_justify="left")
    for heading, side in (("what", "left"), ("how much", "right"), ("", "left")):
        table.add_column(heading, justify=side, no_wrap=heading != "")  # type: ignore[arg-type]
    for row in _rows(plan):
        table.add_row(*row)
    console().print(table)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    yield "parameters", f"{plan.parameters:,}", f"{plan.trained_parameters:,} of them trained"
    if plan.target_parameters:
        yield "target's parameters", f"{plan.target_parameters:,}", "run, not trained"
    yield "processes", str(plan.processes), f"{plan.launch} on {plan.device}; memory below is each one's"
    for part in plan.memory:
        where = "" if part.phase == "always" else f"while {part.phase}"
        where += ", in the machine's memory" if part.place == "host" and plan.device != "cpu" else ""
        yield f"  {part.name}", gigabytes(part.size), where.removeprefix(", ")
    yield "  the process itself", gigabytes(plan.process_bytes), "libraries; held already"
    measured = "estimated"
    if plan.measured_bytes is not None:
        measured += f"; the probe held {gigabytes(plan.measured_bytes)} (measured)"
    yield "memory at most", gigabytes(plan.needed_bytes), f"{measured}; {gigabytes(plan.free_bytes)} {plan.free_where}"
    for disk in plan.disk:
        yield f"  {disk.name}", gigabytes(disk.size_bytes), str(disk.folder)
    yield (
        "disk",
        gigabytes(sum(part.size_bytes for part in plan.disk)),
        f"{gigabytes(_free_disk(plan.disk[0].folder))} free",
    )
    epochs = "streamed" if plan.epochs is None else f"{plan.epochs:.2f} epochs"
    yield "steps", f"{plan.steps:,}", f"{plan.tokens:,} tokens, {epochs}"
    if plan.seconds is not None:
        assert plan.step_seconds is not None
        assert plan.evaluation_seconds is not None
        each = f"{plan.step_seconds:.3g} s a step, {plan.evaluations} evaluations of {plan.evaluation_seconds:.3g} s"
        yield "time", duration(plan.seconds), f"{each}: extrapolated from one or two micro batches and a few prompts"
    for note in plan.notes:
        yield "note", "", note


def _accelerator(recipe: DrafterRecipe | HeadsRecipe | TableRecipe) -> Any:
    """Raises ValueError where there is nothing to plan, and what `make_accelerator` raises."""
    if isinstance(recipe, TableRecipe):
        raise ValueError(
            "--plan is for recipes that train, and a table is counted in one pass over the data, at about the speed of "
            "its tokenizer and within `count.memory_mb` of memory"
        )
    return make_accelerator(recipe.train.precision)


def _tokens(config: FitConfig, prepared: Prepared, found: Probe | None) -> int:
    if isinstance(prepared.train, PreparedData):
        each = prepared.train.manifest["tokens"] / prepared.train.blocks * config.global_batch
    else:
        each = found.step_tokens if found else float(config.global_batch * prepared.train.block_tokens)
    return round(each * config.steps)


def _least(accelerator: Any, free: tuple[int, str]) -> tuple[int, str]:
    """The least free memory of all processes; a machine's memory is shared by those on it."""
    import torch

    size, where = free
    if accelerator.device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        size //= local
        where += f" for each of {local} processes" if local > 1 else ""
    if accelerator.num_processes > 1:
        size = int(accelerator.gather(torch.tensor([size], device=accelerator.device)).min())
    return size, where


def _check_memory(recipe: Any, size: RecipeSize, free: tuple[int, str]) -> None:
    """Raises ValueError where the recipe needs more than there is, with the nearest setting that does not."""
    parts = plan_memory(size.demand)
    needed = peak(parts, size.demand.launch.device)
    if needed > free[0]:
        largest = sorted(parts, key=lambda part: -part.size)[:3]
        raise ValueError(
            f"{recipe.out}: training needs {gigabytes(needed)} of memory in each process, and {gigabytes(free[0])} are "
            f"{free[1]} ({', '.join(f'{part.name} {gigabytes(part.size)}' for part in largest)}). "
            f"{_nearest_memory(size, free[0])}"
        )


def _nearest_memory(size: RecipeSize, free: int) -> str:
    """The smallest change to a recipe, or to how it is launched, with which it fits."""
    smallest: tuple[int, str] | None = None
    for change, demand in _smaller(size):
        needed = peak(plan_memory(demand), demand.launch.device)
        if needed <= free:
            return f"The nearest setting that fits: {change} ({gigabytes(needed)})"
        if smallest is None or needed < smallest[0]:
            smallest = needed, change
    assert smallest is not None
    return f"No setting of this recipe fits; {smallest[1]} would need {gigabytes(smallest[0])}: take a smaller model"


def _smaller(size: RecipeSize) -> Iterator[tuple[str, Demand]]:
    """Settings that need less, the least change first."""
    demand = size.demand
    share = demand.global_batch // demand.launch.processes
    stages: list[tuple[str, Demand]] = [("", demand)]
    if not demand.checkpointing and (not demand.heads or demand.target is None):
        stages.append(("train.gradient_checkpointing=true", replace(demand, checkpointing=True)))
    words, least = stages[-1]
    if size.may_cache:
        without = replace(least, target=None, taught=False, decodes=False)
        stages.append((f"{words} teacher.cache=FOLDER teacher.top_k=50 measure.prompts=0", without))
    if not demand.heads and demand.model.item == 4 and not demand.launch.zero_stage:
        model = demand.model
        half = replace(model, weights=model.weights // 2, trained_weights=model.trained_weights // 2, item=2)
        stages.append((f"{words} model.dtype=bfloat16", replace(least, model=half)))
    for name, launch in _launches(demand.launch):
        stages.append((f"{words} and `accelerate launch --config_file {name}`", replace(least, launch=launch)))
    for words, changed in stages:
        for micro_batch in range(demand.micro_batch, 0, -1):
            if share % micro_batch == 0:
                micro = "" if micro_batch == demand.micro_batch else f"train.micro_batch={micro_batch}"
                change = " ".join(f"{micro} {words}".split()).removeprefix("and ")
                yield change or "as it is", replace(changed, micro_batch=micro_batch)


def _launches(launch: Launch) -> Iterator[tuple[str, Launch]]:
    """Settings of accelerate with which the same processes hold less; on processors one machine holds it all anyway."""
    if launch.processes > 1:
        for stage in range(launch.zero_stage + 1, 4):
            sharded = replace(launch, zero_stage=stage, offload_optimizer=False, offload_weights=False)
            yield f"{_ACCELERATE}zero{stage}.yaml --num_processes {launch.processes}", sharded
    if launch.device != "cpu" and not launch.offload_weights:
        offloaded = replace(launch, zero_stage=3, offload_optimizer=True, offload_weights=True)
        yield f"{_ACCELERATE}zero3-offload.yaml --num_processes {launch.processes}", offloaded


def _disk(
    recipe: Any, size: RecipeSize, config: FitConfig, prepared: Prepared, tokenizer: Any
) -> tuple[list[DiskPart], list[str]]:
    """What the run will write, and why it could not begin as it is."""
    out = Path(recipe.out)
    with tempfile.TemporaryDirectory() as scratch:
        if recipe.kind == "drafter" or recipe.base is not None:
            tokenizer.save_pretrained(scratch)
        files = _bytes_in(Path(scratch))
    checkpoints = _kept(config) * _checkpoint(size) - _bytes_in(state_folder(out) / "checkpoints")
    parts = [
        DiskPart("checkpoints", max(0, checkpoints), state_folder(out)),
        DiskPart("artifact", size.artifact_bytes + files + _SMALL_FILES, out),
    ]
    name, folder, width = "hidden states", None, size.demand.model.hidden_size
    if recipe.kind == "heads":
        folder = recipe.hidden.cache
    elif recipe.distils:
        name, folder, width = "teacher's cache", recipe.teacher.cache, size.demand.model.vocab_size
    if folder is not None:
        try:
            open_hidden(recipe, prepared) if recipe.kind == "heads" else open_cache(recipe, prepared)
        except NoCacheError:
            parts.append(DiskPart(name, cache_bytes(recipe, prepared, width), Path(folder)))
            return parts, [f"there is no {name} yet: `draftsmith prepare` with this recipe and `--teacher` writes it"]
    return parts, []


def _kept(config: FitConfig) -> int:
    """Checkpoints that lie on disk at once: those kept, one being written, and the best."""
    saves = {config.steps}
    if config.save_every:
        saves |= set(range(config.save_every, config.steps + 1, config.save_every))
    if config.keep_best is not None and config.evaluate_every:
        saves |= set(range(0, config.steps + 1, config.evaluate_every))
    return min(len(saves), config.keep_checkpoints + 1 + (config.keep_best is not None))


def _checkpoint(size: RecipeSize) -> int:
    return checkpoint_bytes(size.demand.model, size.stored_weights, size.demand.launch) + _SMALL_FILES // 2


def _check_disk(parts: list[DiskPart], config: FitConfig) -> None:
    """Raises ValueError where a file system has too little room, with the nearest setting that needs less."""
    by_system: dict[int, list[DiskPart]] = {}
    for part in parts:
        by_system.setdefault(_existing(part.folder).stat().st_dev, []).append(part)
    for mine in by_system.values():
        needed, free = sum(part.size_bytes for part in mine), _free_disk(mine[0].folder)
        if needed <= free:
            continue
        advice = "choose a folder on another disk"
        written = next((part.size_bytes for part in mine if part.name == "checkpoints"), 0)
        for keep in range(config.keep_checkpoints - 1, 0, -1):
            fits = needed - written + written * _kept(replace(config, keep_checkpoints=keep)) // _kept(config)
            if fits <= free:
                advice = f"The nearest setting that fits: train.keep_checkpoints={keep} ({gigabytes(fits)})"
                break
        shown = ", ".join(f"{part.name} {gigabytes(part.size_bytes)}" for part in mine)
        raise ValueError(
            f"the run writes {gigabytes(needed)} below {mine[0].folder.parent} ({shown}), and {gigabytes(free)} are "
            f"free there. {advice}"
        )


def _free_disk(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """The folder itself or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _probe(
    recipe: Any, config: FitConfig, prepared: Prepared, tokenizer: Any, accelerator: Any, size: RecipeSize, free: Any
) -> tuple[Probe, float, Task]:
    """Run the recipe's task for a step or two, and a part of its evaluation. Returns also which part, and the task."""
    if accelerator.is_main_process:
        log(f"{recipe.kind}: trying one or two micro batches")
    section = recipe.measure
    blocks = min(section.blocks, prepared.heldout.blocks)
    shares = max(1, section.prompts or blocks)
    less = section.model_copy(update={"prompts": min(1, section.prompts), "blocks": -(-blocks // shares)})
    watch = MemoryWatch(accelerator.device)
    try:
        parts: Any = drafter_parts if isinstance(recipe, DrafterRecipe) else heads_parts
        small = recipe.model_copy(update={"measure": less})
        task = together(accelerator, partial(parts, small, tokenizer, prepared, accelerator.device)).task
        return probe(task, prepared.train, config, accelerator, watch), 1 / shares, task
    except MemoryError as error:
        estimated = peak(plan_memory(size.demand), accelerator.device.type)
        raise ValueError(
            f"out of memory in the probe, though {gigabytes(estimated)} were estimated and {gigabytes(free[0])} are "
            f"{free[1]} ({error}). {_nearest_memory(size, free[0] * 9 // 10)}"
        ) from error


def _hidden_notes(
    recipe: HeadsRecipe, config: FitConfig, prepared: Prepared, found: Probe, task: Task, accelerator: Any
) -> Iterator[str]:
    """What recomputing the target's hidden states costs, and what keeping them would."""
    module, micro = task.module, config.micro_batch
    assert isinstance(module, HeadsModule)
    if recipe.hidden.cache is not None:
        yield f"the target's hidden states come from {recipe.hidden.cache}"
        return
    if recipe.base is not None or recipe.shard_target or not isinstance(prepared.train, PreparedData):
        return
    batch = prepared.train.batch(range(min(micro, prepared.train.blocks))).to(accelerator.device)
    started = time.perf_counter()
    module.frozen_states(batch).flatten()[0].item()
    seconds = time.perf_counter() - started
    steps = config.global_batch / (micro * accelerator.num_processes)
    share = min(1.0, seconds * steps / found.step_seconds)
    epoch = seconds * prepared.train.blocks / (micro * accelerator.num_processes)
    epochs = config.steps * config.global_batch / max(1, prepared.train.blocks)
    size = cache_bytes(recipe, prepared, module.heads.hidden_size)
    free = _free_disk(prepared.folder)
    yield (
        f"the target's forward is {share:.0%} of a step, {duration(epoch * epochs)} of this run's {epochs:.2g} epochs; "
        f"its hidden states on disk (`hidden.cache`, {recipe.hidden.dtype}) would take {gigabytes(size)} "
        f"({gigabytes(free)} free below {prepared.folder}) and {duration(epoch)} to write once"
    )

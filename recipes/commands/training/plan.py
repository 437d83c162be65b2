"""`draftsmith train --plan`: what a training recipe will need of memory, disk and time, and whether there is as much.

Memory is reckoned from configurations alone, so that a recipe that cannot fit is refused before anything is loaded; the
rest is measured on a few real steps, which leave nothing behind but the prepared data in its cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....data.blocks.prepared import PreparedData
from ....data.tokenizers import load_tokenizer
from ....train.loop.fit import FitConfig, Task
from ....train.parallel.accelerate import make_accelerator
from ....train.parallel.processes import on_main, together
from ....train.plan.memory import Demand, ModelSize, Part, checkpoint_bytes, peak, plan_memory
from ....train.plan.probe import MemoryWatch, Probe, free_bytes, held_bytes, probe
from ....train.tasks.heads import HeadsModule
from ...assemble.artifact import check_out, fit_config, prepare_once, state_folder
from ...assemble.data import Prepared
from ...assemble.drafter import drafter_parts
from ...assemble.heads import heads_parts
from ...assemble.outlines import Outline, outline_of
from ...assemble.teacher import NoCacheError, hidden_bytes, open_cache, open_hidden, teacher_bytes
from ...schema.training import DrafterRecipe, HeadsRecipe, TableRecipe
from ...session.launch import agreed
from ...session.terminal import console, duration, gigabytes, log

_SMALL_FILES = 32 << 10  # manifests, the recipe, the loop's random numbers
_TENSOR_HEADER = 120  # bytes of a safetensors header per tensor


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
    """By purpose, reckoned."""
    process_bytes: int
    """What the process itself holds, with its libraries."""
    needed_bytes: int
    """Of memory, beyond that: measured where there was a probe and it took more than was reckoned of what it ran."""
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
    accelerator = agreed(partial(_accelerator, recipe))
    assert not isinstance(recipe, TableRecipe)
    on_main(accelerator, partial(check_out, Path(recipe.out), recipe))
    outline = together(accelerator, partial(outline_of, recipe, accelerator))
    free = _agreed(accelerator, free_bytes(accelerator.device))
    base = held_bytes(accelerator.device)
    together(accelerator, partial(_check_memory, recipe, outline, free))
    tokenizer = together(accelerator, partial(load_tokenizer, recipe.tokenizer_source))
    prepared = prepare_once(recipe, tokenizer, accelerator)
    measured = bool(recipe.measure.prompts) and recipe.target is not None
    config = together(accelerator, partial(fit_config, recipe, prepared, measured))
    disk, notes = together(accelerator, partial(_disk, recipe, outline, config, prepared, tokenizer))
    on_main(accelerator, partial(_check_disk, disk, config))
    found, share = None, 1.0
    if notes:
        notes = [*notes, "no probe without it, hence no time and no measured memory"]
    else:
        found, share, task = _probe(recipe, config, prepared, tokenizer, accelerator, outline, free)
        if isinstance(recipe, HeadsRecipe):
            notes = [*notes, *_hidden_notes(recipe, config, prepared, found, task, accelerator)]
    parts, blocks, demand = plan_memory(outline.demand), prepared.train.blocks, outline.demand
    sharded = f"ZeRO {demand.launch.zero_stage}" if demand.launch.zero_stage else accelerator.distributed_type.value
    return Plan(
        kind=recipe.kind,
        device=accelerator.device.type,
        processes=accelerator.num_processes,
        launch=sharded,
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
        checkpoint_bytes=_checkpoint(outline),
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
    measured = "reckoned"
    if plan.measured_bytes is not None:
        measured += f"; the probe held {gigabytes(plan.measured_bytes)} (measured)"
    yield "memory at most", gigabytes(plan.needed_bytes), f"{measured}; {gigabytes(plan.free_bytes)} {plan.free_where}"
    for disk in plan.disk:
        yield f"  {disk.name}", gigabytes(disk.size_bytes), str(disk.folder)
    yield "disk", gigabytes(sum(part.size_bytes for part in plan.disk)), f"{gigabytes(_free_disk(plan))} free"
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


def _agreed(accelerator: Any, free: tuple[int, str]) -> tuple[int, str]:
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


def _check_memory(recipe: Any, outline: Outline, free: tuple[int, str]) -> None:
    """Raises ValueError where the recipe needs more than there is, with the nearest setting that does not."""
    needed = _lacking(outline.demand, free[0])
    if needed is None:
        return
    what, size, there, where = needed
    where = where or free[1]
    raise ValueError(
        f"{recipe.out}: training needs {gigabytes(size)} of {what} in each process, and {gigabytes(there)} are "
        f"{where} ({_largest(outline.demand)}). {nearest_memory(recipe, outline, free[0])}"
    )


def _lacking(demand: Demand, free: int) -> tuple[str, int, int, str] | None:
    """What there is too little of: its name, bytes needed, bytes there, and where ("": as the caller knows)."""
    import torch

    parts, device = plan_memory(demand), demand.launch.device
    needed = peak(parts, device)
    if needed > free:
        return "memory", needed, free, ""
    if device != "cpu":
        size, where = free_bytes(torch.device("cpu"))
        host, there = peak(parts, device, "host"), size // demand.launch.local_processes
        if host > there:
            return "the machine's memory", host, there, f"{where} for each of {demand.launch.local_processes} processes"
    return None


def nearest_memory(recipe: Any, outline: Outline, free: int) -> str:
    """The smallest change to a recipe, or to how it is launched, with which it fits."""
    smallest: tuple[int, str] | None = None
    for change, demand in _smaller(recipe, outline):
        needed = peak(plan_memory(demand), demand.launch.device)
        if _lacking(demand, free) is None:
            return f"The nearest setting that fits: {change} ({gigabytes(needed)})"
        if smallest is None or needed < smallest[0]:
            smallest = needed, change
    assert smallest is not None
    return f"No setting of this recipe fits; {smallest[1]} would need {gigabytes(smallest[0])}: take a smaller model"


def _smaller(recipe: Any, outline: Outline) -> Iterator[tuple[str, Demand]]:
    """Settings that need less, the least change first."""
    demand = outline.demand
    share = demand.global_batch // demand.launch.processes
    sizes = [size for size in range(demand.micro_batch, 0, -1) if share % size == 0]
    stages: list[tuple[str, Demand]] = [("", demand)]
    if not demand.checkpointing and (not demand.heads or demand.target is None):
        stages.append(("train.gradient_checkpointing=true", replace(demand, checkpointing=True)))
    last = stages[-1]
    if outline.cached is not None:
        stages.append((f"{last[0]} teacher.cache=FOLDER teacher.top_k=50 measure.prompts=0", outline.cached(last[1])))
    if not demand.heads and demand.model.item > 2 and not demand.launch.zero_stage:
        half = replace(last[1], model=_halved(demand.model))
        stages.append((f"{last[0]} model.dtype=bfloat16", half))
    for name, launch in outline.launches:
        stages.append((f"{last[0]} and `accelerate launch --config_file {name}`", replace(last[1], launch=launch)))
    for words, changed in stages:
        for size in sizes:
            micro = "" if size == demand.micro_batch else f"train.micro_batch={size}"
            told = " ".join(f"{micro} {words}".split()).removeprefix("and ")
            yield told or "as it is", replace(changed, micro_batch=size)


def _halved(model: ModelSize) -> ModelSize:
    return replace(
        model,
        weights=model.weights * 2 // model.item,
        trained_weights=model.trained_weights * 2 // model.item,
        in_heap=model.in_heap * 2 // model.item,
        item=2,
    )


def _largest(demand: Demand) -> str:
    parts = sorted(plan_memory(demand), key=lambda part: -part.size)
    return ", ".join(f"{part.name} {gigabytes(part.size)}" for part in parts[:3])


def _disk(
    recipe: Any, outline: Outline, config: FitConfig, prepared: Prepared, tokenizer: Any
) -> tuple[list[DiskPart], list[str]]:
    """What the run will write, and why it could not begin as it is."""
    out = Path(recipe.out)
    with tempfile.TemporaryDirectory() as scratch:
        if recipe.kind == "drafter" or recipe.base is not None:
            tokenizer.save_pretrained(scratch)
        files = _size_of(Path(scratch))
    checkpoints = _kept(config) * _checkpoint(outline) - _size_of(state_folder(out) / "checkpoints")
    parts = [
        DiskPart("checkpoints", max(0, checkpoints), state_folder(out)),
        DiskPart("artifact", outline.artifact_bytes + files + _SMALL_FILES, out),
    ]
    notes = []
    if recipe.kind == "heads" and recipe.hidden.cache is not None:
        try:
            open_hidden(recipe, prepared)
        except NoCacheError:
            size = hidden_bytes(recipe, prepared, outline.demand.model.hidden_size)
            parts.append(DiskPart("hidden states", size, Path(recipe.hidden.cache)))
            notes.append("the hidden states are not written yet: `draftsmith prepare` with this recipe and `--teacher`")
    if recipe.kind == "drafter" and recipe.distils and recipe.teacher.cache is not None:
        size = _missing_cache(recipe, prepared, outline)
        if size:
            parts.append(DiskPart("teacher's cache", size, Path(recipe.teacher.cache)))
            notes.append(
                "the teacher's cache is not written yet: `draftsmith prepare` with this recipe and `--teacher`"
            )
    return parts, notes


def _kept(config: FitConfig) -> int:
    """Checkpoints that lie on disk at once: those kept, one being written, and the best."""
    saves = {config.steps}
    if config.save_every:
        saves |= set(range(config.save_every, config.steps + 1, config.save_every))
    best = 0
    if config.keep_best is not None:
        best = 1
        if config.evaluate_every:
            saves |= set(range(0, config.steps + 1, config.evaluate_every))
    return min(len(saves), config.keep_checkpoints + 1 + best)


def _checkpoint(outline: Outline) -> int:
    size = checkpoint_bytes(outline.demand.model, outline.stored_weights, outline.demand.launch)
    return size + outline.tensors * _TENSOR_HEADER + _SMALL_FILES // 2


def _missing_cache(recipe: DrafterRecipe, prepared: Prepared, outline: Outline) -> int:
    try:
        open_cache(recipe, prepared)
    except NoCacheError:
        return teacher_bytes(recipe, prepared, outline.demand.model.vocab_size)
    return 0


def _check_disk(parts: list[DiskPart], config: FitConfig) -> None:
    """Raises ValueError where a file system has too little room, with the nearest setting that needs less."""
    by_system: dict[int, list[DiskPart]] = {}
    for part in parts:
        by_system.setdefault(_standing(part.folder).stat().st_dev, []).append(part)
    for mine in by_system.values():
        needed, free = sum(part.size_bytes for part in mine), shutil.disk_usage(_standing(mine[0].folder)).free
        if needed <= free:
            continue
        told = ", ".join(f"{part.name} {gigabytes(part.size_bytes)}" for part in mine)
        raise ValueError(
            f"the run writes {gigabytes(needed)} below {mine[0].folder.parent} ({told}), and {gigabytes(free)} are "
            f"free there. {_nearest_disk(mine, config, needed, free)}"
        )


def _nearest_disk(parts: list[DiskPart], config: FitConfig, needed: int, free: int) -> str:
    written = next((part.size_bytes for part in parts if part.name == "checkpoints"), 0)
    each = written / _kept(config)
    choices = [(f"train.keep_checkpoints={keep}", replace(config, keep_checkpoints=keep)) for keep in _below(config)]
    if config.keep_best is not None:
        fewest = "train.keep_checkpoints=1 measure.keep=last"
        choices.append((fewest, replace(config, keep_checkpoints=1, keep_best=None)))
    for words, changed in choices:
        fits = needed - written + each * _kept(changed)
        if fits <= free:
            return f"The nearest setting that fits: {words} ({gigabytes(round(fits))})"
    caches = {"teacher's cache": "teacher.cache", "hidden states": "hidden.cache"}
    setting = next((caches[part.name] for part in parts if part.name in caches and not written), "out")
    return f"Choose a folder on another disk: {setting}=FOLDER"


def _below(config: FitConfig) -> range:
    return range(config.keep_checkpoints - 1, 0, -1)


def _free_disk(plan: Plan) -> int:
    return shutil.disk_usage(_standing(plan.disk[0].folder)).free


def _standing(folder: Path) -> Path:
    """The folder itself or the nearest above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _probe(
    recipe: Any, config: FitConfig, prepared: Prepared, tokenizer: Any, accelerator: Any, outline: Outline, free: Any
) -> tuple[Probe, float, Task]:
    """Run the recipe's task for a step or two. Returns also the share of an evaluation that was run, and the task."""
    if accelerator.is_main_process:
        log(f"{recipe.kind}: trying one or two micro batches")
    small, share = _less_measured(recipe, prepared)
    watch = MemoryWatch(accelerator.device)
    try:
        parts: Any = drafter_parts if isinstance(recipe, DrafterRecipe) else heads_parts
        task = together(accelerator, partial(parts, small, tokenizer, prepared, accelerator.device)).task
        return probe(task, prepared.train, config, accelerator, watch), share, task
    except MemoryError as error:
        reckoned, there = peak(plan_memory(outline.demand), accelerator.device.type), free[0] * 9 // 10
        raise ValueError(
            f"out of memory in the probe, though {gigabytes(reckoned)} were reckoned and {gigabytes(free[0])} are "
            f"{free[1]} ({error}). {nearest_memory(recipe, outline, there)}"
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
    seconds = min(_seconds_of(lambda: module.frozen_states(batch).flatten()[0].item()) for _ in range(2))
    steps = config.global_batch / (micro * accelerator.num_processes)
    share = min(1.0, seconds * steps / found.step_seconds)
    epoch = seconds * prepared.train.blocks / (micro * accelerator.num_processes)
    epochs = config.steps * config.global_batch / max(1, prepared.train.blocks)
    size = hidden_bytes(recipe, prepared, module.heads.hidden_size)
    free = shutil.disk_usage(_standing(prepared.folder)).free
    yield (
        f"the target's forward is {share:.0%} of a step, {duration(epoch * epochs)} of this run's {epochs:.2g} epochs; "
        f"its hidden states on disk (`hidden.cache`, {recipe.hidden.dtype}) would take {gigabytes(size)} "
        f"({gigabytes(free)} free below {prepared.folder}) and {duration(epoch)} to write once"
    )


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _less_measured(recipe: Any, prepared: Prepared) -> tuple[Any, float]:
    """The recipe with a part of its evaluation, and which part that is."""
    section = recipe.measure
    blocks = min(section.blocks, prepared.heldout.blocks)
    parts = max(1, section.prompts or blocks)
    changed = section.model_copy(update={"prompts": min(1, section.prompts), "blocks": -(-blocks // parts)})
    return recipe.model_copy(update={"measure": changed}), 1 / parts

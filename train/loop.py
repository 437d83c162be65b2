"""The one training loop: any task, any number of processes, resumable at every checkpoint.

Letters: B batch (blocks), T tokens.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..data.packing import PADDING, Batch
from .config import FitConfig
from .interrupts import Interrupted, StopSignals, TrainingError
from .progress import Report
from .state import Position, StateFolder, data_fingerprint

if TYPE_CHECKING:
    from rich.console import Console

    from ..data.prepared import PreparedData
    from ..data.stream import StreamedData

__all__ = ["FitConfig", "FitResult", "Interrupted", "Task", "TrainingError", "fit"]

_MAX_SKIPPED_STEPS = 50


class Task(Protocol):
    """What `fit` trains."""

    name: str
    module: nn.Module
    """Its forward(tokens_BT, labels_BT, positions_BT, documents_BT) returns (loss sums, counts): tensors of one shape.
    The loss of a step is Σ sums ÷ counts, both taken over the whole global batch."""
    settings: dict[str, Any]
    """What a resumed run must not change; JSON values."""

    def place(self, device: torch.device) -> None:
        """Move to `device` what is run but not trained."""

    def count(self, batch: Batch) -> Tensor:
        """The counts that `module` would return for this batch, without running it."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Held-out metrics of `module` (unwrapped, in evaluation mode); may be empty."""


@dataclass(frozen=True)
class FitResult:
    """What a finished run has to say."""

    steps: int
    first_loss: float
    """Of the first logged step."""
    last_loss: float
    """Mean over the last tenth of the logged steps."""
    metrics: dict[str, float]
    """Of the last evaluation."""
    tokens: int
    """Seen, untrained ones included, padding not."""
    seconds: float
    """Of training, in all runs that led here; evaluations and checkpoints not counted."""
    history: Path
    """`log.jsonl`: one line a logged step, one an evaluation."""
    processes: int
    distributed_type: str
    resumed_from: int | None
    """The step this call went on from; None: it began at the beginning."""


def fit(
    task: Task,
    data: PreparedData | StreamedData,
    config: FitConfig,
    state_dir: str | Path,
    accelerator: Any | None = None,
    progress: Console | None = None,
) -> FitResult:
    """Train `task.module` in place for `config.steps` steps, going on from the newest checkpoint in `state_dir`.

    Calling it again on a finished folder loads the final weights and returns. The blocks of a step depend on seed and
    step alone and every step draws its own random numbers, so a resumed run repeats the losses of an undisturbed one,
    and another number of processes sees the same data. `progress` is where to report (None: standard error).

    Raises:
        ValueError: a batch that cannot be split; a state folder of a run with other settings.
        TrainingError: a loss or gradient that is not finite.
        Interrupted: SIGINT or SIGTERM; the state was saved.
        OSError: a checkpoint could not be written; the older ones are untouched.
    """
    accelerator = _accelerator(config, accelerator)
    run = _Run(task, data, config, Path(state_dir), accelerator)
    try:
        position = run.prepare()
        with StopSignals() as stop, Report(task.name, config.steps, position.step, progress, run.is_main) as report:
            report.line(run.opening_line(position))
            return run.train(position, stop, report)
    finally:
        run.release()


class _Run:
    """The pieces of one call of `fit`."""

    def __init__(
        self, task: Task, data: PreparedData | StreamedData, config: FitConfig, folder: Path, accelerator: Any
    ) -> None:
        self.task, self.data, self.config, self.accelerator = task, data, config, accelerator
        self.is_main: bool = accelerator.is_main_process
        self.world: int = accelerator.num_processes
        self.micro_steps = _micro_steps(config, self.world)
        accelerator.gradient_accumulation_steps = self.micro_steps
        self.state = StateFolder(folder, accelerator, config.keep_checkpoints)
        self.rates = _learning_rates(config)
        self.module: Any = task.module
        self.resumed_from: int | None = None
        self.skipped = 0
        self.stopping = False

    def prepare(self) -> Position:
        """Hand module and optimizer to the accelerator and load the newest checkpoint."""
        module, config = self.task.module, self.config
        if config.gradient_checkpointing:
            if not hasattr(module, "gradient_checkpointing_enable"):
                raise ValueError(f"gradient_checkpointing is set, but the task {self.task.name!r} does not offer it")
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        settings = config.fixed()
        settings |= {f"{self.task.name}.{key}": value for key, value in self.task.settings.items()}
        settings["parameters"] = sum(p.numel() for p in module.parameters() if p.requires_grad)
        settings["data"] = data_fingerprint(self.data)
        position = self.state.open(settings)
        self.task.place(self.accelerator.device)
        module.to(self.accelerator.device)
        self.module, self.optimizer = self.accelerator.prepare(module, _optimizer(module, config))
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        if position is None:
            self.data.restore(self.data.beginning)
            return Position()
        self.state.load(position)
        self.data.restore(position.data)
        self.resumed_from = position.step
        return position

    def release(self) -> None:
        """Leave the accelerator empty and the module as it was, without wrappers."""
        self.accelerator.unwrap_model(self.module, keep_fp32_wrapper=False)
        self.accelerator.free_memory()

    def opening_line(self, position: Position) -> str:
        """Where and what is about to run."""
        config, accelerator = self.config, self.accelerator
        trained = sum(p.numel() for p in self.parameters)
        tokens = config.global_batch * self.data.block_tokens
        line = (
            f"{self.task.name}: {self.world} process{'es' if self.world > 1 else ''} "
            f"({accelerator.distributed_type.value}) on {accelerator.device.type}, precision {config.precision}, "
            f"{trained:,} trained parameters, {config.steps} steps of {tokens:,} tokens at most"
        )
        if self.resumed_from is not None:
            line += f"; going on after step {position.step}"
            if position.processes != self.world:
                line += f" (that ran in {position.processes} processes: same data, sums are rounded differently)"
        return line

    def train(self, position: Position, stop: StopSignals, report: Report) -> FitResult:
        """All remaining steps, with what is due after each."""
        config = self.config
        while True:
            step = position.step
            # Saved first: an evaluation that fails must not cost the training that led to it.
            if step and self.resumed_from != step and self._due(step, config.save_every, also=step == config.steps):
                self.state.save(position)
            if self._due(step, config.evaluate_every, also=step == config.steps):
                self._evaluate(step, report)
            if step == config.steps:
                return self._result(position)
            started = time.perf_counter()
            line = self._step(step, stop)
            seconds = time.perf_counter() - started
            tokens = position.tokens + line.pop("step_tokens")
            line |= {"tokens": tokens, "tokens_per_second": (tokens - position.tokens) / seconds}
            position = Position(step + 1, position.seconds + seconds, self.world, tokens, self.data.state())
            report.step(step + 1, line["loss"], line["tokens_per_second"])
            if (step + 1) % config.log_every == 0 or step + 1 == config.steps:
                self.state.log(line)
            if self.stopping:
                self._stop(position, stop, report)

    def _step(self, step: int, stop: StopSignals) -> dict[str, Any]:
        """One optimizer step over one global batch; what to log about it."""
        config = self.config
        indices, whole = self.data.step_batch(step, config.global_batch, config.seed)
        counts = self.task.count(whole).clamp(min=1).to(self.accelerator.device)
        rate = config.learning_rate * self.rates(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rank = self.accelerator.process_index
        torch.manual_seed(int(np.random.SeedSequence([config.seed, step, rank]).generate_state(1, np.uint64)[0]) >> 1)
        self.module.train()
        losses: list[Tensor] = []
        norm = torch.zeros(())
        for micro in range(self.micro_steps):
            rows = _rows(micro, rank, self.world, config.micro_batch)
            with self.accelerator.accumulate(self.module):
                loss_sums, _ = self.module(*_tensors(whole, rows, self.accelerator.device))
                part = (loss_sums.float() / counts).sum()
                losses.append(part.detach())
                # accelerate divides by the accumulation steps, data parallelism by the processes: undo both
                self.accelerator.backward(part * (self.micro_steps * self.world))
                if self.accelerator.sync_gradients:
                    limit = config.clip_norm or math.inf
                    norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.parameters, limit))
        loss = self._sum_over_processes(sum(losses, torch.zeros((), device=losses[0].device)), stop)
        self._check(step, loss, float(norm), losses, indices)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = int((whole.documents_BT != PADDING).sum())
        return {
            "step": step + 1,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": float(norm),
            "step_tokens": tokens,
        }

    def _sum_over_processes(self, loss: Tensor, stop: StopSignals) -> float:
        """The step's loss over all processes; on the way they agree on whether to stop."""
        if self.world == 1:
            self.stopping = stop.received is not None
            return float(loss)
        both = torch.stack([loss.double(), torch.tensor(float(stop.received is not None)).to(loss)])
        both = self.accelerator.reduce(both, "sum")
        self.stopping = bool(both[1] > 0)
        return float(both[0])

    def _check(self, step: int, loss: float, norm: float, losses: list[Tensor], indices: np.ndarray) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped = 0
            return
        if math.isfinite(loss) and self.accelerator.scaler is not None:
            self.skipped += 1  # float16: the optimizer skips this step and lowers the loss scale
            if self.skipped < _MAX_SKIPPED_STEPS:
                return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        rank, size = self.accelerator.process_index, self.config.micro_batch
        bad = [micro for micro, value in enumerate(losses) if not math.isfinite(float(value))]
        blocks = [int(i) for micro in bad for i in indices[_rows(micro, rank, self.world, size)]]
        raise TrainingError(
            f"{what} at step {step + 1}, blocks {blocks or [int(i) for i in indices]}; stopped before the weights were "
            f"changed. The last checkpoint in {self.state.folder} is untouched. Lower learning_rate or clip_norm, or "
            f"look at these blocks"
        )

    def _due(self, step: int, every: int, also: bool) -> bool:
        return also or (every > 0 and step % every == 0)

    def _evaluate(self, step: int, report: Report) -> None:
        """Measure unless the log has it already; sharded modules need all processes, others only the main one."""
        if self.state.evaluation(step) is not None:
            return
        self.accelerator.wait_for_everyone()
        metrics: dict[str, float] = {}
        if self.is_main or self.accelerator.distributed_type.value in ("DEEPSPEED", "FSDP"):
            self.module.eval()
            with torch.no_grad(), self.accelerator.autocast():
                metrics = self.task.evaluate(self.accelerator.unwrap_model(self.module))
        if self.world > 1:
            from accelerate.utils import broadcast_object_list

            metrics = broadcast_object_list([metrics])[0]
        self.state.log_evaluation(step, metrics)
        report.evaluation(step, metrics)

    def _stop(self, position: Position, stop: StopSignals, report: Report) -> None:
        self.state.save(position)
        number = stop.received or signal.SIGTERM  # another process was told to stop
        message = (
            f"stopped by {signal.Signals(number).name} after step {position.step} of {self.config.steps}; saved in "
            f"{self.state.folder}, run the same again to go on"
        )
        report.line(f"{self.task.name}: {message}")
        raise Interrupted(number, message)

    def _result(self, position: Position) -> FitResult:
        self.accelerator.wait_for_everyone()  # the log is the main process's
        losses = self.state.losses()
        tail = losses[-max(1, len(losses) // 10) :]
        return FitResult(
            steps=position.step,
            first_loss=losses[0] if losses else math.nan,
            last_loss=sum(tail) / len(tail) if tail else math.nan,
            metrics=self.state.evaluation(position.step) or {},
            tokens=position.tokens,
            seconds=position.seconds,
            history=self.state.history,
            processes=self.world,
            distributed_type=self.accelerator.distributed_type.value,
            resumed_from=self.resumed_from,
        )


def _accelerator(config: FitConfig, accelerator: Any | None) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if accelerator is None:
        shared = AcceleratorState._shared_state
        if shared and shared.get("_mixed_precision", config.precision) != config.precision:
            AcceleratorState._reset_state()  # an earlier run of this process had another precision
        return Accelerator(mixed_precision=config.precision)
    if accelerator.mixed_precision != config.precision:
        raise ValueError(
            f"precision is {config.precision!r}, the accelerator was made for {accelerator.mixed_precision!r}"
        )
    return accelerator


def _micro_steps(config: FitConfig, processes: int) -> int:
    together = config.micro_batch * processes
    if config.global_batch % together:
        raise ValueError(
            f"global_batch {config.global_batch} cannot be split into micro_batch {config.micro_batch} × {processes} "
            f"processes = {together} blocks at a time; choose a multiple of {together}"
        )
    return config.global_batch // together


def _optimizer(module: nn.Module, config: FitConfig) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    assert trained, "the task has no trained parameters"
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def _learning_rates(config: FitConfig) -> Callable[[int], float]:
    """Share of the peak learning rate at step 0, 1, …: transformers' schedule as a pure function, nothing to store."""
    from transformers import get_scheduler

    names = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = math.ceil(config.warmup * config.steps)
    scheduler = get_scheduler(names[config.schedule], optimizer, warmup, config.steps)
    return scheduler.lr_lambdas[0]


def _rows(micro: int, rank: int, world: int, micro_batch: int) -> slice:
    """Rows of the global batch that one process works on in one micro-step."""
    first = (micro * world + rank) * micro_batch
    return slice(first, first + micro_batch)


def _tensors(batch: Batch, rows: slice, device: torch.device) -> tuple[Tensor, ...]:
    parts = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    return tuple(part[rows].to(device, non_blocking=True) for part in parts)

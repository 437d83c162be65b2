"""Training loop for any task and any number of processes, which resumes from checkpoints.

Letters: B batch (blocks), T tokens.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.storage.messages import first_line
from ...data.blocks.packing import PADDING, Batch
from ..config import FitConfig, micro_steps
from ..parallel.accelerate import Stepper, configure, gather_weights, make_accelerator
from ..parallel.processes import Interrupted, StopSignals, TrainingError, from_main, is_out_of_memory
from ..parallel.sharding import unshard
from .checkpoints import Position, StateFolder, data_fingerprint
from .optimizer import learning_rates, make_optimizer
from .progress import Report, peak_memory
from .task import FitResult, Task

if TYPE_CHECKING:
    from ...data.blocks.prepared import PreparedData

__all__ = ["FitConfig", "FitResult", "Interrupted", "Task", "TrainingError", "fit"]

_MAX_SKIPPED_STEPS = 50
_SHOWN_BLOCKS = 16
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def fit(
    task: Task, data: PreparedData, config: FitConfig, state_dir: str | Path, accelerator: Any | None = None
) -> FitResult:
    """Train `task.module` in place for `config.steps` steps, resuming from the newest checkpoint in `state_dir`.

    The data and random numbers of a step depend only on the seed and the step, so a resumed run repeats the losses.

    Raises:
        ValueError: The global batch cannot be split, or the state folder belongs to a run with other settings.
        TrainingError: A loss or gradient is not finite or too large, or the memory is full.
        Interrupted: A process received SIGINT or SIGTERM. The state was saved.
        OSError: A checkpoint could not be written. Older ones are unchanged.
    """
    accelerator = accelerator or make_accelerator(config.precision)
    run = _Run(task, data, config, Path(state_dir), accelerator)
    try:
        position = run.prepare()
        with StopSignals() as stop:
            report = Report(run.title, config.steps, position.step, run.is_main)
            report.line(run.opening_line(position))
            result = run.train(position, stop, report)
        unshard(accelerator, run.module)
        return result
    finally:
        run.release()


class _Run:
    def __init__(self, task: Task, data: PreparedData, config: FitConfig, folder: Path, accelerator: Any) -> None:
        self.task, self.data, self.config, self.accelerator = task, data, config, accelerator
        self.title = task.title or task.name
        self.is_main: bool = accelerator.is_main_process
        self.world: int = accelerator.num_processes
        self.micro_steps = micro_steps(config.global_batch, config.micro_batch, self.world)
        configure(accelerator, config, self.micro_steps)
        self.state = StateFolder(folder, accelerator, config.keep_checkpoints)
        self.rates = learning_rates(config)
        self.best: tuple[float, int] | None = None
        self.module: Any = task.module
        self.resumed_from: int | None = None
        self.skipped = 0
        self.blocks: list[int] = []
        self.stop_signal: signal.Signals | None = None
        if config.gradient_checkpointing:
            if not hasattr(task.module, "gradient_checkpointing_enable"):
                raise ValueError(f"gradient_checkpointing is set, but the task {task.name!r} does not support it")
            task.module.gradient_checkpointing_enable()  # type: ignore[operator]

    def prepare(self) -> Position:
        """Prepare module and optimizer with the accelerator, and load the newest checkpoint."""
        module, config = self.task.module, self.config
        settings = config.resume_settings()
        settings |= {f"{self.task.name}.{key}": value for key, value in self.task.settings.items()}
        self.trained = sum(p.numel() for p in module.parameters() if p.requires_grad)  # counted before sharding
        settings["parameters"] = self.trained
        settings["data"] = data_fingerprint(self.data)
        position = self.state.open(settings)
        if self.accelerator.log_with:
            flat = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
            self.accelerator.init_trackers("draftsmith", config=flat)
        self.task.move_to(self.accelerator.device)
        module.to(self.accelerator.device)
        optimizer = make_optimizer(module, config)
        self.state.attach(module, optimizer)
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.stepper = Stepper(self.accelerator, self.module, self.optimizer, config.clip_norm)
        if position is None:
            return Position()
        self.state.load(position)
        self.resumed_from = position.step
        for step, metrics in sorted(self.state.evaluations.items()):
            self._is_best(step, metrics)
        return position

    def release(self) -> None:
        """Release the resources of the accelerator and unwrap the module."""
        for tracker in self.accelerator.trackers:
            tracker.finish()  # accelerate's `end_training` would also end the process group
        self.accelerator.unwrap_model(self.module, keep_fp32_wrapper=False)
        self.accelerator.free_memory()

    def opening_line(self, position: Position) -> str:
        """Return the first log line, with the processes, device, precision and number of steps."""
        config, accelerator = self.config, self.accelerator
        resumed = "" if self.resumed_from is None else f"; resumed after step {position.step}"
        tokens = config.global_batch * self.data.block_tokens
        return (
            f"{self.title}: {self.world} process{'es' if self.world > 1 else ''} "
            f"({accelerator.distributed_type.value}) on {accelerator.device.type}, precision {config.precision}, "
            f"{self.trained:,} trained parameters, {config.steps} steps of {tokens:,} tokens at most{resumed}"
        )

    def train(self, position: Position, stop: StopSignals, report: Report) -> FitResult:
        """Run all remaining steps, with their evaluations, checkpoints and log lines."""
        config = self.config
        while True:
            step = position.step
            # The checkpoint comes first, so that a failing evaluation does not lose the training progress.
            last = step == config.steps
            if step and self.resumed_from != step and (last or _is_due(step, config.save_every)):
                self._save(position)
            if last or _is_due(step, config.evaluate_every):
                self._evaluate(position, report)
            if last:
                return self._result(position, report)
            started = time.perf_counter()
            with self._explain_memory(f"step {step + 1}"):
                line = self._step(step, stop, report)
            seconds = time.perf_counter() - started
            tokens = position.tokens + line.pop("step_tokens")
            line |= {
                "tokens": tokens,
                "tokens_per_second": (tokens - position.tokens) / seconds,
                "peak_memory_bytes": peak_memory(self.accelerator.device),
            }
            position = Position(step + 1, position.seconds + seconds, tokens)
            report.step(step + 1, line["loss"], line["tokens_per_second"], seconds)
            if (step + 1) % config.log_every == 0 or step + 1 == config.steps or "skipped" in line:
                self._log(line)
            if self.stop_signal is not None:
                self._stop(position, self.stop_signal, report)

    @contextmanager
    def _explain_memory(self, activity: str) -> Iterator[None]:
        """Convert out-of-memory errors to a TrainingError that names the activity and blocks and suggests a fix."""
        self.blocks = []
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = self.config.micro_batch
            less = f"micro_batch {size // 2}" if size > 1 else "gradient_checkpointing or shorter blocks"
            blocks = f", blocks {_format_blocks(self.blocks)}" if self.blocks else ""
            raise TrainingError(
                f"out of memory in {activity}, with micro_batch {size} of {self.data.block_tokens} tokens{blocks} "
                f"({first_line(error)}). The last checkpoint in {self.state.folder} is unchanged: resume from it with "
                f"{less}"
            ) from error

    def _log(self, line: dict[str, Any]) -> None:
        finite = {key: value for key, value in line.items() if not isinstance(value, float) or math.isfinite(value)}
        self.state.log(finite)  # JSON has no infinity and no NaN
        numbers = {key: value for key, value in finite.items() if key not in ("step", "skipped")}
        self.accelerator.log(numbers, step=line["step"])

    def _save(self, position: Position) -> None:
        self.state.save(position, pinned=None if self.best is None else self.best[1])

    def _step(self, step: int, stop: StopSignals, report: Report) -> dict[str, Any]:
        """Run one optimizer step over one global batch and return its log line."""
        config = self.config
        batch, counts, tokens = self._read_batch(step)
        rate = config.learning_rate * self.rates(step)
        for group in self.optimizer.param_groups:
            name = group["rate_group"]
            group["lr"] = rate * self.task.module.rate(name) if name else rate  # type: ignore[operator]
        rank = self.accelerator.process_index
        torch.manual_seed(int(np.random.SeedSequence([config.seed, step, rank]).generate_state(1, np.uint64)[0]) >> 1)
        self.module.train()
        losses, norm = self._run_micro_batches(batch, counts)
        loss = self._sum_over_processes(sum(losses, torch.zeros((), device=losses[0].device)), stop)
        line: dict[str, Any] = {"step": step + 1, "loss": loss, "learning_rate": rate, "grad_norm": norm}
        line["step_tokens"] = tokens
        if (fault := self._fault(step, loss, norm, losses)) is not None:
            report.line(f"{self.title}: {fault}; the step is skipped, the weights are unchanged")
            line |= {"loss": math.nan, "skipped": fault}
            self.stepper.discard()
        else:
            self.stepper.apply()
        return line

    def _read_batch(self, step: int) -> tuple[Batch, Tensor, int]:
        """Load this process's rows of the global batch of a step.

        Returns:
            The rows in the order of the micro steps, the numbers of supervised positions in the global batch
            (`Task.count`, at least 1), and the number of tokens in the global batch without padding.
        """
        config, rank = self.config, self.accelerator.process_index
        indices, global_rows = self.data.step_batch(step, config.global_batch, config.seed)
        self.blocks = indices.tolist()
        self.task.begin(step, config.steps)
        rows = np.concatenate([_rows(micro, rank, self.world, config.micro_batch) for micro in range(self.micro_steps)])
        batch = global_rows.rows(rows)
        counted = global_rows
        if self.task.rewrites:
            with gather_weights(self.accelerator, self.module):
                counted = batch = self.task.rewrite(batch, rows, config.global_batch, (config.seed, step))
        counts = self.task.count(counted)
        numbers = torch.cat([counts.flatten(), (counted.documents_BT != PADDING).sum()[None]])
        numbers = numbers.to(self.accelerator.device)
        if self.task.rewrites:
            numbers = self.accelerator.reduce(numbers, "sum")
        return batch, numbers[:-1].clamp(min=1).reshape(counts.shape), int(numbers[-1])

    def _run_micro_batches(self, batch: Batch, counts: Tensor) -> tuple[list[Tensor], float]:
        """Run the forward and backward passes of a step. Return losses (sums / `counts`) and the gradient norm."""
        losses, norm, size = [], 0.0, self.config.micro_batch
        for micro in range(self.micro_steps):
            rows = slice(micro * size, (micro + 1) * size)
            with self.accelerator.accumulate(self.module):
                inputs = (part[rows].to(self.accelerator.device, non_blocking=True) for part in batch)
                loss_sums, _ = self.module(*inputs)
                loss = (loss_sums.float() / counts).sum()
                losses.append(loss.detach())
                # accelerate divides by the accumulation steps and DDP by the processes; undo both
                self.stepper.backward(loss * (self.micro_steps * self.world))
                if self.accelerator.sync_gradients:
                    norm = self.stepper.norm()
        return losses, norm

    def _sum_over_processes(self, loss: Tensor, stop: StopSignals) -> float:
        """Sum the loss over all processes, and share received stop signals in the same reduction."""
        if self.world == 1:
            self.stop_signal = None if stop.received is None else signal.Signals(stop.received)
            return float(loss)
        received = [float(stop.received == number) for number in _STOP_SIGNALS]
        numbers = torch.cat([loss.double()[None], torch.tensor(received, dtype=torch.double, device=loss.device)])
        total, *counts = self.accelerator.reduce(numbers, "sum").tolist()
        self.stop_signal = next((number for number, count in zip(_STOP_SIGNALS, counts, strict=True) if count), None)
        return float(total)

    def _fault(self, step: int, loss: float, norm: float, losses: list[Tensor]) -> str | None:
        """Return the reason to skip a step, or None if the step is valid. Raises TrainingError if the run must stop."""
        limit = self.config.max_norm or math.inf
        if math.isfinite(loss) and math.isfinite(norm) and norm <= limit:
            self.skipped = 0
            return None
        from accelerate.utils import gather_object

        self.skipped += 1
        problem = f"the gradient's norm is {norm}" + (f", above max_norm {limit}" if math.isfinite(norm) else "")
        if not math.isfinite(loss):
            problem = f"the loss is {loss}" + " (fp16 ends at 65,504: use precision bf16)" * self.stepper.scales_loss
        rank, size = self.accelerator.process_index, self.config.micro_batch
        bad = [micro for micro, value in enumerate(losses) if not math.isfinite(float(value))]
        blocks = [self.blocks[row] for micro in bad for row in _rows(micro, rank, self.world, size)]
        blocks = gather_object(blocks) or self.blocks
        fault = f"{problem} at step {step + 1}, blocks {_format_blocks(blocks)}"
        # With float16, gradients overflow occasionally until the scaler lowers its scale.
        lenient = self.config.on_bad_step == "skip" or (math.isfinite(loss) and self.stepper.scales_loss)
        if lenient and self.skipped <= _MAX_SKIPPED_STEPS:
            return fault
        raise TrainingError(
            f"{fault}{f' after {self.skipped} bad steps' if lenient else ''}; stopped before the weights were changed. "
            "Lower learning_rate or clip_norm, set on_bad_step: skip, or inspect these blocks"
        )

    def _evaluate(self, position: Position, report: Report) -> None:
        """Evaluate in the main process, unless the log already has this evaluation."""
        step = position.step
        if step in self.state.evaluations:
            return

        def measure() -> dict[str, float]:
            self.module.eval()
            named = self._explain_memory(f"the evaluation after step {step}")
            with torch.no_grad(), self.accelerator.autocast(), named:
                return self.task.evaluate(self.accelerator.unwrap_model(self.module))

        self.accelerator.wait_for_everyone()
        with gather_weights(self.accelerator, self.module):
            metrics = from_main(self.accelerator, measure)
        self.state.log_evaluation(step, metrics, position.tokens)
        self.accelerator.log(metrics, step=step)
        report.evaluation(step, metrics)
        if self._is_best(step, metrics) and not self.state.has(step):
            self._save(position)

    def _is_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Check if these metrics are at least as good as all earlier metrics, and record them if so."""
        value = metrics.get(self.config.keep_best or "", math.nan)
        if not math.isfinite(value) or (self.best is not None and value < self.best[0]):
            return False
        self.best = (value, step)
        return True

    def _stop(self, position: Position, number: signal.Signals, report: Report) -> None:
        self._save(position)
        status = f"stopped by {number.name} after step {position.step} of {self.config.steps}"
        message = f"{status}; saved in {self.state.folder}, rerun the command to resume"
        report.line(f"{self.title}: {message}")
        raise Interrupted(number, message)

    def _keep_best(self, position: Position, report: Report) -> int:
        """Load the best weights if they are not the last weights, and return the step of the kept weights."""
        if self.best is None or self.best[1] == position.step:
            return position.step
        if self.best[1] == 0:
            report.line(
                f"{self.title}: warning: training did not improve {self.config.keep_best} over the initial weights, "
                "which the artifact will contain: train longer, or check the data and the learning rate"
            )
        value, step = self.best
        last = self.state.evaluations[position.step][str(self.config.keep_best)]
        values = f"{self.config.keep_best} {value:.4g} after step {step}, {last:.4g} after the last step"
        if not self.state.has(step):
            report.line(f"{self.title}: {values}, but step {step} has no checkpoint: the last weights are kept")
            return position.step
        self.state.load_weights(step)
        report.line(f"{self.title}: {values}: the weights of step {step} are kept")
        return step

    def _result(self, position: Position, report: Report) -> FitResult:
        step = self._keep_best(position, report)
        self.accelerator.wait_for_everyone()  # the main process writes the log
        losses = self.state.losses()
        tail = losses[-max(1, len(losses) // 10) :]
        return FitResult(
            steps=position.step,
            first_loss=losses[0] if losses else math.nan,
            last_loss=sum(tail) / len(tail) if tail else math.nan,
            metrics=self.state.evaluations.get(step, {}),
            first_metrics=self.state.evaluations.get(0, {}),
            kept_step=step,
            tokens=position.tokens,
            seconds=position.seconds,
            history=self.state.history,
            processes=self.world,
            distributed_type=self.accelerator.distributed_type.value,
            resumed_from=self.resumed_from,
        )


def _format_blocks(blocks: list[int]) -> str:
    """Format block numbers, shortening long lists."""
    more = f" and {len(blocks) - _SHOWN_BLOCKS} more" if len(blocks) > _SHOWN_BLOCKS else ""
    return f"{blocks[:_SHOWN_BLOCKS]}{more}"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _rows(micro: int, rank: int, world: int, micro_batch: int) -> np.ndarray:
    """Return the rows of the global batch that one process handles in one micro step."""
    first = (micro * world + rank) * micro_batch
    return np.arange(first, first + micro_batch)

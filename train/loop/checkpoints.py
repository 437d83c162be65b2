"""The state folder of a training run: `fit.json`, `log.jsonl` and `checkpoints/step-000100/`.

A checkpoint holds `model.safetensors` and `optimizer.bin` under the names and numbers of the bare, unsharded module, so
that any number of processes under any kind of parallelism can go on from it. It is written beside its place, synced and
renamed, so that a folder of that name is whole; its `checkpoint.json` lists every file with size and SHA-256, so that
later damage is found too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoints.storage.atomic import atomic_text, sync
from ...checkpoints.storage.safe_read import stamp
from ..parallel.accelerate import zero_stage
from ..parallel.processes import on_main, raised, together
from ..parallel.sharding import load_whole_optimizer, load_whole_weights, whole_optimizer, whole_state

_WEIGHTS, _OPTIMIZER, _SCALER = "model.safetensors", "optimizer.bin", "scaler.pt"  # accelerate's names
_SUMMARY = "checkpoint.json"
_FORMAT = 1


@dataclass(frozen=True)
class Position:
    """How far a run is: steps taken, seconds spent on them in all its processes' lives, tokens seen, and the place in
    the data where the steps do not say it."""

    step: int = 0
    seconds: float = 0.0
    processes: int = 0
    tokens: int = 0
    data: dict[str, int] = field(default_factory=dict)


class StateFolder:
    """Reads and writes a state folder together with the other processes of `accelerator`."""

    def __init__(self, folder: Path, accelerator: Any, keep: int) -> None:
        self.folder = folder
        self.history = folder / "log.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._accelerator = accelerator
        self._keep = keep
        self._module: nn.Module | None = None
        self._groups: list[dict[str, Any]] = []
        self.evaluations: dict[int, dict[str, float]] = {}
        """What was measured, by step."""
        self.tokens_at: dict[int, int] = {}
        """Tokens seen until then."""

    def open(self, settings: Mapping[str, Any]) -> Position | None:
        """Find the newest whole checkpoint (None: start from nothing) and make log and `fit.json` agree with it.

        Raises:
            ValueError: there is a checkpoint, and it was trained with other settings.
        """
        found: list[Position | None] = [None]

        def open_folder() -> None:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in self._checkpoints.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            found[0] = self._newest()
            if found[0] is not None:
                self._check(settings)
            atomic_text(self.folder / "fit.json", json.dumps(settings, indent=2) + "\n")
            self._cut_log(found[0].step if found[0] is not None else -1)

        on_main(self._accelerator, open_folder)
        position: Position | None = self._broadcast(found)[0]
        self._read_evaluations()
        return position

    def attach(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Say what is saved and loaded; to be called before the accelerator prepares (and shards) it."""
        self._module = module
        self._groups = [dict(group) | {"params": list(group["params"])} for group in optimizer.param_groups]

    def load(self, position: Position) -> None:
        """Load the checkpoint of `position` into what the accelerator has prepared, whatever kind of parallelism and
        however many processes wrote it.

        Raises:
            ValueError: a float16 run without a loss scale, which DeepSpeed does not leave, is to go on without it.
        """
        folder = self._place(position.step)
        if zero_stage(self._accelerator):
            self.load_weights(position.step)
            saved = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
            load_whole_optimizer(self._accelerator, self._groups, saved)
            return
        if self._accelerator.scaler is not None and not (folder / _SCALER).exists():
            kind = self._accelerator.distributed_type.value
            raise ValueError(
                f"{folder} was saved under DeepSpeed in fp16, without a loss scale; going on under {kind} needs one: "
                "go on under DeepSpeed, or start again with precision bf16"
            )

        def bare(models: list[nn.Module], _: str) -> None:  # weights are stored under the names of the bare module
            models[:] = [self._accelerator.unwrap_model(model) for model in models]

        hook = self._accelerator.register_load_state_pre_hook(bare)
        try:
            self._accelerator.load_state(str(folder))
        finally:
            hook.remove()

    def load_weights(self, step: int) -> None:
        """Load the weights of a checkpoint alone; the optimizer's state stays as it is."""
        assert self._module is not None, "nothing was attached"
        file = self._place(step) / _WEIGHTS
        if zero_stage(self._accelerator):
            load_whole_weights(self._accelerator, self._module, file)
        else:
            from safetensors.torch import load_model

            load_model(self._module, file)

    def has(self, step: int) -> bool:
        """Whether there is a whole checkpoint of that step."""
        return bool(self._broadcast([self._accelerator.is_main_process and _problem_of(self._place(step)) is None])[0])

    def save(self, position: Position, pinned: int | None = None) -> Path:
        """Write a checkpoint, then delete the oldest until `keep` are left besides that of step `pinned`. Returns its
        folder.

        Raises:
            OSError: it could not be written (a full disk); nothing of it is left, older ones are untouched.
        """
        target = self._place(position.step)
        temporary = target.with_name("." + target.name)
        gathered = self._gather()
        error: OSError | None = None
        if self._accelerator.is_main_process:
            error = _failure(lambda: temporary.mkdir(parents=True))
        self._accelerator.wait_for_everyone()
        if error is None:
            error = _failure(lambda: self._write(temporary, gathered))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process and error is None:
            error = _failure(lambda: self._finish(temporary, target, position))
        self._agree(error, temporary, target, pinned)
        return target

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line to `log.jsonl` (main process only)."""
        if self._accelerator.is_main_process:
            with self.history.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def log_evaluation(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Append what was measured after `step` steps and so many tokens."""
        self.evaluations[step], self.tokens_at[step] = dict(metrics), tokens
        self.log({"step": step, "tokens": tokens, "evaluation": dict(metrics)})

    def losses(self) -> list[float]:
        """The logged losses in the order of the steps."""
        return [line["loss"] for line in _read_lines(self.history) if "loss" in line]

    def _place(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:06d}"

    def _newest(self) -> Position | None:
        folders = {int(path.name[5:]): path for path in self._checkpoints.glob("step-*") if path.name[5:].isdigit()}
        for step in sorted(folders, reverse=True):
            problem = _problem_of(folders[step])
            if problem is None:
                summary = json.loads((folders[step] / _SUMMARY).read_text(encoding="utf-8"))
                names = (item.name for item in fields(Position))
                return Position(**{name: summary[name] for name in names if name in summary})
            warnings.warn(f"checkpoint {folders[step]} is skipped: {problem}", stacklevel=2)
        return None

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError where the run in the folder has other settings."""
        path = self.folder / "fit.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}) although there are checkpoints; delete the folder {self.folder}"
            ) from error
        now = json.loads(json.dumps(settings))
        changed = [
            "the data is other data"
            if key == "data"
            else f"{key}: {_shown(before.get(key))} before, {_shown(now.get(key))} now"
            for key in {**now, **before}
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.folder} holds a run with other settings ({'; '.join(changed)}); choose another output folder, "
                f"or delete this one to start again"
            )

    def _cut_log(self, step: int) -> None:
        lines = [line for line in _read_lines(self.history) if line["step"] <= step]
        atomic_text(self.history, "".join(json.dumps(line) + "\n" for line in lines))

    def _read_evaluations(self) -> None:
        for line in _read_lines(self.history):
            if "evaluation" in line:
                self.evaluations[line["step"]], self.tokens_at[line["step"]] = line["evaluation"], line["tokens"]

    def _gather(self) -> tuple[Any, Any] | None:
        """What DeepSpeed has sharded, whole in the main process's memory: weights and optimizer state."""
        if not zero_stage(self._accelerator):
            return None
        assert self._module is not None, "nothing was attached"
        weights = whole_state(self._accelerator, self._module, masters=True)
        return weights, whole_optimizer(self._accelerator, self._groups)

    def _write(self, temporary: Path, gathered: tuple[Any, Any] | None) -> None:
        if gathered is None:
            self._write_unsharded(temporary)
        elif self._accelerator.is_main_process:
            from safetensors.torch import save_file

            with _disk_errors_named(temporary):
                save_file(_bare_state(gathered[0]), temporary / _WEIGHTS, metadata={"format": "pt"})
                torch.save(gathered[1], temporary / _OPTIMIZER)

    def _write_unsharded(self, temporary: Path) -> None:
        def bare(_: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            for index, state in enumerate(weights):
                weights[index] = _bare_state(state)

        hook = self._accelerator.register_save_state_pre_hook(bare)
        try:
            with _disk_errors_named(temporary):
                self._accelerator.save_state(str(temporary))
        finally:
            hook.remove()

    def _finish(self, temporary: Path, target: Path, position: Position) -> None:
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        summary = {
            "format": _FORMAT,
            "step": position.step,
            "seconds": position.seconds,
            "processes": self._accelerator.num_processes,
            "tokens": position.tokens,
            "parallelism": self._parallelism(),
            "data": position.data,
            "files": {path.relative_to(temporary).as_posix(): stamp(path) for path in files},
        }
        (temporary / _SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        folders = [path for path in temporary.rglob("*") if path.is_dir()]
        for path in [*files, temporary / _SUMMARY, *folders, temporary]:
            sync(path)
        if target.exists():  # a damaged one that was skipped
            shutil.rmtree(target)
        temporary.rename(target)
        sync(self._checkpoints)

    def _parallelism(self) -> str:
        stage = zero_stage(self._accelerator)
        return f"ZeRO-{stage}" if stage else str(self._accelerator.distributed_type.value)

    def _agree(self, error: OSError | None, temporary: Path, target: Path, pinned: int | None) -> None:
        """All processes fail or none does; the old checkpoints go only when the new one stands."""
        told = None
        if error is not None:
            reason = f"{error.strerror or error}; the checkpoint was not saved"
            told = OSError(error.errno or errno.EIO, reason, str(target))
        try:
            together(self._accelerator, lambda: told and raised(told))
        except (OSError, ValueError):
            if self._accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self._accelerator.is_main_process:
            self._prune(int(target.name[5:]), pinned)
        self._accelerator.wait_for_everyone()

    def _prune(self, newest: int, pinned: int | None) -> None:
        steps = sorted(int(path.name[5:]) for path in self._checkpoints.glob("step-*") if path.name[5:].isdigit())
        kept = [step for step in steps if step <= newest][-self._keep :]  # beyond `newest` lie only damaged ones
        for step in steps:
            if step not in kept and step != pinned:
                shutil.rmtree(self._place(step), ignore_errors=True)

    def _broadcast(self, objects: list[Any]) -> list[Any]:
        if self._accelerator.num_processes == 1:
            return objects
        from accelerate.utils import broadcast_object_list

        return list(broadcast_object_list(objects))


def data_fingerprint(data: Any) -> str:
    """SHA-256 of what a manifest says about its data: the hashes of its arrays, or the whole manifest without them."""
    known = {"shape": [data.blocks, data.block_tokens], "content": data.manifest.get("sha256", data.manifest)}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _bare_state(state: Mapping[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
    """Weights without the wrapper's prefix, so that any number of processes can load them; tied ones once."""
    kept: OrderedDict[str, torch.Tensor] = OrderedDict()
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or place not in seen:
            kept[name.removeprefix("module.")] = tensor
        seen.add(place)
    return kept


def _failure(action: Callable[[], None]) -> OSError | None:
    """Do it; the OSError it ended with, if it did, so that other processes can be told before it is raised."""
    try:
        action()
    except OSError as error:
        return error
    return None


def _problem_of(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
        files = summary["files"]
    except FileNotFoundError:
        return f"incomplete, it has no {_SUMMARY}"
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        return f"{_SUMMARY} is damaged ({error})"
    for name, written in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != written["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, expected {written['bytes']}"
        if stamp(path) != written:
            return f"{name} is damaged, its SHA-256 differs"
    return None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that was cut short by a crash is left out."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


@contextmanager
def _disk_errors_named(folder: Path) -> Iterator[None]:
    """torch and safetensors wrap a failed write in errors of their own: let the system say what it was."""
    try:
        yield
    except Exception as error:
        _probe_disk(folder)
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
        raise


def _probe_disk(folder: Path) -> None:
    """Raise the OSError that writing a mebibyte into `folder` meets, if any."""
    probe = folder / "probe"
    with probe.open("wb") as out:
        out.write(bytes(1 << 20))
        out.flush()
        os.fsync(out.fileno())
    probe.unlink()


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)

"""State folder of a training run: `fit.json`, `log.jsonl` and `checkpoints/step-000100/`.

A checkpoint has `model.safetensors` and `optimizer.bin` of the bare, unsharded module, so that runs with any number
of processes and any kind of parallelism can resume from it. It is written under a temporary name, synced and renamed.
Its `checkpoint.json` lists the files with their sizes and SHA-256 hashes.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...checkpoints.storage.atomic import atomic_text, remove, sync
from ...checkpoints.storage.messages import gigabytes
from ...checkpoints.storage.safe_read import file_entry, load_json
from ..parallel.accelerate import zero_stage
from ..parallel.processes import from_main, on_main
from ..parallel.sharding import gather_optimizer, gather_state, scatter_optimizer, scatter_weights

_WEIGHTS, _OPTIMIZER, _SCALER = "model.safetensors", "optimizer.bin", "scaler.pt"  # accelerate's names
_SUMMARY = "checkpoint.json"


@dataclass(frozen=True)
class Position:
    """Progress of a run: number of steps, training time in seconds, and number of tokens."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


class StateFolder:
    """Folder with the checkpoints and the log of a run, shared by the processes of `accelerator`."""

    def __init__(self, folder: Path, accelerator: Any, keep: int) -> None:
        self.folder = folder
        self.history = folder / "log.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._run = ""  # SHA-256 of the settings, which identifies the run that wrote a checkpoint
        self._accelerator = accelerator
        self._keep = keep
        self.evaluations: dict[int, dict[str, float]] = {}
        """Evaluation metrics of each evaluated step."""

    def open(self, settings: Mapping[str, Any]) -> Position | None:
        """Open the folder, truncate the log after the newest complete checkpoint, and return its position, if any.

        Raises ValueError if the folder contains a run with different settings.
        """

        def open_folder() -> Position | None:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            for leftover in self._checkpoints.glob(".step-*"):
                remove(leftover)
            newest = self._newest(settings)
            atomic_text(self.folder / "fit.json", json.dumps(settings, indent=2) + "\n")
            last = -1 if newest is None else newest.step
            lines = [json.dumps(line) for line in _read_lines(self.history) if line["step"] <= last]
            atomic_text(self.history, "".join(f"{line}\n" for line in lines))
            return newest

        position = from_main(self._accelerator, open_folder)
        for line in _read_lines(self.history):
            if "evaluation" in line:
                self.evaluations[line["step"]] = line["evaluation"]
        return position

    def attach(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set the module and optimizer to save and load. Call this before the accelerator prepares (shards) them."""
        self._module, self._optimizer = module, optimizer
        self._groups = [dict(group) | {"params": list(group["params"])} for group in optimizer.param_groups]

    def load(self, position: Position) -> None:
        """Load the checkpoint of `position` into the attached module and optimizer."""
        folder, scaler = self._path(position.step), self._accelerator.scaler
        sharded = zero_stage(self._accelerator) > 0
        self.load_weights(position.step)
        # mapped only if copied in parts, because an optimizer on the CPU would keep using the mapped file
        saved = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True, mmap=sharded)
        if sharded:
            scatter_optimizer(self._accelerator, self._groups, saved)
        else:
            self._optimizer.load_state_dict(saved)
        if scaler is not None and (folder / _SCALER).exists():  # DeepSpeed does not write this file
            scaler.load_state_dict(torch.load(folder / _SCALER, weights_only=True))

    def load_weights(self, step: int) -> None:
        """Load only the weights of a checkpoint, not the optimizer state."""
        file = self._path(step) / _WEIGHTS
        if zero_stage(self._accelerator):
            scatter_weights(self._accelerator, self._module, file)
        else:
            load_model(self._module, file)

    def has(self, step: int) -> bool:
        """Check if there is a complete checkpoint of a step."""

        def look() -> bool:
            try:
                return bool(_position_of(self._path(step)))
            except (ValueError, OSError):
                return False

        return from_main(self._accelerator, look)

    def save(self, position: Position, pinned: int | None = None) -> None:
        """Write a checkpoint, then delete all others except the newest ones and the checkpoint of step `pinned`.

        Raises OSError on failure.
        """
        target = self._path(position.step)
        temporary = target.with_name("." + target.name)
        is_sharded = zero_stage(self._accelerator) > 0
        weights = gather_state(self._accelerator, self._module) if is_sharded else self._module.state_dict()
        optimizer = gather_optimizer(self._accelerator, self._groups) if is_sharded else self._optimizer.state_dict()

        def write() -> None:
            temporary.mkdir(parents=True)
            try:
                self._write(temporary, weights, optimizer)
                self._finish(temporary, target, position, pinned)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

        on_main(self._accelerator, write)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line to `log.jsonl` (main process only)."""
        if self._accelerator.is_main_process:
            with self.history.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def log_evaluation(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Log the metrics measured after `step` steps and `tokens` tokens."""
        self.evaluations[step] = dict(metrics)
        self.log({"step": step, "tokens": tokens, "evaluation": dict(metrics)})

    def losses(self) -> list[float]:
        """Return the logged losses in the order of the steps."""
        return [line["loss"] for line in _read_lines(self.history) if "loss" in line]

    def _path(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:06d}"

    def _newest(self, settings: Mapping[str, Any]) -> Position | None:
        """Return the newest complete checkpoint of this run. Raises ValueError if the settings have changed."""
        self._run = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        for folder in reversed(self._folders().values()):
            try:
                position, run = _position_of(folder)
            except (ValueError, OSError) as error:
                warnings.warn(f"checkpoint {folder} is skipped: {error}", stacklevel=2)
                continue
            self._check(settings)
            if run == self._run:
                return position
            warnings.warn(f"checkpoint {folder} is skipped: it belongs to a run with other settings", stacklevel=2)
        return None

    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if the run in the folder has different settings."""
        path = self.folder / "fit.json"
        before = load_json(path)
        now = json.loads(json.dumps(settings))
        differing = [key for key in {**now, **before} if before.get(key) != now.get(key)]
        if differing:
            changes = (
                "other data" if key == "data" else f"{key}: {before.get(key)} before, {now.get(key)} now"
                for key in differing
            )
            raise ValueError(
                f"{self.folder} holds a run with other settings ({'; '.join(changes)}); choose another output folder"
            )

    def _write(self, folder: Path, weights: Mapping[str, Tensor] | None, optimizer: dict[str, Any] | None) -> None:
        assert weights is not None
        tensors = [each for each in tree_leaves((weights, optimizer)) if isinstance(each, Tensor)]
        needed, free = sum(each.nbytes for each in tensors), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(f"No space left on device: {folder} needs {gigabytes(needed)}, {gigabytes(free)} are free")
        try:
            save_file(_without_ties(weights), folder / _WEIGHTS, metadata={"format": "pt"})
            torch.save(optimizer, folder / _OPTIMIZER)
            if self._accelerator.scaler is not None:
                torch.save(self._accelerator.scaler.state_dict(), folder / _SCALER)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise OSError(f"{folder} could not be written: {error}") from error

    def _finish(self, temporary: Path, target: Path, position: Position, pinned: int | None) -> None:
        files = sorted(temporary.iterdir())
        stage = zero_stage(self._accelerator)
        summary = {
            "format": 1,
            "run": self._run,
            **asdict(position),
            "processes": self._accelerator.num_processes,
            "parallelism": f"ZeRO-{stage}" if stage else str(self._accelerator.distributed_type.value),
            "files": {path.name: file_entry(path) for path in files},
        }
        atomic_text(temporary / _SUMMARY, json.dumps(summary, indent=2) + "\n")
        for path in [*files, temporary]:
            sync(path)
        remove(target)  # a damaged checkpoint that was skipped
        temporary.rename(target)
        sync(self._checkpoints)
        folders = self._folders()
        newest = [step for step in folders if step <= position.step][-self._keep :]  # later checkpoints are damaged
        for step, folder in folders.items():
            if step not in newest and step != pinned:
                remove(folder)

    def _folders(self) -> dict[int, Path]:
        """Return the checkpoint folders by step, in ascending order."""
        folders = {int(path.name[5:]): path for path in self._checkpoints.glob("step-*") if path.name[5:].isdigit()}
        return dict(sorted(folders.items()))


def data_fingerprint(data: Any) -> str:
    """Return a SHA-256 that identifies prepared data by its shape and the hashes in its manifest."""
    contents = {"shape": [data.blocks, data.block_tokens], "content": data.manifest.get("sha256", data.manifest)}
    return hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()


def _without_ties(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove tensors that share memory with an earlier tensor (tied weights)."""
    first_names: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        first_names.setdefault(key if tensor.numel() else (name,), name)
    return {name: state[name].contiguous() for name in first_names.values()}


def _position_of(folder: Path) -> tuple[Position, str]:
    """Return a checkpoint's position and the hash of its run's settings. Raises ValueError if it is damaged."""
    file = folder / _SUMMARY
    try:
        summary = load_json(file)
        files = dict(summary["files"])
        position, run = Position(**{field.name: summary[field.name] for field in fields(Position)}), str(summary["run"])
    except FileNotFoundError as error:
        raise ValueError(f"it is incomplete: {_SUMMARY} is missing") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from error
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if file_entry(folder / name) != entry:
            raise ValueError(f"{name} is damaged")
    return position, run


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Parse the lines of a log. An incomplete last line, which a crash can leave, is ignored."""
    texts = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(text) for text in texts]

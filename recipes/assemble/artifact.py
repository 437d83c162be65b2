"""Training runs of drafters and heads: prepared data, settings of the training loop, and the written artifact."""

import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.artifact.artifact import load_manifest, save_artifact, verify_artifact
from ...checkpoints.artifact.manifest import to_json_safe
from ...checkpoints.artifact.model_ref import resolve_model, target_record, tokenizer_fingerprint
from ...train.loop.fit import FitConfig, FitResult, fit
from ...train.parallel.processes import on_main
from ...train.tasks.drafter import DrafterTask
from ...train.tasks.heads import HeadsTask
from ..schema.loading import write_recipe
from ..schema.training import DrafterRecipe, HeadsRecipe, TrainingRecipe, role_of
from ..session.launch import is_first
from ..session.terminal import log
from ..session.typed import typed_command
from .data import NOT_OF_CONVERSATIONS, Prepared, prepare_data, verify_data

_NO_EFFECT_ON_TABLES = {"out", "count.memory_mb", "count.save_minutes", "data.heldout_limit"} | {
    f"data.{name}" for name in NOT_OF_CONVERSATIONS
}
"""Settings that do not change a table and may differ when a finished table is reused."""


def state_folder(out: Path) -> Path:
    """Return the directory of the training logs and checkpoints of an artifact."""
    return out.with_name(out.name + ".state")


def prepare_once(recipe: DrafterRecipe | HeadsRecipe, tokenizer: Any, accelerator: Any) -> Prepared:
    """Prepare and verify the data in the main process, then open it in every process."""
    on_main(accelerator, lambda: verify_data(prepare_data(recipe.data, tokenizer), tokenizer))
    return prepare_data(recipe.data, tokenizer, quiet=True)


_LEAST_PROMPTS = 8
"""Minimum number of prompts for selecting the best weights by mean acceptance length."""


def fit_config(recipe: DrafterRecipe | HeadsRecipe, prepared: Prepared, measured: bool) -> FitConfig:
    """Return the settings of the training loop. `measured` permits selecting the best weights by acceptance."""
    train, steps = recipe.train, recipe.train.steps
    if steps is None:
        steps = max(1, math.ceil(train.epochs * prepared.train.blocks / train.global_batch))
    best = "tokens_per_step" if measured and recipe.measure.keep == "best" else None
    if best is not None and recipe.measure.prompts < _LEAST_PROMPTS:
        best = None
        if is_first():
            log(f"{role_of(recipe)}: keeping the last weights, since measure.prompts is below {_LEAST_PROMPTS}")
    return train.fit_config(steps, best)


@dataclass(frozen=True)
class Run:
    """Training run of a recipe: the training task, and the data needed to write the artifact."""

    recipe: DrafterRecipe | HeadsRecipe
    tokenizer: Any
    prepared: Prepared
    task: DrafterTask | HeadsTask
    write: Callable[[Path], None]
    """Function that writes the model files of the artifact to a directory."""
    shapes: dict[str, Any]
    """Model dimensions for the manifest."""
    artifact_bytes: int
    """Size of the model files in bytes."""
    target: str | None
    """Directory or hub id of the target that the artifact is used with."""
    target_sha256: str | None
    """SHA-256 of the target's files at loading time."""
    measured: bool
    """Whether evaluations decode prompts, so that the best weights can be selected by mean acceptance length."""

    @property
    def out(self) -> Path:
        return Path(self.recipe.out)

    def fit(self, accelerator: Any) -> FitResult:
        """Write the resolved recipe next to the checkpoints, and train."""
        state = state_folder(self.out)
        on_main(accelerator, partial(write_recipe, self.recipe, state / "recipe.yaml"))
        config = fit_config(self.recipe, self.prepared, self.measured)
        return fit(self.task, self.prepared.train, config, state, accelerator)

    def save(self, result: FitResult) -> None:
        """Write the artifact (model files, resolved recipe, `artifact.json`), and delete the checkpoints."""

        def write(folder: Path) -> None:
            self.write(folder)
            write_recipe(self.recipe, folder / "recipe.yaml")

        save_artifact(
            self.out,
            kind=self.recipe.kind,
            write=write,
            vocab_size=self.shapes.get("vocab_size", len(self.tokenizer)),
            tokenizer_fingerprint=tokenizer_fingerprint(self.tokenizer),
            target=None if self.target is None else target_record(self.target, self.target_sha256),
            shapes=self.shapes,
            recipe=self.recipe.model_dump(mode="json"),
            data=self.prepared.summary(),
            training=asdict(result) | {"history": result.history.name},
            evaluation=result.metrics,
            command=typed_command(),
        )
        shutil.rmtree(state_folder(self.out) / "checkpoints", ignore_errors=True)
        log(f"{role_of(self.recipe)}: wrote {self.out}")
        known = result.first_metrics.keys() & result.metrics.keys()
        for name in sorted(known & {"tokens_per_step", "general_tokens_per_step"}, key=len):
            before, after = result.first_metrics[name], result.metrics[name]
            log(f"{role_of(self.recipe)}: {name} {before:.2f} before training, {after:.2f} after it")


def check_out(out: Path, recipe: TrainingRecipe) -> None:
    """Check that an output directory is empty or contains an intact artifact of this recipe.

    Raises ValueError if it contains other files, a damaged artifact, or an artifact of another recipe or target.
    """
    if not out.exists():
        return
    if not (out / "artifact.json").is_file():
        if any(out.iterdir()):
            raise ValueError(f"{out} contains files that are not an artifact: choose another `out`")
        return
    recorded = load_manifest(out).recipe
    current = to_json_safe(recipe.model_dump(mode="json"))  # manifests contain no secrets
    ignored = _NO_EFFECT_ON_TABLES if recipe.kind == "table" else set()
    for key, difference in differences(to_json_safe(recorded), current):
        if key not in ignored:
            raise ValueError(f"{out} is the artifact of another recipe ({key}: {difference}): choose another `out`")
    made_for = verify_artifact(out).target or {}
    folder, expected = Path(str(made_for.get("id"))), made_for.get("sha256")
    if expected and folder.is_dir() and resolve_model(str(folder)).sha256 != expected:
        raise ValueError(f"{folder} has changed since {out} was trained: delete {out}, or choose another `out`")


def differences(stored: Any, current: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Compare nested dictionaries; yield the dotted key of each difference and a description of both values."""
    if isinstance(stored, dict) and isinstance(current, dict):
        for name in sorted(stored.keys() | current.keys()):
            yield from differences(stored.get(name), current.get(name), f"{key}.{name}" if key else name)
    elif stored != current:
        yield key, f"{stored!r}, expected {current!r}"


def check_target(target: PreTrainedModel, model: PreTrainedModel, name: str, source: str | None) -> None:
    """Raise ValueError if the vocabulary size or the kind (decoder, encoder-decoder) of drafter and target differ."""
    expected, size = (one.get_output_embeddings().weight.shape[0] for one in (target, model))
    if expected != size:
        remedy = f"set `vocab_size: {expected}` in `model.config`"
        if source is not None:
            remedy = f"repair it with `{shlex.join(['draftsmith', 'doctor', name, source, '--fix', 'OUT'])}`"
        raise ValueError(f"the drafter has {size} tokens, but the target {name} has {expected}: {remedy}")
    kinds = [("a decoder", "an encoder-decoder")[one.config.is_encoder_decoder] for one in (model, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the drafter is {kinds[0]}, but the target {name} is {kinds[1]}: use models of the same kind")

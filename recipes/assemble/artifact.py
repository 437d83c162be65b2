"""What all training recipes share: data prepared once, one run of `fit`, one artifact, nothing written over."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.artifact.artifact import (
    load_manifest,
    model_fingerprint,
    save_artifact,
    to_json_safe,
    tokenizer_fingerprint,
    verify_artifact,
)
from ...checkpoints.artifact.locate import at_revision, commit_of, target_record
from ...checkpoints.storage.places import split_revision
from ...data.blocks.prepared import PreparedData
from ...train.loop.fit import FitConfig, FitResult, Task, fit
from ...train.parallel.interrupts import TrainingError
from ...train.parallel.processes import StoppedError, on_main, together
from ..schema.data import Section
from ..schema.loading import write_recipe
from ..schema.training import TrainSection
from ..session.terminal import log
from ..session.typed import typed_command
from .data import NOT_OF_CONVERSATIONS, Prepared, prepare_data

_NOT_FOR_THE_LOOP = {"epochs", "steps", "trackers", "compile", "liger"}
_NO_EFFECT = {
    "table": frozenset(
        ["out", "count.memory_mb", "count.save_minutes", "saturation", "data.heldout_limit"]
        + [f"data.{name}" for name in NOT_OF_CONVERSATIONS]
    )
}
"""By kinds: settings that change nothing of what is made, so that a finished one serves whatever they are."""
_SHOWN_DOCUMENTS = 3
_SHOWN_TOKENS = 24


def state_folder(out: Path) -> Path:
    """Where logs and checkpoints of an artifact's training lie."""
    return out.with_name(out.name + ".state")


def prepare_once(recipe: Any, tokenizer: Any, accelerator: Any) -> Prepared:
    """The main process prepares, the others then find it done."""
    seed = recipe.train.seed if hasattr(recipe, "train") else 0
    on_main(accelerator, partial(prepare_data, recipe.data, tokenizer, seed=seed))
    return together(accelerator, partial(prepare_data, recipe.data, tokenizer, seed=seed, quiet=True))


def steps_of(recipe: Any, prepared: Prepared) -> int:
    """Optimizer steps of a recipe.

    Raises:
        ValueError: streamed data, and the recipe does not say how many.
    """
    train: TrainSection = recipe.train
    if train.steps is None and recipe.data.streaming:
        raise ValueError("`train.steps` is needed with `data.streaming`: nobody knows how long an epoch is")
    return train.steps or max(1, math.ceil(train.epochs * prepared.train.blocks / train.global_batch))


def fit_config(recipe: Any, prepared: Prepared, measured: bool) -> FitConfig:
    """The loop's settings; `measured`: its evaluations decode, so that the best weights can be told."""
    train: TrainSection = recipe.train
    settings = train.model_dump(exclude=_NOT_FOR_THE_LOOP) | {"betas": (train.betas[0], train.betas[1])}
    best = "tokens_per_step" if measured and recipe.measure.keep == "best" else None
    return FitConfig(steps=steps_of(recipe, prepared), keep_best=best, **settings)


def fit_recipe(
    task: Task, prepared: Prepared, recipe: Any, out: Path, accelerator: Any, tokenizer: Any, measured: bool
) -> FitResult:
    """Train; the resolved recipe lies beside the checkpoints from the beginning.

    Raises:
        TrainingError: what `fit` raises, with the beginnings of the documents it happened in.
    """
    on_main(accelerator, partial(write_recipe, recipe, state_folder(out) / "recipe.yaml"))
    try:
        config = together(accelerator, partial(fit_config, recipe, prepared, measured))
        return fit(task, prepared.train, config, state_folder(out), accelerator)
    except StoppedError:
        raise
    except TrainingError as error:
        shown = _beginnings(prepared.train, error.blocks, tokenizer)
        raise TrainingError(f"{error}{shown}", error.blocks) from error


def save(
    recipe: Any,
    out: Path,
    write: Callable[[Path], None],
    tokenizer: Any,
    prepared: Prepared,
    result: FitResult | None,
    target: str | None,
    shapes: dict[str, Any],
    made_for: str | None = None,
) -> None:
    """Write the artifact: what `write` puts into its folder, the resolved recipe, and `artifact.json`; `target` is the
    fingerprint of the model that it is for, `made_for` where that lies if it is not the recipe's target."""

    def write_all(folder: Path) -> None:
        write(folder)
        write_recipe(recipe, folder / "recipe.yaml")

    named = made_for or getattr(recipe, "target", None)
    identity = None if named is None else target_record(named, target)
    save_artifact(
        out,
        kind=recipe.kind,
        write=write_all,
        vocab_size=shapes.get("vocab_size", len(tokenizer)),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        target=identity,
        shapes=shapes,
        recipe=recipe.model_dump(mode="json"),
        data=prepared.summary(),
        training={} if result is None else asdict(result) | {"history": result.history.name},
        evaluation=None if result is None else result.metrics,
        command=typed_command(),
    )
    shutil.rmtree(state_folder(out) / "checkpoints", ignore_errors=True)
    log(f"{recipe.kind}: wrote {out}")


def check_out(out: Path, recipe: Section) -> None:
    """Refuse to write over what another recipe made; check the hashes of what this one made. Settings that change
    nothing of a table make no other recipe."""
    if not out.exists():
        return
    if not (out / "artifact.json").is_file():
        if any(out.iterdir()):
            raise ValueError(f"{out} holds other files and no artifact: choose another `out`")
        return
    theirs, mine = load_manifest(out).recipe, to_json_safe(recipe.model_dump(mode="json"))  # secrets stand in neither
    ignored = _NO_EFFECT.get(mine["kind"], frozenset())
    theirs, mine = _without(theirs, ignored), _without(mine, ignored)
    if theirs != mine:
        raise ValueError(
            f"{out} holds the artifact of another recipe ({_difference(theirs, mine)}): "
            "choose another `out`, or delete that folder"
        )
    made_for = verify_artifact(out).target or {}
    folder, fingerprint = Path(str(made_for.get("id"))), made_for.get("fingerprint")
    if fingerprint and folder.is_dir() and model_fingerprint(folder) != fingerprint:
        raise ValueError(f"{out} was made for another model than the one that stands at {folder} now: delete {out}")
    _check_branch(out, getattr(recipe, "target", None), made_for)


def _check_branch(out: Path, target: str | None, made_for: dict[str, Any]) -> None:
    """Refuse what was made for a commit from which the branch (or tag) of the recipe's target has moved on. Where the
    hub cannot be asked, that is told."""
    name, revision = (None, None) if target is None else split_revision(target)
    recorded = made_for.get("revision")
    if target is None or revision is None or recorded is None or name != made_for.get("id"):
        return
    try:
        now = commit_of(target)
    except ValueError as error:
        log(f"{out} was made for {name} at {recorded}; whether {revision} has moved on was not compared: {error}")
        return
    if now != recorded:
        raise ValueError(
            f"{out} was made for {name} at {recorded}, and its {revision} is at {now} now: choose another `out`, or "
            "delete that folder"
        )


def _without(values: Any, ignored: frozenset[str], place: str = "") -> Any:
    """A recipe without the settings of these keys."""
    if not isinstance(values, dict):
        return values
    left = ((key, value) for key, value in values.items() if f"{place}{key}" not in ignored)
    return {key: _without(value, ignored, f"{place}{key}.") for key, value in left}


def fingerprint_of(source: str, model: PreTrainedModel) -> str:
    """Which model a folder or hub id is, by its files where they are here: it may have been loaded in another type."""
    folder = Path(at_revision(source))
    whole = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    return model_fingerprint(folder if whole else model)


def check_target(target: PreTrainedModel, model: PreTrainedModel, name: str) -> None:
    """Raises ValueError naming both sides where a drafter's vocabulary or kind of model is not its target's."""
    theirs, mine = (side.get_output_embeddings().weight.shape[0] for side in (target, model))
    if theirs != mine:
        raise ValueError(f"the drafter has a vocabulary of {mine} tokens, the target {name} of {theirs}")
    kinds = [("a decoder", "an encoder-decoder")[side.config.is_encoder_decoder] for side in (model, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the drafter is {kinds[0]}, the target {name} {kinds[1]}: they must be of one kind")


def _beginnings(data: Any, blocks: list[int], tokenizer: Any) -> str:
    """The first words of the first documents of some blocks."""
    if not isinstance(data, PreparedData) or not blocks:
        return ""
    texts: list[str] = []
    for block in blocks:
        batch = data.batch([block])
        numbers = batch.documents_BT[0]
        for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
            if len(texts) < _SHOWN_DOCUMENTS:
                ids = batch.tokens_BT[0, numbers == number][:_SHOWN_TOKENS]
                texts.append(f"{' '.join(tokenizer.decode(ids).split())!r} …")
    return f". Its documents begin: {'; '.join(texts)}"


def _difference(theirs: Any, mine: Any, place: str = "") -> str:
    """The first key in which two recipes differ, with both values."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in sorted(set(theirs) | set(mine)):
            if theirs.get(key) != mine.get(key):
                return _difference(theirs.get(key), mine.get(key), f"{place}.{key}" if place else key)
    return f"{place}: {theirs!r} there, {mine!r} here"

"""The kinds of training recipes: from a checked recipe to an artifact on disk."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..checkpoints.artifact import (
    load_manifest,
    model_fingerprint,
    save_artifact,
    tokenizer_fingerprint,
    verify_artifact,
)
from ..checkpoints.heads import PredictionHeads, save_heads
from ..data.tokenizers import load_tokenizer
from ..decode.engine import Limits
from ..decode.loading import load_model, wrap_model
from ..decode.measure import decode
from ..decode.methods import Parts, build_method, nearest
from ..decode.metrics import total
from ..decode.models import LanguageModel
from ..decode.warpers import Sampling
from ..train.drafter import DrafterTask
from ..train.heads import HeadsTask
from ..train.loop import FitConfig, FitResult, Task, fit
from ..train.table import count_table
from .data_sections import Section
from .evaluate import load_prompts, stop_ids
from .loading import write_recipe
from .prepare import Prepared, prepare_data
from .terminal import say
from .training import DrafterRecipe, HeadsRecipe, MeasureSection, TableRecipe, TrainSection


def run_train(recipe: DrafterRecipe | HeadsRecipe | TableRecipe) -> Path:
    """Run a training recipe to its artifact, or find that it is there already.

    Returns:
        The artifact's folder.

    Raises:
        ValueError: an artifact of another recipe stands there; whatever data, models and training raise.
    """
    out = Path(recipe.out)
    accelerator = _accelerator(recipe)
    _on_main(accelerator, partial(_check_out, out, recipe))
    if (out / "artifact.json").is_file():
        say(f"{recipe.kind}: {out} is finished, reusing it")
        return out
    KINDS[recipe.kind](recipe, out, accelerator)
    accelerator.wait_for_everyone()
    return out


def _accelerator(recipe: Section) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    train = getattr(recipe, "train", None)
    precision = train.precision if train is not None else "no"
    shared = AcceleratorState._shared_state
    if shared and shared.get("_mixed_precision", precision) != precision:
        AcceleratorState._reset_state()  # an earlier stage of this process had another precision
    # While the main process prepares a large corpus, the others wait longer than the default allows.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=6))
    return Accelerator(mixed_precision=precision, kwargs_handlers=[patience])


def _on_main(accelerator: Any, work: Callable[[], Any]) -> None:
    """Do something in the main process; a user's mistake found there is raised in all of them."""
    problem: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            work()
        except ValueError as error:
            if accelerator.num_processes == 1:
                raise
            problem = [str(error)]
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(problem)
        if problem[0] is not None:
            raise ValueError(problem[0])


def run_drafter(recipe: DrafterRecipe, out: Path, accelerator: Any) -> None:
    """Train a causal LM: from a model or from scratch, on labels or on a target's distributions."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = _prepare_once(recipe, tokenizer, accelerator)
    model = _model(recipe)
    _check_vocabulary(len(tokenizer), model.get_output_embeddings().weight.shape[0], recipe.model.source or "the model")
    teaches = set(recipe.objective) != {"cross-entropy"}
    target = None
    if recipe.target is not None and (teaches or recipe.measure.prompts):
        target = _load_decoder(recipe.target, device=str(accelerator.device))
        theirs, mine = (side.get_output_embeddings().weight.shape[0] for side in (target, model))
        if theirs != mine:
            raise ValueError(f"the drafter has a vocabulary of {mine} tokens, the target {recipe.target} of {theirs}")
    measure = _drafter_measure(recipe, target, model, tokenizer, prepared) if target is not None else None
    task = DrafterTask(
        model, prepared.heldout, objective=recipe.objective, teacher=target if teaches else None, evaluate_fn=measure
    )
    if target is not None:
        task.settings["target"] = model_fingerprint(target)
    result = _fit(task, prepared, recipe, out, accelerator)
    if not accelerator.is_main_process:
        return

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    _save(recipe, out, write, tokenizer, prepared, result, target, _shapes(model))


def run_heads(recipe: HeadsRecipe, out: Path, accelerator: Any) -> None:
    """Train prediction heads on a frozen target."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = _prepare_once(recipe, tokenizer, accelerator)
    target = _load_decoder(recipe.target, device=str(accelerator.device))
    projection_VD = target.get_output_embeddings().weight.detach()
    _check_vocabulary(len(tokenizer), projection_VD.shape[0], recipe.target)
    heads = PredictionHeads.from_lm_head(projection_VD, recipe.num_heads, recipe.num_layers).to(accelerator.device)
    measure = _heads_measure(recipe, target, tokenizer, prepared) if recipe.measure.prompts else None
    weights = [recipe.weight_decay_by_head**place for place in range(recipe.num_heads)]
    task = HeadsTask(target, heads, prepared.heldout, head_weights=weights, evaluate_fn=measure)
    task.settings["target"] = model_fingerprint(target)
    result = _fit(task, prepared, recipe, out, accelerator)
    if not accelerator.is_main_process:
        return
    shapes = {name: getattr(heads, name) for name in ("num_heads", "num_layers", "hidden_size", "vocab_size")}
    _save(
        recipe,
        out,
        lambda folder: save_heads(heads, folder, recipe.target),
        tokenizer,
        prepared,
        result,
        target,
        shapes,
    )


def run_table(recipe: TableRecipe, out: Path, accelerator: Any) -> None:
    """Count bigrams; one process counts, others wait."""
    tokenizer = load_tokenizer(recipe.tokenizer_source)
    prepared = _prepare_once(recipe, tokenizer, accelerator)
    if not accelerator.is_main_process:
        return
    amount = "a stream" if recipe.data.streaming else f"{prepared.train.manifest['tokens']:,} tokens"
    say(f"table: counting pairs in {amount}")
    table = count_table(prepared.train, len(tokenizer))
    shapes = {"entries": len(table.col)}
    say(f"table: {len(table.col):,} pairs seen at least once")
    _save(recipe, out, table.save, tokenizer, prepared, None, None, shapes)


# More than any tree of a measurement is deep.
_LOOK_AHEAD = 16

KINDS: dict[str, Callable[..., None]] = {"drafter": run_drafter, "heads": run_heads, "table": run_table}


def _prepare_once(recipe: Any, tokenizer: Any, accelerator: Any) -> Prepared:
    """The main process prepares, the others then find it done."""
    seed = recipe.train.seed if hasattr(recipe, "train") else 0
    _on_main(accelerator, partial(prepare_data, recipe.data, tokenizer, seed=seed))
    return prepare_data(recipe.data, tokenizer, seed=seed, quiet=True)


def _model(recipe: DrafterRecipe) -> PreTrainedModel:
    dtype = getattr(torch, recipe.model.dtype)
    if recipe.model.source is not None:
        return _load_decoder(recipe.model.source, dtype=dtype)
    settings = dict(recipe.model.config or {})
    kind = settings.pop("model_type")
    torch.manual_seed(recipe.train.seed)
    try:
        known = vars(AutoConfig.for_model(kind))
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} of {kind}.{nearest(unknown[0], list(known))}")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    except (ValueError, TypeError, RuntimeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"model.config makes no model: {' '.join(str(error).split())}") from error
    return model.to(dtype)


def _check_vocabulary(tokens: int, rows: int, what: str) -> None:
    if tokens > rows:
        raise ValueError(f"the tokenizer has {tokens} tokens, and {what} has embeddings for {rows}")


def _fit(task: Task, prepared: Prepared, recipe: Any, out: Path, accelerator: Any) -> FitResult:
    train: TrainSection = recipe.train
    settings = train.model_dump(exclude={"epochs", "steps"})
    if train.steps is None and recipe.data.streaming:
        raise ValueError("`train.steps` is needed with `data.streaming`: nobody knows how long an epoch is")
    steps = train.steps or max(1, math.ceil(train.epochs * prepared.train.blocks / train.global_batch))
    config = FitConfig(steps=steps, **(settings | {"betas": tuple(train.betas)}))
    result = fit(task, prepared.train, config, _state(out), accelerator)
    if accelerator.is_main_process:
        write_recipe(recipe, _state(out) / "recipe.yaml")
    return result


def _save(
    recipe: Any,
    out: Path,
    write: Callable[[Path], None],
    tokenizer: Any,
    prepared: Prepared,
    result: FitResult | None,
    target: nn.Module | None,
    shapes: dict[str, Any],
) -> None:
    def write_all(folder: Path) -> None:
        write(folder)
        write_recipe(recipe, folder / "recipe.yaml")

    named = getattr(recipe, "target", None)
    identity = None
    if named is not None:
        identity = {"id": named, "fingerprint": model_fingerprint(target) if target is not None else None}
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
    )
    shutil.rmtree(_state(out) / "checkpoints", ignore_errors=True)
    say(f"{recipe.kind}: wrote {out}")


def _state(out: Path) -> Path:
    return out.with_name(out.name + ".state")


def _check_out(out: Path, recipe: Section) -> None:
    """Refuse to write over what another recipe made; check the hashes of what this one made."""
    if not out.exists():
        return
    if not (out / "artifact.json").is_file():
        if any(out.iterdir()):
            raise ValueError(f"{out} holds other files and no artifact: choose another `out`")
        return
    theirs, mine = load_manifest(out).recipe, json.loads(json.dumps(recipe.model_dump(mode="json")))
    if theirs != mine:
        raise ValueError(
            f"{out} holds the artifact of another recipe ({_difference(theirs, mine)}): "
            "choose another `out`, or delete that folder"
        )
    made_for = verify_artifact(out).target or {}
    folder, fingerprint = Path(str(made_for.get("id"))), made_for.get("fingerprint")
    if fingerprint and folder.is_dir() and model_fingerprint(folder) != fingerprint:
        raise ValueError(f"{out} was made for another model than the one that stands at {folder} now: delete {out}")


def _difference(theirs: Any, mine: Any, place: str = "") -> str:
    """The first key in which two recipes differ, with both values."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in sorted(set(theirs) | set(mine)):
            if theirs.get(key) != mine.get(key):
                return _difference(theirs.get(key), mine.get(key), f"{place}.{key}" if place else key)
    return f"{place}: {theirs!r} there, {mine!r} here"


def _shapes(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_type": model.config.model_type,
    }


def _load_decoder(source: str, **options: Any) -> PreTrainedModel:
    """A model to train, or to learn from. Raises ValueError for an encoder-decoder."""
    model = load_model(source, **options)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{source} is an encoder-decoder ({model.config.model_type}): only decoders are trained here")
    return model


def _drafter_measure(
    recipe: DrafterRecipe, target: PreTrainedModel, drafter: PreTrainedModel, tokenizer: Any, prepared: Prepared
) -> Callable[[nn.Module], dict[str, float]] | None:
    if not recipe.measure.prompts:
        return None
    scorer = wrap_model(target)
    positions = min(scorer.max_positions, getattr(drafter.config, "max_position_embeddings", scorer.max_positions))
    prompts = _sample(recipe, tokenizer, prepared, positions)

    def run(model: Any) -> dict[str, float]:
        parts = Parts(drafter=wrap_model(model, check=False))
        return _acceptance(
            scorer, parts, "speculative", {"gamma": recipe.measure.gamma}, prompts, recipe.measure, tokenizer
        )

    return run


def _heads_measure(
    recipe: HeadsRecipe, target: PreTrainedModel, tokenizer: Any, prepared: Prepared
) -> Callable[[nn.Module], dict[str, float]]:
    scorer = wrap_model(target)
    prompts = _sample(recipe, tokenizer, prepared, scorer.max_positions)

    def run(heads: Any) -> dict[str, float]:
        was_training = heads.training
        options = {"tree": recipe.measure.tree}
        metrics = _acceptance(scorer, Parts(heads=heads.eval()), "medusa", options, prompts, recipe.measure, tokenizer)
        heads.train(was_training)
        return metrics

    return run


def _sample(recipe: DrafterRecipe | HeadsRecipe, tokenizer: Any, prepared: Prepared, positions: int) -> list[list[int]]:
    # Room for the answer and the look-ahead, in models whose positions are as many as a block has.
    longest = min(recipe.data.block_tokens, positions - recipe.measure.new_tokens - _LOOK_AHEAD)
    source = str(prepared.folder / "heldout.jsonl")
    found = load_prompts(source, recipe.data.template, tokenizer, recipe.measure.prompts, longest)
    return [ids for _, ids in found]


def _acceptance(
    scorer: LanguageModel,
    parts: Parts,
    name: str,
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    section: MeasureSection,
    tokenizer: Any,
) -> dict[str, float]:
    """Tokens per step and acceptance rate of real decoding at temperature 0 on the fixed sample."""
    method = build_method(name, parts, Sampling(), **options)
    limits = Limits(section.new_tokens, stop_ids(tokenizer))
    metrics = total(decode(scorer, method, Sampling(), 0, prompt, limits).tally for prompt in prompts).metrics()
    return {key: float(metrics[key]) for key in ("tokens_per_step", "acceptance_rate")}  # type: ignore[arg-type]

"""Construction of the training run of a drafter: model, teacher and acceptance measurement."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ...checkpoints.artifact.compat import save_tokenizer
from ...checkpoints.artifact.locate import model_source
from ...checkpoints.pairs.speculation import save_speculation
from ...checkpoints.storage.draft_vocabulary import MASK_TOKEN, mask_token, write_vocabulary
from ...checkpoints.storage.messages import first_line
from ...checkpoints.verify.model_files import is_adapter
from ...data.prompts import end_ids
from ...data.rendering.templates import get_template
from ...decode.models.draft_vocabulary import keep_tokens, kept_tokens
from ...train.config import OnPolicy, Parallel
from ...train.tasks.drafter import DrafterTask
from ...train.teachers.teacher import CachedTeacher, ModelTeacher, Teacher, load_teacher
from ..schema.training import DrafterRecipe, ModelSection, VocabularySection, role_of
from ..session.terminal import log
from .acceptance import drafter_measure
from .artifact import Run, check_target
from .data import Prepared
from .models import TrainableModel, build_model, check_vocabulary
from .teacher import open_caches

_FROM_TARGET = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def trainable(recipe: DrafterRecipe, tokenizer: Any) -> TrainableModel:
    """Load or create the model to train. Raise ValueError if it does not fit the tokenizer or the template."""
    trained = build_model(complete_section(recipe), recipe.train.seed)
    check_vocabulary(len(tokenizer), trained.model, recipe.model.source or "the model")
    if recipe.data.template == "t5" and not trained.model.config.is_encoder_decoder:
        raise ValueError("`data.template: t5` requires an encoder-decoder, but the model is a decoder")
    return trained


def make_drafter_run(recipe: DrafterRecipe, tokenizer: Any, prepare: Callable[[], Prepared], accelerator: Any) -> Run:
    """Load the model, prepare the data, load the teacher, and return the training run of a drafter."""
    trained = trainable(recipe, tokenizer)
    model, prepared = trained.model, prepare()
    if recipe.model.vocabulary is not None:
        _make_smaller(model, recipe.model.vocabulary, prepared, role_of(recipe))
    task, target_sha256 = _make_task(recipe, tokenizer, prepared, model, accelerator.device)

    def write(folder: Path) -> None:
        trained.save(folder)
        write_vocabulary(kept_tokens(model), folder)
        save_tokenizer(tokenizer, folder)
        if recipe.target is not None and not is_adapter(folder):  # adapters use the settings of their base model
            save_speculation(folder)

    return Run(
        recipe,
        tokenizer,
        prepared,
        task,
        write,
        shapes=trained.shapes(),
        artifact_bytes=trained.saved_bytes(),
        target=recipe.target,
        target_sha256=target_sha256,
        measured=recipe.target is not None and recipe.measure.prompts > 0,
    )


def _make_task(
    recipe: DrafterRecipe, tokenizer: Any, prepared: Prepared, model: PreTrainedModel, device: Any
) -> tuple[DrafterTask, str | None]:
    """Return the training task of a recipe, and the SHA-256 of the target if the task loads it."""
    parallel = None if recipe.parallel is None else parallel_of(recipe, model, prepared)
    taught_by_target = recipe.distils and recipe.teacher.cache is None
    measure = target_sha256 = None
    eval_teacher: ModelTeacher | None = None
    if recipe.target is not None and (taught_by_target or recipe.measure.prompts):
        section = recipe.teacher
        eval_teacher = load_teacher(recipe.target, section.dtype, device)
        target_sha256 = eval_teacher.settings["target"]
        check_target(eval_teacher.model, model, recipe.target, recipe.model.source)
        if recipe.measure.prompts:
            measure = drafter_measure(recipe, eval_teacher.model, model, tokenizer, prepared)
    teacher: Teacher | None = eval_teacher if taught_by_target else None
    if recipe.distils and recipe.teacher.cache is not None:
        teacher = CachedTeacher(*open_caches(recipe, prepared))
    on_policy = None
    if recipe.on_policy is not None:
        settings = (model if eval_teacher is None else eval_teacher.model).generation_config
        template = get_template(recipe.data.template, tokenizer, recipe.data.template_options)
        on_policy = OnPolicy(**recipe.on_policy.model_dump(), stop_ids=end_ids(tokenizer, template, settings))
    task = DrafterTask(
        model,
        prepared.heldout if recipe.measure.blocks else None,
        recipe.objective,
        teacher,
        recipe.teacher.temperature,
        recipe.teacher.top_k or None,
        on_policy,
        eval_teacher or teacher,
        measure,
        evaluate_blocks=recipe.measure.blocks,
        parallel=parallel,
    )
    task.title = role_of(recipe)
    # Settings that change the training or its metrics; a run with other settings cannot resume.
    if eval_teacher is not None:
        task.settings["hash of the target"] = target_sha256
    own = {} if recipe.model.vocabulary is None else {"vocabulary": recipe.model.vocabulary.model_dump()}
    task.settings["model"] = recipe.model.model_dump(mode="json", exclude={"attention", "vocabulary"}) | own
    task.settings["measure"] = recipe.measure.model_dump(mode="json", exclude={"keep"})
    return task, target_sha256


def _make_smaller(model: PreTrainedModel, section: VocabularySection, prepared: Prepared, name: str) -> None:
    """Reduce the output layer of a model to the draft vocabulary."""
    if model.config.is_encoder_decoder:
        raise ValueError("`model.vocabulary` requires a decoder, but the model is an encoder-decoder")
    vocab = model.get_output_embeddings().weight.shape[0]
    keep_tokens(model, frequent_tokens(section.tokens, vocab, prepared, name))


def frequent_tokens(tokens: int, vocab: int, prepared: Prepared, name: str) -> Tensor:
    """Return the ids of the most frequent supervised tokens, sorted in ascending order, [tokens].

    If frequencies are equal, lower ids are preferred. Raises ValueError if `tokens` exceeds the vocabulary size.
    """
    if tokens > vocab:
        raise ValueError(f"`vocabulary.tokens` must be at most the model's vocabulary size {vocab}, got {tokens}")
    counts = prepared.train.token_counts(trained=True)
    often = np.argsort(-np.pad(counts, (0, max(0, vocab - len(counts)))), kind="stable")[:tokens]
    share = counts[often[often < len(counts)]].sum() / counts.sum()
    log(f"{name}: draft vocabulary of {tokens:,} of {vocab:,} tokens, {share:.2%} of the supervised tokens")
    return torch.from_numpy(np.sort(often))


def parallel_of(recipe: DrafterRecipe, model: PreTrainedModel, prepared: Prepared) -> Parallel:
    """Return the settings of parallel drafting, and store the mask token in the model configuration.

    Raises ValueError if the model is an encoder-decoder, or the mask token is outside its vocabulary.
    """
    section, vocab = recipe.parallel, model.get_input_embeddings().weight.shape[0]
    assert section is not None
    if model.config.is_encoder_decoder:
        raise ValueError("`parallel` requires a decoder, but the model is an encoder-decoder")
    token = section.token if section.token is not None else mask_token(model.config)
    token = choose_mask("parallel.token", token, prepared, vocab, role_of(recipe))
    setattr(model.config, MASK_TOKEN, token)
    return Parallel(**section.model_dump(exclude={"token"}), token=token)


def choose_mask(field: str, token: int | None, prepared: Prepared, vocab: int, name: str) -> int:
    """Return the mask token: `token`, or the rarest token of the data. Raise ValueError if it exceeds the vocabulary.

    `field` (the recipe field that sets the token) and `name` (the model's role) appear in messages.
    """
    if token is None:
        counts = prepared.train.token_counts(trained=False)
        token = vocab - 1 - int(np.pad(counts, (0, vocab - len(counts)))[::-1].argmin())
        log(f"{name}: using the rarest token of the data, {token}, as mask token")
    if token >= vocab:
        raise ValueError(f"`{field}` must be less than the model's vocabulary size {vocab}, got {token}")
    return token


def complete_section(recipe: DrafterRecipe) -> ModelSection:
    """Return the model section. New models inherit vocabulary size, positions and special tokens from the target."""
    section = recipe.model
    if section.config is None or recipe.target is None:
        return section
    try:
        target_config = AutoConfig.from_pretrained(model_source(recipe.target, weights=False)).get_text_config()
    except OSError as error:
        raise ValueError(f"target {recipe.target!r} cannot be loaded: {first_line(error)}") from error
    return inherit_sizes(section, target_config)


def inherit_sizes(section: ModelSection, target_config: Any) -> ModelSection:
    """Return the section of a new model with vocabulary size, positions and special tokens of the target."""
    assert section.config is not None
    target_values = {name: getattr(target_config, name, None) for name in _FROM_TARGET}
    known = vars(AutoConfig.for_model(section.config["model_type"]))
    inherited = {name: value for name, value in target_values.items() if value is not None and name in known}
    return section.model_copy(update={"config": inherited | section.config})

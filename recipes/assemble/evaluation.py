"""What an evaluation recipe names, opened: target, drafters, heads and table, checked against one another."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoints.artifact.artifact import check_target, load_manifest, open_artifact
from ...checkpoints.artifact.locate import model_source, resolve
from ...checkpoints.artifact.manifest import Manifest
from ...checkpoints.artifact.model_ref import ModelRef, resolve_model, tokenizer_fingerprint
from ...checkpoints.heads.eagle import eagle_layers, load_eagle
from ...checkpoints.heads.files import load_heads
from ...checkpoints.heads.layouts import is_eagle
from ...checkpoints.pairs.by_text import TextTranslation
from ...checkpoints.storage.names import MANIFEST_FILE
from ...checkpoints.table.table import BigramTable
from ...data.prompts import Prompt, SkippedPrompts, load_prompts, stop_ids
from ...data.tokenizers import load_tokenizer
from ...decode.engine import Limits
from ...decode.evaluation.measure import Entry, sample_texts
from ...decode.methods import Parts, method_options, needs_of
from ...decode.models.base import LanguageModel, check_same_vocabulary
from ...decode.models.eagle import EagleDrafter
from ...decode.models.graphs import GraphedModel
from ...decode.models.loading import held_as, load_model, wrap_model
from ...decode.models.products.int8 import round_to_int8
from ...decode.proposers.head_trees import attach_projection, states_of
from ...decode.warpers import Sampling
from ..schema.evaluation import EvaluateRecipe, RegenerateRecipe
from ..session.machine import machine
from ..session.terminal import Advance, bar, log

Bar = Callable[[str, str], AbstractContextManager[Advance]]
"""Progress of a title, in a unit."""


@dataclass(frozen=True)
class LoadedPair:
    """An evaluation's target and parts, ready to decode."""

    tokenizer: Any
    model: PreTrainedModel
    """The target as transformers has it."""
    target: LanguageModel
    parts: Parts
    device: str
    refs: dict[str, ModelRef]
    """Files of the target ("target") and of each part ("drafter", "drafter 2", "heads", "table")."""

    def artifacts(self) -> dict[str, Any]:
        """Return what was loaded, as results and certificates name it."""
        return {name: ref.record() for name, ref in sorted(self.refs.items())}


def open_recipe(recipe: EvaluateRecipe) -> LoadedPair:
    """Load what a recipe names. Raises ValueError for what is unknown, missing or unfit."""
    for row in recipe.methods:
        method_options(row.method, row.options)
        for part in needs_of(row.method, row.options):
            if getattr(recipe, part) is None:
                raise ValueError(f"method {row.method!r} needs `{part}`, and the recipe names none")
    device = device_of(recipe)
    load = partial(load_model, dtype=recipe.drafter_dtype or recipe.dtype, device=device)
    refs = {"target": resolve_model(recipe.target)}
    tokenizer, model = load_tokenizer(recipe.target), load_target(recipe)
    heads = table = None
    if recipe.heads is not None:  # which decide what hidden states the target must give
        folder = Path(place_of(recipe.heads, "heads"))
        refs["heads"], (made, heads) = _open_part(recipe.heads, "heads", partial(load_heads, device=device))
    sources = {} if recipe.drafter is None else {"drafter": recipe.drafter}
    sources |= {f"drafter {number}": source for number, source in enumerate(recipe.more_drafters, 2)}
    target = wrap_model(model, states=states_of(heads), aux_layers=_layers_read(sources.values()))
    fits = partial(check_target, vocab_size=target.vocab_size, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    if heads is not None:
        if (trained_with := other_target(folder, recipe.target)) is not None:
            log(f"evaluate: the heads were trained with {trained_with}, not with {recipe.target}")
        fits(made, what=f"the heads {recipe.heads}")
        heads = heads.to(target.dtype)
        if heads.hidden_size != target.hidden_size:
            sizes = f"{heads.hidden_size}, the target makes {target.hidden_size}"
            raise ValueError(f"the heads take hidden states of {sizes}")
        attach_projection(heads, model, target.device)
    drafters = []
    for name, source in sources.items():
        refs[name], drafter = _open_drafter(recipe, source, target, fits, load, model, tokenizer)
        drafters.append(drafter)
    if recipe.table is not None:
        refs["table"], (made, table) = _open_part(recipe.table, "table", _table_of)
        fits(made, what=f"the table {recipe.table}")
    parts = Parts(drafters[0] if drafters else None, heads, table, tuple(drafters[1:]))
    return LoadedPair(tokenizer, model, target, parts, device, refs)


def _narrow(recipe: EvaluateRecipe, target: LanguageModel) -> torch.dtype | None:
    """The type that a recipe gives drafters, apart from the target's."""
    named = recipe.drafter_dtype
    return None if named in (None, "auto") else getattr(torch, held_as(named, target.device.type))


def _layers_read(drafters: Iterable[str]) -> tuple[int, ...]:
    """The target's layers that drafters read. Raises ValueError: two that read different ones."""
    folders = [Path(place_of(source, "drafter")) for source in drafters]
    read = {tuple(eagle_layers(folder)) for folder in folders if is_eagle(folder)}
    if len(read) > 1:
        raise ValueError(
            f"drafters of one evaluation must read the same layers of the target, these read {sorted(read)}"
        )
    return read.pop() if read else ()


def _open_part(
    source: str, kind: str, load: Callable[[Path], Any], place: str | None = None
) -> tuple[ModelRef, tuple[Any, Any]]:
    """Load a part and its manifest, which a drafter may lack."""
    place = place or place_of(source, kind)
    is_artifact = kind != "drafter" or (Path(place) / MANIFEST_FILE).is_file()
    ref = resolve_model(source, place)
    return ref, open_artifact(Path(place), load, kind) if is_artifact else (None, load(Path(place)))


def _table_of(folder: Path) -> BigramTable:
    """A table in memory: what is written to a mapped file would change it."""
    return copy.deepcopy(BigramTable.load(folder))


def _open_drafter(
    recipe: EvaluateRecipe,
    source: str,
    target: LanguageModel,
    fits: Callable[..., None],
    load: Callable[[str], Any],
    model: PreTrainedModel,
    tokenizer: Any,
) -> tuple[ModelRef, LanguageModel]:
    """A drafter of this target (`model`), or EAGLE-3 heads; `fits` looks at the manifest, where it is an artifact."""
    drafter: LanguageModel
    if is_eagle(Path(place := place_of(source, "drafter"))):
        ref, (made, heads) = _open_part(source, "heads", load_eagle, place)
        weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        heads = heads.to(target.device, _narrow(recipe, target) or target.weights_dtype).attach(*weights)
        if (recipe.drafter_dtype or recipe.dtype) == "int8":
            round_to_int8(heads)
        drafter = EagleDrafter(heads.requires_grad_(False))
        if isinstance(target, GraphedModel):
            drafter = GraphedModel(drafter)
    else:
        ref, (made, loaded) = _open_part(source, "drafter", lambda _: load(place_of(source, "drafter")))
        drafter = wrap_model(loaded.requires_grad_(False))
        drafter.translation = _translation(recipe, source, made, tokenizer)
    if drafter.translation is not None:
        return ref, drafter
    try:
        check_same_vocabulary(target, drafter, f"drafter {source}")
        if made is not None:
            fits(made, what=f"the drafter {source}")
    except ValueError as error:
        hint = f"draftsmith doctor {recipe.target} {source} says what can be done; speculative alone drafts by its text"
        raise ValueError(f"{error}; {hint}") from error
    return ref, drafter


def _translation(recipe: EvaluateRecipe, source: str, made: Manifest | None, tokenizer: Any) -> TextTranslation | None:
    """By way of the text, where nothing but `speculative` drafts and the drafter's tokenizer has other tokens."""
    drafting = {row.method for row in recipe.methods if "drafter" in needs_of(row.method, row.options)}
    known = made is not None and made.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    if known or drafting != {"speculative"}:
        return None
    try:
        theirs = load_tokenizer(place_of(source, "drafter"))
    except ValueError:  # it has none of its own, and is taken to have the target's
        return None
    return None if theirs.get_vocab() == tokenizer.get_vocab() else TextTranslation(tokenizer, theirs)


@cache
def place_of(source: str, kind: str) -> str:
    """Where a part lies: its folder; of an artifact on the hub that of its verified files, fetched once a process; of
    another drafter there, its id."""
    return model_source(source) if kind == "drafter" else str(resolve(source, kind))


def prompts_of(
    recipe: EvaluateRecipe, tokenizer: Any, skipped: SkippedPrompts | None = None
) -> list[tuple[Prompt, list[int]]]:
    """A recipe's prompts with their token ids; `skipped` gets those that are left out. Raises ValueError for none."""
    return load_prompts(
        recipe.prompts,
        recipe.template,
        tokenizer,
        recipe.limit,
        recipe.max_prompt_tokens,
        path=recipe.prompts_path,
        groups=recipe.groups or None,
        skipped=skipped,
    )


def device_of(recipe: EvaluateRecipe | RegenerateRecipe) -> str:
    """Where a recipe decodes: what it says, or a GPU if there is one. Raises ValueError: a GPU that there is not."""
    if recipe.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"`device` is {recipe.device!r}, and torch finds no GPU here")
    if recipe.device != "auto":
        return recipe.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(recipe: EvaluateRecipe) -> PreTrainedModel:
    """A recipe's target, where and in the type that it says."""
    model = load_model(recipe.target, dtype=recipe.dtype, device=device_of(recipe), device_map=recipe.device_map)
    return model.requires_grad_(False)


def entries_of(recipe: EvaluateRecipe) -> list[Entry]:
    """A recipe's rows as the measurement takes them."""
    rows = zip(recipe.labels(), recipe.methods, strict=True)
    warped = (recipe.top_k, recipe.top_p)
    return [Entry(label, row.method, row.options, Sampling(recipe.temperature_of(row), *warped)) for label, row in rows]


def other_target(artifact: Path, target: str) -> str | None:
    """The target that an artifact was trained on, or with (Medusa-2), if that is known to be another folder's than
    `target`."""
    made_for, base = load_manifest(artifact).target or {}, artifact / "base"
    named, theirs = made_for.get("id"), made_for.get("sha256")
    if (base / "config.json").is_file():
        named, theirs = str(base), resolve_model(str(base)).sha256
    return None if theirs is None or resolve_model(target).sha256 in (theirs, None) else str(named)


@dataclass(frozen=True)
class Case:
    """An evaluation, opened, and what it asks."""

    recipe: EvaluateRecipe
    opened: LoadedPair
    asked: list[Prompt]
    prompts: list[list[int]]
    """Their token ids."""
    limits: Limits

    @property
    def title(self) -> str:
        """Of its tables."""
        return f"{self.recipe.target}, {len(self.prompts)} prompts of {self.recipe.prompts}"

    @property
    def identity(self) -> dict[str, Any]:
        """What finished runs belong to."""
        return identity_of(self.recipe, self.prompts, self.opened)

    def texts(self, sampling: Sampling, bar: Bar = bar) -> list[list[int]]:
        """The target's own texts after the prompts."""
        with bar(f"writing the target's own texts at temperature {sampling.temperature:g}", "prompts") as advance:
            given = (self.opened.target, self.prompts, self.limits, sampling)
            return sample_texts(*given, seed=self.recipe.seed, progress=advance)


def open_case(recipe: EvaluateRecipe, skipped: SkippedPrompts | None = None) -> Case:
    """Load what a recipe names, and its prompts, of like lengths together; see `open_recipe` and `prompts_of`."""
    opened = open_recipe(recipe)
    found = prompts_of(recipe, opened.tokenizer, skipped)
    if recipe.batch > 1:  # of which all are read as if they were as long as the longest
        found = sorted(found, key=lambda each: len(each[1]))
    limits = Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer))
    return Case(recipe, opened, [prompt for prompt, _ in found], [ids for _, ids in found], limits)


def identity_of(recipe: EvaluateRecipe, prompts: Sequence[Sequence[int]], opened: LoadedPair) -> dict[str, Any]:
    """What finished runs belong to: they may only be used again where all of it is the same."""
    settings = recipe.recorded(exclude={"out", "energy", "energy_batches", "energy_runs", "energy_context"})
    settings |= {f"hash of the {name}": ref.sha256 for name, ref in opened.refs.items()}
    return settings | {"prompts read": prompts_digest(prompts), "machine": machine(opened.device)}


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()

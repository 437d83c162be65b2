"""Loading of the target, the drafters, the heads, the table and the prompts of an evaluation recipe."""

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

from ...checkpoints.artifact.artifact import check_target, load_manifest, verify_artifact
from ...checkpoints.artifact.locate import model_source, resolve
from ...checkpoints.artifact.manifest import Manifest
from ...checkpoints.artifact.model_ref import ModelRef, resolve_model, tokenizer_fingerprint
from ...checkpoints.heads.auxiliary import input_embeddings
from ...checkpoints.heads.dflash import dflash_settings
from ...checkpoints.heads.dspark import load_block_drafter
from ...checkpoints.heads.eagle import eagle_layers, load_eagle
from ...checkpoints.heads.files import load_heads
from ...checkpoints.heads.layouts import drafts_blocks, is_eagle
from ...checkpoints.pairs.by_text import TextTranslation
from ...checkpoints.storage.names import MANIFEST_FILE
from ...checkpoints.table.table import BigramTable
from ...data.prompts import Prompt, SkippedPrompts, ask_follow_ups, end_ids, load_prompts
from ...data.rendering.render import prompt_renderer
from ...data.rendering.templates import Template, get_template
from ...data.tokenizers import load_tokenizer
from ...decode.engine import Limits
from ...decode.evaluation.measure import Entry, sample_texts
from ...decode.methods import Parts, build_method, method_config
from ...decode.models.base import LanguageModel, check_same_vocabulary
from ...decode.models.dflash import block_drafter
from ...decode.models.eagle import EagleDrafter
from ...decode.models.graphs import GraphedModel
from ...decode.models.loading import load_model, storage_dtype, wrap_model
from ...decode.models.products.product import round_to_int8
from ...decode.proposers.head_trees import attach_projection, states_of
from ...decode.warpers import Sampling
from ..schema.evaluation import EvaluateRecipe, RegenerateRecipe
from ..session.machine import machine
from ..session.terminal import Advance, bar, log

Bar = Callable[[str, str], AbstractContextManager[Advance]]
"""Function that opens a progress bar, given its title and unit."""


@dataclass(frozen=True)
class LoadedPair:
    """Loaded target of an evaluation, with its drafters, heads and table."""

    tokenizer: Any
    model: PreTrainedModel
    """Target as a transformers model."""
    target: LanguageModel
    parts: Parts
    device: str
    refs: dict[str, ModelRef]
    """Resolved model references with the keys "target", "drafter", "drafter 2", "heads" and "table"."""

    def artifacts(self) -> dict[str, Any]:
        """Return the id, revision and hash of each loaded model, for results files and certificates."""
        return {name: ref.record() for name, ref in sorted(self.refs.items())}


def open_recipe(recipe: EvaluateRecipe) -> LoadedPair:
    """Load the models of a recipe. Raise ValueError if one is missing or does not fit the target."""
    for row in recipe.methods:
        for part in method_config(row.method, row.options).needs:
            if getattr(recipe, part) is None:
                raise ValueError(f"method {row.method!r} requires `{part}`, which the recipe does not set")
    device = device_of(recipe)
    load = partial(load_with_progress, dtype=recipe.drafter_dtype or recipe.dtype, device=device)
    refs = {"target": resolve_model(recipe.target)}
    tokenizer, model = load_tokenizer(recipe.target), load_target(recipe)
    heads = table = None
    if recipe.heads is not None:  # first, since they determine the hidden states that the target must return
        folder = Path(locate_part(recipe.heads, "heads"))
        refs["heads"], (manifest, heads) = _open_part(recipe.heads, "heads", partial(load_heads, device=device))
    sources = {} if recipe.drafter is None else {"drafter": recipe.drafter}
    sources |= {f"drafter {number}": source for number, source in enumerate(recipe.more_drafters, 2)}
    target = wrap_model(model, states=states_of(heads), aux_layers=_layers_read(sources.values()), share=True)
    fits = partial(check_target, vocab_size=target.vocab_size, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    if heads is not None:
        if (trained_with := other_target(folder, recipe.target)) is not None:
            log(f"evaluate: the heads were trained for {trained_with}, not for {recipe.target}")
        fits(manifest, name=f"the heads {recipe.heads}")
        heads = heads.to(target.dtype)
        if heads.hidden_size != target.hidden_size:
            raise ValueError(f"hidden_size of the heads is {heads.hidden_size}, expected {target.hidden_size}")
        attach_projection(heads, model, target.device)
    drafters = []
    for name, source in sources.items():
        refs[name], drafter = _open_drafter(recipe, source, target, fits, load, model, tokenizer)
        drafters.append(drafter)
    if recipe.table is not None:
        refs["table"], (manifest, table) = _open_part(recipe.table, "table", BigramTable.load)
        table = copy.deepcopy(table)  # in memory, since the files may change
        fits(manifest, name=f"the table {recipe.table}")
    parts = Parts(drafters[0] if drafters else None, heads, table, tuple(drafters[1:]))
    for entry in entries_of(recipe) if target.tree_fault else ():
        nodes, depth = build_method(entry.method, parts, entry.sampling, **entry.options).proposer.capacity(Limits())
        if nodes > depth + 1:
            target.check_trees(f"method {entry.label!r}")
    return LoadedPair(tokenizer, model, target, parts, device, refs)


def _layers_read(drafters: Iterable[str]) -> tuple[int, ...]:
    """Return the target layers whose hidden states drafters read. Raise ValueError if the drafters differ."""
    folders = [Path(locate_part(source, "drafter")) for source in drafters]
    read = {tuple(eagle_layers(folder)) for folder in folders if is_eagle(folder)}
    read |= {tuple(dflash_settings(folder)[0]) for folder in folders if drafts_blocks(folder)}
    if len(read) > 1:
        raise ValueError(f"all drafters of an evaluation must read the same layers of the target, got {sorted(read)}")
    return read.pop() if read else ()


def _open_part(
    source: str, kind: str, load: Callable[[Path], Any], location: str | None = None
) -> tuple[ModelRef, tuple[Any, Any]]:
    """Load a drafter, heads or a table, and its manifest (None for a drafter that is not an artifact)."""
    location = location or locate_part(source, kind)
    is_artifact = kind != "drafter" or (Path(location) / MANIFEST_FILE).is_file()
    ref = resolve_model(source, location)
    manifest = verify_artifact(Path(location), kind) if is_artifact else None
    return ref, (manifest, load(Path(location)))


def _open_drafter(
    recipe: EvaluateRecipe,
    source: str,
    target: LanguageModel,
    fits: Callable[..., None],
    load: Callable[[str], Any],
    model: PreTrainedModel,
    tokenizer: Any,
) -> tuple[ModelRef, LanguageModel]:
    """Load a draft model, EAGLE-3 heads or a block drafter. `fits` checks an artifact's manifest for the target."""
    drafter: LanguageModel
    block = drafts_blocks(Path(location := locate_part(source, "drafter")))
    if block or is_eagle(Path(location)):
        read: Callable[[Path], Any] = load_block_drafter if block else load_eagle
        ref, (manifest, heads) = _open_part(source, "heads", read, location)
        weights = (input_embeddings(model), model.get_output_embeddings().weight)
        named = recipe.drafter_dtype
        dtype = None if named in (None, "auto") else getattr(torch, storage_dtype(named, target.device.type))
        heads = heads.to(target.device, dtype or target.weights_dtype).attach(*weights)
        if (recipe.drafter_dtype or recipe.dtype) == "int8":
            round_to_int8(heads)
        drafter = (block_drafter if block else EagleDrafter)(heads.requires_grad_(False))
        if isinstance(target, GraphedModel) and not block:
            drafter = GraphedModel(drafter)
    else:
        ref, (manifest, loaded) = _open_part(source, "drafter", lambda _: load(locate_part(source, "drafter")))
        drafter = wrap_model(loaded.requires_grad_(False), share=True)
        drafter.translation = _translation(recipe, source, manifest, tokenizer)
    if drafter.translation is not None:
        return ref, drafter
    try:
        check_same_vocabulary(target, drafter, f"drafter {source}")
        if manifest is not None:
            fits(manifest, name=f"the drafter {source}")
    except ValueError as error:
        hint = f"run `draftsmith doctor {recipe.target} {source}` for remedies, or evaluate only `speculative`"
        raise ValueError(f"{error}; {hint}") from error
    return ref, drafter


def _translation(
    recipe: EvaluateRecipe, source: str, manifest: Manifest | None, tokenizer: Any
) -> TextTranslation | None:
    """Return a translation between two tokenizers, or None if it is unnecessary or a method does not support it."""
    drafting = {row.method for row in recipe.methods if "drafter" in method_config(row.method, row.options).needs}
    known = manifest is not None and manifest.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
    if known or drafting != {"speculative"}:
        return None
    try:
        drafters = load_tokenizer(locate_part(source, "drafter"))
    except ValueError:  # a drafter without a tokenizer uses the target's tokenizer
        return None
    return None if drafters.get_vocab() == tokenizer.get_vocab() else TextTranslation(tokenizer, drafters)


@cache
def locate_part(source: str, kind: str) -> str:
    """Return the directory of a drafter, heads or a table, or the hub id of a drafter. Hub artifacts are downloaded."""
    return model_source(source) if kind == "drafter" else str(resolve(source, kind))


def prompts_of(
    recipe: EvaluateRecipe, tokenizer: Any, skipped: SkippedPrompts | None = None
) -> list[tuple[Prompt, list[int]]]:
    """Load and tokenize the prompts, and count skipped prompts in `skipped`. Raise ValueError if none remain."""
    return load_prompts(
        recipe.prompts,
        get_template(recipe.template, tokenizer, recipe.template_options),
        tokenizer,
        recipe.limit,
        recipe.max_prompt_tokens,
        path=recipe.prompts_path,
        groups=recipe.groups or None,
        skipped=skipped,
    )


def device_of(recipe: EvaluateRecipe | RegenerateRecipe) -> str:
    """Return the device of a recipe (`auto`: a GPU if available). Raise ValueError if the device is unavailable."""
    if recipe.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"`device` is {recipe.device!r}, but torch finds no GPU: use `device: cpu`")
    if recipe.device != "auto":
        return recipe.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_with_progress(source: str, **options: Any) -> PreTrainedModel:
    """Load a model with `load_model`, and display a progress bar."""
    with bar(f"loading {Path(source).name}", "%") as advance:
        return load_model(source, progress=advance, **options)


def load_target(recipe: EvaluateRecipe) -> PreTrainedModel:
    """Load the target of a recipe."""
    options = {"dtype": recipe.dtype, "device": device_of(recipe), "device_map": recipe.device_map}
    return load_with_progress(recipe.target, **options).requires_grad_(False)


def entries_of(recipe: EvaluateRecipe) -> list[Entry]:
    """Convert the rows of a recipe to entries of a measurement (label, method, options and sampling)."""
    rows = zip(recipe.labels(), recipe.methods, strict=True)
    warped = (recipe.top_k, recipe.top_p)
    return [Entry(label, row.method, row.options, Sampling(recipe.temperature_of(row), *warped)) for label, row in rows]


def other_target(artifact: Path, target: str) -> str | None:
    """Return the target that an artifact was trained with, or None if it is `target` or unknown."""
    made_for, base = load_manifest(artifact).target or {}, artifact / "base"
    named, sha256 = made_for.get("id"), made_for.get("sha256")
    if (base / "config.json").is_file():
        named, sha256 = str(base), resolve_model(str(base)).sha256
    return None if sha256 is None or resolve_model(target).sha256 in (sha256, None) else str(named)


@dataclass(frozen=True)
class Case:
    """Evaluation recipe with its loaded models and prompts."""

    recipe: EvaluateRecipe
    pair: LoadedPair
    questions: list[Prompt]
    prompts: list[list[int]]
    """Token ids of the prompts."""
    limits: Limits
    template: Template

    @property
    def title(self) -> str:
        """Title of the results tables."""
        return f"{self.recipe.target}, {len(self.prompts)} prompts of {self.recipe.prompts}"

    @property
    def identity(self) -> dict[str, Any]:
        """Settings, hashes and machine that identify a run. A change prevents the reuse of finished runs."""
        settings = self.recipe.recorded(exclude={"out", "energy", "energy_batches", "energy_runs", "energy_context"})
        settings |= {f"hash of the {name}": ref.sha256 for name, ref in self.pair.refs.items()}
        return settings | {"prompts read": prompts_digest(self.prompts), "machine": machine(self.pair.device)}

    def texts(self, sampling: Sampling, bar: Bar = bar) -> list[list[int]]:
        """Generate the on-policy responses of the target to the prompts, as token ids."""
        with bar(f"generating on-policy responses at temperature {sampling.temperature:g}", "prompts") as advance:
            arguments = (self.pair.target, self.prompts, self.limits, sampling)
            return sample_texts(*arguments, seed=self.recipe.seed, progress=advance)


def open_case(recipe: EvaluateRecipe, skipped: SkippedPrompts | None = None) -> Case:
    """Load the models and prompts of a recipe. If the batch size exceeds 1, prompts are sorted by length."""
    pair, skipped = open_recipe(recipe), SkippedPrompts() if skipped is None else skipped
    loaded = prompts_of(recipe, pair.tokenizer, skipped)
    template = get_template(recipe.template, pair.tokenizer, recipe.template_options)
    ends = end_ids(pair.tokenizer, template, pair.model.generation_config, recipe.stop)
    limits = Limits(recipe.max_new_tokens, ends)
    if recipe.asks_every_turn():

        def answer(questions: list[list[int]]) -> list[str]:
            with bar("generating answers to earlier turns", "answers") as advance:
                texts = sample_texts(pair.target, questions, limits, Sampling(0.0), progress=advance)
            return [str(pair.tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]

        encode = prompt_renderer(template, pair.tokenizer)
        loaded = ask_follow_ups(loaded, answer, encode, recipe.max_prompt_tokens, skipped)
    if recipe.batch > 1:  # prompts of a batch are padded to the longest one
        loaded = sorted(loaded, key=lambda each: len(each[1]))
    return Case(recipe, pair, [prompt for prompt, _ in loaded], [ids for _, ids in loaded], limits, template)


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the token ids of the prompts."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()

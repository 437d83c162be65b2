"""Stages of `draftsmith forge`: preparation of prompts, cost measurements, and recipes for training and evaluation."""

import gc
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.artifact.locate import resolve as folder_of
from ....checkpoints.heads.dflash import DFlashHeads
from ....checkpoints.heads.dspark import draft_tokens_of
from ....checkpoints.heads.eagle import EagleHeads, default_layers
from ....checkpoints.heads.layouts import drafts_blocks, is_eagle
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.storage.safe_read import load_json
from ....checkpoints.verify.families import check_family, tree_fault
from ....checkpoints.verify.model_files import is_adapter, load_config, meta_model
from ....data.prompts import load_prompts
from ....data.rendering.templates import get_template
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.tuning.costs import measure_forwards
from ....decode.evaluation.tuning.plan import MIN_ANSWERS, MIN_BATCHES, Candidate, Kind, ModelShape
from ....decode.evaluation.tuning.space import Available, format_setting, interleave, list_settings
from ....decode.evaluation.tuning.tuner import Workload
from ....decode.methods import method_config
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...schema.evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import find_recipe, parse_recipe, read_extended, write_recipe
from ...schema.training import DrafterRecipe, HeadsRecipe, ParallelSection
from ..training.regenerate import run_regenerate
from .in_engine import ENGINE_FIELDS
from .quickstart import check_folder, make_corpus, make_target, resolve

DRAFT_VOCABULARY = 8192
"""Size of the draft vocabulary for targets with a larger vocabulary."""
METHODS: dict[Kind | None, tuple[str, ...]] = {
    None: ("suffix", "prompt-lookup"),
    "drafter": ("speculative", "suffix, drafter", "dynamic-tree", "multi-candidate"),
    "parallel": ("speculative, parallel", "suffix, drafter"),
    "eagle": ("speculative", "dynamic-tree", "suffix, drafter"),
    "dflash": ("speculative", "suffix, drafter", "dynamic-tree", "multi-candidate"),
    "heads": ("medusa", "slim-s", "suffix, heads"),
}
"""Methods to tune for each kind of drafter. The key None stands for prompt lookup without a drafter."""
COSTS_FILE = "costs.json"
REVERSED_HELDOUT = "heldout-reversed.jsonl"
"""File with held-out prompts in reverse order, so that settings are chosen and confirmed on different prompts."""
_PROBED = 24  # number of generated answers for measuring the time per answer
_CONTEXT = 200
_BLOCK_TOKENS = 7  # draft tokens of a trained DFlash drafter
_HELD_OUT = 4  # minimum expected number of held-out answers


class Source(NamedTuple):
    """Source of draft tokens: prompt lookup, a given drafter, or a trained candidate."""

    name: str
    kind: Kind | None = None
    """Kind of the drafter; None for prompt lookup."""
    artifact: str | None = None
    steps: int = 0
    """Number of training steps."""

    def settings(self, with_table: bool, temperature: float) -> "list[Row]":
        """Return the settings to tune, most promising first. `with_table` also allows a datastore (suffix decoding)."""
        own = {"heads"} if self.kind == "heads" else {"drafter"}
        heads = load_manifest(Path(str(self.artifact))).shapes["num_heads"] if self.kind == "heads" else 0
        available = Available(frozenset(own | {"table"}), heads, with_table, block_tokens=self._block_tokens)
        listed = [list_settings(name, available, temperature) for name in METHODS[self.kind]]
        return [Row(self, *each) for each in interleave(listed)]

    def default(self, gamma: int) -> "Row":
        """Return the default setting for comparing sources, which drafts `gamma` tokens (heads: a fixed tree)."""
        if self.kind == "heads":
            return Row(self, "medusa", {"tree": "2x1"})
        gamma = min(gamma, self._block_tokens or gamma)
        return Row(self, "speculative", {"gamma": gamma} | ({"parallel": True} if self.kind == "parallel" else {}))

    @property
    def _block_tokens(self) -> int | None:
        """Number of draft tokens of a DFlash drafter; None for other sources."""
        return draft_tokens_of(folder_of(str(self.artifact))) if self.kind == "dflash" else None


class Row(NamedTuple):
    """Decoding method with its options and its source of draft tokens."""

    source: Source
    method: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """Label of the setting and its source, which is unique in an evaluation."""
        return f"{format_setting(self.method, self.options)} ({self.source.name})"


class Prompts(NamedTuple):
    """Statistics of the prompts."""

    answered: int
    """Number of prompts for generating training responses."""
    held_out: int
    """Number of held-out prompts that are short enough for measurements."""
    tokens: float
    """Mean number of tokens of the held-out prompts, including the prompt template."""


def prepare_prompts(recipe: ForgeRecipe, base: QuickstartRecipe, out: Path) -> Prompts:
    """Write the target's model directory and the prompt files, and return statistics of the prompts.

    Raises ValueError if there are too few prompts, if `out` contains a run of another recipe, or if the target's model
    family is not supported.
    """
    check_family(config := load_config(recipe.target))
    if fault := tree_fault(config):
        raise ValueError(f"`forge` compares methods with token trees, but {fault}: use `train` and `evaluate` instead")
    target, corpus = out / "target", out / "corpus"
    if (out / COSTS_FILE).is_file():
        check_folder(out / "forge.yaml", recipe, ("hours", "more_hours", "out", *ENGINE_FIELDS))
    elif (out / "forge.yaml").is_file():  # an early interruption: a different recipe may use the directory
        shutil.rmtree(corpus, ignore_errors=True)
        target.unlink() if target.is_symlink() else shutil.rmtree(target, ignore_errors=True)
    write_recipe(recipe, out / "forge.yaml")
    if not target.is_dir():
        make_target(recipe.target, target)
    make_corpus(base, corpus, min_heldout=MIN_BATCHES * max(recipe.batch))
    report, heldout = load_json(corpus / "report.json", "conversations"), corpus / "heldout.jsonl"
    answered, batch, most = report["conversations"] - report["heldout"], max(recipe.batch), recipe.max_prompt_tokens
    tokenizer, evaluation = load_tokenizer(str(target)), base.evaluate
    template = get_template(evaluation.template, tokenizer, evaluation.template_options)
    prompts = load_prompts(str(heldout), template, tokenizer, report["heldout"], most)
    if answered < MIN_ANSWERS or len(prompts) < MIN_BATCHES * batch:
        raise ValueError(
            f"a forge with `batch` {batch} requires at least {MIN_ANSWERS} prompts and {MIN_BATCHES * batch} held-out "
            f"prompts of at most {most} tokens, got {answered} and {len(prompts)} (of {report['heldout']}); "
            f"`heldout_share` is {recipe.heldout_share:g}"
        )
    if not (turned := corpus / REVERSED_HELDOUT).is_file():  # a new file would invalidate measurements
        atomic_text(turned, "".join(reversed(heldout.read_text().splitlines(keepends=True))))
    return Prompts(answered, len(prompts), sum(len(ids) for _, ids in prompts) / len(prompts))


def measure_costs(base: QuickstartRecipe, out: Path, prompts: int) -> dict[str, Any]:
    """Measure or load the times of the target's forward passes and answers. Return them with the model shape."""
    path, answers = out / COSTS_FILE, min(_PROBED, prompts)
    if path.is_file():
        return dict(load_json(path, "seconds_per_answer"))
    began = time.monotonic()
    model = load_target(base.evaluate)
    loading = time.monotonic() - began
    shaped = meta_model(model.config)
    head, inner = shaped.get_output_embeddings().weight, shaped.get_input_embeddings().weight
    count = sum(weight.numel() for weight in shaped.parameters())
    count -= head.numel() + (0 if head is inner else inner.numel())
    layers = model.config.num_hidden_layers
    shape = ModelShape(layers, count / layers, model.config.hidden_size, len(head))
    curve = measure_forwards(wrap_model(model, share=True), _CONTEXT)
    costs = {"shape": asdict(shape), "nodes": curve.nodes, "seconds": curve.seconds, "eagle": False, "dflash": False}
    with suppress(ValueError), torch.device("meta"):  # EAGLE-3 does not support the target
        EagleHeads.for_target(model.config)
        costs["eagle"] = True
    with suppress(ValueError), torch.device("meta"):
        DFlashHeads.for_target(model.config.get_text_config(decoder=True), 0, 2, layers=default_layers(layers))
        costs["dflash"] = True
    del model, head, inner  # the target is loaded again for the answers
    gc.collect()
    torch.cuda.empty_cache()
    probe = answers_of(base, answers, "probe")
    Path(probe.out).unlink(missing_ok=True)
    began = time.monotonic()
    run_regenerate(probe)
    seconds = time.monotonic() - began
    costs["seconds_per_answer"] = max(seconds - loading, seconds / 2) / answers
    atomic_text(path, json.dumps(costs, indent=1) + "\n")
    return costs


def kind_of(drafter: Path) -> Kind:
    """Return the kind of a drafter; raise ValueError if the directory does not contain a model."""
    if is_eagle(drafter):
        return "eagle"
    if drafts_blocks(drafter):
        return "dflash"
    return "drafter" if is_adapter(drafter) or mask_token(load_config(drafter)) is None else "parallel"


def base_of(recipe: ForgeRecipe) -> QuickstartRecipe:
    """Return the recipe `realpair` with the target, prompts and output directory of a forge recipe."""
    values: dict[str, Any] = read_extended(find_recipe("realpair"))
    values |= {"out": recipe.out, "target": recipe.target, "seed": recipe.seed}
    own = {"template": recipe.template, "template_options": recipe.template_options}
    for name in ("answers", "evaluate"):
        values[name] |= own
    values["evaluate"]["dtype"] = recipe.dtype
    for name in ("eagle", "drafter", "heads", "table"):
        values[name]["data"] = values[name]["data"] | own
    if recipe.prompts:
        values["corpus"] |= {"files": recipe.prompts, "megabytes": 0}
    values["corpus"]["heldout_share"] = recipe.heldout_share
    return resolve(parse_recipe(values, "forge", kinds=[QuickstartRecipe]))


def with_heldout(base: QuickstartRecipe, answers: int) -> QuickstartRecipe:
    """Increase the held-out share of all training data so that even with few `answers`, some are held out."""
    stages: dict[str, Any] = {}
    for name in ("eagle", "drafter", "heads", "table"):
        stage = getattr(base, name)
        share = max(stage.data.heldout_share, _HELD_OUT / answers)
        stages[name] = stage.model_copy(update={"data": stage.data.model_copy(update={"heldout_share": share})})
    return base.model_copy(update=stages)


def answers_of(base: QuickstartRecipe, count: int, name: str) -> RegenerateRecipe:
    """Return the recipe that generates the target's answers to `count` prompts."""
    return base.answers.model_copy(update={"limit": count, "out": f"{base.out}/{name}.jsonl"})


def training_of(
    base: QuickstartRecipe, candidate: Candidate, vocabulary: int, steps: int, out: Path, processes: int = 1
) -> DrafterRecipe | HeadsRecipe:
    """Return the training recipe of a candidate. The global batch size is proportional to the number of processes."""
    stage = {"eagle": base.eagle, "dflash": base.eagle, "heads": base.heads}.get(candidate.kind, base.drafter)
    assert stage is not None
    train = stage.train.model_copy(update={"steps": steps, "global_batch": stage.train.global_batch * processes})
    measure = stage.measure.model_copy(update={"prompts": 0})  # the forge runs its own evaluations
    changes: dict[str, Any] = {"out": str(out), "train": train, "measure": measure}
    full = {} if vocabulary > DRAFT_VOCABULARY else {"vocabulary": None}
    if isinstance(stage, DrafterRecipe):
        model = stage.model.model_copy(update={"layers": list(candidate.layers), **full})
        teacher = stage.teacher.model_copy(update={"top_k": min(stage.teacher.top_k, vocabulary)})
        changes |= {"parallel": ParallelSection.model_validate({"tokens": 4})} if candidate.kind == "parallel" else {}
        return stage.model_copy(update=changes | {"model": model, "teacher": teacher})
    if candidate.kind == "dflash":  # with the layers of EAGLE-3, so that one evaluation can compare both
        layers = default_layers(load_config(stage.target).num_hidden_layers)
        changes |= {"architecture": "dflash", "num_heads": _BLOCK_TOKENS, "layers": layers}
    return stage.model_copy(update=changes | full)


def evaluation_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    rows: Sequence[Row],
    workload: Workload,
    prompts: int,
    prompts_file: str = "heldout.jsonl",
) -> EvaluateRecipe:
    """Return a recipe that evaluates the baseline and the given rows on held-out prompts."""
    values = base.evaluate.model_dump(mode="json")
    drafters = list(dict.fromkeys(row.source.artifact for row in rows if row.source.kind not in (None, "heads")))
    methods: list[dict[str, Any]] = [{"method": "autoregressive"}]
    for row in rows:
        number = 1 + drafters.index(row.source.artifact) if row.source.artifact in drafters else 1
        options = row.options | ({"drafter": number} if number > 1 else {})
        methods.append({"method": row.method, "label": row.label, "options": options})
    values |= {"out": f"{base.out}/{name}.json", "methods": methods, "compare_with_transformers": False}
    values |= {"drafter": next(iter(drafters), None), "more_drafters": drafters[1:]}
    values["heads"] = next((row.source.artifact for row in rows if row.source.kind == "heads"), None)
    values["table"] = base.table.out if any("table" in method_config(*row[1:]).needs for row in rows) else None
    values |= {"limit": prompts, "temperature": workload.temperature, "batch": workload.batch}
    values |= {"max_new_tokens": recipe.new_tokens, "max_prompt_tokens": recipe.max_prompt_tokens}
    values |= {"prompts": f"{base.out}/corpus/{prompts_file}"}
    return EvaluateRecipe.model_validate(values)

"""Stages of a forge: its prompts, the measured costs of the target, and the recipes that it writes and runs."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....checkpoints.heads.eagle import EagleHeads
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.storage.safe_read import load_json
from ....checkpoints.verify.model_files import is_adapter, load_config
from ....data.prompts import load_prompts
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.tuning.costs import measure_forwards
from ....decode.evaluation.tuning.plan import (
    EXPECTED_ACCEPTANCE,
    MIN_ANSWERS,
    MIN_BATCHES,
    Candidate,
    Kind,
    ModelShape,
    Seconds,
    best_draft,
)
from ....decode.evaluation.tuning.space import Space
from ....decode.evaluation.tuning.tuner import Measurement, Workload
from ....decode.methods import Parts, method_config
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...schema.evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import find_recipe, load_recipe, parse_recipe, read_extended, write_recipe
from ...schema.training import DrafterRecipe, HeadsRecipe, ParallelSection
from ..evaluation.tune import count_runs, sampling_of, tuned_as
from ..training.regenerate import run_regenerate
from .in_engine import ENGINE_FIELDS
from .quickstart import make_corpus, make_target, resolve

DRAFT_VOCABULARY = 8192
"""Size of the draft vocabulary if that of the target is larger."""
Row = tuple[str, dict[str, Any]]
UNTRAINED: list[Row] = [("prompt-lookup", {"min_ngram": 2}), ("suffix", {})]
WITH_ANSWERS: list[Row] = [("suffix", {"datastore": "table"}), ("suffix", {"datastore": "table", "max_nodes": 4})]
REVERSED_HELDOUT = "heldout-reversed.jsonl"
"""Held-out prompts in reverse order, so that settings are confirmed on other prompts than those that chose them."""
_MAX_LENGTH = 6
_PROBED = 24  # answers that are timed
_CONTEXT = 200


class Prompts(NamedTuple):
    """Sizes of the prompts."""

    answered: int
    """Number of prompts that the target may answer."""
    held_out: int
    """Number of held-out prompts that are short enough to measure with."""
    tokens: float
    """Mean length of a held-out prompt, with the template."""


class Ledger:
    """Seconds that each stage took, in all processes of a forge."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = load_json(path, "seconds")["seconds"] if path.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a stage, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
            atomic_text(self._path, json.dumps({"seconds": self.seconds}, indent=1) + "\n")

    @property
    def spent(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())


def prepare_prompts(recipe: ForgeRecipe, base: QuickstartRecipe, out: Path) -> Prompts:
    """Write the target's folder and the prompts; return the sizes of the prompts.

    Raises:
        ValueError: Too few prompts, or a folder of another forge.
    """
    written, target, corpus = out / "forge.yaml", out / "target", out / "corpus"
    if known := written.is_file():
        earlier = load_recipe(str(written), kinds=("forge",)).model_dump()
        new, free = recipe.model_dump(), ("hours", "more_hours", "out", *ENGINE_FIELDS)
        if changed := [name for name in new if name not in free and new[name] != earlier[name]]:
            raise ValueError(
                f"{out} holds a forge with another `{changed[0]}` ({earlier[changed[0]]!r}, not "
                f"{new[changed[0]]!r}): choose another folder with --out"
            )
    write_recipe(recipe, written)  # first, since it identifies the folder
    if not target.is_dir():
        assert isinstance(base.target, str)
        make_target(base.target, target)
    make_corpus(base, corpus)
    try:
        return _read_prompts(recipe, base, corpus)
    except ValueError:
        if not known:  # allow another recipe in the folder
            shutil.rmtree(corpus)
            target.unlink() if target.is_symlink() else shutil.rmtree(target)
            written.unlink()
        raise


def _read_prompts(recipe: ForgeRecipe, base: QuickstartRecipe, corpus: Path) -> Prompts:
    report, heldout = load_json(corpus / "report.json", "conversations"), corpus / "heldout.jsonl"
    answered, batch, most = report["conversations"] - report["heldout"], max(recipe.batch), recipe.max_prompt_tokens
    tokenizer = load_tokenizer(f"{recipe.out}/target")
    found = load_prompts(str(heldout), base.evaluate.template, tokenizer, report["heldout"], most)
    if answered < MIN_ANSWERS or len(found) < MIN_BATCHES * batch:
        raise ValueError(
            f"{answered} prompts, and {len(found)} of {report['heldout']} held-out prompts with at most {most} tokens: "
            f"with `batch` {batch} at least {MIN_ANSWERS} and {MIN_BATCHES * batch} are needed; `heldout_share` is "
            f"{recipe.heldout_share:g}"
        )
    if not (turned := corpus / REVERSED_HELDOUT).is_file():  # a new file would invalidate measurements
        atomic_text(turned, "".join(reversed(heldout.read_text().splitlines(keepends=True))))
    return Prompts(answered, len(found), sum(len(ids) for _, ids in found) / len(found))


def measure_costs(base: QuickstartRecipe, out: Path, prompts: int) -> dict[str, Any]:
    """Measure the target's forwards and answers once; return its shape and these costs."""
    path, answers = out / "costs.json", min(_PROBED, prompts)
    if path.is_file():
        return dict(load_json(path, "seconds_per_answer"))
    began = time.monotonic()
    model = load_target(base.evaluate)
    loading = time.monotonic() - began
    head, inner = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    count = sum(weight.numel() for weight in model.parameters())
    count -= head.numel() + (0 if head is inner else inner.numel())
    layers = model.config.num_hidden_layers
    shape = ModelShape(layers, count / layers, model.config.hidden_size, len(head))
    curve = measure_forwards(wrap_model(model), Parts(), _CONTEXT).target
    found = {"shape": asdict(shape), "nodes": curve.nodes, "seconds": curve.seconds, "eagle": False}
    with suppress(ValueError):  # EAGLE-3 does not support the target
        EagleHeads.for_target(model.config)
        found["eagle"] = True
    del model, head, inner  # loaded again for the answers
    gc.collect()
    torch.cuda.empty_cache()
    probe = answers_of(base, answers, "probe")
    Path(probe.out).unlink(missing_ok=True)
    began = time.monotonic()
    run_regenerate(probe)
    seconds = time.monotonic() - began
    found["seconds_per_answer"] = max(seconds - loading, seconds / 2) / answers
    atomic_text(path, json.dumps(found, indent=1) + "\n")
    return found


def list_rows(kind: Kind, seconds: Seconds, shape: ModelShape, cost: float | None = None) -> list[Row]:
    """List the settings with which a candidate is measured before they are tuned.

    Args:
        seconds: time of a forward of the target by its number of tokens.
        cost: cost of a draft token in forwards of the target; by default that of a layer.
    """
    candidate = Candidate("", kind, (), shape.layer_parameters / shape.parameters if cost is None else cost)
    length = best_draft(candidate, seconds, [EXPECTED_ACCEPTANCE] * _MAX_LENGTH)[0]
    suffix = {"fallback": "drafter", "datastore": "table", "max_nodes": 6, "draft_depth": 2}
    if kind == "drafter":
        return [("speculative", {"gamma": length}), ("suffix", suffix)]
    if kind == "parallel":
        return [("speculative", {"gamma": max(2, length), "parallel": True}), ("suffix", suffix)]
    if kind == "eagle":
        chain = ("speculative", {"gamma": min(2, length)})
        return [chain, ("dynamic-tree", {}), ("suffix", suffix | {"min_prob": 0.15})]
    slim = ("slim-s", {"num_sequences": 8, "min_prob": 0.05})
    return [("medusa", {"tree": "2x1"}), slim, ("suffix", {"fallback": "heads", "datastore": "table"})]


def kind_of(drafter: Path) -> Kind:
    """Return the kind of a given drafter. Raises ValueError if the folder holds no model."""
    if is_eagle(drafter):
        return "eagle"
    return "drafter" if is_adapter(drafter) or mask_token(load_config(drafter)) is None else "parallel"


def label_of(row: Row) -> str:
    """Return the label of a setting."""
    method, options = row
    return " ".join([method, *(name if value is True else str(value) for name, value in options.items())])


def combine_rows(
    measurements: Sequence[Measurement], trained: Mapping[str, dict[str, Any]], given: Sequence[str]
) -> tuple[list[Row], dict[str, Any]]:
    """Combine settings of several candidates into rows of one evaluation, and the artifacts that it opens.

    Args:
        trained: artifacts of trained candidates, by name.
        given: drafters of the recipe.
    """
    rows: list[Row] = []
    drafters: list[str] = []
    parts: dict[str, Any] = {"drafters": drafters}
    for each in measurements:
        own = {"drafters": [each.name]} if each.name in given else trained.get(each.name, {})
        options = {name: value for name, value in each.options.items() if name != "drafter"}
        for drafter in own.get("drafters", []):
            drafters += [] if drafter in drafters else [drafter]
            options |= {"drafter": number} if (number := 1 + drafters.index(drafter)) > 1 else {}
        parts |= {"heads": own["heads"]} if "heads" in own else {}
        rows.append((each.method, options))
    return rows, parts | {"table": any("table" in method_config(*row).needs for row in rows)}


def base_of(recipe: ForgeRecipe) -> QuickstartRecipe:
    """Return the stages of `realpair` for the recipe's target, prompts and folder."""
    values: dict[str, Any] = read_extended(find_recipe("realpair"))
    values |= {"out": recipe.out, "target": recipe.target, "seed": recipe.seed}
    for name in ("answers", "evaluate"):
        values[name]["template"] = recipe.template
    for name in ("eagle", "drafter", "heads", "table"):
        values[name]["data"] = values[name]["data"] | {"template": recipe.template}
    if recipe.prompts:
        values["corpus"] |= {"files": recipe.prompts, "megabytes": 0}
    values["corpus"]["heldout_share"] = recipe.heldout_share
    base = parse_recipe(values, "forge", kinds=("quickstart",))
    assert isinstance(base, QuickstartRecipe)
    return resolve(base)


def answers_of(base: QuickstartRecipe, count: int, name: str) -> RegenerateRecipe:
    """Return the recipe of the target's answers to so many prompts."""
    return base.answers.model_copy(update={"limit": count, "out": f"{base.out}/{name}.jsonl"})


def training_of(
    base: QuickstartRecipe, candidate: Candidate, vocabulary: int, steps: int, out: Path, processes: int = 1
) -> DrafterRecipe | HeadsRecipe:
    """Return the recipe of a candidate's training; the global batch grows with the number of processes."""
    stage = {"eagle": base.eagle, "heads": base.heads}.get(candidate.kind, base.drafter)
    assert stage is not None
    train = stage.train.model_copy(update={"steps": steps, "global_batch": stage.train.global_batch * processes})
    measure = stage.measure.model_copy(update={"prompts": 0})  # a forge measures by itself
    changes: dict[str, Any] = {"out": str(out), "train": train, "measure": measure}
    full = {} if vocabulary > DRAFT_VOCABULARY else {"vocabulary": None}
    if isinstance(stage, DrafterRecipe):
        model = stage.model.model_copy(update={"layers": list(candidate.layers), **full})
        teacher = stage.teacher.model_copy(update={"top_k": min(stage.teacher.top_k, vocabulary)})
        changes |= {"parallel": ParallelSection.model_validate({"tokens": 4})} if candidate.kind == "parallel" else {}
        return stage.model_copy(update=changes | {"model": model, "teacher": teacher})
    return stage.model_copy(update=changes | full)


def evaluation_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    rows: Sequence[Row],
    workload: Workload,
    prompts: int,
    *,
    drafters: Sequence[str] = (),
    heads: str | None = None,
    table: bool = False,
    labels: Sequence[str] = (),
    source: str = "heldout.jsonl",
) -> EvaluateRecipe:
    """Return the evaluation of the baseline and of settings on held-out prompts; `labels` if theirs are not unique."""
    values = base.evaluate.model_dump(mode="json")
    methods = [
        {"method": row[0], "label": label, "options": row[1]}
        for row, label in zip(rows, labels or map(label_of, rows), strict=True)
    ]
    values |= {"out": f"{base.out}/{name}.json", "methods": [{"method": "autoregressive"}, *methods]}
    values |= {"drafter": next(iter(drafters), None), "more_drafters": list(drafters[1:]), "heads": heads}
    values |= {"limit": prompts, "temperature": workload.temperature, "batch": workload.batch}
    values |= {"max_new_tokens": recipe.new_tokens, "max_prompt_tokens": recipe.max_prompt_tokens}
    values |= {"prompts": f"{base.out}/corpus/{source}"}
    values |= {"table": base.table.out if table else None, "compare_with_transformers": False}
    return EvaluateRecipe.model_validate(values)


def tuning_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    measured: Sequence[Measurement],
    trained: Mapping[str, dict[str, Any]],
    workload: Workload,
    prompts: int,
) -> EvaluateRecipe:
    """Return the recipe that tunes the methods with which a candidate was measured."""
    rows, parts = combine_rows(measured, trained, recipe.drafters)
    kept = {"parallel", "fallback"}
    fixed = [(method, {key: options[key] for key in kept & options.keys()}) for method, options in rows]
    labels = [f"{number} {method}" for number, (method, _) in enumerate(fixed)]
    return evaluation_of(base, recipe, name, fixed, workload, prompts, labels=labels, **parts)


def affordable_space(recipe: EvaluateRecipe, answers: int) -> Space | None:
    """Return the search space that decodes at most so many answers; None if there is none."""
    names = [tuned_as(row, sampling_of(recipe)) for row in recipe.methods[1:]]
    for prompts in (8, 4, 2, 1):
        space = Space(nodes=32, decoded_prompts=prompts, probed_prompts=min(4, prompts))
        if count_runs(names, recipe.limit, recipe, space) <= answers:
            return space
    return None

"""The recipes that a forge writes: of answers, of each candidate's training, of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.storage.draft_vocabulary import mask_token
from ....checkpoints.verify.model_files import is_adapter, load_config
from ....decode.methods import method_options, needs_of
from ...schema.evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from ...schema.forge import ForgeRecipe
from ...schema.loading import find_recipe, parse_recipe, read_extended
from ...schema.training import DrafterRecipe, HeadsRecipe, ParallelSection
from .quickstart import resolve
from .rules import Candidate, Kind, Measured, Place

PROPOSED = 8192
"""Tokens that drafts are chosen of, where the vocabulary is larger."""
Row = tuple[str, dict[str, Any]]
UNTRAINED: list[Row] = [("prompt-lookup", {"min_ngram": 2}), ("suffix", {})]
WITH_TEXTS: list[Row] = [("suffix", {"datastore": "table"}), ("suffix", {"datastore": "table", "max_nodes": 4})]
_CHAINS: list[Row] = [("speculative", {"gamma": gamma}) for gamma in (1, 2, 4)]
ROWS: dict[Kind, list[Row]] = {
    "drafter": [*_CHAINS, ("suffix", {"fallback": "drafter", "datastore": "table", "max_nodes": 6, "draft_depth": 2})],
    "parallel": [
        *(("speculative", {"gamma": gamma, "parallel": True}) for gamma in (2, 4)),
        ("suffix", {"fallback": "drafter", "datastore": "table", "max_nodes": 6, "draft_depth": 2}),
    ],
    "eagle": [
        *_CHAINS[:2],
        ("dynamic-tree", {}),
        ("suffix", {"fallback": "drafter", "datastore": "table", "max_nodes": 6, "draft_depth": 2, "min_prob": 0.15}),
    ],
    "heads": [
        ("medusa", {"tree": "2x1"}),
        ("slim-s", {"num_sequences": 8, "min_prob": 0.05}),
        ("suffix", {"fallback": "heads", "datastore": "table"}),
    ],
}
"""By what a candidate is, the settings that it is measured with."""
_LENGTHS = {"max_nodes": (2, 3, 4, 6, 8, 12, 16), "gamma": (1, 2, 3, 4, 6, 8), "num_sequences": (4, 8, 16, 32)}
"""Of drafts, by option, that the fastest row is tuned over."""


def kind_of(drafter: Path) -> Kind:
    """What the folder of a drafter holds. Raises ValueError: no model."""
    if is_eagle(drafter):
        return "eagle"
    return "drafter" if is_adapter(drafter) or mask_token(load_config(drafter)) is None else "parallel"


def given_rows(drafter: Path) -> list[Row]:
    """The settings of a drafter before there are answers to look up. Raises ValueError: no model."""
    return [row for row in ROWS[kind_of(drafter)] if "table" not in needs_of(*row)]


def label_of(row: Row) -> str:
    """The name of a row."""
    method, options = row
    return " ".join([method, *(name if value is True else str(value) for name, value in options.items())])


def row_named(label: str) -> Row:
    """The other way round."""
    rows = [*UNTRAINED, *WITH_TEXTS, *(row for kind in ROWS.values() for row in kind)]
    rows += [near for row in rows for near in rows_near(row)]
    return next(row for row in rows if label_of(row) == label)


def rows_near(row: Row) -> list[Row]:
    """A row with a shorter draft, and with two longer ones."""
    method, options = row
    name = next((name for name in _LENGTHS if name in method_options(method, {})), None)
    if name is None:
        return []
    at, lengths = method_options(method, options)[name], _LENGTHS[name]
    near = [each for each in lengths if each < at][-1:] + [each for each in lengths if each > at][:2]
    return [(method, options | {name: each}) for each in near]


def around(close: Sequence[Measured]) -> list[Measured]:
    """Rivals, the fastest first, and that one with other lengths of its drafts, of which nothing was measured yet."""
    own = [row_named(each.label) for each in close if each.name == close[0].name]
    known = [(method, method_options(method, options)) for method, options in own]
    near = [row for row in rows_near(own[0]) if (row[0], method_options(*row)) not in known]
    return [*close, *(replace(close[0], label=label_of(row)) for row in near)]


def together(
    some: Sequence[Measured], trained: Mapping[str, dict[str, Any]], drafters: Sequence[str]
) -> tuple[list[Row], dict[str, Any]]:
    """Rows that were measured apart, as rows of one evaluation, and the artifacts that it reads: of what was trained,
    by name, or of drafters that were given."""
    rows: list[Row] = []
    read: list[str] = []
    given: dict[str, Any] = {"drafters": read}
    for each in some:
        method, options = row_named(each.label)
        own = {"drafters": [each.name]} if each.name in drafters else trained.get(each.name, {})
        for drafter in own.get("drafters", []):
            read += [] if drafter in read else [drafter]
            options = options | ({"drafter": number} if (number := 1 + read.index(drafter)) > 1 else {})
        given |= {"heads": own["heads"]} if "heads" in own else {}
        rows.append((method, options))
    return rows, given | {"table": any("table" in needs_of(*row) for row in rows)}


def base_of(recipe: ForgeRecipe) -> QuickstartRecipe:
    """The stages of `realpair` for this target, its questions and this folder. Raises ValueError: as `parse_recipe`."""
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
    """The target's own answers to so many questions."""
    return base.answers.model_copy(update={"limit": count, "out": f"{base.out}/{name}.jsonl"})


def training_of(
    base: QuickstartRecipe, candidate: Candidate, vocabulary: int, steps: int, out: Path, processes: int = 1
) -> DrafterRecipe | HeadsRecipe:
    """A candidate's training with so many steps, each of as many blocks as there are processes."""
    stage = {"eagle": base.eagle, "heads": base.heads}.get(candidate.kind, base.drafter)
    assert stage is not None
    train = stage.train.model_copy(update={"steps": steps, "global_batch": stage.train.global_batch * processes})
    measure = stage.measure.model_copy(update={"prompts": 0})  # a forge measures by itself
    changes: dict[str, Any] = {"out": str(out), "train": train, "measure": measure}
    whole = {} if vocabulary > PROPOSED else {"vocabulary": None}
    if isinstance(stage, DrafterRecipe):
        model = stage.model.model_copy(update={"layers": list(candidate.layers), **whole})
        teacher = stage.teacher.model_copy(update={"top_k": min(stage.teacher.top_k, vocabulary)})
        changes |= {"parallel": ParallelSection.model_validate({"tokens": 4})} if candidate.kind == "parallel" else {}
        return stage.model_copy(update=changes | {"model": model, "teacher": teacher})
    return stage.model_copy(update=changes | whole)


def evaluation_of(
    base: QuickstartRecipe,
    recipe: ForgeRecipe,
    name: str,
    rows: Sequence[Row],
    place: Place,
    prompts: int,
    *,
    drafters: Sequence[str] = (),
    heads: str | None = None,
    table: bool = False,
    labels: Sequence[str] = (),
    asked: str = "heldout.jsonl",
) -> EvaluateRecipe:
    """Plain decoding and rows beside it, on held-out questions; `labels` where those of the rows are not distinct."""
    values = base.evaluate.model_dump(mode="json")
    labelled = [{"method": row[0], "label": label_of(row), "options": row[1]} for row in rows]
    for row, label in zip(labelled, labels, strict=bool(labels)):
        row["label"] = label
    first, *more = [*drafters, None]
    values |= {"out": f"{base.out}/{name}.json", "methods": [{"method": "autoregressive"}, *labelled]}
    values |= {"drafter": first, "more_drafters": [each for each in more if each is not None], "heads": heads}
    values |= {"limit": prompts, "temperature": place.temperature, "batch": place.batch}
    values |= {"max_new_tokens": recipe.new_tokens, "max_prompt_tokens": recipe.max_prompt_tokens}
    values |= {"prompts": f"{base.out}/corpus/{asked}"}
    values |= {"table": base.table.out if table else None, "compare_with_transformers": False}
    return EvaluateRecipe.model_validate(values)

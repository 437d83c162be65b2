"""`--plan`: what an evaluation or a paper's recipe would decode, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....decode.methods import method_options, needs_of
from ...report.tables import DASH, Cell, Column, Table, options_text
from ...schema.evaluation import EvaluateRecipe
from ...schema.papers import PaperRecipe
from ...session.terminal import console


def show_plan(recipe: EvaluateRecipe | PaperRecipe, pair: str | None = None) -> None:
    """Print models, prompts, rows and the most forwards that they can take.

    Raises:
        ValueError: an unknown method or option.
    """
    if isinstance(recipe, EvaluateRecipe):
        _show_evaluation("", recipe)
        return
    used = recipe.on_pair(pair) if pair is not None else recipe
    what = f"{recipe.where} of {recipe.paper}: experiment {recipe.experiment}, {len(recipe.claims)} claims"
    console().print(what, markup=False)
    if used.experiment == "evaluate":
        runs = used.evaluations()
        for name, evaluation in runs.items():
            _show_evaluation(name, evaluation)
        if len(runs) > 1:
            totals = [forwards_of(evaluation) for evaluation in runs.values()]
            _show_total("all runs", sum(each[0] for each in totals), sum(each[1] for each in totals))
    else:
        if used.evaluate is not None:
            console().print(_models(used.evaluate), markup=False)
        for key, value in used.settings.items():
            console().print(f"{key}: {value}", markup=False)
    if recipe.not_rerun:
        console().print(f"not run again: {recipe.not_rerun}", markup=False)


def forwards_of(recipe: EvaluateRecipe) -> tuple[int, int]:
    """The most forwards of the target, and of drafters, that the rows can take; prompts are read besides."""
    texts, tokens = recipe.limit * recipe.repeats, recipe.max_new_tokens
    drafting = [drafting_of(row.method, row.options, 1 + len(recipe.more_drafters)) for row in recipe.methods]
    target = sum(_scoring_of(row.method, row.options, tokens) for row in recipe.methods)
    return texts * target, texts * tokens * sum(drafting)


def drafting_of(method: str, options: Mapping[str, Any], drafters: int = 1) -> int:
    """Forwards of drafters in a step at most.

    Args:
        drafters: how many there are, for methods in which each of them drafts.

    Raises:
        ValueError: an unknown method or option.
    """
    settings = method_options(method, dict(options))
    if "drafter" not in needs_of(method, settings):
        return 0
    levels = str(settings["k_config"]).count("x") + 1 if "k_config" in settings else int(settings["gamma"])
    return levels * (drafters if method == "specinfer" else 1)


def _scoring_of(method: str, options: Mapping[str, Any], tokens: int) -> int:
    """Forwards of the target for a text at most: one a token, but beams of the target itself take one for each token
    that they propose and another that reads them."""
    settings = method_options(method, dict(options))
    if method not in ("beam", "mjgd"):
        return tokens
    gamma = int(settings.get("gamma", tokens))
    return -(-tokens // gamma) * (gamma + 1)


def _show_evaluation(name: str, recipe: EvaluateRecipe) -> None:
    prompts = f"{recipe.limit} prompts of {recipe.prompts}, template {recipe.template}"
    caption = f"{prompts}, {recipe.max_new_tokens} new tokens each at most, {recipe.repeats} run(s)"
    columns = [Column(heading, numeric=False) for heading in ("row", "method", "options")]
    columns += [Column("temperature"), Column("drafter's forwards a step")]
    rows = []
    for label, row in zip(recipe.labels(), recipe.methods, strict=True):
        temperature = recipe.temperature if row.temperature is None else row.temperature
        drafting = str(drafting_of(row.method, row.options, 1 + len(recipe.more_drafters)) or DASH)
        rows.append([*map(Cell, (label, row.method, options_text(row.model_dump()), f"{temperature:g}", drafting))])
    console().print(Table(f"{name}: {caption}" if name else caption, columns, rows).rich())
    console().print(_models(recipe), markup=False)
    _show_total("rows", *forwards_of(recipe))


def _models(recipe: EvaluateRecipe) -> str:
    parts = {"target": recipe.target, "drafter": recipe.drafter, "heads": recipe.heads, "table": recipe.table}
    named = [f"{part} {source}" for part, source in parts.items() if source is not None]
    return ", ".join([*named, *(f"drafter {source}" for source in recipe.more_drafters)])


def _show_total(what: str, target: int, drafter: int) -> None:
    console().print(f"{what}: at most {target:,} forwards of the target and {drafter:,} of drafters", markup=False)

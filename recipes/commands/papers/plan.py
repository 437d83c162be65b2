"""`--plan`: what an evaluation or a paper's recipe would decode and how long that takes, from the target alone."""

from __future__ import annotations

from ....decode.methods import method_options
from ...report.tables import Cell, Column, Table, options_text
from ...schema.evaluation import EvaluateRecipe
from ...schema.papers import PaperRecipe
from ...session.terminal import console
from ..evaluation.estimate import evaluation_runs, planned_time


def show_plan(recipe: EvaluateRecipe | PaperRecipe, pair: str | None = None) -> None:
    """Print models, prompts, rows, the most tokens that they decode and the time. Raises ValueError: an unknown method
    or option."""
    if isinstance(recipe, EvaluateRecipe):
        _show_evaluation("", recipe)
        return
    used = recipe.on_pair(pair) if pair is not None else recipe
    lines = [f"{recipe.where} of {recipe.paper}: experiment {recipe.experiment}, {len(recipe.claims)} claims"]
    lines += [f"not run again: {recipe.not_rerun}"] if recipe.not_rerun else []
    if used.experiment != "evaluate":
        lines += [f"{key}: {value}" for key, value in used.settings.items()]
    console().print("\n".join(lines))
    for name, evaluation in (used.evaluations() if used.experiment == "evaluate" else {"": used.evaluate}).items():
        _show_evaluation(name, evaluation)


def _show_evaluation(name: str, recipe: EvaluateRecipe) -> None:
    prompts = f"{name}: {recipe.limit} prompts" if name else f"{recipe.limit} prompts"
    sizes = f"{recipe.max_new_tokens} new tokens each at most, {recipe.repeats} run(s)"
    about = f"{prompts} of {recipe.prompts}, template {recipe.template}, {sizes}"
    console().print(about, soft_wrap=True)
    columns = [Column(heading, numeric=False) for heading in ("row", "method", "options")]
    rows = []
    for label, row in zip(recipe.labels(), recipe.methods, strict=True):
        method_options(row.method, row.options)
        texts = (label, row.method, options_text(row.model_dump()), f"{recipe.temperature_of(row):g}")
        rows.append([*map(Cell, texts)])
    console().print(Table("", [*columns, Column("temperature")], rows).rich())
    parts = {"target": recipe.target, "drafter": recipe.drafter, "heads": recipe.heads, "table": recipe.table}
    named = [f"{part} {source}" for part, source in parts.items() if source is not None]
    named += [f"drafter {source}" for source in recipe.more_drafters]
    tokens = recipe.limit * recipe.repeats * recipe.max_new_tokens * len(recipe.methods)
    console().print(f"{', '.join(named)}; at most {tokens:,} tokens in all rows", soft_wrap=True)
    console().print(planned_time(recipe, evaluation_runs(recipe, recipe.limit)), soft_wrap=True)

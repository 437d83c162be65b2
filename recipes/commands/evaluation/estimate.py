"""What would be decoded, and how long that takes, from a few forwards of the target: said before anything heavy."""

from __future__ import annotations

from ....checkpoints.storage.places import here
from ....checkpoints.verify.model_files import quietly
from ....decode.evaluation.measure import PROFILED
from ....decode.evaluation.tuning.costs import measure_forwards
from ....decode.methods import Parts, method_options
from ....decode.models.base import LanguageModel
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...report.tables import Cell, Column, Table, options_text
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import console, duration

_CONTEXT = 64  # tokens of a prompt, where none has been read


def time_words(target: LanguageModel, runs: int, new_tokens: int, context: int = _CONTEXT) -> str:
    """What so many runs take where every text has `new_tokens`, after a prompt of `context` tokens, and is written as
    fast as the target alone writes it."""
    context = max(1, min(context, (target.max_positions - 1) // 2))
    forward = measure_forwards(target, Parts(), context, target_nodes=(1, context), runs=3).target
    seconds = runs * (forward(context) + new_tokens * forward(1))
    each = f"{runs:,} runs of {new_tokens:,} tokens at most, {1e3 * forward(1):.3g} ms each in plain decoding"
    return f"about {duration(seconds)} or less ({each})"


def planned_time(recipe: EvaluateRecipe, runs: int) -> str:
    """`time_words` of a recipe that is not opened: of it the target alone is loaded, if it lies here."""
    if here(recipe.target) is None:
        return f"how long it takes is not known before {recipe.target} lies on this machine"
    with quietly():
        model = load_target(recipe)
    return time_words(wrap_model(model, check=False), runs, recipe.max_new_tokens)


def evaluation_runs(recipe: EvaluateRecipe, prompts: int) -> int:
    """Texts that an evaluation decodes: measured ones, those of `transformers.generate`, and those that show where the
    time of a step goes."""
    greedy = any(recipe.temperature_of(row) == 0 for row in recipe.methods)
    rows = len(recipe.methods) + (recipe.compare_with_transformers and greedy)
    return rows * prompts * recipe.repeats + len(recipe.methods) * min(PROFILED, prompts)


def show_plan(recipe: EvaluateRecipe) -> None:
    """Print models, prompts, rows, the largest number of decoded tokens and the estimated time."""
    sizes = f"{recipe.max_new_tokens} new tokens each at most, {recipe.repeats} run(s)"
    about = f"{recipe.limit} prompts of {recipe.prompts}, template {recipe.template}, {sizes}"
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

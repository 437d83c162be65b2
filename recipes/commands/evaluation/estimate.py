"""How long decoding takes, from a few forwards of the target: said before anything heavy."""

from __future__ import annotations

from ....checkpoints.storage.places import here
from ....checkpoints.verify.model_files import quietly
from ....decode.evaluation.measure import PROFILED
from ....decode.evaluation.replay.costs import measure_forwards
from ....decode.methods import Parts
from ....decode.models.base import LanguageModel
from ....decode.models.loading import wrap_model
from ...assemble.evaluation import load_target
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import duration

_CONTEXT = 64  # tokens of a prompt, where none has been read


def time_words(target: LanguageModel, runs: int, new_tokens: int, context: int = _CONTEXT) -> str:
    """What so many runs take where every text has `new_tokens` and is written as fast as the target alone writes it.

    Args:
        context: tokens of a prompt.
    """
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

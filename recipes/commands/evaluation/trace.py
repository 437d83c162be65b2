"""`draftsmith report --trace`: decode prompts with one row of results and print what became of each draft token."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from ....data.conversations import Turn
from ....data.prompts import stop_ids
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....decode.engine import Limits
from ....decode.evaluation.trace import trace
from ....decode.methods import build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ...assemble.evaluation import entries_of, open_recipe, prompts_of
from ...report.trace import legend, trace_lines, visible
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import EVALUATION, load_results
from ...session.terminal import console
from .recipe import named_rows


def run_trace(results: Path, row: str, question: str | None = None, limit: int = 2) -> None:
    """Decode prompts of results, or one question, with a row (label or method) and print every step."""
    recipe = EvaluateRecipe.model_validate(load_results(results, EVALUATION)["recipe"])
    recipe = recipe.model_copy(update={"methods": named_rows(recipe, [row]), "limit": limit})
    opened, (entry,) = open_recipe(recipe), entries_of(recipe)
    if question is None:
        asked = [(prompt.turns[-1].text, ids) for prompt, ids in prompts_of(recipe, opened.tokenizer)]
    else:
        encode = prompt_renderer(get_template(recipe.template, opened.tokenizer), opened.tokenizer)
        asked = [(question, encode([Turn("user", question)]))]
    method = build_method(entry.method, opened.parts, entry.sampling, **entry.options)
    limits, out = Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer)), console()
    marks = out.color_system is None or out.no_color
    out.print(legend(marks))
    for index, (text, ids) in enumerate(asked):
        steps = trace(opened.target, method, ids, limits, entry.sampling, recipe.seed + index)
        # The text of an encoder-decoder does not continue the prompt.
        before = [] if isinstance(opened.target, Seq2SeqModel) else ids
        out.print(Text(f"\n{entry.label}: {visible(text)}", "bold"))
        for line in trace_lines(steps, opened.tokenizer, before, marks):
            out.print(line)

"""`draftsmith report --trace`: decodes a few prompts with a row of results and shows what became of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....data.conversations import Turn
from ....data.prompts import stop_ids
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....decode.engine import Limits
from ....decode.evaluation.trace import trace
from ....decode.methods import build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ...assemble.evaluation import entries_of, open_recipe, prompts_of
from ...report.trace import describe_steps, show_trace
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import EVALUATION, beside, load_results
from ...session.terminal import console
from .recipe import named_rows


def run_trace(results: Path, row: str, question: str | None = None, limit: int = 2) -> dict[str, Any]:
    """Decode prompts of results, or one question, with a row (label or method); print every step and write
    `trace.json` next to the results."""
    path = beside(results, "trace")
    check_writable(path)
    recipe = EvaluateRecipe.model_validate(load_results(results, EVALUATION)["recipe"])
    recipe = recipe.model_copy(update={"methods": named_rows(recipe, [row]), "limit": limit})
    opened, (entry,) = open_recipe(recipe), entries_of(recipe)
    if question is None:
        found = prompts_of(recipe, opened.tokenizer)
        asked = [(prompt.turns[-1].text, prompt.category, ids) for prompt, ids in found]
    else:
        encode = prompt_renderer(get_template(recipe.template, opened.tokenizer), opened.tokenizer)
        asked = [(question, "", encode([Turn("user", question)]))]
    method = build_method(entry.method, opened.parts, entry.sampling, **entry.options)
    limits = Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer))
    prompts = []
    for index, (text, category, ids) in enumerate(asked):
        steps = trace(opened.target, method, ids, limits, entry.sampling, recipe.seed + index)
        # The decoder of an encoder-decoder starts afresh: its text does not continue the prompt.
        before = [] if isinstance(opened.target, Seq2SeqModel) else ids
        prompts.append({"prompt": text, "category": category, "steps": describe_steps(steps, opened.tokenizer, before)})
    traced = {
        "kind": "trace",
        "target": recipe.target,
        "artifacts": opened.artifacts(),
        "row": {"label": entry.label, "method": entry.method, "options": entry.options}
        | {"temperature": entry.sampling.temperature},
        "prompts": prompts,
    }
    show_trace(traced, console())
    atomic_text(path, json.dumps(traced, ensure_ascii=False, indent=1) + "\n")
    console().print(f"trace: {path}", soft_wrap=True)
    return traced

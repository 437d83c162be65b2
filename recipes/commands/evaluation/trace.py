"""`draftsmith trace`: a few prompts decoded with a method, and every token shown as what it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....data.conversations import Turn
from ....data.prompts import stop_ids
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....decode.engine import Limits
from ....decode.evaluation.measure import BASELINE, Entry
from ....decode.evaluation.trace import trace
from ....decode.methods import build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ...assemble.evaluation import LoadedPair, entries_of, open_recipe, prompts_of
from ...report.trace import describe_steps, show_trace
from ...schema.evaluation import EvaluateRecipe
from ...schema.results import beside
from ...session.terminal import console
from .recipe import named_rows


def run_trace(
    recipe: EvaluateRecipe, methods: Sequence[str] = (), question: str | None = None, limit: int = 2
) -> dict[str, Any]:
    """Decode a few prompts, or one `question` instead, show every step on the terminal and keep `trace.json` beside the
    recipe's results. `methods` are as `named_rows` takes them; by default the recipe's first row that drafts."""
    path = beside(Path(recipe.out), "trace")
    check_writable(path)
    drafting = next((row for row in recipe.methods if row.method != BASELINE), recipe.methods[0])
    rows = named_rows(recipe, methods) if methods else [drafting]
    chosen = recipe.model_copy(update={"methods": rows, "limit": limit})
    opened = open_recipe(chosen)
    limits, entries = Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer)), entries_of(chosen)
    prompts = []
    for index, prompt in enumerate(_prompts(chosen, opened.tokenizer, question)):
        runs = [_run(entry, opened, prompt["ids"], limits, recipe.seed + index) for entry in entries]
        prompts.append({"prompt": prompt["text"], "category": prompt["category"], "runs": runs})
    traced = {"schema": 1, "kind": "trace", "target": recipe.target, "prompts": prompts}
    traced |= {"artifacts": opened.artifacts()}
    show_trace(traced, console())
    atomic_text(path, json.dumps(traced, ensure_ascii=False, indent=1) + "\n")
    console().print(f"trace: {path}", soft_wrap=True)
    return traced


def _prompts(recipe: EvaluateRecipe, tokenizer: Any, question: str | None) -> list[dict[str, Any]]:
    """`text`, `category` and `ids` of what is asked."""
    if question is not None:
        encode = prompt_renderer(get_template(recipe.template, tokenizer), tokenizer)
        return [{"text": question, "category": "", "ids": encode([Turn("user", question)])}]
    return [
        {"text": prompt.turns[-1].text, "category": prompt.category, "ids": ids}
        for prompt, ids in prompts_of(recipe, tokenizer)
    ]


def _run(entry: Entry, opened: LoadedPair, ids: Sequence[int], limits: Limits, seed: int) -> dict[str, Any]:
    method = build_method(entry.method, opened.parts, entry.sampling, **entry.options)
    steps = trace(opened.target, method, ids, limits, entry.sampling, seed)
    about: dict[str, Any] = {"label": entry.label, "method": entry.method, "options": entry.options}
    about["temperature"] = entry.sampling.temperature
    # the decoder of an encoder-decoder starts afresh: its text does not follow the prompt's
    before = [] if isinstance(opened.target, Seq2SeqModel) else ids
    return about | {"steps": describe_steps(steps, opened.tokenizer, before)}

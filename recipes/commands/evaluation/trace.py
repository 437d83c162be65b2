"""`draftsmith trace`: a few prompts decoded with a method, and every token shown as what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ....checkpoints.storage.messages import did_you_mean
from ....data.conversations import Turn
from ....data.rendering.render import prompt_renderer
from ....data.rendering.templates import get_template
from ....decode.engine import Limits
from ....decode.evaluation.measure import BASELINE, Entry
from ....decode.evaluation.trace import trace
from ....decode.methods import METHODS, Parts, build_method
from ....decode.models.base import LanguageModel
from ....decode.models.seq2seq import Seq2SeqModel
from ...assemble.evaluation import entries_of, open_recipe
from ...report.page import trace_beside, write_page
from ...report.trace import KIND, SCHEMA, describe_steps, show_trace, trace_section, write_trace
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...session.terminal import console
from . import evaluate


@dataclass(frozen=True)
class _Asked:
    """A question, as it was written and as the template presents it."""

    text: str
    category: str
    ids: Sequence[int]


def run_trace(
    recipe: EvaluateRecipe,
    methods: Sequence[str] = (),
    question: str | None = None,
    limit: int = 2,
    html: Path | None = None,
) -> dict[str, Any]:
    """Decode a few prompts, show every step on the terminal and keep `trace.json` beside the recipe's results, where
    the report finds it.

    Args:
        recipe: models, artifacts, prompts and settings; its prompts are decoded as an evaluation decodes them.
        methods: rows of the recipe by label, or methods by name, with their default settings where the recipe has no
            row of them; by default the recipe's first row that drafts.
        question: asked instead of the recipe's prompts.
        limit: of the recipe's prompts.
        html: a page to write, with the trace alone.

    Raises:
        ValueError: an unknown method, and what an evaluation of the recipe raises.
    """
    if limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    chosen = recipe.model_copy(update={"methods": chosen_rows(recipe, methods), "limit": limit})
    opened = open_recipe(chosen)
    tokenizer, target, parts = opened.tokenizer, opened.target, opened.parts
    asked = _asked(chosen, tokenizer, question)
    stops = evaluate.stop_ids(tokenizer)
    entries = entries_of(chosen)
    prompts = []
    for place, prompt in enumerate(asked):
        limits = Limits(recipe.max_new_tokens, stops)
        runs = [_run(entry, target, parts, tokenizer, prompt.ids, limits, recipe.seed + place) for entry in entries]
        prompts.append({"prompt": prompt.text, "category": prompt.category, "runs": runs})
    told = {"schema": SCHEMA, "kind": KIND, "target": recipe.target, "prompts": prompts}
    show_trace(told, console())
    kept = trace_beside(Path(recipe.out))
    write_trace(kept, told)
    console().print(f"trace: {kept}", markup=False, soft_wrap=True)
    if html is not None:
        body = f"<h1>Decoding, traced</h1><p>Target {escape(recipe.target)}.</p>{trace_section(told)}"
        console().print(f"page: {write_page(html, 'Decoding, traced', body)}", markup=False, soft_wrap=True)
    return told


def chosen_rows(recipe: EvaluateRecipe, methods: Sequence[str]) -> list[MethodSection]:
    """The rows of a recipe that are to be traced; see `run_trace`. Raises ValueError for an unknown name."""
    rows = dict(zip(recipe.labels(), recipe.methods, strict=True))
    if not methods:
        return [next((row for row in recipe.methods if row.method != BASELINE), recipe.methods[0])]
    chosen = []
    for name in methods:
        named = rows.get(name) or next((row for row in recipe.methods if row.method == name), None)
        if named is None and name not in METHODS:
            known = list(dict.fromkeys([*rows, *METHODS]))
            raise ValueError(f"unknown method {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
        chosen.append(named or MethodSection(method=name))
    return chosen


def _asked(recipe: EvaluateRecipe, tokenizer: Any, question: str | None) -> list[_Asked]:
    if question is not None:
        encode = prompt_renderer(get_template(recipe.template, tokenizer), tokenizer)
        return [_Asked(question, "", encode([Turn("user", question)]))]
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    found = evaluate.load_prompts(
        recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where
    )
    return [_Asked(prompt.turns[-1].text, prompt.category, ids) for prompt, ids in found]


def _run(
    entry: Entry,
    target: LanguageModel,
    parts: Parts,
    tokenizer: Any,
    ids: Sequence[int],
    limits: Limits,
    seed: int,
) -> dict[str, Any]:
    method = build_method(entry.method, parts, entry.sampling, **entry.options)
    steps = trace(target, method, ids, limits, entry.sampling, seed)
    about: dict[str, Any] = {"label": entry.label, "method": entry.method, "options": entry.options}
    about["temperature"] = entry.sampling.temperature
    # the decoder of an encoder-decoder begins anew: its text does not follow the prompt's
    before = [] if isinstance(target, Seq2SeqModel) else ids
    return about | {"steps": describe_steps(steps, tokenizer, before)}

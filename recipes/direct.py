"""An evaluation without a recipe: of whatever artifacts are named, every method that they allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import EvaluateRecipe
from .loading import load_recipe
from .terminal import say

BASE = "evaluate/all-methods"
PARTS = ("drafter", "heads", "table")
PROMPTS = "spec-bench"


def evaluate_recipe(
    name: str | None, overrides: Sequence[str], given: Mapping[str, str | bool | None], command: str = "evaluate"
) -> EvaluateRecipe:
    """The recipe of an evaluation.

    Args:
        name: a recipe's file or name; None, or a change to a recipe (`key=value`), where there is none.
        overrides: `key.path=value`, values in YAML; they come after `given`.
        given: target, drafter, heads, table, prompts, out and other keys by name; None: not given. Without a recipe
            there must be a target; then `evaluate/all-methods` is run with these parts, those methods that lack a part
            left out, on `spec-bench` and with the chat template of the target's tokenizer if nothing else is said.
        command: what the user typed, for the message.

    Raises:
        ValueError: neither a recipe nor a target; what `load_recipe` raises.
    """
    changes = {key: value for key, value in given.items() if value is not None and value is not False}
    words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()]
    if name is not None and "=" in name and not Path(name).is_file():
        overrides, name = [name, *overrides], None
    if name is None:
        if "target" not in changes:
            raise ValueError(f"give a recipe (`draftsmith recipes ls`), or a target: draftsmith {command} --target T")
        name, words = BASE, [*_direct(str(changes["target"]), changes, command), *words]
    recipe = load_recipe(name, [*words, *overrides], kinds=["evaluate"])
    assert isinstance(recipe, EvaluateRecipe)
    return recipe


def usable_methods(parts: Sequence[str]) -> list[str]:
    """The methods that need none but these parts: drafter, heads, table."""
    from ..decode.methods import METHODS, needs_of  # here, as a mistake in a recipe is to be told at once

    return [name for name in METHODS if set(needs_of(name, {})) <= set(parts)]


def _direct(target: str, changes: Mapping[str, Any], command: str) -> list[str]:
    """What makes `BASE` a recipe for these artifacts alone."""
    from ..data.tokenizers import load_tokenizer
    from ..decode.methods import METHODS

    template = "tokenizer" if getattr(load_tokenizer(target), "chat_template", None) else "plain"
    base = load_recipe(BASE)
    assert isinstance(base, EvaluateRecipe)
    usable = usable_methods([part for part in PARTS if part in changes])
    rows = [row.model_dump(exclude_none=True) for row in base.methods if row.method in usable]
    absent = ", ".join(name for name in METHODS if name not in usable)
    say(f"{command}: {len(usable)} of {len(METHODS)} methods, prompts in the template {template!r}")
    if absent:
        say(f"{command}: left out, for they need --drafter, --heads or --table: {absent}")
    out = Path("runs") / "evaluate" / Path(target.rstrip("/")).name / "results.json"
    values: dict[str, Any] = dict.fromkeys(PARTS) | {"out": str(out), "prompts": PROMPTS, "template": template}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (values | {"methods": rows}).items()]

"""Construction of evaluation recipes from recipe files or from artifacts on the command line."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.storage.messages import did_you_mean
from ....checkpoints.storage.places import check_location
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.loading import find_recipe, parse_recipe, read_extended
from ...session.terminal import log

BASE = "evaluate/all-methods"
PARTS = ("drafter", "heads", "table")
PROMPTS = "spec-bench"
BASELINE = "autoregressive"


def core_methods(parts: Container[str]) -> list[str]:
    """Return the names of the baseline and of the default method for each available artifact."""
    usual = {"drafter": "speculative", "heads": "medusa", "table": "slim-ss" if "heads" in parts else "bigram"}
    return [BASELINE, *([method for part, method in usual.items() if part in parts] or ["prompt-lookup"])]


def evaluate_recipe(
    name: str | None,
    overrides: Sequence[str],
    options: Mapping[str, str | bool | None],
    command: str = "evaluate",
    names: Sequence[str] = (),
) -> EvaluateRecipe:
    """Load or create the recipe of an evaluation, and apply changes.

    Args:
        name: File or name of a recipe. If it is None or of the form `key.path=value`, `evaluate/all-methods` is used
            with the given artifacts and, by default, with `spec-bench` and the tokenizer's chat template.
        overrides: Changes of the form `key.path=value`, which take precedence over `options`.
        options: Mapping from keys to new values; None and False are ignored.
        command: Name of the command in messages.
        names: Labels or methods of the rows to run, in addition to the baseline. The default is all rows of the recipe
            or, without a recipe, `core_methods`. The change `methods=all` selects all supported methods.

    Raises ValueError if neither a recipe nor a target is given.
    """
    changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None and value is not False}
    if name is not None and "=" in name and not Path(name).is_file():
        overrides, name = [name, *overrides], None
    if name is None and "target" not in changes:
        raise ValueError(f"pass a recipe (see `draftsmith recipes ls`), or use `draftsmith {command} --target T`")
    path = find_recipe(BASE if name is None else name)
    values = read_extended(path)
    has_template = "template" in changes or any(each.startswith("template=") for each in overrides)
    if name is None:
        changes = _direct(changes, names) | changes
    description = f"draftsmith {command} --target {changes['target']}" if name is None else str(path)
    recipe = parse_recipe(values, description, overrides, options=changes, kinds=[EvaluateRecipe])
    if names:
        recipe = recipe.model_copy(update={"methods": choose_rows(recipe, names)})
    if name is None:
        if not has_template:  # after all checks, since it loads the tokenizer
            recipe = recipe.model_copy(update={"template": template_of(recipe.target)})
        more = "" if names else "; use methods=all for all methods, --method NAME for one"
        log(f"{command}: {', '.join(recipe.labels())}; prompt template {recipe.template!r}{more}")
    return recipe


def choose_rows(recipe: EvaluateRecipe, names: Sequence[str]) -> list[MethodSection]:
    """Return the rows with the given labels or methods, preceded by a baseline for each temperature."""
    chosen, at = find_rows(recipe, names), recipe.temperature_of
    plain = {at(row): row for row in recipe.methods if row.method == BASELINE}
    plain = {recipe.temperature: MethodSection(method=BASELINE)} | plain
    baselines = [plain[temperature] for temperature in dict.fromkeys(map(at, chosen))]
    return [row for row in baselines if row not in chosen] + chosen


def find_rows(recipe: EvaluateRecipe, names: Sequence[str]) -> list[MethodSection]:
    """Return the rows with the given labels or methods. A method that is not in the recipe gets default options.

    Raises ValueError if a name is unknown, or if a method requires an artifact that is not in the recipe.
    """
    from ....decode.methods import METHODS, method_config

    rows = dict(zip(recipe.labels(), recipe.methods, strict=True))
    chosen = {}
    for name in names:
        named = rows.get(name) or next((row for row in recipe.methods if row.method == name), None)
        if named is None and name not in METHODS:
            known = list(dict.fromkeys([*rows, *METHODS]))
            raise ValueError(f"unknown --method {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
        row = named or MethodSection(method=name)
        for part in method_config(row.method, row.options).needs:
            if getattr(recipe, part) is None:
                raise ValueError(f"--method {name} requires a {part}: pass --{part}")
        chosen[name] = row
    return list(chosen.values())


def template_of(target: str) -> str:
    """Return the default prompt template: `tokenizer` if the target's tokenizer has a chat template, else `plain`."""
    from ....data.tokenizers import load_tokenizer

    return "tokenizer" if getattr(load_tokenizer(target), "chat_template", None) else "plain"


def _direct(changes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return values that replace those of the recipe `BASE` when the user passes artifacts instead of a recipe."""
    for part in ("target", *PARTS):
        if part in changes:
            check_location(changes[part])  # fails before slow imports
    target = str(changes["target"])
    out = Path("runs") / "evaluate" / Path(target.rstrip("/")).name / "results.json"
    methods = "all" if names else [{"method": name} for name in core_methods(changes)]
    values: dict[str, Any] = dict.fromkeys(PARTS)
    return values | {"out": str(out), "prompts": PROMPTS, "template": "plain", "methods": methods}

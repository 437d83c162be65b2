"""An evaluation without a recipe: of whatever artifacts are named, every method that they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...schema.evaluation import EvaluateRecipe
from ...schema.loading import find_recipe, load_recipe, parse_recipe, read_extended, shipped_recipes
from ...schema.papers import PARTS, PaperRecipe, pair_values
from ...session.terminal import log

EVALUATIONS = "evaluate/"
BASE = f"{EVALUATIONS}all-methods"
PROMPTS = "spec-bench"
PAIR = "quickstart"


def evaluate_recipe(
    name: str | None, overrides: Sequence[str], given: Mapping[str, str | bool | None], command: str = "evaluate"
) -> EvaluateRecipe:
    """The recipe of an evaluation. Without one there must be a target; `evaluate/all-methods` is then run with the
    parts that are given, on `spec-bench` and with the tokenizer's chat template unless others are given.

    Args:
        name: a recipe's file or name, of which `evaluate/` may be left out; None, or a change (`key=value`): none.
        overrides: `key.path=value`, values in YAML; they come after `given`.
        given: target, drafter, heads, table, prompts, out and other keys by name; None: not given.

    Raises:
        ValueError: neither a recipe nor a target; what `load_recipe` raises.
    """
    recipe = evaluation_or_paper(name, overrides, given, None, command, ["evaluate"])
    assert isinstance(recipe, EvaluateRecipe)
    return recipe


def evaluation_or_paper(
    name: str | None,
    overrides: Sequence[str],
    given: Mapping[str, str | bool | None],
    pair: str | None,
    command: str = "evaluate",
    kinds: Sequence[str] = ("evaluate", "paper"),
) -> EvaluateRecipe | PaperRecipe:
    """What `draftsmith evaluate` runs: as `evaluate_recipe`, with the embedded pair of the folder `pair` in place of an
    evaluation's own models; or a paper's recipe, of which `given` changes the section `evaluate`, but for `out`.

    Raises:
        ValueError: `pair` beside a target, drafter, heads, table or prompts; what `evaluate_recipe` raises.
    """
    own = [key for key in ("target", *PARTS, "prompts") if given.get(key) is not None]
    if pair is not None and own:
        raise ValueError(f"--pair brings its own {own[0]}: leave out --{own[0]}, or --pair")
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None and value is not False}
    if name is not None and "=" in name and not Path(name).is_file():
        overrides, name = [name, *overrides], None
    if name is None and "target" not in changes:
        raise ValueError(f"give a recipe (`draftsmith recipes ls`), or a target: draftsmith {command} --target T")
    path = find_recipe(BASE if name is None else _whole_name(name))
    values = read_extended(path)
    if name is None:
        changes = _direct(values, changes, command) | changes
    elif values.get("kind") == "paper":
        changes = {key if key == "out" else f"evaluate.{key}": value for key, value in changes.items()}
    recipe = parse_recipe(values, str(path), overrides, given=changes, kinds=kinds)
    assert isinstance(recipe, EvaluateRecipe | PaperRecipe)
    if pair is None or isinstance(recipe, PaperRecipe):
        return recipe
    parts = [part for part in PARTS if getattr(recipe, part) is not None]
    out = Path(recipe.out)
    moved = recipe.out if given.get("out") is not None else str(out.with_name(f"{out.stem}-{PAIR}{out.suffix}"))
    return EvaluateRecipe.model_validate(pair_values(recipe, pair, parts) | {"out": moved})


def pair_folder(pair: str) -> str:
    """The folder that `--pair quickstart[=FOLDER]` means.

    Raises:
        ValueError: another word, or no finished quickstart lies there.
    """
    word, _, folder = pair.partition("=")
    if word != PAIR:
        raise ValueError(f"--pair is quickstart or quickstart=FOLDER, got {pair!r}")
    found = Path(folder or "runs/quickstart")
    wanted = [found / "target" / "config.json", found / "corpus" / "heldout.jsonl"]
    wanted += [found / part / "artifact.json" for part in PARTS]
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        raise ValueError(f"there is no embedded pair in {found} (no {missing[0]}): run `draftsmith quickstart` first")
    return str(found)


def paper_recipe(name: str, overrides: Sequence[str] = ()) -> PaperRecipe:
    """A recipe of kind `paper` by its file or name, of which `evaluate/` may be left out."""
    recipe = load_recipe(_whole_name(name), overrides, kinds=["paper"])
    assert isinstance(recipe, PaperRecipe)
    return recipe


def _whole_name(name: str) -> str:
    """A recipe's name with `evaluate/`, which may be left out where such a recipe is shipped."""
    if Path(name).is_file():
        return name
    short = f"{EVALUATIONS}{name.removesuffix('.yaml')}"
    return short if short in shipped_recipes() else name


def _direct(base: Mapping[str, Any], changes: Mapping[str, Any], command: str) -> dict[str, Any]:
    """What makes `base`, the values of `BASE`, a recipe for these artifacts alone."""
    from ....data.tokenizers import load_tokenizer
    from ....decode.methods import METHODS, needs_of

    target = str(changes["target"])
    template = "tokenizer" if getattr(load_tokenizer(target), "chat_template", None) else "plain"
    usable = [name for name in METHODS if set(needs_of(name, {})) <= set(changes)]
    absent = ", ".join(name for name in METHODS if name not in usable)
    log(f"{command}: {len(usable)} of {len(METHODS)} methods, prompts in the template {template!r}")
    if absent:
        log(f"{command}: left out, for they need --drafter, --heads or --table: {absent}")
    out = Path("runs") / "evaluate" / Path(target.rstrip("/")).name / "results.json"
    rows = [row for row in base["methods"] if row["method"] in usable]
    values: dict[str, Any] = dict.fromkeys(PARTS)
    return values | {"out": str(out), "prompts": PROMPTS, "template": template, "methods": rows}

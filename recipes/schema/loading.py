"""Loading and validation of recipes from YAML files and `key=value` overrides."""

import re
import typing
from collections.abc import Hashable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from ...checkpoints.artifact.manifest import to_json_safe
from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.messages import did_you_mean, first_line
from ...checkpoints.storage.redaction import redact_arguments, redacted
from ...checkpoints.storage.safe_read import read_text
from .data import Section
from .errors import describe
from .evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from .forge import ForgeRecipe
from .serving import BenchRecipe
from .training import TrainingRecipe


class ModelFile(Section):
    """Settings of a target, which are merged into a recipe: `draftsmith train RECIPE models/NAME`."""

    kind: Literal["model"]
    target: str
    """Hub id of the target."""
    config: dict[str, Any]
    """Main fields of the target's transformers configuration, with which `train --plan` works without the hub."""
    template_options: dict[str, Any] = {}
    """Variables for the target's chat template."""
    heads: dict[str, Any] = {}
    drafter: dict[str, Any] = {}
    regenerate: dict[str, Any] = {}
    """Values that are merged only into recipes of this kind."""


Recipe = TrainingRecipe | EvaluateRecipe | RegenerateRecipe | QuickstartRecipe | BenchRecipe | ForgeRecipe | ModelFile
RECIPES: dict[str, type[Section]] = {
    typing.get_args(model.model_fields["kind"].annotation)[0]: model for model in typing.get_args(Recipe)
}
"""Mapping from the kinds of recipes to their schemas."""
Model = TypeVar("Model", bound=Section)

SHIPPED = Path(__file__).parents[1]
_LEFT_OUT = ("", "pairs/", "evaluate/")
"""Prefixes that may be omitted from the name of a shipped recipe."""
_MODELS = "pairs/models/"


class _Loader(yaml.SafeLoader):
    """YAML loader with the scalar types of YAML 1.2 (1e-3 is a number, no and on are strings) and unique keys."""

    # A copy, so that the resolvers below do not change other loaders of the process.
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)  # `<<` merges
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def shipped_recipes() -> dict[str, Path]:
    """Return a mapping from the names of shipped recipes, such as `drafter/vicuna-68m`, to their files."""
    recipes = {str(path.relative_to(SHIPPED).with_suffix("")): path for path in sorted(SHIPPED.rglob("*.yaml"))}
    return {name: path for name, path in recipes.items() if not name.startswith(("launch/", _MODELS))}


def shipped_models() -> dict[str, Path]:
    """Return a mapping from the names of shipped model files, such as `models/qwen3-8b`, to their files."""
    return {f"models/{path.stem}": path for path in sorted((SHIPPED / _MODELS).glob("*.yaml"))}


def launch_settings() -> dict[str, Path]:
    """Return a mapping from the names of shipped launch settings, such as `accelerate/zero2`, to their files."""
    paths = sorted(path for path in (SHIPPED / "launch").glob("*/*") if path.suffix in (".yaml", ".json"))
    return {f"{path.parent.name}/{path.stem}": path for path in paths}


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe, without the command in the first line."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return re.split(r"[.;:](?:\s|$)", " ".join(line.removeprefix("#").strip() for line in comment))[0]


def find_recipe(name: str) -> Path:
    """Find a recipe by its path or shipped name, and return its path. Raise ValueError if it does not exist."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    short = name.removesuffix(".yaml").removeprefix("recipes/")
    for folder in _LEFT_OUT:
        if f"{folder}{short}" in shipped:
            return shipped[f"{folder}{short}"]
    known = [*shipped, *(item.name for item in path.parent.glob("*.yaml"))]
    raise ValueError(f"recipe {name!r} does not exist.{did_you_mean(short, known)} See `draftsmith recipes ls` for all")


def read_recipe(path: Path) -> dict[str, Any]:
    """Load a recipe from a YAML file. Raise ValueError with the file and line if the YAML is invalid."""
    try:
        loaded = yaml.load(read_text(path), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ValueError(f"{position} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} is not a recipe: expected a mapping with `kind`, got {type(loaded).__name__}")
    return typing.cast(dict[str, Any], _unshared(loaded))


def read_extended(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Load a recipe, and merge it into the recipe that it `extends`, if any. Raise ValueError for circular `extends`.

    Sections are merged key by key, and other values are replaced. `extends` is a path relative to the recipe, or the
    name of a shipped recipe. `above` contains the recipes that extend this one.
    """
    if path.resolve() in above:
        raise ValueError(f"{path} extends itself through {', '.join(map(str, above))}")
    values = read_recipe(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    base_path = path.parent / str(base)
    other = base_path if base_path.is_file() else find_recipe(str(base))
    return _merge(read_extended(other, (*above, path.resolve())), values)


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        under = merged.get(key)
        # The weights of objectives are replaced as a whole, not merged.
        if isinstance(value, dict) and isinstance(under, dict) and key != "objective":
            value = _merge(under, value)
        merged[key] = value
    return merged


def _unshared(value: Any) -> Any:
    """Copy values that YAML aliases share, so that an override changes only one of them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def load_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    kinds: Sequence[type[Model]] = tuple(RECIPES.values()),  # type: ignore[arg-type]
) -> Model:
    """Load and validate a recipe, given its path or shipped name. See `parse_recipe` for the other arguments.

    Overrides without `=` name model files (see `ModelFile`), which are merged into the recipe first.
    """
    path = find_recipe(name)
    values, models = read_extended(path), [word for word in overrides if "=" not in word]
    for model in models:
        values = _add_model(values, model)
    changes = [word for word in overrides if word not in models]
    return parse_recipe(values, str(path), changes, options=options, kinds=kinds)


def read_model(path: Path) -> ModelFile:
    """Load and validate a model file. Raise ValueError if it is invalid."""
    return parse_recipe(read_recipe(path), str(path), kinds=[ModelFile])


def _add_model(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Merge a model file into a recipe. Its outputs and data in `runs/` move to `runs/MODEL/`."""
    path = shipped_models().get(name.removesuffix(".yaml"), Path(name))
    if not path.is_file():
        near, known = did_you_mean(name, list(shipped_models())), "models/qwen3-8b"
        raise ValueError(f"override {name!r}: expected key.path=value, or a model file such as {known}.{near}")
    model, kind = read_model(path), values.get("kind")
    if kind not in ("heads", "drafter", "regenerate"):
        raise ValueError(f"{name} applies to recipes of kind heads, drafter and regenerate, got {kind!r}: remove it")
    template = {"template": "tokenizer", "template_options": model.template_options}
    common = {"target": model.target, **(template if kind == "regenerate" else {"data": template})}
    merged = _merge(_merge(values, common), getattr(model, kind))
    for section, key in ((merged, "out"), (merged.get("data", {}), "source")):
        if str(section.get(key)).startswith("runs/"):
            section[key] = f"runs/{path.stem}/{section[key].removeprefix('runs/')}"
    return merged


def load_training(name: str, overrides: Sequence[str] = ()) -> TrainingRecipe:
    """Load and validate a recipe for `draftsmith train`; see `load_recipe`."""
    return load_recipe(name, overrides, kinds=typing.get_args(TrainingRecipe))


def parse_recipe(
    values: dict[str, Any],
    description: str,
    overrides: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    kinds: Sequence[type[Model]] = tuple(RECIPES.values()),  # type: ignore[arg-type]
) -> Model:
    """Apply overrides to a recipe and validate it. Modifies `values` in place.

    Args:
        values: Mapping of the recipe.
        description: Name of the recipe in messages, such as its file.
        overrides: Overrides of the form `key.path=value` with YAML values, applied last.
        options: Overrides as a mapping from key path to value, applied first.
        kinds: Schemas of the recipes that the caller supports.

    Raises ValueError if the recipe is invalid. The message lists the invalid keys and similar valid names.
    """
    for key, value in (options or {}).items():
        _set(values, key, value)
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals or not key:
                raise ValueError("expected key.path=value")
            _set(values, key, yaml.load(text, Loader=_Loader) if text else None)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"override {redact_arguments([override])[0]!r}: {first_line(error)}") from error
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in RECIPES:
        near = did_you_mean(str(kind), list(RECIPES))
        raise ValueError(f"{description}: `kind` must be one of {', '.join(RECIPES)}, got {kind!r}.{near}")
    accepted = [name for name, model in RECIPES.items() if model in kinds]
    if kind not in accepted:
        raise ValueError(f"{description} is a recipe of kind {kind!r}, but this command takes {', '.join(accepted)}")
    try:
        return typing.cast(Model, RECIPES[kind].model_validate(values))
    except ValidationError as error:
        # If a field may be a section or a name, pydantic reports an invalid section as an invalid name, too.
        faults = [fault for fault in error.errors() if fault["loc"][-1:] != ("str",)]
        messages = dict.fromkeys(describe(RECIPES[kind], fault) for fault in faults)
        changes = f" with {' '.join(redact_arguments(overrides))}" if overrides else ""
        raise ValueError(f"{description}{changes}: {redacted('; '.join(messages))}") from error


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, creating missing sections."""
    node: Any = values
    *parents, last = path.split(".")
    for depth, key in enumerate(parents, 1):
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[_index(node, key)]
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{'.'.join(parents[:depth])!r} is a value, not a section")
    node[_index(node, last)] = value


def _index(section: dict[str, Any] | list[Any], key: str) -> str | int:
    if isinstance(section, dict):
        return key
    if not key.isdigit() or int(key) >= len(section):
        raise ValueError(f"{key!r} is not an index of a list with {len(section)} items")
    return int(key)


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML without secrets, from which the run can be repeated."""
    values = recipe.model_dump(mode="json")
    first = {key: values[key] for key in ("kind", "out") if key in values}
    return yaml.safe_dump(to_json_safe(first | values), sort_keys=False, allow_unicode=True)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe to a YAML file atomically."""
    atomic_text(path, dump_recipe(recipe))

"""From a recipe's file and `key=value` overrides to a checked recipe, or one clear message."""

from __future__ import annotations

import re
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ...checkpoints.artifact.manifest import to_json_safe
from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.messages import did_you_mean, first_line
from ...checkpoints.storage.redaction import redacted, redacted_words
from ...checkpoints.storage.safe_read import read_text
from .data import Section
from .errors import describe
from .evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from .forge import ForgeRecipe
from .serving import BenchRecipe
from .training import DrafterRecipe, HeadsRecipe, TableRecipe, TrainingRecipe

Recipe = (
    DrafterRecipe
    | HeadsRecipe
    | TableRecipe
    | EvaluateRecipe
    | RegenerateRecipe
    | QuickstartRecipe
    | BenchRecipe
    | ForgeRecipe
)
RECIPES: dict[str, type[Section]] = {
    "drafter": DrafterRecipe,
    "heads": HeadsRecipe,
    "table": TableRecipe,
    "evaluate": EvaluateRecipe,
    "regenerate": RegenerateRecipe,
    "quickstart": QuickstartRecipe,
    "bench": BenchRecipe,
    "forge": ForgeRecipe,
}

SHIPPED = Path(__file__).parents[1]
_LEFT_OUT = ("", "pairs/", "evaluate/")
"""Folders that the name of a shipped recipe may leave out."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-3 is a number, no and on are words), and no key twice."""

    # A copy: the resolvers below must not change every other loader of the process.
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
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", mark)
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
    """Recipes that come with the package, by name (`drafter/vicuna-68m`)."""
    found = {str(path.relative_to(SHIPPED).with_suffix("")): path for path in sorted(SHIPPED.rglob("*.yaml"))}
    return {name: path for name, path in found.items() if not name.startswith("launch/")}


def launch_settings() -> dict[str, Path]:
    """Settings for launching that come with the package, by name (`accelerate/zero2`, `deepspeed/zero2`)."""
    found = sorted(path for path in (SHIPPED / "launch").glob("*/*") if path.suffix in (".yaml", ".json"))
    return {f"{path.parent.name}/{path.stem}": path for path in found}


def first_sentence(path: Path) -> str:
    """What a recipe's head comment says first, after its command."""
    comment: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return re.split(r"[.;:](?:\s|$)", " ".join(comment))[0]


def find_recipe(name: str) -> Path:
    """A recipe's file by path, or by the name of one that is shipped, without the folder where that may be left out.
    Raises ValueError: where there is neither, with the nearest right name."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    short = name.removesuffix(".yaml").removeprefix("recipes/")
    for folder in _LEFT_OUT:
        if f"{folder}{short}" in shipped:
            return shipped[f"{folder}{short}"]
    known = [*shipped, *(item.name for item in path.parent.glob("*.yaml"))]
    raise ValueError(
        f"there is no recipe {name!r}.{did_you_mean(short, known)} `draftsmith recipes ls` lists what is shipped"
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError naming file and line where it is none."""
    try:
        loaded = yaml.load(read_text(path), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ValueError(f"{where} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} is not a recipe: it must be a mapping with `kind`, and is {type(loaded).__name__}")
    return typing.cast(dict[str, Any], _unshared(loaded))


def read_extended(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's mapping over that of the recipe which it `extends`, if it does: sections key by key, all else
    replaced. The other is named as on the command line, or by its path beside this one; `above` are recipes that extend
    this one. Raises ValueError: see `read_recipe`; recipes that extend each other."""
    if path.resolve() in above:
        raise ValueError(f"{path} extends itself, by way of {', '.join(map(str, above))}")
    values = read_recipe(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    other = beside if beside.is_file() else find_recipe(str(base))
    return _merged(read_extended(other, (*above, path.resolve())), values)


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        under = merged.get(key)
        # weights of objectives are a whole: half of an old mixture is not what anybody means
        if isinstance(value, dict) and isinstance(under, dict) and key != "objective":
            value = _merged(under, value)
        merged[key] = value
    return merged


def _unshared(value: Any) -> Any:
    """A copy in which YAML's aliases are values of their own, so that an override changes one of them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def load_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = tuple(RECIPES),
) -> Recipe:
    """A checked recipe, by its file or a shipped one's name; see `parse_recipe`."""
    path = find_recipe(name)
    return parse_recipe(read_extended(path), str(path), overrides, given=given, kinds=kinds)


def load_training(name: str, overrides: Sequence[str] = ()) -> TrainingRecipe:
    """A checked recipe of `draftsmith train`; see `load_recipe`."""
    recipe = load_recipe(name, overrides, kinds=("drafter", "heads", "table"))
    assert isinstance(recipe, TrainingRecipe)
    return recipe


def parse_recipe(
    values: dict[str, Any],
    where: str,
    overrides: Sequence[str] = (),
    *,
    given: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = tuple(RECIPES),
) -> Recipe:
    """A checked recipe from its mapping, which is changed: by `given` (values by key path), then by `overrides`
    (`key.path=value`, values in YAML). `where` is its file, for messages; `kinds` are those that the caller can run.
    Raises ValueError: one message with every fault, each with its key's path and the nearest right name."""
    for key, value in (given or {}).items():
        _set(values, key, value)
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals or not key:
                raise ValueError("it is not of the form key.path=value")
            _set(values, key, yaml.load(text, Loader=_Loader) if text else None)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"override {redacted_words([override])[0]!r}: {first_line(error)}") from error
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in RECIPES:
        near = did_you_mean(str(kind), list(RECIPES))
        raise ValueError(f"{where}: `kind` is {kind!r}.{near} Known: {', '.join(RECIPES)}")
    if kind not in kinds:
        raise ValueError(f"{where} is a recipe of kind {kind!r}; this command runs {', '.join(kinds)}")
    try:
        return typing.cast(Recipe, RECIPES[kind].model_validate(values))
    except ValidationError as error:
        # where a name may stand in place of a section, one that is at fault is no name either
        faults = [fault for fault in error.errors() if fault["loc"][-1:] != ("str",)]
        told = dict.fromkeys(describe(RECIPES[kind], fault) for fault in faults)
        changed = f" with {' '.join(redacted_words(overrides))}" if overrides else ""
        raise ValueError(f"{where}{changed}: {redacted('; '.join(told))}") from error


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Set what a dotted path leads to; sections that are not there are made."""
    here: Any = values
    *parents, last = path.split(".")
    for depth, key in enumerate(parents, 1):
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[_index(here, key)]
        if not isinstance(here, (dict, list)):
            raise ValueError(f"{'.'.join(parents[:depth])!r} is a value, not a section")
    here[_index(here, last)] = value


def _index(section: dict[str, Any] | list[Any], key: str) -> str | int:
    if isinstance(section, dict):
        return key
    if not key.isdigit() or int(key) >= len(section):
        raise ValueError(f"{key!r} is no index of a list of {len(section)}")
    return int(key)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, secrets struck out; running it again repeats the run."""
    values = recipe.model_dump(mode="json")
    first = {key: values[key] for key in ("kind", "out") if key in values}
    return yaml.safe_dump(to_json_safe(first | values), sort_keys=False, allow_unicode=True)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, whole or not at all."""
    atomic_text(path, dump_recipe(recipe))

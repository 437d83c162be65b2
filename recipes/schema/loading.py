"""From a recipe's file and `key=value` overrides to a checked recipe, or one clear message."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ...checkpoints.artifact.manifest import to_json_safe
from ...checkpoints.storage.atomic import atomic_text
from ...checkpoints.storage.messages import did_you_mean
from .data import Section
from .errors import describe
from .evaluation import EvaluateRecipe, QuickstartRecipe, RegenerateRecipe
from .papers import PaperRecipe
from .training import DrafterRecipe, HeadsRecipe, TableRecipe

Recipe = DrafterRecipe | HeadsRecipe | TableRecipe | EvaluateRecipe | RegenerateRecipe | QuickstartRecipe | PaperRecipe
RECIPES: dict[str, type[Section]] = {
    "drafter": DrafterRecipe,
    "heads": HeadsRecipe,
    "table": TableRecipe,
    "evaluate": EvaluateRecipe,
    "regenerate": RegenerateRecipe,
    "quickstart": QuickstartRecipe,
    "paper": PaperRecipe,
}

SHIPPED = Path(__file__).parents[1]


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
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
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
    """Recipes that come with the package, by name (`drafter/vicuna-68m`); `accelerate/` holds launch settings."""
    found = (path for path in sorted(SHIPPED.rglob("*.yaml")) if path.parent.name != "accelerate")
    return {str(path.relative_to(SHIPPED).with_suffix("")): path for path in found}


def accelerate_configs() -> dict[str, Path]:
    """Launch settings for accelerate that come with the package, by name (`accelerate/zero2`)."""
    return {f"accelerate/{path.stem}": path for path in sorted((SHIPPED / "launch" / "accelerate").glob("*.yaml"))}


def deepspeed_configs() -> dict[str, Path]:
    """DeepSpeed configurations that come with the package, by name (`deepspeed/zero2`)."""
    return {f"deepspeed/{path.stem}": path for path in sorted((SHIPPED / "launch" / "deepspeed").glob("*.json"))}


def first_sentence(path: Path) -> str:
    """What a recipe's head comment says first, after its command."""
    comment: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return re.split(r"[.;:](?:\s|$)", " ".join(comment))[0]


def find_recipe(name: str) -> Path:
    """A recipe's file by path, or by the name of one that is shipped.

    Raises:
        ValueError: where there is neither, with the nearest right name.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    short = name.removesuffix(".yaml").removeprefix("recipes/")
    if short in shipped:
        return shipped[short]
    if short in accelerate_configs():
        raise ValueError(
            f"{name!r} is no recipe but accelerate's settings: `draftsmith recipes copy {short} .`, then "
            f"`accelerate launch --config_file {short.removeprefix('accelerate/')}.yaml -m draftsmith train RECIPE`"
        )
    known = [*shipped, *(item.name for item in path.parent.glob("*.yaml"))]
    raise ValueError(
        f"there is no recipe {name!r}.{did_you_mean(short, known)} `draftsmith recipes ls` lists what is shipped"
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError naming file and line where it is none."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ValueError(f"{where} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} is not a recipe: it must be a mapping with `kind`, and is {type(loaded).__name__}")
    return typing.cast(dict[str, Any], _unshared(loaded))


def read_extended(path: Path) -> dict[str, Any]:
    """A recipe's mapping laid over that of the recipe which it `extends`, if it does: sections key by key, all else
    replaced. The other is named as on the command line, or by its place beside this one.

    Raises:
        ValueError: see `read_recipe`; recipes that extend each other.
    """
    return _extended(path, ())


def _extended(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in above:
        raise ValueError(f"{path} extends itself, by way of {', '.join(map(str, above))}")
    values = read_recipe(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    other = beside if beside.is_file() else find_recipe(str(base))
    return _laid_over(_extended(other, (*above, path.resolve())), values)


def _laid_over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    laid = dict(base)
    for key, value in values.items():
        under = laid.get(key)
        # weights of objectives are a whole: half of an old mixture is not what anybody means
        if isinstance(value, dict) and isinstance(under, dict) and key != "objective":
            laid[key] = _laid_over(under, value)
        else:
            laid[key] = value
    return laid


def _unshared(value: Any) -> Any:
    """A copy in which YAML's aliases are values of their own, so that an override changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def load_recipe(name: str, overrides: Sequence[str] = (), *, kinds: Sequence[str] = tuple(RECIPES)) -> Recipe:
    """A checked recipe.

    Args:
        name: a file, or a shipped recipe's name.
        overrides: `key.path=value`, values in YAML.
        kinds: those that the caller can run.

    Raises:
        ValueError: one message with every fault, each with its key's path and the nearest right name; the file is
            named for those that are its own, an override for those that come of it.
    """
    path = find_recipe(name)
    values = read_extended(path)
    before = copy.deepcopy(values)
    for override in overrides:
        _apply(values, override)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in RECIPES:
        near = did_you_mean(str(kind), list(RECIPES))
        raise ValueError(f"{path}: `kind` is {kind!r}.{near} Known: {', '.join(RECIPES)}")
    if kind not in kinds:
        raise ValueError(f"{path} is a recipe of kind {kind!r}; this command runs {', '.join(kinds)}")
    try:
        return typing.cast(Recipe, RECIPES[kind].model_validate(values))
    except ValidationError as error:
        raise ValueError(_faults_told(error, RECIPES[kind], before, str(path), overrides)) from error


def _faults_told(
    error: ValidationError, model: type[BaseModel], before: dict[str, Any], where: str, overrides: Sequence[str]
) -> str:
    """All faults: the file's own, which it has without overrides too, and those that come of overrides."""
    own: set[str] = set()
    if overrides:
        try:
            model.model_validate(before)
        except ValidationError as found:
            own = {describe(model, fault) for fault in found.errors()}
    told: dict[str, list[str]] = {where: []}
    for fault in error.errors():
        text = describe(model, fault)
        place = [str(part) for part in fault["loc"]]
        causes = [] if text in own else [repr(given) for given in overrides if _concerns(given, place)]
        told.setdefault(f"override {' and '.join(causes)}" if causes else where, []).append(text)
    return "; ".join(f"{name}: {'; '.join(dict.fromkeys(texts))}" for name, texts in told.items() if texts)


def _concerns(override: str, place: Sequence[str]) -> bool:
    """Whether an override set something at, above or below a place."""
    key = override.partition("=")[0].split(".")
    shared = min(len(key), len(place))
    return key[:shared] == list(place[:shared])


def parse_recipe(values: dict[str, Any], where: str) -> Recipe:
    """A checked recipe from its mapping. Raises ValueError as `load_recipe` does."""
    model = RECIPES[values["kind"]]
    try:
        return typing.cast(Recipe, model.model_validate(values))
    except ValidationError as error:
        faults = [describe(model, fault) for fault in error.errors()]
        raise ValueError(f"{where}: " + "; ".join(dict.fromkeys(faults))) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, secrets struck out; running it again repeats the run."""
    return yaml.safe_dump(to_json_safe(recipe.model_dump(mode="json")), sort_keys=False, allow_unicode=True)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe, whole or not at all."""
    atomic_text(path, dump_recipe(recipe))


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} is not of the form key.path=value")
    try:
        value = yaml.load(text, Loader=_Loader) if text else None
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error
    *parents, last = key.split(".")
    here: Any = values
    for place, parent in enumerate(parents):
        if isinstance(here, list):
            here = _item(here, parent, override)
        else:
            if here.get(parent) is None:
                here[parent] = {}
            here = here[parent]
        if not isinstance(here, (dict, list)):
            raise ValueError(f"override {override!r}: {'.'.join(parents[: place + 1])!r} is a value, not a section")
    if isinstance(here, list):
        _item(here, last, override)
        here[int(last)] = value
    else:
        here[last] = value


def parse_values(text: str, where: str) -> list[Any]:
    """The values of a list written with commas, each in YAML. Raises ValueError where they are none."""
    try:
        return list(yaml.load(f"[{text}]", Loader=_Loader))
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: the values are not valid YAML") from error


def _item(items: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise ValueError(f"override {override!r}: {index!r} is no place in a list of {len(items)}")
    return items[int(index)]

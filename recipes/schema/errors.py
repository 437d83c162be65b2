"""Readable messages for the validation errors of pydantic."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ...checkpoints.storage.messages import did_you_mean

Model = TypeVar("Model", bound=BaseModel)
_BRANCH = "DrafterRecipe]"
"""Suffix of a path element that pydantic adds for a field that is a recipe or a name. Such an element is no key."""


def checked(model: type[Model], values: Any, under: str = "") -> Model:
    """Validate the values of a section. Raise ValueError with the paths of invalid keys, each prefixed with `under`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(describe(model, fault, under) for fault in error.errors()[:5])) from error


def describe(model: type[BaseModel], fault: Any, under: str = "") -> str:
    """Describe a validation error, with the path of the key (prefixed with `under`) and the closest valid name."""
    path = [*([under] if under else []), *(part for part in map(str, fault["loc"]) if not part.endswith(_BRANCH))]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        known = {name: name.rpartition(".")[2] for name in _keys(model, under)}
        close = get_close_matches(path[-1], known.values(), n=len(known), cutoff=0.5)
        return f"unknown key {key!r}.{did_you_mean(key, [name for name in known if known[name] in close])}"
    if fault["type"] == "missing":
        return f"{key!r} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    suffix = "" if isinstance(fault["input"], (dict, BaseModel)) else f", got {fault['input']!r}"
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        near = did_you_mean(fault["input"], re.findall("'([^']*)'", fault["ctx"]["expected"]))
        suffix += f".{near}" if near else ""
    return f"{key!r}: {message}{suffix}" if key else f"{message}{suffix}"


def _keys(model: type[BaseModel], under: str) -> Iterator[str]:
    """Yield the dotted paths of all keys of a section and its subsections, each prefixed with `under`."""
    for name, item in model.model_fields.items():
        path = f"{under}.{name}" if under else name
        yield path
        for part in (item.annotation, *get_args(item.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _keys(part, path)

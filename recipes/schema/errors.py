"""Faults that pydantic finds in a recipe, told to people."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from ...checkpoints.storage.messages import did_you_mean


def describe(model: type[BaseModel], fault: Any, under: str = "") -> str:
    """A fault that pydantic found in a section, for people: with its key's path, and the nearest right name.

    Args:
        under: the path of the section itself.
    """
    place = [*([under] if under else []), *(str(part) for part in fault["loc"])]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        known = _fields_at(model, fault["loc"][:-1])
        return f"unknown key {key!r}.{did_you_mean(place[-1], known)}"
    if fault["type"] == "missing":
        return f"{key!r} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    given = "" if isinstance(fault["input"], (dict, BaseModel)) else f", got {fault['input']!r}"
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        near = did_you_mean(fault["input"], re.findall("'([^']*)'", fault["ctx"]["expected"]))
        given += f".{near}" if near else ""
    return f"{key!r}: {message}{given}" if key else f"{message}{given}"


def _fields_at(model: Any, place: Sequence[str | int]) -> list[str]:
    """Names of the fields of the section that a key's path leads to."""
    for part in place:
        model = _section_of(model.model_fields[part].annotation if isinstance(part, str) else model)
        if model is None:
            return []
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, typing.Union, types.UnionType):
        for inner in typing.get_args(annotation):
            found = _section_of(inner)
            if found is not None:
                return found
    return None

"""Registry of decoding methods: their options, the artifacts they need, and how they are built."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, replace
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ..checkpoints.storage.messages import did_you_mean
from ..checkpoints.table.table import BigramTable
from .engine import Proposer, Verifier
from .models.base import LanguageModel
from .proposers.head_trees import HeadModule
from .warpers import Sampling

Options = dict[str, Any]
Part = Literal["drafter", "heads", "table"]


class Method(NamedTuple):
    """Proposer and verifier of a decoding method, in the order in which `generate` takes them."""

    proposer: Proposer
    verifier: Verifier


@dataclass(frozen=True)
class Parts:
    """Artifacts that decoding methods may require in addition to the target model."""

    drafter: LanguageModel | None = None
    heads: HeadModule | None = None
    table: BigramTable | None = None
    more_drafters: tuple[LanguageModel, ...] = ()
    """Additional drafters. The option `drafter: 2` selects the first one. `specinfer` uses all drafters."""


@dataclass(frozen=True)
class MethodConfig:
    """Base class for the options of a decoding method. The docstring of a subclass describes its draft tokens.

    Each option is annotated with its type and a description. Integers are counts and must be at least 1. A `Literal`
    lists the choices.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[Part, ...]] = ()
    lossless: ClassVar[bool] = True
    """True if the output follows the target's distribution for all values of the options."""
    greedy_only: ClassVar[bool] = False
    """True if the method ignores the temperature, because it searches for the most likely output."""

    @property
    def needs(self) -> tuple[Part, ...]:
        """Return the artifacts that the method needs with these options."""
        return self.requires

    @property
    def is_lossless(self) -> bool:
        """Return whether the output follows the target's distribution with these options."""
        return self.lossless

    def build(self, parts: Parts, sampling: Sampling) -> Method:
        """Build the proposer and the verifier. Raise ValueError if options contradict each other."""
        raise NotImplementedError


METHODS: dict[str, type[MethodConfig]] = {}
"""Mapping from method names to configuration classes, which `decode/methods.py` registers."""
Config = TypeVar("Config", bound=MethodConfig)


@dataclass_transform(frozen_default=True)
def register(
    name: str, requires: tuple[Part, ...] = (), *, lossless: bool = True, greedy_only: bool = False
) -> Callable[[type[Config]], type[Config]]:
    """Return a decorator that makes a class a frozen dataclass and registers it in `METHODS` as `name`."""

    def add(config: type[Config]) -> type[Config]:
        config = dataclass(frozen=True)(config)
        config.name, config.requires, config.lossless, config.greedy_only = name, requires, lossless, greedy_only
        METHODS[name] = config
        return config

    return add


def method_config(name: str, options: Mapping[str, Any]) -> MethodConfig:
    """Check the options of a method, and return them with defaults for options that are not set.

    Raises:
        ValueError: A method, option or choice is unknown (the message suggests the closest one), a value has the
            wrong type, or a count is below 1.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}.{did_you_mean(name, list(METHODS))} Known: {', '.join(METHODS)}")
    hints = _option_types(METHODS[name])
    for key, value in options.items():
        if key not in hints:
            known = ", ".join(hints) or "none"
            raise ValueError(f"method {name!r} has no option {key!r}.{did_you_mean(key, list(hints))} Known: {known}")
        _check_value(f"option {key!r} of method {name!r}", value, hints[key])
    return METHODS[name](**options)


def _check_value(what: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        if value not in kinds:
            known = ", ".join(kinds)
            raise ValueError(f"{what} cannot be {value!r}.{did_you_mean(str(value), list(kinds))} Known: {known}")
    elif type(value) not in kinds and not (float in kinds and type(value) is int):
        raise ValueError(f"{what} must be {kinds[0].__name__}, got {value!r}")
    elif type(value) is int and int in kinds and value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}")


def _option_types(config: type[MethodConfig]) -> dict[str, Any]:
    hints = get_type_hints(config)
    return {option.name: hints[option.name] for option in fields(config)}


def build_method(name: str, parts: Parts, sampling: Sampling, **options: Any) -> Method:
    """Build the proposer and verifier of a method.

    Raises:
        ValueError: An option is invalid, options contradict each other, or a required artifact is missing.
    """
    config = method_config(name, options)
    for part in config.needs:
        if getattr(parts, part) is None:
            raise ValueError(f"method {name!r} requires `{part}`, but none was given")
    if (number := getattr(config, "drafter", 1)) > 1:
        if number > (most := len(parts.more_drafters) + 1):
            raise ValueError(f"`drafter` of method {name!r} is {number}, but the number of drafters is {most}")
        parts = replace(parts, drafter=parts.more_drafters[number - 2])
    return config.build(parts, sampling)


def method_variants() -> list[tuple[str, Options]]:
    """List each method with default options, and again for each choice that is lossy or needs more artifacts."""
    return [(name, options) for name in METHODS for options in ({}, *_choices_that_matter(name))]


def _choices_that_matter(name: str) -> list[Options]:
    config, types = METHODS[name](), _option_types(METHODS[name])
    choices = [(key, choice) for key, hint in types.items() if get_origin(hint) is Literal for choice in get_args(hint)]
    variants = [({key: choice}, replace(config, **{key: choice})) for key, choice in choices]
    needs, lossless = set(config.needs), config.is_lossless
    return [options for options, new in variants if set(new.needs) > needs or new.is_lossless < lossless]


def all_rows(parts: Container[str], temperature: float) -> list[tuple[str, Options]]:
    """List the method variants that these artifacts and this temperature allow, except those with a datastore."""
    rows = [(name, options, method_config(name, options)) for name, options in method_variants()]
    return [
        (name, options)
        for name, options, config in rows
        if all(part in parts for part in config.needs)
        and "datastore" not in options
        and not (config.greedy_only if temperature else config.is_lossless < METHODS[name].lossless)
    ]

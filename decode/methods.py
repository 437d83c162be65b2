"""The methods by name: each is a proposer and a verifier, and the settings that a user may change."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..checkpoints.table import BigramTable
from .engine import Proposer, Verifier
from .models import LanguageModel
from .proposers import DraftBeam, DraftTree, HeadModule, HeadTree, Nothing, PrunedHeadTree
from .tree import parse_branching
from .verifiers import ExactChain, GreedyMatch, JointLikelihood, MultiCandidate, Sample
from .warpers import Sampling


class Method(NamedTuple):
    """What `generate` takes after the target."""

    proposer: Proposer
    verifier: Verifier


@dataclass(frozen=True)
class Parts:
    """What a method may be built from, besides the target itself."""

    drafter: LanguageModel | None = None
    heads: HeadModule | None = None
    table: BigramTable | None = None


@dataclass(frozen=True)
class _Spec:
    build: Callable[[Parts, Sampling, dict[str, Any]], Method]
    needs: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


def _autoregressive(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    return Method(Nothing(), GreedyMatch() if sampling.greedy else Sample())


def _speculative(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    assert parts.drafter is not None
    if options["gamma"] < 1:
        raise ValueError(f"gamma must be at least 1, got {options['gamma']}")
    proposer = DraftTree(parts.drafter, (1,) * options["gamma"])
    return Method(proposer, GreedyMatch() if sampling.greedy else ExactChain())


def _multi_candidate(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    assert parts.drafter is not None
    branching, replacement = parse_branching(options["k_config"]), bool(options["replacement"])
    if sampling.greedy and replacement:
        branching = (1,) * len(branching)  # independent draws from a one-hot distribution are all the same token
    proposer = DraftTree(parts.drafter, branching, replacement)
    return Method(proposer, GreedyMatch() if sampling.greedy else MultiCandidate(replacement))


def _mjsd(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    assert parts.drafter is not None
    proposer = DraftBeam(parts.drafter, options["gamma"], options["beams"])
    return Method(proposer, JointLikelihood(options["threshold"], sampling.greedy))


def _medusa(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    assert parts.heads is not None
    _only_greedy("medusa", sampling)
    return Method(HeadTree(parts.heads, parse_branching(options["tree"])), GreedyMatch())


def _slim(parts: Parts, sampling: Sampling, options: dict[str, Any]) -> Method:
    assert parts.heads is not None
    _only_greedy("slim", sampling)
    depth = options["depth"] or parts.heads.num_heads
    settings = (options["sequences"], options["candidates"], options["unseen"], depth)
    return Method(PrunedHeadTree(parts.heads, parts.table, *settings), GreedyMatch())


def _only_greedy(name: str, sampling: Sampling) -> None:
    if not sampling.greedy:
        raise ValueError(f"{name} verifies by greedy match, which needs temperature 0, got {sampling.temperature}")


def _slim_defaults(sequences: int) -> dict[str, Any]:
    return {"sequences": sequences, "candidates": 10, "unseen": 0.01, "depth": 0}


METHODS: dict[str, _Spec] = {
    "autoregressive": _Spec(_autoregressive),
    "speculative": _Spec(_speculative, ("drafter",), {"gamma": 4}),
    "multi-candidate": _Spec(_multi_candidate, ("drafter",), {"k_config": "4x2x2x1", "replacement": False}),
    "mjsd": _Spec(_mjsd, ("drafter",), {"gamma": 4, "beams": 8, "threshold": 0.1}),
    "medusa": _Spec(_medusa, ("heads",), {"tree": "4x2x1x1"}),
    "slim-ss": _Spec(_slim, ("heads", "table"), _slim_defaults(1)),
    "slim-s": _Spec(_slim, ("heads", "table"), _slim_defaults(20)),
    "slim-l": _Spec(_slim, ("heads", "table"), _slim_defaults(40)),
}


def nearest(name: str, known: list[str]) -> str:
    """` Did you mean 'x'?` or nothing, for error messages."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def method_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method, its defaults filled in.

    Raises:
        ValueError: an unknown method or option, with the nearest right name; a value of another type than the default.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}.{nearest(name, list(METHODS))} Known: {', '.join(METHODS)}")
    defaults = METHODS[name].defaults
    for key, value in options.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise ValueError(f"method {name!r} has no option {key!r}.{nearest(key, list(defaults))} Known: {known}")
        wanted = type(defaults[key])
        if not (type(value) is wanted or (wanted is float and type(value) is int)):
            raise ValueError(f"option {key!r} of method {name!r} must be {wanted.__name__}, got {value!r}")
    return defaults | options


def build_method(name: str, parts: Parts, sampling: Sampling, **options: Any) -> Method:
    """The proposer and verifier of a method.

    Raises:
        ValueError: what `method_options` raises, a part that the method needs and that is missing, or a temperature
            that the method cannot keep its promise at.
    """
    settings = method_options(name, options)
    for part in METHODS[name].needs:
        if getattr(parts, part) is None:
            raise ValueError(f"method {name!r} needs a {part}, and none was given")
    return METHODS[name].build(parts, sampling, settings)

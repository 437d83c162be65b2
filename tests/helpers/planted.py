"""Faults that are planted in the library code, and which certificates must detect.

A row of `planted.yaml` has a description, the method (with default options), a function, and pairs of source
fragments: the original and its replacement. Other faults are functions of this module.
"""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from draftsmith.decode.engine import Context
from draftsmith.decode.proposers.draft_tree import DraftTree
from draftsmith.decode.rng import Rng
from draftsmith.decode.tree import Tree


class Fault(NamedTuple):
    """Fault in a decoding method, with a function that plants it."""

    kind: str
    name: str
    method: str
    options: dict[str, Any]
    plant: Callable[[pytest.MonkeyPatch], None]


def edit(function: str, pieces: Sequence[str]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that edits a library function's source; `pieces` has old and new fragments in turn."""
    module, _, name = function.partition(":")
    original = reduce(getattr, name.split("."), importlib.import_module(f"draftsmith.decode.{module}"))

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Tree, "k_ary", classmethod(cache(Tree.k_ary.__wrapped__)))  # cached trees store their masks
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in zip(pieces[::2], pieces[1::2], strict=True):
            assert old in source, f"{function} has no {old!r}"
            source = source.replace(old, new)
        namespace: dict[str, Any] = {}
        exec(compile(source, function, "exec"), original.__globals__, namespace)
        new = namespace[original.__name__]
        patch.setattr(getattr(original, "__func__", original), "__code__", getattr(new, "__func__", new).__code__)

    return plant


def stale_probs(patch: pytest.MonkeyPatch) -> None:
    """Make the verifier use the draft distributions of the previous step."""
    propose = DraftTree.propose

    def patched(self: DraftTree, context: Context) -> Any:
        proposal = propose(self, context)
        before = self.__dict__.get("before", proposal.draft_probs_BMV)
        self.__dict__["before"] = proposal.draft_probs_BMV
        proposal.draft_probs_BMV = before
        return proposal

    patch.setattr(DraftTree, "propose", patched)


def stale_masks(patch: pytest.MonkeyPatch) -> None:
    """Reuse the mask of the first tree for all trees of the same size."""
    bias, masks = Tree.bias, dict[Any, Any]()

    def patched(self: Tree, start: int, stop: int) -> Any:
        return masks.setdefault((len(self.parents_BN), start, stop), bias(self, start, stop))

    patch.setattr(Tree, "bias", patched)


def pairs_of_draws(patch: pytest.MonkeyPatch) -> None:
    """Make every second call of `Rng.uniform` repeat the numbers of the previous call."""
    uniform = Rng.uniform

    def patched(self: Rng, *shape: int) -> Any:
        before = self.__dict__.pop("before", None)
        if before is not None and before.shape[1:] == shape:
            return before
        self.__dict__["before"] = uniform(self, *shape)
        return self.__dict__["before"].clone()

    patch.setattr(Rng, "uniform", patched)


_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "replacement": {"k_config": "3x2x1", "replacement": True},
    "blocks": {"verification": "block"},
    "traversal": {"verification": "traversal"},
}


def _faults() -> list[Fault]:
    kinds = yaml.safe_load(Path(__file__).with_name("planted.yaml").read_text(encoding="utf-8"))
    own = {plant.__name__: plant for plant in (stale_probs, stale_masks, pairs_of_draws)}
    faults = []
    for kind, rows in kinds.items():
        for name, method, function, *pieces in rows:
            method, _, way = method.partition(" with ")
            faults.append(Fault(kind, name, method, _OPTIONS[way], own.get(function) or edit(function, pieces)))
    return faults


FAULTS = _faults()

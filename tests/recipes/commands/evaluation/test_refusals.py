"""Errors before decoding: each message names the option and the conflicting numbers or files."""

from collections.abc import Callable
from typing import Any

import pytest
from draftsmith.recipes.commands.evaluation.recipe import evaluate_recipe

REFUSED: list[tuple[str, Callable[[str], Any], tuple[str, ...]]] = [
    ("an unknown key", lambda _: evaluate_recipe("all-methods", ["max_new_token=2"], {}), ("'max_new_tokens'",)),
    ("another kind", lambda _: evaluate_recipe("quickstart", [], {}), ("'quickstart'",)),
    ("--method: unknown", lambda target: _rows(target, "speculatve"), ("--method 'speculatve'", "'speculative'")),
    ("--method: no part", lambda target: _rows(target, "medusa"), ("--method medusa", "--heads")),
    ("no target", lambda _: evaluate_recipe("limit=3", [], {"target": None, "drafter": "D"}), ("--target T",)),
]


# Plain values are checked before anything is loaded: this target does not exist.
REFUSED += [
    ("unknown, no target", lambda _: _rows("a/b", "speculatve"), ("--method 'speculatve'",)),
    ("a value, no target", lambda _: evaluate_recipe(None, ["temperature=-1"], {"target": "a/b"}), ("temperature",)),
]


def _rows(target: str, *names: str) -> Any:
    return evaluate_recipe(None, [], {"target": target}, names=names)


@pytest.fixture(scope="module")
def target(stand_ins: Any) -> str:
    return str(stand_ins.target("JackFram/llama-68m"))


@pytest.mark.parametrize(("call", "parts"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(target: str, call: Callable[[str], Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the words are compared below)
        call(target)
    assert all(word in str(refused.value) for word in parts), refused.value

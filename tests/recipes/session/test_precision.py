"""`precision: auto` on CPUs with and without native bfloat16."""

from typing import Any

import pytest
from draftsmith.recipes.schema.loading import load_training
from draftsmith.recipes.session import precision
from draftsmith.recipes.session.precision import bfloat16_slowdown, settle_precision

NAMES = ("drafter/modern-target", "heads/eagle3")


def number_formats(recipe: Any) -> tuple[str, str]:
    return recipe.train.precision, recipe.target_dtype if recipe.kind == "heads" else recipe.teacher.dtype


@pytest.mark.parametrize("name", NAMES)
def test_auto_is_float32_where_bfloat16_is_emulated(name: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    recipe: Any = load_training(name, [])
    assert recipe.train.precision == "auto"
    for native, expected in ((False, ("no", "float32")), (True, ("bf16", "bfloat16"))):
        monkeypatch.setattr(precision, "has_bfloat16", lambda native=native: native)
        assert number_formats(settle_precision(recipe)) == expected
        assert ("is emulated on this machine" in capfd.readouterr().err) == (not native)


@pytest.mark.parametrize("name", NAMES)
def test_emulated_bfloat16_gives_a_warning(name: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    recipe: Any = load_training(name, ["train.precision=bf16"])
    for native in (False, True):
        monkeypatch.setattr(precision, "has_bfloat16", lambda native=native: native)
        assert settle_precision(recipe) == recipe
        assert ("warning: bfloat16 is emulated on this machine" in capfd.readouterr().err) == (not native)
    assert 0.01 < bfloat16_slowdown() < 1000

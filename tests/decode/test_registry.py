"""The registry of methods: options, required artifacts, and generated lists."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from draftsmith.decode.methods import METHODS, Parts, build_method, method_config, method_variants
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


def test_documentation_has_the_options_of_every_method(load_script: Callable[[Path], ModuleType]) -> None:
    hooks = load_script(ROOT / "docs" / "hooks.py")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "methods").glob("*.md"))
    named = set(re.findall("<!-- generated: options (.+) -->", pages))
    assert named == {name for name in METHODS if hooks.options_table(name)}
    assert hooks.methods_table().count("\n| `") == len(METHODS)


def test_help_lists_every_method() -> None:
    output = CliRunner().invoke(app, ["certify", "--help"], env={"COLUMNS": "1000"}).output
    assert ",".join(METHODS) in "".join(output.split())  # lines may wrap at hyphens


def test_the_recipe_has_all_methods() -> None:
    values = yaml.safe_load((ROOT / "recipes" / "evaluate" / "all-methods.yaml").read_text(encoding="utf-8"))
    recipe = EvaluateRecipe.model_validate(values)
    rows = [(row.method, row.options) for row in recipe.methods if row.temperature is None]
    variants = [row for row in method_variants() if "datastore" not in row[1]]
    assert rows == [row for row in variants if row != ("medusa", {"acceptance": "typical"})]
    sampled = {row.method for row in recipe.methods if row.temperature == 1}
    assert sampled == set(METHODS) - {"beam", "mjgd"}
    assert "medusa typical T=1" in recipe.labels()
    fewer = EvaluateRecipe.model_validate(values | {"table": None, "heads": None})
    assert not {"slim-s", "medusa", "bigram"} & {row.method for row in fewer.methods}


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("autoregressive", {}, ()),
        ("beam", {"draft_beams": 4}, ("drafter",)),
        ("suffix", {"fallback": "drafter"}, ("drafter",)),
        ("suffix", {"fallback": "heads", "datastore": "table"}, ("heads", "table")),
        ("slim-s", {}, ("heads", "table")),
        ("slim-s", {"correlation": "none"}, ("heads",)),
    ],
)
def test_needs_depend_on_options(name: str, options: dict[str, Any], needs: tuple[str, ...]) -> None:
    assert method_config(name, options).needs == needs
    if needs:
        with pytest.raises(ValueError, match=f"requires `{needs[0]}`"):
            build_method(name, Parts(), Sampling(), **options)


def test_methods_are_lossless_if_their_verifiers_are(make_llama: Any, make_heads: Any) -> None:
    import numpy as np
    from draftsmith.checkpoints.table.table import BigramTable
    from draftsmith.checkpoints.table.texts import TextStore
    from draftsmith.decode.models.loading import wrap_model

    texts = [np.arange(100, dtype=np.int32) % 12]
    table = BigramTable.from_documents(texts, 12)
    table.texts = TextStore.from_documents(texts)
    parts = Parts(wrap_model(make_llama(12)), make_heads(4, 32, 12), table)
    for name, options in method_variants():
        is_lossless = build_method(name, parts, Sampling(1.0), **options).verifier.lossless
        assert is_lossless == method_config(name, options).is_lossless, name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("speculativ", {}, "'speculativ'.*'speculative'"),
        ("speculative", {"gama": 2}, "'gama'.*'gamma'.*Known: drafter, gamma"),
        ("speculative", {"gamma": 0}, "'gamma' .* at least 1, got 0"),
        ("speculative", {"gamma": 2.5}, "'gamma' .* must be int, got 2.5"),
        ("speculative", {"gamma": True}, "'gamma' .* must be int, got True"),
        ("speculative", {"parallel": 1}, "'parallel' .* must be bool, got 1"),
        ("suffix", {"fallback": "head"}, "'fallback' .* cannot be 'head'.*'heads'"),
        ("bild", {"fallback_threshold": "high"}, "must be float, got 'high'"),
    ],
)
def test_wrong_options_are_refused_with_the_nearest_valid_ones(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        method_config(name, options)


def test_defaults_are_filled_in_and_integers_are_valid_floats() -> None:
    assert method_config("bpd", {}) == METHODS["bpd"](max_depth=None)
    assert method_config("mjsd", {"likelihood_threshold": 1}).likelihood_threshold == 1  # type: ignore[attr-defined]

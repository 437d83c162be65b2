"""EAGLE-3, DFlash and DSpark recipes: trained on live and cached states, verified, and evaluated as a drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.heads.dspark import load_block_drafter
from draftsmith.checkpoints.heads.eagle import load_eagle
from draftsmith.checkpoints.verify.inspect import find_faults
from draftsmith.decode.methods import METHODS, method_config
from draftsmith.recipes.assemble.teacher import prepare_teacher
from draftsmith.recipes.commands.evaluation.evaluate import run_evaluate
from draftsmith.recipes.commands.training.train import make_run, run_train
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import parse_recipe
from draftsmith.train.parallel.accelerate import make_accelerator

TOKENS = 60


def recipe_of(values: dict[str, Any], target: Path, **more: Any) -> Any:
    """Return a recipe for EAGLE-3 heads with the data and training of a drafter's recipe, changed by `more`."""
    values = {name: values[name] for name in ("data", "train", "out")} | {"kind": "heads", "architecture": "eagle3"}
    values |= {
        "target": str(target),
        "num_heads": 2,
        "vocabulary": {"tokens": TOKENS},
        "objective": {"forward-kl": 1.0},
    }
    return parse_recipe(values | {"measure": {"prompts": 2, "new_tokens": 4}} | more, "the test's recipe")


@pytest.mark.parametrize(
    ("architecture", "norms"),
    [
        ("eagle3", []),
        ("eagle3", ["fc_norm", "norm_output"]),
        ("dflash", []),
        pytest.param("dspark", [], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_on_cached_states_equals_live_states(
    architecture: str,
    norms: list[str],
    tiny_drafter: Callable[[Path], dict[str, Any]],
    tiny_pair: Path,
    tmp_path: Path,
) -> None:
    """The trained weights are equal up to rounding. All methods with a drafter write the target's greedy text."""
    values, target = tiny_drafter(tmp_path), tiny_pair / "target"
    load: Callable[[Path], Any]
    load, more = load_eagle, {"norms": norms}
    if architecture != "eagle3":
        load = load_block_drafter
        more = {"architecture": architecture, "num_heads": 5, "num_layers": 2, "anchors": 9}
    if architecture == "dspark":
        more["dspark"] = {"markov_rank": 6, "markov_start": str(tiny_pair / "table"), "sample_from_anchor": False}
    run_train(recipe_of(values, target, **more))
    hidden = {"cache": str(tmp_path / "hidden"), "dtype": "float32"}
    cached = recipe_of(values, target, out=str(tmp_path / "cached"), hidden=hidden, **more)
    prepare_teacher(cached)
    run_train(cached)
    live, other = (load(Path(out)) for out in (values["out"], cached.out))
    others = other.state_dict()
    assert all((weight - others[name]).abs().max() < 1e-4 for name, weight in live.state_dict().items())
    if norms:
        assert [*live.norms] == norms
        assert any((weight != 1).any() for weight in live.fc_norm.parameters())
    assert live.proposed is not None
    assert len(live.proposed) == TOKENS
    manifest, faults = find_faults(Path(values["out"]))
    assert faults == []
    assert manifest is not None
    assert manifest.shapes["architecture"] == architecture
    rows = [{"method": name} for name in METHODS if method_config(name, {}).needs == ("drafter",)]
    evaluated = {"kind": "evaluate", "out": str(tmp_path / "results.json"), "target": str(target), "energy": "off"}
    evaluated |= {"drafter": values["out"], "prompts": str(tiny_pair / "corpus" / "heldout.jsonl"), "limit": 3}
    evaluated |= {"template": "chatml", "max_new_tokens": 12, "methods": [{"method": "autoregressive"}, *rows]}
    results = run_evaluate(EvaluateRecipe.model_validate(evaluated))
    identical = {row["method"]: row["identical_to_greedy"] for row in results["methods"] if row["lossless"]}
    assert len(identical) >= 9
    assert set(map(tuple, identical.values())) == {(3, 3)}


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (
            {"norms": ["norm_output"]},
            {"norms": ["norm_output", "fc_norm"]},
            r"norms: \['norm_output'\] before, \['fc_norm', 'norm_output'\] now",
        ),
        (
            {"architecture": "dflash", "mask_token": 5},
            {"architecture": "dflash", "mask_token": 9},
            "mask_token: 5 before, 9 now",
        ),
    ],
    ids=["norms", "mask_token"],
)
def test_training_is_not_resumed_with_other_settings(
    first: dict[str, Any],
    other: dict[str, Any],
    message: str,
    tiny_drafter: Callable[[Path], dict[str, Any]],
    tiny_pair: Path,
    tmp_path: Path,
) -> None:
    values, accelerator = tiny_drafter(tmp_path), make_accelerator("no")
    values["train"] |= {"steps": 2}

    def fit(changes: dict[str, Any]) -> Any:
        return make_run(recipe_of(values, tiny_pair / "target", **changes), accelerator).fit(accelerator)

    fit(first)
    assert fit(first).resumed_from == 2
    with pytest.raises(ValueError, match=message):
        fit(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projection": "target"}, r"projection.*eagle3"),
        ({"states": "before-norm"}, r"states.*eagle3"),
        ({"layers": [0, 9]}, r"between 0 and 1.*9"),
        ({"layers": [1, 0]}, r"between 0 and 1.*1, 0"),
        ({"architecture": "medusa", "layers": [1]}, r"layers.*medusa"),
        ({"architecture": "dflash", "norms": ["norm_output"]}, r"norms.*dflash"),
        ({"norms": ["fc_norm", "norm_before_fc"]}, r"fc_norm.*norm_before_fc.*remove one"),
        ({"architecture": "dflash", "num_layers": 0}, r"num_layers.*at least 1.*0"),
        ({"architecture": "dflash", "slot_weights": "d-pace"}, r"d-pace.*cross-entropy"),
        ({"architecture": "dflash", "mask_token": 9999}, r"mask_token.*9999"),
        ({"architecture": "dflash", "dspark": {"markov_rank": 8}}, r"dspark.*dflash"),
        ({"architecture": "dspark", "dspark": {"markov_rank": 999, "markov_start": "table"}}, r"markov_rank.*319.*999"),
    ],
    ids=str,
)
def test_invalid_recipes_are_refused(
    changes: dict[str, Any],
    message: str,
    tiny_drafter: Callable[[Path], dict[str, Any]],
    tiny_pair: Path,
    tmp_path: Path,
) -> None:
    if "markov_start" in changes.get("dspark", {}):
        changes = changes | {"dspark": changes["dspark"] | {"markov_start": str(tiny_pair / "table")}}
    with pytest.raises(ValueError, match=message):
        run_train(recipe_of(tiny_drafter(tmp_path), tiny_pair / "target", **changes))

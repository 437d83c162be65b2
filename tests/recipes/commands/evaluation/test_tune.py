"""`draftsmith tune`: rounds of evaluations, files, and methods that cannot be tuned."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.checkpoints.heads.dflash import save_dflash
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.evaluation.tuning import space
from draftsmith.decode.evaluation.tuning.tuner import choose_winner
from draftsmith.recipes.commands.evaluation import tune
from draftsmith.recipes.commands.evaluation.tune import prompts_of_rounds, rows_to_tune, run_tune
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.results import load_results
from transformers import T5Config, T5ForConditionalGeneration


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the search to two values per option and small rounds."""
    for name, grid in space.GRIDS.items():
        few = {key: values if len(values) == 1 else values[:2] for key, values in grid.items()}
        monkeypatch.setitem(space.GRIDS, name, dict(list(few.items())[:2]))
    monkeypatch.setattr(tune, "FIRST_PROMPTS", 2)


@pytest.fixture
def recipe(evaluation: dict[str, Any], tmp_path: Path) -> Path:
    """Write a recipe with lossless methods, lossy methods, and a method that cannot be tuned."""
    methods: list[dict[str, Any]] = [{"method": name} for name in ("autoregressive", "speculative", "bild", "beam")]
    methods.insert(2, {"method": "multi-candidate", "options": {"attention": "batch"}})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(evaluation | {"max_new_tokens": 16, "limit": 4, "methods": methods}))
    return path


def loaded(recipe: Path, *changes: str) -> EvaluateRecipe:
    evaluation = load_recipe(str(recipe), list(changes))
    assert isinstance(evaluation, EvaluateRecipe)
    return evaluation


def test_rounds_grow_to_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [prompts_of_rounds(*each) for each in ((80, 1), (32, 1), (5, 1), (80, 8))] == [
        [8, 32, 80],
        [8, 32],
        [5],
        [32, 80],
    ]


def test_rounds_are_evaluations_and_the_last_settings_a_recipe(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned, folder = run_tune(loaded(recipe)), recipe.parent / "results.tune"
    first, last = (load_results(folder / f"round-{number}.json") for number in (1, 2))
    assert (first["prompts"], last["prompts"]) == (2, 4)
    assert [row["method"] for row in first["methods"]].count("bild") == 4
    assert {row["label"] for row in last["methods"]} == {"autoregressive", *(each.label for each in tuned)}
    assert all(row["options"]["attention"] == "batch" for row in first["methods"] if row["method"] == "multi-candidate")
    lossy = [each for each in tuned if not each.is_lossless]
    assert 1 <= len(lossy) <= 3
    assert all(each.perplexity is not None for each in lossy)
    output = " ".join(capsys.readouterr().out.split())
    assert "not tuned: beam: it has no settings to tune" in output
    assert f"best: {choose_winner(tuned)[1]}" in output
    chosen = loaded(folder / "recipe.yaml")
    assert chosen.labels() == ["autoregressive", *(each.label for each in tuned)]
    before = (folder / "round-2.json").stat().st_mtime_ns
    assert run_tune(loaded(recipe)) == tuned
    assert (folder / "round-2.json").stat().st_mtime_ns == before


def test_methods_that_cannot_be_tuned_are_named_with_the_reason(recipe: Path) -> None:
    plain = "{method: autoregressive}, {method: autoregressive, temperature: 0.7}"
    _, left_out = rows_to_tune(loaded(recipe, f"methods=[{plain}, {{method: mjgd}}, {{method: suffix}}, "
                                              "{method: speculative, temperature: 0.7}]"))  # fmt: skip
    assert "it has no settings" in left_out["mjgd"]
    assert "temperature=0.7" in left_out["speculative T=0.7"]
    with pytest.raises(ValueError, match=r"beam.*speculative"):
        run_tune(loaded(recipe, "methods=[{method: autoregressive}, {method: beam}]"))


def test_all_tunable_methods_of_a_pair_are_tuned(tiny_pair: Path, tmp_path: Path) -> None:
    """A pair with every artifact can use all methods of the search space except parallel drafting."""
    values = {part: str(tiny_pair / part) for part in ("target", "drafter", "heads", "table")}
    values |= {"prompts": str(tiny_pair / "corpus" / "heldout.jsonl"), "out": str(tmp_path / "results.json")}
    sizes = {"template": "chatml", "limit": 2, "max_new_tokens": 6, "temperature": 1.0, "device": "cpu"}
    recipe = EvaluateRecipe.model_validate(
        {"kind": "evaluate", "methods": [{"method": "autoregressive"}]} | values | sizes
    )
    rows, left_out = rows_to_tune(recipe)
    names = {space.tuned_name(row.method, row.options, 1.0) for row in rows.values()}
    assert (names, left_out) == (set(space.GRIDS) - {space.PARALLEL}, {})
    assert {each.method for each in run_tune(recipe)} >= {"bild", "relaxed-opt", "relaxed-uno", "mjsd", "medusa"}


def test_all_tunable_methods_of_an_encoder_decoder_are_tuned(recipe: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    for name in ("target", "drafter"):
        tokenizer = load_tokenizer(str(recipe.parent / name))
        model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes))
        model.save_pretrained(recipe.parent / name)
    assert run_tune(loaded(recipe, "methods=[{method: autoregressive}]", "limit=2", "max_new_tokens=6"))


def test_drafts_of_a_block_drafter_are_at_most_a_block(
    recipe: Path, make_llama: Any, make_dflash: Any, tmp_path: Path
) -> None:
    save_dflash(make_dflash(make_llama(320), block_size=4), tmp_path / "dflash")
    rows, _ = rows_to_tune(loaded(recipe, f"drafter={tmp_path / 'dflash'}"))
    options = [row.options for row in rows.values() if row.method == "speculative"]
    assert sorted(each["gamma"] for each in options) == [1, 2, 3]
    trees = [row.options["k_config"] for row in rows.values() if row.method == "multi-candidate"]
    assert max(tree.count("x") for tree in trees) < 3

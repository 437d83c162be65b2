"""Recipes of papers as they are read: settings, labels and artifacts are checked before anything runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.commands.evaluation.recipe import evaluation_or_paper, pair_folder, paper_recipe
from draftsmith.recipes.commands.papers.experiments import EXPERIMENTS
from draftsmith.recipes.commands.papers.papers import shipped_papers
from draftsmith.recipes.schema.claims import HELD, NOT_JUDGED, judge, parse_claim
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.experiments import checked_settings
from draftsmith.recipes.schema.loading import load_recipe
from draftsmith.recipes.schema.papers import PaperRecipe
from typer.testing import CliRunner


def test_settings_are_right_and_the_papers_own_numbers_bear_the_claims_out() -> None:
    judged, kinds = [], []
    for recipe in map(paper_recipe, shipped_papers()):
        if recipe.experiment == "evaluate":
            continue
        kinds.append(recipe.experiment)
        for each in (recipe, recipe.on_pair("PAIR")):
            checked_settings(each.experiment, each.settings)
        for claim in (parse_claim(section.holds) for section in recipe.claims):
            named = list(claim.references())
            blank = dict.fromkeys(reference.metric for reference in named)
            rows = [{"label": label} | blank | numbers for label, numbers in recipe.theirs.items()]
            judged.append(judge(claim, rows, known=[reference.label for reference in named]).status)
    assert set(judged) == {HELD, NOT_JUDGED}
    assert judged.count(HELD) >= 30
    assert set(kinds) == set(EXPERIMENTS) - {"evaluate"}


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [
        ("acceptance", {"candidate": [1]}, "unknown key 'settings.candidate'. Did you mean 'candidates'"),
        ("acceptance", {"sources": ["bigram"], "candidates": [1, 2]}, "several candidates are those of a drafter"),
        ("acceptance", {"temperatures": [-1]}, "'settings.temperatures.0': input should be greater than or equal to 0"),
        ("acceptance", {"candidates": [2, 2]}, "'settings.candidates' names a value twice: 2, 2"),
        ("acceptance", {"temperatures": [0], "epsilons": [0.1]}, "`epsilons` needs a temperature above 0"),
        ("simulation", {"study": "draft"}, "`settings.study` is 'draft'. Did you mean 'drafts'"),
        ("simulation", {"study": "drafts", "shares": [1]}, "unknown key 'settings.shares'. Did you mean 'share'"),
        ("saturation", {"sizes": [1]}, "'settings.source' is missing"),
        ("energy", {"runs": 0}, "'settings.runs': input should be greater than or equal to 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(experiment: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_settings(experiment, settings)


def test_labels_and_categories_of_experiments_are_checked_when_the_recipe_is_read() -> None:
    for name, override, message in (
        ("slides/alpha", "claims.0.holds=driftr.alpha > 1", r"the row 'driftr', .* Did you mean 'drafter T="),
        ("slides/alpha", 'theirs={"drafter T=0": {alhpa: 1}}', r"the metric 'alhpa', .* Did you mean 'alpha'\?"),
        ("theory/batch-drafts", 'theirs={"M=3": {rejections: 1}}', r"the row 'M=3', .* Did you mean 'M="),
        ("slim/correlation", 'theirs={"with corelation": {head_2: 1}}', "Did you mean 'with correlation'"),
        ("slim/correlation", 'theirs={"with correlation": {head_x: 1}}', "the metric 'head_x'"),
        ("slim/heads", 'theirs={"SLiM 1 [codng]": {speedup: 1}}', r"the category 'codng', .* Did you mean 'coding'\?"),
        ("mjsd/energy", 'theirs={"batch 3": {joules: 1}}', "the row 'batch 3'"),
    ):
        with pytest.raises(ValueError, match=message):
            paper_recipe(name, [override])


def test_a_pair_is_one_that_is_there(tiny_pair: Path, tmp_path: Path) -> None:
    assert pair_folder(f"quickstart={tiny_pair}") == str(tiny_pair)
    with pytest.raises(ValueError, match="--pair is quickstart or quickstart=FOLDER, got 'quick'"):
        pair_folder("quick")
    with pytest.raises(ValueError, match=r"no embedded pair in .*run `draftsmith quickstart` first"):
        pair_folder(f"quickstart={tmp_path}")


def test_an_evaluation_of_ones_own_takes_the_pair_too(tiny_pair: Path) -> None:
    pair = str(tiny_pair)
    plain = load_recipe("evaluate/all-methods")
    swapped = evaluation_or_paper("evaluate/all-methods", ["limit=3"], {}, pair)
    assert isinstance(plain, EvaluateRecipe)
    assert isinstance(swapped, EvaluateRecipe)
    assert swapped.target == f"{pair}/target"
    assert swapped.out == "runs/evaluate/all-methods/results-quickstart.json"
    assert swapped.limit == 3
    assert swapped.methods == plain.methods
    with pytest.raises(ValueError, match="--pair brings its own drafter"):
        evaluation_or_paper("evaluate/all-methods", [], {"drafter": "d"}, pair)
    paper = evaluation_or_paper("slim/heads", ["evaluate.limit=7"], {"target": "t", "out": "o"}, None)
    assert isinstance(paper, PaperRecipe)
    assert paper.evaluate is not None
    assert (paper.evaluate.target, paper.evaluate.limit, paper.out) == ("t", 7, "o")


def test_without_hub_or_files_a_real_recipe_says_what_is_missing(
    cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    planned = CliRunner().invoke(app, ["evaluate", "mjsd/main", "--plan"])
    assert planned.exit_code == 0, planned.output
    assert "meta-llama/Llama-2-13b-hf" in planned.output
    done = cli("evaluate", "mjsd/main", "evaluate.limit=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "meta-llama/Llama-2-13b-hf" in done.stderr
    assert "Traceback" not in done.stderr


def test_recipes_are_written_as_they_are_read() -> None:
    for recipe in map(paper_recipe, shipped_papers()):
        values = yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))
        assert PaperRecipe.model_validate(values) == recipe

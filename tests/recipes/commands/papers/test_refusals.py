"""Mistakes in papers' recipes are refused before anything runs, with what is wrong and the nearest right name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.recipes.commands.evaluation.recipe import evaluation_or_paper, find_pair, paper_recipe
from draftsmith.recipes.commands.papers.experiments import EXPERIMENTS
from draftsmith.recipes.commands.papers.papers import run_paper, run_papers
from draftsmith.recipes.schema.papers import PaperRecipe


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("claims.0.holds=long.speedup", ["'long.speedup'"]),
        ("settings={rns: {}}", ["'settings.rns'", "'settings.runs'"]),
        ("settings={runs: {a: {drafer: x}}}", ["'settings.runs.a.drafer'", "'settings.runs.a.drafter'"]),
        ("small={limt: 3}", ["'small.limt'", "'small.limit'"]),
        ("settings={runs: {A b: {}, a-b: {}}}", ["`settings.runs`", "A b", "a-b"]),
        ("evaluate.out=x", ["'evaluate.out'"]),
        ("evaluate=null", ["'evaluate'"]),
        ("experiment=evaluat", ["'experiment'", "'evaluate'"]),
        ("evaluate.methods=[{method: speculative}]", ["`autoregressive`"]),
        ("evaluate.lmit=3", ["'evaluate.lmit'", "'evaluate.limit'"]),
    ],
)
def test_a_recipe(own: Path, override: str, named: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        paper_recipe(str(own), [override])


@pytest.mark.parametrize(
    ("experiment", "changes", "settings", "named"),
    [
        ("acceptance", {}, {"candidate": [1]}, ["'settings.candidate'", "'settings.candidates'"]),
        ("acceptance", {}, {"sources": ["bigram"], "candidates": [1, 2]}, ["`candidates`", "[drafters]"]),
        ("acceptance", {}, {"temperatures": [-1]}, ["'settings.temperatures.0'"]),
        ("saturation", {}, {"sizes": [1]}, ["'settings.source'"]),
        ("energy", {}, {"runs": 0}, ["'settings.runs'", "1", "0"]),
        ("acceptance", {"table": None}, {"sources": ["bigram"]}, ["`evaluate.table`"]),
        ("acceptance", {"drafter": None}, {}, ["`evaluate.drafter`"]),
        ("correlation", {"heads": "h", "table": None}, {}, ["`evaluate.table`"]),
        ("saturation", {}, {"source": "s", "sizes": [1]}, ["`evaluate.heads`"]),
    ],
)
def test_settings_and_parts_of_an_experiment(
    experiment: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    named: list[str],
    pair: dict[str, Any],
    tmp_path: Path,
) -> None:
    evaluate = pair | {"target": "no/such/target"} | changes
    about = {"kind": "paper", "out": "unused", "paper": "theory", "where": "nowhere", "experiment": experiment}
    with pytest.raises(ValueError, match=".*".join(map(re.escape, named))):
        EXPERIMENTS[experiment](
            PaperRecipe.model_validate(about | {"evaluate": evaluate, "settings": settings}), tmp_path
        )


def test_recipes_that_would_write_to_one_folder(own: Path, tiny_pair: Path, tmp_path: Path) -> None:
    twin, other = tmp_path / "elsewhere" / "own.yaml", own.with_name("other.yaml")
    twin.parent.mkdir()
    for path in (twin, other):  # one name, and one `out`
        path.write_text(own.read_text())
    for second, out, folder in ((twin, tmp_path / "out", "own"), (other, None, "runs/own-quickstart")):
        with pytest.raises(ValueError, match=folder):
            run_papers([str(own), str(second)], find_pair(f"quickstart={tiny_pair}"), out)
    assert not (tmp_path / "out").exists()


def test_a_pair_that_is_not_there(tiny_pair: Path, tmp_path: Path) -> None:
    pair = find_pair(f"quickstart={tiny_pair}")
    for given, named in (("quick", "'quick'.*runs/quick"), (f"quickstart={tmp_path}", str(tmp_path))):
        with pytest.raises(ValueError, match=named):
            find_pair(given)
    with pytest.raises(ValueError, match="drafter"):
        evaluation_or_paper("evaluate/all-methods", [], {"drafter": "d"}, pair)


def test_a_gpu_that_is_not_there(own: Path, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = paper_recipe(str(own), ["evaluate.device=cuda"])
    with pytest.raises(ValueError, match="`device` is 'cuda'"):
        run_paper(recipe, "own", find_pair(f"quickstart={tiny_pair}"), tmp_path)

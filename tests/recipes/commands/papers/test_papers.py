"""The papers' tables: every shipped recipe runs on an embedded pair, names are checked, what is done is kept."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.checkpoints.artifact.artifact import load_manifest, save_artifact
from draftsmith.data.rendering.templates import CHATML_JINJA
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.models.draft_vocabulary import keep_tokens, save_vocabulary
from draftsmith.decode.models.loading import load_model
from draftsmith.recipes.commands.evaluation.estimate import show_plan
from draftsmith.recipes.commands.evaluation.recipe import evaluation_or_paper, find_pair, paper_recipe
from draftsmith.recipes.commands.papers import papers
from draftsmith.recipes.commands.papers.papers import folder_of, run_paper, run_papers, shipped_papers
from draftsmith.recipes.report.papers import title_of
from draftsmith.recipes.schema.claims import HELD, NOT_HELD, NOT_JUDGED, judge, metric_of, parse_claim
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import find_recipe
from draftsmith.recipes.schema.papers import Pair, PaperRecipe
from draftsmith.recipes.schema.results import MethodRow, load_results

NAMES = shipped_papers()
SHIPPED = {"multi-candidate": 10, "mjsd": 7, "slides": 5, "slim": 9, "theory": 1}
SMALLEST: dict[str, dict[str, Any]] = {
    "energy": {"settings.runs": 2, "settings.batches": [1, 2]},
    "saturation": {"settings.sizes": [4, 8], "settings.candidates": 4, "limit": 3},
    "correlation": {"settings.candidates": 4},
}


MEDUSA = ("{method: autoregressive}", "{method: autoregressive}\n    - {method: medusa}")
"""A method that the recipe has no heads for."""

ANY = Pair("any", "PAIR", "PAIR/prompts", "plain", "PAIR/drafter", 4)


def quickstart(folder: Path) -> Pair:
    return find_pair(f"quickstart={folder}")


@cache
def shipped(name: str) -> PaperRecipe:
    return paper_recipe(name)


def smallest(recipe: PaperRecipe) -> PaperRecipe:
    changes = {"limit": 1, "max_new_tokens": 6, "compare_with_transformers": False}
    changes |= SMALLEST.get(recipe.experiment, {})
    return recipe.model_copy(update={"small": recipe.small | changes})


def test_every_paper_recipe_that_is_meant_to_be_there_is_shipped() -> None:
    assert Counter(name.split("/")[1] for name in NAMES) == SHIPPED


EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "evaluate/mjsd/main": ("BiLD has a lower perplexity than token by token.",),  # not for Llama-2 on CNN/DailyMail
    # SD makes 1.25 at both temperatures for Vicuna-33B on WMT
    "evaluate/multi-candidate/main-33b-160m": ("Where SD makes fewer tokens a step, several candidates gain more.",),
}
"""What a paper says in words, and its own table does not bear out in every cell."""


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_means_what_it_says(name: str) -> None:
    """A wrong figure in a recipe, or a claim that the paper does not make, shows here."""
    recipe = shipped(name)
    assert recipe.out == f"runs/papers/{name.removeprefix('evaluate/')}"
    assert find_recipe(name).read_text().startswith(f"# draftsmith evaluate {name}")
    rows = [{"label": label} | found for label, found in recipe.theirs.items()]
    for section in recipe.claims:
        status = judge(parse_claim(section.holds), rows, tolerance=section.tolerance).status
        wanted = (NOT_HELD,) if section.says in EXCEPTIONS.get(name, ()) else (HELD, NOT_JUDGED)
        assert status in wanted, section
    if recipe.experiment == "evaluate":
        check_names(recipe)
    on_pair = recipe.on_pair(ANY)
    assert all(source.startswith("PAIR/") for source in on_pair.sources())  # nothing is asked of a hub
    assert on_pair.evaluate.device_map is None
    values = yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert PaperRecipe.model_validate(values) == recipe  # as it is written, it is read


def check_names(recipe: PaperRecipe) -> None:
    """A wrong name in a claim would never be judged, one in the paper's numbers never be shown."""
    evaluations = [*recipe.evaluations().items(), *recipe.on_pair(ANY).evaluations().items()]
    labels = {label for _, each in evaluations for label in each.labels()}
    labels |= {f"{run}: {label}" for run, each in evaluations for label in each.labels()}
    metrics = {*MethodRow.model_fields, "closed_form", "flops_per_step", "seconds_per_step"}
    named = [(label, metric) for label, numbers in recipe.theirs.items() for metric in numbers]
    named += [each for claim in recipe.claims for each in parse_claim(claim.holds).names.values()]
    for label, metric in named:
        assert label.partition(" [")[0] in labels
        assert metric.partition(".")[0] in metrics
    assert (recipe.evaluate.energy == "auto") == any("joules" in metric for _, metric in named)


FIRST = {(shipped(name).paper, shipped(name).experiment): name for name in reversed(NAMES)}
"""One recipe of each paper and experiment; the others run under the marker `slow`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.slow) for name in NAMES]
)
def test_each_shipped_recipe_runs_on_the_pair(name: str, tiny_pair: Path, tmp_path: Path) -> None:
    recipe = smallest(shipped(name))
    result = run_paper(recipe, name, quickstart(tiny_pair), tmp_path / "out")
    assert [claim["says"] for claim in result["claims"]] == [claim.says for claim in recipe.claims]
    labels = [row["label"] for row in result["rows"]]
    assert len(labels) == len(set(labels)) >= 2
    assert f"Beside the paper: {escape(title_of(result))}" in (tmp_path / "out" / "report.html").read_text()
    for row in result["rows"]:
        for metric, pairs in row.get("pairs", {}).items():
            assert set(pairs) <= {"over", "under", "base_over", "base_under", "exp", "gamma"}
            value = metric_of(row, metric)
            if value is not None:
                assert value == pytest.approx(ratio(pairs), rel=1e-6), (row["label"], metric)
    kept = json.loads((tmp_path / "out" / "paper.json").read_text())
    assert kept == json.loads(json.dumps(result))


def ratio(pairs: Mapping[str, Any]) -> float:
    value = sum(pairs["over"]) / sum(pairs["under"])
    if "base_over" in pairs:
        value /= sum(pairs["base_over"]) / sum(pairs["base_under"])
    if "gamma" in pairs:
        return sum(value**depth for depth in range(pairs["gamma"] + 1))
    return math.exp(value) if pairs.get("exp") else value


@pytest.fixture
def real_pair(tiny_pair: Path, tmp_path: Path) -> Pair:
    """A pair as the recipe `realpair` leaves it: the target's own template, one drafter, of 200 tokens."""
    folder = shutil.copytree(tiny_pair, tmp_path / "pair", ignore=shutil.ignore_patterns("drafter-stage1"))
    shutil.copy(find_recipe("realpair"), folder / "quickstart.yaml")
    tokenizer = load_tokenizer(str(folder / "target"))
    tokenizer.chat_template = CHATML_JINJA
    tokenizer.save_pretrained(folder / "target")
    model, manifest = load_model(str(folder / "drafter")), load_manifest(folder / "drafter")
    keep_tokens(model, torch.arange(200))

    def write(place: Path) -> None:
        model.save_pretrained(place)
        save_vocabulary(model, place)

    about = {name: getattr(manifest, name) for name in ("target", "recipe", "data", "training")}
    about |= {"vocab_size": manifest.vocab_size, "tokenizer_fingerprint": manifest.tokenizer_fingerprint}
    save_artifact(folder / "drafter", kind="drafter", write=write, shapes={"proposed_tokens": 200}, **about)
    return find_pair(f"realpair={folder}")


REAL = ("evaluate/multi-candidate/drafters", "evaluate/slides/alpha", "evaluate/theory/pair", "evaluate/mjsd/beams")


@pytest.mark.parametrize("name", [*REAL, *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in REAL)])
def test_each_shipped_recipe_runs_on_a_pair_of_one_stage(name: str, real_pair: Pair, tmp_path: Path) -> None:
    recipe = smallest(shipped(name))
    used = recipe.on_pair(real_pair)
    assert (used.evaluate.template, used.evaluate.prompts) == ("tokenizer", f"{real_pair.folder}/corpus/heldout.jsonl")
    result = run_paper(recipe, name, real_pair, tmp_path / "out")
    missing = {claim["says"] for claim in result["claims"] if "no row" in claim["why"]}
    if recipe.small.get("more_drafters"):
        second = {claim.says for claim in recipe.claims if '"drafter 2' in claim.holds or '"drafter 3' in claim.holds}
        assert missing == second, "what needs another drafter is not judged"
        assert result["not_rerun"].startswith(str(recipe.not_rerun))
        assert result["not_rerun"] != recipe.not_rerun
    else:
        assert result["not_rerun"] == recipe.not_rerun
    assert str(folder_of(recipe, real_pair)) == f"{recipe.out}-realpair"


def test_rows_of_more_heads_than_there_are_are_left_out() -> None:
    used = shipped("evaluate/slim/heads").on_pair(ANY._replace(heads=2))
    assert used.evaluate.labels() == ["autoregressive", "SLiM 1", "SLiM 2"]
    assert used.not_rerun is not None
    assert "SLiM 3, SLiM 4, Medusa 4" in used.not_rerun


def test_the_real_recipe_for_t5_runs_with_encoder_decoders(stand_ins: Any, tmp_path: Path) -> None:
    """Without a pair: the recipe's own template, runs and rows, with tiny models in place of its large ones."""
    target, drafter = stand_ins.target("google-t5/t5-3b"), stand_ins.drafter("google-t5/t5-small")
    words = [f"evaluate.target={target}", f"evaluate.drafter={drafter}", f"evaluate.prompts={stand_ins.rows}"]
    words += [f"settings.runs.{run}.drafter={drafter}" for run in ("base", "large")]
    words += ["evaluate.limit=2", "evaluate.max_new_tokens=5", "evaluate.dtype=float32"]
    recipe = paper_recipe("slides/speedups-translation", words)
    result = run_paper(recipe, "t5", None, tmp_path / "out")
    runs = ("small", "base", "large")
    labels = [f"{run}: {kind}T={warm}" for run in runs for warm in (0, 1) for kind in ("plain ", "")]
    assert [row["label"] for row in result["rows"]] == labels
    assert set(recipe.theirs) < set(labels)
    assert result["pair"] is None
    for row in result["rows"]:
        assert row["tokens_per_step"] >= 1


def run_small(own: Path, pair: Path, folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    recipe = paper_recipe(str(own)).model_copy(update={"small": changes})
    return {row["label"]: row for row in run_paper(recipe, "own", quickstart(pair), folder)["rows"]}


def test_rows_of_several_runs_are_pooled_prompt_by_prompt(own: Path, tiny_pair: Path, tmp_path: Path) -> None:
    runs = {"few": {"limit": 2}, "many": {"limit": 5, "seed": 1}}
    rows = run_small(own, tiny_pair, tmp_path, **{"settings.runs": runs, "settings.pooled": True})
    files = [load_results(tmp_path / run / "results.json") for run in runs]
    parts, bases = ([each["methods"][index] for each in files] for index in (2, 0))
    prompts = [prompt for part in parts for prompt in part["by_prompt"]]
    pooled, tokens = rows["long"], sum(prompt["tokens"] for prompt in prompts)
    assert rows["few: long"]["tokens_per_step"] == parts[0]["tokens_per_step"]
    assert pooled["prompts"] == 7
    assert pooled["tokens_per_step"] == pytest.approx(tokens / sum(prompt["steps"] for prompt in prompts))
    rates = [sum(part["tokens"] for part in side) / sum(part["seconds"] for part in side) for side in (parts, bases)]
    assert pooled["speedup"] == pytest.approx(rates[0] / rates[1])
    nats = sum(math.log(prompt["perplexity"]) * prompt["tokens"] for prompt in prompts)
    assert pooled["perplexity"] == pytest.approx(math.exp(nats / tokens))
    flops = sum(part["flops_per_token"]["total"] * part["tokens"] for part in parts)
    assert pooled["flops_per_token.total"] == pytest.approx(flops / tokens)


def test_categories_are_rows_of_their_own_prompts(own: Path, tiny_pair: Path, tmp_path: Path) -> None:
    asked = tmp_path / "questions.jsonl"
    lines = [{"category": "one" if n % 3 else "two", "turns": [f"the tree {n}?"]} for n in range(6)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"prompts": str(asked), "limit": 6, "settings.categories": True}
    found = run_small(own, tiny_pair, tmp_path / "out", **changes)
    long = load_results(tmp_path / "out" / "results.json")["methods"][2]
    for name, count in (("one", 4), ("two", 2)):
        row = found[f"long [{name}]"]
        assert row["prompts"] == count
        for metric in ("tokens_per_step", "acceptance_rate", "speedup", "perplexity"):
            assert row[metric] == pytest.approx(long["by_category"][name][metric], rel=1e-9)


def test_what_has_finished_is_kept_until_something_changes(
    own: Path, tiny_pair: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> tuple[str, float]:
        assert run_papers([str(own)], quickstart(tiny_pair), tmp_path / "out") == []
        return capfd.readouterr().err, (tmp_path / "out" / "own" / "results.stamp.json").stat().st_mtime_ns

    text = own.read_text()
    said, when = run()
    assert "already" not in said
    own.write_text(text.replace("holds: long.tokens_per_step >", "holds: long.tokens_per_step <"))
    said, again = run()
    assert "had finished already" in said
    assert again == when  # a claim is judged anew, nothing is decoded anew
    claim = json.loads((tmp_path / "out" / "own" / "paper.json").read_text())["claims"][0]
    assert claim["paper_status"] == "not held"
    own.write_text(text.replace("gamma: 3", "gamma: 4"))
    said, again = run()
    assert "already" not in said
    assert again > when
    when = again
    prompts = tiny_pair / "corpus" / "heldout.jsonl"
    stamp = prompts.stat()
    os.utime(prompts, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert run()[1] > when
    left = tmp_path / "out" / "own" / "results.stamp.json"
    left.write_text(left.read_text()[:40])  # what is cut off has not finished
    assert "already" not in run()[0]


def test_what_was_measured_stands_though_it_cannot_be_judged(
    own: Path, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no judge")

    monkeypatch.setattr(papers, "judged", fail)
    with pytest.raises(ValueError, match="no judge"):
        run_paper(paper_recipe(str(own)), "own", quickstart(tiny_pair), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "paper.json").read_text())["rows"]


def test_a_run_that_finished_before_the_others_is_not_decoded_again(
    own: Path, tiny_pair: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = paper_recipe(str(own))
    runs = {"first": {}, "second": {"drafter": str(tmp_path / "missing")}}
    broken = recipe.model_copy(update={"small": {"settings.runs": runs}})
    with pytest.raises(ValueError, match="missing"):
        run_paper(broken, "own", quickstart(tiny_pair), tmp_path / "out")
    when = (tmp_path / "out" / "first" / "results.json").stat().st_mtime_ns
    runs["second"] = {"drafter": "{pair}/drafter-stage1"}
    run_paper(
        recipe.model_copy(update={"small": {"settings.runs": runs}}), "own", quickstart(tiny_pair), tmp_path / "out"
    )
    assert (tmp_path / "out" / "first" / "results.json").stat().st_mtime_ns == when
    assert "first/results.json had finished already" in capfd.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text()
    for run in runs:
        assert f'<a href="{run}/report.html">' in page


def test_one_that_fails_does_not_keep_others_out_of_the_tables(
    own: Path, tiny_pair: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = own.with_name("bad.yaml")
    bad.write_text(own.read_text().replace(*MEDUSA))
    assert run_papers([str(bad), str(own)], quickstart(tiny_pair), tmp_path / "out") == ["bad"]
    result, results = (
        json.loads((tmp_path / "out" / "own" / f"{name}.json").read_text()) for name in ("paper", "results")
    )
    page = (tmp_path / "out" / "own" / "report.html").read_text()
    assert all(text in page for text in ("Beside the paper: Speculative", "3.12", "All methods"))
    assert results["paper"]["claims"] == result["claims"]
    assert (result["claims"][0]["paper"], result["claims"][1]["status"]) == ("3.12 > 1.75", HELD)
    whole = json.loads((tmp_path / "out" / "papers.json").read_text())
    assert all("pairs" not in row for result in whole["papers"] for row in result["rows"])
    assert ([result["name"] for result in whole["papers"]], list(whole["failed"])) == (["own"], ["bad"])
    assert "bad: method 'medusa' needs `heads`" in capfd.readouterr().err
    text = unescape((tmp_path / "out" / "papers.html").read_text())
    for part in (">own</h2>", "bad failed: method 'medusa'", "More drafting makes more tokens a step.", ">1.75<"):
        assert part in text


def test_a_plan_shows_rows_and_tokens(own: Path, tiny_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = paper_recipe(str(own), ["evaluate.repeats=2"])
    show_plan(recipe)
    shown = " ".join(capsys.readouterr().out.split())
    assert all(text in shown for text in ("no/target", "no/drafter", "mt-bench", f"{3 * 4 * 8 * 2} tokens"))
    show_plan(recipe, quickstart(tiny_pair))
    assert "heldout.jsonl" in capsys.readouterr().out
    for name in NAMES:
        show_plan(shipped(name))


def test_an_evaluation_of_ones_own_takes_the_pair_too(tiny_pair: Path) -> None:
    swapped = evaluation_or_paper("evaluate/all-methods", ["limit=3"], {}, quickstart(tiny_pair))
    assert isinstance(swapped, EvaluateRecipe)
    assert (swapped.target, swapped.limit) == (f"{tiny_pair}/target", 3)
    assert swapped.out == "runs/evaluate/all-methods/results-quickstart.json"
    paper = evaluation_or_paper("slim/heads", ["evaluate.limit=7"], {"target": "t", "out": "o"}, None)
    assert isinstance(paper, PaperRecipe)
    assert paper.evaluate is not None
    assert (paper.evaluate.target, paper.evaluate.limit, paper.out) == ("t", 7, "o")

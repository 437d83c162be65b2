"""Lossy methods in `tune`: their settings are decoded, and the frontier is what no other beats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.decode.engine import Limits, generate
from draftsmith.decode.evaluation.measure import sample_texts
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.quality import perplexity
from draftsmith.decode.evaluation.tuning import search, space
from draftsmith.decode.evaluation.tuning.costs import CostModel, Curve, Overhead
from draftsmith.decode.evaluation.tuning.recording import record
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.rng import Rng
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.evaluation.tune import run_tune
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe

COSTS = CostModel(Curve((1, 17), (1.0, 1.6)), Curve((1, 8), (0.1, 0.2)), 0.05, 0.1, {}, Overhead(0.1, 0.005))
SMALL = space.Space(
    nodes=20,
    gamma=4,
    fallbacks=(0.1, 0.4),
    rollbacks=(0.5, 4.0),
    tolerances=(0.05, 0.6),
    thresholds=(0.05, 0.9),
    confidences=(0.1, 0.9),
    decoded_prompts=6,
)


@pytest.mark.parametrize("name", space.DECODED)
def test_every_setting_is_worth_what_decoding_it_gives(make_llama: Any, make_heads: Any, name: str) -> None:
    """Against all prompts decoded together: a row does not depend on its neighbours."""
    target, sampling, limits = wrap_model(make_llama(12, seed=0)), Sampling(1.0), Limits(16)
    parts = Parts(wrap_model(make_llama(12, seed=1, pard_token=7)), make_heads(3, 32, 12))
    prompts = [[1 + place, 3] for place in range(8)]
    recording = record(target, parts, prompts, sample_texts(target, prompts, limits, sampling), sampling)
    choices = search.search_by_decoding(target, parts, recording, COSTS, name, limits, {}, SMALL, seed=5)
    assert len(choices) == len(space.list_settings(name, sampling, parts, SMALL, recording)) > 3
    assert [each.speedup for each in choices] == sorted((each.speedup for each in choices), reverse=True)
    for choice in choices:
        method, counts = build_method(space.method_name(name), parts, sampling, **choice.options), Tally()
        texts: list[list[int]] = [[] for _ in range(6)]
        for step in generate(target, *method, prompts[:6], limits, sampling, Rng.for_rows(5, 6)):
            for row, new in enumerate(step.new_ids):
                counts.add_step(step, row)
                texts[row] += new
        assert choice.tokens_per_step == pytest.approx(counts.tokens / counts.steps)
        assert (choice.found_by, choice.lossless) == ("decoding", name not in space.LOSSY)
        surprise = None if choice.lossless else pytest.approx(perplexity(target, prompts[:6], texts))
        assert choice.perplexity == surprise
    knobs = {"bild": "rollback_threshold", "mjsd": "likelihood_threshold", space.PARALLEL: "gamma"}
    knobs |= dict.fromkeys(space.TREES, "min_prob") | dict.fromkeys(space.CHAINS, "num_drafts")
    knobs["adaptive"] = "confidence_threshold"
    by_knob: dict[float, list[float]] = {}
    for choice in choices:
        by_knob.setdefault(choice.options[knobs.get(name, "epsilon")], []).append(choice.tokens_per_step)
    means = [np.mean(rates) for _, rates in sorted(by_knob.items())]
    assert means[0] != means[-1]
    if name not in (space.TYPICAL, *space.CHAINS):  # whose threshold is the higher the larger ε is
        fewer = ("mjsd", "adaptive", *space.TREES)  # tokens the higher the limit is
        assert (means[0] < means[-1]) == (name not in fewer)


def test_nothing_beats_what_is_on_the_frontier() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 30):
        pairs = {(speed / 4, worth / 4) for speed, worth in rng.integers(1, 12, (count, 2)).tolist()}
        step = ("bild", {}, 1.0, 0.0, 2.0, 0.1)
        choices = [space.Setting(*step, speed, False, "decoding", worth) for speed, worth in pairs]
        best = [(each.speedup, each.perplexity) for each in search.pareto_frontier(choices, 100)]
        beaten = {one for one in pairs for two in pairs if one != two and two[0] >= one[0] and two[1] <= one[1]}
        assert best == sorted(pairs - beaten, key=lambda pair: pair[1])
        few = [(each.speedup, each.perplexity) for each in search.pareto_frontier(choices, 3)]
        assert len(few) == min(3, len(best))
        assert {best[0], best[-1] if len(few) > 1 else best[0]} <= set(few) <= set(best)


@pytest.fixture
def recipe(tiny_pair: Path, tmp_path: Path) -> EvaluateRecipe:
    """At temperature 1, lossless rows and lossy ones."""
    methods: list[dict[str, Any]] = [
        {"method": "autoregressive"},
        {"method": "speculative"},
        {"method": "bild", "options": {"gamma": 3}},
        {"method": "relaxed-uno"},
        {"method": "medusa", "label": "typical", "options": {"acceptance": "typical"}},
    ]
    parts = {name: str(tiny_pair / name) for name in ("target", "drafter", "heads")}
    where = {"prompts": str(tiny_pair / "corpus" / "heldout.jsonl"), "out": str(tmp_path / "results.json")}
    sizes = {"template": "chatml", "limit": 4, "max_new_tokens": 12, "temperature": 1.0, "device": "cpu"}
    return EvaluateRecipe.model_validate({"kind": "evaluate", "methods": methods, **parts, **where, **sizes})


def test_lossy_methods_are_decoded_confirmed_and_drawn(recipe: EvaluateRecipe) -> None:
    results = run_tune(recipe, SMALL)
    found_by = {name: {each["found_by"] for each in tried} for name, tried in results["methods"].items()}
    decoded = ("bild", "relaxed-uno", space.TYPICAL)
    assert found_by == {"speculative": {"replay"}} | {name: {"decoding"} for name in decoded}
    assert all(each["options"]["gamma"] == 3 for each in results["methods"]["bild"])
    assert {row["method"] for row in results["confirmed"] if not row["lossless"]} == {"bild", "relaxed-uno", "medusa"}
    assert next(row for row in results["confirmed"] if row["label"] == results["best"])["lossless"]
    folder = Path(recipe.out).with_suffix(".tune")
    chosen = load_recipe(str(folder / "recipe.yaml"))
    assert isinstance(chosen, EvaluateRecipe)
    lossy = [row for row in chosen.methods if row.method != "autoregressive"][1:]
    assert [row.options for row in lossy] == [row["options"] for row in results["confirmed"] if not row["lossless"]]
    assert json.loads((folder / "tune.json").read_text())["schema"] == 3

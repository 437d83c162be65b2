"""Tuning: the search finds the best of an exhaustive sweep; the command runs, keeps its recording and says what it did.

Costs are given where choices are compared, so that nothing depends on this machine's speed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from draftsmith.data.tokenizers import load_tokenizer
from draftsmith.decode.engine import Limits
from draftsmith.decode.evaluation.measure import decode, sample_texts
from draftsmith.decode.evaluation.metrics import total
from draftsmith.decode.evaluation.tuning import search, space
from draftsmith.decode.evaluation.tuning.costs import CostModel, Curve, Overhead
from draftsmith.decode.evaluation.tuning.recording import record
from draftsmith.decode.evaluation.tuning.replay import predict
from draftsmith.decode.methods import Parts, build_method
from draftsmith.decode.models.loading import wrap_model
from draftsmith.decode.tree import parse_tree
from draftsmith.decode.warpers import Sampling
from draftsmith.recipes.commands.evaluation.tune import run_tune
from draftsmith.recipes.schema.evaluation import EvaluateRecipe
from draftsmith.recipes.schema.loading import load_recipe
from transformers import T5Config, T5ForConditionalGeneration

COSTS = CostModel(
    Curve((1, 5, 17, 65), (1.0, 1.1, 1.6, 3.0)),
    Curve((1, 8), (0.12, 0.16)),
    heads=0.05,
    baseline=0.1,
    default=Overhead(0.1, 0.005),
)
SPACE = space.Space(nodes=24, gamma=8, depth=4, candidates=4, head_candidates=8)


def test_k_configurations_never_widen_and_keep_to_the_budget() -> None:
    found = set(space.k_configurations(24, 4, (1, 2, 3, 4)))
    for depth in range(1, 5):
        for branching in itertools.product((1, 2, 3, 4), repeat=depth):
            nodes = 1 + sum(int(np.prod(branching[: level + 1])) for level in range(depth))
            falls = all(after <= before for before, after in itertools.pairwise(branching))
            assert (branching in found) == (falls and nodes <= 24 and branching[0] > 1), branching
    assert len(found) > 20


@pytest.fixture
def tiny(make_llama: Any, make_heads: Any) -> tuple[Any, Parts, list[list[int]]]:
    """A target, a drafter that agrees now and then, heads of which the first is the target's own projection."""
    model = make_llama(12, seed=0)
    heads = make_heads(3, 32, 12)
    prompts = np.random.default_rng(0).integers(0, 12, (10, 4)).tolist()
    return wrap_model(model), Parts(wrap_model(make_llama(12, seed=0, sharpness=1.05)), heads), prompts


@pytest.mark.parametrize("name", ["speculative", "multi-candidate", "prompt-lookup", "medusa", "bpd"])
def test_the_choice_is_the_best_of_a_decoded_sweep(tiny: tuple[Any, Parts, list[list[int]]], name: str) -> None:
    """Every setting is decoded; the choice's tokens per step, at the same costs, are worth as much as the best's."""
    target, parts, prompts = tiny
    limits, sampling = Limits(24), Sampling()
    recording = record(target, parts, prompts, sample_texts(target, prompts, limits, sampling), sampling)
    choices = search.search_by_replay(recording, parts, COSTS, name, space=SPACE)
    speeds = {}
    for options in space.list_settings(name, sampling, parts, SPACE, recording):
        method = build_method(name, parts, sampling, **options)
        counts = total(decode(target, method, sampling, 0, prompt, limits).tally for prompt in prompts)
        nodes = counts.nodes / counts.steps
        if nodes <= SPACE.nodes:
            seconds = COSTS.step_seconds(name, method, nodes)
            speeds[json.dumps(options)] = COSTS.speedup(counts.tokens / counts.steps, seconds)
    assert len(speeds) == len(choices) > 2
    assert speeds[json.dumps(choices[0].options)] == pytest.approx(max(speeds.values()), rel=1e-9)
    assert choices[0].speedup == pytest.approx(max(speeds.values()), rel=1e-9)
    assert max(speeds.values()) > 1.03 * min(speeds.values())  # so that the choice matters


def test_no_other_head_tree_accepts_more(tiny: tuple[Any, Parts, list[list[int]]]) -> None:
    """Of all trees of three paths of ranks below 3 and depth 2, none takes fewer steps than the one that is built."""
    target, parts, prompts = tiny
    sampling = Sampling()
    texts = sample_texts(target, prompts, Limits(24), sampling)
    recording = record(target, parts, prompts, texts, sampling, head_candidates=12)
    trees = space.best_head_trees(recording, [3, 6])
    assert [len(trees[size]) for size in (3, 6)] == [3, 6]
    for paths in trees.values():
        parsed, _ = parse_tree(space.format_tree(paths))
        assert parsed.nodes == 1 + len(paths)  # prefixes are there already
        assert all(path[:-1] in paths for path in paths if len(path) > 1)
    found = predict(recording, parts, "medusa", {"tree": space.format_tree(trees[3])})
    assert found is not None
    singles = [(rank,) for rank in range(12)]
    every = [*singles, *itertools.product(range(12), repeat=2)]
    best = 0.0
    for paths in itertools.combinations(every, 3):
        if all(path[:-1] in paths for path in paths if len(path) > 1) and paths[0] <= (2,):
            other = predict(recording, parts, "medusa", {"tree": space.format_tree(list(paths))})
            assert other is not None
            best = max(best, other.tokens_per_step)
    assert found.tokens_per_step >= 0.99 * best


@pytest.fixture
def recipe(evaluation: dict[str, Any], tmp_path: Path) -> Path:
    """Methods that are searched by replay and by decoding, and one that is not."""
    methods: list[dict[str, Any]] = [{"method": name} for name in ("autoregressive", "speculative", "mjsd", "beam")]
    methods.insert(2, {"method": "multi-candidate", "options": {"attention": "batch"}})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(evaluation | {"max_new_tokens": 16, "methods": methods}))
    return path


def test_tune_writes_what_it_found_and_can_be_evaluated(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = space.Space(nodes=8, gamma=3, depth=2, candidates=2, thresholds=(0.1,))
    results = run_tune(load_recipe(str(recipe)), bounds)  # type: ignore[arg-type]
    folder = recipe.parent / "results.tune"
    assert json.loads((folder / "tune.json").read_text()) == json.loads(json.dumps(results))
    assert set(results["methods"]) == {"speculative", "multi-candidate", "mjsd"}
    assert results["tried"]["speculative"] == 3
    assert all(each["options"]["attention"] == "batch" for each in results["methods"]["multi-candidate"])
    for row in results["confirmed"]:
        assert row["speedup"] > 0
        if row["lossless"]:  # at temperature 0 the very texts were recorded
            assert row["predicted"]["tokens_per_step"] == pytest.approx(row["tokens_per_step"])
        else:
            assert row["perplexity"] >= 1
    assert 1 <= sum(not row["lossless"] for row in results["confirmed"]) <= 2  # the frontier
    best = next(row for row in results["confirmed"] if row["label"] == results["best"])
    assert best["lossless"]
    said = capsys.readouterr().out
    assert "confirmed by decoding" in said
    assert results["left_out"] == [{"method": "beam", "why": "none of its settings is searched"}]
    assert "not tuned: beam: none of its settings is searched" in said
    assert f"best: {best['label']}: {best['speedup']:.2f} times" in " ".join(said.split())
    before = (folder / "confirmed.json").stat().st_mtime_ns
    again = run_tune(load_recipe(str(recipe)), bounds)  # type: ignore[arg-type]
    assert again["confirmed"] == json.loads(json.dumps(results["confirmed"]))
    assert (folder / "confirmed.json").stat().st_mtime_ns == before
    chosen = load_recipe(str(folder / "recipe.yaml"))
    assert isinstance(chosen, EvaluateRecipe)
    assert [row.method for row in chosen.methods][:4] == ["autoregressive", "speculative", "multi-candidate", "mjsd"]
    assert len({row.label or row.method for row in chosen.methods}) == len(chosen.methods)


def test_methods_without_a_setting_are_named_with_the_reason(
    recipe: Path, tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal and in the file; and with nothing left to decode the command ends well."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"method": "multi-candidate", "options": {"k_config": "2x2"}}, "1 nodes"),
        ({"method": "speculative", "temperature": 0.7}, "0.7"),
        ({"method": "bpd"}, "1 nodes"),
        ({"method": "bpd", "label": "second"}, "bpd is tuned once"),
        ({"method": "mjgd"}, "none of its settings"),
    ]
    values = yaml.safe_load(recipe.read_text()) | {part: str(tiny_pair / part) for part in ("target", "drafter")}
    values |= {"heads": str(tiny_pair / "heads"), "prompts": str(tiny_pair / "corpus" / "heldout.jsonl"), "limit": 2}
    plain = [{"method": "autoregressive"}, {"method": "autoregressive", "temperature": 0.7}]
    asked = EvaluateRecipe.model_validate(values | {"methods": [*plain, *(row for row, _ in rows)]})
    results = run_tune(asked, space.Space(nodes=1, gamma=1, depth=1, candidates=1, head_candidates=1))
    assert results["methods"] == results["tried"] == {}
    reasons = {each["method"].partition(" ")[0]: each["why"] for each in results["left_out"]}
    assert len(results["left_out"]) == len(reasons) == len(rows)
    for row, words in rows:
        assert words in reasons[row.get("label", row["method"])]
    shown = capsys.readouterr().out
    assert all(f"{each['method']}: {each['why']}" in shown for each in results["left_out"])
    nothing = load_recipe(str(recipe), ["methods=[{method: autoregressive}, {method: beam}]"])
    with pytest.raises(ValueError, match=r"beam.*speculative"):
        run_tune(nothing)  # type: ignore[arg-type]


def test_all_that_can_be_tuned_of_an_encoder_decoder_is(recipe: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    for name in ("target", "drafter"):
        tokenizer = load_tokenizer(str(recipe.parent / name))
        model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **sizes))
        model.save_pretrained(recipe.parent / name)
    changes = ["methods=[{method: autoregressive}]", "limit=2", "max_new_tokens=6"]
    lossy: dict[str, Any] = dict.fromkeys(("fallbacks", "rollbacks", "tolerances", "thresholds"), (0.4,))
    bounds = space.Space(nodes=4, gamma=2, depth=1, candidates=2, **lossy)
    results = run_tune(load_recipe(str(recipe), changes), bounds)  # type: ignore[arg-type]
    assert set(results["methods"]) == {
        *(
            "speculative",
            "multi-candidate",
            "adaptive",
            "prompt-lookup",
            "dynamic-tree",
            "suffix",
            "suffix, drafter",
            "bild",
            "relaxed-opt",
            "mjsd",
        )
    }

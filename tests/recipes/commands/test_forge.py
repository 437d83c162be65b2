"""A forge: what it decides in planted situations, and one that runs, is killed, and decides the same."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.checkpoints.artifact.artifact import load_manifest
from draftsmith.checkpoints.storage.safe_read import sealed
from draftsmith.recipes.commands.pairs.budget import measured_groups, race_rows
from draftsmith.recipes.commands.pairs.in_engine import Draft, check_engine, drafts_of, worth_in_engine
from draftsmith.recipes.commands.pairs.rules import (
    Candidate,
    Measured,
    Shape,
    affordable,
    best_row,
    candidates_of,
    ceiling,
    floor,
    merged,
    outlook,
    rivals,
    survivors,
    winner_of,
    worth_training,
)
from draftsmith.recipes.commands.pairs.stages import around, given_rows, row_named, together
from draftsmith.recipes.schema.forge import ForgeRecipe
from draftsmith.recipes.schema.loading import load_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

REAL = Shape(layers=30, of_layer=3.5e6, hidden=576, vocabulary=49152)
DRAFTER = Candidate("drafter of 4 layers", "drafter", (0, 1, 28, 29), 0.14)


def found(name: str, steps: int, tokens: float, speedup: float, spread: float = 0.05) -> Measured:
    return Measured(name, f"{name} row", steps, tokens, speedup, (speedup - spread, speedup + spread))


def test_candidates_are_cut_as_the_target_allows() -> None:
    names = [each.name for each in candidates_of(REAL, 8192, has_eagle=True)]
    drafters = ["drafter of 2 layers", "drafter of 4 layers", "drafter of 4 layers at once (PARD)"]
    assert names == [*drafters, "EAGLE-3's layer", "Medusa's heads"]
    few = candidates_of(Shape(4, 3.5e6, 576, 1000), 8192, has_eagle=False)
    assert [each.layers for each in few] == [(0, 3), (0, 3), ()]
    assert [each.kind for each in candidates_of(Shape(1, 3.5e6, 576, 1000), 8192, has_eagle=False)] == ["heads"]
    costs = [each.cost for each in candidates_of(REAL, 8192, has_eagle=True)]
    assert all(0 < cost < 0.3 for cost in costs)
    assert costs[0] < costs[1]


@pytest.mark.parametrize(
    ("seconds", "trained"),
    [
        (lambda tokens: 1.0, True),  # more tokens cost nothing
        (lambda tokens: 1 + 0.05 * (tokens - 1), True),
        (lambda tokens: tokens, False),  # as with batch 64 on two cores: each token costs what the first does
        (lambda tokens: 0.9 * tokens + 0.1, False),
    ],
    ids=["free", "this machine", "nothing pays", "hardly cheaper"],
)
def test_what_cannot_win_is_not_trained(seconds: Callable[[float], float], trained: bool) -> None:
    able, said = worth_training(DRAFTER, seconds)
    assert able == trained
    assert f"{ceiling(DRAFTER, seconds):.2f}" in said


def test_where_nothing_pays_it_says_with_how_many_it_could() -> None:
    """Sixteen tokens are free, and each further one costs what they do together: a draft of one token pays as long as
    all texts' tokens are sixteen at most."""
    curve = [max(1.0, tokens / 16) for tokens in range(1000)]
    able, said = worth_training(DRAFTER, lambda tokens: curve[round(tokens)], 64)
    assert not able
    assert "with 8 at a time" in said
    assert worth_training(DRAFTER, lambda tokens: curve[round(tokens)], 8)[0]


def test_a_floor_and_a_ceiling_are_drafts_of_which_nothing_and_most_is_kept() -> None:
    """With free tokens of the target: 1 / 1.14; (1 + 0.95 + … + 0.95⁵) / (1 + 5 · 0.14), or fewer drafted; a draft at
    once costs one forward."""
    kept = [1 + sum(0.95**i for i in range(1, n + 1)) for n in range(1, 6)]
    by_length = [tokens / (1 + 0.14 * n) for n, tokens in enumerate(kept, 1)]
    assert ceiling(DRAFTER, lambda tokens: 1.0) == pytest.approx(max(by_length))
    assert floor(DRAFTER, lambda tokens: 1.0) == pytest.approx(1 / 1.14)
    heads = Candidate("heads", "heads", (), 0.14)
    assert floor(heads, lambda tokens: tokens) == pytest.approx(1 / 5.14), "four at least are drafted at once"
    assert ceiling(heads, lambda tokens: 1.0) == pytest.approx((1 + 0.9 + 0.9 * 0.75 + 0.9 * 0.75 * 0.6) / 1.14)


def test_outlooks_grow_as_they_did() -> None:
    first, second = found("a", 100, 1.3, 1.1), found("a", 200, 1.365, 1.15)
    off = 2**0.5 * 0.05  # of two measurements
    assert outlook([first], 100) == pytest.approx((1.1 - off, 1.1 + off))
    low, high = outlook([first, second], 800)
    assert low == pytest.approx(1.15 - off)
    assert high == pytest.approx((1.15 + off) * 1.05**2)
    assert outlook([first, found("a", 200, 1.2, 1.0)], 800)[1] == pytest.approx(1 + off), "none where there was none"


def test_nobody_who_cannot_win_goes_on() -> None:
    history = {"a": [found("a", 100, 1.3, 1.1)], "b": [found("b", 100, 1.4, 1.2)], "c": [found("c", 100, 1.1, 0.8)]}
    ends = dict.fromkeys(history, 400)
    ranked, said = survivors(history, ends, 0.9)
    assert ranked == ["b", "a", "c"]
    assert "c 0.80 x" in said
    assert survivors(history, ends, 1.5)[0] == ["b"], "a ends at 1.47 at most"
    assert survivors(history, ends, 2.0)[0] == [], "as on summaries, where look-up is ahead of all"


def test_several_places_send_half_on_in_turns() -> None:
    assert merged([["a", "b", "c", "d"]], 2) == ["a", "b"]
    assert merged([["a", "b", "c"], ["c", "d", "a"]], 3) == ["a", "c", "b"]
    assert merged([["a"], ["b"], ["c"]], 1) == ["a", "b", "c"], "the first of each goes on in any case"
    assert merged([["a", "b"], []], 0) == ["a"]
    assert merged([], 3) == []


def test_what_the_budget_does_not_pay_for_is_left_out() -> None:
    """Two rounds of 32 steps each, and one to the end: 32 · (2 · (1 + 2 + 9) + 9) = 1,056 s, without c 256."""
    rates = {"a": 1.0, "c": 9.0, "b": 2.0}
    assert affordable(rates, 1056.0) == (["a", "b", "c"], "")
    names, said = affordable(rates, 1055.0)
    assert names == ["a", "b"]
    assert "288 s (c)" in said
    assert affordable(rates, 255.0)[0] == ["a"]
    assert affordable(rates, 0.0)[0] == []


def test_rows_are_counted_and_prompts_shared() -> None:
    """Five candidates of three rows and a baseline each: 5, 3 and 1 evaluations at one place, 5, 4 and 4 at four."""
    assert race_rows([3] * 5, 2, 1) == 4 * (5 + 3 + 1)
    assert race_rows([3] * 5, 2, 4) == 4 * (5 + 4 + 4)
    assert race_rows([2, 3], 0, 1) == 3 + 4
    assert measured_groups(150.0, 10, 1.0, most=100) == 10
    assert [measured_groups(0.0, 10, 1.0, most=most) for most in (100, 3)] == [4, 3]


def test_rivals_are_those_within_reach_of_the_first() -> None:
    near = [found("a", 9, 1.1, 1.2), found("b", 9, 1.1, 1.11), found("c", 9, 1.1, 1.09), found("d", 9, 1.1, 0.99)]
    assert [each.name for each in rivals(near)] == ["a", "b"]
    assert rivals(near[3:]) == []


def test_rows_that_were_measured_apart_find_their_drafters() -> None:
    some = [
        Measured("look-up", "suffix", 0, 1.0, 1.0, (1.0, 1.0)),
        Measured("own", "speculative 2", 9, 1.0, 1.0, (1.0, 1.0)),
        Measured("heads", "suffix-heads table", 9, 1.0, 1.0, (1.0, 1.0)),
        Measured("runs/given", "speculative 4", 0, 1.0, 1.0, (1.0, 1.0)),
    ]
    trained: dict[str, dict[str, Any]] = {"own": {"drafters": ["runs/own"]}, "heads": {"heads": "runs/heads"}}
    rows, given = together(some, trained, ["runs/given"])
    assert [name for name, _ in rows] == ["suffix", "speculative", "suffix-heads", "speculative"]
    assert [options.get("drafter") for _, options in rows] == [None, None, None, 2]
    assert given == {"drafters": ["runs/own", "runs/given"], "heads": "runs/heads", "table": True}
    assert together(some[:1], trained, [])[1] == {"drafters": [], "table": False}
    again = [*some, replace(some[1], label="speculative 4"), replace(some[3], label="speculative 2")]
    rows, given = together(again, trained, ["runs/given"])
    assert [options.get("drafter") for _, options in rows] == [None, None, None, 2, None, 2], "each is read once"


def test_the_fastest_is_tuned_over_lengths_that_were_not_measured() -> None:
    close = [found("a", 9, 1.3, 1.2), found("a", 9, 1.2, 1.1), found("b", 9, 1.2, 1.1)]
    labelled = [replace(one, label=f"speculative {n}") for one, n in zip(close, (2, 4, 3), strict=True)]
    assert [each.label for each in around(labelled)] == [f"speculative {n}" for n in (2, 4, 3, 1, 3)]
    assert {each.name for each in around(labelled)[3:]} == {"a"}
    _, *near = around([replace(close[0], label="suffix table 4")])
    assert [row_named(each.label)[1]["nodes"] for each in near] == [3, 6, 8]
    assert around([replace(close[0], label="medusa 2x1")]) == [replace(close[0], label="medusa 2x1")]


def test_a_candidate_is_its_fastest_row_not_plain_decoding() -> None:
    rows = [("autoregressive", True, 1.0), ("a", True, 0.8), ("b", True, 0.9), ("c", False, 1.2)]
    methods: list[dict[str, Any]] = [
        {"label": label, "lossless": lossless, "speedup": speedup, "speedup_interval": None, "tokens_per_step": 1.0}
        for label, lossless, speedup in rows
    ]
    assert best_row("x", 0, {"methods": methods}).label == "b"
    assert best_row("x", 0, {"methods": methods[:1]}).label == "autoregressive", "where no row is true"


def test_a_given_drafter_is_tried_as_what_it_is(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    make_llama(64).save_pretrained(tmp_path / "drafter")
    make_llama(64, pard_token=7).save_pretrained(tmp_path / "parallel")
    assert [row[1] for row in given_rows(tmp_path / "drafter")] == [{"gamma": gamma} for gamma in (1, 2, 4)]
    assert [row[1] for row in given_rows(tmp_path / "parallel")] == [{"gamma": n, "parallel": True} for n in (2, 4)]


def test_the_winner_is_faster_than_plain_decoding_and_ties_are_named() -> None:
    slow = [found("a", 0, 1.1, 0.95), found("b", 9, 1.2, 0.9)]
    winner, said = winner_of(slow)
    assert winner is None
    assert "0.95" in said
    assert f"{1.1 / 0.95:.2f}" in said, "what it would have to keep"
    winner, said = winner_of([*slow, found("near", 0, 1.1, 1.04)])
    assert winner is None, "its interval begins at 0.99"
    assert "nothing is surely faster" in said
    winner, said = winner_of([*slow, found("given", 0, 1.5, 1.3), found("c", 9, 1.6, 1.28)])
    assert winner is not None
    assert winner.name == "given", "a drafter that was there is the best"
    assert "within its interval: c row" in said


@pytest.fixture
def forged(tiny_pair: Path, corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command for a small target, for so long."""

    def command(out: Path, *more: str, hours: str = "0.01") -> list[str]:
        words = ["forge", str(tiny_pair / "target"), "--prompts", str(corpus / "rows.json"), "--out", str(out)]
        return [sys.executable, "-m", "draftsmith", *words, "--hours", hours, "template=chatml", *more]

    return command


@pytest.mark.parametrize(
    "kills",
    [
        ("answers.jsonl",),
        pytest.param(("probe.jsonl", "costs.json", "answers.jsonl"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_it_runs_is_killed_and_decides_the_same(
    forged: Callable[..., list[str]], tmp_path: Path, kills: tuple[str, ...]
) -> None:
    """Killed as soon as each of these is there. Speeds are measured once, so that what is decided by them stands."""
    out = tmp_path / "forge"
    for ready in kills:
        with subprocess.Popen(forged(out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            until = time.monotonic() + 120
            while not (out / ready).exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert process.poll() is None, f"{ready} was to be met"
            process.kill()
    done = subprocess.run(forged(out), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = json.loads((out / "forge.json").read_text())
    again = subprocess.run(forged(out), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    second = json.loads((out / "forge.json").read_text())
    assert first["story"] == second["story"]
    assert first["places"] == second["places"]
    assert any("look-up in the text" in line for line in lines_of(first))
    page = (out / "forge.html").read_text()
    assert "How it was found" in page
    if first["places"][0]["winner"] is not None:
        assert load_recipe(str(out / "winner.yaml"), kinds=("evaluate",))
    other = subprocess.run(forged(out, "--temperature", "1"), capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert "`temperature`" in other.stderr


def planned(out: Path, seconds: Sequence[float] = (0.002, 0.002), answer: float = 0.05) -> None:
    """Costs of forwards, by default the same for any number of tokens, so that heads are worth training."""
    out.mkdir(parents=True)
    costs: dict[str, Any] = {
        "shape": {"layers": 2, "of_layer": 1e6, "hidden": 64, "vocabulary": 1000},
        "nodes": [1, 64],
    }
    costs |= {"seconds": seconds, "seconds_per_answer": answer, "eagle": True}
    (out / "costs.json").write_text(json.dumps(sealed(costs)))


def lines_of(results: dict[str, Any]) -> list[str]:
    """Of its story."""
    return list(itertools.chain(*results["story"].values()))


def told(command: list[str], out: Path) -> dict[str, Any]:
    """What a forge tells that ran to its end."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads((out / "forge.json").read_text()))


@pytest.mark.parametrize(
    ("costs", "hours", "said"),
    [
        ({"answer": 60.0}, "0.01", "nothing is trained: the budget pays for 0 answers"),
        ({}, "0.002", "left for training"),
        ({"seconds": (0.002, 0.128)}, "0.01", "nothing is trained: no candidate could be faster"),
    ],
    ids=["no answers", "no training", "each token costs what the first does"],
)
def test_a_budget_too_small_and_costs_too_high_train_nothing(
    forged: Callable[..., list[str]], tmp_path: Path, costs: dict[str, Any], hours: str, said: str
) -> None:
    planned(out := tmp_path / "forge", **costs)
    found = told(forged(out, hours=hours), out)
    assert any(said in line for line in lines_of(found))
    assert not any(place["history"] for place in found["places"])
    assert len(found["places"][0]["untrained"]) >= 1
    assert not list(out.glob("trained/*-3*"))


def first_layers(folder: Path, tokenizer: Path, layers: int, kept: int) -> None:
    """A random target of which the first layer's MLP alone does anything: a model of that layer is the same, and what
    comes next depends on the last token alone, so that greedy text soon runs in circles."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=320, num_hidden_layers=layers, max_position_embeddings=512, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            idle = "o_proj" in name or ("down_proj" in name and "layers.0." not in name)
            weight.data.normal_(0.0, 0.0 if idle else weight.shape[1] ** -0.5)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:kept], kept
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


@pytest.fixture
def shallow(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command for a target of eight layers, of which drafters of two soon say what it says."""
    first_layers(tmp_path / "target", corpus / "tokenizer", 8, 8)

    def command(out: Path, *more: str) -> list[str]:
        words = ["forge", str(tmp_path / "target"), "--prompts", str(corpus / "rows.json"), "--out", str(out)]
        return [sys.executable, "-m", "draftsmith", *words, "template=chatml", *more]

    return command


@pytest.mark.slow
def test_planted_situations_are_decided_rightly(
    shallow: Callable[..., list[str]], corpus: Path, tmp_path: Path
) -> None:
    """Of a target whose greedy text runs in circles look-up is chosen; at temperature 1, where there is nothing to look
    up, the given drafter that says just what the target says at an eighth of its cost. One that was given beside it
    and says something else is never. The target has a tokenizer of its own, and its questions are nobody's corpus."""
    tokenizer, out = corpus / "tokenizer", tmp_path / "forge"
    first_layers(tmp_path / "given", tokenizer, 8, 1)
    first_layers(tmp_path / "other", tokenizer, 1, 1)
    given = ["--drafter", str(tmp_path / "other"), "--drafter", str(tmp_path / "given")]
    found = told(shallow(out, *given, "--temperature", "0,1", "--hours", "0.08"), out)
    greedy, drawn = (place["winner"] for place in found["places"])
    assert greedy["name"].startswith(("look-up", "the target's own answers"))
    assert drawn["name"] == str(tmp_path / "given")
    assert any(each["name"].endswith("drafter of 2 layers") for each in found["forecasts"]), "it was not alone"


@pytest.mark.slow
def test_training_is_launched_as_it_says(forged: Callable[..., list[str]], tmp_path: Path) -> None:
    """On two processes, whose manifests say so; a launch that fails ends it."""
    planned(out := tmp_path / "forge")
    settings = "--multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = forged(out, "processes=2", f"launch='{settings}'", hours="0.06")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained = [load_manifest(folder).training for folder in out.glob("trained/eagle-*") if folder.suffix == ""]
    assert {each["processes"] for each in trained if each} == {2}
    failing = forged(tmp_path / "other", "processes=2", "launch='--mixed_precision none'", hours="0.06")
    planned(tmp_path / "other")
    failed = subprocess.run(failing, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "--mixed_precision none" in failed.stderr.splitlines()[-1]


@pytest.mark.slow
def test_killed_at_ten_random_times_it_trains_the_same(forged: Callable[..., list[str]], tmp_path: Path) -> None:
    """Beside a forge that is left alone and knows the same measurements: the same story, the same weights bit for
    bit. Measurements are of their artifacts: had a weight changed, they would have been taken again."""
    chance, command, met = random.Random(0), forged(Path("forge"), hours="0.06"), 0
    killed, alone = ((tmp_path / name / "forge") for name in ("killed", "alone"))
    planned(killed)
    for _ in range(10):
        with subprocess.Popen(
            command, cwd=killed.parent, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as process:
            time.sleep(chance.uniform(4.0, 14.0))
            met += process.poll() is None
            process.kill()
    done = subprocess.run(command, cwd=killed.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for each in [*killed.glob("*.json"), killed / "corpus", *killed.glob("trained/*-16")]:
        if each.name != "forge.json":
            copy: Any = shutil.copytree if each.is_dir() else shutil.copy
            (alone / each.relative_to(killed)).parent.mkdir(parents=True, exist_ok=True)
            copy(each, alone / each.relative_to(killed))
    left = subprocess.run(command, cwd=alone.parent, capture_output=True, text=True, check=False)
    assert left.returncode == 0, left.stderr
    stories = [json.loads((folder / "forge.json").read_text())["story"] for folder in (killed, alone)]
    assert stories[0] == stories[1]
    weights = [
        {file.relative_to(folder): file.read_bytes() for file in folder.glob("trained/*/*.safetensors")}
        for folder in (killed, alone)
    ]
    assert met >= 5
    assert len([place for place in weights[0] if not place.parts[1].endswith("-16")]) >= 2, "that were not copied"
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_more_hours_train_what_was_chosen(shallow: Callable[..., list[str]], tmp_path: Path) -> None:
    """The race is not run again; a larger budget runs another, and both know what is spent."""
    out = tmp_path / "forge"
    first = told(shallow(out, "--temperature", "1", "--hours", "0.05"), out)
    again = told(shallow(out, "--temperature", "1", "--hours", "0.05"), out)
    assert first["places"][0]["side_by_side"]
    assert again["places"] == first["places"], "nothing was measured again"
    raced = {folder.name for folder in out.glob("trained/*-*[0-9]")}
    second = told(shallow(out, "--temperature", "1", "--hours", "0.05", "--more-hours", "0.005"), out)
    (new,) = {folder.name for folder in out.glob("trained/*-*[0-9]")} - raced
    chosen = [line for line in lines_of(first) if "spent" in line]
    assert [line for line in lines_of(second) if "spent" in line] == chosen
    kind, _, steps = new.rpartition("-")
    assert int(steps) > max(int(each.rpartition("-")[2]) for each in raced if each.startswith(f"{kind}-"))
    third = told(shallow(out, "--temperature", "1", "--hours", "0.06"), out)
    assert [line for line in lines_of(third) if "spent" in line] != chosen


def test_what_is_refused_at_the_start_leaves_the_folder_free(forged: Callable[..., list[str]], tmp_path: Path) -> None:
    out = tmp_path / "forge"
    for word, said in (("batch=64", "256 are needed"), ("max_prompt_tokens=1", "at most 1 tokens")):
        done = subprocess.run(forged(out, word), capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert {file.name for file in out.iterdir()} <= {"spent.json"}
    assert subprocess.run(forged(out, "--plan"), check=False).returncode == 0


def test_a_plan_trains_nothing(forged: Callable[..., list[str]], tmp_path: Path) -> None:
    out = tmp_path / "planned"
    done = subprocess.run(forged(out, "--plan"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((out / "plan.json").read_text())
    assert not (out / "forge.json").exists()
    assert found["places"][0]["winner"] is None
    assert not (out / "trained").exists()
    assert not (out / "answers.jsonl").exists()


@pytest.fixture
def in_vllm(vllm: object, tiny_pair: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """What a folder is worth in the stand-in of vLLM, which keeps three tokens a step."""
    (tmp_path / "target").symlink_to(tiny_pair / "target")
    asked = [{"conversations": [{"from": "human", "value": f"one two three {n}"}]} for n in range(8)]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "heldout.jsonl").write_text("\n".join(map(json.dumps, asked)))
    values: dict[str, Any] = {"kind": "forge", "target": str(tiny_pair / "target"), "out": str(tmp_path)}

    def worth(artifact: Path | None, name: str, tokens: int | None = None, **more: Any) -> list[str]:
        recipe = ForgeRecipe.model_validate(values | {"engine": "vllm"} | more)
        check_engine(recipe)
        return worth_in_engine(recipe, name, Draft(artifact, tokens), 8)

    return worth


def test_what_was_trained_is_exported_and_measured_in_its_engine(
    in_vllm: Callable[..., list[str]], tiny_pair: Path, tmp_path: Path
) -> None:
    """What was measured is not measured again."""
    said = in_vllm(tiny_pair / "heads", "heads", batch=[1, 2], temperature=[0, 1])
    assert [line.split(" tokens a step")[0] for line in said[:4]] == [
        f"vllm, heads, {count} at a time, temperature {heat}: 3.00" for heat in (0, 1) for count in (1, 2)
    ]
    assert said[4] == f"to serve it: draftsmith serve {tmp_path}/heads-vllm --engine vllm"
    assert load_manifest(tmp_path / "heads-vllm").export is not None
    (log,) = tmp_path.glob("serve-vllm.log")
    log.unlink()
    assert in_vllm(tiny_pair / "heads", "heads", batch=[1, 2], temperature=[0, 1]) == said
    assert not log.exists()


def test_a_given_drafter_is_served_too(
    in_vllm: Callable[..., list[str]], make_llama: Callable[..., Any], tiny_pair: Path, tmp_path: Path
) -> None:
    """One that is no artifact; one of other tokens, which decodes here alone, is not, and ends nothing."""
    for name in ("fits", "other"):
        shutil.copytree(tiny_pair / "target", tmp_path / name)
    make_llama(64).save_pretrained(tmp_path / "other")
    said = in_vllm(tmp_path / "fits", "given-1", tokens=2)
    assert "3.00 tokens a step" in said[0]
    assert said[1].endswith("--speculative-tokens 2")
    (refused,) = in_vllm(tmp_path / "other", "given-2")
    assert refused.startswith(f"vllm cannot draft with {tmp_path}/other: ")
    assert "64" in refused


def test_an_engine_is_measured_with_its_own_look_up(in_vllm: Callable[..., list[str]]) -> None:
    said = in_vllm(None, "look-up")
    assert said[0].startswith("vllm, look-up, 1 at a time, temperature 0: ")
    assert "ngram" in said[1]


def test_what_was_best_is_what_an_engine_drafts_with(tmp_path: Path) -> None:
    """With as many tokens as were best; each once."""
    some = [("own", "speculative 2"), ("look-up in the text", "suffix"), (str(tmp_path), "speculative 4")]
    best = [Measured(name, label, 0, 1.0, 1.0, (1.0, 1.0)) for name, label in [*some, ("own", "speculative 4")]]
    drafts = drafts_of(best, {"own": {"drafters": ["trained/drafter-2-9"]}}, [str(tmp_path)])
    assert drafts == {
        "drafter-2-9": Draft(Path("trained/drafter-2-9"), 2),
        "look-up": Draft(None, None),
        "given-1": Draft(tmp_path, 4),
    }


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--engine", "vllm"), "vllm is not on the PATH"),
        (("--engine", "vlm"), "vlm"),
        (("--engine", "llama.cpp", "llama_cpp=here"), "llama-server is not on the PATH"),
    ],
)
def test_an_engine_that_is_not_there_is_told_before_anything_is_done(
    forged: Callable[..., list[str]], tmp_path: Path, words: tuple[str, ...], wrong: str
) -> None:
    done = subprocess.run(
        forged(tmp_path / "none", *words), capture_output=True, text=True, check=False, env=os.environ | {"PATH": ""}
    )
    assert done.returncode == 2
    assert wrong in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_given_drafter_that_does_not_fit_is_left_out(
    forged: Callable[..., list[str]], tiny_pair: Path, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    make_llama(64).save_pretrained(tmp_path / "other")
    given = ["--drafter", str(tmp_path / "other"), "--drafter", str(tiny_pair / "drafter")]
    done = subprocess.run(forged(tmp_path / "out", *given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "forge.json").read_text())
    (left_out,) = (line for line in lines_of(found) if "left out" in line)
    assert "64" in left_out
    assert str(tiny_pair / "drafter") in [each["name"] for each in found["places"][0]["untrained"]]

"""How a forge decides, from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.recipes.commands.pairs.budget import measured_groups, race_rows
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
        Measured("heads", "suffix heads table", 9, 1.0, 1.0, (1.0, 1.0)),
        Measured("runs/given", "speculative 4", 0, 1.0, 1.0, (1.0, 1.0)),
    ]
    trained: dict[str, dict[str, Any]] = {"own": {"drafters": ["runs/own"]}, "heads": {"heads": "runs/heads"}}
    rows, given = together(some, trained, ["runs/given"])
    assert [name for name, _ in rows] == ["suffix", "speculative", "suffix", "speculative"]
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
    assert [row_named(each.label)[1]["max_nodes"] for each in near] == [3, 6, 8]
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

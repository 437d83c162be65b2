"""Decisions of the tuner and of the plan of a forge, on given measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from draftsmith.decode.evaluation.tuning.plan import (
    Candidate,
    ModelShape,
    affordable_candidates,
    best_draft,
    count_batches,
    count_rows,
    is_worth_training,
    list_candidates,
)
from draftsmith.decode.evaluation.tuning.tuner import (
    DecodingBackend,
    Measurement,
    Workload,
    choose_winner,
    interleave_rankings,
    tune,
    within_interval_of_best,
)

REAL = ModelShape(layers=30, layer_parameters=3.5e6, hidden=576, vocabulary=49152)
DRAFTER = Candidate("4-layer drafter", "drafter", (0, 1, 28, 29), 0.14)


def measured(name: str, steps: int, tokens: float, speedup: float, spread: float = 0.05) -> Measurement:
    return Measurement(name, f"{name} row", tokens, speedup, (speedup - spread, speedup + spread), steps)


def test_candidates_are_cut_as_the_target_allows() -> None:
    found = list_candidates(REAL, 8192, supports_eagle=True)
    assert [each.kind for each in found] == ["drafter", "drafter", "parallel", "eagle", "heads"]
    assert all(0 < each.cost < 0.3 for each in found)
    assert found[0].cost < found[1].cost
    few = list_candidates(ModelShape(4, 3.5e6, 576, 1000), 8192, supports_eagle=False)
    assert [each.layers for each in few] == [(0, 3), (0, 3), ()]
    assert [each.kind for each in list_candidates(ModelShape(1, 3.5e6, 576, 1000), 8192, False)] == ["heads"]


@pytest.mark.parametrize(
    ("seconds", "able"),
    [
        (lambda tokens: 1 + 0.05 * (tokens - 1), True),
        (lambda tokens: 0.9 * tokens + 0.1, False),  # each token costs almost what the first does
    ],
)
def test_candidates_that_cannot_win_are_not_trained(seconds: Callable[[float], float], able: bool) -> None:
    found, reason = is_worth_training(DRAFTER, seconds)
    assert found == able
    assert f"{best_draft(DRAFTER, seconds)[1]:.2f}" in reason


def test_the_best_draft_maximises_tokens_per_cost() -> None:
    """With free target tokens: (1 + 0.95 + … + 0.95ⁿ) / (1 + 0.14 n); parallel drafts cost one forward."""
    by_length = [sum(0.95**i for i in range(n + 1)) / (1 + 0.14 * n) for n in range(1, 6)]
    assert best_draft(DRAFTER, lambda tokens: 1.0)[1] == pytest.approx(max(by_length))
    assert best_draft(DRAFTER, lambda tokens: 1.0, [0.5] * 6)[0] < best_draft(DRAFTER, lambda tokens: 1.0)[0]
    heads = Candidate("heads", "heads", (), 0.14)
    assert best_draft(heads, lambda tokens: 1.0) == (3, pytest.approx((1 + 0.9 + 0.675 + 0.405) / 1.14))


def test_rankings_of_several_workloads_are_interleaved() -> None:
    assert interleave_rankings([["a", "b", "c"], ["c", "d", "a"]], 3) == ["a", "c", "b"]
    assert interleave_rankings([["a"], ["b"], []], 1) == ["a", "b"], "the first of each continues in any case"


def test_the_budget_decides_candidates_rows_and_batches() -> None:
    """Two rounds of 32 steps each and one to the end: 32 · (2 · (1 + 2 + 9) + 9) = 1,056 s, 256 s without c."""
    rates = {"a": 1.0, "c": 9.0, "b": 2.0}
    assert affordable_candidates(rates, 1056.0) == (["a", "b", "c"], "")
    names, reason = affordable_candidates(rates, 1055.0)
    assert names == ["a", "b"]
    assert "c 288 s" in reason
    assert count_rows([3] * 5, 2, 1) == 4 * (5 + 3 + 1)
    assert count_rows([3] * 5, 2, 4) == 4 * (5 + 4 + 4)
    assert count_batches(150.0, 10, 1.0, most=100) == 10
    assert [count_batches(0.0, 10, 1.0, most=most) for most in (100, 3)] == [4, 3]


def test_the_winner_is_steady_and_faster_than_the_baseline_beyond_its_interval() -> None:
    slow = [measured("a", 0, 1.1, 0.95), measured("b", 9, 1.2, 0.9)]
    winner, reason = choose_winner(slow)
    assert winner is None
    assert f"{1.1 / 0.95:.2f}" in reason, "the tokens per step that it would need"
    assert choose_winner([*slow, measured("near", 0, 1.1, 1.04)])[0] is None, "its interval begins at 0.99"
    some = [*slow, measured("given", 0, 1.5, 1.3), measured("c", 9, 1.6, 1.28)]
    winner, reason = choose_winner([*some, replace(measured("disturbed", 9, 2.0, 2.0), is_steady=False)])
    assert winner is not None
    assert winner.name == "given"
    assert "within its interval: c row" in reason
    assert [each.name for each in within_interval_of_best(some)] == ["given", "c"]
    assert within_interval_of_best(slow) == []
    assert choose_winner([replace(each, is_steady=False) for each in some])[0] is None


def test_measurements_replace_predictions_in_the_ranking() -> None:
    rows = {"x": measured("x", 0, 1.2, 1.1), "y": measured("y", 0, 1.2, 1.2)}
    backend = DecodingBackend(Workload(1, 0.0), {"x": 1.5, "y": 1.4, "z": 1.15}, ["x"], lambda labels: {
        label: rows[label] for label in labels if label in rows
    })  # fmt: skip
    (ranked,) = tune(backend, rounds=1).values()
    assert [each.setting for each in ranked] == ["y", "z", "x"]
    (ranked,) = tune(backend).values()
    assert [each.setting for each in ranked] == ["y", "z", "x"]
    assert ranked[0].measured is rows["y"]

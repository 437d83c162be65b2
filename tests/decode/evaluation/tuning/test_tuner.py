"""The tuner, its search space and the plan of `forge`, tested on fixed measurements."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftsmith.decode.evaluation.tuning.costs import Curve
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
from draftsmith.decode.evaluation.tuning.space import GRIDS, Available, format_setting, list_settings, tunable_methods
from draftsmith.decode.evaluation.tuning.tuner import Measurement, choose_winner, pareto_frontier, tune, tune_lengths
from draftsmith.decode.methods import method_config

REAL = ModelShape(layers=30, layer_parameters=3.5e6, hidden=576, vocabulary=49152)
DRAFTER = Candidate("4-layer drafter", "drafter", (0, 1, 28, 29), 0.14)


def measured(label: str, tokens: float, speedup: float, spread: float = 0.05, **settings: Any) -> Measurement:
    return Measurement(label, tokens, speedup, (speedup - spread, speedup + spread), **settings)


def test_latency_curves_are_monotonic_and_extrapolated() -> None:
    curve = Curve.through((1, 2, 4, 8), (1.0, 3.0, 2.0, 6.0))
    assert curve.seconds == (1.0, 2.5, 2.5, 6.0)  # the decreasing pair is averaged
    assert [curve(nodes) for nodes in (1, 1.5, 3, 6, 8)] == pytest.approx([1.0, 1.75, 2.5, 4.25, 6.0])
    assert curve(12) == pytest.approx(6.0 + 4 * 3.5 / 4)
    assert Curve((3,), (2.0,))(7) == 2.0


def test_candidates_depend_on_the_target() -> None:
    candidates = list_candidates(REAL, 8192, supports_eagle=True, supports_dflash=True)
    kinds = [candidate.kind for candidate in candidates]
    assert kinds == ["drafter", "drafter", "parallel", "eagle", "dflash", "heads"]
    assert all(0 < candidate.cost < 0.3 for candidate in candidates)
    assert candidates[0].cost < candidates[1].cost
    few = list_candidates(ModelShape(4, 3.5e6, 576, 1000), 8192, supports_eagle=False, supports_dflash=False)
    assert [candidate.layers for candidate in few] == [(0, 3), (0, 3), ()]
    one = list_candidates(ModelShape(1, 3.5e6, 576, 1000), 8192, supports_eagle=False, supports_dflash=False)
    assert [candidate.kind for candidate in one] == ["heads"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda tokens: 1 + 0.05 * (tokens - 1), True),
        (lambda tokens: 0.9 * tokens + 0.1, False),  # each further token costs almost as much as the first
    ],
)
def test_candidates_that_cannot_win_are_not_trained(seconds: Callable[[float], float], expected: bool) -> None:
    is_worth, reason = is_worth_training(DRAFTER, seconds)
    assert is_worth == expected
    assert f"{best_draft(DRAFTER, seconds)[1]:.2f}" in reason


def test_the_best_draft_maximises_tokens_per_cost() -> None:
    """The speedup of n draft tokens with acceptance rate 0.95 and draft cost 0.14 is Σᵢ 0.95ⁱ / (1 + 0.14 n)."""
    by_length = [sum(0.95**i for i in range(n + 1)) / (1 + 0.14 * n) for n in range(1, 6)]
    assert best_draft(DRAFTER, lambda tokens: 1.0)[1] == pytest.approx(max(by_length))
    assert best_draft(DRAFTER, lambda tokens: 1.0, [0.5] * 6)[0] < best_draft(DRAFTER, lambda tokens: 1.0)[0]
    block = Candidate("DFlash", "dflash", (), 0.14)
    assert best_draft(block, lambda tokens: 1.0)[0] == 7, "further tokens of a block have no drafting cost"
    heads = Candidate("heads", "heads", (), 0.14)
    assert best_draft(heads, lambda tokens: 1.0) == (3, pytest.approx((1 + 0.9 + 0.675 + 0.405) / 1.14))


def test_the_budget_decides_candidates_rows_and_batches() -> None:
    """Candidates with 1, 2 and 9 s per step need 32 steps each, the slowest 64: 32 · (1 + 2 + 9 + 9) = 672 s."""
    rates = {"a": 1.0, "c": 9.0, "b": 2.0}
    assert affordable_candidates(rates, 672.0) == (["a", "b", "c"], "")
    names, reason = affordable_candidates(rates, 671.0)
    assert names == ["a", "b"]
    assert "c 288 s" in reason
    assert count_batches(200.0, 10, 1.0, most=100) == 10
    assert [count_batches(0.0, 10, 1.0, most=most) for most in (100, 3)] == [4, 3]
    assert [count_rows(seconds, 1.0, least=4) for seconds in (0.0, 80.0)] == [4, 9]


def test_the_winner_is_steady_and_significantly_faster() -> None:
    slow = [measured("a", 1.1, 0.95), measured("b", 1.2, 0.9)]
    winner, reason = choose_winner(slow)
    assert winner is None
    assert f"{1.1 / 0.95:.2f}" in reason, "the tokens per step that it would need"
    assert choose_winner([*slow, measured("near", 1.1, 1.04)])[0] is None, "its interval begins at 0.99"
    some = [*slow, measured("given", 1.5, 1.3), measured("c", 1.6, 1.28)]
    lossy, disturbed = measured("lossy", 3.0, 3.0, is_lossless=False), measured("d", 2.0, 2.0, is_steady=False)
    winner, reason = choose_winner([*some, lossy, disturbed])
    assert winner is not None
    assert winner.label == "given"
    assert "within its interval: c" in reason
    assert choose_winner([replace(choice, is_steady=False) for choice in some])[0] is None


def test_successive_halving() -> None:
    """At most a quarter of forty settings survive the first round, and four survive the last."""
    speeds, calls = {f"{n}": 1 + n / 100 for n in range(40)} | {"lossy": 0.5, "worse": 0.4}, []

    def measure(labels: Sequence[str], number: int, prompts: int) -> list[Measurement]:
        calls.append((number, prompts, len(labels)))
        lossy = {"lossy": 2.0, "worse": 3.0}
        return [
            measured(item, 1.0, speeds[item], 0.2 / number, is_lossless=item not in lossy, perplexity=lossy.get(item))
            for item in labels
        ]

    best = tune(list(speeds), measure, [8, 32, 80])
    assert calls == [(1, 8, 42), (2, 32, 11), (3, 80, 5)]
    assert [item.label for item in best] == ["39", "38", "37", "36", "lossy"]
    assert [item.label for item in tune(["39", "0", "1"], measure, [8, 80])] == ["39", "1", "0"]
    assert [item.label for item in tune(["39", "0"], lambda *arguments: measure(*arguments)[:1], [8, 80])] == ["39"]


def test_no_setting_dominates_the_frontier() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 30):
        pairs = {(speed / 4, worth / 4) for speed, worth in rng.integers(1, 12, (count, 2)).tolist()}
        choices = [measured("bild", 1.0, speed, perplexity=worth) for speed, worth in pairs]
        best = [(choice.speedup, choice.perplexity) for choice in pareto_frontier(choices, 100)]
        beaten = {one for one in pairs for two in pairs if one != two and two[0] >= one[0] and two[1] <= one[1]}
        assert best == sorted(pairs - beaten, key=lambda pair: pair[1])
        few = [(choice.speedup, choice.perplexity) for choice in pareto_frontier(choices, 3)]
        assert len(few) == min(3, len(best))
        assert {best[0], best[-1] if len(few) > 1 else best[0]} <= set(few) <= set(best)


def test_draft_lengths_stop_when_all_loads_slow_down() -> None:
    speedups = {1: (0.9, 1.2), 2: (1.1, 1.1), 3: (1.2, 1.0), 4: (1.1, 0.9), 5: (2.0, 2.0)}
    rows = tune_lengths(lambda tokens: [{"speedup": speedup} for speedup in speedups[tokens]], 5)
    assert list(rows) == [1, 2, 3, 4]
    assert list(tune_lengths(lambda tokens: [{"speedup": 1.0}], 3)) == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_setting_is_valid_for_its_method(temperature: float) -> None:
    available = Available(frozenset({"drafter", "heads", "table"}), num_heads=3, has_texts=True, is_parallel=True)
    names, labels = tunable_methods(available, temperature), list[str]()
    assert set(names) == set(GRIDS) if temperature else {"spectr", "specinfer", "medusa, typical"}.isdisjoint(names)
    for name in names:
        for method, options in list_settings(name, available, temperature):
            assert vars(method_config(method, options)).items() >= options.items()
            assert options.get("tree", "").count("x") < 3, "no more levels than heads"
            assert options.get("datastore", "table") == "table"
            labels.append(format_setting(method, options))
    assert len(set(labels)) == len(labels) > 100
    assert tunable_methods(Available(frozenset()), temperature) == ["suffix", "prompt-lookup"]


@pytest.mark.parametrize("most", [1, 3, 15])
def test_settings_of_a_block_drafter_fit_its_block(most: int) -> None:
    available = Available(frozenset({"drafter"}), block_tokens=most)
    for name in tunable_methods(available, 1.0):
        settings = [options for _, options in list_settings(name, available, 1.0)]
        assert len({format_setting(name, options) for options in settings}) == len(settings)
        depths = [
            options[key] for options in settings for key in ("gamma", "max_depth", "draft_depth") if key in options
        ]
        depths += [1 + options["k_config"].count("x") for options in settings if "k_config" in options]
        if name != "prompt-lookup":
            assert max(depths, default=0) <= most
        if name == "speculative":
            assert sorted(depths) == [*range(1, most + 1)]

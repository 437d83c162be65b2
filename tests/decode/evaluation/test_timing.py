"""Bounds and steadiness of times on a simulated clock that only forwards advance."""

import time
from typing import Any

import numpy as np
import pytest
from draftsmith.decode.engine import Context, Limits
from draftsmith.decode.evaluation.measure import MAX_STEADY_SLOWDOWN, Decoded, Entry, Run, measure
from draftsmith.decode.evaluation.metrics import Tally
from draftsmith.decode.evaluation.summary import EvalPrompt, Summariser
from draftsmith.decode.methods import Parts
from draftsmith.decode.models.loading import wrap_model

ENTRIES = [Entry("autoregressive", "autoregressive")] + [
    Entry(f"{name} {options}", name, options)
    for name, options in (
        ("speculative", {"gamma": 3}),
        ("adaptive", {"confidence_threshold": 0.3}),
        ("adaptive", {"policy": "oracle"}),
        ("multi-candidate", {"k_config": "3x2"}),
        ("multi-candidate", {"k_config": "2x2", "attention": "batch"}),
        ("medusa", {"tree": "3x2"}),
        ("slim-s", {"num_sequences": 6, "num_candidates": 3, "correlation": "none"}),
        ("prompt-lookup", {"gamma": 3, "max_ngram": 1}),
        ("mjsd", {"gamma": 3, "num_beams": 2}),
        ("bild", {"gamma": 4, "fallback_threshold": 0.2}),
        ("beam", {"num_beams": 2}),
        ("mjgd", {"gamma": 2, "num_beams": 3}),
    )
]
LIMITS = Limits(15, (9,))
ASKED = [EvalPrompt([3, 5, 7, 3]), EvalPrompt([8, 2]), EvalPrompt([1, 4, 4, 4, 4, 20])]
FORWARDS = {"target": 4.0, "drafter": 1.0, "heads": 0.5}
"""Seconds per forward."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def slow(self, owner: Any, name: str, seconds: float) -> Any:
        """Replace a method of the object by one that also advances the clock; return the object."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        setattr(owner, name, timed)
        return owner


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def models(models: Any, make_heads: Any, clock: Clock) -> tuple[Any, Parts]:
    """Return a target and its draft artifacts, whose forwards take the seconds in `FORWARDS`."""
    target, drafter = (
        clock.slow(wrap_model(model), "extend", FORWARDS[name])
        for model, name in zip(models, ("target", "drafter"), strict=True)
    )
    return target, Parts(drafter, clock.slow(make_heads(2, 32, 24), "forward", FORWARDS["heads"]))


@pytest.mark.parametrize("overhead", [0.0, 0.25])
def test_speedups_do_not_exceed_their_bound(
    models: tuple[Any, Parts], clock: Clock, monkeypatch: pytest.MonkeyPatch, overhead: float
) -> None:
    commit = Context.commit

    def slower(self: Context, *args: Any) -> Any:
        clock.now += overhead
        return commit(self, *args)

    monkeypatch.setattr(Context, "commit", slower)
    target, parts = models
    runs = measure(target, parts, ENTRIES, [prompt.ids for prompt in ASKED], LIMITS)
    summary = Summariser(target, parts, ASKED, runs, LIMITS).summarise(ENTRIES)
    assert summary.errors == []
    for row in summary.rows:
        seconds, iterations = row["seconds"], sum(tally.iterations for tally in runs[row["label"]].tallies)
        assert row["speedup"] <= row["bound"] * (1 + 1e-9), row["label"]
        alike = row["method"] not in ("adaptive", "bild")
        wasted = pytest.approx(overhead * iterations / seconds, rel=1e-6 if alike else 0.5, abs=1e-9)
        assert 1 - row["efficiency"] == wasted, row["label"]
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["bound"])
        for part in row["by_category"].values():
            assert part["speedup"] <= part["bound"] * (1 + 1e-9)


def test_iterations_of_beams_have_several_forwards(models: tuple[Any, Parts]) -> None:
    target, parts = models
    chosen = [ENTRIES[0], *ENTRIES[-2:]]
    runs = measure(target, parts, chosen, [prompt.ids for prompt in ASKED], LIMITS)
    rows = Summariser(target, parts, ASKED, runs, LIMITS).summarise(chosen).rows
    base = rows[0]["flops_per_token"]["total"]
    for row, depth in zip(rows[1:], (15, 2), strict=True):
        counts = sum(runs[row["label"]].tallies, Tally())
        assert counts.steps == (depth + 1) * counts.iterations
        new = counts.tokens / counts.iterations
        assert row["ideal"] == pytest.approx(new / (depth + 1), rel=1e-6)
        beams = row["options"]["num_beams"]
        scored = 1 + beams * (depth - 1) + depth + 1  # tokens in the target's forwards per iteration
        assert 1 < row["flops_per_token"]["total"] / (base * scored / new) < 1.2  # attention also covers the draft


def test_speedups_and_bounds_include_prefill(models: tuple[Any, Parts], clock: Clock) -> None:
    target, parts = models
    runs = measure(target, parts, ENTRIES, [prompt.ids for prompt in ASKED], LIMITS)
    later = lambda one: one._replace(seconds=one.seconds + 500, prefill_seconds=one.prefill_seconds + 500)  # noqa: E731
    longer = {label: Run([[later(one) for one in each] for each in run.by_prompt]) for label, run in runs.items()}
    for row in Summariser(target, parts, ASKED, longer, LIMITS).summarise(ENTRIES).rows:
        assert row["speedup"] <= row["bound"] * (1 + 1e-9)
        assert row["speedup"] == pytest.approx(1, abs=0.2)


def run_of(times: list[list[float]], iterations: int = 10) -> Run:
    tally = Tally(tokens=iterations, steps=iterations, iterations=iterations)
    return Run([[Decoded([1] * iterations, tally, seconds, 0.0) for seconds in repeats] for repeats in times])


def test_undisturbed_times_are_steady_and_disturbed_ones_are_not() -> None:
    """The slowdown from 8 % noise is 1.05 ± 0.03, six standard deviations below 1.25. Disturbances triple the time of a
    third of the runs."""
    rng = np.random.default_rng(0)
    clean, detected = 0, 0
    for _ in range(500):
        once = np.exp(rng.normal(0, 0.08, (8, 1)))
        thrice = np.exp(rng.normal(0, 0.08, (8, 3))) * rng.uniform(1, 30, (8, 1))  # prompts may differ
        clean += run_of(once.tolist()).is_disturbed() + run_of(thrice.tolist()).is_disturbed()
        disturbed = once * np.where(rng.permutation(8)[:, None] < 3, 3, 1)
        detected += run_of(disturbed.tolist()).is_disturbed()
    assert clean == 0
    assert detected == 500
    twice = [[1.0, 3.0], [1.0, 1.0], [1.0, 2.0]]
    assert run_of(twice).slowdown() == pytest.approx((2 + 1 + 1.5) / 3)
    assert run_of([[1.0, 3.0, 1.1], [1.0, 1.0, 1.0]]).is_disturbed() is False  # the median ignores one outlier
    assert run_of([[1.0], [9.0], [1.0]]).slowdown() is None
    longer = [run_of([[float(n)]], n).by_prompt[0] for n in (4, 8, 40, 16, 5)]
    assert Run(longer).slowdown() == pytest.approx(1), "slowdown is measured per step, not per text"


def test_rows_report_whether_their_times_are_steady(models: tuple[Any, Parts]) -> None:
    target, parts = models
    prompts, chosen = [*ASKED, EvalPrompt([4, 20])], ENTRIES[:2]
    runs = measure(target, parts, chosen, [prompt.ids for prompt in prompts], LIMITS)

    def flags(slow: str | None = None) -> list[bool | None]:
        """Return the rows' `steady` flags if the first run of `slow` takes nine times as long."""
        changed = dict(runs)
        if slow is not None:
            (first, *repeats), *others = runs[slow].by_prompt
            changed[slow] = Run([[first._replace(seconds=first.seconds * 9), *repeats], *others])
        return [row["steady"] for row in Summariser(target, parts, prompts, changed, LIMITS).summarise(chosen).rows]

    assert flags() == [True, True]
    assert flags("autoregressive") == [False, False], "the baseline affects all rows"
    assert flags(chosen[1].label) == [True, False]
    assert MAX_STEADY_SLOWDOWN == 1.25

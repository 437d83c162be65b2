"""Claims: read as arithmetic reads them, judged with the uncertainty of their rows, refused where they name nothing."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from draftsmith.recipes.schema.claims import HELD, NOISE, NOT_HELD, NOT_JUDGED, judge, metric_of, parse_claim, ratio_of

VALUES = {"a": 3.0, "4x2": 2.5, "slim-s": 0.5, "ours T=0": 1.25, "γ=2 [x]": 7.0}
ROWS = [{"label": label, "m": value, "deep": {"part": 2 * value}} for label, value in VALUES.items()]
TERMS = {
    "a.m": 3.0, "4x2.m": 2.5, "slim-s.m": 0.5, '"ours T=0".m': 1.25, '"γ=2 [x]".m': 7.0, "a.deep.part": 6.0,
    "2": 2.0, "0.75": 0.75, "1e1": 10.0,
}  # fmt: skip


def status(text: str, rows: Any = ROWS, tolerance: float = 0.03) -> str:
    return judge(parse_claim(text), rows, tolerance=tolerance).status


def ratio_row(label: str, over: Any, under: Any, **more: Any) -> dict[str, Any]:
    over, under = np.asarray(over, float), np.asarray(under, float)
    pairs = {"m": {"over": over.tolist(), "under": under.tolist()}}
    return {"label": label, "m": over.sum() / under.sum(), "pairs": pairs} | more


def test_claims_are_read_as_arithmetic_reads_them() -> None:
    rng = random.Random(0)
    names = {term: f"v{place}" for place, term in enumerate(TERMS)}
    numbers = {names[term]: value for term, value in TERMS.items()}
    outcomes = []
    for _ in range(400):
        sides = []
        for _ in range(2):
            words = [rng.choice(list(TERMS))]
            for _ in range(rng.randint(0, 4)):
                words += [rng.choice("+-*/"), rng.choice(list(TERMS))]
            sides.append(words)
        compare = rng.choice([">", "<", ">=", "<="])
        text = f" {compare} ".join(" ".join(words) for words in sides)
        if not any(term in text for term in list(TERMS)[:6]):
            continue
        reference = f" {compare} ".join(" ".join(names.get(word, word) for word in words) for words in sides)
        expected = eval(reference, {}, numbers)  # the reference: Python reads the same words
        outcomes.append(expected)
        assert status(text) == (HELD if expected else NOT_HELD), text
    assert 100 < sum(outcomes) < len(outcomes) - 100


def test_what_a_claim_names() -> None:
    claim = parse_claim('"ours T=0".speedup > 1.1 * 4x2.flops_per_token.total - slim-s.acceptance_by_depth.0 / 2')
    wanted = [("ours T=0", "speedup"), ("4x2", "flops_per_token.total"), ("slim-s", "acceptance_by_depth.0")]
    assert list(claim.names.values()) == wanted
    assert metric_of({"label": "a", "shares": [0.5, 0.25]}, "shares.1") == 0.25
    assert metric_of({"label": "a", "shares": [0.5]}, "shares.3") is None


@pytest.mark.parametrize(
    "text",
    [
        *("a.m", "1 < 2", "a.m > ", "a.m > b", '"a b.m > 1', "a.m == b.m", "a.m > 'x'", "a.m > 2 ** 9"),
        *("a.m > __import__('os').m", "a.m > (lambda: 1)()"),
    ],
)
def test_what_is_no_claim_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_claim(text)


def test_what_was_not_measured_is_not_judged_and_says_why() -> None:
    rows = [{"label": "a", "joules": None, "why": {"joules": "nothing counts it"}, "m": 1.0, "other": None}]
    judged = judge(parse_claim("a.joules > 1"), rows)
    assert (judged.status, judged.why) == (NOT_JUDGED, "a has no joules: nothing counts it")
    assert "not measured" in judge(parse_claim("a.other > 1"), rows).why
    absent = judge(parse_claim("b.m > a.m"), rows)
    assert (absent.status, absent.why) == (NOT_JUDGED, "there is no row 'b' in this run")
    assert {status(f"a.{metric} > 1") for metric in ("mm", "deep", "deep.other", "m.part")} == {NOT_JUDGED}


@pytest.mark.parametrize(
    ("text", "tolerance", "wanted"),
    [
        ('slim-s.m < "ours T=0".m < 4x2.m < a.m', 0.03, HELD),
        ('slim-s.m < 4x2.m < "ours T=0".m < a.m', 0.03, NOT_HELD),
        ("a.m ==~ 3.08", 0.03, HELD),
        ("a.m ==~ 3.2", 0.03, NOT_HELD),
        ("a.m ==~ 3.2", 0.1, HELD),
        ("a.m ==~ 2.5", 0.19, NOT_HELD),  # of the right side
    ],
)
def test_chains_and_about_equal(text: str, tolerance: float, wanted: str) -> None:
    assert status(text, tolerance=tolerance) == wanted


def test_a_claim_without_a_run_is_for_each_run() -> None:
    rows = [{"label": f"{run}: {label}", "m": value} for run, up in (("A", 1), ("B", -1)) for label, value in
            (("x", 2.0 * up), ("y", 1.0 * up))] + [{"label": "A: z", "m": 0.0}, {"label": "w", "m": 5.0}]  # fmt: skip
    both = judge(parse_claim("x.m > y.m"), rows)
    assert (both.status, both.why) == (NOT_HELD, "held in 1, not held in 1 of 2 runs")
    assert both.numbers == "A: 2 > 1; B: -2 > -1"
    assert status('"A: x".m > "A: y".m', rows) == HELD
    assert status("w.m > x.m", rows) == HELD  # a row of its own stands beside each run's
    assert status("x.m > z.m", rows) == HELD  # only A has both
    assert status("x.m > q.m", rows) == NOT_JUDGED


def test_the_same_prompts_are_compared_with_one_another() -> None:
    """A gain of 3 % on every prompt is certain; between different prompts it drowns in how they differ."""
    rng = np.random.default_rng(0)
    steps = rng.integers(5, 40, 30)
    tokens = steps * rng.uniform(1, 4, 30)
    rows = [ratio_row("a", 1.03 * tokens, steps, sample="s"), ratio_row("b", tokens, steps, sample="s")]
    assert status("a.m > b.m", rows) == HELD
    assert status("a.m < b.m", rows) == NOT_HELD
    assert status("a.m > b.m", [rows[0] | {"sample": "other"}, rows[1]]) == NOISE


def test_draws_are_those_of_a_bootstrap() -> None:
    """The verdict flips where the percentiles of a plain loop over resampled prompts say so."""
    rng = np.random.default_rng(2)
    over, under = rng.uniform(1, 5, 25), rng.uniform(1, 2, 25)
    row = ratio_row("a", over, under)
    drawn = []
    for _ in range(4000):
        places = rng.integers(0, 25, 25)
        drawn.append(over[places].sum() / under[places].sum())
    low, high = np.percentile(drawn, [2.5, 97.5])
    spread = 0.15 * (high - low)
    assert status(f"a.m > {low - spread:.4f}", [row]) == HELD
    assert status(f"a.m > {low + spread:.4f}", [row]) == NOISE
    assert status(f"a.m > {high - spread:.4f}", [row]) == NOISE
    assert status(f"a.m > {high + spread:.4f}", [row]) == NOT_HELD


def test_a_metric_is_what_its_numbers_by_prompt_say() -> None:
    rng = np.random.default_rng(3)
    over, under, base_over, base_under = rng.uniform(20, 40, (4, 20))
    weights = rng.integers(0, 3, 20)
    sums = [float(weights @ column) for column in (over, under, base_over, base_under)]
    ratio, pairs = sums[0] / sums[1], {"over": over.tolist(), "under": under.tolist()}
    base = {"base_over": base_over.tolist(), "base_under": base_under.tolist()}
    assert ratio_of(pairs, weights[None]) == pytest.approx(ratio)
    assert ratio_of(pairs | base, weights[None]) == pytest.approx(ratio / (sums[2] / sums[3]))
    assert ratio_of(pairs | {"exp": True}, weights[None]) == pytest.approx(np.exp(ratio))
    assert ratio_of(pairs | {"gamma": 2}, weights[None]) == pytest.approx(1 + ratio + ratio**2)


def test_equal_rows_are_not_more_than_one_another() -> None:
    row = ratio_row("a", [1, 2, 3, 4], [1, 1, 1, 2])
    found = {sign: status(f"a.m {sign} b.m", [row, row | {"label": "b"}]) for sign in (">", "<", ">=", "<=", "==~")}
    assert found == {">": NOT_HELD, "<": NOT_HELD, ">=": HELD, "<=": HELD, "==~": HELD}


def test_two_prompts_prove_nothing() -> None:
    rows = [ratio_row("a", [9, 9], [1, 1]), ratio_row("b", [1, 1], [1, 1])]
    judged = judge(parse_claim("a.m > b.m"), rows)
    assert (judged.status, judged.why) == (NOISE, "fewer than 3 prompts")


def test_what_has_neither_prompts_nor_an_error_is_exact_only_where_the_row_says_so() -> None:
    rows = [{"label": "a", "m": 2.0, "size": 3, "deep": {"part": 1.0}}, {"label": "b", "m": 1.0}]
    assert status("a.m > b.m", rows) == HELD
    timed = [rows[0] | {"certain": ["size"]}, rows[1]]
    judged = judge(parse_claim("a.m > b.m"), timed)
    assert (judged.status, judged.why) == (NOT_JUDGED, "nothing is known of the uncertainty of a's m")
    assert status("a.size > b.m", timed) == HELD
    assert status("a.deep.part > 0", timed) == NOT_JUDGED
    assert status("a.m > b.m", [timed[0] | {"errors": {"m": 0.1}}, rows[1]]) == HELD


def test_standard_errors_are_drawn_from_a_normal_distribution() -> None:
    rows = [{"label": "a", "m": 1.0, "errors": {"m": 0.1}}, {"label": "b", "m": 0.8, "errors": {"m": 0.1}}]
    assert status("a.m > 0.78", rows) == HELD  # 2.2 standard errors
    assert status("a.m > 0.82", rows) == NOISE  # 1.8 of them
    assert status("a.m > b.m", rows) == NOISE  # 0.2 is 1.4 of the difference's
    assert status("a.m > b.m", [rows[0], rows[1] | {"m": 0.65}]) == HELD  # and 0.35 is 2.5

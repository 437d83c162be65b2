"""What a paper claims, as an expression over the rows of a table, and whether it held.

`"ours T=0".speedup > 1.1 * "SD T=0".speedup`, `a.perplexity < b.perplexity < c.perplexity`: an operand is a number or
a row's label, a dot and a metric; labels with other characters than letters, digits, `_`, `-` and `@` stand in double
quotes. `+ - * /` bind as usual (`-` between spaces), comparisons are `> < >= <=` and `==~` (equal within a tolerance).

Rows over prompts are resampled 2,000 times, all rows of the same prompts with the same draws (a paired bootstrap);
numbers with a standard error are drawn from a normal distribution, all others are exact. `held` is what the middle 95 %
of the draws agree with, `not held` what they agree is false, all else is `within noise`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...decode.evaluation.bootstrap import FEWEST, RESAMPLES, percentile_interval, resample_weights

HELD, NOT_HELD, NOISE, NOT_JUDGED = "held", "not held", "within noise", "not judged"
_REFERENCE = re.compile(r'(?:"([^"]*)"|(?<![\w.])([^\W][\w@-]*))\.([^\W\d][\w@]*(?:\.\w+)*)')
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip
_COMPARISONS: dict[type, str] = {ast.Gt: ">", ast.Lt: "<", ast.GtE: "≥", ast.LtE: "≤", ast.Is: "≈"}
Row = Mapping[str, Any]


class Reference(NamedTuple):
    """A number of a row."""

    label: str
    metric: str


@dataclass(frozen=True)
class Claim:
    """Sides compared in a chain: `sides[0] comparisons[0] sides[1] comparisons[1] …`."""

    sides: tuple[ast.expr, ...]
    comparisons: tuple[str, ...]
    """Each of `> < ≥ ≤ ≈`."""
    names: Mapping[str, Reference]
    """What the names in the sides stand for."""


def parse_claim(text: str) -> Claim:
    """A claim from its text. Raises ValueError: it is no claim."""
    names: dict[str, Reference] = {}

    def named(found: re.Match[str]) -> str:
        name = f"_{len(names)}_"
        names[name] = Reference(found[1] if found[1] is not None else found[2], found[3])
        return name

    python = _REFERENCE.sub(named, text).replace("==~", " is ")  # which Python's grammar knows, and claims do not
    try:
        node = ast.parse(" ".join(python.split()), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"claim {text!r} is no expression of numbers and label.metric: {error}") from error
    if not isinstance(node, ast.Compare) or not names or any(type(each) not in _COMPARISONS for each in node.ops):
        raise ValueError(f"claim {text!r} must compare some label.metric by > < >= <= or ==~")
    sides = (node.left, *node.comparators)
    for part in (part for side in sides for part in ast.walk(side)):
        number = isinstance(part, ast.Constant) and type(part.value) in (int, float)
        sum_ = isinstance(part, ast.BinOp) and type(part.op) in _OPERATORS
        name = isinstance(part, ast.Name) and part.id in names
        if not (number or sum_ or name or isinstance(part, (ast.operator, ast.expr_context))):
            raise ValueError(f"claim {text!r}: {ast.unparse(part)!r} is no number, label.metric or one of + - * /")
    return Claim(sides, tuple(_COMPARISONS[type(each)] for each in node.ops), names)


class Judgement(NamedTuple):
    """What became of a claim."""

    status: str
    """held, not held, within noise, not judged."""
    numbers: str
    """The sides as they came out: "3.93 > 3.19"; one after the other where there are several runs."""
    why: str = ""
    """Why it was not judged, or how many of the runs it held in."""


class _MissingError(Exception):
    """A number that a claim needs and that there is not; its text says why."""


def judge(claim: Claim, rows: Sequence[Row], *, tolerance: float = 0.03) -> Judgement:
    """Whether a claim held.

    A label that no row has, but rows `run: label` do, stands for all of them: the claim must hold in each run.

    Args:
        rows: each with its `label`, its metrics (numbers, or objects of them: `flops_per_token.total`; None: not
            measured) and what is known of their uncertainty: `pairs`, by metric {"over", "under"}: numbers by prompt,
            with metric = Σ over / Σ under, divided by the same of "base_over" and "base_under" where they are given,
            e to the power of it with "exp": true, and 1 + α + … + α^γ of it with "gamma": γ; `errors`: standard errors
            by metric; `certain`: the metrics that need neither (by default all); `sample`: rows with the same word are
            of the same prompts (by default those with as many prompts are); `why`: by metric, why it is None.
        tolerance: of `==~`, relative to the right side.
    """
    table = {str(row["label"]): row for row in rows}
    absent = {reference.label for reference in claim.names.values() if reference.label not in table}
    prefixes = [{name.removesuffix(label) for name in table if name.endswith(f": {label}")} for label in absent]
    shared = set.intersection(*prefixes) if prefixes else {""}
    if not shared:
        return Judgement(NOT_JUDGED, "", f"there is no row {', '.join(map(repr, sorted(absent)))} in this run")
    runs = list(dict.fromkeys(prefix for name in table for prefix in shared if name.startswith(prefix)))
    judged = {run.removesuffix(": "): _judge(claim, table, run, tolerance) for run in runs}
    if len(judged) == 1:
        return next(iter(judged.values()))
    statuses = [one.status for one in judged.values()]
    counts = {status: statuses.count(status) for status in (HELD, NOT_HELD, NOISE, NOT_JUDGED)}
    shown = ", ".join(f"{status} in {count}" for status, count in counts.items() if count)
    numbers = "; ".join(f"{run}: {one.numbers}" for run, one in judged.items() if one.numbers)
    status = next(each for each in (NOT_HELD, NOISE, NOT_JUDGED, HELD) if counts[each])
    return Judgement(status, numbers, f"{shown} of {len(statuses)} runs")


def _judge(claim: Claim, table: Mapping[str, Row], run: str, tolerance: float) -> Judgement:
    """In one run, whose rows' labels begin with it where no row has the label alone."""
    rows = {name: table.get(each.label) or table[run + each.label] for name, each in claim.names.items()}
    try:
        values = {name: _drawn(rows[name], each.metric) for name, each in claim.names.items()}
        sides = [_evaluated(side, values) for side in claim.sides]
    except _MissingError as missing:
        return Judgement(NOT_JUDGED, "", str(missing))
    words = [show(float(sides[0][0]))]
    for comparison, side in zip(claim.comparisons, sides[1:], strict=True):
        words += [comparison, show(float(side[0]))]
    pairs = [rows[name].get("pairs", {}).get(each.metric) for name, each in claim.names.items()]
    if any(len(pair["over"]) < FEWEST for pair in pairs if pair is not None):
        return Judgement(NOISE, " ".join(words), f"fewer than {FEWEST} prompts")
    links = zip(sides, claim.comparisons, sides[1:], strict=False)
    verdicts = [_compare(left, comparison, right, tolerance) for left, comparison, right in links]
    return Judgement(next(each for each in (NOT_HELD, NOISE, HELD) if each in verdicts), " ".join(words))


def _evaluated(node: ast.expr, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """[1 + RESAMPLES]: an expression's value and its draws; [1] where it is exact."""
    if isinstance(node, ast.Constant):
        return np.full(1, float(str(node.value)))
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.BinOp)
    left, right = _evaluated(node.left, values), _evaluated(node.right, values)
    if isinstance(node.op, ast.Div) and right[0] == 0:
        raise _MissingError("the claim divides by 0")
    with np.errstate(divide="ignore", invalid="ignore"):
        found: np.ndarray = _OPERATORS[type(node.op)](left, right)
    return found


def _compare(left: np.ndarray, comparison: str, right: np.ndarray, tolerance: float) -> str:
    gap = left - right
    if comparison in "<≤":
        gap = -gap
    elif comparison == "≈":
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.where(gap == 0, 0.0, gap / np.abs(right))
    interval = percentile_interval(gap[1:] if len(gap) > 1 else gap)
    if interval is None:
        return NOISE
    low, high = interval
    if comparison == "≈":
        held, failed = low >= -tolerance and high <= tolerance, low > tolerance or high < -tolerance
    elif comparison in "<>":
        held, failed = low > 0, high <= 0
    else:
        held, failed = low >= 0, high < 0
    return HELD if held else NOT_HELD if failed else NOISE


def _drawn(row: Row, metric: str) -> np.ndarray:
    """[1 + RESAMPLES]: a row's number and its draws; [1] where it is exact."""
    point = metric_of(row, metric)
    if point is None:
        why = row.get("why", {}).get(metric) or "it was not measured"
        raise _MissingError(f"{row['label']} has no {metric}: {why}")
    pairs = row.get("pairs", {}).get(metric)
    error = row.get("errors", {}).get(metric)
    if pairs is not None:
        prompts = len(pairs["over"])
        weights = resample_weights(prompts, [prompts, *str(row.get("sample", "")).encode()])  # same prompts, same draws
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.append(point, ratio_of(pairs, weights))
    if error is not None:
        seed = list(f"{row['label']}.{metric}".encode())
        return np.append(point, np.random.default_rng(seed).normal(point, error, RESAMPLES))
    if "certain" in row and metric.partition(".")[0] not in row["certain"]:
        raise _MissingError(f"nothing is known of the uncertainty of {row['label']}'s {metric}")
    return np.full(1, point)


def ratio_of(pairs: Mapping[str, Any], weights_RP: np.ndarray) -> np.ndarray:
    """[R] a metric over weighed prompts, see `judge`; NaN where nothing stands under it."""
    sums = {key: weights_RP @ np.asarray(pairs[key], float) for key in pairs if key not in ("exp", "gamma")}
    ratio = sums["over"] / sums["under"]
    if "base_over" in sums:
        ratio = ratio / (sums["base_over"] / sums["base_under"])
    if "gamma" in pairs:
        ratio = sum(ratio**depth for depth in range(pairs["gamma"] + 1))
    return np.exp(ratio) if pairs.get("exp") else ratio


def metric_of(row: Row, metric: str) -> float | None:
    """A row's number by its name: `speedup`, `flops_per_token.total`, `acceptance_by_depth.0`; None: it has none."""
    here: Any = row
    for part in [metric] if metric in row else metric.split("."):
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        else:
            here = here.get(part) if isinstance(here, Mapping) else None
    known = isinstance(here, (int, float)) and not isinstance(here, bool) and math.isfinite(here)
    return float(here) if known else None


def show(value: float) -> str:
    """Three digits that count."""
    if value != 0 and (abs(value) < 0.001 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"

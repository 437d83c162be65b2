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

from ...checkpoints.storage.messages import did_you_mean
from ...decode.evaluation.bootstrap import FEWEST, RESAMPLES, resample_weights

HELD, NOT_HELD, NOISE, NOT_JUDGED = "held", "not held", "within noise", "not judged"
_DEFINED = 0.9
"""Share of the draws that must be numbers: a draw has none where nothing stands under a ratio."""

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

    text: str
    sides: tuple[ast.expr, ...]
    comparisons: tuple[str, ...]
    """Each of `> < ≥ ≤ ≈`."""
    names: Mapping[str, Reference]
    """What the names in the sides stand for."""

    def references(self) -> list[Reference]:
        """All numbers of rows that it names."""
        return list(self.names.values())


def nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` with what is known, or ` Known: …`, for error messages."""
    listed = f" Known: {', '.join(dict.fromkeys(known))}" if known else ""
    return did_you_mean(name, known) or listed


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
    comparisons = [_COMPARISONS.get(type(each)) for each in node.ops] if isinstance(node, ast.Compare) else []
    if not isinstance(node, ast.Compare) or None in comparisons:
        raise ValueError(f"claim {text!r} must compare by > < >= <= or ==~")
    sides = (node.left, *node.comparators)
    for part in (part for side in sides for part in ast.walk(side)):
        number = isinstance(part, ast.Constant) and type(part.value) in (int, float)
        sum_ = isinstance(part, ast.BinOp) and type(part.op) in _OPERATORS
        name = isinstance(part, ast.Name) and part.id in names
        if not (number or sum_ or name or isinstance(part, (ast.operator, ast.expr_context))):
            raise ValueError(f"claim {text!r}: {ast.unparse(part)!r} is no number, label.metric or one of + - * /")
    if not names:
        raise ValueError(f"claim {text!r} names no row: write label.metric")
    return Claim(text, sides, tuple(each for each in comparisons if each), names)


@dataclass(frozen=True)
class Judgement:
    """What became of a claim."""

    status: str
    """held, not held, within noise, not judged."""
    numbers: str
    """The sides as they came out: "3.93 > 3.19"; one after the other where there are several runs."""
    why: str = ""
    """Why it was not judged, or how many of the runs it held in."""


class _MissingError(Exception):
    """A number that a claim needs and that there is not; its text says why."""


def judge(claim: Claim, rows: Sequence[Row], *, tolerance: float = 0.03, known: Sequence[str] = ()) -> Judgement:
    """Whether a claim held.

    Args:
        rows: each with its `label`, its metrics (numbers, or objects of them: `flops_per_token.total`; None: not
            measured) and what is known of their uncertainty: `pairs`, by metric {"over", "under"}: numbers by prompt,
            with metric = Σ over / Σ under, divided by the same of "base_over" and "base_under" where they are given,
            e to the power of it with "exp": true, and 1 + α + … + α^γ of it with "gamma": γ; `errors`: standard errors
            by metric; `certain`: the metrics that need neither (by default all); `sample`: rows with the same word are
            of the same prompts (by default those with as many prompts are); `why`: by metric, why it is None.
        tolerance: of `==~`, relative to the right side.
        known: labels that may be absent: a claim with one of them is not judged.

    A label that no row has, but rows `run: label` do, stands for all of them: the claim must hold in each run.

    Raises:
        ValueError: a label or metric that does not exist, with the nearest that does.
    """
    table = {str(row["label"]): row for row in rows}
    try:
        scopes = _scopes(claim, table, known)
        judged = {run: _judge(claim, table, prefix, tolerance) for run, prefix in scopes.items()}
    except _MissingError as missing:
        return Judgement(NOT_JUDGED, "", str(missing))
    if len(judged) == 1:
        return next(iter(judged.values()))
    numbers = "; ".join(f"{run}: {one.numbers}" for run, one in judged.items() if one.numbers)
    statuses = [one.status for one in judged.values()]
    status = next(each for each in (NOT_HELD, NOISE, NOT_JUDGED, HELD) if each in statuses)
    counts = ", ".join(f"{each} in {statuses.count(each)}" for each in (HELD, NOT_HELD, NOISE, NOT_JUDGED))
    shown = ", ".join(part for part in counts.split(", ") if not part.endswith(" in 0"))
    return Judgement(status, numbers, f"{shown} of {len(statuses)} runs")


def _scopes(claim: Claim, table: Mapping[str, Row], known: Sequence[str]) -> dict[str, str]:
    """Runs that the claim is judged in, by name, each with the prefix of labels that no row has as they stand."""
    absent = {reference.label for reference in claim.references() if reference.label not in table}
    if not absent:
        return {"": ""}
    found: list[set[str]] = []
    for label in sorted(absent):
        prefixes = {name.removesuffix(label) for name in table if name.endswith(f": {label}")}
        if not prefixes:
            if label in known:
                raise _MissingError(f"there is no row {label!r} in this run")
            raise ValueError(f"claim {claim.text!r}: there is no row {label!r}.{nearest(label, list(table))}")
        found.append(prefixes)
    runs = set.intersection(*found)
    if not runs:
        raise _MissingError(f"no run has all of the rows {', '.join(sorted(absent))}")
    # in the order of the table
    order = dict.fromkeys(prefix for name in table for prefix in runs if name.startswith(prefix))
    return {prefix.removesuffix(": "): prefix for prefix in order}


def _judge(claim: Claim, table: Mapping[str, Row], prefix: str, tolerance: float) -> Judgement:
    try:
        rows = {name: table.get(each.label) or table[prefix + each.label] for name, each in claim.names.items()}
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
    drawn = gap[1:] if len(gap) > 1 else gap
    known = drawn[~np.isnan(drawn)]
    if len(known) < _DEFINED * len(drawn):
        return NOISE
    low, high = np.percentile(known, [2.5, 97.5])
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
        return np.append(point, _resampled(pairs, weights))
    if error is not None:
        seed = list(f"{row['label']}.{metric}".encode())
        return np.append(point, np.random.default_rng(seed).normal(point, error, RESAMPLES))
    if "certain" in row and metric.partition(".")[0] not in row["certain"]:
        raise _MissingError(f"nothing is known of the uncertainty of {row['label']}'s {metric}")
    return np.full(1, point)


def _resampled(pairs: Mapping[str, Any], weights_RP: np.ndarray) -> np.ndarray:
    """A ratio by draw; NaN where nothing stands under it."""

    def ratio(over: str, under: str) -> np.ndarray:
        return (weights_RP @ np.asarray(pairs[over], float)) / (weights_RP @ np.asarray(pairs[under], float))

    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = ratio("over", "under")
        if "base_over" in pairs:
            drawn = drawn / ratio("base_over", "base_under")
    return transformed(drawn, pairs)


def transformed(ratio: Any, pairs: Mapping[str, Any]) -> Any:
    """What a metric makes of the ratio of its sums, a number or an array; see `judge`."""
    if pairs.get("exp"):
        return np.exp(ratio)
    if "gamma" in pairs:
        return sum(ratio**depth for depth in range(pairs["gamma"] + 1))
    return ratio


def metric_of(row: Row, metric: str) -> float | None:
    """A row's number by its name: `speedup`, `flops_per_token.total`, `acceptance_by_depth.0`; None: not measured.
    Raises ValueError: the row has no such metric, with the nearest that it has."""
    here: Any = row
    for part in [metric] if metric in row else metric.split("."):
        if isinstance(here, list) and part.isdigit():
            here = here[int(part)] if int(part) < len(here) else None
        elif isinstance(here, Mapping) and part in here:
            here = here[part]
        elif here is None:
            return None
        else:
            known = [name for name in row if name not in ("label", "pairs", "errors", "certain", "sample", "why")]
            raise ValueError(f"row {row['label']!r} has no metric {metric!r}.{nearest(metric, known)}")
    if here is None or (isinstance(here, float) and not math.isfinite(here)):
        return None
    if isinstance(here, bool) or not isinstance(here, (int, float)):
        raise ValueError(f"row {row['label']!r}: {metric!r} is no number")
    return float(here)


def show(value: float) -> str:
    """Three digits that count."""
    if value != 0 and (abs(value) < 0.001 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"

"""What a paper claims, as an expression over the rows of a table, and whether it held.

A claim compares sums of products: `"ours T=0".speedup > 1.1 * "SD T=0".speedup`, `4x2.tokens_per_step >
2x4.tokens_per_step`, `a.perplexity < b.perplexity < c.perplexity`. A term is a number or a row's label, a dot and a
metric; labels with other characters than letters, digits, `_`, `-` and `@` stand in double quotes. `+ - * /` bind as
usual (`-` between spaces), comparisons are `> < >= <=` and `==~` (equal within the claim's tolerance).

A claim is judged with the uncertainty of its rows. Rows over prompts are resampled, 2,000 times, all rows of the same
prompts with the same draws (a paired bootstrap, as in `decode.metrics`); numbers with a standard error are drawn from a
normal distribution. All others are exact, unless the row says which of its numbers are: then a claim about another one
is `not judged`. `held` is what 95 % of the draws' middle agree with, `not held` what they agree is false, all else is
`within noise`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...checkpoints.storage.messages import did_you_mean

HELD, NOT_HELD, NOISE, NOT_JUDGED = "held", "not held", "within noise", "not judged"
COMPARISONS = (">=", "<=", "==~", ">", "<")
DRAWS = 2000
FEWEST = 3
"""Prompts that a bootstrap needs."""
_DEFINED = 0.9
"""Share of the draws that must be numbers: a draw has none where nothing stands under a ratio."""

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<reference>(?:"[^"]*"|[^\W][\w@-]*)\.[^\W\d][\w@]*(?:\.\w+)*)
    | (?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\w.])
    | (?P<compare>>=|<=|==~|>|<)
    | (?P<sign>[-+*/])
    )""",
    re.VERBOSE,
)
_SHOWN = {"==~": "≈", ">=": "≥", "<=": "≤"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reference:
    """A number of a row."""

    label: str
    metric: str

    def __str__(self) -> str:
        return f"{self.label}.{self.metric}"


@dataclass(frozen=True)
class Term:
    """A product: factors that multiply and factors that divide. `sign` is 1 or -1."""

    sign: int
    over: tuple[float | Reference, ...]
    under: tuple[float | Reference, ...]


Side = tuple[Term, ...]
"""A sum."""


@dataclass(frozen=True)
class Claim:
    """Sides compared in a chain: `sides[0] comparisons[0] sides[1] comparisons[1] …`."""

    text: str
    sides: tuple[Side, ...]
    comparisons: tuple[str, ...]

    def references(self) -> Iterator[Reference]:
        """All numbers of rows that it names."""
        for side in self.sides:
            for term in side:
                yield from (factor for factor in (*term.over, *term.under) if isinstance(factor, Reference))


def nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` with what is known, or ` Known: …`, for error messages."""
    listed = f" Known: {', '.join(dict.fromkeys(known))}" if known else ""
    return did_you_mean(name, known) or listed


def parse_claim(text: str) -> Claim:
    """A claim from its text.

    Raises:
        ValueError: it is no claim; the message names the place.
    """
    tokens = list(_tokens(text))
    sides: list[Side] = []
    comparisons: list[str] = []
    rest: list[tuple[str, str]] = []
    for kind, word in [*tokens, ("compare", "")]:
        if kind != "compare":
            rest.append((kind, word))
            continue
        sides.append(_side(rest, text))
        rest = []
        if word:
            comparisons.append(word)
    if not comparisons:
        raise ValueError(f"claim {text!r} compares nothing: it needs one of {' '.join(COMPARISONS)}")
    claim = Claim(text, tuple(sides), tuple(comparisons))
    if not any(claim.references()):
        raise ValueError(f"claim {text!r} names no row: write label.metric")
    return claim


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, whole = 0, text.rstrip()
    while at < len(whole):
        found = _TOKEN.match(whole, at)
        if found is None or found.lastgroup is None:
            raise ValueError(
                f"claim {text!r} cannot be read from {whole[at:].strip()!r}: expected a number, label.metric (labels "
                f'with spaces in "…"), + - * / or one of {" ".join(COMPARISONS)}'
            )
        yield found.lastgroup, found[found.lastgroup]
        at = found.end()


def _side(tokens: Sequence[tuple[str, str]], text: str) -> Side:
    terms: list[Term] = []
    sign, operator = 1, ""
    over: list[float | Reference] = []
    under: list[float | Reference] = []
    wants_factor = True
    for kind, word in tokens:
        if (kind != "sign") != wants_factor:
            expected = "a number or label.metric" if wants_factor else "an operator"
            raise ValueError(f"claim {text!r}: expected {expected} at {word!r}")
        if kind == "sign":
            if word in "+-":
                terms.append(Term(sign, tuple(over), tuple(under)))
                sign, over, under = (1 if word == "+" else -1), [], []
            operator = word
        else:
            (under if operator == "/" else over).append(_factor(kind, word))
        wants_factor = not wants_factor
    if wants_factor:
        raise ValueError(f"claim {text!r}: a side ends without a number or label.metric")
    return (*terms, Term(sign, tuple(over), tuple(under)))


def _factor(kind: str, word: str) -> float | Reference:
    if kind == "number":
        return float(word)
    if word.startswith('"'):
        label, metric = word[1:].split('".', 1)
    else:
        label, metric = word.split(".", 1)
    return Reference(label, metric)


@dataclass(frozen=True)
class Judgement:
    """What became of a claim."""

    status: str
    """held, not held, within noise, not judged."""
    numbers: str
    """The sides as they came out: "3.93 > 3.19"; one after the other where there are several runs."""
    why: str = ""
    """What there is to say of it: why it was not judged, or how many of the runs it held in."""


@dataclass(frozen=True)
class _Value:
    point: float
    draws: np.ndarray
    """(DRAWS,), or a single number that is exact."""
    prompts: int | None = None
    """The fewest that stand behind it; None: exact, or with a known error."""


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
        sides = [_sum(side, table, prefix) for side in claim.sides]
    except _MissingError as missing:
        return Judgement(NOT_JUDGED, "", str(missing))
    words = [show(sides[0].point)]
    for comparison, side in zip(claim.comparisons, sides[1:], strict=True):
        words += [_SHOWN.get(comparison, comparison), show(side.point)]
    counts = [side.prompts for side in sides if side.prompts is not None]
    if counts and min(counts) < FEWEST:
        return Judgement(NOISE, " ".join(words), f"fewer than {FEWEST} prompts")
    verdicts = [
        _compare(left, comparison, right, tolerance)
        for left, comparison, right in zip(sides, claim.comparisons, sides[1:], strict=False)
    ]
    return Judgement(next(each for each in (NOT_HELD, NOISE, HELD) if each in verdicts), " ".join(words))


def _sum(side: Side, table: Mapping[str, Row], prefix: str) -> _Value:
    point, draws, counts = 0.0, np.zeros(1), []
    for term in side:
        value, drawn = float(term.sign), np.full(1, float(term.sign))
        for factors, divides in ((term.over, False), (term.under, True)):
            for factor in factors:
                known = _value(factor, table, prefix)
                if divides and known.point == 0:
                    raise _MissingError(f"{factor} is 0")
                value = value / known.point if divides else value * known.point
                with np.errstate(divide="ignore", invalid="ignore"):
                    drawn = drawn / known.draws if divides else drawn * known.draws
                counts.append(known.prompts)
        point, draws = point + value, draws + drawn
    behind = [count for count in counts if count is not None]
    return _Value(point, draws, min(behind) if behind else None)


def _compare(left: _Value, comparison: str, right: _Value, tolerance: float) -> str:
    gap = left.draws - right.draws
    if comparison in ("<", "<="):
        gap = -gap
    elif comparison == "==~":
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.where(gap == 0, 0.0, gap / np.abs(right.draws))
    known = gap[~np.isnan(gap)]
    if len(known) < _DEFINED * len(gap):
        return NOISE
    low, high = np.percentile(known, [2.5, 97.5])
    if comparison == "==~":
        held, failed = low >= -tolerance and high <= tolerance, low > tolerance or high < -tolerance
    elif comparison in (">", "<"):
        held, failed = low > 0, high <= 0
    else:
        held, failed = low >= 0, high < 0
    return HELD if held else NOT_HELD if failed else NOISE


def _value(factor: float | Reference, table: Mapping[str, Row], prefix: str) -> _Value:
    if not isinstance(factor, Reference):
        return _Value(factor, np.full(1, factor))
    row = table[factor.label if factor.label in table else prefix + factor.label]
    point = metric_of(row, factor.metric)
    if point is None:
        why = row.get("why", {}).get(factor.metric) or "it was not measured"
        raise _MissingError(f"{row['label']} has no {factor.metric}: {why}")
    pairs = row.get("pairs", {}).get(factor.metric)
    error = row.get("errors", {}).get(factor.metric)
    if pairs is not None:
        weights = _weights(len(pairs["over"]), str(row.get("sample", "")))
        return _Value(point, _resampled(pairs, weights), len(pairs["over"]))
    if error is not None:
        seed = list(f"{row['label']}.{factor.metric}".encode())
        return _Value(point, np.random.default_rng(seed).normal(point, error, DRAWS))
    if "certain" in row and factor.metric.partition(".")[0] not in row["certain"]:
        raise _MissingError(f"nothing is known of the uncertainty of {row['label']}'s {factor.metric}")
    return _Value(point, np.full(1, point))


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


@lru_cache(maxsize=16)
def _weights(prompts: int, sample: str) -> np.ndarray:
    """How often each prompt is in each of the draws: the same for the same prompts."""
    seed = [prompts, *sample.encode()]
    drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS)
    return drawn.astype(np.float64)


def metric_of(row: Row, metric: str) -> float | None:
    """A row's number by its name: `speedup`, `flops_per_token.total`, `acceptance_by_depth.0`; None: not measured.

    Raises:
        ValueError: the row has no such metric, with the nearest that it has.
    """
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

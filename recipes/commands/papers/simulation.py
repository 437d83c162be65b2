"""The experiments that take no model: what the papers' formulas say of Markov chains, and what decoding them shows.

The real proposers, verifiers and engine decode chains whose distributions are known (`decode/theory/markov.py`); the
sums of `decode/theory/closed_forms.py` stand beside what was counted. `standard_errors_off` is how far the two lie
apart: a right method is off by 4 or more in 6 of 100,000 comparisons.

Shape letters: B texts, G numbers of draft tokens, S parts, V states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....decode.engine import Limits, generate
from ....decode.methods import Parts, build_method
from ....decode.theory import closed_forms as theory
from ....decode.theory.markov import MarkovModel, OneStream, decode_side_by_side, even_chains, random_chains
from ....decode.warpers import Sampling
from ...schema.data import Section
from ...schema.experiments import DraftsStudy, OverAcceptanceStudy, RejectionsStudy, WalltimeStudy, checked_settings
from ...schema.papers import PaperRecipe
from ...session.terminal import bar

Row = dict[str, Any]
Tables = tuple[torch.Tensor, torch.Tensor]
Study = RejectionsStudy | DraftsStudy | OverAcceptanceStudy | WalltimeStudy
_SAMPLING = Sampling(1.0)


def simulation(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """The rows of one study; `errors` holds standard errors, whatever has none is exact or says how far off another is.

    Raises:
        ValueError: settings that the study does not have.
    """
    settings = checked_settings(recipe.experiment, recipe.settings)
    return _STUDIES[type(settings)](settings)


def _each(cases: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Cases with their numbers, and a bar."""
    with bar("simulating", "cases") as advance:
        for index, case in enumerate(cases):
            advance(index, len(cases), str(case))
            yield index, case


def _worst(rows: Sequence[Row], **more: Any) -> Row:
    return {"label": "all", "standard_errors_off": max(row.get("standard_errors_off", 0.0) for row in rows), **more}


def _rejections(settings: RejectionsStudy) -> list[Row]:
    rows: list[Row] = []
    cases = list(itertools.product(settings.states, settings.tokens, settings.shares))
    for index, (states, tokens, share) in _each(cases):
        tables = random_chains(tokens, states, share, settings.seed + index)
        counts_B = _counted(tables, "speculative", {"gamma": tokens}, tokens, settings, settings.seed + index)
        exact = theory.expected_rejections(*_arrays(tables), states - 1)
        naive = theory.expected_naive_rejections(*_arrays(tables), states - 1)
        row = _against(f"V={states} T={tokens} share={share:g}", counts_B, exact, tokens)
        rows.append(row | {"variation": exact / tokens, "naive": naive})
    least = min(rows, key=lambda row: row["naive"] - row["rejections"])
    errors = {"least_naive_excess": least["errors"]["rejections"]}
    worst = _worst(rows, least_naive_excess=least["naive"] - least["rejections"], errors=errors)
    pooled = [
        _pooled(share, [(row, case[1]) for row, case in zip(rows, cases, strict=True) if case[2] == share])
        for share in settings.shares
    ]
    return [*rows, *pooled, worst]


def _pooled(share: float, rows: Sequence[tuple[Row, int]]) -> Row:
    """The mean over chains, each with the length of its texts, that lie equally far from their drafters."""
    rate = float(np.mean([row["rejections"] / tokens for row, tokens in rows]))
    error = float(np.linalg.norm([row["errors"]["rejections"] / tokens for row, tokens in rows]) / len(rows))
    errors = {"rejections_per_token": error, "acceleration": error / rate**2 if rate else 0.0}
    acceleration = 1 / rate if rate else None
    return {
        "label": f"share={share:g}", "rejections_per_token": rate, "acceleration": acceleration, "errors": errors
    }  # fmt: skip


def _drafts(settings: DraftsStudy) -> list[Row]:
    rows: list[Row] = []
    states, tokens = settings.states, settings.tokens
    tables = random_chains(tokens, states, settings.share, settings.seed)
    for _, drafts in _each(settings.drafts):
        options = {"gamma": tokens, "drafts": drafts}
        counts_B = _counted(tables, "batch-speculative", options, tokens, settings, settings.seed + drafts)
        exact = theory.expected_batch_rejections(*_arrays(tables), states - 1, drafts)
        rows.append(_against(f"M={drafts}", counts_B, exact, tokens))
    limit = theory.expected_batch_rejections(*_arrays(tables), states - 1, None)
    most = {"label": "M=inf", "exact": limit, "exact_acceleration": theory.acceleration(tokens, limit)}
    return [*rows, most, _worst(rows)]


def _over_acceptance(settings: OverAcceptanceStudy) -> list[Row]:
    """Means over the chain's states: what is refused, and how far the output lies from the target's distribution."""
    tables = random_chains(1, settings.states, settings.share, settings.seed)
    target_VV, draft_VV = (table_TVV[0] for table_TVV in _arrays(tables))
    variation = float(theory.total_variation(target_VV, draft_VV).mean())
    rows: list[Row] = [{"label": "drafter alone", "exact_rejections": 0.0, "exact_bias": variation}]
    for index, (name, epsilon) in _each(list(itertools.product(("opt", "uno"), settings.epsilons))):
        expected = [theory.over_acceptance(p_V, q_V, epsilon) for p_V, q_V in zip(target_VV, draft_VV, strict=True)]
        output_VV = np.stack([each.optimal_V if name == "opt" else each.simple_V for each in expected])
        row = _one_token(tables, name, epsilon, output_VV, settings, settings.seed + index)
        row["exact_rejections"] = float(np.mean([each.rejection for each in expected]))
        row["exact_bias"] = float(theory.total_variation(output_VV, target_VV).mean())
        row["exact_sum"] = row["exact_rejections"] + row["exact_bias"]
        parts = [(row[part], row[f"exact_{part}"], row["errors"][part]) for part in ("rejections", "bias")]
        row["standard_errors_off"] = max(_off(*part) for part in parts)
        rows.append({"label": f"{name.upper()} e={epsilon:g}", **row, "variation": variation})
    return [*rows, _worst(rows)]


def _one_token(tables: Tables, name: str, epsilon: float, outputs_VV: np.ndarray, settings: Study, seed: int) -> Row:
    """Draw one token after each state, again and again.

    The bias of a state is counted on the tokens that its output holds too likely: the share of those, less what the
    target gives them. That is right on average, which the total variation of counts would not be.
    """
    states = len(outputs_VV)
    each = -(-settings.texts // states)
    starts = np.repeat(np.arange(states), each)
    method = build_method(f"relaxed-{name}", Parts(MarkovModel(tables[1])), _SAMPLING, gamma=1, epsilon=epsilon)
    stream = OneStream(seed, len(starts))
    found = decode_side_by_side(MarkovModel(tables[0]), method, starts[:, None].tolist(), Limits(1), _SAMPLING, stream)
    target_VV = tables[0][0].numpy()
    too_likely_VV = outputs_VV > target_VV + 1e-12  # rounding makes none too likely
    hits_B = too_likely_VV[starts, np.array(found.texts)[:, 0]]
    bias = float(hits_B.mean() - (target_VV * too_likely_VV).sum(1).mean())
    columns = {"rejections": found.rejections_B, "bias": hits_B, "sum": found.rejections_B + hits_B}
    errors = {name: _error(column_B.astype(np.float64), states) for name, column_B in columns.items()}
    rejections = float(found.rejections_B.mean())
    return {"rejections": rejections, "bias": bias, "sum": rejections + bias, "errors": errors}


def _walltime(settings: WalltimeStudy) -> list[Row]:
    rows: list[Row] = []
    for index, (alpha, gamma) in _each(list(itertools.product(settings.alphas, settings.gammas))):
        target, drafter = map(MarkovModel, even_chains(settings.states, alpha, settings.seed))
        method = build_method("speculative", Parts(drafter), _SAMPLING, gamma=gamma)
        prompts, stream = [[0]] * settings.texts, OneStream(settings.seed + index, settings.texts)
        first = next(generate(target, *method, prompts, Limits(gamma + 1), _SAMPLING, stream))
        tokens_B = np.array([len(ids) for ids in first.new_ids], dtype=np.float64)
        mean, error, exact = float(tokens_B.mean()), _error(tokens_B), theory.expected_tokens(alpha, gamma)
        row: Row = {"label": f"alpha={alpha:g} gamma={gamma}", "tokens_per_step": mean, "exact": exact}
        rows.append(row | {"standard_errors_off": _off(mean, exact, error), "errors": {"tokens_per_step": error}})
    worst = _worst(rows)
    for alpha, cost in itertools.product(settings.alphas, settings.costs):
        gamma = theory.best_gamma(alpha, cost)
        row = {"label": f"alpha={alpha:g} c={cost:g}", "best_gamma": float(gamma)}
        row["speedup"] = theory.walltime_improvement(alpha, gamma, cost)
        rows.append(row | {"oracle_speedup": theory.oracle_improvement(alpha, cost)})
    gains = [_oracle_gain(float(alpha), cost) for alpha in np.linspace(0.5, 0.995, 100) for cost in settings.costs]
    return [*rows, {"label": "oracle", "most_gain": max(gains), "least_gain": min(gains)}, worst]


def _oracle_gain(alpha: float, cost: float) -> float:
    """What always knowing the right γ would bring over the best fixed one, as a factor."""
    gamma_G = np.arange(513)
    fixed_G = (1 - alpha ** (gamma_G + 1)) / ((1 - alpha) * (gamma_G * cost + 1))
    return theory.oracle_improvement(alpha, cost) / float(fixed_G.max())


def _counted(
    tables: Tables, method: str, options: dict[str, Any], tokens: int, settings: Study, seed: int
) -> np.ndarray:
    """[B] rejections of texts that all begin with the same state."""
    target, drafter = map(MarkovModel, tables)
    built = build_method(method, Parts(drafter), _SAMPLING, **options)
    prompts, stream = [[target.vocab_size - 1]] * settings.texts, OneStream(seed, settings.texts)
    return decode_side_by_side(target, built, prompts, Limits(tokens), _SAMPLING, stream).rejections_B


def _against(label: str, counts_B: np.ndarray, exact: float, tokens: int) -> Row:
    mean, error = float(counts_B.mean()), _error(counts_B)
    return {
        "label": label,
        "rejections": mean,
        "exact": exact,
        "acceleration": tokens / mean if mean else None,
        "exact_acceleration": theory.acceleration(tokens, exact) if exact else None,
        "standard_errors_off": _off(mean, exact, error),
        "errors": {"rejections": error, "acceleration": tokens / mean**2 * error if mean else 0.0},
    }


def _error(values_B: np.ndarray, strata: int = 1) -> float:
    """Standard error of the mean of independent values, of which `strata` equal parts come from sources of their own,
    one part after another."""
    parts_SB = values_B.reshape(strata, -1)
    return float(np.sqrt(parts_SB.var(1, ddof=1).mean() / values_B.size))


def _off(mean: float, exact: float, error: float) -> float:
    """How many standard errors lie between; where nothing varied, 0 or a number that no claim passes."""
    gap = abs(mean - exact)
    if error == 0:
        return 0.0 if gap < 1e-6 else 1e6
    return gap / error


def _arrays(tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    return tables[0].numpy(), tables[1].numpy()


_STUDIES: dict[type[Section], Callable[[Any], list[Row]]] = {
    RejectionsStudy: _rejections,
    DraftsStudy: _drafts,
    OverAcceptanceStudy: _over_acceptance,
    WalltimeStudy: _walltime,
}

"""The experiments about acceptance: the target's own texts are written once and read once, and nothing is timed.

α, α@k, E[TV] and the predicted acceleration are those of `decode/evaluation/replay/`. Methods beside
`autoregressive` are decoded too, so that prediction and count stand in one table.

Shape letters: T positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ....decode.evaluation.measure import BASELINE, Entry
from ....decode.evaluation.replay.recording import TABLE_SOURCES, Recording, record
from ....decode.evaluation.replay.replay import chances
from ....decode.methods import Parts, build_method
from ....decode.models.base import LanguageModel
from ....decode.rng import Rng
from ....decode.theory import closed_forms as theory
from ....decode.theory.markov import decode_side_by_side
from ....decode.warpers import Sampling, warp
from ...assemble.evaluation import entries_of
from ...schema.evaluation import EvaluateRecipe
from ...schema.experiments import AcceptanceSettings, checked_settings
from ...schema.papers import PaperRecipe
from ...session.terminal import bar
from .bench import Bench, Row, open_bench, ratio_metric, with_counted

Floats = NDArray[np.float64]
_BATCH = 8
_TABLES = dict(zip(("unigram", "bigram"), TABLE_SOURCES, strict=True))


def acceptance(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """Rows of every source of drafts, temperature and number of candidates, and of every method that is decoded.

    Metrics of sources: `alpha`, the probability that one of k candidates is accepted, drawn without replacement as the
    multi-candidate paper does; for k > 1 also `with_replacement` and `naive` (MCNS); for k = 1 `variation`, E[TV], and
    `acceleration`, T / E[N_rej] (`theory.md`, point 1). Of methods: `accepted_per_step`, `tokens_per_step`, `alpha`
    (accepted ÷ examined) and `rejections`, those a token as they were counted. Of over-acceptance: `rejections`, `bias`
    and their `sum`, the exact means over the positions.

    Raises:
        ValueError: settings that there are not, a source without its part; what `open_bench` raises.
    """
    settings = cast(AcceptanceSettings, checked_settings(recipe.experiment, recipe.settings))
    _check_parts(recipe, settings)
    bench = open_bench(with_counted(recipe.evaluate, settings.counted, folder), recipe.experiment)
    assert recipe.evaluate is not None
    rows: list[Row] = []
    for temperature in settings.temperatures:
        sampling = Sampling(temperature, recipe.evaluate.top_k, recipe.evaluate.top_p)
        if not settings.sources and not (settings.epsilons and temperature):
            continue
        texts = bench.texts(sampling)
        if settings.sources:
            rows += _source_rows(bench, settings, sampling, texts)
        if temperature:
            rows += _over_acceptance_rows(bench, settings.epsilons, sampling, texts)
    return rows + _decoded_rows(bench, _decoded(recipe.evaluate))


def _decoded(evaluation: EvaluateRecipe) -> list[Entry]:
    return [entry for entry in entries_of(evaluation) if entry.method != BASELINE]


def _check_parts(recipe: PaperRecipe, settings: AcceptanceSettings) -> None:
    """Raises ValueError for a source of drafts that the evaluation does not name, before anything is loaded."""
    evaluation = recipe.evaluate
    if evaluation is None:
        return
    for source, part in (("drafters", "drafter"), ("unigram", "table"), ("bigram", "table")):
        given = getattr(evaluation, part) or (part == "table" and settings.counted)
        if source in settings.sources and not given:
            raise ValueError(f"`settings.sources` has {source!r}, and `evaluate` names no `{part}`")
    if not (settings.sources or settings.epsilons or _decoded(evaluation)):
        raise ValueError("nothing to do: `settings.sources` and `settings.epsilons` are empty, and nothing is decoded")
    if settings.epsilons and evaluation.drafter is None:
        raise ValueError("`settings.epsilons` is for a drafter, and `evaluate` names no `drafter`")


def _source_rows(
    bench: Bench, settings: AcceptanceSettings, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> list[Row]:
    parts = bench.opened.parts
    drafters = [each for each in (parts.drafter, *parts.more_drafters) if each is not None]
    tables = [_TABLES[source] for source in settings.sources if source in _TABLES]
    read: list[tuple[str, str, Parts]] = []  # the row's name, the source's in the recording, what is read for it
    if "drafters" in settings.sources:
        names = [f"drafter {place}" if place > 1 else "drafter" for place in range(1, len(drafters) + 1)]
        read += [(name, "drafter", Parts(drafter)) for name, drafter in zip(names, drafters, strict=True)]
    counts = Parts(table=parts.table)
    read += [(source, _TABLES[source].name, counts) for source in settings.sources if source in _TABLES]
    rows: list[Row] = []
    recordings: dict[int, Recording] = {}
    for name, source, needed in read:
        if id(needed) not in recordings:
            recordings[id(needed)] = _read(bench, needed, sampling, texts, max(settings.candidates), tables)
        for candidates in settings.candidates:
            label = name if settings.candidates == [1] else f"{name} k={candidates}"
            row = _source_row(recordings[id(needed)], source, candidates)
            rows.append({"label": f"{label} T={sampling.temperature:g}", **row})
    return rows


def _read(
    bench: Bench,
    parts: Parts,
    sampling: Sampling,
    texts: Sequence[Sequence[int]],
    candidates: int,
    tables: Sequence[Any],
) -> Recording:
    with bar("reading them", "prompts") as advance:
        sizes: dict[str, Any] = {"candidates": candidates, "chains": 1, "tables": tables, "seed": bench.seed}
        return record(bench.opened.target, parts, bench.prompts, texts, sampling, **sizes, progress=advance)


def _source_row(recording: Recording, source: str, candidates: int) -> Row:
    """What a source's drafts come to with so many candidates.

    With replacement α@k is known at every position from whole distributions. What drawing without replacement adds is
    known for the token that stands there, and so right on average; the same holds of naive sampling.
    """
    drafts = recording.drafts[source]
    one_T = 1 - drafts.variation_T.astype(np.float64)
    lengths, tokens = recording.lengths, np.ones_like(one_T)
    if candidates == 1:
        refused = {"variation": (1 - one_T, tokens), "acceleration": (tokens, 1 - one_T)}
        return _row_of({"alpha": (one_T, tokens)} | refused, lengths)
    with_T = one_T if recording.sampling.greedy else 1 - drafts.left_TK[:, candidates - 1].astype(np.float64)
    gain_T = chances(recording, source, candidates, "without") - chances(recording, source, candidates, "with")
    naive_T = chances(recording, source, candidates, "naive without")
    shares = {"alpha": with_T + gain_T, "with_replacement": with_T, "naive": naive_T}
    return _row_of({name: (each_T, tokens) for name, each_T in shares.items()}, lengths)


def _row_of(columns: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], lengths: NDArray[np.int64]) -> Row:
    """Metrics that are ratios of sums over positions, and by prompt what stands over and under them."""
    ends = np.cumsum(lengths)
    row: Row = {"pairs": {}}
    for name, (over_T, under_T) in columns.items():
        over, under = (
            [float(part_T[end - length : end].sum()) for end, length in zip(ends, lengths, strict=True)]
            for part_T in (over_T, under_T)
        )
        row |= ratio_metric(name, over, under, row["pairs"])
    return row


def _over_acceptance_rows(
    bench: Bench, epsilons: Sequence[float], sampling: Sampling, texts: Sequence[Sequence[int]]
) -> list[Row]:
    """OPT and UNO at every position of the target's texts, exactly: there is no judge (`theory.md`, point 6b)."""
    if not epsilons:
        return []
    drafter = bench.opened.parts.drafter
    assert drafter is not None
    labels = [f"{name} e={epsilon:g} T={sampling.temperature:g}" for epsilon in epsilons for name in ("OPT", "UNO")]
    counts: dict[str, list[tuple[float, float, float]]] = {label: [] for label in labels}
    with bar("over-accepting", "prompts") as advance:
        for place, (prompt, text) in enumerate(zip(bench.prompts, texts, strict=True)):
            target_TV = distributions(bench.opened.target, prompt, text, sampling)
            draft_TV = distributions(drafter, prompt, text, sampling)
            traded = [each for epsilon in epsilons for each in _traded(target_TV, draft_TV, epsilon)]
            for label, (rejections, bias) in zip(labels, traded, strict=True):
                counts[label].append((rejections, bias, float(len(text))))
            advance(place + 1, len(texts))
    rows: list[Row] = []
    for label, by_prompt in counts.items():
        refused, biased, tokens = ([one[column] for one in by_prompt] for column in range(3))
        row: Row = {"label": label, "pairs": {}}
        both = [one + other for one, other in zip(refused, biased, strict=True)]
        for metric, over in (("rejections", refused), ("bias", biased), ("sum", both)):
            row |= ratio_metric(metric, over, tokens, row["pairs"])
        rows.append(row)
    return rows


def _traded(target_TV: Floats, draft_TV: Floats, epsilon: float) -> list[tuple[float, float]]:
    """Rejections and bias of OPT, and of UNO, summed over the positions of a text."""
    each = [theory.over_acceptance(p_V, q_V, epsilon) for p_V, q_V in zip(target_TV, draft_TV, strict=True)]
    rejections = float(sum(one.rejection for one in each))
    outputs = np.stack([one.optimal_V for one in each]), np.stack([one.simple_V for one in each])
    return [(rejections, float(theory.total_variation(output_TV, target_TV).sum())) for output_TV in outputs]


@torch.inference_mode()
def distributions(model: LanguageModel, prompt: Sequence[int], text: Sequence[int], sampling: Sampling) -> Floats:
    """What a model says before every token of a text, warped, float64 [T, V]."""
    start, cache = model.begin([prompt], len(text))
    ids = torch.tensor([[*start[0], *text]], device=model.device)
    hidden_1TD = model.extend(cache, ids[:, :-1])
    probs_TV: Floats = warp(model.logits(hidden_1TD[0, len(start[0]) - 1 :]), sampling).double().cpu().numpy()
    return probs_TV / probs_TV.sum(1, keepdims=True)


def _decoded_rows(bench: Bench, entries: Sequence[Entry]) -> list[Row]:
    rows: list[Row] = []
    total = len(entries) * len(bench.prompts)
    with bar("decoding", "prompts") as advance:
        for place, entry in enumerate(entries):
            method = build_method(entry.method, bench.opened.parts, entry.sampling, **entry.options)
            counts: list[list[float]] = []
            for first in range(0, len(bench.prompts), _BATCH):
                advance(place * len(bench.prompts) + first, total, entry.label)
                prompts = bench.prompts[first : first + _BATCH]
                rng = Rng.for_rows(bench.seed + first, len(prompts), bench.opened.target.device)
                found = decode_side_by_side(bench.opened.target, method, prompts, bench.limits, entry.sampling, rng)
                for tally, rejections in zip(found.tally, found.rejections_B.tolist(), strict=True):
                    numbers = (tally.tokens, tally.steps, tally.accepted, tally.examined, rejections)
                    counts.append([float(value) for value in numbers])
            tokens, steps, accepted, examined, refused = ([one[column] for one in counts] for column in range(5))
            row: Row = {"label": entry.label, "pairs": {}}
            for metric, over, under in (
                ("tokens_per_step", tokens, steps),
                ("accepted_per_step", accepted, steps),
                ("alpha", accepted, examined),
                ("rejections", refused, tokens),
            ):
                row |= ratio_metric(metric, over, under, row["pairs"])
            rows.append(row)
    return rows

"""The experiments about acceptance: the target's own texts are written once and read once, and nothing is timed.

α, α@k, E[TV] and the predicted acceleration are those of `decode/evaluation/replay/`. Methods beside
`autoregressive` are decoded too, so that prediction and count stand in one table.

Shape letters: T positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from ...schema.experiments import AcceptanceSettings
from ...schema.papers import PaperRecipe
from ...session.terminal import bar
from .bench import Bench, Row, check_parts, counted_table, open_bench, ratio_row, summed_by_text

Floats = NDArray[np.float64]
_BATCH = 8
_TABLES = dict(zip(("unigram", "bigram"), TABLE_SOURCES, strict=True))


def acceptance(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """Rows of every source of drafts, temperature and number of candidates, and of every method that is decoded.

    Metrics of sources: `alpha`, the probability that one of k candidates is accepted, drawn without replacement; for
    k > 1 also `with_replacement` and `naive` (MCNS); for k = 1 `variation`, E[TV], and `acceleration`, T / E[N_rej]
    (`theory.md`, point 1). Of methods: `accepted_per_step`, `tokens_per_step`, `alpha` (accepted ÷ examined) and
    `rejections` a token. Of over-acceptance: `rejections`, `bias` and their `sum`, means over the positions.

    Raises:
        ValueError: settings that there are not, a source without its part; what `open_bench` raises.
    """
    settings, evaluation = recipe.section(), recipe.evaluate
    assert isinstance(settings, AcceptanceSettings)
    if settings.counted is not None:
        table = counted_table(evaluation, settings.counted, folder)
        evaluation = evaluation.model_copy(update={"table": str(table)})
    if "drafters" in settings.sources or settings.epsilons:
        check_parts(evaluation, "drafter")
    if not set(_TABLES).isdisjoint(settings.sources):
        check_parts(evaluation, "table")
    bench = open_bench(evaluation)
    rows: list[Row] = []
    for temperature in settings.temperatures:
        sampling = Sampling(temperature, evaluation.top_k, evaluation.top_p)
        if not settings.sources and not (settings.epsilons and temperature):
            continue
        texts = bench.texts(sampling)
        if settings.sources:
            rows += _source_rows(bench, settings, sampling, texts)
        if temperature and settings.epsilons:
            rows += _over_acceptance_rows(bench, settings.epsilons, sampling, texts)
    return rows + _decoded_rows(bench, [each for each in entries_of(evaluation) if each.method != BASELINE])


def _source_rows(
    bench: Bench, settings: AcceptanceSettings, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> list[Row]:
    """Of each source and number of candidates. The text is read once for each drafter, and once for all tables."""
    parts = bench.opened.parts
    tables = {source: _TABLES[source] for source in settings.sources if source in _TABLES}
    read: dict[str, tuple[str, Recording]] = {}
    sizes: dict[str, Any] = {"candidates": max(settings.candidates), "seed": bench.seed}

    def reading(needed: Parts) -> Recording:
        with bar("reading them", "prompts") as advance:
            more = sizes | {"tables": list(tables.values()), "progress": advance}
            return record(bench.opened.target, needed, bench.prompts, texts, sampling, **more)

    if "drafters" in settings.sources:
        drafters = [each for each in (parts.drafter, *parts.more_drafters) if each is not None]
        for index, drafter in enumerate(drafters, 1):
            read[f"drafter {index}" if index > 1 else "drafter"] = ("drafter", reading(Parts(drafter)))
    if tables:
        of_table = reading(Parts(table=parts.table))
        read |= {source: (table.name, of_table) for source, table in tables.items()}
    rows = []
    for name, (source, recording) in read.items():
        for candidates in settings.candidates:
            label = name if settings.candidates == [1] else f"{name} k={candidates}"
            rows.append(_source_row(f"{label} T={sampling.temperature:g}", recording, source, candidates))
    return rows


def _source_row(label: str, recording: Recording, source: str, candidates: int) -> Row:
    """What a source's drafts come to with so many candidates.

    With replacement α@k is known at every position from whole distributions. What drawing without replacement adds is
    known for the token that stands there, and so right on average; the same holds of naive sampling.
    """
    drafts = recording.drafts[source]
    one_T = 1 - drafts.variation_T.astype(np.float64)
    tokens = np.ones_like(one_T)
    columns = {"alpha": (one_T, tokens), "variation": (1 - one_T, tokens), "acceleration": (tokens, 1 - one_T)}
    if candidates > 1:
        with_T = one_T if recording.sampling.greedy else 1 - drafts.left_TK[:, candidates - 1].astype(np.float64)
        gain_T = chances(recording, source, candidates, "without") - chances(recording, source, candidates, "with")
        naive_T = chances(recording, source, candidates, "naive without")
        shares = {"alpha": with_T + gain_T, "with_replacement": with_T, "naive": naive_T}
        columns = {name: (each_T, tokens) for name, each_T in shares.items()}
    by_text = {
        name: (summed_by_text(over_T, recording), summed_by_text(under_T, recording))
        for name, (over_T, under_T) in columns.items()
    }
    return ratio_row(label, by_text)


def _over_acceptance_rows(
    bench: Bench, epsilons: Sequence[float], sampling: Sampling, texts: Sequence[Sequence[int]]
) -> list[Row]:
    """OPT and UNO at every position of the target's texts, exactly: there is no judge (`theory.md`, point 6b)."""
    drafter = bench.opened.parts.drafter
    assert drafter is not None
    found: dict[str, list[tuple[float, float]]] = {}
    with bar("over-accepting", "prompts") as advance:
        for index, (prompt, text) in enumerate(zip(bench.prompts, texts, strict=True), 1):
            target_TV = distributions(bench.opened.target, prompt, text, sampling)
            draft_TV = distributions(drafter, prompt, text, sampling)
            for epsilon in epsilons:
                for name, traded in _traded(target_TV, draft_TV, epsilon).items():
                    found.setdefault(f"{name} e={epsilon:g} T={sampling.temperature:g}", []).append(traded)
            advance(index, len(texts))
    tokens = [len(text) for text in texts]
    rows = []
    for label, by_prompt in found.items():
        rejections, bias = np.array(by_prompt).T
        columns = {"rejections": (rejections, tokens), "bias": (bias, tokens), "sum": (rejections + bias, tokens)}
        rows.append(ratio_row(label, columns))
    return rows


def _traded(target_TV: Floats, draft_TV: Floats, epsilon: float) -> dict[str, tuple[float, float]]:
    """Rejections and bias of OPT and of UNO, summed over the positions of a text."""
    each = [theory.over_acceptance(p_V, q_V, epsilon) for p_V, q_V in zip(target_TV, draft_TV, strict=True)]
    outputs = {"OPT": np.stack([one.optimal_V for one in each]), "UNO": np.stack([one.simple_V for one in each])}
    rejections = float(sum(one.rejection for one in each))
    return {
        name: (rejections, float(theory.total_variation(out_TV, target_TV).sum())) for name, out_TV in outputs.items()
    }


@torch.inference_mode()
def distributions(model: LanguageModel, prompt: Sequence[int], text: Sequence[int], sampling: Sampling) -> Floats:
    """What a model predicts before every token of a text, warped, float64 [T, V]."""
    start, cache = model.begin([prompt], len(text))
    ids = torch.tensor([[*start[0], *text]], device=model.device)
    hidden_1TD = model.extend(cache, ids[:, :-1])
    probs_TV: Floats = warp(model.logits(hidden_1TD[0, len(start[0]) - 1 :]), sampling).double().cpu().numpy()
    return probs_TV / probs_TV.sum(1, keepdims=True)


def _decoded_rows(bench: Bench, entries: Sequence[Entry]) -> list[Row]:
    rows = []
    with bar("decoding", "prompts") as advance:
        for index, entry in enumerate(entries):
            method = build_method(entry.method, bench.opened.parts, entry.sampling, **entry.options)
            counts: list[tuple[int, ...]] = []
            for first in range(0, len(bench.prompts), _BATCH):
                advance(index * len(bench.prompts) + first, len(entries) * len(bench.prompts), entry.label)
                prompts = bench.prompts[first : first + _BATCH]
                rng = Rng.for_rows(bench.seed + first, len(prompts), bench.opened.target.device)
                found = decode_side_by_side(bench.opened.target, method, prompts, bench.limits, entry.sampling, rng)
                for tally, rejections in zip(found.tally, found.rejections_B.tolist(), strict=True):
                    counts.append((tally.tokens, tally.steps, tally.accepted, tally.examined, rejections))
            tokens, steps, accepted, examined, refused = np.array(counts).T
            columns = {
                "tokens_per_step": (tokens, steps),
                "accepted_per_step": (accepted, steps),
                "alpha": (accepted, examined),
                "rejections": (refused, tokens),
            }
            rows.append(ratio_row(entry.label, columns))
    return rows

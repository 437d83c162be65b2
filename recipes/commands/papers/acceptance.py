"""The experiments about acceptance: the target's own texts are written once and read once, and nothing is timed.

α, α@k, E[TV] and the predicted acceleration are those of `decode/evaluation/replay/`. Methods beside
`autoregressive` are decoded too, so that prediction and count stand in one table.

Shape letters: T positions of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....decode.evaluation.measure import BASELINE, Entry, decode_side_by_side
from ....decode.evaluation.replay.recording import TABLE_SOURCES, Recording, record
from ....decode.evaluation.replay.replay import chances
from ....decode.methods import Parts, build_method
from ....decode.rng import Rng
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, entries_of, open_case
from ...schema.experiments import AcceptanceSettings
from ...schema.papers import PaperRecipe
from ...session.terminal import bar
from .bench import Row, check_parts, counted_table, ratio_row, summed_by_text

_BATCH = 8
_TABLES = dict(zip(("unigram", "bigram"), TABLE_SOURCES, strict=True))


def acceptance(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """Rows of every source of drafts, temperature and number of candidates, and of every method that is decoded.

    Metrics of sources: `alpha`, the probability that one of k candidates is accepted, drawn without replacement; for
    k > 1 also `with_replacement` and `naive` (MCNS); for k = 1 `variation`, E[TV], and `acceleration`, T / E[N_rej]
    (`theory.md`, point 1). Of methods: `accepted_per_step`, `tokens_per_step`, `alpha` (accepted ÷ examined) and
    `rejections` a token.
    """
    settings, evaluation = recipe.section(), recipe.evaluate
    assert isinstance(settings, AcceptanceSettings)
    if settings.counted is not None:
        table = counted_table(evaluation, settings.counted, folder)
        evaluation = evaluation.model_copy(update={"table": str(table)})
    if "drafters" in settings.sources:
        check_parts(evaluation, "drafter")
    if not set(_TABLES).isdisjoint(settings.sources):
        check_parts(evaluation, "table")
    bench = open_case(evaluation)
    rows: list[Row] = []
    for temperature in settings.temperatures if settings.sources else ():
        sampling = Sampling(temperature, evaluation.top_k, evaluation.top_p)
        rows += _source_rows(bench, settings, sampling, bench.texts(sampling))
    return rows + _decoded_rows(bench, [each for each in entries_of(evaluation) if each.method != BASELINE])


def _source_rows(
    bench: Case, settings: AcceptanceSettings, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> list[Row]:
    """Of each source and number of candidates. The text is read once for each drafter, and once for all tables."""
    parts = bench.opened.parts
    tables = {source: _TABLES[source] for source in settings.sources if source in _TABLES}
    read: dict[str, tuple[str, Recording]] = {}
    sizes: dict[str, Any] = {"candidates": max(settings.candidates), "seed": bench.recipe.seed}

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


def _decoded_rows(bench: Case, entries: Sequence[Entry]) -> list[Row]:
    rows = []
    with bar("decoding", "prompts") as advance:
        for index, entry in enumerate(entries):
            method = build_method(entry.method, bench.opened.parts, entry.sampling, **entry.options)
            counts: list[tuple[int, ...]] = []
            for first in range(0, len(bench.prompts), _BATCH):
                advance(index * len(bench.prompts) + first, len(entries) * len(bench.prompts), entry.label)
                prompts = bench.prompts[first : first + _BATCH]
                rng = Rng.for_rows(bench.recipe.seed + first, len(prompts), bench.opened.target.device)
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

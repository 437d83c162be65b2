"""The experiments about what stands beside a target: heads corrected by a correlation table, tables of growing parts of
a corpus, and what a forward costs in time and energy.

Shape letters: T positions of all texts one after another, H heads, C candidates of a head, P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....checkpoints.artifact.artifact import load_manifest
from ....checkpoints.table.facts import table_facts
from ....checkpoints.table.table import BigramTable
from ....decode.evaluation.measure import decode
from ....decode.evaluation.replay.recording import Recording, record
from ....decode.evaluation.replay.replay import predict
from ....decode.methods import Parts, build_method
from ....decode.warpers import Sampling
from ...assemble.evaluation import Case, open_case
from ...schema.experiments import CorrelationSettings, SaturationSettings
from ...schema.papers import PaperRecipe
from ...session.terminal import bar
from ..evaluation.energy import run_energy
from .bench import Row, check_parts, counted_table, ratio_row, summed_by_text

_WITH, _WITHOUT = "with correlation", "without correlation"
Flags = NDArray[np.bool_]


def correlation(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """How often the best token of each head is what the target's own greedy text goes on with: by itself (`without
    correlation`), and where its probability is multiplied by r(x, y), x the token before (`slim.txt`, equation 3).

    The text before a head's position is taken to have been accepted: x is the text's own token. Positions beyond its
    end are not counted. Metrics: `head_1` …, `heads` (all of them); `mended` and `spoiled`, the shares of all positions
    where the correction turned a wrong token into the right one, and the other way round; `tokens_per_step` of SLiM
    with a single sequence as long as there are heads, by replay; with `categories`, `worst_gain` and `best_gain`, the
    least and the most that a category's `heads` gain, over its prompts.
    """
    settings = recipe.section()
    assert isinstance(settings, CorrelationSettings)
    check_parts(recipe.evaluate, "heads", "table")
    bench = open_case(recipe.evaluate)
    parts, sampling = bench.opened.parts, Sampling()
    assert parts.table is not None
    texts = bench.texts(sampling)
    with bar("reading them", "prompts") as advance:
        more: dict[str, Any] = {"head_candidates": settings.candidates, "progress": advance}
        recording = record(bench.opened.target, Parts(heads=parts.heads), bench.prompts, texts, sampling, **more)
    with_TH, without_TH, within_TH = corrected(recording, parts.table.to("cpu"), settings)
    flags = {"with": with_TH, "without": without_TH, "within": np.ones_like(within_TH)}
    flags |= {"mended": with_TH & ~without_TH, "spoiled": without_TH & ~with_TH}
    counts = {name: summed_by_text(flags_TH & within_TH, recording) for name, flags_TH in flags.items()}
    rows = _correlation_rows(counts, np.ones(len(texts), dtype=bool), "")
    for row, correlated in zip(rows, ("table", "none"), strict=True):
        options = {"num_candidates": settings.candidates, "correlation": correlated}
        options["unseen_correlation"] = settings.unseen
        options["lengths"] = "full"  # with r = 1 the shortest of all lengths is always the likeliest
        options["add_k"] = settings.add_k
        replayed = predict(recording, parts, "slim-ss", options)
        assert replayed is not None
        replayed_row = ratio_row("", {"tokens_per_step": (recording.lengths, replayed.steps_by_text)})
        row["tokens_per_step"] = replayed_row["tokens_per_step"]
        row["pairs"] |= replayed_row["pairs"]
    return _with_categories(rows, [asked.category for asked in bench.asked], counts) if settings.categories else rows


def corrected(
    recording: Recording, table: BigramTable, settings: CorrelationSettings
) -> tuple[Flags, Flags, NDArray[np.bool_]]:
    """[T, H] each: which heads' best tokens are right, with the table and without; which positions lie in a text."""
    heads = recording.heads
    assert heads is not None
    depth = heads.token_THC.shape[1]
    follows, before, within = [], [], []
    ends = np.cumsum(recording.lengths)
    for text, end in zip(recording.texts, ends, strict=True):
        own = np.array([*text, *[0] * depth], dtype=np.int64)
        places_TH = np.arange(len(text))[:, None] + np.arange(depth)
        follows.append(own[places_TH])
        roots_T1 = heads.root_T[end - len(text) : end, None].astype(np.int64)
        before.append(np.concatenate((roots_T1, own[places_TH[:, :-1]]), 1))
        within.append(places_TH < len(text))
    follows_TH, before_TH, within_TH = (np.concatenate(column) for column in (follows, before, within))
    candidates_THC = torch.from_numpy(heads.token_THC).long()
    log_unseen = torch.tensor(settings.unseen, dtype=torch.float32).log()
    log_r_THC = table.look_up(torch.from_numpy(before_TH)[..., None], candidates_THC, log_unseen, settings.add_k)
    best_TH1 = (torch.from_numpy(heads.log_prob_THC) + log_r_THC).argmax(-1, keepdim=True)
    with_TH = candidates_THC.gather(2, best_TH1)[..., 0].numpy()
    return with_TH == follows_TH, heads.token_THC[..., 0] == follows_TH, within_TH


def _correlation_rows(counts: Mapping[str, NDArray[Any]], chosen: Flags, suffix: str) -> list[Row]:
    """The two rows, over the prompts that are chosen; counts are [P, H]."""
    rows = []
    chosen_PH = {name: count_PH[chosen] for name, count_PH in counts.items()}
    within_PH = chosen_PH["within"]
    for label, name, shares in ((_WITH, "with", ("mended", "spoiled")), (_WITHOUT, "without", ())):
        heads = range(within_PH.shape[1])
        columns = {f"head_{head + 1}": (chosen_PH[name][:, head], within_PH[:, head]) for head in heads}
        named = {"heads": name} | {share: share for share in shares}
        columns |= {metric: (chosen_PH[key].sum(1), within_PH.sum(1)) for metric, key in named.items()}
        rows.append(ratio_row(label + suffix, columns))
    return rows


def _with_categories(rows: list[Row], categories: Sequence[str], counts: Mapping[str, NDArray[Any]]) -> list[Row]:
    gains: list[tuple[float, Row]] = []
    for name in dict.fromkeys(categories):
        chosen = np.array([category == name for category in categories])
        pair = _correlation_rows(counts, chosen, f" [{name}]")
        if None not in (pair[0]["heads"], pair[1]["heads"]):
            ours, plain = (row["pairs"]["heads"] for row in pair)
            more = [one - other for one, other in zip(ours["over"], plain["over"], strict=True)]
            gains.append((pair[0]["heads"] - pair[1]["heads"], {"over": more, "under": ours["under"]}))
        if len(set(categories)) > 1:
            rows += [row | {"sample": name} for row in pair]
    gains.sort(key=lambda gain: gain[0])
    for metric, index in (("worst_gain", 0), ("best_gain", -1)):
        rows[0][metric] = None
        if gains:
            rows[0][metric], rows[0]["pairs"][metric] = gains[index]
    return rows


def saturation(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """SLiM's decoding with tables of the first rows of a corpus (`slim.txt`, figure 7): rows `r = 1`, `part 1` and so
    on for the sizes, and `all`. Metrics: `tokens_per_step`, `gain` over r = 1 (0.1: 10 %), `conversations`, `entries`
    and `megabytes` of the table.

    r = 1 takes the better of sequences of all lengths and of full length: among all lengths the shortest is always the
    likeliest, which hurts heads that are often right and helps those that are not. The tables are kept in the folder.
    """
    settings, evaluation = recipe.section(), recipe.evaluate
    assert isinstance(settings, SaturationSettings)
    check_parts(evaluation, "heads")
    bench = open_case(evaluation.model_copy(update={"table": None}))
    limits = {f"part {number}": size for number, size in enumerate(settings.sizes, 1)} | {"all": None}
    folders = {name: counted_table(evaluation, settings.source, folder, limit) for name, limit in limits.items()}
    rows: list[Row] = []
    with bar("decoding", "tables") as advance:
        for label in ("r = 1", *folders):
            table = None if label == "r = 1" else BigramTable.load(folders[label])
            tokens, steps = _tokens_and_steps(bench, table, evaluation.temperature, settings)
            certain = ["conversations", "entries", "megabytes"]
            row = ratio_row(label, {"tokens_per_step": (tokens, steps)}, certain=certain)
            row["gain"] = row["tokens_per_step"] / (rows[0] if rows else row)["tokens_per_step"] - 1
            if table is not None:
                row["conversations"] = load_manifest(folders[label]).data["conversations"]
                row |= {"entries": table.entries, "megabytes": table_facts(table)["bytes"] / 1e6}
            rows.append(row)
            advance(len(rows), len(folders) + 1)
    return rows


def _tokens_and_steps(
    bench: Case, table: BigramTable | None, temperature: float, settings: SaturationSettings
) -> tuple[list[float], list[float]]:
    """Tokens and steps of each prompt."""
    sampling, parts = Sampling(temperature), Parts(heads=bench.opened.parts.heads, table=table)
    options: dict[str, Any] = {"num_sequences": settings.sequences, "num_candidates": settings.candidates}
    lengths = [{"correlation": "none", "lengths": lengths} for lengths in ("all", "full")] if table is None else [{}]
    found: list[tuple[list[float], list[float]]] = []
    for more in lengths:
        method = build_method("slim-s", parts, sampling, **options, **more)
        tallies = [
            decode(bench.opened.target, method, sampling, bench.recipe.seed + index, prompt, bench.limits).tally
            for index, prompt in enumerate(bench.prompts)
        ]
        found.append(([float(tally.tokens) for tally in tallies], [float(tally.steps) for tally in tallies]))
    return max(found, key=lambda sides: sum(sides[0]) / sum(sides[1]))


def energy(recipe: PaperRecipe, folder: Path) -> list[Row]:
    """Time and energy of a forward of the target for each batch size: rows `batch 4`. Energy is None where nothing
    measures it."""
    found = run_energy(recipe.evaluate, folder / "energy.json", **recipe.section().model_dump())
    rows: list[Row] = found["rows"]
    for row in rows:
        row["certain"] = ["batch", "inputs"]
        row["why"] = {name: str(found["covers"]) for name in row if name.startswith("joules") and row[name] is None}
    return rows

"""`draftsmith diagnose`: why acceptance is lower than what training measured.

Each part of an evaluation (drafter, heads, table) is measured on the way from its training to real decoding; between
two stages one thing changes, and what is lost there is lost by it. The stages, as far as they apply:

- `record`: what training measured of the weights in memory, from the manifest; `greedy`: at temperature 0 how often
  the best tokens agree, from the same place.
- `export`: the same held-out blocks again with the artifact's files, in float32 and with the target that it was made
  for, where that can be found; `target`: with this evaluation's target.
- `written`: real answers to this evaluation's prompts, teacher-forced, as training's template writes them; `corpus`: as
  the evaluation's does; both as far as the positions of training blocks go.
- `within`: the target's own answers, teacher-forced, as far as those positions go, where they are longer; `own`: all of
  them; `warped`: with the temperature, top-k and top-p of decoding; `served`: in the type that is served.
- `decoding`: real decoding with a chain: `speculative`, `bpd` or `bigram`.

Of heads each stage is told head by head. The recipe's trees (`multi-candidate`; `medusa` and SLiM, or a tree of Medusa
if the recipe has none) are decoded beside the chain: what the best guesses and all candidates are worth at each depth,
and what decoding accepts there.

The file, `diagnosis.json` beside the results, written anew after each part:

    {"schema": 1, "kind": "diagnosis", "complete", "target", "prompts", "recipe", "parts": [{
        "part": "drafter", "source": "…", "method": "speculative", "options", "temperature",
        "stages": [{"key", "says", "value", "tokens", "by_depth", "top1_accuracy", "overlap", "top1_agreement",
                    "accepted", "tokens_per_step"}],      value: the chance that a draft is accepted; null: not known
        "gaps": [{"before", "after", "cause", "lost", "interval"}],             interval: 99 %, over prompts, or null
        "verdict": [{"cause", "fault", "lost", "interval", "says", "advice"}],  the largest first
        "headline": "…", "sentences": ["…"],
        "training": {"metrics", "again", "again_on"},     of the manifest, and taken again of the artifact's files
        "target": {"known", "same", "made_for"},
        "differences": [{"what", "trained", "evaluated", "matters", "example"}],
        "types": [{"type", "served", …measures of a stage}],
        "beyond": null or {"block", "late", "beyond", "windowed"},   the measure in the second half of a training block,
                            beyond a block, and beyond it with the last tokens read alone
        "other_states": null or {"states", "gain", "interval"},
        "heads": [{"head", "stages": {"record": …, "own": …, "decoding": …}, "examined"}],
        "places": null or [[…]]           of each head: how often it guesses the token of place 0, 1, 2 …; its own is 1
                                          for the first head, 2 for the second
        "trees": [{"label", "method", "options", "temperature", "tokens_per_step", "foretold", "nodes_per_step",
                   "examined", "accepted", "rejections", "cells",
                   "depths": [{"depth", "trained", "best", "candidates", "among", "examined", "accepted"}]}],
        "decoding": {"tokens_per_step", "foretold", "standard_error", "examined", "accepted", "rejections"},
        "cells": {"token class": [{"name", "examined", "accepted", "share", "rejections_share", "excess", "interval",
                                   "examples"}], "place in the answer": …},     those first that cost most
        "counted_on": null or "…", "skipped": ["…"]}]}

`interval` of a cell is of 95 %; `excess` is the share of all rejections that the cell has beyond its due. An example
holds `prompt`, `before`, `drafted`, `said` (texts), and what target and source gave them: `target_drafted`,
`source_drafted`, `target_said` (unwarped probabilities).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text
from ....checkpoints.storage.messages import did_you_mean
from ....decode.evaluation.measure import Entry
from ....decode.methods import needs_of
from ....train.parallel.interrupts import Interrupted, StopSignals
from ...assemble.evaluation import entries_of, open_recipe, place_of
from ...report.diagnosis import show_part
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...session.terminal import console, log
from .case import Case, questions_of
from .causes import as_dicts, cause_of, headline, sentences, verdict
from .cells import cells_of, entropies
from .stages import Measured, Probe, Stage, gaps
from .training_record import OtherTarget, counted_on, differences, other_target, trained_of
from .trees import Tree, asked_for, chain_depths, trees_of

SCHEMA = 1
KIND = "diagnosis"
CHAINS = {"drafter": "speculative", "heads": "bpd", "table": "bigram"}
"""What drafts from a part, each draft token at a place of its own."""


def run_diagnose(recipe: EvaluateRecipe, parts: Sequence[str] = (), out: Path | None = None) -> dict[str, Any]:
    """Measure each part of an evaluation from its training to real decoding, show where acceptance is lost and keep it
    as JSON; see the top of this file.

    Args:
        recipe: models, artifacts, prompts and settings. A part is decoded with the options and the temperature of the
            recipe's first row of its chain method, with its default options if there is none.
        parts: drafter, heads, table; by default all that the recipe names.
        out: the file; by default `diagnosis.json` beside the recipe's results.

    Raises:
        ValueError: a part that there is not, or that the recipe does not name; an `out` that is no .json; what an
            evaluation of the recipe raises.
        Interrupted: a signal came; the parts that had finished are in the file.
    """
    path = out or diagnosis_beside(Path(recipe.out))
    if path.suffix != ".json" or path.is_dir():
        raise ValueError(f"--out must be a .json file, got {path}")
    chosen = _chosen(recipe, parts)
    rows = [_row(recipe, part) for part in chosen]
    trees = {part: asked_for(recipe, part) for part in chosen}
    needed = {need for asked in trees.values() for each in asked for need in needs_of(each.method, each.options)}
    narrow = {part: getattr(recipe, part) if part in {*chosen, *needed} else None for part in CHAINS}
    narrowed = recipe.model_copy(update={"methods": rows, "more_drafters": [], **narrow})
    with StopSignals() as signals:
        opened = open_recipe(narrowed)
        case = Case(narrowed, opened, questions_of(narrowed, opened.tokenizer), signals)
        told = _diagnosed(case, chosen, trees, path)
    console().print(f"diagnosis: {path}", markup=False, soft_wrap=True)
    return told


def _diagnosed(case: Case, chosen: Sequence[str], trees: Mapping[str, Sequence[Entry]], path: Path) -> dict[str, Any]:
    """The parts one after the other, each shown and written when it is done."""
    recipe, opened = case.recipe, case.opened
    log(f"diagnose: {', '.join(chosen)}, {len(case.questions)} prompts of {recipe.prompts}, on {opened.device}")
    told: dict[str, Any] = {"schema": SCHEMA, "kind": KIND, "complete": False, "target": recipe.target}
    told |= {"prompts": len(case.questions), "recipe": recipe.model_dump(mode="json"), "parts": []}
    for part, entry in zip(chosen, entries_of(recipe), strict=True):
        try:
            case.stop_if_asked()
            trained = trained_of(place_of(getattr(recipe, part), part))
            other = other_target(trained, recipe, opened)
            found = Probe(case, part, entry, trained, other).run()
            trained_K = [] if trained is None else trained.heads
            drawn = trees_of(case, found, trees[part], trained_K)
            about = {"part": part, "source": getattr(recipe, part)} | _described(case, found, trained, other, drawn)
        except Interrupted as stopped:
            kept = ", ".join(each["part"] for each in told["parts"])
            log(f"{stopped}; {f'{kept} is finished, in {path}' if kept else 'no part was finished'}")
            raise
        told["parts"].append(about)
        told["complete"] = len(told["parts"]) == len(chosen)
        atomic_text(path, json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        show_part(about, console())
    return told


def diagnosis_beside(results: Path) -> Path:
    """Where a diagnosis lies: `diagnosis.json` beside `results.json`, else `NAME.diagnosis.json`."""
    name = "diagnosis.json" if results.name == "results.json" else f"{results.stem}.diagnosis.json"
    return results.with_name(name)


def _chosen(recipe: EvaluateRecipe, parts: Sequence[str]) -> list[str]:
    for part in parts:
        if part not in CHAINS:
            raise ValueError(f"unknown part {part!r}.{did_you_mean(part, list(CHAINS))} Known: {', '.join(CHAINS)}")
        if getattr(recipe, part) is None:
            raise ValueError(f"there is no {part} to diagnose: the recipe names none (`{part}`)")
    chosen = [part for part in CHAINS if getattr(recipe, part) is not None and (not parts or part in parts)]
    if not chosen:
        raise ValueError(f"there is nothing to diagnose: the recipe names none of {', '.join(CHAINS)}")
    return chosen


def _row(recipe: EvaluateRecipe, part: str) -> MethodSection:
    """The recipe's first row of a part's chain, or that chain with its defaults."""
    method = CHAINS[part]
    return next((row for row in recipe.methods if row.method == method), MethodSection(method=method))


def _described(case: Case, found: Measured, trained: Any, other: OtherTarget, trees: Sequence[Tree]) -> dict[str, Any]:
    """What is told of one part."""
    lost = gaps(found.stages, case.resamples)
    conversations = [question.conversation for question in case.questions if question.conversation is not None]
    assert found.own is not None
    positions = found.own.position_T.tolist()
    differing = []
    if trained is not None:
        differing = differences(trained, case.recipe, case.opened.tokenizer, conversations, positions)
    causes = verdict(found, lost, trained, other, differing, trees)
    examined = [each for row in found.tried for each in row]
    good = sum(each.accepted for each in examined)
    block = trained.block_tokens if trained is not None else None
    shown = cells_of(case, found, entropies(case, found), block)
    states = found.other_states
    return {
        "method": found.entry.method,
        "options": found.entry.options,
        "temperature": found.entry.sampling.temperature,
        "stages": [_stage(stage) for stage in found.stages],
        "gaps": [
            {"before": gap.before.key, "after": gap.after.key, "cause": cause_of(gap)}
            | {"lost": gap.lost, "interval": gap.interval}
            for gap in lost
        ],
        "verdict": as_dicts(causes),
        "headline": headline(found.stages),
        "sentences": sentences(causes, found.stages, repeated=bool(found.again)),
        "training": {
            "metrics": {} if trained is None else trained.metrics,
            "again": found.again,
            "again_on": found.again_on if found.again else None,
        },
        "target": {"known": other.known, "same": other.same, "made_for": other.made_for},
        "differences": differing,
        "types": found.types,
        "beyond": found.beyond,
        "other_states": None if states is None else dict(zip(("states", "gain", "interval"), states, strict=True)),
        "heads": chain_depths(found),
        "places": None if found.places is None else found.places.share_KJ.tolist(),
        "trees": [tree.told for tree in trees],
        "decoding": {
            "tokens_per_step": found.stages[-1].measures["tokens_per_step"],
            "foretold": found.predicted,
            "standard_error": found.predicted_error,
            "examined": len(examined),
            "accepted": good,
            "rejections": len(examined) - good,
        },
        "cells": shown,
        "counted_on": counted_on(trained) if trained is not None and found.part == "table" else None,
        "skipped": found.skipped,
    }


def _stage(stage: Stage) -> dict[str, Any]:
    names = ("top1_accuracy", "overlap", "top1_agreement", "accepted", "tokens_per_step")
    measures = {name: stage.measures.get(name) for name in names}
    about = {"key": stage.key, "says": stage.says, "value": stage.value, "tokens": stage.tokens}
    return about | {"by_depth": stage.by_depth} | measures

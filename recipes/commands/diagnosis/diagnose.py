"""`draftsmith doctor TARGET DRAFT --prompts FILE`: why acceptance is lower than what training measured.

Each part of an evaluation (drafter, heads, table) is measured in up to four stages on the way from its training to real
decoding; between two of them little changes, and what is lost there is lost by it:

- `record`: what training measured of the weights in memory, from the manifest;
- `files`: the artifact's files on the same held-out blocks, with this evaluation's target;
- `own`: the target's own answers to this evaluation's prompts, teacher-forced;
- `decoding`: real decoding with a chain: `speculative`, `bpd` or `bigram`.

The file, `diagnosis.json` beside the results, written anew after each part:

    {"schema": 3, "kind": "diagnosis", "complete", "target", "prompts", "recipe", "parts": [{
        "part": "drafter", "source": "…", "method": "speculative", "options", "temperature",
        "stages": [{"key", "description", "value", "tokens", "by_depth", "top1_accuracy", "overlap", "top1_agreement",
                    "accepted", "tokens_per_step"}],      value: the chance that a draft is accepted; null: not known
        "gaps": [{"before", "after", "lost", "interval"}],             interval: 99 %, over prompts, or null
        "findings": [{"cause", "fault", "lost", "interval", "description", "advice"}],  the largest first
        "training": {…},                                  what training measured
        "decoding": {"tokens_per_step", "examined", "accepted", "rejections"},
        "cells": [{"name", "examined", "accepted", "share", "rejections_share", "excess", "interval"}],
        "skipped": ["…"]}]}

`cells` are classes of tokens, those first that cost most: `excess` is the share of all rejections that a class has
beyond its due; `interval` of its share of accepted tokens is of 95 %, exact for independent trials.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.pairs.eagle import examine_eagle
from ....checkpoints.pairs.sides import open_side
from ....checkpoints.storage.atomic import atomic_text, check_writable
from ....checkpoints.storage.messages import did_you_mean
from ....data.tokenizers import load_tokenizer
from ....decode.evaluation.diagnose.agreement import (
    Passage,
    Source,
    drafter_source,
    eagle_source,
    heads_source,
    score,
    table_source,
)
from ....decode.evaluation.diagnose.attempts import DraftAttempt, cells, draft_attempts
from ....decode.evaluation.diagnose.stages import Stage, decoding_stage, findings, gaps, scored_stage
from ....decode.evaluation.diagnose.token_classes import classify
from ....decode.evaluation.measure import Entry
from ....decode.evaluation.trace import trace
from ....decode.methods import Parts, build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ....decode.proposers.ngrams import TableChain
from ....train.parallel.interrupts import Interrupted
from ...assemble.evaluation import Case, entries_of, open_case, other_target, place_of
from ...report.terminal.diagnosis import show_part
from ...report.trace import TokenTexts
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.results import beside
from ...session.stopping import Stoppable
from ...session.terminal import console, log
from .readings import agreements, fed, in_files, in_readings
from .training_record import TrainingRecord, training_record

SCHEMA = 3
KIND = "diagnosis"
CHAINS = {"drafter": "speculative", "heads": "bpd", "table": "bigram"}
"""What drafts from a part, a token at a time."""


@dataclass(frozen=True)
class _Case(Case):
    """What is diagnosed."""

    signals: Stoppable
    own: dict[Any, list[Passage]] = field(default_factory=dict)
    """The target's own answers, by sampling."""

    def own_answers(self, entry: Entry) -> list[Passage]:
        """The target's own answers, plainly decoded."""
        if entry.sampling not in self.own:
            texts = self.texts(entry.sampling, self.signals.bar)
            self.own[entry.sampling] = [Passage(*pair) for pair in zip(self.prompts, texts, strict=True)]
        return self.own[entry.sampling]


def run_diagnose(recipe: EvaluateRecipe, parts: Sequence[str] = (), out: Path | None = None) -> dict[str, Any]:
    """Measure each part of an evaluation (by default all that the recipe names) from its training to real decoding,
    show where acceptance is lost and write it, by default to `diagnosis.json` beside the results. A part is decoded
    with the options and the temperature of the recipe's first row of its chain method. Raises ValueError: a part that
    the recipe does not name; another kind of file."""
    path = out or beside(Path(recipe.out), KIND)
    if path.suffix != ".json" or path.is_dir():
        raise ValueError(f"--out must be a .json file, got {path}")
    check_writable(path)
    chosen = _chosen(recipe, parts)
    rows = [
        next((row for row in recipe.methods if row.method == CHAINS[part]), MethodSection(method=CHAINS[part]))
        for part in chosen
    ]
    narrow = {part: getattr(recipe, part) if part in chosen else None for part in CHAINS}
    narrowed = recipe.model_copy(update={"methods": rows, "more_drafters": [], **narrow})
    with Stoppable("diagnose", "") as signals:
        found = _diagnosed(_Case(**vars(open_case(narrowed)), signals=signals), chosen, path)
    console().print(f"diagnosis: {path}", soft_wrap=True)
    return found


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


def _diagnosed(case: _Case, chosen: Sequence[str], path: Path) -> dict[str, Any]:
    """The parts one after the other, each shown and written when it is done."""
    recipe = case.recipe
    log(f"diagnose: {', '.join(chosen)}, {len(case.prompts)} prompts of {recipe.prompts}, on {case.opened.device}")
    found: dict[str, Any] = {"schema": SCHEMA, "kind": KIND, "complete": False, "target": recipe.target}
    found |= {"prompts": len(case.prompts), "recipe": recipe.recorded(), "parts": []}
    found |= {"artifacts": case.opened.artifacts()}
    for part, entry in zip(chosen, entries_of(recipe), strict=True):
        try:
            case.signals.check()
            about = _Probe(case, part, entry).run()
        except Interrupted:
            finished = ", ".join(each["part"] for each in found["parts"])
            log(f"diagnose: {f'{finished} is finished, in {path}' if finished else 'no part was finished'}")
            raise
        found["parts"].append(about)
        found["complete"] = len(found["parts"]) == len(chosen)
        atomic_text(path, json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        show_part(about, console())
    return found


class _Probe:
    """Measures one part of an evaluation with the chain that drafts from it."""

    def __init__(self, case: _Case, part: str, entry: Entry) -> None:
        self.case, self.part, self.entry, self.target = case, part, entry, case.opened.target
        self.source_name = getattr(case.recipe, part)
        self.parts = Parts(**{part: getattr(case.opened.parts, part)})
        self.method = build_method(entry.method, self.parts, entry.sampling, **entry.options)
        self.drafted = self.method.proposer.capacity(case.limits)[1]
        self.folder = Path(place_of(self.source_name, part))
        self.by_steps = part == "drafter" and is_eagle(self.folder)
        """Whether it is EAGLE-3's heads."""
        self.by_heads = self.by_steps or part == "heads"
        """Whether it speaks of several tokens at once: by heads, or by steps of drafting."""
        self.source = self._source()
        self.trained: TrainingRecord | None = training_record(str(self.folder))
        self.skipped: list[str] = []

    def _source(self) -> Source:
        if self.by_steps:
            assert self.parts.drafter is not None
            heads = fed(self.folder, None, self.case.opened.model, self.target, self.parts.drafter.dtype)
            heads.num_heads = self.drafted
            return eagle_source(heads, self.target)
        if isinstance(self.method.proposer, TableChain):
            return table_source(self.method.proposer, self.target.device)
        if self.parts.heads is not None:
            return heads_source(self.parts.heads, self.target.dtype)
        assert self.parts.drafter is not None
        return drafter_source(self.parts.drafter)

    def run(self) -> dict[str, Any]:
        """Every stage that can be measured, and what they come to."""
        case, trained = self.case, self.trained
        own = case.own_answers(self.entry)
        description = "the target's own answers, drafts judged as decoding does"
        stages = [*self._training_stages(), self._scored("own", description, own, "accepted"), self._decoding()]
        elsewhere = trained is not None and other_target(trained.folder, case.recipe.target) is not None
        otherwise = trained is not None and trained.writes_otherwise(case.recipe.template, case.opened.tokenizer)
        rounds = self.target.dtype != torch.float32 or (trained is not None and trained.rounds)
        examined, accepted = (sum(map(len, self.attempts)), sum(each.accepted for row in self.attempts for each in row))
        found = findings(stages, elsewhere, otherwise, rounds)
        if self.by_steps:
            found += self._as_eagle(own)
        counts = {"examined": examined, "accepted": accepted, "rejections": examined - accepted}
        return {
            "part": self.part,
            "source": self.source_name,
            "method": self.entry.method,
            "options": self.entry.options,
            "temperature": self.entry.sampling.temperature,
            "stages": [stage.as_dict() for stage in stages],
            "gaps": gaps(stages),
            "findings": sorted(found, key=lambda each: -(each["lost"] or 0.0)),
            "training": {} if trained is None else trained.metrics,
            "decoding": {"tokens_per_step": stages[-1].measures["tokens_per_step"]} | counts,
            "cells": self._cells() if examined else [],
            "skipped": self.skipped,
        }

    def _training_stages(self) -> list[Stage]:
        if self.part == "table":
            return []
        if self.trained is None or isinstance(self.target, Seq2SeqModel):
            why = "no manifest says how it was trained" if self.trained is None else "an encoder-decoder has no blocks"
            self.skipped.append(f"training's own measurement: {why}")
            return []
        stages = [self._record(self.trained)]
        passages = self.trained.passages()
        if isinstance(passages, str):
            self.skipped.append(passages)
            return stages
        description = "the artifact's files on the same held-out blocks"
        return [*stages, self._scored("files", description, self._of_training(passages), self._measure)]

    def _of_training(self, passages: list[Passage]) -> list[Passage]:
        """The passages with what training measured judged alone: of heads the tokens that they propose."""
        proposed = self.source.proposed
        if not self.by_heads or proposed is None:
            return passages
        known = set(proposed.tolist())
        return [
            passage._replace(
                judged=[bool(j) and token in known for j, token in zip(passage.judged or (), passage.text, strict=True)]
            )
            for passage in passages
        ]

    @property
    def _measure(self) -> str:
        """What training's measurement is compared by."""
        if self.by_heads:
            return "hit"
        return "agree" if self.entry.sampling.greedy else "overlap"

    def _record(self, trained: TrainingRecord) -> Stage:
        """Training's measurement of the weights in memory."""
        metrics, description = trained.metrics, "training's own measurement, weights in memory"
        if self.by_heads:
            heads = [metrics.get(f"head{head}_top1") for head in range(self.drafted)]
            value = None if None in heads else float(np.mean([each or 0.0 for each in heads]))
            return Stage("record", description, value, {"top1_accuracy": value}, heads)
        names = ("top1_accuracy", "overlap", "top1_agreement")
        known: dict[str, float | None] = {name: metrics[name] for name in names if name in metrics}
        return Stage(
            "record", description, known.get("top1_agreement" if self._measure == "agree" else "overlap"), known
        )

    def _as_eagle(self, own: Sequence[Passage]) -> list[dict[str, Any]]:
        """What EAGLE-3 heads lose by their files, by how they are fed, and by how they were trained."""
        kept = None if self.trained is None else self.trained.passages()
        texts = kept if isinstance(kept, list) else [passage for passage in own if passage.text]
        with self.case.signals.bar(f"{self.part}: fed in every way", "documents") as advance:
            read = agreements(self.case.opened.model, self.folder, texts, advance)
        try:
            side = open_side(self.case.recipe.target, load_tokenizer)
        except ValueError as error:  # decoded it can be all the same: a LoRA adapter
            self.skipped.append(f"the doctor's look at its files: {error}")
            return in_readings(read, self.drafted)
        return [*in_files(examine_eagle(side, self.source_name, self.folder)), *in_readings(read, self.drafted)]

    def _scored(self, key: str, description: str, passages: Sequence[Passage], measure: str) -> Stage:
        with self.case.signals.bar(f"{self.part}: {key}", "documents" if key == "files" else "prompts") as advance:
            scores = score(self.target, self.source, passages, self.entry.sampling, advance)
        return scored_stage(key, description, scores, measure)

    def _decoding(self) -> Stage:
        case, steps = self.case, 0
        self.texts: list[Passage] = []
        self.attempts: list[list[DraftAttempt]] = []
        with case.signals.bar(f"{self.part}: decoding with {self.entry.method}", "prompts") as advance:
            for index, prompt in enumerate(case.prompts):
                seed = case.recipe.seed + index
                traced = trace(self.target, self.method, prompt, case.limits, self.entry.sampling, seed)
                text = [token for step in traced for token in (*step.accepted, step.next_id) if token is not None]
                self.texts.append(Passage(prompt, text))
                self.attempts.append(draft_attempts(traced))
                steps += len(traced)
                advance(index + 1, len(case.prompts))
        per_step = sum(len(passage.text) for passage in self.texts) / steps
        description = f"real decoding: {self.entry.method}, {self.drafted} tokens a draft"
        return decoding_stage(description, self.attempts, per_step, self.drafted if self.by_heads else 0)

    def _cells(self) -> list[dict[str, Any]]:
        """Classes of the tokens tried, those first that cost most."""
        tokenizer = self.case.opened.tokenizer
        special = set(tokenizer.all_special_ids)
        special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names, accepted = [], []
        for passage, attempts in zip(self.texts, self.attempts, strict=True):
            texts = TokenTexts(tokenizer, passage.prompt)
            pieces = [texts.add(token) for token in passage.text]
            classes = classify(pieces, [token in special for token in passage.text])
            names += [classes[each.position] for each in attempts]
            accepted += [each.accepted for each in attempts]
        return cells(names, np.array(accepted))

"""The measured part of `draftsmith doctor TARGET DRAFT --prompts FILE`: why acceptance is lower than in training.

A drafter, heads or a table is measured in up to four stages on the way from its training to real decoding. Little
changes between two of them, so what is lost there has few causes:

- `record`: training metrics of the weights in memory, from the manifest;
- `files`: the artifact's files on the same held-out blocks, with this evaluation's target;
- `own`: the target's own answers to this evaluation's prompts, teacher-forced;
- `decoding`: real decoding with a chain: `speculative`, `bpd` or `bigram`.

The file, `diagnosis.json` beside the results:

    {"schema": 4, "kind": "diagnosis", "target", "prompts", "recipe", "artifacts",
     "part": "drafter", "source": "…", "method": "speculative", "options", "temperature",
     "stages": [{"key", "description", "value", "tokens", "by_depth", "top1_accuracy", "overlap", "top1_agreement",
                 "accepted", "tokens_per_step"}],      value: acceptance rate; null: not known
     "gaps": [{"before", "after", "lost", "interval"}],             interval: 99 %, over prompts, or null
     "findings": [{"cause", "fault", "lost", "interval", "description", "advice"}],  the largest first
     "training": {…},                                  training metrics
     "decoding": {"tokens_per_step", "examined", "accepted", "rejections"},
     "cells": [{"name", "examined", "accepted", "share", "rejections_share", "excess", "interval"}],
     "readings": [{"reading", "who", "layers", "normed", "base", "behind", "by_step", "agrees", "texts"}],  EAGLE-3
     "skipped": ["…"]}

`cells` are classes of draft tokens, see `token_cells`; `readings` are ways of feeding heads, see `Reading`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.pairs.eagle import examine_eagle
from ....checkpoints.pairs.sides import open_side
from ....checkpoints.storage.atomic import atomic_text, check_writable
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
from ....decode.evaluation.diagnose.readings import Reading, agreements, attached_heads, reading_findings
from ....decode.evaluation.diagnose.stages import (
    DraftAttempt,
    Stage,
    decoding_stage,
    draft_attempts,
    finding,
    findings,
    gaps,
    scored_stage,
    token_cells,
)
from ....decode.evaluation.diagnose.token_classes import classify, token_texts
from ....decode.evaluation.diagnose.training_record import training_record
from ....decode.evaluation.trace import trace
from ....decode.methods import Parts, build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ....decode.proposers.ngrams import TableChain
from ...assemble.evaluation import Case, entries_of, open_case, other_target, place_of
from ...report.terminal.diagnosis import show_part
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...schema.results import beside
from ...session.stopping import Stoppable
from ...session.terminal import console, log

KIND = "diagnosis"
CHAINS = {"drafter": "speculative", "heads": "bpd", "table": "bigram"}
"""Method that drafts one token after another from a part."""


def run_diagnosis(recipe: EvaluateRecipe, out: Path | None = None) -> dict[str, Any]:
    """Measure an evaluation's drafter, heads or table from training to real decoding, print and write the diagnosis.

    The part is decoded with the options and the temperature of the recipe's first row of its chain method. The file is
    `diagnosis.json` beside the results by default. Raises ValueError: not exactly one part, another kind of file.
    """
    path = out or beside(Path(recipe.out), KIND)
    if path.suffix != ".json" or path.is_dir():
        raise ValueError(f"--out must be a .json file, got {path}")
    check_writable(path)
    parts = [part for part in CHAINS if getattr(recipe, part) is not None]
    if len(parts) != 1:
        raise ValueError(f"a diagnosis needs one of {', '.join(CHAINS)}, got {', '.join(parts) or 'none'}")
    method = CHAINS[parts[0]]
    row = next((row for row in recipe.methods if row.method == method), MethodSection(method=method))
    with Stoppable("doctor", "") as signals:
        case = open_case(recipe.model_copy(update={"methods": [row], "more_drafters": []}))
        log(f"doctor: {parts[0]}, {len(case.prompts)} prompts of {recipe.prompts}, on {case.opened.device}")
        found = {"schema": 4, "kind": KIND, "target": recipe.target, "prompts": len(case.prompts)}
        found |= {"recipe": recipe.recorded(), "artifacts": case.opened.artifacts()}
        found |= _Probe(case, parts[0], signals).run()
    atomic_text(path, json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    show_part(found, console())
    console().print(f"diagnosis: {path}", soft_wrap=True)
    return found


class _Probe:
    """Measurement of one part with the chain that drafts from it."""

    def __init__(self, case: Case, part: str, signals: Stoppable) -> None:
        self.case, self.part, self.signals, self.target = case, part, signals, case.opened.target
        (self.entry,) = entries_of(case.recipe)
        self.source_name = getattr(case.recipe, part)
        self.method = build_method(self.entry.method, case.opened.parts, self.entry.sampling, **self.entry.options)
        self.depth = self.method.proposer.capacity(case.limits)[1]
        self.folder = Path(place_of(self.source_name, part))
        self.is_eagle = part == "drafter" and is_eagle(self.folder)
        self.by_heads = self.is_eagle or part == "heads"
        """Whether every position ahead has a head, or a step of drafting, of its own."""
        self.source = self._source(case.opened.parts)
        self.trained = training_record(self.folder)
        self.skipped: list[str] = []

    def _source(self, parts: Parts) -> Source:
        if isinstance(self.method.proposer, TableChain):
            return table_source(self.method.proposer, self.target.device)
        if self.part == "heads":
            assert parts.heads is not None
            return heads_source(parts.heads, self.target.dtype)
        assert parts.drafter is not None
        if not self.is_eagle:
            return drafter_source(parts.drafter)
        heads = attached_heads(self.folder, self.case.opened.model, self.target, parts.drafter.dtype)
        heads.num_heads = self.depth
        return eagle_source(heads, self.target)

    def run(self) -> dict[str, Any]:
        """Measure every stage that can be measured, and find causes."""
        case, trained, entry = self.case, self.trained, self.entry
        answers = case.texts(entry.sampling, self.signals.bar)
        own = [Passage(*pair) for pair in zip(case.prompts, answers, strict=True)]
        stages = [
            *self._training_stages(),
            self._scored("own", "the target's own answers, teacher-forced", own, "accepted"),
        ]
        texts, attempts, decoding = self._decode()
        stages.append(decoding)
        elsewhere = trained is not None and other_target(trained.folder, case.recipe.target) is not None
        otherwise = trained is not None and trained.has_other_template(case.recipe.template, case.opened.tokenizer)
        rounds = self.target.dtype != torch.float32 or (trained is not None and trained.is_rounded)
        found, read = findings(stages, elsewhere, otherwise, rounds), list[Reading]()
        if self.is_eagle:
            read = self._readings(own)
            found += [*self._file_findings(), *reading_findings(read, self.depth)]
        examined, accepted = sum(map(len, attempts)), sum(each.accepted for row in attempts for each in row)
        counts = {"examined": examined, "accepted": accepted, "rejections": examined - accepted}
        return {
            "part": self.part,
            "source": self.source_name,
            "method": entry.method,
            "options": entry.options,
            "temperature": entry.sampling.temperature,
            "stages": [stage.as_dict() for stage in stages],
            "gaps": gaps(stages),
            "findings": sorted(found, key=lambda each: -(each["lost"] or 0.0)),
            "training": {} if trained is None else trained.metrics,
            "decoding": {"tokens_per_step": decoding.measures["tokens_per_step"]} | counts,
            "cells": self._cells(texts, attempts) if examined else [],
            "readings": [_reading_json(reading) for reading in read],
            "skipped": self.skipped,
        }

    def _training_stages(self) -> list[Stage]:
        """Measure the stages `record` and `files`, as far as the manifest allows."""
        if self.part == "table":
            return []
        if self.trained is None or isinstance(self.target, Seq2SeqModel):
            why = "no manifest records its training" if self.trained is None else "an encoder-decoder has no blocks"
            self.skipped.append(f"training metrics: {why}")
            return []
        metrics, names = self.trained.metrics, ("top1_accuracy", "overlap", "top1_agreement")
        measure = "hit" if self.by_heads else "agree" if self.entry.sampling.greedy else "overlap"
        known: dict[str, float | None] = {name: metrics[name] for name in names if name in metrics}
        value, depths = known.get("top1_agreement" if measure == "agree" else "overlap"), list[float | None]()
        if self.by_heads:
            depths = [metrics.get(f"head{head}_top1") for head in range(self.depth)]
            value = None if None in depths else float(np.mean([each or 0.0 for each in depths]))
            known = {"top1_accuracy": value}
        record = Stage("record", "training metrics of the weights in memory", value, known, depths)
        passages = self.trained.passages()
        if isinstance(passages, str):
            self.skipped.append(passages)
            return [record]
        if self.by_heads and self.source.proposed is not None:  # training counts the proposed tokens alone
            proposed = set(self.source.proposed.tolist())
            passages = [
                each._replace(
                    judged=[
                        bool(j) and token in proposed for j, token in zip(each.judged or (), each.text, strict=True)
                    ]
                )
                for each in passages
            ]
        return [record, self._scored("files", "the artifact's files on the same held-out blocks", passages, measure)]

    def _scored(self, key: str, description: str, passages: Sequence[Passage], measure: str) -> Stage:
        with self.signals.bar(f"{self.part}: {key}", "documents" if key == "files" else "prompts") as advance:
            scores = score(self.target, self.source, passages, self.entry.sampling, advance)
        return scored_stage(key, description, scores, measure)

    def _decode(self) -> tuple[list[Passage], list[list[DraftAttempt]], Stage]:
        """Decode the prompts; return the texts, the draft tokens and the stage."""
        case, steps = self.case, 0
        texts, attempts = list[Passage](), list[list[DraftAttempt]]()
        with self.signals.bar(f"{self.part}: decoding with {self.entry.method}", "prompts") as advance:
            for index, prompt in enumerate(case.prompts):
                seed = case.recipe.seed + index
                traced = trace(self.target, self.method, prompt, case.limits, self.entry.sampling, seed)
                text = [token for step in traced for token in (*step.accepted, step.next_id) if token is not None]
                texts.append(Passage(prompt, text))
                attempts.append(draft_attempts(traced))
                steps += len(traced)
                advance(index + 1, len(case.prompts))
        per_step = sum(len(passage.text) for passage in texts) / steps
        description = f"real decoding: {self.entry.method}, {self.depth} draft tokens per step"
        return texts, attempts, decoding_stage(description, attempts, per_step, self.depth if self.by_heads else 0)

    def _readings(self, own: Sequence[Passage]) -> list[Reading]:
        """Measure EAGLE-3 heads fed in every way, on training's blocks or else on the target's answers."""
        kept = None if self.trained is None else self.trained.passages()
        texts = kept if isinstance(kept, list) else [passage for passage in own if passage.text]
        with self.signals.bar(f"{self.part}: fed in every way", "documents") as advance:
            return agreements(self.case.opened.model, self.folder, texts, advance)

    def _file_findings(self) -> list[dict[str, Any]]:
        """Return the static findings that concern this engine, or that no engine can judge."""
        try:
            target = open_side(self.case.recipe.target, load_tokenizer)
        except ValueError as error:  # such as a LoRA adapter, which is decoded all the same
            self.skipped.append(f"checks of its files: {error}")
            return []
        return [
            finding("files", None, None, f": {one.check}: {one.what} (target {one.target}, heads {one.drafter})")
            | {"fault": bool(one.effects)}
            for one in examine_eagle(target, self.source_name, self.folder).findings
            if not one.effects or "draftsmith" in one.effects
        ]

    def _cells(self, texts: Sequence[Passage], attempts: Sequence[Sequence[DraftAttempt]]) -> list[dict[str, Any]]:
        """Return the draft tokens by class, the most expensive class first."""
        tokenizer = self.case.opened.tokenizer
        special = set(tokenizer.all_special_ids)
        special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names, accepted = list[str](), list[bool]()
        for passage, row in zip(texts, attempts, strict=True):
            pieces = token_texts(tokenizer, passage.prompt, passage.text)
            classes = classify(pieces, [token in special for token in passage.text])
            names += [classes[each.position] for each in row]
            accepted += [each.accepted for each in row]
        return token_cells(names, np.array(accepted))


def _reading_json(reading: Reading) -> dict[str, Any]:
    """Return a reading as JSON, without the errors, which are infinite for a single text."""
    return {"reading": str(reading)} | {
        name: value for name, value in reading._asdict().items() if name not in ("apart", "dropped")
    }

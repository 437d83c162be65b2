"""Measured checks of `draftsmith doctor TARGET DRAFT --prompts FILE`, which find where acceptance is lost.

The acceptance of a drafter, heads or a table is measured in up to four stages from training to decoding. Few
conditions change between consecutive stages, so that a lower acceptance has few possible causes:

- `record`: training metrics of the trained weights, from the manifest;
- `files`: the saved artifact on the same held-out blocks, with the target of this evaluation;
- `own`: responses of the target to the prompts of this evaluation, teacher-forced;
- `decoding`: speculative decoding with chain drafts (method `speculative`, `bpd` or `bigram`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....checkpoints.heads.auxiliary import input_embeddings
from ....checkpoints.heads.eagle import load_eagle
from ....checkpoints.heads.layouts import is_eagle
from ....checkpoints.pairs.sides import Finding
from ....decode.evaluation.diagnose.agreement import (
    Passage,
    Source,
    drafter_source,
    eagle_source,
    heads_source,
    score,
    table_source,
)
from ....decode.evaluation.diagnose.stages import (
    DraftAttempt,
    Stage,
    decoding_stage,
    draft_attempts,
    eagle_findings,
    gaps,
    scored_stage,
    stage_findings,
)
from ....decode.evaluation.diagnose.training_record import load_training_record
from ....decode.evaluation.trace import trace
from ....decode.methods import Parts, build_method
from ....decode.models.seq2seq import Seq2SeqModel
from ....decode.proposers.ngrams import TableChain
from ...assemble.evaluation import Case, entries_of, locate_part, open_case, other_target
from ...schema.evaluation import EvaluateRecipe, MethodSection
from ...session.stopping import Stoppable
from ...session.terminal import log

CHAINS = {"drafter": "speculative", "heads": "bpd", "table": "bigram"}
"""Decoding method with chain drafts for each kind of artifact."""


def measure_pair(recipe: EvaluateRecipe) -> tuple[list[Finding], dict[str, Any]]:
    """Measure the acceptance of the drafter, heads or table of a recipe in each stage from training to decoding.

    If the recipe has a row with the artifact's decoding method in `CHAINS`, its options and temperature are used.

    Returns:
        Findings, sorted by lost acceptance (highest first), and JSON values: `part`, `source`, `method`, `options`,
        `temperature`, `stages` (`value` is the acceptance rate), `gaps` (with a 99 % `interval` over prompts),
        `training` metrics, and reasons for `skipped` stages.

    Raises ValueError if the recipe does not have exactly one drafter, heads or table.
    """
    parts = [part for part in CHAINS if getattr(recipe, part) is not None]
    if len(parts) != 1:
        raise ValueError(f"a diagnosis requires exactly one of {', '.join(CHAINS)}, got {', '.join(parts) or 'none'}")
    method = CHAINS[parts[0]]
    row = next((row for row in recipe.methods if row.method == method), MethodSection(method=method))
    with Stoppable("doctor", "") as signals:
        case = open_case(recipe.model_copy(update={"methods": [row], "more_drafters": []}))
        log(f"doctor: {parts[0]}, {len(case.prompts)} prompts of {recipe.prompts}, on {case.pair.device}")
        findings, measured = _Probe(case, parts[0], signals).run()
    about = {"prompts": len(case.prompts), "recipe": recipe.recorded(), "artifacts": case.pair.artifacts()}
    return findings, about | measured


class _Probe:
    """Measurement of a drafter, heads or a table by the decoding method that `CHAINS` assigns to its kind."""

    def __init__(self, case: Case, part: str, signals: Stoppable) -> None:
        self.case, self.part, self.signals, self.target = case, part, signals, case.pair.target
        (self.entry,) = entries_of(case.recipe)
        self.source_name = getattr(case.recipe, part)
        self.method = build_method(self.entry.method, case.pair.parts, self.entry.sampling, **self.entry.options)
        self.depth = self.method.proposer.capacity(case.limits)[1]
        self.folder = Path(locate_part(self.source_name, part))
        self.is_eagle = part == "drafter" and is_eagle(self.folder)
        self.by_heads = self.is_eagle or part == "heads"
        """Whether accuracy is measured for each head or EAGLE-3 drafting step separately."""
        self.source = self._source(case.pair.parts)
        self.trained = load_training_record(self.folder)
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
        heads, model = load_eagle(self.folder), self.case.pair.model
        weights = (input_embeddings(model), model.get_output_embeddings().weight)
        heads = heads.to(self.target.device, parts.drafter.dtype).attach(*weights)
        heads.rotary_emb = LlamaRotaryEmbedding(heads.config).to(self.target.device)  # its frequencies stay in float32
        heads.num_heads = self.depth
        self.unshifted = eagle_source(heads, self.target, previous_token=True)
        return eagle_source(heads, self.target)

    def run(self) -> tuple[list[Finding], dict[str, Any]]:
        """Measure all available stages, and return the findings and the measurements."""
        case, trained, entry = self.case, self.trained, self.entry
        answers = case.texts(entry.sampling, self.signals.bar)
        own = [Passage(*pair) for pair in zip(case.prompts, answers, strict=True)]
        stages = [
            *self._training_stages(),
            self._score_stage("own", "on-policy responses of the target, teacher-forced", own, "accepted"),
            self._decode(),
        ]
        findings = stage_findings(
            stages,
            other_target=trained is not None and other_target(trained.folder, case.recipe.target) is not None,
            other_template=trained is not None and trained.has_other_template(case.template, case.pair.tokenizer),
            rounds=self.target.dtype != torch.float32 or (trained is not None and trained.is_rounded),
        )
        if self.is_eagle:
            unshifted = self._score_stage("own", "unshifted tokens", own, "accepted", self.unshifted)
            findings += eagle_findings(stages[-2], unshifted)
        measured = {
            "part": self.part,
            "source": self.source_name,
            "method": entry.method,
            "options": entry.options,
            "temperature": entry.sampling.temperature,
            "stages": [stage.as_dict() for stage in stages],
            "gaps": gaps(stages),
            "training": {} if trained is None else trained.metrics,
            "skipped": self.skipped,
        }
        return sorted(findings, key=lambda each: -(each.lost or 0.0)), measured

    def _training_stages(self) -> list[Stage]:
        """Return the stages `record` and `files`, or skip them if the manifest lacks the training record."""
        if self.part == "table":
            return []
        if self.trained is None or isinstance(self.target, Seq2SeqModel):
            reason = "not in a manifest" if self.trained is None else "not supported for encoder-decoders"
            self.skipped.append(f"training metrics: {reason}")
            return []
        metrics, depths = self.trained.metrics, list[float | None]()
        measure = "hit" if self.by_heads else "agree" if self.entry.sampling.greedy else "overlap"
        value = metrics.get("top1_agreement" if measure == "agree" else "overlap")
        if self.by_heads:
            depths = [metrics.get(f"head{head}_top1") for head in range(self.depth)]
            value = None if None in depths else float(np.mean([each or 0.0 for each in depths]))
        record = Stage("record", "training metrics of the trained weights", value, depths)
        passages = self.trained.passages()
        if isinstance(passages, str):
            self.skipped.append(passages)
            return [record]
        if self.by_heads and self.source.proposed is not None:  # training counts only tokens of the draft vocabulary
            proposed = set(self.source.proposed.tolist())
            passages = [each.judge_only(proposed) for each in passages]
        return [record, self._score_stage("files", "the saved artifact on the same held-out blocks", passages, measure)]

    def _score_stage(
        self, key: str, description: str, passages: Sequence[Passage], measure: str, source: Source | None = None
    ) -> Stage:
        with self.signals.bar(f"{self.part}: {key}", "documents" if key == "files" else "prompts") as advance:
            scores = score(self.target, source or self.source, passages, self.entry.sampling, advance)
        return scored_stage(key, description, scores, measure)

    def _decode(self) -> Stage:
        case, steps, tokens = self.case, 0, 0
        attempts = list[list[DraftAttempt]]()
        with self.signals.bar(f"{self.part}: decoding with {self.entry.method}", "prompts") as advance:
            for index, prompt in enumerate(case.prompts):
                seed = case.recipe.seed + index
                traced = trace(self.target, self.method, prompt, case.limits, self.entry.sampling, seed)
                tokens += sum(len(step.accepted) + (step.next_id is not None) for step in traced)
                attempts.append(draft_attempts(traced))
                steps += len(traced)
                advance(index + 1, len(case.prompts))
        description = f"decoding: {self.entry.method}, {self.depth} draft tokens per step"
        return decoding_stage(description, attempts, tokens / steps, self.depth if self.by_heads else 0)

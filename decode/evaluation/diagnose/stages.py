"""Stages on the way from training to real decoding, what is lost between them, and what that points to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..bootstrap import Floats, percentile_interval, resampled_ratios
from .agreement import Passage, Scores, expected_tokens_per_step
from .attempts import DraftAttempt

LEVEL = 0.99
"""Of the intervals of what is lost between two stages: there are several of them, and none shall cry wolf."""
LEAST = 0.02
"""Acceptance that must be lost before a cause is named."""
MEASURES = {"top1_accuracy": "hit", "overlap": "overlap", "top1_agreement": "agree", "accepted": "accepted"}
FAULTS = ("export", "target", "template", "end")
"""Causes that are mistakes; `text` and `drafting` are how things are."""
ENDS = "end of an answer"
"""The difference of a template whose end is no stop token."""
_EXACT, _ROUNDED = 0.01, 0.02
"""What training's measurement may differ by when it is taken again, in float32 and in 16 bits."""


@dataclass(frozen=True)
class Stage:
    """One measurement: `record`, `files`, `own` or `decoding`."""

    key: str
    description: str
    value: float | None
    """The chance that a draft is accepted, as far as this stage knows it: what the gaps are between."""
    measures: dict[str, float | None] = field(default_factory=dict)
    """Those of `MEASURES`, and `tokens_per_step`, as far as they are known."""
    by_depth: list[float | None] = field(default_factory=list)
    tokens: int = 0
    sums: tuple[Floats, Floats] | None = None
    """What `value` is a quotient of, by prompt or document [P]."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        about = {"key": self.key, "description": self.description, "value": self.value, "tokens": self.tokens}
        measures = {name: self.measures.get(name) for name in (*MEASURES, "tokens_per_step")}
        return about | {"by_depth": self.by_depth} | measures


@dataclass(frozen=True)
class Gap:
    """What is lost from one stage to the next; below 0: gained."""

    before: Stage
    after: Stage
    lost: float
    interval: tuple[float, float] | None
    """Of 99 %, over prompts; None where there are too few, or training kept no more than a mean."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"before": self.before.key, "after": self.after.key, "lost": self.lost, "interval": self.interval}

    @property
    def certain(self) -> bool:
        """Whether enough is lost, and surely."""
        if self.interval is None:
            return self.lost >= 2.5 * LEAST
        return self.lost >= LEAST and self.interval[0] > 0


@dataclass(frozen=True)
class Finding:
    """One cause of lost acceptance."""

    cause: str
    lost: float | None
    """Acceptance that is lost by it; None: not measured."""
    interval: tuple[float, float] | None
    description: str
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cause": self.cause,
            "fault": self.cause in FAULTS,
            "lost": self.lost,
            "interval": self.interval,
            "description": self.description,
            "advice": self.advice,
        }


def scored_stage(
    key: str, description: str, scores: Scores, passages: Sequence[Passage], measure: str, drafted: int
) -> Stage:
    """The stage of scored passages; `measure` of `Scores` is its value, and a step drafts `drafted` tokens."""
    measures = {name: scores.mean(short) for name, short in MEASURES.items()}
    measures["tokens_per_step"] = expected_tokens_per_step(scores, passages, drafted)
    depths = scores.by_depth(measure) if len(scores.hit_KT) > 1 else []
    sums = scores.sums(measure)
    return Stage(key, description, scores.mean(measure), measures, depths, int(sums[1].sum()), sums)


def decoding_stage(
    description: str, attempts: Sequence[Sequence[DraftAttempt]], tokens_per_step: float, depths: int
) -> Stage:
    """The stage of real decoding: the share of the tokens tried that was accepted; `depths` are listed one by one."""
    good_P = np.array([sum(each.accepted for each in row) for row in attempts], dtype=np.float64)
    all_P = np.array([len(row) for row in attempts], dtype=np.float64)
    value = float(good_P.sum() / all_P.sum()) if all_P.sum() else None
    by_depth: list[float | None] = []
    for depth in range(depths):
        accepted = [each.accepted for row in attempts for each in row if each.depth == depth]
        by_depth.append(sum(accepted) / len(accepted) if accepted else None)
    measures = {"accepted": value, "tokens_per_step": tokens_per_step}
    return Stage("decoding", description, value, measures, by_depth, int(all_P.sum()), (good_P, all_P))


def gaps(stages: Sequence[Stage]) -> list[Gap]:
    """What is lost between stages that follow one another, of those that have a value."""
    found = []
    for before, after in pairwise(stage for stage in stages if stage.value is not None):
        assert before.value is not None
        assert after.value is not None
        one, other = _resampled(before), _resampled(after)
        span = None if one is None or other is None else percentile_interval(one - other, LEVEL)
        found.append(Gap(before, after, before.value - after.value, span))
    return found


def _resampled(stage: Stage) -> Floats | None:
    """Resampled values: of prompts always the same prompts, so that differences of two stages are paired."""
    if stage.sums is None:
        return None
    over_P, under_P = stage.sums
    ratios_RG = resampled_ratios(over_P[:, None], under_P[:, None], seed=1 if stage.key == "files" else 0)
    return None if ratios_RG is None else ratios_RG[:, 0]


def _not_repeated(record: Stage, files: Stage, rounds: bool) -> dict[str, tuple[float, float]]:
    """Of training's own measurement what the files do not repeat on the same blocks: (then, now) by name."""
    pairs: dict[str, tuple[float | None, float | None]] = {
        name: (record.measures.get(name), files.measures.get(name)) for name in MEASURES
    }
    if record.by_depth:
        pairs = {
            f"head{head}_top1": pair for head, pair in enumerate(zip(record.by_depth, files.by_depth, strict=False))
        }
    allowed = _ROUNDED if rounds else _EXACT
    known = {name: (then, now) for name, (then, now) in pairs.items() if then is not None and now is not None}
    return {name: (then, now) for name, (then, now) in known.items() if abs(then - now) > allowed}


def findings(
    stages: Sequence[Stage], rounds: bool, made_for: str | None, differences: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """The causes that are certain and large enough, the largest first.

    Args:
        rounds: training's measurement or the files' were taken in 16 bits.
        made_for: the target that the artifact was made for, where that is another one.
        differences: between how training and the evaluation write conversations: `what`, `trained`, `evaluated`.
    """
    by_key = {stage.key: stage for stage in stages}
    found = []
    if "files" in by_key:
        files = _of_files(by_key["record"], by_key["files"], rounds, made_for)
        found += [] if files is None else [files]
    for gap in gaps(stages):
        if not gap.certain or gap.after.key == "files":
            continue
        if gap.after.key == "own":
            found.append(_of_text(gap, differences))
        else:
            description = "teacher-forced, every token counts alike; decoding tries more of the hard ones"
            advice = "choose how much is drafted with `draftsmith tune`"
            found.append(Finding("drafting", gap.lost, gap.interval, description, advice))
    for each in differences:
        if each["what"] == ENDS:
            description = f"{each['trained']}, but {each['evaluated']}: answers go on beyond their end"
            found.append(Finding("end", None, None, description, "use a template whose end the tokenizer knows"))
    return sorted(found, key=lambda finding: -(finding.lost or 0.0))


def _of_text(gap: Gap, differences: Sequence[Mapping[str, Any]]) -> Finding:
    """Why the target's own answers are harder than training's text."""
    template = next((each for each in differences if each["what"] == "template"), None)
    if template is not None:
        pair = f"{template['trained']} in training, {template['evaluated']} here"
        description = f"conversations are written otherwise than for training: {pair}"
        advice = f"evaluate and serve with `template: {template['trained']}`, or train with the one that is served"
        return Finding("template", gap.lost, gap.interval, description, advice)
    others = [f"{each['what']}: {each['trained']}, {each['evaluated']}" for each in differences if each["what"] != ENDS]
    description = "the target's own answers to these prompts are not like the text that it was trained on"
    description += f" ({'; '.join(others)})" if others else ""
    advice = "train on the target's own answers (`draftsmith regenerate`) to prompts like those that are served"
    return Finding("text", gap.lost, gap.interval, description, advice)


def _of_files(record: Stage, files: Stage, rounds: bool, made_for: str | None) -> Finding | None:
    """What the artifact's files do otherwise than the weights in memory did."""
    differing = _not_repeated(record, files, rounds)
    if not differing:
        return None
    lost = None if record.value is None or files.value is None else record.value - files.value
    numbers = ", ".join(f"{name} {then:.3f} → {now:.3f}" for name, (then, now) in differing.items())
    if made_for is not None:
        description = f"this is not the target that it was made for, {made_for}; on the same held-out blocks: {numbers}"
        advice = "decode with the target that it was trained for, or train it for this one (`target` in its recipe)"
        return Finding("target", lost, None, description, advice)
    description = f"the files do not do what the weights in memory did on the same held-out blocks: {numbers}"
    advice = "train or export it again; look for what changed the files or the target since, a cast or a merge"
    return Finding("export", lost, None, description, advice)

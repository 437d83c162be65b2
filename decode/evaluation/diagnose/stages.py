"""Stages on the way from training to real decoding, the acceptance lost between them, and what that points to.

Shape letters: P prompts or documents, R resamples, X draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..bootstrap import Floats, binomial_interval, percentile_interval, resampled_ratios
from ..trace import TracedStep
from .agreement import Scores

_LEVEL = 0.99  # of the intervals of losses: there are several, and none should raise a false alarm
_MIN_LOSS = 0.02  # acceptance that must be lost before a cause is named
_EXACT, _ROUNDED = 0.01, 0.02  # tolerance of repeated training metrics, in float32 and in 16 bits
MEASURES = {"top1_accuracy": "hit", "overlap": "overlap", "top1_agreement": "agree", "accepted": "accepted"}
CAUSES = {
    "export": (
        "on the same held-out blocks the files compute something else than the weights in memory",
        "train or export again; look for what changed the files or the target since, such as a cast or a merge",
    ),
    "target": (
        "this is not the target that it was trained for",
        "decode with the target that it was trained for, or train it for this one (`target` in its recipe)",
    ),
    "files": (
        "a check of its files failed",
        "see which engines it affects with `draftsmith doctor TARGET DRAFT`",
    ),
    "fed": (
        "the heads agree more with the target when they are fed otherwise than their config says",
        "correct the config if it can express how they were trained, or train them again",
    ),
    "steps": (
        "after the first step, which reads the target's states, hardly anything agrees",
        "train with as many steps as are drafted (`num_heads`), so that heads learn to read their own states",
    ),
    "template": (
        "conversations are rendered with another template than in training",
        "evaluate and serve with the template of training, or train with the one that is served",
    ),
    "text": (
        "the target's own answers to these prompts differ from the text that it was trained on",
        "train on the target's own answers (`draftsmith regenerate`) to prompts like those that are served",
    ),
    "drafting": (
        "teacher forcing counts every token alike, while decoding tries more of the hard ones",
        "choose the draft length with `draftsmith tune`",
    ),
}
"""Description and advice. `files`, `text` and `drafting` need not be faults."""
FAULTS = ("export", "target", "fed", "steps", "template")


class DraftAttempt(NamedTuple):
    """A draft token that decoding verified."""

    position: int
    """Index in the text, from 0."""
    depth: int
    """Index in the draft, from 0."""
    drafted: int
    accepted: bool


def draft_attempts(steps: Iterable[TracedStep]) -> list[DraftAttempt]:
    """Return the verified draft tokens of steps in order, without those beyond the end of the text.

    Of several candidates in a tree it is the accepted one, or the first if all were rejected.
    """
    attempts, start = [], 0
    for step in steps:
        count = len(step.accepted)
        attempts += [DraftAttempt(start + depth, depth, token, True) for depth, token in enumerate(step.accepted)]
        if step.rejected and step.next_id is not None:
            attempts.append(DraftAttempt(start + count, count, step.rejected[0], False))
        start += count + (step.next_id is not None)
    return attempts


def token_cells(names: Sequence[str], accepted_X: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Return the draft tokens by class, the most expensive class first.

    Each has the counts `examined` and `accepted`, the `share` of accepted ones with its exact 95 % `interval`, its
    `rejections_share` of all rejections, and its `excess`: the share of all rejections beyond an average class.
    """
    name_X = np.asarray(names, dtype=object)
    rate, rejections = (1 - accepted_X.mean(), max(int((~accepted_X).sum()), 1)) if len(accepted_X) else (0.0, 1)
    cells = []
    for name in dict.fromkeys(names):
        member_X = name_X == name
        good, count = int(accepted_X[member_X].sum()), int(member_X.sum())
        lost = count - good
        cell: dict[str, Any] = {"name": name, "examined": count, "accepted": good, "share": good / count}
        cell |= {"rejections_share": lost / rejections, "excess": float(lost - rate * count) / rejections}
        cells.append(cell | {"interval": binomial_interval(good, count)})
    return sorted(cells, key=lambda cell: -cell["excess"])


@dataclass(frozen=True)
class Stage:
    """One measurement: `record`, `files`, `own` or `decoding`."""

    key: str
    description: str
    value: float | None
    """Acceptance rate, as far as this stage measures it."""
    measures: dict[str, float | None] = field(default_factory=dict)
    """Known ones of `MEASURES`, and `tokens_per_step`."""
    by_depth: list[float | None] = field(default_factory=list)
    tokens: int = 0
    sums: tuple[Floats, Floats] | None = None
    """Numerator and denominator of `value` by prompt or document, [P] each."""

    def as_dict(self) -> dict[str, Any]:
        """Return the stage as JSON."""
        about = {"key": self.key, "description": self.description, "value": self.value, "tokens": self.tokens}
        measures = {name: self.measures.get(name) for name in (*MEASURES, "tokens_per_step")}
        return about | {"by_depth": self.by_depth} | measures


def scored_stage(key: str, description: str, scores: Scores, measure: str) -> Stage:
    """Return the stage of scored passages; `measure` of `Scores` is its value."""
    measures = {name: scores.mean(short) for name, short in MEASURES.items()}
    depths = scores.by_depth(measure) if len(scores.valid_KT) > 1 else []
    sums = scores.sums(measure)
    return Stage(key, description, scores.mean(measure), measures, depths, int(sums[1].sum()), sums)


def decoding_stage(
    description: str, attempts: Sequence[Sequence[DraftAttempt]], tokens_per_step: float, depths: int
) -> Stage:
    """Return the stage of real decoding: the share of accepted draft tokens, also for each of the first `depths`."""
    good_P = np.array([sum(each.accepted for each in row) for row in attempts], dtype=np.float64)
    all_P = np.array([len(row) for row in attempts], dtype=np.float64)
    value = float(good_P.sum() / all_P.sum()) if all_P.sum() else None
    by_depth: list[float | None] = []
    for depth in range(depths):
        accepted = [each.accepted for row in attempts for each in row if each.depth == depth]
        by_depth.append(sum(accepted) / len(accepted) if accepted else None)
    measures = {"accepted": value, "tokens_per_step": tokens_per_step}
    return Stage("decoding", description, value, measures, by_depth, int(all_P.sum()), (good_P, all_P))


def gaps(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return the acceptance `lost` from each stage (`before`) to the next one that has a value (`after`).

    `interval` is of 99 %, over prompts, or None for too few prompts and for training's own mean.
    """
    found = []
    for before, after in pairwise(stage for stage in stages if stage.value is not None):
        assert before.value is not None
        assert after.value is not None
        first_R, second_R = _resampled(before), _resampled(after)
        known = first_R is not None and second_R is not None
        interval = percentile_interval(first_R - second_R, _LEVEL) if known else None  # type: ignore[operator]
        lost = before.value - after.value
        found.append({"before": before.key, "after": after.key, "lost": lost, "interval": interval})
    return found


def _resampled(stage: Stage) -> Floats | None:
    """Return resampled values; stages of the same prompts resample the same ones, so differences are paired."""
    if stage.sums is None:
        return None
    over_P, under_P = stage.sums
    ratios_RG = resampled_ratios(over_P[:, None], under_P[:, None], seed=1 if stage.key == "files" else 0)
    return None if ratios_RG is None else ratios_RG[:, 0]


def findings(stages: Sequence[Stage], other_target: bool, other_template: bool, rounds: bool) -> list[dict[str, Any]]:
    """Return the causes of significant losses.

    Args:
        stages: Measured stages in order.
        other_target: Whether the artifact was trained for another target.
        other_template: Whether it was trained with another template.
        rounds: Whether something was measured in 16 bits.
    """
    by_key, found = {stage.key: stage for stage in stages}, []
    if "record" in by_key and "files" in by_key:
        record, files = by_key["record"], by_key["files"]
        if moved := _changed_metrics(record, files, _ROUNDED if rounds else _EXACT):
            lost = None if record.value is None or files.value is None else record.value - files.value
            found.append(finding("target" if other_target else "export", lost, None, f": {moved}"))
    for gap in gaps(stages):
        interval = gap["interval"]
        certain = gap["lost"] >= _MIN_LOSS and interval[0] > 0 if interval else gap["lost"] >= 2.5 * _MIN_LOSS
        if certain and gap["after"] != "files":
            cause = "drafting" if gap["after"] == "decoding" else "template" if other_template else "text"
            found.append(finding(cause, gap["lost"], interval))
    return found


def finding(cause: str, lost: float | None, interval: Any, numbers: str = "") -> dict[str, Any]:
    """Return one of `CAUSES` with the acceptance that it costs; None where that was not measured."""
    description, advice = CAUSES[cause]
    about = {"cause": cause, "fault": cause in FAULTS, "lost": lost, "interval": interval}
    return about | {"description": description + numbers, "advice": advice}


def _changed_metrics(record: Stage, files: Stage, tolerance: float) -> str:
    """Return the training metrics that the files do not reproduce: `overlap 0.812 → 0.640`."""
    pairs = {name: (record.measures.get(name), files.measures.get(name)) for name in MEASURES}
    if record.by_depth and files.by_depth:
        depths = zip(record.by_depth, files.by_depth, strict=False)
        pairs = {f"head{head}_top1": pair for head, pair in enumerate(depths)}
    return ", ".join(
        f"{name} {then:.3f} → {now:.3f}"
        for name, (then, now) in pairs.items()
        if then is not None and now is not None and abs(then - now) > tolerance
    )

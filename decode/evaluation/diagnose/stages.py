"""Acceptance rates at the stages between training and decoding, and likely causes of losses between them.

Shape letters: P prompts or documents, R resamples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ....checkpoints.pairs.sides import Finding
from ..bootstrap import Floats, percentile_interval, resampled_ratios
from ..trace import TracedStep
from .agreement import Scores

_LEVEL = 0.99  # confidence level of loss intervals, high because several are tested
_MIN_LOSS = 0.02  # minimum loss of acceptance for which a cause is reported
_EXACT, _ROUNDED = 0.01, 0.02  # tolerance of reproduced training metrics, in float32 and in 16 bits
_MIN_SECOND_STEP = 0.5
"""Minimum agreement of the second step relative to the first. It is 0.90 for heads that were trained on their own
states, and 0.18 for heads that were trained for a single step."""
CAUSES = {
    "export": (
        "the saved weights do not reproduce the metrics of the weights in memory on the held-out blocks",
        "train or export again; check whether a cast or a merge changed the files or the target",
    ),
    "target": (
        "the artifact was trained for a different target",
        "decode with the target that it was trained for, or train it for this one (`target` in its recipe)",
    ),
    "inputs": (
        "the heads agree more with the target when they read the previous token, as after training on unshifted tokens",
        "train the heads again with the token that follows each hidden state as their input",
    ),
    "steps": (
        "the heads agree with the target in the first step, which reads the target's states, but much less later",
        "train for as many steps as the heads draft (`num_heads`), so that they learn to use their own states",
    ),
    "template": (
        "conversations are rendered with a different chat template from the one in training",
        "evaluate and serve with the training template, or train with the template that you serve",
    ),
    "text": (
        "the target's responses to these prompts differ from the training text",
        "train on on-policy responses (`draftsmith regenerate`) to prompts representative of your workload",
    ),
    "drafting": (
        "teacher forcing weights all tokens equally, while decoding verifies more of the difficult ones",
        "choose the draft length with `draftsmith tune`",
    ),
}
"""Mapping from causes to their description and advice."""
NO_FAULTS = ("text", "drafting")


def make_finding(cause: str, lost: float | None, interval: list[float] | None, numbers: str = "") -> Finding:
    """Create a finding from a key of `CAUSES`, the lost acceptance rate, its interval, and numbers for the message."""
    what, advice = CAUSES[cause]
    is_fault = cause not in NO_FAULTS
    return Finding(cause, what + numbers, advice=advice, is_fault=is_fault, lost=lost, interval=interval)


class DraftAttempt(NamedTuple):
    """Draft token that was verified during decoding."""

    position: int
    """Zero-based index in the generated text."""
    depth: int
    """Zero-based index in the draft."""
    drafted: int
    accepted: bool


def draft_attempts(steps: Iterable[TracedStep]) -> list[DraftAttempt]:
    """Return the verified draft tokens of all steps in order, without tokens after the end of the output.

    Of several candidates in a tree, only the accepted one is returned, or the first if all were rejected.
    """
    attempts, start = [], 0
    for step in steps:
        count = len(step.accepted)
        attempts += [DraftAttempt(start + depth, depth, token, True) for depth, token in enumerate(step.accepted)]
        if step.rejected and step.next_id is not None:
            attempts.append(DraftAttempt(start + count, count, step.rejected[0], False))
        start += count + (step.next_id is not None)
    return attempts


@dataclass(frozen=True)
class Stage:
    """Acceptance rate at a stage: training `record`, saved `files`, on-policy responses (`own`), or `decoding`."""

    key: str
    description: str
    value: float | None
    """Acceptance rate, or None if this stage does not measure it."""
    by_depth: list[float | None] = field(default_factory=list)
    tokens: int = 0
    sums: tuple[Floats, Floats] | None = None
    """Numerator and denominator of `value` for each prompt or document, [P] each."""
    tokens_per_step: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "sums"}


def scored_stage(key: str, description: str, scores: Scores, measure: str) -> Stage:
    """Create a stage from scored passages. Its value is the mean of `measure` (see `Scores`)."""
    depths = scores.by_depth(measure) if len(scores.valid_KT) > 1 else []
    sums = scores.sums(measure)
    return Stage(key, description, scores.mean(measure), depths, int(sums[1].sum()), sums)


def decoding_stage(
    description: str, attempts: Sequence[Sequence[DraftAttempt]], tokens_per_step: float, depths: int
) -> Stage:
    """Create the decoding stage: the share of accepted draft tokens in total and at the first `depths` depths."""
    good_P = np.array([sum(attempt.accepted for attempt in row) for row in attempts], dtype=np.float64)
    all_P = np.array([len(row) for row in attempts], dtype=np.float64)
    value = float(good_P.sum() / all_P.sum()) if all_P.sum() else None
    by_depth: list[float | None] = []
    for depth in range(depths):
        accepted = [attempt.accepted for row in attempts for attempt in row if attempt.depth == depth]
        by_depth.append(sum(accepted) / len(accepted) if accepted else None)
    return Stage("decoding", description, value, by_depth, int(all_P.sum()), (good_P, all_P), tokens_per_step)


def gaps(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return the acceptance rate `lost` from each stage (`before`) to the next stage with a value (`after`).

    `interval` is the 99 % interval over prompts, or None if there are too few prompts or values.
    """
    rows = []
    for before, after in pairwise(stage for stage in stages if stage.value is not None):
        assert before.value is not None
        assert after.value is not None
        first_R1, second_R1 = _resampled(before), _resampled(after)
        loss_R1 = None if first_R1 is None or second_R1 is None else first_R1 - second_R1
        row = {"before": before.key, "after": after.key, "lost": before.value - after.value}
        rows.append(row | {"interval": percentile_interval(loss_R1, _LEVEL)})
    return rows


def _resampled(stage: Stage) -> Floats | None:
    """Return bootstrap resamples [R, 1] of a stage's value, paired between stages that use the same prompts."""
    if stage.sums is None:
        return None
    over_P, under_P = stage.sums
    return resampled_ratios(over_P[:, None], under_P[:, None], seed=1 if stage.key == "files" else 0)


def stage_findings(
    stages: Sequence[Stage], *, other_target: bool = False, other_template: bool = False, rounds: bool = False
) -> list[Finding]:
    """Return findings for significant losses between stages.

    Args:
        stages: Measured stages in order.
        other_target: True if the artifact was trained for a different target.
        other_template: True if it was trained with a different chat template.
        rounds: True if a measurement used a 16-bit dtype.
    """
    by_key, findings = {stage.key: stage for stage in stages}, []
    if "record" in by_key and "files" in by_key:
        record, files = by_key["record"], by_key["files"]
        if moved := _changed_metrics(record, files, _ROUNDED if rounds else _EXACT):
            lost = None if record.value is None or files.value is None else record.value - files.value
            findings.append(make_finding("target" if other_target else "export", lost, None, f": {moved}"))
    for gap in gaps(stages):
        interval = gap["interval"]
        certain = gap["lost"] >= _MIN_LOSS and interval[0] > 0 if interval else gap["lost"] >= 2.5 * _MIN_LOSS
        if certain and gap["after"] != "files":
            cause = "drafting" if gap["after"] == "decoding" else "template" if other_template else "text"
            findings.append(make_finding(cause, gap["lost"], interval))
    return findings


def eagle_findings(own: Stage, unshifted: Stage) -> list[Finding]:
    """Return findings if EAGLE-3 heads agree more with unshifted tokens, or hardly after their first step."""
    (gap,), findings = gaps([unshifted, own]), list[Finding]()
    if gap["interval"] and gap["lost"] >= _MIN_LOSS and gap["interval"][0] > 0:
        numbers = f": {unshifted.value:.3f} instead of {own.value:.3f}"
        findings.append(make_finding("inputs", gap["lost"], gap["interval"], numbers))
    first, second = [*own.by_depth, None, None][:2]
    if gap["interval"] and first and second is not None and second < _MIN_SECOND_STEP * first:
        numbers = f": {first:.3f} in the first, {second:.3f} in the second"
        findings.append(make_finding("steps", first - second, None, numbers))
    return findings


def _changed_metrics(record: Stage, files: Stage, tolerance: float) -> str:
    """Describe training metrics that the files do not reproduce, such as `acceptance 0.812 → 0.640`."""
    pairs = {"acceptance": (record.value, files.value)}
    if record.by_depth and files.by_depth:
        depths = zip(record.by_depth, files.by_depth, strict=False)
        pairs = {f"head{head}_top1": pair for head, pair in enumerate(depths)}
    return ", ".join(
        f"{name} {then:.3f} → {now:.3f}"
        for name, (then, now) in pairs.items()
        if then is not None and now is not None and abs(then - now) > tolerance
    )

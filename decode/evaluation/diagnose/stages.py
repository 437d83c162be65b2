"""Stages on the way from training to real decoding, what is lost between them, and what that points to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..bootstrap import Floats, percentile_interval, resampled_ratios
from .agreement import Scores
from .attempts import DraftAttempt

LEVEL = 0.99
"""Of the intervals of what is lost between two stages: there are several of them, and none shall cry wolf."""
LEAST = 0.02
"""Acceptance that must be lost before a cause is named."""
EXACT, ROUNDED = 0.01, 0.02
"""What training's measurement may differ by when it is taken again, in float32 and in 16 bits."""
MEASURES = {"top1_accuracy": "hit", "overlap": "overlap", "top1_agreement": "agree", "accepted": "accepted"}
CAUSES = {
    "export": (
        "the files do not do what the weights in memory did on the same held-out blocks",
        "train or export it again; look for what changed the files or the target since, a cast or a merge",
    ),
    "target": (
        "this is not the target that it was made for",
        "decode with the target that it was trained for, or train it for this one (`target` in its recipe)",
    ),
    "files": (
        "the doctor's finding in its files",
        "`draftsmith doctor` says which engines mind",
    ),
    "fed": (
        "the heads agree more with the target when they are fed otherwise than their config says",
        "they were trained so: mend the config where it can say it, or train them again",
    ),
    "steps": (
        "behind the first step, which reads the target's states, hardly anything agrees",
        "train with as many steps as are drafted (`num_heads`): heads learn to read their own states by drafting while "
        "they train",
    ),
    "template": (
        "conversations are written otherwise than for training",
        "evaluate and serve with the template of training, or train with the one that is served",
    ),
    "text": (
        "the target's own answers to these prompts are not like the text that it was trained on",
        "train on the target's own answers (`draftsmith regenerate`) to prompts like those that are served",
    ),
    "drafting": (
        "teacher-forced, every token counts alike; decoding tries more of the hard ones",
        "choose how much is drafted with `draftsmith tune`",
    ),
}
"""Description and advice. `text` and `drafting` are how things are, the others mistakes."""
FAULTS = ("export", "target", "fed", "steps", "template")


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


def scored_stage(key: str, description: str, scores: Scores, measure: str) -> Stage:
    """The stage of scored passages; `measure` of `Scores` is its value."""
    measures = {name: scores.mean(short) for name, short in MEASURES.items()}
    depths = scores.by_depth(measure) if len(scores.valid_KT) > 1 else []
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


def gaps(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """What is `lost` from one stage (`before`) to the next (`after`), of those that have a value, with its `interval`
    of 99 %, over prompts; None where there are too few, or training kept no more than a mean."""
    found = []
    for before, after in pairwise(stage for stage in stages if stage.value is not None):
        assert before.value is not None
        assert after.value is not None
        one, other = _resampled(before), _resampled(after)
        span = None if one is None or other is None else percentile_interval(one - other, LEVEL)
        lost = before.value - after.value
        found.append({"before": before.key, "after": after.key, "lost": lost, "interval": span})
    return found


def _resampled(stage: Stage) -> Floats | None:
    """Resampled values: of prompts always the same prompts, so that differences of two stages are paired."""
    if stage.sums is None:
        return None
    over_P, under_P = stage.sums
    ratios_RG = resampled_ratios(over_P[:, None], under_P[:, None], seed=1 if stage.key == "files" else 0)
    return None if ratios_RG is None else ratios_RG[:, 0]


def findings(stages: Sequence[Stage], other_target: bool, other_template: bool, rounds: bool) -> list[dict[str, Any]]:
    """The causes of lost acceptance that are certain and large enough; `lost` is None where training
    measured something else than the acceptance that the files are judged by. For its training the artifact may have had
    another target or template; `rounds`: something was measured in 16 bits."""
    by_key, found = {stage.key: stage for stage in stages}, []

    if "record" in by_key and "files" in by_key:
        record, files = by_key["record"], by_key["files"]
        if moved := _not_repeated(record, files, EXACT if not rounds else ROUNDED):
            lost = None if record.value is None or files.value is None else record.value - files.value
            found.append(finding("target" if other_target else "export", lost, None, f": {moved}"))
    for gap in gaps(stages):
        span = gap["interval"]
        certain = gap["lost"] >= LEAST and span[0] > 0 if span else gap["lost"] >= 2.5 * LEAST
        if certain and gap["after"] != "files":
            cause = "drafting" if gap["after"] == "decoding" else "template" if other_template else "text"
            found.append(finding(cause, gap["lost"], span))
    return found


def finding(cause: str, lost: float | None, interval: Any, numbers: str = "") -> dict[str, Any]:
    """One of `CAUSES`, with what it costs."""
    description, advice = CAUSES[cause]
    about = {"cause": cause, "fault": cause in FAULTS, "lost": lost, "interval": interval}
    return about | {"description": description + numbers, "advice": advice}


def _not_repeated(record: Stage, files: Stage, allowed: float) -> str:
    """What the files do otherwise on the same blocks than what training measured: `overlap 0.812 → 0.640`."""
    pairs = {name: (record.measures.get(name), files.measures.get(name)) for name in MEASURES}
    if record.by_depth and files.by_depth:
        depths = zip(record.by_depth, files.by_depth, strict=False)
        pairs = {f"head{head}_top1": pair for head, pair in enumerate(depths)}
    return ", ".join(
        f"{name} {then:.3f} → {now:.3f}"
        for name, (then, now) in pairs.items()
        if then is not None and now is not None and abs(then - now) > allowed
    )

"""From what was measured to what is to be done: causes of lost acceptance in plain words, the largest first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .stages import LEVEL, Gap, Measured, Stage, warping
from .training_record import Difference, OtherTarget, Trained
from .trees import Tree

LEAST = 0.02
"""Acceptance that must be lost before a cause is named."""
_EXACT, _ROUNDED = 0.01, 0.02
"""What training's measurement may differ by when it is taken again, in float32 and in 16 bits."""
_ELSEWHERE = 0.05
"""By what share of its guesses a head must be better at another place."""
_REPLAY = 0.03
"""Share of the foretold tokens per step that decoding may differ by."""
_ERRORS = 5.0
"""Standard errors that it may differ by, where tokens are drawn, rounding decides, or there are few steps."""
FAULTS = ("export", "target", "template", "block", "type", "states", "order", "decoding", "end")
"""Causes that are mistakes. `prompts`, `shift`, `warping`, `free-running` and `tree` are how things are."""
TRAINING = ("record", "greedy", "export", "target")


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    lost: float | None
    """Acceptance that is lost by it (of `decoding`, tokens per step); None where it could not be measured."""
    interval: tuple[float, float] | None
    says: str
    advice: str

    @property
    def fault(self) -> bool:
        """Whether it is a mistake."""
        return self.cause in FAULTS


def cause_of(gap: Gap) -> str:
    """What differs between two stages."""
    before, after = gap.before.key, gap.after.key
    if after == "greedy":
        return "warping"
    if after in ("written", "corpus", "within", "own") and before in TRAINING:
        return "prompts"
    named = {"corpus": "template", "within": "shift", "warped": "warping", "served": "type"}
    named |= {"export": "export", "target": "target", "decoding": "free-running"}
    if after == "own":
        return "block" if before == "within" else "shift"
    return named[after]


def verdict(
    found: Measured,
    lost: Sequence[Gap],
    trained: Trained | None,
    other: OtherTarget,
    differing: Sequence[Difference],
    trees: Sequence[Tree] = (),
) -> list[Finding]:
    """The causes that are certain and large enough, the largest first.

    A gap counts from `LEAST` on, if its 99 % interval lies above 0; without an interval, from 2.5 times as much on. An
    artifact that does not repeat training's own measurement is a fault whatever is lost by it.
    """
    causes = [*_of_export(found, lost, trained, other)]
    told = {cause.cause for cause in causes}
    for gap in lost:
        cause = cause_of(gap)
        if cause in told or cause == "export" or not _certain(gap):
            continue
        if cause == "block" and not _falls_beyond(found):
            continue
        says, advice = _words(cause, gap, found, trained, other, differing)
        causes.append(Finding(cause, gap.lost, gap.interval, says, advice))
    causes += [*_of_states(found), *_of_order(found), *_of_decoding(found), *_of_trees(found, trees)]
    for each in differing:
        if each["what"].startswith("end of an answer"):
            says = f"{each['what']}, but {each['evaluated']}: answers go on beyond their end"
            causes.append(Finding("end", None, None, says, "evaluate with the template whose end the tokenizer knows"))
    return sorted(causes, key=lambda cause: -(cause.lost if cause.lost is not None else -1.0))


def _certain(gap: Gap) -> bool:
    if gap.after.key == "greedy":  # both were measured on the same tokens, thousands of them
        return gap.lost >= LEAST
    return gap.lost >= (LEAST if gap.interval else 2.5 * LEAST) and (gap.interval is None or gap.interval[0] > 0)


def _falls_beyond(found: Measured) -> bool:
    """Whether tokens beyond a training block are worse off than those in its second half: else it is the texts that
    grow harder, not the positions."""
    assert found.beyond is not None
    late, beyond = found.beyond["late"], found.beyond["beyond"]
    return late is None or (beyond is not None and late - beyond >= LEAST)


def repeats(found: Measured, trained: Trained) -> dict[str, tuple[float, float]]:
    """Of training's own measurement what the artifact does not repeat: (then, now) by name."""
    allowed = _ROUNDED if trained.rounds else _EXACT
    names = ("top1_accuracy", "overlap", "top1_agreement")
    compared = [name for name in found.again if name in names or (name.startswith("head") and name.endswith("_top1"))]
    differing = {}
    for name in [*compared, "heldout_loss"]:
        then, now = trained.metrics.get(name), found.again.get(name)
        if then is not None and now is not None:
            limit = allowed * max(1.0, 2 * abs(then)) if name == "heldout_loss" else allowed
            if abs(now - then) > limit:
                differing[name] = (then, now)
    return differing


def _of_export(found: Measured, lost: Sequence[Gap], trained: Trained | None, other: OtherTarget) -> list[Finding]:
    """What the artifact on disk does otherwise than the weights in memory did."""
    again = next((row for row in found.types if "read again" in row["type"]), None)
    served = next((row for row in found.types if row["served"]), None)
    causes = []
    if again is not None and served is not None and abs(again["accepted"] - served["accepted"]) > _EXACT:
        change = served["accepted"] - again["accepted"]
        says = f"saved once more and read again, it accepts {again['accepted']:.2f} instead of {served['accepted']:.2f}"
        causes.append(Finding("export", change, None, says, "its config does not describe its weights: train anew"))
    if trained is None or not found.again:
        return causes
    differing = repeats(found, trained)
    if not differing:
        return causes
    gap = next((gap for gap in lost if gap.after.key == "export"), None)
    name, (then, now) = max(differing.items(), key=lambda item: abs(item[1][0] - item[1][1]))
    amount = gap.lost if gap is not None else then - now if name != "heldout_loss" else None
    said = ", ".join(f"{each} {one:.3f} → {two:.3f}" for each, (one, two) in differing.items())
    alone = found.part == "drafter" and {"top1_accuracy", "heldout_loss"} & set(differing)
    certain = found.again_on != "this target" or (other.known and other.same)
    if alone or certain or (found.part == "heads" and not other.known):
        says = f"the artifact's files do not do what the weights in memory did on the same held-out blocks: {said}"
        advice = "train or export it again; look for what changed the files since, a cast or a merge among others"
        if trained.trained_type == "float32" and served is not None and served["type"] != "float32":
            advice = f"its weights were trained in float32 and are kept in {served['type']}: {advice}"
        causes.append(Finding("export", amount, None, says, advice))
    else:
        made_for = f": it was made for {other.made_for}" if other.made_for else ""
        says = f"this is not the target that it was trained with{made_for}; on the same held-out blocks: {said}"
        causes.append(Finding("target", amount, None, says, _TARGET))
    return causes


_TARGET = "decode with the target that it was trained for, or train it for this one (`target` in its recipe)"


def _words(
    cause: str,
    gap: Gap,
    found: Measured,
    trained: Trained | None,
    other: OtherTarget,
    differing: Sequence[Difference],
) -> tuple[str, str]:
    """What a gap means, and what helps."""
    block = trained.block_tokens if trained is not None else None
    if cause == "target":
        return f"this is not the target that it was made for, {other.made_for}", _TARGET
    if cause == "template":
        theirs = trained.template.name if trained is not None and trained.template is not None else "another"
        names = "; ".join(f"{each['what']}: {each['trained']} / {each['evaluated']}" for each in differing[:3])
        says = f"conversations are written otherwise than for training ({names})"
        return says, f"evaluate and serve with `template: {theirs}`, or train with the template that is served"
    if cause == "block":
        assert found.beyond is not None
        late, beyond, windowed = (found.beyond[name] for name in ("late", "beyond", "windowed"))
        says = f"tokens beyond position {block} are read from positions that no training block had: {beyond:.2f} there"
        says += "" if late is None else f", {late:.2f} in the half block before"
        says += "" if windowed is None else f"; {windowed:.2f} from the last {block} tokens alone"
        return says, f"train with `data.block_tokens` of {_longest(found)} or more, or serve shorter texts"
    if cause == "type":
        says = f"rounding: as served, in {gap.after.says.removeprefix('the same in ').removesuffix(', as served')}"
        return says, "serve it in float32 (it is small), or train it in the type that it is served in"
    fixed = {
        "prompts": _of_prompts(found, gap),
        "shift": (
            "the target's own text is not the corpus's, and it was trained on another",
            "train on the target's own answers: `draftsmith regenerate`, recipes regenerate/quickstart and "
            "regenerate/vicuna-7b, then `data.source`",
        ),
        "warping": (
            f"decoding compares warped distributions ({warping(found.entry.sampling)}), training plain ones",
            "try several candidates a place (multi-candidate), or distil at the temperature of use "
            "(`teacher.temperature`)",
        ),
        "free-running": _of_free_running(found),
    }
    return fixed[cause]


def _of_prompts(found: Measured, gap: Gap) -> tuple[str, str]:
    if gap.before.key in ("record", "greedy"):
        says = "other text than training's held-out part, or another artifact than was measured: its blocks are gone"
        return says, "bring the blocks back (`draftsmith prepare` with its recipe) to tell the two apart"
    says = "these prompts are not like training's held-out conversations"
    return says, "train on conversations like those that are served; see the cells by category"


def _of_free_running(found: Measured) -> tuple[str, str]:
    if found.part == "heads":
        says = (
            "teacher-forced, every place counts alike; decoding looks at a head only where those before it were right"
        )
        return says, "see the cells by depth; a shallower tree wastes less"
    says = (
        "teacher-forced, every place counts alike; decoding passes over the place behind a whole accepted draft, and "
    )
    return says + "tries more of the hard ones", "choose how much is drafted with `draftsmith tune`"


def _longest(found: Measured) -> int:
    return max(len(passage.prompt) + len(passage.text) for passage in found.texts)


def _of_states(found: Measured) -> list[Finding]:
    if found.other_states is None:
        return []
    other, gain, span = found.other_states
    if gain < LEAST or span is None or span[0] <= 0:
        return []
    says = f"the heads guess better from the target's states {other} than from those that they say they read"
    advice = f"set `states` to {other} in their config.json if they were trained so"
    return [Finding("states", gain, span, says, advice)]


def _of_order(found: Measured) -> list[Finding]:
    """Heads that guess another place's token than the one that decoding takes their guess for."""
    if found.places is None:
        return []
    better = found.places.better(_ELSEWHERE, LEVEL)
    if not better:
        return []
    count = found.places.hits_PKJ.shape[1]
    steps = {place - head for head, place, _ in better}
    said = ", ".join(
        f"head {head} guesses the token of place {place} best, {gain:.2f} better" for head, place, gain in better
    )
    if len(better) > 1 and sorted(head for head, _, _ in better) == sorted(place for _, place, _ in better):
        advice = "they are in another order in the file: put them in order, or export or import them again"
    elif len(better) == count > 1 and len(steps) == 1:
        advice = "all are off by as many places: train or import them so that head 1 speaks of the second next token"
    else:
        advice = "look for a head that is there twice, or in the place of another"
    lost = sum(gain for _, _, gain in better) / count
    return [Finding("order", lost, None, f"{said} than that of its own", advice)]


def _of_trees(found: Measured, trees: Sequence[Tree]) -> list[Finding]:
    """Candidates that were right and not in a tree; steps that are not those that replay of the same text takes."""
    causes = []
    for tree in trees:
        name, (share, span) = tree.told["label"], tree.passed_over
        if share >= LEAST and span is not None and span[0] > 0:
            says = f"{name}: the token was among the first {tree.width} candidates of its head, and not in the tree"
            advice = "let `draftsmith tune` find a tree of these heads, or widen it"
            causes.append(Finding("tree", share, span, says, advice))
        if tree.off > max(_REPLAY * tree.told["tokens_per_step"], 0.0) and found.served == "float32":
            says = f"{name} keeps {tree.told['tokens_per_step']:.2f} tokens a step where replay of the same text says "
            says += f"{tree.told['foretold']:.2f}"
            causes.append(Finding("decoding", tree.off, None, says, _DECODER))
    return causes


_DECODER = "a fault of the decoder, not of the artifact: run `draftsmith certify`, and report it"


def _of_decoding(found: Measured) -> list[Finding]:
    stage = found.stages[-1]
    per_step = stage.measures.get("tokens_per_step")
    if found.predicted is None or per_step is None:
        return []
    few = _steps(found, found.predicted) * _REPLAY < 1  # where one step more or less is beyond it
    noise = 0.0 if found.exact and not few else _ERRORS * _step_error(found, found.predicted)
    if found.predicted - per_step <= max(_REPLAY * found.predicted, noise):
        return []
    says = (
        f"decoding keeps {per_step:.2f} tokens a step where the distributions of the same texts foretell "
        f"{found.predicted:.2f}"
    )
    return [Finding("decoding", found.predicted - per_step, None, says, _DECODER)]


def _step_error(found: Measured, per_step: float) -> float:
    """Standard error of a difference in tokens per step between texts that are decoded and others that are replayed:
    both are drawn by chance, and where one is decoded drafts are accepted by chance too. At temperature 0 near-ties,
    which rounding decides, do both."""
    chance = next(stage.value for stage in reversed(found.stages[:-1]) if stage.value is not None)
    kept = [chance**depth * (1 - chance) for depth in range(found.drafted)] + [chance**found.drafted]
    mean = sum(depth * share for depth, share in enumerate(kept))
    spread = sum((depth - mean) ** 2 * share for depth, share in enumerate(kept))
    steps = _steps(found, per_step)
    return math.sqrt(2 * found.predicted_error**2 + spread / max(steps, 1.0))


def _steps(found: Measured, per_step: float) -> float:
    """How many steps the decoded texts take."""
    return sum(len(passage.text) for passage in found.texts) / per_step


def headline(stages: Sequence[Stage]) -> str:
    """What is lost or gained from the first stage to the last."""
    known = [stage for stage in stages if stage.value is not None]
    first, last = known[0], known[-1]
    assert first.value is not None
    assert last.value is not None
    change = first.value - last.value
    ends = f"{first.value:.3f} ({first.says}) to {last.value:.3f} ({last.says})"
    if len(known) < 2:
        return f"decoding accepts {last.value:.3f}; there is nothing to compare it with"
    return f"{change:.3f} is lost, from {ends}" if change > 0 else f"nothing is lost: from {ends}"


def sentences(causes: Sequence[Finding], stages: Sequence[Stage], repeated: bool = False) -> list[str]:
    """The causes as lines for people.

    Args:
        repeated: the artifact's files were measured again as training measured the weights in memory.
    """
    known = [stage.value for stage in stages if stage.value is not None]
    total = known[0] - known[-1] if len(known) > 1 else 0.0
    lines = []
    for cause in causes:
        span = f" ({cause.interval[0]:.3f} to {cause.interval[1]:.3f})" if cause.interval else ""
        if cause.lost is None:
            amount = "not measured"
        elif cause.cause == "decoding":
            amount = f"{cause.lost:.2f} tokens a step"
        else:
            amount = f"{cause.lost:.3f}{f' of the {total:.3f} lost' if total >= cause.lost > 0 else ''}{span}"
        kind = "fault" if cause.fault else "cause"
        lines.append(f"{kind}, {cause.cause}: {amount}: {cause.says}. To do: {cause.advice}.")
    same = ", and the artifact's files repeat training's own measurement" if repeated else ""
    if lines or not known:
        return lines
    reached = (
        f": {known[0]:.3f} is what it reached; for more, train longer, or on more of what is asked" if same else ""
    )
    return [f"no cause of lost acceptance was found{same}{reached}."]


def as_dicts(causes: Sequence[Finding]) -> list[Mapping[str, Any]]:
    """For JSON."""
    return [
        {
            "cause": cause.cause,
            "fault": cause.fault,
            "lost": cause.lost,
            "interval": cause.interval,
            "says": cause.says,
            "advice": cause.advice,
        }
        for cause in causes
    ]

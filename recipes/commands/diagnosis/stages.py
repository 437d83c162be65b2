"""A drafter, heads or a table measured step by step on the way from its training to real decoding.

Shape letters: T predicted tokens, P prompts or documents.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....checkpoints.heads.files import PredictionHeads, load_heads, save_heads
from ....data.rendering.templates import get_template
from ....decode.evaluation.diagnose.agreement import (
    DrafterSource,
    Floats,
    HeadsSource,
    Passage,
    Resamples,
    Scores,
    Source,
    TableSource,
    Tried,
    expected_steps,
    interval,
    score,
    tried,
)
from ....decode.evaluation.diagnose.head_offsets import Places, places_of
from ....decode.evaluation.measure import Entry
from ....decode.evaluation.replay.replay import predict_entries, record_entries
from ....decode.evaluation.trace import trace
from ....decode.methods import Parts, build_method
from ....decode.models.base import LanguageModel
from ....decode.models.loading import load_model, wrap_model
from ....decode.models.seq2seq import Seq2SeqModel
from ....decode.proposers.head_trees import attach_projection, states_of
from ....decode.proposers.ngrams import TableChain
from ....decode.warpers import Sampling
from ....train.tasks.drafter import DrafterTask
from ....train.tasks.heads import HeadsTask
from ....train.teachers.teacher import ModelTeacher
from ...assemble.evaluation import place_of
from ...session.terminal import log
from .case import Case
from .training_record import OtherTarget, Trained, block_passages

LEVEL = 0.99
"""Of the intervals of what is lost between two stages: there are many of them, and none shall cry wolf."""
_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Stage:
    """One measurement on the way from training to decoding."""

    key: str
    says: str
    value: float | None
    """The chance that a draft is accepted, as far as this stage can tell it: what the gaps are between."""
    measures: dict[str, float | None] = field(default_factory=dict)
    """`top1_accuracy`, `overlap`, `top1_agreement`, `accepted`, `tokens_per_step`, as far as they are known."""
    by_depth: list[float | None] = field(default_factory=list)
    tokens: int = 0
    sums: tuple[Floats, Floats] | None = None
    """What `value` is a quotient of, by prompt or document [P]."""
    of: str = "prompts"


@dataclass(frozen=True)
class Gap:
    """What is lost from one stage to the next; below 0: gained."""

    before: Stage
    after: Stage
    lost: float
    interval: tuple[float, float] | None
    """Of 99 %; None where there are too few prompts, or training kept no more than a mean."""


@dataclass
class Measured:
    """All that was measured of one part."""

    part: str
    entry: Entry
    stages: list[Stage] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Stages that could not be measured, and why."""
    again: dict[str, float] = field(default_factory=dict)
    """Training's own measurement, taken again of the artifact."""
    again_on: str = "this target"
    types: list[dict[str, Any]] = field(default_factory=list)
    served: str = "float32"
    """The type of the weights that decode."""
    own: Scores | None = None
    texts: list[Passage] = field(default_factory=list)
    """What real decoding wrote."""
    tried: list[list[Tried]] = field(default_factory=list)
    source: Source | None = None
    drafted: int = 1
    """Tokens that a step drafts."""
    predicted: float | None = None
    """Tokens per step, by replay of the target's own answers."""
    predicted_error: float = 0.0
    exact: bool = False
    """Whether real decoding can but take the steps that are foretold: at temperature 0, target and part in float32, and
    it wrote the target's own answers."""
    beyond: dict[str, float | None] | None = None
    """Of texts that are longer than a training block, see `Probe._beyond`."""
    other_states: tuple[str, float, tuple[float, float] | None] | None = None
    """Of heads: the other states, and by how much they are better off with them."""
    places: Places | None = None
    """Of heads: how often each guesses the token of its own place, and of others."""


class Probe:
    """Measures one part of an evaluation.

    Args:
        part: drafter, heads or table.
        entry: the chain that drafts from it.
        trained: what is known of its training, if anything.
        other: whether it was trained for this target.
    """

    def __init__(self, case: Case, part: str, entry: Entry, trained: Trained | None, other: OtherTarget) -> None:
        self.case, self.part, self.entry, self.trained, self.other = case, part, entry, trained, other
        own = Parts(**{part: getattr(case.opened.parts, part)})
        self.parts, self.method = own, build_method(entry.method, own, entry.sampling, **entry.options)
        self.served = str(case.target.dtype if part == "heads" else _type_of(own, case.target)).removeprefix("torch.")
        # As training measured it; of a table, which is not trained, as decoding does.
        greedy = entry.sampling.greedy
        self._read: tuple[set[str], Any] | None = None
        self.measure = {"heads": "hit", "drafter": "agree" if greedy else "overlap", "table": "accepted"}[part]
        self.found = Measured(part, entry, drafted=self.drafted, served=self.served)

    def run(self) -> Measured:
        """Every stage that can be measured."""
        for stages in (self._trained_stages, self._corpus_stages, self._own_stages, self._decoding):
            self.case.stop_if_asked()
            stages()
        return self.found

    # what is measured with

    def source(self, kind: str | None = None) -> Source:
        """The part in a type of weights; None: as served."""
        if self.part == "table":
            proposer = self.method.proposer
            assert isinstance(proposer, TableChain)
            return TableSource(proposer, self.case.target.device)
        as_served = kind is None or kind == self.served
        if self.part == "heads":
            heads = self.parts.heads if as_served else self.heads(str(kind))
            assert heads is not None
            return HeadsSource(heads, getattr(torch, kind or self.served))
        model = self.parts.drafter if as_served else wrap_model(self.drafter(str(kind)), check=False)
        assert model is not None
        return DrafterSource(model)

    def drafter(self, kind: str) -> Any:
        """The drafter from its files, as transformers has it. The last one is kept, for it may be asked for again."""
        if self._read is None or kind not in self._read[0]:
            self._read = None  # one at a time
            place = place_of(str(self.case.recipe.drafter), "drafter")
            model = load_model(place, dtype=kind, device=str(self.case.target.device))
            self._read = {kind, str(model.dtype).removeprefix("torch.")}, model
        return self._read[1]

    def heads(self, kind: str) -> PredictionHeads:
        """The heads from their files, if they are not there already."""
        there = self.__dict__.get("precise") if kind == "float32" else None
        found = there.heads if isinstance(there, HeadsSource) else self.parts.heads if kind == self.served else None
        if isinstance(found, PredictionHeads):
            return found
        target = self.case.target
        place = Path(place_of(str(self.case.recipe.heads), "heads"))
        heads = load_heads(place, device=target.device, dtype=getattr(torch, kind))
        attach_projection(heads, self.case.opened.model, target.device)
        return heads

    @cached_property
    def precise(self) -> Source:
        """The part in float32, so that rounding is a stage of its own."""
        return self.source("float32")

    def stage(self, key: str, says: str, passages: Sequence[Passage], source: Source, **more: Any) -> Stage:
        """Score passages; `measure`, `target` and `of` may be given."""
        of = more.get("of", "prompts")
        scores = self.scored(key, passages, source, more.get("target"), of)
        return self.staged(key, says, scores, passages, more.get("measure", self.measure), of)

    def scored(
        self, key: str, passages: Sequence[Passage], source: Source, target: LanguageModel | None = None,
        of: str = "prompts",
    ) -> Scores:  # fmt: skip
        """Passages read with the evaluation's target, or with another."""
        with self.case.bar(f"{self.part}: {key}", of) as advance:
            return score(target or self.case.target, source, passages, self.entry.sampling, advance)

    def staged(
        self,
        key: str,
        says: str,
        scores: Scores,
        passages: Sequence[Passage],
        measure: str,
        of: str = "prompts",
        chosen_T: NDArray[np.bool_] | None = None,
    ) -> Stage:
        """The stage that scores come to; of the chosen tokens alone, where some are."""
        names = {"top1_accuracy": "hit", "overlap": "overlap", "top1_agreement": "agree", "accepted": "accepted"}
        measures = {name: scores.mean(short, chosen_T) for name, short in names.items()}
        if all(passage.text for passage in passages) and chosen_T is None:
            measures["tokens_per_step"] = expected_steps(scores, passages, self.drafted)
        depths = scores.by_depth(measure) if len(scores.hit_KT) > 1 else []
        sums = scores.sums(measure, chosen_T)
        return Stage(key, says, scores.mean(measure, chosen_T), measures, depths, int(sums[1].sum()), sums, of)

    def within(self, key: str, says: str, passages: Sequence[Passage], scores: Scores, measure: str) -> Stage:
        """The tokens at positions that training blocks had; all of them, read from as many tokens as a block holds at
        most, where there is none."""
        block = self.block(passages)
        if block is None:
            return self.staged(key, says, scores, passages, measure)
        chosen_T = scores.position_T < block
        if (chosen_T & scores.valid_KT).any():
            return self.staged(key, f"{says}, up to position {block}", scores, passages, measure, chosen_T=chosen_T)
        return self.staged(
            key, f"{says}, the last {block} tokens read", self.windowed(passages, block), passages, measure
        )

    def windowed(self, passages: Sequence[Passage], block: int) -> Scores:
        """Passages of which a drafter reads no more than the last tokens, as many as a training block holds. Heads read
        what the target has read, which is all."""
        source = DrafterSource(self.precise.model, block) if isinstance(self.precise, DrafterSource) else self.precise
        return self.scored("within a block", passages, source)

    def block(self, passages: Sequence[Passage]) -> int | None:
        """The length of a training block, where passages are longer."""
        block = self.trained.block_tokens if self.trained is not None else None
        if not block or isinstance(self.case.target, Seq2SeqModel):
            return None
        longest = max(len(passage.prompt) + len(passage.text) for passage in passages)
        return int(block) if longest > block else None

    @property
    def drafted(self) -> int:
        """How many tokens a step drafts."""
        return self.method.proposer.capacity(self.case.limits)[1]

    # the stages

    def _trained_stages(self) -> None:
        trained, found = self.trained, self.found
        if self.part == "table":
            return
        if trained is None or isinstance(self.case.target, Seq2SeqModel):
            why = "no manifest says how it was trained" if trained is None else "an encoder-decoder has no such blocks"
            found.skipped.append(f"the artifact against training's own measurement: {why}")
            return
        found.stages += self._records()
        data = trained.blocks()
        if isinstance(data, str):
            found.skipped.append(data)
            return
        blocks = trained.measured_blocks(data)
        passages = block_passages(data, blocks)
        log(f"diagnose: taking training's own measurement of {trained.folder} again, on {blocks} held-out blocks")
        found.again = self._measured_again(trained, data, blocks)
        scorer = self._trained_for()
        found.again_on = "the target that it was made for" if scorer is not self.case.target else "this target"
        says = "the artifact read from its files, the same held-out blocks"
        first = self.stage("export", says, passages, self.precise, target=scorer, of="documents")
        found.stages.append(first)
        if self.part == "heads":
            found.stages = [*self._records(first), first]
        if scorer is not self.case.target:
            says = "the same with this evaluation's target"
            found.stages.append(self.stage("target", says, passages, self.precise, of="documents"))

    def _trained_for(self) -> LanguageModel:
        """The target that the part was made for, where that is another and is here; else the evaluation's."""
        if self.other.model is None:
            return self.case.target
        return wrap_model(self.other.model, states=states_of(self.parts.heads))

    def _records(self, again: Stage | None = None) -> list[Stage]:
        """Training's measurement of the weights in memory; of heads, each weighed as often as `again` judged it."""
        assert self.trained is not None
        metrics = self.trained.metrics
        says = "training's own measurement, weights in memory"
        if self.part == "drafter":
            names = ("top1_accuracy", "overlap", "top1_agreement")
            known: dict[str, float | None] = {name: metrics[name] for name in names if name in metrics}
            stages = [Stage("record", says, known.get("overlap"), known)]
            if self.entry.sampling.greedy:
                says = "the same at temperature 0: how often both have the same best token"
                stages.append(Stage("greedy", says, known.get("top1_agreement"), known))
            return stages
        heads = [metrics.get(f"head{head}_top1") for head in range(self.drafted)]
        value = None if None in heads else float(np.mean([each or 0.0 for each in heads]))
        if again is not None and again.value is not None and value is not None and None not in again.by_depth:
            value += again.value - float(np.mean([each or 0.0 for each in again.by_depth]))
        return [Stage("record", says, value, {"top1_accuracy": value}, heads)]

    def _measured_again(self, trained: Trained, data: Any, blocks: int) -> dict[str, float]:
        """Training's own evaluation, of the artifact's files."""
        model = self.other.model if self.other.model is not None else self.case.opened.model
        options: dict[str, Any] = {"evaluate_blocks": blocks}
        task: DrafterTask | HeadsTask
        if self.part == "drafter":
            task = DrafterTask(self.drafter("auto"), data, judge=ModelTeacher(model, settings={}), **options)
        else:
            heads = self.heads("float32")
            weight = trained.manifest.recipe.get("weight_decay_by_head", 1.0)
            task = HeadsTask(model, heads, data, [weight**head for head in range(heads.num_heads)], **options)
        return task.evaluate(task.module)

    def _corpus_stages(self) -> None:
        evaluated = get_template(self.case.recipe.template, self.case.opened.tokenizer)
        passages = self.case.corpus(evaluated)
        if not any(passage.text for passage in passages):
            self.found.skipped.append(f"the corpus's own answers: {self.case.recipe.prompts} has none")
            return
        theirs = self.trained.template if self.trained is not None else None
        templates = [("corpus", "its", evaluated, passages)]
        if theirs is not None and self.part != "table":
            written = self.case.corpus(theirs)
            if [each[:2] for each in written] != [each[:2] for each in passages]:
                templates.insert(0, ("written", "training's", theirs, written))
        for key, whose, template, each in templates:
            says = f"real answers to this evaluation's prompts, in {whose} template ({template.name})"
            scores = self.scored(key, each, self.precise)
            self.found.stages.append(self.within(key, says, each, scores, self.measure))

    def _own_stages(self) -> None:
        own, found = self.case.own(self.entry.sampling), self.found
        scores = self.scored("own answers", own, self.precise)
        says, block = "the target's own answers", self.block(own)
        plain = self.part != "drafter" or self.entry.sampling in (Sampling(), Sampling(1.0))
        measure = "accepted" if plain else self.measure
        if block is not None:
            found.stages.append(self.within("within", says, own, scores, measure))
            found.beyond = self._beyond(own, scores, block, measure)
            says = "all of the target's own answers"
        found.stages.append(self.staged("own", says, scores, own, measure))
        if not plain:
            says = f"the same, warped as decoding does ({warping(self.entry.sampling)})"
            found.stages.append(self.staged("warped", says, scores, own, "accepted"))
        found.own = scores
        if self.part == "table":
            return
        if self.served != "float32":
            says = f"the same in {self.served}, as served"
            found.stages.append(self.stage("served", says, own, self.source(), measure="accepted"))
        precise = self.staged("float32", "", scores, own, "accepted")
        self._types(own, {"float32": precise, self.served: found.stages[-1]})
        if self.part == "heads":
            self._other_states(own, scores)
            assert isinstance(self.precise, HeadsSource)
            found.places = places_of(self.case.target, self.precise.heads, torch.float32, own)

    def _beyond(self, own: Sequence[Passage], scores: Scores, block: int, measure: str) -> dict[str, float | None]:
        """Tokens beyond a training block, beside those in its second half, which are as far into an answer as they can
        be; and beyond it once more, a drafter reading the last tokens alone."""
        place_T = scores.position_T
        windowed = self.windowed(own, block) if self.part == "drafter" else None
        return {
            "block": float(block),
            "late": scores.mean(measure, (place_T >= block // 2) & (place_T < block)),
            "beyond": scores.mean(measure, place_T >= block),
            "windowed": None if windowed is None else windowed.mean(measure, place_T >= block),
        }

    def _types(self, own: Sequence[Passage], known: Mapping[str, Stage]) -> None:
        """Other types of weights than those that are known, and the artifact saved once more and read back."""
        again = self.stage("saved again", "", own, self._read_back(), measure="accepted")
        for kind in _TYPES:
            stage = known.get(kind) or self.stage(kind, kind, own, self.source(kind), measure="accepted")
            self.found.types.append({"type": kind, "served": kind == self.served} | stage.measures)
        said = {"type": f"{self.served}, saved and read again", "served": False}
        self.found.types.append(said | again.measures)
        self._read = None

    def _read_back(self) -> Source:
        """The part as it is served, written to a folder and read from there."""
        device = self.case.target.device
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if self.part == "drafter":
                self.drafter(self.served).save_pretrained(folder)
                return DrafterSource(wrap_model(load_model(name, dtype=self.served, device=str(device)), check=False))
            save_heads(self.heads(self.served), folder, self.case.recipe.target)
            heads = load_heads(folder, device=device, dtype=getattr(torch, self.served))
        attach_projection(heads, self.case.opened.model, device)
        return HeadsSource(heads, getattr(torch, self.served))

    def _other_states(self, own: Sequence[Passage], scores: Scores) -> None:
        """Whether heads are better off with the target's other hidden states."""
        other = "before-norm" if self.case.target.states == "after-norm" else "after-norm"
        try:
            target = wrap_model(self.case.opened.model, states=other, check=False)
        except ValueError as error:
            self.found.skipped.append(f"heads on states {other}: {error}")
            return
        theirs = score(target, self.precise, own, self.entry.sampling)
        pair = [tuple(column[:, None] for column in each.sums("hit")) for each in (theirs, scores)]
        drawn = [self.case.resamples.ratios(*columns) for columns in pair]
        span = None if drawn[0] is None or drawn[1] is None else interval((drawn[0] - drawn[1])[:, 0], LEVEL)
        gain = (theirs.mean("hit") or 0.0) - (scores.mean("hit") or 0.0)
        self.found.other_states = other, gain, span

    def _decoding(self) -> None:
        """Real decoding, and what replay of the target's own answers foretells of it."""
        case, found = self.case, self.found
        count = len(case.questions)
        steps = 0
        with case.bar(f"{self.part}: decoding with {self.entry.method}", "prompts") as advance:
            for place, question in enumerate(case.questions):
                traced = trace(
                    case.target, self.method, question.ids, case.limits, self.entry.sampling, case.recipe.seed + place
                )
                text = [token for step in traced for token in (*step.accepted, step.next_id) if token is not None]
                found.texts.append(Passage(question.ids, text))
                found.tried.append(tried(traced))
                steps += len(traced)
                advance(place + 1, count)
        found.source = self.source()
        plain = case.target.dtype == torch.float32 and self.served == "float32" and self.entry.sampling.greedy
        found.exact = plain and all(
            list(one.text) == list(other.text)
            for one, other in zip(found.texts, case.own(self.entry.sampling), strict=True)
        )
        good_P = np.array([sum(each.accepted for each in row) for row in found.tried], dtype=np.float64)
        all_P = np.array([len(row) for row in found.tried], dtype=np.float64)
        value = float(good_P.sum() / all_P.sum()) if all_P.sum() else None
        per_step = sum(len(passage.text) for passage in found.texts) / steps
        measures = {"accepted": value, "tokens_per_step": per_step}
        says = f"real decoding: {self.entry.method}, {self.drafted} tokens a draft"
        found.stages.append(Stage("decoding", says, value, measures, [], int(all_P.sum()), (good_P, all_P)))
        self._foretell()

    def _foretell(self) -> None:
        own = self.case.own(self.entry.sampling)
        prompts, texts = [list(each.prompt) for each in own], [list(each.text) for each in own]
        recordings = record_entries(self.case.target, self.parts, [self.entry], prompts, {self.entry.sampling: texts})
        told = predict_entries(recordings, self.parts, [self.entry])[self.entry.label]
        if told is not None:
            self.found.predicted, self.found.predicted_error = told["tokens_per_step"], told["standard_error"]


def gaps(stages: Sequence[Stage], resamples: Resamples) -> list[Gap]:
    """What is lost between stages that follow one another, of those that have a value."""
    known = [stage for stage in stages if stage.value is not None]
    found = []
    for before, after in pairwise(known):
        assert before.value is not None
        assert after.value is not None
        drawn = [_drawn(stage, resamples) for stage in (before, after)]
        span = None
        if drawn[0] is not None and drawn[1] is not None:
            span = interval(drawn[0] - drawn[1], LEVEL)
        found.append(Gap(before, after, before.value - after.value, span))
    return found


def _drawn(stage: Stage, resamples: Resamples) -> Floats | None:
    """Resampled values: of prompts always the same prompts, so that differences of two stages are paired."""
    if stage.sums is None:
        return None
    own = resamples if stage.of == "prompts" else Resamples(len(stage.sums[0]), seed=1)
    ratios_RG = own.ratios(stage.sums[0][:, None], stage.sums[1][:, None])
    return None if ratios_RG is None else ratios_RG[:, 0]


def _type_of(parts: Parts, target: LanguageModel) -> torch.dtype:
    return target.dtype if parts.drafter is None else parts.drafter.dtype


def warping(sampling: Sampling) -> str:
    """A way of sampling, for people."""
    words = "temperature 0, the best token alone" if sampling.greedy else f"temperature {sampling.temperature:g}"
    if sampling.top_k:
        words += f", top-k {sampling.top_k}"
    return words + (f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else "")

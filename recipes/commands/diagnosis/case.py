"""An evaluation as a diagnosis sees it: its prompts with real answers, and the target's own answers to them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ....data.conversations import Conversation, Turn
from ....data.prompts import stop_ids
from ....decode.engine import Limits
from ....decode.evaluation.diagnose.agreement import Passage
from ....decode.evaluation.measure import Entry
from ....decode.evaluation.replay.recording import sample_texts
from ....train.parallel.interrupts import StopSignals
from ...assemble.evaluation import LoadedPair, open_recipe, prompts_of
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import Advance
from ..evaluation.watch import stoppable_bar

STOPPED = "diagnose: stopped by signal {}"


@dataclass(frozen=True)
class Question:
    """A prompt of the evaluation."""

    name: str
    ids: list[int]
    conversation: Conversation | None
    """With the first real answer; None where the source has none."""


@dataclass
class Case:
    """An evaluation, opened."""

    recipe: EvaluateRecipe
    opened: LoadedPair
    questions: list[Question]
    limits: Limits
    signals: StopSignals
    own: dict[Any, list[Passage]] = field(default_factory=dict)
    """The target's own answers, by sampling."""

    def bar(self, title: str, unit: str = "prompts") -> AbstractContextManager[Advance]:
        """Progress that ends once a signal has come."""
        return stoppable_bar(title, unit, self.signals, STOPPED)

    def own_answers(self, entry: Entry) -> list[Passage]:
        """The target's own answers, plainly decoded."""
        if entry.sampling not in self.own:
            prompts = [question.ids for question in self.questions]
            with self.bar("decoding the target's own answers") as advance:
                texts = sample_texts(
                    self.opened.target, prompts, self.limits, entry.sampling, seed=self.recipe.seed, progress=advance
                )
            self.own[entry.sampling] = [Passage(*pair) for pair in zip(prompts, texts, strict=True)]
        return self.own[entry.sampling]


def open_case(recipe: EvaluateRecipe, signals: StopSignals) -> Case:
    """Load the models and prompts of an evaluation."""
    opened = open_recipe(recipe)
    questions = []
    for prompt, ids in prompts_of(recipe, opened.tokenizer):
        answer = prompt.references[0] if prompt.references else None
        turns = None if answer is None else (*prompt.turns, Turn("assistant", answer))
        whole = None if turns is None else Conversation(prompt.id, turns)
        questions.append(Question(prompt.id, list(ids), whole))
    return Case(recipe, opened, questions, Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer)), signals)

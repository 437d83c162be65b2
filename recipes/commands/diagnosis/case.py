"""An evaluation as a diagnosis sees it: its prompts with real answers, and the target's own answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ....data.conversations import Conversation, Turn
from ....data.prompts import load_prompts, stop_ids
from ....decode.engine import Limits
from ....decode.evaluation.diagnose.agreement import Passage
from ....decode.evaluation.measure import Entry
from ....decode.evaluation.replay.recording import sample_texts
from ....train.parallel.interrupts import Interrupted, StopSignals
from ...assemble.evaluation import LoadedPair, open_recipe
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import Advance, bar


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

    def stop_if_asked(self) -> None:
        """Raises Interrupted once a signal has come."""
        if self.signals.received is not None:
            raise Interrupted(self.signals.received, f"diagnose: stopped by signal {self.signals.received}")

    @contextmanager
    def bar(self, title: str, unit: str = "prompts") -> Iterator[Advance]:
        """Progress of known work, which ends once a signal has come."""
        with bar(title, unit) as advance:

            def watched(done: int, total: int, note: str = "") -> None:
                advance(done, total, note)
                self.stop_if_asked()

            yield watched

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
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    prompts = load_prompts(
        recipe.prompts, recipe.template, opened.tokenizer, recipe.limit, recipe.max_prompt_tokens, **where
    )
    questions = []
    for prompt, ids in prompts:
        answer = prompt.references[0] if prompt.references else None
        turns = None if answer is None else (*prompt.turns, Turn("assistant", answer))
        whole = None if turns is None else Conversation(prompt.id, turns)
        questions.append(Question(prompt.id, list(ids), whole))
    return Case(recipe, opened, questions, Limits(recipe.max_new_tokens, stop_ids(opened.tokenizer)), signals)

"""An evaluation as a diagnosis sees it: its prompts with real answers, and the target's own answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ....data.conversations import Conversation, Turn
from ....data.prompts import load_prompts, stop_ids
from ....data.rendering.render import render
from ....data.rendering.templates import Template
from ....decode.engine import Limits
from ....decode.evaluation.diagnose.agreement import Passage, Resamples
from ....decode.evaluation.replay.recording import sample_texts
from ....decode.models.base import LanguageModel
from ....decode.warpers import Sampling
from ....train.parallel.interrupts import Interrupted, StopSignals
from ...assemble.evaluation import LoadedPair
from ...schema.evaluation import EvaluateRecipe
from ...session.terminal import Advance, bar


@dataclass(frozen=True)
class Question:
    """A prompt of the evaluation."""

    name: str
    category: str
    ids: list[int]
    conversation: Conversation | None
    """With the first real answer; None where the source has none."""


@dataclass
class Case:
    """An evaluation, opened, and the target's own answers to its prompts."""

    recipe: EvaluateRecipe
    opened: LoadedPair
    questions: list[Question]
    signals: StopSignals = field(default_factory=StopSignals)
    _own: dict[Sampling, list[list[int]]] = field(default_factory=dict)

    def stop_if_asked(self) -> None:
        """Raises Interrupted once a signal has come."""
        if self.signals.received is not None:
            raise Interrupted(self.signals.received, f"diagnose: stopped by signal {self.signals.received}")

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Advance]:
        """Progress of known work, which ends once a signal has come."""
        with bar(title, unit) as advance:

            def watched(done: int, total: int, note: str = "") -> None:
                advance(done, total, note)
                self.stop_if_asked()

            yield watched

    @property
    def target(self) -> LanguageModel:
        """The evaluation's."""
        return self.opened.target

    @cached_property
    def limits(self) -> Limits:
        """Of every answer."""
        return Limits(self.recipe.max_new_tokens, stop_ids(self.opened.tokenizer))

    @cached_property
    def resamples(self) -> Resamples:
        """Of the prompts."""
        return Resamples(len(self.questions))

    def own(self, sampling: Sampling) -> list[Passage]:
        """The target's own answers, plainly decoded."""
        prompts = [question.ids for question in self.questions]
        if sampling not in self._own:
            with self.bar("decoding the target's own answers", "prompts") as advance:
                self._own[sampling] = sample_texts(
                    self.target, prompts, self.limits, sampling, seed=self.recipe.seed, progress=advance
                )
        return [Passage(prompt, text) for prompt, text in zip(prompts, self._own[sampling], strict=True)]

    def corpus(self, template: Template) -> list[Passage]:
        """The real answers, as a template writes them; an empty text where there is none."""
        passages = []
        for question in self.questions:
            if question.conversation is None:
                passages.append(Passage(question.ids, []))
                continue
            rendered = render(question.conversation, template, self.opened.tokenizer)
            start, end = rendered.spans[-1]
            ids = rendered.ids.tolist()
            passages.append(Passage(ids[:start], ids[start : min(end, start + self.recipe.max_new_tokens)]))
        return passages


def questions_of(recipe: EvaluateRecipe, tokenizer: Any) -> list[Question]:
    """The prompts of an evaluation. Raises ValueError as `load_prompts` does."""
    where: dict[str, Any] = {"path": recipe.prompts_path, "groups": recipe.groups or None}
    found = load_prompts(recipe.prompts, recipe.template, tokenizer, recipe.limit, recipe.max_prompt_tokens, **where)
    questions = []
    for prompt, ids in found:
        answer = prompt.references[0] if prompt.references else None
        turns = None if answer is None else (*prompt.turns, Turn("assistant", answer))
        whole = None if turns is None else Conversation(prompt.id, turns)
        questions.append(Question(prompt.id, prompt.category, list(ids), whole))
    return questions

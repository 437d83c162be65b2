"""Rendering of conversations with a tokenizer's own chat template, with the token ids of `apply_chat_template`.

The span of an answer begins after its rendered prompt and includes the end-of-turn token. Templates that rewrite
earlier turns, for example to remove reasoning, produce one document per answer. Shape suffixes: T tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checkpoints.storage.chat_templates import render_chat
from ...checkpoints.storage.messages import shared_length
from ..conversations import Conversation, Turn
from .encoding import first_token, special_strings
from .layout import Rendered
from .templates import Template, check_calls, in_parts

_THOUGHT = "</think>"


@dataclass(slots=True)
class _Draft:
    """Unfinished document, with its text, character spans of answers, token ids and character offsets of tokens."""

    text: str
    answers: list[tuple[int, int]]
    ids: list[int]
    places: list[tuple[int, int]]
    first: int
    last: int

    def finished(self, conversation: Conversation, limit: int) -> Rendered:
        starts, ends = np.array(self.places, dtype=np.int64).reshape(-1, 2).T
        # A span contains all tokens that overlap the answer.
        spans = [(int((ends <= start).sum()), int((starts < end).sum())) for start, end in self.answers]
        spans = [(start, min(end, limit)) for start, end in spans if start < min(end, limit)]
        cut = max(0, len(self.ids) - limit) if spans else 0
        ids = np.array(self.ids[:limit], dtype=np.int32)
        return Rendered(ids, spans, conversation, self.first, self.last, answer_cut=cut)


def shown_turns(conversation: Conversation, first: int, last: int) -> list[Turn]:
    """Return the system turn, if any, and the turns of the exchanges `first` to `last`."""
    system, turns = len(conversation.turns) % 2, conversation.turns
    return [*turns[:system], *turns[system + 2 * first : system + 2 * last + 2]]


def without_thought(answer: str) -> str:
    """Remove the reasoning (up to `</think>`) from an answer."""
    return answer.rpartition("</think>")[2].strip()


class ChatLayout:
    """Renderer that uses a tokenizer's own chat template."""

    def __init__(self, template: Template, tokenizer: Any) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._special = special_strings(tokenizer)
        self._checked = set[str]()

    def is_needed(self, conversation: Conversation) -> bool:
        """Check if a conversation requires `apply_chat_template` instead of the constant template texts."""
        return bool(self.template.jinja) or any(
            token in turn.text for turn in conversation.turns for token in self._special
        )

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Tokenize turns as the prompt of the next answer. Raises ValueError if the template cannot render them."""
        if not turns or turns[-1].role != "user":
            raise ValueError(f"expected turns that end with user, found {', '.join(turn.role for turn in turns)}")
        text = self._render(turns, prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def ids(self, conversation: Conversation, first: int, last: int) -> list[int]:
        """Return the token ids of `apply_chat_template` for the exchanges `first` to `last`."""
        text = self._render(shown_turns(conversation, first, last), False, conversation.tools)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def documents(self, conversation: Conversation, limit: int) -> Iterator[Rendered]:
        """Yield documents of at most `limit` tokens. A document has no spans if its answer does not fit.

        Raises:
            ValueError: The template cannot render the conversation, or omits an answer or its end-of-turn token.
        """
        draft: _Draft | None = None
        for number in range(len(conversation.turns) // 2):
            first = 0 if draft is None else draft.first
            new = self._draft(conversation, first, number)
            if draft is not None:
                learned = draft.text[: draft.answers[-1][1]]
                if new.text.startswith(learned) and len(new.ids) <= limit:
                    new.answers = draft.answers + new.answers
                else:
                    yield draft.finished(conversation, limit)
            if len(new.ids) > limit and first < number:  # a document without the history has more room
                new = self._draft(conversation, number, number)
            draft = new
        if draft is not None:
            yield draft.finished(conversation, limit)

    def _draft(self, conversation: Conversation, first: int, last: int) -> _Draft:
        if conversation.tools and conversation.tools not in self._checked:
            check_calls(self.tokenizer, self.template, conversation.tools)
            self._checked.add(conversation.tools)
        text, answer = self._exchange(shown_turns(conversation, first, last), conversation.tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _Draft(text, [answer], encoded.input_ids, encoded.offset_mapping, first, last)

    def _exchange(self, turns: Sequence[Turn], tools: str) -> tuple[str, tuple[int, int]]:
        """Render turns that end with an answer. Return the text and the span of the answer and its end of turn.

        The span includes white space that the template adds before the answer, because the model must generate it.
        It excludes other text that the template adds, such as an empty reasoning block, unless the answer contains
        reasoning.
        """
        prompt, whole = (self._render(turns[: len(turns) - cut], bool(cut), tools) for cut in (1, 0))
        answer = turns[-1].text
        begin = len(prompt) if whole.startswith(prompt) else shared_length(prompt, whole)
        for text in (answer, answer.strip(), without_thought(answer)):
            if text and (position := whole.find(text, begin)) >= 0:
                break
        else:
            raise ValueError(f"the chat template does not render the answer {answer[:80]!r}")
        lead, suffix = whole[begin:position], whole[position + len(text) :]
        if (end := first_token(suffix, self.tokenizer)[1]) < 0:
            raise ValueError(f"answers end with {suffix!r}, not a special token: use another template, such as chatml")
        if whole.startswith(prompt) and (not lead.strip() or _THOUGHT in answer):
            position = begin
        elif lead.endswith(" "):  # the space is tokenized with the answer
            position -= 1
        return whole, (position, len(whole) - len(suffix) + end)

    def _render(self, turns: Sequence[Turn], prompt: bool, tools: str = "") -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        if messages[0]["role"] == "system" and self.template.system is None:
            system, question, *rest = messages
            messages = [question | {"content": f"{system['content']}\n\n{question['content']}"}, *rest]
        messages = in_parts(messages) if self.template.parts else messages
        tool_list = json.loads(tools) if tools else None
        return render_chat(self.tokenizer, messages, prompt=prompt, tools=tool_list, options=self.template.options)

"""Rendered documents, and tokenization of the constant texts of chat templates around the messages of a conversation.

Shape suffixes: T tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..conversations import Conversation, Turn
from .encoding import After, PieceEncoder, special_strings
from .templates import Template, fill_tokens, with_tools

_REMEMBERED_SYSTEMS = 1 << 10
_SPLITS_TRIED = 4
NO_IDS = np.empty(0, dtype=np.int32)
_PROBES = ("a", " a", "\na", "1", ".", "é", "中", "")  # messages that could merge with the template text before them


@dataclass(slots=True)
class Parts:
    """Conversation split into system prompt, questions and answers."""

    conversation: Conversation
    system: str | None
    questions: list[str]
    answers: list[str]  # a prompt has one answer fewer than questions; plain text is one answer without a question


@dataclass(slots=True)
class Rendered:
    """Document with token `ids`, int32 [T], and `spans` [start, end) of the answers with their end of turn.

    It contains the exchanges `first` to `last` of `conversation`. If a single exchange is too long, `question_cut`
    tokens are removed from the start of the question and `answer_cut` tokens from the end of the answer.
    """

    ids: np.ndarray
    spans: list[tuple[int, int]]
    conversation: Conversation
    first: int = 0
    last: int = 0
    question_cut: int = 0
    answer_cut: int = 0

    def exchanges(self) -> list[int]:
        """Return the index of the exchange that each supervised span belongs to."""
        answers = [turn for turn in self.conversation.turns if turn.role == "assistant"]
        learned = [number for number in range(self.first, self.last + 1) if answers[number].is_learned]
        return learned[len(learned) - len(self.spans) :]

    def trainable(self) -> np.ndarray:
        """Return the loss mask of the tokens, bool [T]."""
        flags = np.zeros(len(self.ids), dtype=bool)
        for start, end in self.spans:
            flags[start:end] = True
        return flags


@dataclass(frozen=True, slots=True)
class _Lead:
    """Template text before a message, as token ids and a `tail` that is tokenized together with the message.

    `after` is the kind of text before the tail.
    """

    ids: np.ndarray  # int32
    tail: str
    after: After


class Layout:
    """Chat template whose constant texts are tokenized in advance."""

    def __init__(self, template: Template, encoder: PieceEncoder) -> None:
        template = fill_tokens(template, encoder.tokenizer)
        self.template, self.encoder = template, encoder
        specials = sorted(special_strings(encoder.tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self.bos = _array([] if template.writes_bos else encoder.bos)
        self._leads = lru_cache(_REMEMBERED_SYSTEMS)(self._first_lead)  # many conversations have the same system prompt
        self.start = self._leads(None, "")
        self.behind_question, rest = self._head(template.middle)
        self.answer = self._constant(rest)
        self.behind_answer, rest = self._head(template.end)
        closing = self._special.fullmatch(rest)
        assert closing is not None, f"template {template.name} must end an answer with one special token"
        self.end = _array(encoder.template(closing[0]))
        self.after = _array(encoder.template(template.after, closing[0]))
        self.closing = np.concatenate([self.end, self.after])
        self.next = self._next(closing[0])

    def pieces(self, batch: Sequence[Parts]) -> tuple[list[str], list[After]]:
        """Return all texts to tokenize for a batch of conversations, and the kind of text that precedes each one."""
        texts: list[str] = []
        after: list[After] = []
        for parts in batch:
            lead = self.first_lead(parts)
            for number, question in enumerate(parts.questions):
                texts.append(lead.tail + question + self.behind_question)
                after.append(lead.after)
                lead = self.next
                if number < len(parts.answers):
                    texts.append(parts.answers[number] + self.behind_answer)
                    after.append(self.answer.after)
            if not parts.questions:  # bare text
                texts.append(parts.answers[0] + self.behind_answer)
                after.append(self.start.after)
        return texts, after

    def parts(self, conversation: Conversation, *, ends_with: str) -> Parts:
        """Split a conversation into system prompt, questions and answers, and check the order of its turns."""
        turns = conversation.turns
        if [turn.role for turn in turns] == ["assistant"] == [ends_with] and self.template.name == "plain":
            return Parts(conversation, None, [], [turns[0].text])
        check_turns(conversation, ends_with=ends_with)
        system, questions, answers = self.template.messages(turns)
        if system is not None and self.template.system is None:
            questions[0] = f"{system}\n\n{questions[0]}"
            system = None
        return Parts(conversation, system, questions, answers)

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Tokenize turns as the prompt of the next answer."""
        parts = self.parts(Conversation("prompt", tuple(turns)), ends_with="user")
        ids, starts = self.encoder.encode(*self.pieces([parts]))
        encoded = iter([ids[starts[i] : starts[i + 1]] for i in range(len(starts) - 1)])
        pieces: list[Any] = [self.bos, self.first_lead(parts).ids]
        for number in range(len(parts.questions)):
            pieces += [self.next.ids if number else NO_IDS, next(encoded), self.answer.ids]
            if number < len(parts.answers):
                pieces += [next(encoded), self.closing]
        return list(np.concatenate(pieces).tolist())

    def first_lead(self, parts: Parts) -> _Lead:
        """Return the template text before the first question, including the tools and the system prompt."""
        return self._leads(parts.system, parts.conversation.tools)

    def _first_lead(self, system: str | None, tools: str) -> _Lead:
        template = with_tools(self.template, self.encoder.tokenizer, tools) if tools else self.template
        if system is None:
            return self._split_long(self.lead(template.start))
        assert template.system is not None
        before, suffix = template.system
        lead = self.lead(before)
        match = self._special.search(suffix)
        if match is None:  # tokenized together with the question
            return self._split_long(_Lead(lead.ids, lead.tail + system + suffix, lead.after))
        ids = _array(self.encoder.one(lead.tail + system + suffix[: match.start()], lead.after))
        rest = self.lead(suffix[match.start() :])
        return _Lead(np.concatenate([lead.ids, ids, rest.ids]), rest.tail, rest.after)

    def lead_tokens(self, parts: Parts) -> int:
        """Return the number of template tokens that are encoded at the start of the first question."""
        lead = self.first_lead(parts)
        return len(self.encoder.one(lead.tail.rstrip(" "), lead.after))

    def first_ids(self, parts: Parts, number: int, question_ids: np.ndarray) -> np.ndarray:
        """Return the ids of question `number` as the first in a document, given its ids after another exchange."""
        lead = self.first_lead(parts)
        if (lead.tail, lead.after) == (self.next.tail, self.next.after):
            return question_ids
        return self.encoder.encode([lead.tail + parts.questions[number] + self.behind_question], [lead.after])[0]

    def _head(self, text: str) -> tuple[str, str]:
        """Split the template text after a message at its first special token, or before a trailing space."""
        if (match := self._special.search(text)) is not None:
            return text[: match.start()], text[match.start() :]
        return (text[:-1], " ") if text.endswith(" ") else (text, "")

    def _constant(self, rest: str) -> _Lead:
        """Tokenize the template text between question and answer (`rest`), separately from the answer."""
        if rest in ("", " "):
            return _Lead(NO_IDS, "", After.SPACE if rest else After.TEXT)
        space = rest.endswith(" ")
        rest = rest.removesuffix(" ")
        last = [match.end() for match in self._special.finditer(rest)][-1]
        after = After.SPACE if space else After.SPECIAL if last == len(rest) else After.TEXT
        return _Lead(_array(self.encoder.template(rest)), "", after)

    def lead(self, text: str, after: After = After.NOTHING, before: str = "") -> _Lead:
        """Tokenize the template text before a message, after text of kind `after` that ends with the token `before`."""
        ends = [match.end() for match in self._special.finditer(text)]
        if not ends:
            return _Lead(NO_IDS, text, after)
        return _Lead(_array(self.encoder.template(text[: ends[-1]], before)), text[ends[-1] :], After.SPECIAL)

    def _split_long(self, lead: _Lead) -> _Lead:
        """Tokenize the beginning of a long `lead.tail` in advance, if this does not change the ids of messages."""
        for match in list(re.finditer(r"(?<=\S) (?=\S)", lead.tail))[: -_SPLITS_TRIED - 1 : -1]:
            head, tail = lead.tail[: match.start()], lead.tail[match.end() :]
            ids = self.encoder.one(head, lead.after)
            shorter = _Lead(np.concatenate([lead.ids, _array(ids)]), tail, After.SPACE)
            if self._probe(lead) == [ids + rest for rest in self._probe(shorter)]:
                return shorter
        return lead

    def _next(self, closing: str) -> _Lead:
        """Tokenize the text between `template.after` and a later question. `closing` is the end-of-turn token."""
        after = self.template.after
        lead = self.lead(after + self.template.next, After.SPECIAL, closing)
        if np.array_equal(lead.ids[: len(self.after)], self.after) and (len(lead.ids) or not after):
            lead = _Lead(lead.ids[len(self.after) :], lead.tail, lead.after)
        else:
            lead = self.lead(self.template.next, After.TEXT)
        as_first = _Lead(lead.ids, lead.tail, self.start.after)
        return as_first if lead.tail == self.start.tail and self._probe(lead) == self._probe(as_first) else lead

    def _probe(self, lead: _Lead) -> list[list[int]]:
        return [self.encoder.one(lead.tail + probe, lead.after) for probe in _PROBES]


def check_turns(conversation: Conversation, *, ends_with: str) -> None:
    """Raise ValueError unless the turns are [system], user, assistant, … and the last role is `ends_with`."""
    roles = [turn.role for turn in conversation.turns]
    roles = roles[roles[:1] == ["system"] :]
    if roles != [("user", "assistant")[i % 2] for i in range(len(roles))] or not roles or roles[-1] != ends_with:
        found_roles = ", ".join(turn.role for turn in conversation.turns[:8]) or "no turns"
        bare = " (bare text requires `template: plain`)" if roles == ["assistant"] else ""
        expected = f"expected [system], user, assistant, … ending with {ends_with}"
        raise ValueError(f"{conversation.id}: {expected}, found {found_roles}{bare}")


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)

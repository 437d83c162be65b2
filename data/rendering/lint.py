"""Checks rendered documents against the conversations they came from: is what is trained what the assistant said?

Nothing here trusts the renderer. `Linter.check` splits a document at special tokens and at the ends of its trained
stretches, decodes the pieces, and compares them with what the conversation and the template's texts say must stand
there. `Linter.count` looks at ids and spans alone, for a summary that costs nothing. Letters: T tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from ..conversations import Conversation
from .decoding import UNKNOWN, PieceDecoder, alike, special_flags, vocabulary_size
from .lint_report import (
    ANSWER_CUT,
    ANSWER_DIFFERS,
    BROKEN_SPANS,
    CONTEXT_DIFFERS,
    EMPTY_ANSWER,
    EVERYTHING_TRAINED,
    FAULTS,
    MISSING_END,
    NOTHING_TRAINED,
    OUTSIDE_VOCABULARY,
    QUESTION_CUT,
    SPECIAL_TOKEN_INSIDE,
    SPECIAL_TOKEN_TEXT,
    USER_TEXT_TRAINED,
    LintReport,
    colour,
)
from .render import Rendered
from .templates import Template

__all__ = ["LintReport", "Linter", "colour"]

_START, _END = -1, -2  # marks where a trained stretch begins and ends, beside ids of special tokens
_TOKEN = 16  # characters that a token may hold
_TAIL = 4  # characters before an answer by which its beginning is looked for


@dataclass(slots=True)
class _Sketch:
    """A document as texts with marks between them: the ids of special tokens, `_START` and `_END` of what is trained.
    `texts` has one more than `marks`. The first question is in texts[question[0]], behind question[1] characters. `cut`
    is what an answer that was cut may read."""

    marks: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=lambda: [""])
    question: tuple[int, int] = (0, 0)
    cut: tuple[str, ...] = ()

    def add(self, *parts: str | int) -> None:
        for part in parts:
            if isinstance(part, str):
                self.texts[-1] += part
            else:
                self.marks.append(part)
                self.texts.append("")

    def specials(self) -> Counter[int]:
        return Counter(mark for mark in self.marks if mark >= 0)

    def stretches(self) -> list[str]:
        """Texts without special tokens, by turns not trained and trained."""
        found = [""]
        for text, mark in zip_longest(self.texts, self.marks, fillvalue=0):
            found[-1] += str(text)
            if mark in (_START, _END):
                found.append("")
        return found


class Linter:
    """Checks documents that were rendered with this tokenizer and template, and keeps a `report` of them.

    Up to three documents are kept to be shown: see `examples`. A conversation's last turn may be trained alone, as
    `last_turn_only` has it; which of the two a whole corpus is, is not asked.

    Raises:
        ValueError: the template needs {eos} or {bos}, or an end of turn, that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.report = LintReport()
        self._tokenizer, self._template = tokenizer, template
        self._decoder = PieceDecoder(tokenizer)
        self._vocabulary = vocabulary_size(tokenizer)
        self._special = special_flags(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        strings = sorted((token.content for i, token in added if self._special[i]), key=len, reverse=True)
        self._strings = re.compile("(" + ("|".join(map(re.escape, strings)) or r"(?!)") + ")")
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and not template.writes_bos and list(tokenizer("a").input_ids)[:1] == [bos]
        self._bos: list[str | int] = [bos] if adds_bos else []
        self._space = " " if template.middle.endswith(" ") else ""  # which belongs to the answer
        self._middle = self._constant(template.middle.removesuffix(" "))
        self._end, self._after = self._constant(template.end), self._constant(template.after)
        if not self._end or not isinstance(self._end[-1], int):
            raise ValueError(f"template {template.name} ends an answer with {template.end!r}, not with a special token")
        self._closing: int = self._end[-1]
        self._start, self._next = self._constant(template.start), self._constant(template.next)
        self._system = [self._constant(text) for text in template.system or ()]
        self._least_context = min(2, len(self._bos + self._start + self._middle))
        self._first: Rendered | None = None
        self._typical: Rendered | None = None
        self._found: Rendered | None = None
        self._found_rank = -1

    def check(self, document: Rendered) -> tuple[str, ...]:
        """All findings of one document, from `FAULTS` and `NOTICES`; its pieces are decoded.

        A document with nothing or everything trained, broken spans or unknown ids is not looked into further.
        """
        findings = self._at_a_glance(document)
        if not findings:
            actual = self._sketch_of(document)
            findings = self._bare_faults(document, actual) if _is_bare(document) else self._faults(document, actual)
            if any(self._strings.search(text) for text in actual.texts):
                findings.append(SPECIAL_TOKEN_TEXT)
            if not _is_bare(document) and not all(text.strip() for text in actual.stretches()[1::2]):
                findings.append(EMPTY_ANSWER)
        return self._record(document, findings)

    def count(self, document: Rendered) -> tuple[str, ...]:
        """The findings of one document that its ids and spans show by themselves: microseconds, nothing is decoded.

        What needs the text is not found: user text trained, an answer or context that differs, special tokens in a
        question, special-token text, empty answers.
        """
        findings = self._at_a_glance(document)
        if not findings:
            positions = self._special.take(document.ids).nonzero()[0].tolist()
            uncut, missing, inside = len(document.spans) - document.answer_cut, False, False
            for number, (start, end) in enumerate(document.spans):
                closed = number < uncut and document.ids[end - 1] == self._closing
                missing |= number < uncut and not closed
                inside |= bisect_left(positions, end - closed) > bisect_left(positions, start)
            if missing and not _is_bare(document):
                findings.append(MISSING_END)
            if inside:
                findings.append(SPECIAL_TOKEN_INSIDE)
        return self._record(document, findings)

    def examples(self) -> list[Rendered]:
        """Up to three of the documents seen: the first, one of about average length, one with a finding if any has.

        A fault goes before a notice, the first before later ones; the same documents give the same examples.
        """
        kept = (self._first, self._typical, self._found)
        return [document for document in kept if document is not None]

    def _record(self, document: Rendered, findings: list[str]) -> tuple[str, ...]:
        if document.answer_cut:
            findings.append(ANSWER_CUT)
        if document.question_cut:
            findings.append(QUESTION_CUT)
        self.report.add(document, findings)
        rank = 0 if not findings else 2 if any(name in FAULTS for name in findings) else 1
        if self._first is None:
            self._first = document
        elif rank > self._found_rank:
            displaced, self._found, self._found_rank = self._found, document, rank
            if displaced is not None:
                self._offer(displaced)
        else:
            self._offer(document)
        return tuple(findings)

    def _offer(self, document: Rendered) -> None:
        mean = self.report.tokens / self.report.documents
        if self._typical is None or abs(len(document.ids) - mean) < abs(len(self._typical.ids) - mean):
            self._typical = document

    def _at_a_glance(self, document: Rendered) -> list[str]:
        ids, spans, length = document.ids, document.spans, len(document.ids)
        bare = _is_bare(document)
        if length and (ids.min() < 0 or ids.max() >= self._vocabulary):
            return [OUTSIDE_VOCABULARY]
        trained = before = 0
        for start, end in spans:
            if not before <= start < end <= length or start == before > 0:
                # of one token of bare text, nothing is left to train on
                return [] if bare and length == start == end == 1 else [BROKEN_SPANS]
            trained += end - start
            before = end
        if not trained:
            return [NOTHING_TRAINED]
        if not bare and length - trained < self._least_context:
            return [EVERYTHING_TRAINED]
        return []

    def _faults(self, document: Rendered, actual: _Sketch) -> list[str]:
        """Of a conversation's document."""
        turns = document.conversation.turns
        left = (len(turns) - (turns[0].role == "system")) // 2 - document.first
        spans = len(document.spans)
        if not 0 <= document.first < document.first + left:
            return [ANSWER_DIFFERS]
        expected = self._expected(document, min(spans, left))
        if self._same(document, actual, expected):
            return []
        # of a conversation's last turn alone the earlier exchanges are context
        if spans == 1 < left and self._same(document, actual, self._expected(document, left, last_only=True)):
            return []
        return self._named(document, actual, left)

    def _bare_faults(self, document: Rendered, actual: _Sketch) -> list[str]:
        """Of a part of a bare text: it may begin and end anywhere, but is trained whole."""
        faults = []
        ids = document.ids
        said = self._decoder.decode([ids[~self._special[ids]].tolist()])[0].strip(UNKNOWN)
        text = document.conversation.turns[0].text
        text = text.strip() if self._template.strips[1] else text
        known = said in text or said.removeprefix(" ") in text
        whole = len(document.spans) == 1 and document.spans[0][0] <= 1 and document.spans[0][1] == len(ids)
        if not whole or not (known or _squashed(said) in _squashed(self._decoder.round_trip(text))):
            faults.append(ANSWER_DIFFERS)
        right = self._bos + [self._closing] * int(ids[-1] == self._closing)
        if ids[self._special[ids]].tolist() != right:
            faults.append(SPECIAL_TOKEN_INSIDE)
        return faults

    def _sketch_of(self, document: Rendered) -> _Sketch:
        """What stands in a document."""
        ids = document.ids.tolist()
        positions = np.flatnonzero(self._special[document.ids]).tolist()
        marks = [(position, 2, ids[position], position + 1) for position in positions]
        for start, end in document.spans:
            marks += [(start, 1, _START, start), (end, 0, _END, end)]
        marks.sort()
        pieces, at = [], 0
        for position, _, _, following in marks:
            pieces.append(ids[at:position])
            at = following
        pieces.append(ids[at:])
        sketch = _Sketch([mark for _, _, mark, _ in marks], self._decoder.decode(pieces))
        if document.answer_cut or document.question_cut:
            for number, text in enumerate(sketch.texts):
                if UNKNOWN in text:
                    sketch.texts[number] = self._decoder.careful(pieces[number])
        if document.answer_cut:
            answer = sketch.texts[sketch.marks.index(_START) + 1]
            sketch.cut = (answer, answer.removesuffix(UNKNOWN))
        return sketch

    def _expected(self, document: Rendered, exchanges: int, *, last_only: bool = False) -> _Sketch:
        """What must stand in a document of so many exchanges."""
        template, conversation = self._template, document.conversation
        system, questions, answers = _messages(conversation, template)
        sketch = _Sketch()
        sketch.add(*self._bos)
        if system is None or not self._system:
            sketch.add(*self._start)
        else:
            sketch.add(*self._system[0], system, *self._system[1])
        sketch.question = (len(sketch.marks), len(sketch.texts[-1].rstrip()))
        last = document.first + exchanges - 1
        for number in range(document.first, last + 1):
            if number > document.first:
                sketch.add(*self._after, *self._next)
            if number == 0 and system is not None and not self._system:
                sketch.add(system + "\n\n")
            sketch.add(questions[number], *self._middle)
            trained = number == last or not last_only
            answer = [self._space + answers[number], *(self._end[:-1] if document.answer_cut else self._end)]
            sketch.add(*([_START, *answer, _END] if trained else answer))
        if not document.answer_cut:
            sketch.add(*self._after)
        return sketch

    def _same(self, document: Rendered, actual: _Sketch, expected: _Sketch) -> bool:
        """Whether the marks are equal and each text is right; what follows the last answer may be cut."""
        end = len(expected.marks) - expected.marks[::-1].index(_END)
        marks, rest = actual.marks, len(actual.marks)
        if rest < end or marks[:end] != expected.marks[:end] or marks[end:] != expected.marks[end:rest]:
            return False
        trained = False
        for number, (said, text) in enumerate(zip(actual.texts, expected.texts, strict=False)):
            trained = trained or marks[number - 1 : number] == [_START]
            if trained:
                right = self._right_answer(said, text, actual.cut)
            elif number == rest:
                right = text.strip().startswith(said.strip())
            else:
                cut = document.question_cut and number == expected.question[0]
                right = self._right_context(said, text, expected.question[1] if cut else None)
            if not right:
                return False
            trained = trained and marks[number] != _END
        return True

    def _right_answer(self, said: str, text: str, cut: tuple[str, ...]) -> bool:
        # some tokenizers put a space of their own before a text, or leave out a space before nothing
        if said in (text, f" {text}") or (text == " " and not said):
            return True
        if any(f" {text}".startswith((reading, f" {reading}")) for reading in cut):
            return True
        return any(self._right_if_lossy(reading, text, None, bool(cut)) for reading in cut or (said,))

    def _right_context(self, said: str, text: str, head: int | None) -> bool:
        """Whether white space around it apart `said` is `text`; less a part behind `head` characters if not None."""
        if said.strip() == text.strip():
            return True
        if head is not None and _less_a_part(said.strip(), text.strip(), head - (len(text) - len(text.lstrip()))):
            return True
        return self._right_if_lossy(said, text, head, False)

    def _right_if_lossy(self, said: str, text: str, head: int | None, beginning: bool) -> bool:
        """For tokenizers that change texts (normal forms, unknown characters): is it `text` as these say it?"""
        heard, whole, said = _squashed(self._decoder.round_trip(text)), _squashed(text), _squashed(said)
        if heard == whole:
            return False
        if beginning:
            return heard.startswith(said)
        return said == heard or (head is not None and _less_a_part(said, heard, None))

    def _named(self, document: Rendered, actual: _Sketch, left: int) -> list[str]:
        """The names of what is wrong."""
        whole, spans = self._characters(document)
        exchanges, stretches = self._found_in(document, whole, left)
        last_only = len(document.spans) == 1 < exchanges == left
        expected = self._expected(document, exchanges or min(len(document.spans), left), last_only=last_only)
        found: set[str] = set()
        if exchanges:
            said, right = np.zeros(len(whole), dtype=bool), np.zeros(len(whole), dtype=bool)
            for flags, bounds in ((said, spans), (right, stretches[-1:] if last_only else stretches)):
                for start, end in bounds:
                    flags[start:end] = True
            found |= {USER_TEXT_TRAINED} if (said & ~right).any() else set()
            found |= {ANSWER_DIFFERS} if (right & ~said).any() else set()
        wrong = self._wrong_answers(actual, expected)
        if exchanges and not found:  # white space alone may be too much or too little
            found |= {USER_TEXT_TRAINED if len(said) > len(text) else ANSWER_DIFFERS for said, text in wrong}
        elif not exchanges:
            found.add(ANSWER_DIFFERS if wrong else CONTEXT_DIFFERS)
        # where the token that ends an answer ends a question too (T5), one at an answer's beginning is the question's
        borrowed = sum(end - start > 1 and document.ids[start] == self._closing for start, end in document.spans)
        if borrowed:
            found.add(USER_TEXT_TRAINED)
        closed = (document.ids[document.trainable()] == self._closing).sum() - borrowed
        if closed < expected.marks.count(_END) - document.answer_cut:
            found.add(MISSING_END)
        if actual.specials() - expected.specials():
            found.add(SPECIAL_TOKEN_INSIDE)
        elif (expected.specials() - actual.specials()).keys() - {self._closing, *self._after} or not found:
            found.add(CONTEXT_DIFFERS)
        return [name for name in FAULTS if name in found]

    def _wrong_answers(self, actual: _Sketch, expected: _Sketch) -> list[tuple[str, str]]:
        """What is trained and what should be, where they differ."""
        pairs = zip_longest(actual.stretches()[1::2], expected.stretches()[1::2], fillvalue="")
        return [(said, text) for said, text in pairs if not self._right_answer(said, text, actual.cut)]

    def _characters(self, document: Rendered) -> tuple[str, list[tuple[int, int]]]:
        """The text without special tokens and white space, and where its trained stretches lie."""
        special = self._special[document.ids]
        plain = document.ids[~special].tolist()
        before = np.concatenate([[0], np.cumsum(~special)]).tolist()
        bounds = [before[place] for span in document.spans for place in span]
        texts = [self._decoder.careful(ids) for ids in [plain, *(plain[:bound] for bound in bounds)]]
        whole, *beginnings = map(_squashed, texts)
        places = [alike(whole, beginning) for beginning in beginnings]
        return whole, list(zip(places[::2], places[1::2], strict=True))

    def _found_in(self, document: Rendered, whole: str, left: int) -> tuple[int, list[tuple[int, int]]]:
        """How many exchanges' words `whole` holds, in order and complete, and where the answers lie; 0 if other words
        stand there. Special tokens and spans play no part."""
        if document.question_cut or document.answer_cut:
            context, answer, *rest = self._expected_words(document, 1)
            places = [len(context)]
            if document.question_cut:
                places = [found.end() for found in re.finditer(re.escape(context[-_TAIL:]), whole)]
            for place in places:
                end = place + len(answer)
                if _less_a_part(whole[:place], context, None) and (
                    answer.startswith(whole[place:].rstrip(UNKNOWN))
                    or (whole[place:end], whole[end:]) == (answer, "".join(rest))
                ):
                    return 1, [(place, min(end, len(whole)))]
            return 0, []
        words = self._expected_words(document, left)
        stretches, at = [], 0
        for number in range(left):
            start = at + len(words[2 * number])
            at = start + len(words[2 * number + 1])
            stretches.append((start, at))
            if at >= len(whole) - len(words[-1]):
                text = "".join(words[: 2 * number + 2])
                return (number + 1, stretches) if whole in (text, text + words[-1]) else (0, [])
        return 0, []

    def _expected_words(self, document: Rendered, exchanges: int) -> list[str]:
        return [_squashed(self._decoder.round_trip(text)) for text in self._expected(document, exchanges).stretches()]

    def _constant(self, text: str) -> list[str | int]:
        """A template's text with its special tokens as ids.

        Raises:
            ValueError: it needs a token that the tokenizer lacks.
        """
        for name, token in (("{eos}", self._tokenizer.eos_token), ("{bos}", self._tokenizer.bos_token)):
            if name in text and token is None:
                raise ValueError(f"template {self._template.name} needs {name}, and this tokenizer has no such token")
            text = text.replace(name, token or "")
        parts = self._strings.split(text)
        ids = [self._tokenizer.convert_tokens_to_ids(part) if i % 2 else part for i, part in enumerate(parts)]
        return [part for part in ids if part != ""]


def _is_bare(document: Rendered) -> bool:
    return len(document.conversation.turns) == 1


def _messages(conversation: Conversation, template: Template) -> tuple[str | None, list[str], list[str]]:
    """System text, questions and answers as the template writes them."""
    turns = conversation.turns
    system = turns[0].text if turns[0].role == "system" else None
    rest = turns[1:] if system is not None else turns
    questions, answers = [turn.text for turn in rest[::2]], [turn.text for turn in rest[1::2]]
    if template.strips[0]:
        system = system.strip() if system is not None else None
        questions = [text.strip() for text in questions]
    if template.strips[1]:
        answers = [text.strip() for text in answers]
    return system, questions, answers


def _less_a_part(said: str, text: str, head: int | None) -> bool:
    """Whether `said` is `text` with a stretch left out behind its first `head` characters, or anywhere with None.

    Half a character at the place is let pass, and the rest of a token that begins in the head.
    """
    same = alike(said, text)
    if head is None:
        return text.endswith(said[same:].lstrip(UNKNOWN))
    rests = (said[place:].lstrip(UNKNOWN + " \n") for place in range(head, min(same, head + _TOKEN) + 1))
    return any(text.endswith(rest) for rest in rests)


def _squashed(text: str) -> str:
    return "".join(text.split())

"""Checks rendered documents against the conversations they came from: is what is trained what the assistant said?

`Linter.check` decodes the pieces between special tokens and compares them with conversation and template;
`Linter.count` looks at ids and spans alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any

import numpy as np

from ..conversations import Conversation
from .render import Rendered
from .templates import Template

NOTHING_TRAINED = "nothing trained"
EVERYTHING_TRAINED = "everything trained"  # but for a first token, which nothing predicts; right for bare text alone
USER_TEXT_TRAINED = "user text trained"  # or the template's, or the system's: whatever the assistant did not say
ANSWER_DIFFERS = "answer differs"  # an answer is not trained whole, or is not the conversation's
MISSING_END = "missing end of turn"  # the end of an answer that was not cut is not there, or not trained
SPECIAL_TOKEN_INSIDE = "special token inside a message"
OUTSIDE_VOCABULARY = "token outside the vocabulary"
CONTEXT_DIFFERS = "context differs"  # around right answers stands something else than questions and template
BROKEN_SPANS = "broken spans"  # empty, overlapping, out of order or outside the document
FAULTS = (
    NOTHING_TRAINED, EVERYTHING_TRAINED, USER_TEXT_TRAINED, ANSWER_DIFFERS, MISSING_END, SPECIAL_TOKEN_INSIDE,
    OUTSIDE_VOCABULARY, CONTEXT_DIFFERS, BROKEN_SPANS,
)  # fmt: skip
ANSWER_CUT = "answer cut"
QUESTION_CUT = "question cut"
SPECIAL_TOKEN_TEXT = "special-token text"  # such as "</s>" in what a user typed, which stays text
EMPTY_ANSWER = "empty answer"
NOTICES = (ANSWER_CUT, QUESTION_CUT, SPECIAL_TOKEN_TEXT, EMPTY_ANSWER)

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_EXAMPLE_IDS = 5
_START, _END = -1, -2  # marks where a trained stretch begins and ends, beside ids of special tokens
_TOKEN = 16  # characters that a token may hold


@dataclass(slots=True)
class LintReport:
    """What was found in documents. `clean` of them have no fault; notices are counted, and are no faults.

    `examples` holds the ids of the first five conversations of each finding.
    """

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    clean: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, document: Rendered, findings: Sequence[str]) -> None:
        """Count one document with its findings."""
        self.documents += 1
        self.tokens += len(document.ids)
        if BROKEN_SPANS in findings:
            self.trained_tokens += int(document.trainable().sum())
        else:
            self.trained_tokens += sum([end - start for start, end in document.spans])
        self.clean += not (findings and any(name in FAULTS for name in findings))
        for name in findings:
            self.findings[name] += 1
            ids = self.examples.setdefault(name, [])
            if len(ids) < _EXAMPLE_IDS and document.conversation.id not in ids:
                ids.append(document.conversation.id)

    def failures(self, min_clean_share: float, min_trained_share: float) -> list[str]:
        """What lies below its floor, a message each with both numbers; [] where all is well."""
        messages = []
        for title, name, floor, part, whole in (
            ("documents without faults", "min_clean_share", min_clean_share, self.clean, self.documents),
            ("trained tokens", "min_trained_share", min_trained_share, self.trained_tokens, self.tokens),
        ):
            if not 0.0 <= floor <= 1.0:
                raise ValueError(f"{name} is {floor}, expected a share between 0 and 1")
            if part < floor * whole or (not whole and floor > 0):
                share = f"{100 * part / whole:.6g} % ({part:,} of {whole:,})" if whole else "there are no documents"
                messages.append(f"{title}: {share}, the floor is {100 * floor:.6g} %")
        return messages

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        counts: dict[str, Any] = {
            "documents": self.documents,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "trained_share": self.trained_tokens / self.tokens if self.tokens else None,
            "clean": self.clean,
            "clean_share": self.clean / self.documents if self.documents else None,
        }
        for kind, known in (("faults", FAULTS), ("notices", NOTICES)):
            found = [name for name in known if self.findings[name]]
            counts[kind] = {n: {"documents": self.findings[n], "examples": list(self.examples[n])} for n in found}
        return counts

    def summary(self) -> str:
        """One line: `120 documents, 90,112 tokens, 61.0 % trained; 2 documents with faults (2 answer differs); …`."""
        share = f"{100 * self.trained_tokens / self.tokens:.1f} %" if self.tokens else "none"
        faulty = self.documents - self.clean
        parts = [f"{self.documents:,} documents, {self.tokens:,} tokens, {share} trained"]
        parts.append(f"{faulty:,} documents with faults{self._listed(FAULTS)}" if faulty else "no faults")
        if any(self.findings[name] for name in NOTICES):
            parts.append(f"notices{self._listed(NOTICES)}")
        return "; ".join(parts)

    def _listed(self, names: Iterable[str]) -> str:
        return " (" + ", ".join(f"{self.findings[n]:,} {n}" for n in names if self.findings[n]) + ")"


@dataclass(slots=True)
class _Sketch:
    """A document as texts with marks between them (ids of special tokens, `_START` and `_END` of what is trained). The
    first question is in texts[question[0]], behind question[1] characters; `cut`: what a cut answer may read."""

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

    A conversation's last turn may be trained alone, as `last_turn_only` has it.

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
        self._first: list[Rendered] = []
        self._found: dict[bool, Rendered] = {}

    def check(self, document: Rendered) -> tuple[str, ...]:
        """All findings of one document, from `FAULTS` and `NOTICES`; its pieces are decoded."""
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
        """The findings of one document that its ids and spans show by themselves; nothing is decoded."""
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
        """Up to three of the documents seen: the first with a fault, the first with a notice, the first ones."""
        shown = [self._found[is_fault] for is_fault in (True, False) if is_fault in self._found]
        return list({id(document): document for document in (*shown, *self._first)}.values())[:3]

    def _record(self, document: Rendered, findings: list[str]) -> tuple[str, ...]:
        findings += [ANSWER_CUT] * document.answer_cut + [QUESTION_CUT] * document.question_cut
        self.report.add(document, findings)
        if len(self._first) < 3:
            self._first.append(document)
        if findings:
            self._found.setdefault(any(name in FAULTS for name in findings), document)
        return tuple(findings)

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
        return self._named(document, actual, expected)

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

    def _named(self, document: Rendered, actual: _Sketch, expected: _Sketch) -> list[str]:
        """The names of what is wrong."""
        found: set[str] = set()
        for said, text in zip_longest(actual.stretches()[1::2], expected.stretches()[1::2], fillvalue=""):
            if not self._right_answer(said, text, actual.cut):
                found.add(USER_TEXT_TRAINED if len(said) > len(text) and text.strip() in said else ANSWER_DIFFERS)
        uncut = document.spans[: len(document.spans) - document.answer_cut]
        if any(document.ids[end - 1] != self._closing for _, end in uncut):
            found.add(MISSING_END)
        if actual.specials() - expected.specials():
            found.add(SPECIAL_TOKEN_INSIDE)
        return [name for name in FAULTS if name in found] or [CONTEXT_DIFFERS]

    def _constant(self, text: str) -> list[str | int]:
        """A template's text with its special tokens as ids."""
        for name, token in (("{eos}", self._tokenizer.eos_token), ("{bos}", self._tokenizer.bos_token)):
            if name in text and token is None:
                raise ValueError(f"template {self._template.name} needs {name}, and this tokenizer has no such token")
            text = text.replace(name, token or "")
        parts = self._strings.split(text)
        ids = [self._tokenizer.convert_tokens_to_ids(part) if i % 2 else part for i, part in enumerate(parts)]
        return [part for part in ids if part != ""]


class PieceDecoder:
    """Decodes pieces from the middle of documents, special tokens and all."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # behind another token, because a decoder takes the space off the start of a text
        self._anchor = list(tokenizer("a", add_special_tokens=False).input_ids)
        self._anchor_text = self._plain([self._anchor])[0]

    def decode(self, pieces: list[list[int]]) -> list[str]:
        """The text of each piece."""
        return [text.removeprefix(self._anchor_text) for text in self._plain([self._anchor + ids for ids in pieces])]

    def careful(self, ids: list[int]) -> str:
        """The text of a piece that may begin or end inside a character.

        A decoder gives up all of a row of byte tokens ("<0xE4>") for one broken character; here only that is lost.
        """
        tokens = zip(map(str, self._tokenizer.convert_ids_to_tokens(ids)), ids, strict=True)
        texts = []
        for is_byte, group in groupby(tokens, lambda pair: _BYTE.fullmatch(pair[0]) is not None):
            members = list(group)
            if is_byte:
                texts.append(bytes(int(token[3:5], 16) for token, _ in members).decode("utf-8", "replace"))
            else:
                texts += self.decode([[number for _, number in members]])
        return "".join(texts)

    def round_trip(self, text: str) -> str:
        """A text as the tokenizer gives it back, which may change texts (normal forms, unknown words)."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return self.decode([list(encoded.input_ids)])[0]

    def _plain(self, pieces: list[list[int]]) -> list[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return list(backend.decode_batch(pieces, skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [str(self._tokenizer.decode(ids, **options)) for ids in pieces]


def vocabulary_size(tokenizer: Any) -> int:
    """How many ids there are; with gaps between added tokens, more than there are tokens."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def special_flags(tokenizer: Any) -> np.ndarray:
    """Flags bool [vocabulary]: special tokens that no text is encoded to (as unknown characters are to `unk`)."""
    flags = np.zeros(vocabulary_size(tokenizer), dtype=bool)
    flags[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        flags[unknown] = False
    return flags


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

    Half a character there is let pass, and the rest of a token that begins in the head.
    """
    same = next((i for i, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), min(len(said), len(text)))
    if head is None:
        return text.endswith(said[same:].lstrip(UNKNOWN))
    rests = (said[start:].lstrip(UNKNOWN + " \n") for start in range(head, min(same, head + _TOKEN) + 1))
    return any(text.endswith(rest) for rest in rests)


def _squashed(text: str) -> str:
    return "".join(text.split())

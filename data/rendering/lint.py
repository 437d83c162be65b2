"""Check that the supervised tokens of rendered documents are exactly the answers of the assistant.

Each supervised span is decoded and compared with the answer and its end of turn. The tokens before the span must
contain the question.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .chat import ChatLayout, without_thought
from .layout import Rendered
from .templates import OWN, Template, fill_tokens

# none, empty, overlapping, out of order or outside the document, or token ids outside the vocabulary
BROKEN_SPANS = "broken spans"
ANSWER_DIFFERS = "answer differs"  # the supervised tokens are not the complete answers with their ends of turn
TEMPLATE_DIFFERS = "template differs"  # the ids are not those of the tokenizer's apply_chat_template
QUESTION_DIFFERS = "question differs"  # the tokens before an answer do not contain its question

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class LintReport:
    """Counts of documents, tokens and faults. `clean` is the number of documents without faults."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    clean: int = 0
    dropped_thoughts: int = 0
    """Number of answers whose reasoning the chat template removes."""
    faults: Counter[str] = field(default_factory=Counter)

    def failures(self, min_clean_share: float, min_trained_share: float) -> list[str]:
        """Return a message if the share of clean documents or of supervised tokens is below its minimum."""
        messages = []
        for title, floor, part, whole in (
            ("documents without faults", min_clean_share, self.clean, self.documents),
            ("supervised tokens", min_trained_share, self.trained_tokens, self.tokens),
        ):
            if part < floor * whole or (not whole and floor > 0):
                share = f"{100 * part / whole:.6g} % ({part:,} of {whole:,})" if whole else "no documents"
                messages.append(f"{title}: {share}, expected at least {100 * floor:.6g} %")
        return messages

    def summary(self) -> str:
        """Format the counts: `120 documents, 90,112 tokens, 61.0 % supervised; 2 documents with faults (…)`."""
        share = f"{100 * self.trained_tokens / self.tokens:.1f} %" if self.tokens else "none"
        listed = ", ".join(f"{count:,} {name}" for name, count in self.faults.items())
        faults = f"{self.faults.total():,} documents with faults ({listed})" if listed else "no faults"
        removed = self.dropped_thoughts
        dropped = f"; the template removes the reasoning of {removed:,} answers" if removed else ""
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {share} supervised; {faults}{dropped}"


class Linter:
    """Checker of rendered documents. `report` contains the counts.

    Raises:
        ValueError: The template requires {eos}, {bos} or another special token that the tokenizer does not have.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.report = LintReport()
        self._chat = ChatLayout(template, tokenizer) if template.name == OWN else None
        self._template = template if template.jinja else fill_tokens(template, tokenizer)
        self._decoder = PieceDecoder(tokenizer)
        self._special = special_flags(tokenizer)
        # An answer ends with one special token, which other template text may precede.
        names = [token.content for number, token in tokenizer.added_tokens_decoder.items() if self._special[number]]
        closing = max((name for name in names if self._template.end.endswith(name)), key=len, default="")
        self._end_text = self._template.end.removesuffix(closing)
        self._end_id = tokenizer.convert_tokens_to_ids(closing)
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and not template.writes_bos and list(tokenizer("a").input_ids)[:1] == [bos]
        self._bos = [bos] if adds_bos else []
        self._first: list[Rendered] = []

    def check(self, document: Rendered) -> str | None:
        """Check a document. Return the name of its fault, or None if it has none."""
        fault = self._find_fault(document)
        self.report.documents += 1
        self.report.tokens += len(document.ids)
        self.report.trained_tokens += int(document.trainable().sum())
        self.report.clean += fault is None
        if fault is not None:
            if not self.report.faults:
                self._first.insert(0, document)
            self.report.faults[fault] += 1
        elif len(self._first) < 3:
            self._first.append(document)
        return fault

    def examples(self) -> list[Rendered]:
        """Return up to three documents: the first one with a fault, followed by the first ones without faults."""
        return self._first[:3]

    def _find_fault(self, document: Rendered) -> str | None:
        ids, edges = document.ids, [edge for span in document.spans for edge in span]
        ascend = bool(edges) and edges[0] >= 0 and edges[-1] <= len(ids) and all(a < b for a, b in pairwise(edges))
        if not ascend or ids.min() < 0 or ids.max() >= len(self._special):
            return BROKEN_SPANS
        if len(document.conversation.turns) == 1:
            return self._find_bare_text_fault(document)
        if self._chat is not None and (fault := self._find_chat_fault(self._chat, document)) is not None:
            return fault
        if self._chat is not None and self._chat.is_needed(document.conversation):
            return None
        _, questions, answers = self._template.messages(document.conversation.turns)
        numbers = document.exchanges()
        return self._find_exchange_fault(document, [questions[n] for n in numbers], [answers[n] for n in numbers])

    def _find_chat_fault(self, chat: ChatLayout, document: Rendered) -> str | None:
        """Compare ids with `apply_chat_template`, and supervised spans with the answers. Return a fault or None."""
        first, last, ids = document.first, document.last, document.ids.tolist()
        if not document.question_cut and ids != chat.ids(document.conversation, first, last)[: len(ids)]:
            return TEMPLATE_DIFFERS
        if document.answer_cut:
            return None
        answer_texts = [turn.text for turn in document.conversation.turns if turn.role == "assistant"]
        answers = [answer_texts[number] for number in document.exchanges()]
        for answer, text in zip(answers, self._decoder.decode([ids[a:b] for a, b in document.spans]), strict=True):
            whole, answer = _squash(answer).removeprefix("<think>"), without_thought(answer)
            self.report.dropped_thoughts += whole != _squash(answer) and whole not in _squash(text)
            if not any(_squash(each) in _squash(text) for each in (answer, self._decoder.round_trip(answer))):
                return ANSWER_DIFFERS
        return None

    def _find_exchange_fault(self, document: Rendered, questions: list[str], answers: list[str]) -> str | None:
        """Compare supervised spans with `answers`, and the tokens before with `questions`. Return a fault or None."""
        ids, spans = document.ids.tolist(), document.spans
        if len(answers) != len(spans):
            return ANSWER_DIFFERS
        bodies, gaps = [], []
        for number, (start, end) in enumerate(spans):
            is_cut = document.answer_cut > 0 and number == len(spans) - 1
            if not is_cut and ids[end - 1] != self._end_id:
                return ANSWER_DIFFERS
            bodies.append(ids[start : end if is_cut else end - 1])
            gaps.append(ids[spans[number - 1][1] if number else 0 : start])
        if self._special[[token for body in bodies for token in body]].any():
            return ANSWER_DIFFERS
        texts = self._decoder.decode([*bodies, *gaps])
        space = " " if self._template.middle.endswith(" ") else ""  # part of the answer
        for number, answer in enumerate(answers):
            is_cut = document.answer_cut > 0 and number == len(spans) - 1
            if not self._matches(texts[number], space + answer + self._end_text, is_cut):
                return ANSWER_DIFFERS
        for number, question in enumerate(questions):
            before, is_cut = _squash(texts[len(spans) + number]), number == 0 and document.question_cut > 0
            if not is_cut and not any(_squash(q) in before for q in (question, self._decoder.round_trip(question))):
                return QUESTION_DIFFERS
        return None

    def _find_bare_text_fault(self, document: Rendered) -> str | None:
        ids, (start, end) = document.ids.tolist(), document.spans[0]
        body = ids[start : end - (ids[end - 1] == self._end_id)]
        is_whole = len(document.spans) == 1 and end == len(ids) and ids[:start] == self._bos
        decoded, text = self._decoder.decode([body])[0].strip(UNKNOWN), document.conversation.turns[0].text
        is_part = any(_squash(decoded) in _squash(whole) for whole in (text, self._decoder.round_trip(text)))
        return None if is_whole and is_part and not self._special[body].any() else ANSWER_DIFFERS

    def _matches(self, decoded: str, text: str, is_prefix: bool) -> bool:
        """Check if decoded text equals `text`, or the result of encoding and decoding `text`.

        A leading space is ignored. With `is_prefix`, the decoded text may be a prefix.
        """
        if decoded.removeprefix(" ") == text.removeprefix(" "):
            return True
        heard = self._decoder.round_trip(text)
        if is_prefix:
            return any(_squash(whole).startswith(_squash(decoded).rstrip(UNKNOWN)) for whole in (text, heard))
        is_changed = _squash(heard) != _squash(text)
        is_equal = decoded.removeprefix(" ") == heard.removeprefix(" ")
        return is_equal or (is_changed and _squash(decoded) == _squash(heard))


class PieceDecoder:
    """Decoder for token sequences from the middle of a document. Special tokens are kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Pieces are decoded after another token, because decoders remove a leading space.
        self._anchor = list(tokenizer("a", add_special_tokens=False).input_ids)
        self._anchor_text = self._plain([self._anchor])[0]

    def decode(self, pieces: list[list[int]]) -> list[str]:
        """Decode each piece to text."""
        return [text.removeprefix(self._anchor_text) for text in self._plain([self._anchor + ids for ids in pieces])]

    def round_trip(self, text: str) -> str:
        """Encode and decode a text, which Unicode normalization and unknown tokens can change."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return self.decode([list(encoded.input_ids)])[0]

    def _plain(self, pieces: list[list[int]]) -> list[str]:
        if (backend := getattr(self._tokenizer, "backend_tokenizer", None)) is not None:
            return list(backend.decode_batch(pieces, skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [str(self._tokenizer.decode(ids, **options)) for ids in pieces]


def vocabulary_size(tokenizer: Any) -> int:
    """Return the largest token id plus one. It exceeds the number of tokens if some ids are unused."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def special_flags(tokenizer: Any) -> np.ndarray:
    """Return a mask of special tokens, bool [V]. It excludes `unk`, which can also encode ordinary text."""
    flags = np.zeros(vocabulary_size(tokenizer), dtype=bool)
    flags[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        flags[unknown] = False
    return flags


def _squash(text: str) -> str:
    return "".join(text.split())

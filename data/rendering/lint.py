"""Check of rendered documents against their conversations: the trained tokens must be the assistant's answers.

Documents are decoded and compared with conversation and template. A stretch is what lies between two borders of what is
trained; it is compared by its special tokens and by the text between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from .render import Rendered
from .templates import Template, filled, with_tools

NOTHING_TRAINED = "nothing trained"
ANSWER_DIFFERS = "answer differs"  # the trained tokens are not the answers, each whole with its end of turn
CONTEXT_DIFFERS = "context differs"  # the other tokens are not questions and template
OUTSIDE_VOCABULARY = "token outside the vocabulary"
BROKEN_SPANS = "broken spans"  # empty, overlapping, out of order or outside the document
FAULTS = (NOTHING_TRAINED, ANSWER_DIFFERS, CONTEXT_DIFFERS, OUTSIDE_VOCABULARY, BROKEN_SPANS)
ANSWER_CUT = "answer cut"
QUESTION_CUT = "question cut"
SPECIAL_TOKEN_TEXT = "special-token text"  # "</s>" in a message, which stays text
EMPTY_ANSWER = "empty answer"
NOTICES = (ANSWER_CUT, QUESTION_CUT, SPECIAL_TOKEN_TEXT, EMPTY_ANSWER)

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_MAX_TOKEN = 16  # characters

Stretch = list[str | int]
"""Texts and special tokens by turns: text, id, text, id … text."""


@dataclass(slots=True)
class LintReport:
    """Counts of documents and findings; `clean` documents have no fault, but may have notices."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_cut: int = 0
    clean: int = 0
    findings: Counter[str] = field(default_factory=Counter)

    def add(self, document: Rendered, findings: Sequence[str]) -> None:
        """Count a document with its findings."""
        self.documents += 1
        self.tokens += len(document.ids)
        self.trained_tokens += int(document.trainable().sum())
        self.tokens_cut += document.answer_cut + document.question_cut
        self.clean += not set(FAULTS).intersection(findings)
        self.findings.update(findings)

    def failures(self, min_clean_share: float, min_trained_share: float) -> list[str]:
        """Return a message for each share below its floor."""
        messages = []
        for title, floor, part, whole in (
            ("documents without faults", min_clean_share, self.clean, self.documents),
            ("trained tokens", min_trained_share, self.trained_tokens, self.tokens),
        ):
            if part < floor * whole or (not whole and floor > 0):
                share = f"{100 * part / whole:.6g} % ({part:,} of {whole:,})" if whole else "there are no documents"
                messages.append(f"{title}: {share}, the floor is {100 * floor:.6g} %")
        return messages

    def summary(self) -> str:
        """Return one line: `120 documents, 90,112 tokens, 61.0 % trained; 2 documents with faults (…); …`."""
        share = f"{100 * self.trained_tokens / self.tokens:.1f} %" if self.tokens else "none"
        faulty = self.documents - self.clean
        parts = [f"{self.documents:,} documents, {self.tokens:,} tokens, {share} trained"]
        parts.append(f"{faulty:,} documents with faults{self._listed(FAULTS)}" if faulty else "no faults")
        if any(self.findings[name] for name in NOTICES):
            parts.append(f"notices{self._listed(NOTICES)}")
        if self.tokens_cut:
            parts.append(f"{self.tokens_cut:,} tokens cut off")
        return "; ".join(parts)

    def _listed(self, names: Sequence[str]) -> str:
        return " (" + ", ".join(f"{self.findings[n]:,} {n}" for n in names if self.findings[n]) + ")"


class Linter:
    """Checker of documents rendered with a tokenizer and a template, which keeps a `report` of them.

    Raises:
        ValueError: The template needs {eos} or {bos}, or a special token, that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.report = LintReport()
        self._tokenizer, self._template = tokenizer, filled(template, tokenizer)
        self._decoder = PieceDecoder(tokenizer)
        self._special = special_flags(tokenizer).tolist()
        known = [token.content for number, token in tokenizer.added_tokens_decoder.items() if self._special[number]]
        known.sort(key=len, reverse=True)
        self._strings = re.compile("(" + ("|".join(map(re.escape, known)) or r"(?!)") + ")")
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and not template.writes_bos and list(tokenizer("a").input_ids)[:1] == [bos]
        self._bos: Stretch = [bos] if adds_bos else []
        self._with_tools = lru_cache(1 << 10)(lambda tools: with_tools(self._template, tokenizer, tools))
        self._first: list[Rendered] = []
        self._found: dict[bool, Rendered] = {}

    def check(self, document: Rendered) -> tuple[str, ...]:
        """Return all findings of a document, from `FAULTS` and `NOTICES`."""
        turns, fault = document.conversation.turns, self._broken(document)
        if fault is None and len(turns) == 1:
            fault = self._bare_fault(document)
        elif fault is None:
            fault, exchanges = self._fault(document)
            lead = turns[0].role == "system"
            system = turns[:lead] if self._template.system is not None or not document.first else ()
            turns = (*system, *turns[lead + 2 * document.first :][: 2 * exchanges])
        noticed = {
            ANSWER_CUT: document.answer_cut > 0,
            QUESTION_CUT: document.question_cut > 0,
            SPECIAL_TOKEN_TEXT: any(self._strings.search(turn.text) for turn in turns),
            EMPTY_ANSWER: any(turn.role == "assistant" and not turn.text.strip() for turn in turns),
        }
        findings = ([] if fault is None else [fault]) + [name for name, present in noticed.items() if present]
        self.report.add(document, findings)
        if len(self._first) < 3:
            self._first.append(document)
        if findings:
            self._found.setdefault(fault is not None, document)
        return tuple(findings)

    def examples(self) -> list[Rendered]:
        """Return up to three documents: the first with a fault, the first with a notice, the first ones."""
        shown = [self._found[is_fault] for is_fault in (True, False) if is_fault in self._found]
        return list({id(document): document for document in (*shown, *self._first)}.values())[:3]

    def _broken(self, document: Rendered) -> str | None:
        """Return the fault of ids and spans by themselves."""
        if len(document.ids) and (document.ids.min() < 0 or document.ids.max() >= len(self._special)):
            return OUTSIDE_VOCABULARY
        edges = [edge for span in document.spans for edge in span]
        if not edges:
            return NOTHING_TRAINED
        ascend = all(one < other for one, other in pairwise(edges))
        return None if ascend and edges[0] >= 0 and edges[-1] <= len(document.ids) else BROKEN_SPANS

    def _fault(self, document: Rendered) -> tuple[str | None, int]:
        """Return the fault of a conversation's document, and the number of its exchanges."""
        turns, spans = document.conversation.turns, len(document.spans)
        left = (len(turns) - (turns[0].role == "system")) // 2 - document.first
        if spans > left:
            return ANSWER_DIFFERS, spans
        found = self._read(document)
        fault = self._difference(document, found, self._expected(document, spans, last_only=False))
        if fault is not None and spans == 1 < left:  # with `last_turn_only` the earlier exchanges are context
            last = self._difference(document, found, self._expected(document, left, last_only=True))
            return (None, left) if last is None else (fault, spans)
        return fault, spans

    def _bare_fault(self, document: Rendered) -> str | None:
        """Return the fault of a part of a bare text, which is trained whole."""
        before, *trained = self._read(document)
        found, text = _text(trained[0]).strip(UNKNOWN), document.conversation.turns[0].text
        is_part = any(_squash(found) in _squash(whole) for whole in (text, self._decoder.round_trip(text)))
        ends: tuple[Stretch, ...] = ([], [self._constant(self._template.end)[-1], ""])
        is_whole = len(document.spans) == 1 and trained[0][1:] in ends and trained[1] == [""]
        return None if is_part and is_whole and before == _merge(self._bos) else ANSWER_DIFFERS

    def _read(self, document: Rendered) -> list[Stretch]:
        """Decode a document to stretches that are, by turns, not trained and trained."""
        ids = document.ids.tolist()
        stretches: list[list[Any]] = []
        for start, end in pairwise([0, *(edge for span in document.spans for edge in span), len(ids)]):
            stretch: list[Any] = [[]]
            for number in ids[start:end]:
                if self._special[number]:
                    stretch += [number, []]
                else:
                    stretch[-1].append(number)
            stretches.append(stretch)
        texts = iter(self._decoder.decode([piece for stretch in stretches for piece in stretch[::2]]))
        return [[part if i % 2 else next(texts) for i, part in enumerate(stretch)] for stretch in stretches]

    def _expected(self, document: Rendered, exchanges: int, *, last_only: bool) -> tuple[list[Stretch], int]:
        """Return the stretches of a document of this many exchanges, and the characters before its first question."""
        tools = document.conversation.tools
        template = self._with_tools(tools) if tools else self._template
        system, questions, answers = template.messages(document.conversation.turns)
        context, stretches = list(self._bos), list[Stretch]()
        if system is None or template.system is None:
            context += self._constant(template.start)
        else:
            context += [*self._constant(template.system[0]), system, *self._constant(template.system[1])]
        space = " " if template.middle.endswith(" ") else ""  # which is part of the answer
        last, head = document.first + exchanges - 1, len(_squash(_text(_merge(context))))
        for number in range(document.first, last + 1):
            if number > document.first:
                context += self._constant(template.after + template.next)
            if number == 0 and system is not None and template.system is None:
                context.append(system + "\n\n")
            context += [questions[number], *self._constant(template.middle.removesuffix(" "))]
            end = self._constant(template.end)
            answer = [space + answers[number], *(end[:-1] if document.answer_cut else end)]
            if last_only and number < last:
                context += answer
            else:
                stretches += [context, answer]
                context = []
        stretches.append([] if document.answer_cut else self._constant(template.after))
        return list(map(_merge, stretches)), head

    def _difference(self, document: Rendered, found: list[Stretch], expected: tuple[list[Stretch], int]) -> str | None:
        wrong, (stretches, head) = set[bool](), expected
        for index, (stretch, right) in enumerate(zip(found, stretches, strict=True)):
            trained = index % 2 == 1
            # what follows the last answer may be cut
            is_prefix = (index == 1 and document.answer_cut > 0) or index == len(found) - 1
            right = right[: len(stretch)] if is_prefix else right
            cut = head if index == 0 and document.question_cut else None
            same = stretch[1::2] == right[1::2]
            if not same or not self._matches(_text(stretch), _text(right), trained, is_prefix, cut):
                wrong.add(trained)
        return ANSWER_DIFFERS if True in wrong else CONTEXT_DIFFERS if wrong else None

    def _matches(self, found: str, text: str, exact: bool, is_prefix: bool, cut: int | None) -> bool:
        """Compare a text, or what the tokenizer makes of it (normal forms, unknown characters), with a decoded one.

        White space counts only in an `exact` comparison, and there not one space before the text.
        """
        heard = text if _squash(found) == _squash(text) else self._decoder.round_trip(text)
        if exact and found.removeprefix(" ") in (text.removeprefix(" "), heard.removeprefix(" ")):
            return True
        found, text, heard = map(_squash, (found, text, heard))
        if is_prefix:
            return any(whole.startswith(found.rstrip(UNKNOWN)) for whole in (text, heard))
        if cut is not None:
            return any(_lacks_a_part(found, whole, cut) for whole in (text, heard))
        return found == heard != text if exact else found in (text, heard)

    def _constant(self, text: str) -> Stretch:
        """Return a text of the template with its special tokens as ids."""
        parts = self._strings.split(text)
        ids = [self._tokenizer.convert_tokens_to_ids(part) if i % 2 else part for i, part in enumerate(parts)]
        return [part for part in ids if part != ""]


class PieceDecoder:
    """Decoder of pieces from the middle of documents, with their special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # after another token, because a decoder removes a space at the start of a text
        self._anchor = list(tokenizer("a", add_special_tokens=False).input_ids)
        self._anchor_text = self._plain([self._anchor])[0]

    def decode(self, pieces: list[list[int]]) -> list[str]:
        """Return the text of each piece."""
        return [text.removeprefix(self._anchor_text) for text in self._plain([self._anchor + ids for ids in pieces])]

    def round_trip(self, text: str) -> str:
        """Return a text encoded and decoded, which may change it (normal forms, unknown words)."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return self.decode([list(encoded.input_ids)])[0]

    def _plain(self, pieces: list[list[int]]) -> list[str]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return list(backend.decode_batch(pieces, skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return [str(self._tokenizer.decode(ids, **options)) for ids in pieces]


def vocabulary_size(tokenizer: Any) -> int:
    """Return the number of ids, which is larger than the number of tokens if there are gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def special_flags(tokenizer: Any) -> np.ndarray:
    """Return flags bool [V]: special tokens that no text is encoded to, as unknown characters are to `unk`."""
    flags = np.zeros(vocabulary_size(tokenizer), dtype=bool)
    flags[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        flags[unknown] = False
    return flags


def _lacks_a_part(found: str, whole: str, head: int) -> bool:
    """Return whether `found` is `whole` without a part after its first `head` characters.

    The rest of a token that begins in them may remain, and half a character may be lost.
    """
    same = next((i for i, (a, b) in enumerate(zip(found, whole, strict=False)) if a != b), min(len(found), len(whole)))
    starts = range(min(same, head), min(same, head + _MAX_TOKEN) + 1)
    return any(whole.endswith(found[start:].lstrip(UNKNOWN)) for start in starts)


def _merge(parts: Sequence[str | int]) -> Stretch:
    stretch: list[Any] = [""]
    for part in parts:
        if isinstance(part, str):
            stretch[-1] += part
        else:
            stretch += [part, ""]
    return stretch


def _text(stretch: Stretch) -> str:
    return "".join(map(str, stretch[::2]))


def _squash(text: str) -> str:
    return "".join(text.split())

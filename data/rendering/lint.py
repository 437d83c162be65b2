"""Checks rendered documents against the conversations they came from: is what is trained what the assistant said?

Texts between special tokens are decoded, and compared with conversation and template.
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

from .chat_template import filled, with_tools
from .render import Rendered
from .templates import Template

NOTHING_TRAINED = "nothing trained"
ANSWER_DIFFERS = "answer differs"  # what is trained is not the conversation's answers, each whole with its end of turn
CONTEXT_DIFFERS = "context differs"  # around right answers stands something else than questions and template
OUTSIDE_VOCABULARY = "token outside the vocabulary"
BROKEN_SPANS = "broken spans"  # empty, overlapping, out of order or outside the document
FAULTS = (NOTHING_TRAINED, ANSWER_DIFFERS, CONTEXT_DIFFERS, OUTSIDE_VOCABULARY, BROKEN_SPANS)
ANSWER_CUT = "answer cut"
QUESTION_CUT = "question cut"
SPECIAL_TOKEN_TEXT = "special-token text"  # such as "</s>" in what a user typed, which stays text
EMPTY_ANSWER = "empty answer"
NOTICES = (ANSWER_CUT, QUESTION_CUT, SPECIAL_TOKEN_TEXT, EMPTY_ANSWER)

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_TOKEN = 16  # characters that a token may hold

Stretch = list[Any]
"""What stands between two borders of what is trained: a text, a special token's id, a text, an id … a text."""


@dataclass(slots=True)
class LintReport:
    """What was found in documents. `clean` of them have no fault; notices are counted, and are no faults."""

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_cut: int = 0
    clean: int = 0
    findings: Counter[str] = field(default_factory=Counter)

    def add(self, document: Rendered, findings: Sequence[str]) -> None:
        """Count one document with its findings."""
        self.documents += 1
        self.tokens += len(document.ids)
        self.trained_tokens += int(document.trainable().sum())
        self.tokens_cut += document.answer_cut + document.question_cut
        self.clean += not set(FAULTS).intersection(findings)
        self.findings.update(findings)

    def failures(self, min_clean_share: float, min_trained_share: float) -> list[str]:
        """What lies below its floor, a message each with both numbers; [] where all is well."""
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
        """One line: `120 documents, 90,112 tokens, 61.0 % trained; 2 documents with faults (2 answer differs); …`."""
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
    """Checks documents that were rendered with this tokenizer and template, and keeps a `report` of them.

    A conversation's last turn may be trained alone, as `last_turn_only` has it.

    Raises ValueError: the template needs {eos} or {bos}, or an end of turn, that the tokenizer lacks.
    """

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self.report = LintReport()
        template = filled(template, tokenizer)
        self._tokenizer, self._template = tokenizer, template
        self._decoder = PieceDecoder(tokenizer)
        self._special = special_flags(tokenizer).tolist()
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
        self._next = self._constant(template.next)
        self._openings = lru_cache(maxsize=1 << 10)(self._opening)
        self._system = self._openings("")[1]
        self._first: list[Rendered] = []
        self._found: dict[bool, Rendered] = {}

    def check(self, document: Rendered) -> tuple[str, ...]:
        """All findings of one document, from `FAULTS` and `NOTICES`."""
        turns, fault = document.conversation.turns, self._broken(document)
        if fault is None and len(turns) == 1:
            fault = self._bare_fault(document)
        elif fault is None:
            fault, exchanges = self._fault(document)
            lead = turns[0].role == "system"
            system = turns[:lead] if self._system or not document.first else ()
            turns = (*system, *turns[lead + 2 * document.first :][: 2 * exchanges])
        noticed = {
            ANSWER_CUT: document.answer_cut > 0,
            QUESTION_CUT: document.question_cut > 0,
            SPECIAL_TOKEN_TEXT: any(self._strings.search(turn.text) for turn in turns),
            EMPTY_ANSWER: any(turn.role == "assistant" and not turn.text.strip() for turn in turns),
        }
        findings = ([] if fault is None else [fault]) + [name for name, there in noticed.items() if there]
        self.report.add(document, findings)
        if len(self._first) < 3:
            self._first.append(document)
        if findings:
            self._found.setdefault(fault is not None, document)
        return tuple(findings)

    def examples(self) -> list[Rendered]:
        """Up to three of the documents seen: the first with a fault, the first with a notice, the first ones."""
        shown = [self._found[is_fault] for is_fault in (True, False) if is_fault in self._found]
        return list({id(document): document for document in (*shown, *self._first)}.values())[:3]

    def _broken(self, document: Rendered) -> str | None:
        """What ids and spans show by themselves."""
        if len(document.ids) and (document.ids.min() < 0 or document.ids.max() >= len(self._special)):
            return OUTSIDE_VOCABULARY
        edges = [edge for span in document.spans for edge in span]
        if not edges:
            return NOTHING_TRAINED
        ascend = all(one < other for one, other in pairwise(edges))
        return None if ascend and edges[0] >= 0 and edges[-1] <= len(document.ids) else BROKEN_SPANS

    def _fault(self, document: Rendered) -> tuple[str | None, int]:
        """Of a conversation's document; and how many exchanges are in it."""
        turns, spans = document.conversation.turns, len(document.spans)
        left = (len(turns) - (turns[0].role == "system")) // 2 - document.first
        if spans > left:
            return ANSWER_DIFFERS, spans
        actual = self._read(document)
        fault = self._difference(document, actual, self._expected(document, spans, last_only=False))
        if fault is not None and spans == 1 < left:  # of the last turn alone the earlier exchanges are context
            whole = self._difference(document, actual, self._expected(document, left, last_only=True))
            return (None, left) if whole is None else (fault, spans)
        return fault, spans

    def _bare_fault(self, document: Rendered) -> str | None:
        """Of a part of a bare text: it may begin and end anywhere, but is trained whole."""
        before, *trained = self._read(document)
        said, text = "".join(map(str, trained[0][::2])).strip(UNKNOWN), document.conversation.turns[0].text
        known = any(_squashed(said) in _squashed(whole) for whole in (text, self._decoder.round_trip(text)))
        whole = len(document.spans) == 1 and trained[0][1:] in ([], [self._end[-1], ""]) and trained[1] == [""]
        return None if known and whole and before == _merged(self._bos) else ANSWER_DIFFERS

    def _read(self, document: Rendered) -> list[Stretch]:
        """What stands in a document: by turns not trained and trained."""
        ids = document.ids.tolist()
        stretches: list[Stretch] = []
        for start, end in pairwise([0, *(edge for span in document.spans for edge in span), len(ids)]):
            stretch: Stretch = [[]]
            for number in ids[start:end]:
                if self._special[number]:
                    stretch += [number, []]
                else:
                    stretch[-1].append(number)
            stretches.append(stretch)
        texts = iter(self._decoder.decode([piece for stretch in stretches for piece in stretch[::2]]))
        return [[part if i % 2 else next(texts) for i, part in enumerate(stretch)] for stretch in stretches]

    def _expected(self, document: Rendered, exchanges: int, *, last_only: bool) -> tuple[list[Stretch], int, int]:
        """What must stand in a document of so many exchanges; and where its first question is: in which text of the
        first stretch, behind how many characters."""
        template = self._template
        system, questions, answers = template.messages(document.conversation.turns)
        context: list[str | int] = list(self._bos)
        stretches: list[list[str | int]] = []
        start, before_question = self._openings(document.conversation.tools)
        if system is None or not before_question:
            context += start
        else:
            context += [*before_question[0], system, *before_question[1]]
        end = self._end[:-1] if document.answer_cut else self._end
        last, lead = document.first + exchanges - 1, _merged(context)
        for number in range(document.first, last + 1):
            if number > document.first:
                context += [*self._after, *self._next]
            if number == 0 and system is not None and not self._system:
                context.append(system + "\n\n")
            context += [questions[number], *self._middle]
            answer = [self._space + answers[number], *end]
            if last_only and number < last:
                context += answer
            else:
                stretches += [context, answer]
                context = []
        stretches.append([] if document.answer_cut else self._after)
        return [_merged(parts) for parts in stretches], len(lead) - 1, len(_squashed(lead[-1]))

    def _difference(
        self, document: Rendered, actual: list[Stretch], expected: tuple[list[Stretch], int, int]
    ) -> str | None:
        stretches, question, head = expected
        wrong = []
        for index, (said, right) in enumerate(zip(actual, stretches, strict=True)):
            # what follows the last answer may be cut
            beginning = (index == 1 and document.answer_cut > 0) or index == len(actual) - 1
            if said[1::2] != (right[1 : len(said) : 2] if beginning else right[1::2]):
                wrong.append(index)
                continue
            for place, (one, text) in enumerate(zip(said, right, strict=False)):
                cut = head if document.question_cut and (index, place) == (0, question) else None
                if place % 2 == 0 and not self._is_right(one, text, index % 2 == 1, beginning, cut):
                    wrong.append(index)
        if not wrong:
            return None
        return ANSWER_DIFFERS if any(index % 2 for index in wrong) else CONTEXT_DIFFERS

    def _is_right(self, said: str, text: str, trained: bool, beginning: bool, cut: int | None) -> bool:
        """Whether `said` is `text`, but for one space before it, or in a context any white space around it; or what
        the tokenizer makes of it (normal forms, unknown characters); or its beginning, or all but a stretch behind
        `cut` characters."""
        bare = (lambda one: one.removeprefix(" ")) if trained else str.strip
        again = text if bare(said) == bare(text) else self._decoder.round_trip(text)
        if bare(said) == bare(again):
            return True
        plain, heard, said = _squashed(text), _squashed(again), _squashed(said)
        if beginning:
            return any(whole.startswith(said.rstrip(UNKNOWN)) for whole in (plain, heard))
        if cut is not None:
            return _less_a_part(said, plain, cut) or _less_a_part(said, heard, cut)
        return said == heard != plain

    def _opening(self, tools: str) -> tuple[list[str | int], list[list[str | int]]]:
        """What stands before the first question; and before and behind a system text, where it has a place."""
        template = with_tools(self._template, self._tokenizer, tools) if tools else self._template
        return self._constant(template.start), [self._constant(text) for text in template.system or ()]

    def _constant(self, text: str) -> list[str | int]:
        """A template's text with its special tokens as ids."""
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


def _less_a_part(said: str, text: str, head: int) -> bool:
    """Whether `said` is `text` with a stretch left out behind its first `head` characters and the rest of a token that
    begins in them; half a character there may be lost."""
    same = next((i for i, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), min(len(said), len(text)))
    starts = range(min(same, head), min(same, head + _TOKEN) + 1)
    return any(text.endswith(said[start:].lstrip(UNKNOWN)) for start in starts)


def _merged(parts: Sequence[str | int]) -> Stretch:
    stretch: Stretch = [""]
    for part in parts:
        if isinstance(part, str):
            stretch[-1] += part
        else:
            stretch += [part, ""]
    return stretch


def _squashed(text: str) -> str:
    return "".join(text.split())

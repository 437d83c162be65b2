"""Rendering of conversations to token ids, with the spans that are trained on.

Ids are built turn by turn and not searched in a re-tokenised string, so that labels are exact. Messages are encoded as
plain text: "</s>" or "<|im_end|>" in a message never becomes a special token. Letters: T tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..conversations import Conversation, Turn
from .encoding import After, PieceEncoder, special_strings
from .templates import Template, filled, with_tools

_BATCH_CHARACTERS = 1 << 19  # enough for all cores, and little beside a model
_BATCHES_AHEAD = 3
_THREADS = 2  # the end of one batch keeps a single core busy
_REMEMBERED_SYSTEMS = 1 << 10
_SPLITS_TRIED = 4
_NO_IDS = np.empty(0, dtype=np.int32)
_LEAST_SPACE = 16  # tokens that question and answer need of a block
_PROBES = ("a", " a", "\na", "1", ".", "é", "中", "")  # messages that could join with what stands before them


@dataclass(slots=True)
class Rendered:
    """Document with `ids` int32 [T], and `spans` [start, end) of the answers with their end of turn.

    It contains the exchanges of `conversation` from number `first`. Of one exchange that is too long, the question lost
    `question_cut` tokens at its beginning, and the answer `answer_cut` tokens at its end.
    """

    ids: np.ndarray
    spans: list[tuple[int, int]]
    conversation: Conversation
    first: int = 0
    question_cut: int = 0
    answer_cut: int = 0

    def trainable(self) -> np.ndarray:
        """Return flags bool [T], True inside the spans."""
        flags = np.zeros(len(self.ids), dtype=bool)
        for start, end in self.spans:
            flags[start:end] = True
        return flags


@dataclass(slots=True)
class RenderReport:
    """Counts of conversations and exchanges.

    `conversations == rendered + left_out`, and `exchanges - no_room - context_only` exchanges are trained on.
    """

    conversations: int = 0
    rendered: int = 0
    left_out: int = 0  # no answer of it fits
    documents: int = 0
    split: int = 0  # conversations that became several documents
    exchanges: int = 0
    no_room: int = 0  # exchanges left out: the system text leaves no room for them
    context_only: int = 0  # exchanges not trained on because only the last turn is
    questions_cut: int = 0  # exchanges whose question lost its beginning
    answers_cut: int = 0  # exchanges whose answer lost its end
    question_tokens_cut: int = 0
    answer_tokens_cut: int = 0  # with the ends of turn


def render(conversation: Conversation, template: Template, tokenizer: Any) -> Rendered:
    """Return ids and spans of a whole conversation, of any length."""
    return next(Renderer(template, tokenizer, None)([conversation]))


def prompt_renderer(template: Template, tokenizer: Any) -> Callable[[Sequence[Turn]], list[int]]:
    """Return a function from turns to the ids [T] that `render` puts before the next answer."""
    layout = Layout(template, PieceEncoder(tokenizer))
    return lambda turns: layout.prompt(tuple(turns))


class Renderer:
    """Renderer of conversations, which tokenises ahead in threads.

    A conversation over `max_tokens` is split between exchanges, and each document begins with the system text. Of a
    longer exchange the question loses its beginning, down to half of the room if the answer needs the rest, then the
    answer its end. With `last_turn_only` only the last answer of a conversation is trained on.

    Raises:
        ValueError: Turns are not [system], user, assistant, …, or the tokenizer lacks a special token.
    """

    def __init__(
        self, template: Template, tokenizer: Any, max_tokens: int | None, *, last_turn_only: bool = False
    ) -> None:
        self._layout = Layout(template, PieceEncoder(tokenizer, own=True))
        self._max_tokens = max_tokens
        self._last_turn_only = last_turn_only

    def __call__(self, conversations: Iterable[Conversation], report: RenderReport | None = None) -> Iterator[Rendered]:
        """Yield the documents of conversations in order, and fill the report."""
        report = report if report is not None else RenderReport()
        encode = self._layout.encoder.encode
        waiting: deque[tuple[list[_Parts], Future[tuple[np.ndarray, np.ndarray]]]] = deque()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer") as threads:
            try:
                for batch in _batches(self._layout, conversations):
                    waiting.append((batch, threads.submit(encode, *self._layout.pieces(batch))))
                    if len(waiting) > _BATCHES_AHEAD:
                        yield from self._documents(*waiting.popleft(), report)
                while waiting:
                    yield from self._documents(*waiting.popleft(), report)
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def _documents(
        self, batch: list[_Parts], encoded: Future[tuple[np.ndarray, np.ndarray]], report: RenderReport
    ) -> Iterator[Rendered]:
        """Yield the documents of encoded conversations."""
        ids, starts = encoded.result()
        bounds = starts.tolist()
        piece = 0
        for parts in batch:
            count = len(parts.questions) + len(parts.answers)
            texts = [ids[bounds[i] : bounds[i + 1]] for i in range(piece, piece + count)]
            piece += count
            if parts.questions:
                documents = list(_split(self._layout, parts, texts, self._max_tokens))
            else:
                documents = list(_bare_text(self._layout, parts, texts[0], self._max_tokens))
            report.exchanges += max(1, len(parts.questions))
            report.no_room += sum(not document.spans for document in documents)
            if self._last_turn_only:
                report.context_only += sum(len(document.spans) for document in documents) - bool(documents[-1].spans)
                documents = documents[-1:]
                documents[0].spans = documents[0].spans[-1:]
            documents = [document for document in documents if document.spans]
            report.conversations += 1
            report.rendered += bool(documents)
            report.left_out += not documents
            report.documents += len(documents)
            report.split += len(documents) > 1
            report.questions_cut += sum(document.question_cut > 0 for document in documents)
            report.answers_cut += sum(document.answer_cut > 0 for document in documents)
            report.question_tokens_cut += sum(document.question_cut for document in documents)
            report.answer_tokens_cut += sum(document.answer_cut for document in documents)
            yield from documents


@dataclass(slots=True)
class _Parts:
    """Messages of a conversation."""

    conversation: Conversation
    system: str | None
    questions: list[str]
    answers: list[str]  # one less than questions in a prompt, one more in bare text


@dataclass(frozen=True, slots=True)
class _Lead:
    """Constant before a message: the ids of its beginning, and the `tail`, which may share a token with the message.

    `after` is what precedes the tail.
    """

    ids: np.ndarray  # int32
    tail: str
    after: After


class Layout:
    """Template with its constants as ids of a tokenizer."""

    def __init__(self, template: Template, encoder: PieceEncoder) -> None:
        template = filled(template, encoder.tokenizer)
        self.template, self.encoder = template, encoder
        specials = sorted(special_strings(encoder.tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self.bos = _array([] if template.writes_bos else encoder.bos)
        self._leads = lru_cache(_REMEMBERED_SYSTEMS)(self._first_lead)  # many rows have the same one
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

    def pieces(self, batch: Sequence[_Parts]) -> tuple[list[str], list[After]]:
        """Return all texts of conversations in order, and what precedes each."""
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

    def parts(self, conversation: Conversation, *, ends_with: str) -> _Parts:
        """Return the messages of a conversation."""
        turns = conversation.turns
        roles = [turn.role for turn in turns]
        if roles == ["assistant"] == [ends_with] and self.template.name == "plain":
            return _Parts(conversation, None, [], [turns[0].text])
        roles = roles[roles[:1] == ["system"] :]
        if roles != [("user", "assistant")[i % 2] for i in range(len(roles))] or not roles or roles[-1] != ends_with:
            shown = ", ".join(turn.role for turn in turns[:8]) or "no turns"
            bare = " (bare text needs the template plain)" if roles == ["assistant"] else ""
            raise ValueError(
                f"{conversation.id}: expected [system], user, assistant, … ending with {ends_with}, found {shown}{bare}"
            )
        system, questions, answers = self.template.messages(turns)
        if system is not None and self.template.system is None:
            questions[0] = f"{system}\n\n{questions[0]}"
            system = None
        return _Parts(conversation, system, questions, answers)

    def prompt(self, turns: tuple[Turn, ...]) -> list[int]:
        """Return the ids before the next answer."""
        parts = self.parts(Conversation("prompt", turns), ends_with="user")
        ids, starts = self.encoder.encode(*self.pieces([parts]))
        encoded = iter([ids[starts[i] : starts[i + 1]] for i in range(len(starts) - 1)])
        pieces: list[Any] = [self.bos, self.first_lead(parts).ids]
        for number in range(len(parts.questions)):
            pieces += [self.next.ids if number else _NO_IDS, next(encoded), self.answer.ids]
            if number < len(parts.answers):
                pieces += [next(encoded), self.closing]
        return list(np.concatenate(pieces).tolist())

    def first_lead(self, parts: _Parts) -> _Lead:
        """Return what precedes the first question, with tools and system text."""
        return self._leads(parts.system, parts.conversation.tools)

    def _first_lead(self, system: str | None, tools: str) -> _Lead:
        template = with_tools(self.template, self.encoder.tokenizer, tools) if tools else self.template
        if system is None:
            return self._split_long(self.lead(template.start))
        assert template.system is not None
        before, behind = template.system
        lead = self.lead(before)
        found = self._special.search(behind)
        if found is None:  # one text with the question
            return self._split_long(_Lead(lead.ids, lead.tail + system + behind, lead.after))
        ids = _array(self.encoder.one(lead.tail + system + behind[: found.start()], lead.after))
        rest = self.lead(behind[found.start() :])
        return _Lead(np.concatenate([lead.ids, ids, rest.ids]), rest.tail, rest.after)

    def lead_tokens(self, parts: _Parts) -> int:
        """Return how many ids of a document's first question are those of the template."""
        lead = self.first_lead(parts)
        return len(self.encoder.one(lead.tail.rstrip(" "), lead.after))

    def first_ids(self, parts: _Parts, number: int, question_ids: np.ndarray) -> np.ndarray:
        """Return the ids of a question that begins a document after a split."""
        lead = self.first_lead(parts)
        if (lead.tail, lead.after) == (self.next.tail, self.next.after):
            return question_ids
        return self.encoder.encode([lead.tail + parts.questions[number] + self.behind_question], [lead.after])[0]

    def _head(self, text: str) -> tuple[str, str]:
        """Split a constant after a message at its first special token, or before the space at its end."""
        found = self._special.search(text)
        if found is not None:
            return text[: found.start()], text[found.start() :]
        return (text[:-1], " ") if text.endswith(" ") else (text, "")

    def _constant(self, rest: str) -> _Lead:
        """Return the constant between question and answer, which shares no token with the generated answer."""
        if rest in ("", " "):
            return _Lead(_NO_IDS, "", After.SPACE if rest else After.TEXT)
        space = rest.endswith(" ")
        rest = rest.removesuffix(" ")
        last = [found.end() for found in self._special.finditer(rest)][-1]
        after = After.SPACE if space else After.SPECIAL if last == len(rest) else After.TEXT
        return _Lead(_array(self.encoder.template(rest)), "", after)

    def lead(self, text: str, after: After = After.NOTHING, before: str = "") -> _Lead:
        """Return a constant before a message, which follows `after` (the special token `before`, if there is one)."""
        ends = [found.end() for found in self._special.finditer(text)]
        if not ends:
            return _Lead(_NO_IDS, text, after)
        return _Lead(_array(self.encoder.template(text[: ends[-1]], before)), text[ends[-1] :], After.SPECIAL)

    def _split_long(self, lead: _Lead) -> _Lead:
        """Shorten the tail of a lead, to tokenise its beginning once for all questions, if this changes no ids."""
        for found in list(re.finditer(r"(?<=\S) (?=\S)", lead.tail))[: -_SPLITS_TRIED - 1 : -1]:
            head, tail = lead.tail[: found.start()], lead.tail[found.end() :]
            ids = self.encoder.one(head, lead.after)
            shorter = _Lead(np.concatenate([lead.ids, _array(ids)]), tail, After.SPACE)
            if self._probed(lead) == [ids + rest for rest in self._probed(shorter)]:
                return shorter
        return lead

    def _next(self, closing: str) -> _Lead:
        """Return the lead of later questions, which follows `after`."""
        after = self.template.after
        lead = self.lead(after + self.template.next, After.SPECIAL, closing)
        if np.array_equal(lead.ids[: len(self.after)], self.after) and (len(lead.ids) or not after):
            lead = _Lead(lead.ids[len(self.after) :], lead.tail, lead.after)
        else:
            lead = self.lead(self.template.next, After.TEXT)
        as_first = _Lead(lead.ids, lead.tail, self.start.after)
        return as_first if lead.tail == self.start.tail and self._probed(lead) == self._probed(as_first) else lead

    def _probed(self, lead: _Lead) -> list[list[int]]:
        return [self.encoder.one(lead.tail + probe, lead.after) for probe in _PROBES]


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def _batches(layout: Layout, conversations: Iterable[Conversation]) -> Iterator[list[_Parts]]:
    """Yield the messages of conversations in batches of `_BATCH_CHARACTERS`."""
    batch: list[_Parts] = []
    characters = 0
    for conversation in conversations:
        parts = layout.parts(conversation, ends_with="assistant")
        batch.append(parts)
        characters += sum(map(len, parts.questions)) + sum(map(len, parts.answers))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Document:
    """Document under construction."""

    def __init__(self, layout: Layout, parts: _Parts, first: int) -> None:
        self.layout, self.parts = layout, parts
        self.rendered = Rendered(np.empty(0, dtype=np.int32), [], parts.conversation, first)
        self.pieces = [layout.bos, layout.first_lead(parts).ids]
        self.length = len(self.pieces[0]) + len(self.pieces[1])

    def add(self, lead: np.ndarray, question: np.ndarray, answer: np.ndarray, limit: int) -> bool:
        """Add a whole exchange, if it fits; return whether it does."""
        layout = self.layout
        start = self.length + len(lead) + len(question) + len(layout.answer.ids)
        end = start + len(answer) + len(layout.end)
        if end + len(layout.after) > limit:
            return False
        self.pieces += (lead, question, layout.answer.ids, answer, layout.closing)
        self.rendered.spans.append((start, end))
        self.length = end + len(layout.after)
        return True

    def add_cut(self, question: np.ndarray, answer: np.ndarray, limit: int) -> bool:
        """Add as much of an exchange as fits into an empty document; return False if nothing does."""
        layout = self.layout
        lead = layout.lead_tokens(self.parts)
        space = limit - self.length - len(layout.answer.ids) - len(layout.end)
        if len(question) + len(answer) > space:
            free = space - lead
            if free < _LEAST_SPACE:
                return False
            asked = len(question) - lead
            kept = min(asked, max(free - len(answer), free // 2))
            if kept < asked:
                question = np.concatenate([question[:lead], question[len(question) - kept :]])
                self.rendered.question_cut = asked - kept
            self.rendered.answer_cut = max(0, len(answer) - (free - kept))
        start = self.length + len(question) + len(layout.answer.ids)
        self.pieces += (question, layout.answer.ids, answer, layout.closing)
        self.rendered.spans.append((start, min(limit, start + len(answer) + len(layout.end))))
        self.length = limit  # full
        return True

    def finished(self, limit: int) -> Rendered:
        self.rendered.ids = np.concatenate(self.pieces)[:limit]
        return self.rendered


def _split(layout: Layout, parts: _Parts, texts: list[np.ndarray], max_tokens: int | None) -> Iterator[Rendered]:
    """Yield documents of at most `max_tokens`; one without spans has no room for its exchange."""
    limit = max_tokens if max_tokens is not None else 1 << 62
    document: _Document | None = None
    for number, (question, answer) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        if document is not None:
            if document.add(layout.next.ids, question, answer, limit):
                continue
            yield document.finished(limit)
        document = _Document(layout, parts, number)
        if number:
            question = layout.first_ids(parts, number, question)
        fits = document.add(_NO_IDS, question, answer, limit) or document.add_cut(question, answer, limit)
        if not fits:
            yield document.finished(limit)
            document = None
    if document is not None:
        yield document.finished(limit)


def _bare_text(layout: Layout, parts: _Parts, text: np.ndarray, max_tokens: int | None) -> Iterator[Rendered]:
    """Yield a text in documents of at most `max_tokens`."""
    opening = np.concatenate([layout.bos, layout.start.ids])
    ids = np.concatenate([text, layout.end])
    size = len(ids) if max_tokens is None else max(1, max_tokens - len(opening))
    for start in range(0, len(ids), size):
        part = np.concatenate([opening, ids[start : start + size]])
        yield Rendered(part, [(len(opening), len(part))], parts.conversation)

"""Rendering of conversations to token ids and supervised spans.

Token ids are built turn by turn, so that the spans of answers are exact. Messages are encoded as plain text: "</s>" or
"<|im_end|>" in a message never becomes a special token. Shape suffixes: T tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..conversations import Conversation, Turn
from .chat import ChatLayout
from .encoding import PieceEncoder
from .layout import NO_IDS, Layout, Parts, Rendered, check_turns
from .templates import OWN, Template

_BATCH_CHARACTERS = 1 << 19  # large enough to use all cores, and small in memory
_BATCHES_AHEAD = 3
_THREADS = 2  # two batches run concurrently, so that no core is idle at the end of a batch
_NO_LIMIT = 1 << 62
_LEAST_SPACE = 16  # minimum number of tokens for question and answer in a block


@dataclass(slots=True)
class RenderReport:
    """Counts of conversations and exchanges.

    Conversations are `rendered`, or `left_out` if no token is supervised. Of the `exchanges`, `no_room` did not fit,
    and `context_only` are not supervised because of `last_turn_only`.
    """

    conversations: int = 0
    rendered: int = 0
    left_out: int = 0  # conversations without supervised tokens
    documents: int = 0
    split: int = 0  # conversations that became several documents
    exchanges: int = 0
    no_room: int = 0  # exchanges left out because the system prompt leaves too little space
    context_only: int = 0  # exchanges that `last_turn_only` excludes
    questions_cut: int = 0  # exchanges whose question was truncated at the start
    answers_cut: int = 0  # exchanges whose answer was truncated at the end
    question_tokens_cut: int = 0
    answer_tokens_cut: int = 0  # including the ends of turn


def render(conversation: Conversation, template: Template, tokenizer: Any) -> Rendered:
    """Render a conversation as a single document without a length limit."""
    return next(Renderer(template, tokenizer, None)([conversation]))


def prompt_renderer(template: Template, tokenizer: Any) -> Callable[[Sequence[Turn]], list[int]]:
    """Return a function that renders turns with a template, and tokenizes them as the prompt of the next answer."""
    if template.name == OWN:
        return ChatLayout(template, tokenizer).prompt
    return Layout(template, PieceEncoder(tokenizer)).prompt


class Renderer:
    """Renderer that converts conversations to documents of at most `max_tokens` tokens, with threads for tokenization.

    Longer conversations are split between exchanges, and each document begins with the system prompt. If a single
    exchange is too long, the start of the question is truncated first, to at least half of the space, and then the end
    of the answer. With `last_turn_only`, only the last answer of a conversation is supervised.

    Raises ValueError if turns do not alternate, or the tokenizer does not have a special token of the template.
    """

    def __init__(
        self, template: Template, tokenizer: Any, max_tokens: int | None, *, last_turn_only: bool = False
    ) -> None:
        self._chat = ChatLayout(template, tokenizer) if template.name == OWN else None
        self._layout = None if template.jinja else Layout(template, PieceEncoder(tokenizer, own=True))
        self._max_tokens = max_tokens
        self._last_turn_only = last_turn_only

    def __call__(self, conversations: Iterable[Conversation], report: RenderReport | None = None) -> Iterator[Rendered]:
        """Render conversations, yield their documents in order, and update the counts of the report."""
        report = report if report is not None else RenderReport()
        chat = self._chat
        for is_chat, group in groupby(conversations, lambda each: chat is not None and chat.is_needed(each)):
            render = self._chat_documents if is_chat else self._layout_documents
            yield from render(group, report)

    def _chat_documents(self, conversations: Iterable[Conversation], report: RenderReport) -> Iterator[Rendered]:
        assert self._chat is not None
        limit = _NO_LIMIT if self._max_tokens is None else self._max_tokens
        for conversation in conversations:
            check_turns(conversation, ends_with="assistant")
            documents = list(self._chat.documents(conversation, limit))
            yield from self._count_documents(documents, len(conversation.turns) // 2, report)

    def _layout_documents(self, conversations: Iterable[Conversation], report: RenderReport) -> Iterator[Rendered]:
        assert self._layout is not None
        encode = self._layout.encoder.encode
        waiting: deque[tuple[list[Parts], Future[tuple[np.ndarray, np.ndarray]]]] = deque()
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
        self, batch: list[Parts], encoded: Future[tuple[np.ndarray, np.ndarray]], report: RenderReport
    ) -> Iterator[Rendered]:
        """Assemble the documents of a batch of tokenized conversations."""
        assert self._layout is not None
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
                documents = list(_split_text(self._layout, parts, texts[0], self._max_tokens))
            yield from self._count_documents(documents, max(1, len(parts.questions)), report)

    def _count_documents(self, documents: list[Rendered], exchanges: int, report: RenderReport) -> list[Rendered]:
        """Return the documents of a conversation that contain supervised tokens, and update the report."""
        report.exchanges += exchanges
        report.no_room += sum(not document.spans for document in documents)
        for document in documents:
            answers = [turn for turn in document.conversation.turns if turn.role == "assistant"]
            parts = answers[document.last + 1 - len(document.spans) : document.last + 1]
            report.context_only += sum(not turn.is_learned for turn in parts)
            document.spans = [span for span, turn in zip(document.spans, parts, strict=True) if turn.is_learned]
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
        return documents


def _batches(layout: Layout, conversations: Iterable[Conversation]) -> Iterator[list[Parts]]:
    """Group conversations into batches of about `_BATCH_CHARACTERS` characters."""
    batch: list[Parts] = []
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
    """Unfinished document, to which exchanges are added."""

    def __init__(self, layout: Layout, parts: Parts, first: int) -> None:
        self.layout, self.parts = layout, parts
        self.rendered = Rendered(np.empty(0, dtype=np.int32), [], parts.conversation, first, first)
        self.pieces = [layout.bos, layout.first_lead(parts).ids]
        self.length = len(self.pieces[0]) + len(self.pieces[1])

    def add(self, lead: np.ndarray, question: np.ndarray, answer: np.ndarray, limit: int) -> bool:
        """Add an exchange, after the template ids `lead`, if it fits into `limit` tokens. Return True if it fits."""
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
        """Add a truncated exchange to an empty document of `limit` tokens. Return False if the space is too small."""
        layout = self.layout
        lead = layout.lead_tokens(self.parts)
        space = limit - self.length - len(layout.answer.ids) - len(layout.end)
        if len(question) + len(answer) > space:
            free = space - lead
            if free < _LEAST_SPACE:
                return False
            question_tokens = len(question) - lead
            remaining = min(question_tokens, max(free - len(answer), free // 2))
            if remaining < question_tokens:
                question = np.concatenate([question[:lead], question[len(question) - remaining :]])
                self.rendered.question_cut = question_tokens - remaining
            self.rendered.answer_cut = max(0, len(answer) - (free - remaining))
        start = self.length + len(question) + len(layout.answer.ids)
        self.pieces += (question, layout.answer.ids, answer, layout.closing)
        self.rendered.spans.append((start, min(limit, start + len(answer) + len(layout.end))))
        self.length = limit  # full
        return True

    def finished(self, limit: int) -> Rendered:
        self.rendered.ids = np.concatenate(self.pieces)[:limit]
        return self.rendered


def _split(layout: Layout, parts: Parts, texts: list[np.ndarray], max_tokens: int | None) -> Iterator[Rendered]:
    """Split a conversation into documents of at most `max_tokens`. An exchange that does not fit yields no spans."""
    limit = max_tokens if max_tokens is not None else _NO_LIMIT
    document: _Document | None = None
    for number, (question, answer) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        if document is not None:
            if document.add(layout.next.ids, question, answer, limit):
                document.rendered.last = number
                continue
            yield document.finished(limit)
        document = _Document(layout, parts, number)
        if number:
            question = layout.first_ids(parts, number, question)
        fits = document.add(NO_IDS, question, answer, limit) or document.add_cut(question, answer, limit)
        if not fits:
            yield document.finished(limit)
            document = None
    if document is not None:
        yield document.finished(limit)


def _split_text(layout: Layout, parts: Parts, text: np.ndarray, max_tokens: int | None) -> Iterator[Rendered]:
    opening = np.concatenate([layout.bos, layout.start.ids])
    ids = np.concatenate([text, layout.end])
    size = len(ids) if max_tokens is None else max(1, max_tokens - len(opening))
    for start in range(0, len(ids), size):
        part = np.concatenate([opening, ids[start : start + size]])
        yield Rendered(part, [(len(opening), len(part))], parts.conversation)

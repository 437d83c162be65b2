"""From conversations to counts of neighbouring tokens: what is counted of each, and which process counts it.

Letters: T tokens, D documents.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checkpoints.table.table import BigramTable
from ...data.conversations import Conversation, Turn
from ...data.rendering.encoding import After, PieceEncoder, special_strings
from ...data.rendering.render import Renderer
from ...data.rendering.templates import Template
from .counting import PairCounter
from .run_files import INDEX

if TYPE_CHECKING:
    from ...data.blocks.prepared import PreparedData
    from ...data.blocks.stream import StreamedData

PLACE = "conversation"
"""Key of a counter's place: the number of the first conversation that is not counted yet."""
ROW = "row"
"""That key where conversations have the numbers of their rows."""
_TOKENS_AT_A_TIME = 1 << 18
_TOKENS_PER_MB = 1 << 14
_BATCH_CHARACTERS = 1 << 19
_BATCHES_AHEAD = 3
_THREADS = 2

Numbered = tuple[int, Conversation]


@dataclass(frozen=True, slots=True)
class Laid:
    """Documents laid end to end: `tokens_T` int32, `starts_D` int64 where each begins; the conversations up to number
    `place` - 1 are in it or before it."""

    tokens_T: np.ndarray
    starts_D: np.ndarray
    place: int


@dataclass(frozen=True, slots=True)
class Share:
    """Which conversations of a stream a process counts: those with `number % world == rank` that no process has
    counted before.

    `earlier` says what was: for each number of processes that ever counted this stream, the places that they came to
    by their ranks. Of `world` processes that came to `places`, conversation i is counted if i < places[i % world].
    """

    rank: int
    world: int
    earlier: tuple[tuple[int, dict[int, int]], ...] = ()

    def wants(self, number: int) -> bool:
        if number % self.world != self.rank:
            return False
        return not any(number < places.get(number % world, 0) for world, places in self.earlier)


def token_documents(
    numbered: Iterable[Numbered],
    tokenizer: Any,
    template: Template,
    *,
    pairs: str = "documents",
    roles: Sequence[str] = (),
    last_turn_only: bool = False,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """What is counted of each conversation: its number, and ids int32 [T] within which neighbours are pairs.

    `documents` is the whole rendered conversation, never split. `answers` is each stretch that is trained on, with the
    one token before it, so that each pair's right token is trained on. `messages` is the words of the messages of
    `roles` (none: of user and assistant), each by itself, as they are tokenised where the template puts them: behind
    a space, a special token or other text; a token that such words would share with the template's own is cut there.

    Raises:
        ValueError: turns that are not [system], user, assistant, …; a special token that the tokenizer lacks.
    """
    if pairs == "messages":
        yield from _messages(numbered, tokenizer, template, frozenset(roles or ("user", "assistant")))
        return
    waiting: deque[Numbered] = deque()

    def conversations() -> Iterator[Conversation]:
        for entry in numbered:
            waiting.append(entry)
            yield entry[1]

    for rendered in Renderer(template, tokenizer, None, last_turn_only=last_turn_only)(conversations()):
        number, conversation = waiting.popleft()
        assert rendered.conversation is conversation, "nothing is split or left out where blocks have no length"
        if pairs == "documents":
            yield number, [rendered.ids]
        else:
            yield number, [rendered.ids[max(0, start - 1) : end] for start, end in rendered.spans]


def tokens_at_a_time(memory_mb: float) -> int:
    """How many tokens to lay end to end where counts may take so much: a sixteenth of it, which is plenty from 16 MB
    on."""
    return max(1, min(_TOKENS_AT_A_TIME, int(_TOKENS_PER_MB * memory_mb)))


def laid_end_to_end(
    documents: Iterable[tuple[int, list[np.ndarray]]], tokens: int = _TOKENS_AT_A_TIME
) -> Iterator[Laid]:
    """Whole conversations' documents, at least `tokens` tokens of them at a time but at the end."""
    parts: list[np.ndarray] = []
    starts: list[int] = []
    size = place = 0
    for number, arrays in documents:
        for ids in arrays:
            starts.append(size)
            parts.append(ids)
            size += len(ids)
        place = number + 1
        if size >= tokens:
            yield Laid(np.concatenate(parts), np.array(starts, dtype=np.int64), place)
            parts, starts, size = [], [], 0
    if parts:
        yield Laid(np.concatenate(parts), np.array(starts, dtype=np.int64), place)


def count_laid(
    batches: Iterable[Laid],
    counter: PairCounter,
    *,
    save_seconds: float,
    progress: Callable[[int], None],
    by: str = PLACE,
) -> None:
    """Count batches in their order, and leave all of them on disk; `progress` gets the place after each. Conversations
    are numbered `by` `PLACE` or `ROW`.

    Raises:
        ValueError, OSError: what the counter raises.
    """
    saved = time.monotonic()
    for batch in batches:
        counter.add(batch.tokens_T, batch.starts_D, {by: batch.place})
        if time.monotonic() - saved >= save_seconds:
            counter.spill()
            saved = time.monotonic()
        progress(batch.place)
    counter.spill()


def spilled_place(folder: Path) -> int:
    """The place that a counter's folder has come to, without opening it; 0 at the start.

    Raises:
        ValueError: the folder's index is damaged; it is named.
    """
    return _spilled(folder)[1]


def spilled_by(folder: Path) -> str | None:
    """Whether that place is a `PLACE` or a `ROW`; None at the start. Raises ValueError as `spilled_place`."""
    return _spilled(folder)[0]


def spilled_tokens(folder: Path) -> int:
    """The tokens that a counter's folder holds counts of, without opening it. Raises ValueError as `spilled_place`."""
    return _spilled(folder)[2]


def _spilled(folder: Path) -> tuple[str | None, int, int]:
    """What numbers the place, the place, and the tokens."""
    file = folder / INDEX
    if not file.is_file():
        return None, 0, 0
    try:
        index = json.loads(file.read_bytes())
        place, tokens = index["place"], int(index["tokens"])
        if place is None:
            return None, 0, tokens
        by = ROW if ROW in place else PLACE
        return by, int(place[by]), tokens
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}; delete {folder} to count anew") from error


def count_table(
    data: PreparedData | StreamedData, vocab_size: int, progress: Callable[[int, int], None] | None = None
) -> BigramTable:
    """Which token follows which within the documents of blocks to train on, in memory; padding is not counted.

    `progress(documents, tokens)` is called after each document.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    return BigramTable.from_documents(data.iter_documents(), vocab_size, progress=progress)


def _messages(
    numbered: Iterable[Numbered], tokenizer: Any, template: Template, roles: frozenset[str]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Threads tokenise the next batches while one is handed on."""
    encoder, behind = PieceEncoder(tokenizer, own=True), _Behind(template, tokenizer)
    waiting: deque[tuple[list[tuple[int, int]], Future[tuple[np.ndarray, np.ndarray]]]] = deque()

    def encoded() -> Iterator[tuple[int, list[np.ndarray]]]:
        batch, future = waiting.popleft()
        ids, starts = future.result()
        bounds, piece = starts.tolist(), 0
        for number, count in batch:
            yield number, [ids[bounds[i] : bounds[i + 1]] for i in range(piece, piece + count)]
            piece += count

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer") as threads:
        try:
            for batch, texts, places in _message_batches(numbered, behind, roles):
                waiting.append((batch, threads.submit(encoder.encode, texts, places)))
                if len(waiting) > _BATCHES_AHEAD:
                    yield from encoded()
            while waiting:
                yield from encoded()
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _message_batches(
    numbered: Iterable[Numbered], behind: _Behind, roles: frozenset[str]
) -> Iterator[tuple[list[tuple[int, int]], list[str], list[After]]]:
    """Numbers of conversations with how many messages of each are wanted, their texts, and what stands before them."""
    batch: list[tuple[int, int]] = []
    texts: list[str] = []
    places: list[After] = []
    characters = 0
    for number, conversation in numbered:
        before = len(texts)
        for text, place in behind.messages(conversation.turns, roles):
            texts.append(text)
            places.append(place)
            characters += len(text)
        batch.append((number, len(texts) - before))
        if characters >= _BATCH_CHARACTERS:
            yield batch, texts, places
            batch, texts, places, characters = [], [], [], 0
    if batch:
        yield batch, texts, places


class _Behind:
    """What a template puts before each message of a conversation."""

    def __init__(self, template: Template, tokenizer: Any) -> None:
        self._tokens = {"{bos}": tokenizer.bos_token or "", "{eos}": tokenizer.eos_token or ""}
        self._specials = tuple(special_strings(tokenizer))
        self._first = self._after(template.start, After.NOTHING)
        self._next = self._after(template.end + template.after + template.next, After.SPECIAL)
        self._answer = self._after(template.middle, After.TEXT)
        self._system = self._after(template.system[0], After.NOTHING) if template.system else self._first
        self._strips = template.strips

    def messages(self, turns: Sequence[Turn], roles: frozenset[str]) -> Iterator[tuple[str, After]]:
        """Texts of the wanted messages with what stands before them. Of bare text the one turn begins the document."""
        asked = False
        for turn in turns:
            question = turn.role != "assistant"
            if turn.role == "system":
                place = self._system
            elif question:
                place = self._next if asked else self._first
                asked = True
            else:
                place = self._answer if asked else self._first
            if turn.role in roles:
                yield turn.text.strip() if self._strips[0 if question else 1] else turn.text, place

    def _after(self, text: str, empty: After) -> After:
        for name, token in self._tokens.items():
            text = text.replace(name, token)
        if not text:
            return empty
        if text.endswith(" "):
            return After.SPACE
        return After.SPECIAL if self._specials and text.endswith(self._specials) else After.TEXT

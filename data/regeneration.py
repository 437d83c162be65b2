"""Regeneration of the answers of a corpus with the target: storage of results and scheduling of requests.

The answers come from a local model or a server, through an async function (`Answerer`).
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.storage.atomic import append_line, atomic_text
from ..checkpoints.storage.locks import sole_writer
from ..checkpoints.storage.safe_read import load_json, parse_json
from .conversations import Conversation, Turn

_POLL_SECONDS = 0.2  # interval of checks for a stop
SEEDS = 2**31
"""Exclusive upper bound of the random seeds of questions."""
_SORTED = 4096  # conversations per sorted group


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt for the target with the turns [system], user, assistant, …, user.

    `seed` is less than `SEEDS` and depends only on the conversation, the turn and the seed of the run.
    """

    turns: tuple[Turn, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the target. `finish` is "length" if the answer was truncated at the token limit."""

    text: str
    finish: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed request. If `lasting` is True, as for a prompt that is too long, a retry would also fail."""

    error: str
    lasting: bool = False


Answerer = Callable[[Question], Awaitable[Answer | Failure | None]]
"""Async function that answers a question. It returns None if the run was stopped before the answer was complete."""


@dataclass(slots=True)
class RegenerationReport:
    """Counts of a regeneration run. `cut` counts truncated conversations for each reason."""

    written: int = 0
    failed: int = 0
    answers: int = 0
    cut: Counter[str] = field(default_factory=Counter)


def keyed(conversations: Iterable[Conversation]) -> Iterator[tuple[str, Conversation]]:
    """Yield (key, conversation) pairs; the key is a hash of id, texts and the number of earlier duplicates."""
    counts: Counter[bytes] = Counter()
    for conversation in conversations:
        content = [conversation.id, [[turn.role, turn.text] for turn in conversation.turns]]
        digest = _digest(json.dumps(content).encode())
        yield _digest(digest + counts[digest].to_bytes(8, "big")).hex(), conversation
        counts[digest] += 1


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class Store(AbstractContextManager["Store"]):
    """JSONL file of finished conversations, locked by one process.

    `<path>.json` contains the settings that determine the answers, and `<path>.errors.jsonl` contains failed attempts.
    An incomplete last line is removed when the file is opened again.

    Raises ValueError if another process has locked the file, it was written with other settings, or it contains a line
    that was not written by regeneration.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.errors_path = self.path.with_name(self.path.name + ".errors.jsonl")
        with ExitStack() as stack:
            stack.enter_context(sole_writer(self.path))
            self._check_settings(settings)
            self._done = _read_finished_keys(self.path)
            self._file = stack.enter_context(self.path.open("ab", buffering=0))
            self._stack = stack.pop_all()
        self._errors: FileIO | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, name: str, key: str, turns: Sequence[Turn], finishes: Sequence[str], cut: str = "") -> None:
        """Append a conversation, the finish reason of each answer, and the reason for missing turns (`cut`)."""
        assert key not in self, f"{key} is already in the store"
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        row = {"id": name, "key": key, "messages": messages, "finish": list(finishes)} | ({"cut": cut} if cut else {})
        append_line(self._file, _encode_row(row))
        self._done.add(key)

    def fail(self, name: str, key: str, error: str) -> None:
        """Append a failed conversation to the error file."""
        if self._errors is None:
            self._errors = self._stack.enter_context(self.errors_path.open("ab", buffering=0))
        append_line(self._errors, _encode_row({"id": name, "key": key, "error": error}))

    def __exit__(self, *_: object) -> None:
        with self._stack:
            os.fsync(self._file.fileno())

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of a new file. Raises ValueError if the settings of an existing file differ."""
        file, settings = self.path.with_name(self.path.name + ".json"), json.loads(json.dumps(settings))
        if not self.path.exists() or not self.path.stat().st_size:
            atomic_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        try:
            former = load_json(file)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{self.path} was not written by regeneration: {error}") from error
        for name in dict.fromkeys([*settings, *former]):
            if (before := former.get(name)) != (now := settings.get(name)):
                raise ValueError(
                    f"{self.path} was started with {name} {before!r}, but the recipe has {now!r}: choose another "
                    "`out`, or delete that file"
                )


def _encode_row(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")


def _read_finished_keys(path: Path) -> set[str]:
    """Return the keys of the finished conversations, after removing an incomplete last line."""
    done: set[str] = set()
    if not path.exists():
        return done
    with path.open("r+b") as file:
        whole = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            try:
                done.add(parse_json(line.decode())["key"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, row {number} was not written by regeneration: {error}") from error
            whole += len(line)
    return done


async def regenerate(
    conversations: Iterable[Conversation],
    store: Store,
    answer: Answerer,
    *,
    concurrency: int = 1,
    seed: int = 0,
    system: str | None = None,
    keep_cut: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
) -> RegenerationReport:
    """Regenerate the answers of all conversations that are not in the store.

    `concurrency` conversations are answered concurrently. `system` is the system prompt of conversations without one.
    A conversation is truncated before an answer that is empty or, unless `keep_cut` is set, reached the token limit. It
    counts as failed if no answer remains. The run stops when `stopping` returns True. `progress` is called with the
    number of finished conversations.
    """
    source = _sort_by_length(item for item in keyed(conversations) if item[0] not in store)
    work = _Work(store, answer, seed, system, keep_cut, stopping, progress)
    running = {asyncio.create_task(work.run(source)) for _ in range(concurrency)}
    try:
        while running and not stopping():
            done, running = await asyncio.wait(running, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # re-raises exceptions of the task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return work.report


def _sort_by_length(items: Iterator[tuple[str, Conversation]]) -> Iterator[tuple[str, Conversation]]:
    """Sort groups of 4096 conversations by descending number of questions, so that long conversations start first."""
    while some := list(islice(items, _SORTED)):
        yield from sorted(some, key=lambda item: -sum(turn.role == "user" for turn in item[1].turns))


@dataclass(slots=True)
class _Work:
    """State shared by concurrent tasks, each of which answers one conversation at a time."""

    store: Store
    answer: Answerer
    seed: int
    system: str | None
    keep_cut: bool
    stopping: Callable[[], bool]
    progress: Callable[[int], None]
    report: RegenerationReport = field(default_factory=RegenerationReport)

    async def run(self, source: Iterator[tuple[str, Conversation]]) -> None:
        """Answer conversations until the source is exhausted or the run is stopped."""
        while not self.stopping() and (item := next(source, None)):
            await self._converse(*item)

    async def _converse(self, key: str, conversation: Conversation) -> None:
        """Answer the questions of a conversation in order, and store the result or the error."""
        turns = [turn for turn in conversation.turns[:1] if turn.role == "system"]
        if not turns and self.system:
            turns = [Turn("system", self.system)]
        finishes: list[str] = []
        kind, reason = "", "the conversation has no question"
        for question in [turn for turn in conversation.turns if turn.role == "user"]:
            if self.stopping():
                return
            digest = _digest(f"{self.seed} {key} {len(finishes)}".encode())
            reply = await self.answer(Question((*turns, question), int.from_bytes(digest[:4], "big") >> 1))
            if reply is None:
                return
            kind, reason = self._find_fault(reply)
            if isinstance(reply, Failure) and not reply.lasting:
                finishes = []  # all questions are asked again
                break
            if kind:
                reason = f"answer {len(finishes) + 1}: {reason}"
                break
            assert isinstance(reply, Answer)
            turns += [question, Turn("assistant", reply.text)]
            finishes.append(reply.finish)
        if finishes:
            self.store.add(conversation.id, key, turns, finishes, reason)
            self.report.written += 1
            if kind:
                self.report.cut[kind] += 1
        else:
            self.store.fail(conversation.id, key, reason)
            self.report.failed += 1
        self.progress(self.report.written + self.report.failed)

    def _find_fault(self, reply: Answer | Failure) -> tuple[str, str]:
        """Return the kind and description of a problem with an answer, or empty strings if there is none."""
        if isinstance(reply, Failure):
            return "request failed", reply.error
        self.report.answers += 1
        if not reply.text.strip():
            return "empty answer", "empty"
        if reply.finish == "length" and not self.keep_cut:
            return "token limit", "token limit reached"
        return "", ""

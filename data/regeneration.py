"""A corpus whose answers are a target's own: what is kept on disk, and the queue of what is still to be asked.

It knows no model and no server. An answerer is an async function from a question to its answer.
"""

from __future__ import annotations

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

_SECONDS_BETWEEN_LOOKS = 0.2  # at whether to stop, while answers are awaited
_HASH = "hash of "  # that settings which tell what files hold begin with
SEEDS = 2**31
"""A question's seed is below it."""
"""Settings of former versions, on which the answers of a lossless method do not depend."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the target is asked: `turns` are [system], user, assistant, …, user.

    `seed`, in [0, 2^31), depends on the conversation, its turn and the seed of the whole, on nothing else.
    """

    turns: tuple[Turn, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said: `finish` is "stop", or "length" where the token limit cut it."""

    text: str
    finish: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer. `lasting`: nor will there be one when it is asked again, as for a prompt too long."""

    error: str
    lasting: bool = False


Answerer = Callable[[Question], Awaitable[Answer | Failure | None]]
"""None where it was stopped before the answer was complete."""


@dataclass(slots=True)
class RegenerationReport:
    """What a run did: `written + failed` conversations are done with, of which `cut` counts by reason those that were
    written without their last turns."""

    written: int = 0
    failed: int = 0
    answers: int = 0
    cut: Counter[str] = field(default_factory=Counter)


def keyed(conversations: Iterable[Conversation]) -> Iterator[tuple[str, Conversation]]:
    """Each conversation with its key: 32 hex digits of its id, its texts, and how often the same came before."""
    seen: Counter[bytes] = Counter()
    for conversation in conversations:
        content = [conversation.id, [[turn.role, turn.text] for turn in conversation.turns]]
        digest = _digest(json.dumps(content).encode())
        yield _digest(digest + seen[digest].to_bytes(8, "big")).hex(), conversation
        seen[digest] += 1


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class Store(AbstractContextManager["Store"]):
    """The finished conversations, one JSON line each, which `read_conversations` reads; open for one writer.

    Beside `path` lie `<path>.json` (the settings that decide the answers) and `<path>.errors.jsonl` (a line for every
    attempt that failed). An unfinished last line is cut off when the file is opened again.

    Raises ValueError: another process writes here; the file was started with other settings, of which the first is
    named; the file holds something else, naming the line.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.errors_path = self.path.with_name(self.path.name + ".errors.jsonl")
        with ExitStack() as stack:
            stack.enter_context(sole_writer(self.path))
            self.check_settings(settings)
            self._done = _finished(self.path)
            self._file = stack.enter_context(self.path.open("ab", buffering=0))
            self._stack = stack.pop_all()
        self._errors: FileIO | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    def add(self, name: str, key: str, turns: Sequence[Turn], finishes: Sequence[str], cut: str = "") -> None:
        """Write a conversation: id and key, its turns, how each answer ended, and why later ones are missing."""
        assert key not in self, f"{key} is written already"
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        row = {"id": name, "key": key, "messages": messages, "finish": list(finishes)} | ({"cut": cut} if cut else {})
        append_line(self._file, _encoded(row))
        self._done.add(key)

    def fail(self, name: str, key: str, error: str) -> None:
        """Write down that a conversation could not be completed."""
        if self._errors is None:
            self._errors = self._stack.enter_context(self.errors_path.open("ab", buffering=0))
        append_line(self._errors, _encoded({"id": name, "key": key, "error": error}))

    def close(self) -> None:
        """Bring everything to the disk and let other writers in."""
        with self._stack:
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError where the answers that stand here were made with others. A `hash of …` that one side does
        not know is not compared."""
        file, settings = self.path.with_name(self.path.name + ".json"), json.loads(json.dumps(settings))
        if not self.path.exists() or not self.path.stat().st_size:
            atomic_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        try:
            former = load_json(file)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{self.path} was not written by regeneration: {error}") from error
        for name in dict.fromkeys([*settings, *former]):
            before, now = former.get(name), settings.get(name)
            if before != now and not (name.startswith(_HASH) and None in (before, now)):
                raise ValueError(
                    f"{self.path} was started with {name} {before!r}, now it is {now!r}: its answers would not be of "
                    "one kind; choose another `out`, or delete that file"
                )


def _encoded(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")


def _finished(path: Path) -> set[str]:
    """Keys of the rows of a file of ours; what a killed writer left behind the last whole line is cut off."""
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
                raise ValueError(
                    f"{path}, row {number} is not as regeneration wrote it ({error}): choose another `out`, or delete "
                    "that line to have it answered again"
                ) from error
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
    """Answer every conversation that the store does not hold yet.

    An answer that is empty, or that the token limit cut, is dropped with all that follows it; if nothing whole is left
    before it, the conversation counts as failed. `concurrency` conversations are answered at a time, each question by
    question, those with most questions first; `system` is for those that bring no system text. With `keep_cut` answers
    that the token limit cut are kept, and followed. Once `stopping` says so, nothing new is asked and what is under way
    is abandoned; `progress` is given how many conversations this run is done with.
    """
    source = _longest_first(item for item in keyed(conversations) if item[0] not in store)
    work = _Work(store, answer, seed, system, keep_cut, stopping, progress)
    running = {asyncio.create_task(work.through(source)) for _ in range(concurrency)}
    try:
        while running and not stopping():
            done, running = await asyncio.wait(
                running, timeout=_SECONDS_BETWEEN_LOOKS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # raises what it raised
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return work.report


def _longest_first(items: Iterator[tuple[str, Conversation]]) -> Iterator[tuple[str, Conversation]]:
    """Of some thousand at a time those with most questions first: at the end, one alone would take turn after turn."""
    while some := list(islice(items, 4096)):
        yield from sorted(some, key=lambda item: -sum(turn.role == "user" for turn in item[1].turns))


@dataclass(slots=True)
class _Work:
    """What several tasks do at a time: each takes one conversation after the other."""

    store: Store
    answer: Answerer
    seed: int
    system: str | None
    keep_cut: bool
    stopping: Callable[[], bool]
    progress: Callable[[int], None]
    report: RegenerationReport = field(default_factory=RegenerationReport)

    async def through(self, source: Iterator[tuple[str, Conversation]]) -> None:
        """Answer conversations until there are no more, or it is to stop."""
        while not self.stopping() and (item := next(source, None)):
            await self._converse(*item)

    async def _converse(self, key: str, conversation: Conversation) -> None:
        """Ask what is asked in a conversation, and write it, or write down why not."""
        turns = [turn for turn in conversation.turns[:1] if turn.role == "system"]
        if not turns and self.system:
            turns = [Turn("system", self.system)]
        finishes: list[str] = []
        kind, reason = "", "nothing is asked in it"
        for asked in [turn for turn in conversation.turns if turn.role == "user"]:
            if self.stopping():
                return
            digest = _digest(f"{self.seed} {key} {len(finishes)}".encode())
            said = await self.answer(Question((*turns, asked), int.from_bytes(digest[:4], "big") >> 1))
            if said is None:
                return
            kind, reason = self._fault(said)
            if isinstance(said, Failure) and not said.lasting:
                finishes = []  # all of it is asked again
                break
            if kind:
                reason = f"answer {len(finishes) + 1}: {reason}"
                break
            assert isinstance(said, Answer)
            turns += [asked, Turn("assistant", said.text)]
            finishes.append(said.finish)
        if finishes:
            self.store.add(conversation.id, key, turns, finishes, reason)
            self.report.written += 1
            if kind:
                self.report.cut[kind] += 1
        else:
            self.store.fail(conversation.id, key, reason)
            self.report.failed += 1
        self.progress(self.report.written + self.report.failed)

    def _fault(self, said: Answer | Failure) -> tuple[str, str]:
        """Why an answer does not count: by kind, and in words; both empty where it does."""
        if isinstance(said, Failure):
            return "cannot be asked", said.error
        self.report.answers += 1
        if not said.text.strip():
            return "empty answer", "it is empty"
        if said.finish == "length" and not self.keep_cut:
            return "token limit", "it reached the token limit"
        return "", ""

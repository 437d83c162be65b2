"""The folder in which a table's counts lie while they grow: whose counts they are, who may count into it, and how the
processes of one launch tell each other to stop."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....train.parallel.interrupts import StopSignals
from ....train.table.documents import spilled_by, spilled_place, spilled_tokens
from ....train.table.run_files import INDEX
from ...session.terminal import log

STOP = "stop"
TOKEN = "token"
IDENTITY = "identity.json"
PARTS = "parts"
CONSIDERABLE = 1 << 20
"""Tokens whose counts nobody loses without being asked: some seconds of work."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SHOWN_DIFFERENCES = 4
_SHOWN_VALUE = 40
_RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
_NAMES = {
    "options": "data",
    "cleaning": "data.clean",
    "pairs": "count.pairs",
    "roles": "count.roles",
    "sizes": "saturation.sizes",
    "sources": "what the corpus holds",
    "heldout": "what data.heldout_source holds",
    "contamination": "what data.clean.contamination holds",
    "tokenizer": "the tokenizer's fingerprint",
    "encoder": "how the tokenizer cuts words",
}
"""What a recipe calls the parts of an identity."""

Places = dict[int, dict[int, int]]
"""By numbers of processes: the places that they came to, by their ranks."""


class Stopping:
    """Whether to stop counting: a signal came, or another process of this launch has stopped (`told`), which says so by
    the launch's word in a file."""

    def __init__(self, signals: StopSignals, file: Path, word: str) -> None:
        self._signals, self._file, self._word = signals, file, word
        self._look = 0.0
        self.told = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self._look:
            self._look = now + _SECONDS_BETWEEN_LOOKS
            self.told = self.told or read_word(self._file) == self._word
        return self.told or self._signals.received is not None


def rank_folders(folder: Path) -> list[tuple[Path, int, int]]:
    """Folders of counts with the rank and the number of processes that wrote them, in one order everywhere."""
    found = ((path, _RANK_FOLDER.fullmatch(path.name)) for path in folder.iterdir())
    ranks = [(path, int(match[1]), int(match[2])) for path, match in found if match is not None]
    return sorted(ranks, key=lambda entry: (entry[2], entry[1]))


def spilled_places(folder: Path) -> Places:
    """How far each process came of each number of processes that counted here; see `Share`.

    Raises:
        ValueError: a damaged index.
    """
    places: Places = {}
    for path, rank, world in rank_folders(folder):
        places.setdefault(world, {})[rank] = spilled_place(path)
    return places


def spilled_numbering(folder: Path) -> str | None:
    """By what those places are numbered, which is the same for all of them; None where nothing is counted yet.

    Raises:
        ValueError: a damaged index.
    """
    return next(filter(None, (spilled_by(path) for path, _, _ in rank_folders(folder))), None)


def refuse_moved(folder: Path, before: Places, world: int) -> None:
    """Make the counts useless where a process of another launch has gone on since `before`, by another number of
    processes than `world`: it counted what this launch counted too.

    Raises:
        ValueError: one has.
    """
    for other, places in spilled_places(folder).items():
        for rank, place in places.items():
            earlier = before.get(other, {}).get(rank, 0)
            if other != world and place != earlier:
                (folder / IDENTITY).unlink(missing_ok=True)
                raise ValueError(
                    f"process {rank} of an earlier launch of {other} processes went on to conversation {place} from "
                    f"{earlier} while this launch counted the same: end it, and delete {folder} to count anew"
                )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from counting into the same folder.

    Raises:
        ValueError: another process does.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is counting into {folder}; wait for it, or choose another `out`"
            ) from error
        yield
    finally:
        os.close(lock)


def refuse_counting(folder: Path) -> None:
    """Find that no process counts into any of the ranks' folders: one of an earlier launch may have outlived it.

    Raises:
        ValueError: one does.
    """
    for path, _, _ in rank_folders(folder):
        with locked(path):
            pass


def read_identity(folder: Path) -> dict[str, Any] | None:
    """Whose counts a folder holds; None where it holds none.

    Raises:
        ValueError: there are counts, and what says whose they are is missing or damaged.
    """
    file = folder / IDENTITY
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        found, what = None, "missing"
    except ValueError as error:
        found, what = None, f"damaged ({error})"
    else:
        what = "damaged (no object)"
    if isinstance(found, dict):
        return found
    if any((path / INDEX).is_file() for path, _, _ in rank_folders(folder)):
        raise ValueError(
            f"{file} is {what}, and nothing else says whose counts these are; delete {folder} to count anew"
        )
    return None


def empty(folder: Path) -> None:
    """Delete all counts; what says whose they were and who counts stays, to be replaced."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (IDENTITY, TOKEN):
            path.unlink()


def let_go(folder: Path, tokens: int, theirs: dict[str, Any], mine: dict[str, Any], what: str = "table") -> None:
    """Find that the counts of `tokens` tokens in a folder, made with other settings, may be deleted. Who counts is told
    so, but for counts of nothing.

    Raises:
        ValueError: they took considerable time; what differs is named with both values, and what to do.
    """
    if not tokens:
        return
    holds = f"{folder} holds counts of {tokens:,} tokens with other settings ({differences(theirs, mine)})"
    if tokens >= CONSIDERABLE:
        raise ValueError(
            f"{holds}: set them back to go on from there, delete that folder to count anew, or choose another `out`"
        )
    log(f"{what}: counting anew: {holds}")


def counted_tokens(folder: Path) -> int:
    """Tokens that all processes together have on disk.

    Raises:
        ValueError: a damaged index.
    """
    return sum(spilled_tokens(path) for path, _, _ in rank_folders(folder))


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The settings in which two identities of counts differ, as recipes call them, with both values."""
    found = list(_differences(theirs, mine, ()))
    if any(place == ("options", "template") for place, _, _ in found):
        found = [entry for entry in found if entry[0][0] != "template"]  # its parts follow from its name
    said = [f"{_named(place)}: {_shown(one)} there, {_shown(other)} here" for place, one, other in found]
    more = len(said) - _SHOWN_DIFFERENCES
    return "; ".join(said[:_SHOWN_DIFFERENCES] + [f"and {more} more"] * (more > 0))


def _differences(one: Any, other: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _differences(one.get(key), other.get(key), (*place, key))
    elif _of_sections(one) and _of_sections(other) and len(one) == len(other):
        for number, sides in enumerate(zip(one, other, strict=True)):
            yield from _differences(*sides, (*place, str(number)))
    elif one != other:
        yield place, one, other


def _of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _named(place: tuple[str, ...]) -> str:
    name, rest = _NAMES.get(place[0], place[0]), place[1:]
    return f"{name} ({'.'.join(rest)})" if " " in name and rest else ".".join((name, *rest))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}…"


def read_word(file: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None

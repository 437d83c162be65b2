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

from ..checkpoints.table_file import errors_named, finish_file, sync_folder
from ..train.interrupts import StopSignals
from ..train.run_files import INDEX
from ..train.table import spilled_place

STOP = "stop"
TOKEN = "token"
IDENTITY = "identity.json"
PARTS = "parts"
_SECONDS_BETWEEN_LOOKS = 1.0
_RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")

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


def read_word(file: Path) -> str | None:
    """The text of a file; None where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def write_whole(file: Path, text: str) -> None:
    """Whole and on the disk, or not at all.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    unfinished = file.with_name(f".{file.name}")
    with errors_named(file):
        with unfinished.open("wb") as out:
            out.write(text.encode())
            finish_file(out)
        unfinished.replace(file)
        sync_folder(file.parent)

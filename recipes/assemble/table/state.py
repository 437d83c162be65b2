"""The folder in which a table's counts lie while they grow: whose counts they are, and who may count into it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....checkpoints.storage.atomic import atomic_text
from ....train.parallel.interrupts import StopSignals
from ....train.table.counting import lock
from ....train.table.documents import read_progress
from ....train.table.run_files import INDEX
from ...session.terminal import log

STOP = "stop"
"""A process that has failed or was sent a signal leaves it for the others, which are in no step with it."""
LAUNCH = "token"
IDENTITY = "identity.json"
PARTS = "parts"
CONSIDERABLE = 1 << 20
"""Tokens whose counts nobody loses without being asked: some seconds of work."""
_SECONDS_BETWEEN_LOOKS = 1.0
_SHOWN_DIFFERENCES = 4
_SHOWN_VALUE = 40
_RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
_NAMES = {"options": "data", "cleaning": "data.clean", "pairs": "count.pairs", "roles": "count.roles"}
"""What a recipe calls the parts of an identity."""

Positions = dict[int, dict[int, int]]
"""By numbers of processes: the positions that they came to, by their ranks."""


class Stopping:
    """Whether to stop counting: a signal came, or another process of this launch has stopped (`by_another`)."""

    def __init__(self, signals: StopSignals, folder: Path) -> None:
        self._signals, self._file = signals, folder / STOP
        self._look = 0.0
        self.by_another = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self._look:
            self._look = now + _SECONDS_BETWEEN_LOOKS
            self.by_another = self.by_another or self._file.exists()
        return self.by_another or self._signals.received is not None


def rank_folders(folder: Path) -> list[tuple[Path, int, int]]:
    """Folders of counts with the rank and the number of processes that wrote them, in one order everywhere."""
    found = ((path, _RANK_FOLDER.fullmatch(path.name)) for path in folder.iterdir())
    ranks = [(path, int(match[1]), int(match[2])) for path, match in found if match is not None]
    return sorted(ranks, key=lambda entry: (entry[2], entry[1]))


def read_positions(folder: Path) -> tuple[Positions, str | None]:
    """How far each process came of each number of processes that counted here, see `Share`; and by what those
    positions are numbered, which is the same for all of them (None where nothing is counted yet)."""
    positions: Positions = {}
    numbering = None
    for path, rank, world in rank_folders(folder):
        progress = read_progress(path)
        positions.setdefault(world, {})[rank] = progress.position
        numbering = numbering or progress.by
    return positions, numbering


def counted_tokens(folder: Path) -> int:
    """Tokens that all processes together have on disk."""
    return sum(read_progress(path).tokens for path, _, _ in rank_folders(folder))


def check_nobody_counts(folder: Path) -> None:
    """ValueError where a process of an earlier launch, which has outlived it, still counts into a rank's folder."""
    for path, _, _ in rank_folders(folder):
        os.close(lock(path))


def claim_counts(folder: Path, identity: dict[str, Any]) -> None:
    """Make the folder that of counts with this identity: those that it holds are resumed, or discarded if they have
    another identity and are few."""
    theirs = _read_identity(folder)
    if theirs == identity:
        return
    if theirs is not None:
        discard_counts(folder, theirs, identity)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    atomic_text(folder / IDENTITY, json.dumps(identity))


def discard_counts(folder: Path, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Report that counts of other settings are discarded; ValueError where they took considerable time."""
    tokens = counted_tokens(folder)
    holds = f"{folder} holds counts of {tokens:,} tokens with other settings ({differences(theirs, mine)})"
    if tokens >= CONSIDERABLE:
        raise ValueError(f"{holds}: set them back to resume, delete that folder to restart, or choose another `out`")
    if tokens:
        log(f"table: restarting: {holds}")


def _read_identity(folder: Path) -> dict[str, Any] | None:
    """Whose counts a folder holds; None where it holds none."""
    file, found = folder / IDENTITY, None
    with suppress(FileNotFoundError, ValueError):
        found = json.loads(file.read_bytes())
    if isinstance(found, dict):
        return found
    if any((path / INDEX).is_file() for path, _, _ in rank_folders(folder)):
        raise ValueError(
            f"{file} is missing or damaged, and nothing else says whose counts these are; delete {folder} to restart"
        )
    return None


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The settings in which two identities of counts differ, with both values."""
    one, other = (dict(_flat(side)) for side in (theirs, mine))
    shown = [
        f"{key}: {_short(one.get(key))} there, {_short(other.get(key))} here"
        for key in one | other
        if one.get(key) != other.get(key)
    ]
    more = len(shown) - _SHOWN_DIFFERENCES
    return "; ".join(shown[:_SHOWN_DIFFERENCES] + [f"and {more} more"] * (more > 0))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted keys, as recipes name them."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        value = {str(index): each for index, each in enumerate(value)}
    if not isinstance(value, dict):
        yield name, value
        return
    for key, each in value.items():
        yield from _flat(each, f"{name}.{key}" if name else _NAMES.get(key, str(key)))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}…"

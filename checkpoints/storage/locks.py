"""One writer at a time: a lock that the system takes back when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LONGEST_NAME = 300  # of a holder
_HELD: set[IO[bytes]] = set()


def _let_go() -> None:
    for held in _HELD:
        held.close()  # which leaves the lock to the process that has it
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Keep other processes from what stands at `path` while the block runs; see `locked`. Where the file system has no
    locks nobody is kept out, and a warning says so. Raises ValueError: another process is at it, whose number and
    machine are named; OSError: the lock's file cannot be made."""
    with locked(path) as is_locked:
        if not is_locked:
            warnings.warn(f"{path}.lock cannot be locked here: start nothing else that writes {path}", stacklevel=3)
        yield


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold `<path>.lock`, which says by whom, and is deleted at the end; one that a killed process left is nobody's.
    Gives False where the file system has no locks. Raises what `sole_writer` raises, unless it is to `wait`.

    The lock is `flock`'s, and forked processes, such as those that load data, let go of it at once: they may outlive a
    killed holder by seconds. Over NFS it holds between machines; that of a lost one is the server's to take back
    (version 4: after its lease, mostly 90 s).
    """
    file = path.with_name(f"{path.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    held, is_locked = _opened(file, path, wait)
    with held:
        _HELD.add(held)
        held.truncate(0)
        held.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield is_locked
        finally:
            _HELD.discard(held)
            file.unlink(missing_ok=True)  # still locked: who has opened it meanwhile finds that it is gone


def _opened(file: Path, path: Path, wait: bool) -> tuple[IO[bytes], bool]:
    while True:
        held = file.open("a+b", buffering=0)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            held.seek(0)
            holder = held.read(_LONGEST_NAME).decode(errors="replace") or "another process"
            held.close()
            raise ValueError(f"{holder} is writing {path}: wait for it, or choose another `out`") from error
        except OSError:
            return held, False
        if still_stands(held.fileno(), file):
            return held, True
        held.close()


def still_stands(descriptor: int, path: Path) -> bool:
    """Whether an opened file or folder still stands under its name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False

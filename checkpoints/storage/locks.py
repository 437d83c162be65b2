"""File locks for exclusive writers. The operating system releases a lock when its process ends."""

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LONGEST_NAME = 300  # bytes
_HELD: set[IO[bytes]] = set()


def _release_locks() -> None:
    for file in _HELD:
        file.close()  # the parent process keeps the lock
    _HELD.clear()


os.register_at_fork(after_in_child=_release_locks)


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Prevent other processes from writing `path` during the block; see `locked`.

    Warns if the file system does not support locks. Raises ValueError if another process has the lock.
    """
    with locked(path) as is_locked:
        if not is_locked:
            warnings.warn(
                f"{path}.lock cannot be locked on this file system: do not start another process that writes {path}",
                stacklevel=3,
            )
        yield


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock `<path>.lock` during the block, and yield True, or False if the file system does not support locks.

    If another process has the lock, wait for it if `wait` is True; otherwise raise ValueError. The lock uses
    `flock`, which also works between machines over NFS. Forked processes release it immediately, because they
    may outlive an interrupted parent process by seconds.
    """
    file = path.with_name(f"{path.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, is_locked = _open_locked(file, path, wait)
    with lock:
        _HELD.add(lock)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield is_locked
        finally:
            _HELD.discard(lock)
            file.unlink(missing_ok=True)  # still locked, so that waiting processes notice the deletion


def _open_locked(file: Path, path: Path, wait: bool) -> tuple[IO[bytes], bool]:
    while True:
        lock = file.open("a+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read(_LONGEST_NAME).decode(errors="replace") or "another process"
            lock.close()
            raise ValueError(f"{holder} is writing {path}: wait until it ends, or choose another `out`") from error
        except OSError:
            return lock, False
        if is_same_file(lock.fileno(), file):
            return lock, True
        lock.close()


def is_same_file(descriptor: int, path: Path) -> bool:
    """Check if an open file descriptor still refers to the file or folder at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False

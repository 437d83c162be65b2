"""Files and folders that are there whole, or not at all; and reading a folder that a writer may replace meanwhile."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

Found = TypeVar("Found")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
"""What renaming says where another writer was faster."""
_ATTEMPTS = 100
"""Of reading or writing what others write at the same time; each that fails is one of theirs that did not."""
_GAP_SECONDS = 2.0
"""The longest wait for a writer between its two renames, which are microseconds apart while it runs."""
_MISSES = 3
"""Looks that find neither a folder nor one moved aside before it is said to be missing: one may fall between the end of
a writer's renames and the beginning of the next one's."""


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. It stands at `path`, on the disk, when the block ends; where that fails, what stood there stays.
    Its folder is made.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with errors_named(path):
            with unfinished.open("wb+") as out:
                yield out
                finish_file(out)
            unfinished.replace(path)
            sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_dir(out: Path) -> Iterator[Path]:
    """An empty folder to write to. It stands at `out`, on the disk, when the block ends, in place of what stood there;
    where that fails, this stays. Of two writers at once the last one wins.

    A reader finds the former or the new folder at every moment where the system can swap two folders in one step (Linux
    on most file systems). Elsewhere nothing stands at `out` between two renames, which `read_consistent` waits for.

    The folder's name is `.NAME.HOST-….saving`, and what is moved aside ends in `.old`. A writer holds a lock on its
    own, so that those of killed writers are told apart: they are removed here, or put back if nothing stands at `out`.
    Not where file systems have no locks, nor those of other hosts, as some file systems lock for each host alone.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out = out.resolve()  # a link to a folder stays a link
    _clear_leftovers(out)
    unfinished, lock = _claim(out)
    try:
        yield unfinished
        _make_readable(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        _put_in_place(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.close(lock)


def read_consistent(folder: Path, read: Callable[[], Found]) -> Found:
    """What `read` finds in a folder that writers may replace at any time: all of one state of it. Where it was replaced
    meanwhile, it is read again.

    Raises:
        ValueError, OSError: what `read` raises of a folder that stayed; a folder that is replaced all the time.
    """
    for _ in range(_ATTEMPTS):
        held = _opened(folder)
        if held is None:
            return read()  # which says in its own words what is wrong
        try:
            found = read()
            if _stands(held, folder):
                return found
        except (ValueError, OSError):
            if _stands(held, folder):
                raise
        finally:
            os.close(held)
    raise ValueError(f"{folder} was replaced {_ATTEMPTS} times while it was read: read it when its writer has finished")


def _opened(folder: Path) -> int | None:
    """A descriptor, so that no other folder gets this one's number; None where there is no folder, nor will be when a
    writer that lives has done its second rename."""
    deadline, misses = time.monotonic() + _GAP_SECONDS, 0
    while misses < _MISSES and time.monotonic() < deadline:
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            misses = 0 if _is_between_renames(folder) else misses + 1
            time.sleep(0.001)
        except OSError:
            return None
    return None


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish_file(out: IO[bytes]) -> None:
    """Flush a file to the disk."""
    out.flush()
    os.fsync(out.fileno())


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Name the file in errors of writing: the system does so for opening alone."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def left_aside(out: Path) -> list[Path]:
    """Former folders that stood at `out` and were moved aside by writers that have not finished."""
    return [path for path in _beside(out) if path.suffix == ".old"]


def _beside(out: Path, host: str = r"[A-Za-z0-9\-]+") -> list[Path]:
    """Folders of unfinished writers of `out`."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.{host}-\w{{8}}\.(saving|old)")
    try:
        return sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]


def _claim(out: Path) -> tuple[Path, int]:
    """A new folder beside `out`, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.{_host()}-", suffix=".saving", dir=out.parent))
        # Another writer may take it for a leftover in the moment before it is locked, and remove it: once more then.
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _lock(descriptor, wait=True)
            if _stands(descriptor, folder):
                return folder, descriptor
            os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether a folder is locked now. Where there are no locks: whether that was worth a wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return wait
    return True


def _stands(descriptor: int, folder: Path) -> bool:
    """Whether an opened folder still stands under its name."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Whether the folder is here and nobody alive writes it, as long as this lasts."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor, wait=wait) and _stands(descriptor, folder)
    finally:
        os.close(descriptor)


def _clear_leftovers(out: Path) -> None:
    for folder in _beside(out, re.escape(_host())):
        with _locked(folder, wait=False) as ours:
            if not ours:
                continue
            if folder.suffix == ".old" and not out.exists():
                folder.rename(out)  # its writer was killed between two renames
            else:
                shutil.rmtree(folder, ignore_errors=True)


def _is_between_renames(out: Path) -> bool:
    """Whether a writer that lives has moved the folder aside and not yet put the new one there."""
    for aside in left_aside(out.resolve()):
        with _locked(aside, wait=False) as abandoned:
            if not abandoned:
                return True
    return False


def _make_readable(folder: Path) -> None:
    """mkdtemp makes a private folder, safetensors files that their owner alone may read; and others serve them."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
    folder.chmod(0o755)


def _put_in_place(new: Path, out: Path) -> None:
    """Rename `new` to `out`. What stood there ends up under the name `new` or is removed."""
    for _ in range(_ATTEMPTS):
        try:
            if not out.exists():
                new.rename(out)
                break
            if _exchange(new, out) or _replace(new, out):
                break
        except OSError as error:
            if error.errno not in _TAKEN or not new.exists():
                raise
    else:
        raise OSError(errno.EBUSY, "replaced by others all the time", str(out))
    sync(out.parent)


def _replace(new: Path, out: Path) -> bool:
    """Put `new` there in two steps, one writer at a time; between them nothing stands at `out`. False where another
    writer was faster."""
    with _locked(out, wait=True) as ours:
        if not ours:
            return False
        aside = out.with_name(f".{out.name}.{_host()}-{secrets.token_hex(4)}.old")
        out.rename(aside)
        try:
            new.rename(out)
        except OSError:
            with suppress(OSError):
                aside.rename(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, so that each name always stands for one of them. False where that is not known."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def atomic_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole and on the disk, or leave what stood there; its folder is made.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    with atomic_file(path) as out:
        out.write(text.encode())


def read_told(path: Path, what: str, command: str, schema: int, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """What a command wrote as JSON.

    Args:
        what: it is, for the message.
        fits: whether it has the form of that schema; may raise what a value of another form raises.

    Raises:
        ValueError: it is something else, or of another schema, naming the file.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        known = fits(told)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno} is damaged: {error.msg}") from error
    except (UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no {what} of `{command}`: {error!r}") from error
    if not known:
        raise ValueError(f"{path} is no {what} of schema {schema}: `{command}` writes a new one")
    return dict(told)

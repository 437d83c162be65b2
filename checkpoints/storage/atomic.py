"""Files and folders that are there whole, or not at all; and reading a folder that a writer may replace meanwhile."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

Found = TypeVar("Found")

_READS = 100
"""Of a folder that is replaced each time."""


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write. It stands at `path`, on the disk, when the block ends; where that fails, what stood there stays.
    Its folder is made. Errors name the file."""
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


def atomic_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 as `atomic_file` does."""
    with atomic_file(path) as out:
        out.write(text.encode())


def check_writable(path: Path) -> None:
    """Raises ValueError where no file and no folder can be made at a path: to be called before what takes long. Folders
    above it that are not there are not made."""
    above = next(each for each in path.absolute().parents if os.path.exists(each))
    try:
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written at {path}: {above}: {error.strerror}") from error


@contextmanager
def atomic_dir(out: Path) -> Iterator[Path]:
    """An empty folder to write to. It stands at `out`, on the disk, when the block ends, in place of what stood there;
    where that fails, this stays. Of two writers at once the last one wins.

    What stood there is renamed aside first, and `read_consistent` waits for the moment between the two renames. What
    killed writers of this machine left is removed here, or put back if nothing stands at `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out = out.resolve()  # a link to a folder stays a link
    _clear_leftovers(out)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.saving")
    unfinished.mkdir()
    try:
        yield unfinished
        mode = unfinished.stat().st_mode & 0o666
        for path in (*unfinished.rglob("*"), unfinished):
            if path.is_file():
                path.chmod(mode)  # safetensors makes files for their owner alone
            sync(path)
        _put_in_place(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(new: Path, out: Path) -> None:
    aside = new.with_suffix(".old")
    with _locked(out.parent):
        if out.exists():
            out.rename(aside)
        try:
            new.rename(out)
        except OSError:
            with suppress(OSError):
                aside.rename(out)
            raise
    sync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    for folder in _beside(out, "old|saving"):
        writer = int(folder.name.split(".")[-2].partition("-")[0])
        if _is_running(writer):
            continue
        with _locked(out.parent), suppress(FileNotFoundError):
            if folder.suffix == ".old" and not out.exists():
                folder.rename(out)  # its writer was killed between two renames
        shutil.rmtree(folder, ignore_errors=True)


def left_aside(out: Path) -> list[Path]:
    """Former folders that stood at `out` and were moved aside by writers that have not finished."""
    return _beside(out, "old")


def _beside(out: Path, suffix: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(out.name)}\.\d+-[0-9a-f]{{8}}\.({suffix})")
    try:
        return sorted(path for path in out.parent.iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, on file systems that have locks; the lock of a killed one is gone with it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_consistent(folder: Path, read: Callable[[], Found]) -> Found:
    """What `read` finds in a folder that writers may replace at any time: all of one state of it. Where it was replaced
    meanwhile, it is read again. Raises ValueError, OSError: what `read` raises of a folder that stayed; a folder that
    is replaced all the time."""
    for _ in range(_READS):
        held = _opened(folder)
        if held is None:
            return read()  # which says in its own words what is wrong
        try:
            found = read()
            if _still_stands(held, folder):
                return found
        except (ValueError, OSError):
            if _still_stands(held, folder):
                raise
        finally:
            os.close(held)
    raise ValueError(f"{folder} was replaced {_READS} times while it was read: read it when its writer has finished")


def stands(path: Path) -> bool:
    """Whether something stands at a path, also where a writer is between its two renames."""
    if path.exists():
        return True
    with suppress(OSError), _locked(path.absolute().parent):
        return path.exists()
    return False


def _opened(folder: Path) -> int | None:
    """A descriptor, so that no other folder gets this one's number; None where there is no folder."""
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError), _locked(folder.resolve().parent):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    return None


def _still_stands(descriptor: int, folder: Path) -> bool:
    """Whether an opened folder still stands under its name."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except OSError:
        return False


def sync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish_file(out: IO[bytes]) -> None:
    """Flush an open file to the disk."""
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

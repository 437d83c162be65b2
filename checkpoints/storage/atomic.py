"""Atomic writing of files and folders."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from .locks import locked

_UNFINISHED = re.compile(r"(\.(?P<name>.+)\.\d+-[0-9a-f]{8})\.(old|saving|saving\.lock)")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that atomically replaces `path` when the block ends. It is discarded on errors.

    The parent folder is created, and temporary files of interrupted writers are removed. Errors include the path.
    """
    check_writable(path)
    with _temporary_path(path) as unfinished, name_errors(path):
        with unfinished.open("wb+") as out:
            yield out
            finish_file(out)
        unfinished.replace(path)
        sync(path.parent)


def atomic_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically (see `atomic_file`)."""
    with atomic_file(path) as out:
        out.write(text.encode())


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Check that a file or folder can be written at a path, without creating it. Call it before long computations.

    Raises ValueError if the path is not writable, or exists and is not a regular file (or, with `folder`, a directory).
    """
    if os.path.lexists(path) and not (path.is_dir() if folder else path.is_file() and not path.is_symlink()):
        kind = "directory" if folder else "regular file"
        raise ValueError(f"{path} exists and is not a {kind}: choose another path")
    above = next(each for each in path.absolute().parents if os.path.exists(each))
    try:
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"{path} is not writable: {above}: {error.strerror}") from error


@contextmanager
def atomic_dir(out: Path) -> Iterator[Path]:
    """Create a temporary folder that replaces `out` when the block ends. It is discarded on errors.

    The old folder is renamed first. Temporary folders of interrupted writers are removed, and folders that they had
    renamed are restored. If several processes write to `out`, the last one takes effect.
    """
    out = out.resolve()  # so that a link to a folder is not replaced
    with _temporary_path(out) as unfinished:
        unfinished.mkdir()
        yield unfinished
        mode = unfinished.stat().st_mode & 0o666
        for path in (*unfinished.rglob("*"), unfinished):
            if path.is_file():
                path.chmod(mode)  # safetensors creates files that only their owner can read
            sync(path)
        _put_in_place(unfinished, out)


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is locked during the block and removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path.parent)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.saving")
    with locked(unfinished, wait=True):  # other processes may hold the lock briefly in `_clear_leftovers`
        try:
            yield unfinished
        finally:
            remove(unfinished)


def _put_in_place(new: Path, out: Path) -> None:
    former = new.with_suffix(".old")
    with _lock_folder(out.parent):
        if out.exists():
            out.rename(former)
        try:
            new.rename(out)
        except OSError:
            with suppress(OSError):
                former.rename(out)
            raise
    sync(out.parent)
    remove(former)


def _clear_leftovers(folder: Path) -> None:
    """Remove temporary files of interrupted writers in a folder, and restore folders that they had renamed."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if match := _UNFINISHED.fullmatch(name):
                with suppress(ValueError, OSError), locked(folder / f"{match[1]}.saving") as is_certain:
                    if is_certain:  # without the lock, another process may be using it
                        _clear(folder / name, folder / match["name"])


def _clear(path: Path, out: Path) -> None:
    if path.suffix == ".old":
        with _lock_folder(path.parent), suppress(FileNotFoundError):
            if not out.exists():
                path.rename(out)  # its writer was interrupted between two renames
    if path.suffix != ".lock":  # a lock file is deleted with its lock
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, link or folder if it exists, ignoring errors within a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, if the file system supports locks. The lock is released when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish_file(out: IO[bytes]) -> None:
    """Flush an open file to disk."""
    out.flush()
    os.fsync(out.fileno())


def append_line(file: IO[bytes], line: bytes) -> None:
    """Append a line to an unbuffered file. If the disk is full, the partial line is removed and the error is raised."""
    start = file.seek(0, os.SEEK_END)
    rest = line + b"\n"
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Add the path to OSErrors that have no file name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error

"""Atomic writes of files and folders with failures, full disks, killed writers and concurrent readers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from draftsmith.checkpoints.storage.atomic import atomic_dir, atomic_file, atomic_text
from draftsmith.checkpoints.storage.locks import locked, sole_writer
from tqdm import tqdm

VOCAB = 16
CONTENTS = ("a", "b")


def test_a_file_is_replaced_and_its_folder_created(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "c.json"
    for text in ("first, and longer\n", "–\n", ""):
        atomic_text(file, text)
        assert file.read_bytes() == text.encode()
        assert list(file.parent.iterdir()) == [file]


def test_a_failure_leaves_the_former_file_only(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    with pytest.raises(ValueError, match="is not a regular file"):
        atomic_text(folder, "text")
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        atomic_text(file, "half \ud800")
    assert file.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [file, folder]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_reported_with_the_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> str:
        (tmp_path / f".a.json.{os.getpid()}-01234567.saving").symlink_to("/dev/full")
        return "01234567"

    monkeypatch.setattr("secrets.token_hex", full)
    with pytest.raises(OSError, match=r"a\.json") as failed:
        atomic_text(tmp_path / "a.json", "text")
    assert failed.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def write(out: Path, content: str) -> None:
    """Write a folder of three files with the same content."""
    with atomic_dir(out) as folder:
        for number in range(3):
            (folder / f"{number}.txt").write_text(content)


def content_of(out: Path) -> str:
    """Check that all files in a folder have the same content, and return it."""
    contents = [path.read_text() for path in sorted(out.iterdir())]
    assert len(contents) == 3
    assert len(set(contents)) == 1
    return contents[0]


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a child process, which is killed at the end of the context, and yield its id."""
    child = os.fork()
    if not child:
        tqdm.set_lock(threading.RLock())  # the default lock is shared: a killed child would block this process
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.005)


def replace_for_ever(save: Callable[[Path, str], None], out: Path, contents: Sequence[str] = CONTENTS) -> None:
    for content in cycle(contents):
        save(out, content)


def test_permissions_and_links(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "real") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "private").touch(mode=0o600)
    assert (tmp_path / "real" / "deep" / "private").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o755
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert content_of(tmp_path / "real") == "new"
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize("step", ["write", "rename"])
@pytest.mark.parametrize("before", [None, "old"])
def test_a_failure_leaves_the_former_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: str | None
) -> None:
    out, rename = tmp_path / "t", Path.rename
    if before is not None:
        write(out, before)

    def fail(self: Path, target: Path) -> Path:
        if self.suffix == ".saving":
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    if step == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((OSError, UnicodeEncodeError)):
        write(out, "half \ud800" if step == "write" else "new")
    assert os.listdir(tmp_path) == ([] if before is None else ["t"])
    assert before is None or content_of(out) == before


def test_the_last_of_two_writers_wins_completely(tmp_path: Path) -> None:
    out = tmp_path / "t"

    def save_often(content: str) -> None:
        for _ in range(50):
            write(out, content)

    with forked(lambda: save_often("a")) as one, forked(lambda: save_often("b")) as other:
        assert [ended(one), ended(other)] == [0, 0]
    assert content_of(out) in CONTENTS
    assert os.listdir(tmp_path) == ["t"]


def die_between_renames(out: Path) -> None:
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if self.suffix == ".saving":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = die  # type: ignore[method-assign]
    write(out, "b")


def test_the_backup_of_a_killed_writer_is_restored(tmp_path: Path) -> None:
    out = tmp_path / "t"
    write(out, "a")
    with forked(lambda: die_between_renames(out)) as writer:
        assert ended(writer) == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(UnicodeEncodeError):
        write(out, "\ud800")
    assert content_of(out) == "a"
    assert os.listdir(tmp_path) == ["t"]


def test_the_folder_of_an_active_writer_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "t"
    with atomic_dir(out) as folder:
        write(out, "a")  # also removes files of killed writers
        assert folder.is_dir()
        for number in range(3):
            (folder / f"{number}.txt").write_text("b")
    assert content_of(out) == "b"
    assert os.listdir(tmp_path) == ["t"]


def test_only_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    with forked(lambda: None) as child:
        ended(child)  # a process that no longer exists
    remaining = [f".t.{child}-abcd1234.saving.mine", ".t.saving"]
    removed = [f".t.{child}-abcd1234.saving", f".t.{child}-abcd1235.old", f".other.x.{child}-abcd1234.saving"]
    # in containers, an earlier process may have had the id of this one
    reused, back = f".other.{os.getpid()}-abcd1234.saving", f".back.{child}-abcd1234.old"
    for name in (*remaining, *removed, reused, back):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / f".file.{child}-abcd1234.saving").write_text("half")
    (tmp_path / f"{reused}.lock").write_text("of no process")
    write(tmp_path / "t", "a")
    assert sorted(os.listdir(tmp_path)) == sorted([*remaining, "back", "t"])


@pytest.mark.parametrize("writer", [atomic_dir, atomic_file])
def test_files_of_an_active_process_are_kept(tmp_path: Path, writer: Callable[..., Any]) -> None:
    def write_for_ever() -> None:
        with writer(tmp_path / "theirs"):
            (tmp_path / "begun").touch()
            time.sleep(600)

    with forked(write_for_ever) as child:
        wait_for((tmp_path / "begun").exists)
        write(tmp_path / "mine", "a")
        (unfinished,) = tmp_path.glob(f".theirs.{child}-*.saving")
        assert unfinished.with_name(f"{unfinished.name}.lock").exists()
        os.kill(child, signal.SIGKILL)
        ended(child)
        write(tmp_path / "mine", "b")
    assert sorted(os.listdir(tmp_path)) == ["begun", "mine"]


def hold(path: Path) -> None:
    with sole_writer(path):
        time.sleep(600)


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "out.lock"
    with forked(lambda: hold(out)) as child:
        wait_for(lambda: file.exists() and file.read_text())
        with pytest.raises(ValueError, match=rf"^process {child} on {socket.gethostname()} .*{out}:"):
            hold(out)
        assert file.exists()
        os.kill(child, signal.SIGKILL)
        ended(child)
    with sole_writer(out):
        assert file.exists()
        with pytest.raises(ValueError, match=rf"^process {os.getpid()} "):
            hold(out)
    assert not file.exists()
    with pytest.raises(BlockingIOError), sole_writer(out):
        raise BlockingIOError  # must not be reported as a lock error


def test_children_of_a_killed_holder_do_not_keep_its_lock(tmp_path: Path) -> None:
    out, alive = tmp_path / "out", tmp_path / "alive"

    def hold_and_fork() -> None:
        with sole_writer(out), forked(lambda: time.sleep(60)) as worker:
            alive.write_text(str(worker))
            time.sleep(60)

    with forked(hold_and_fork) as child:
        wait_for(lambda: alive.exists() and alive.read_text())
        os.kill(child, signal.SIGKILL)
        ended(child)
    worker = int(alive.read_text())
    with sole_writer(out):
        os.kill(worker, 0)  # the child still runs
    os.kill(worker, signal.SIGKILL)


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    """Four processes increment one file under the lock, which is deleted on release."""
    number = tmp_path / "number"
    number.write_text("0")

    def count_up() -> None:
        for _ in range(200):
            with locked(number, wait=True):
                number.write_text(str(int(number.read_text()) + 1))

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(forked(count_up)) for _ in range(4)]
        assert [ended(child) for child in children] == [0] * 4
    assert number.read_text() == "800"
    assert os.listdir(tmp_path) == ["number"]


def test_file_systems_without_locks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with forked(lambda: None) as child:
        ended(child)
    left = tmp_path / f".t.{child}-abcd1234.saving"
    left.mkdir()
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match=r"out\.lock"), sole_writer(tmp_path / "out"):
        pass
    write(tmp_path / "t", "a")
    assert left.is_dir()

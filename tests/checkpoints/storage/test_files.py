"""Files that are there whole, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from draftsmith.checkpoints.storage.atomic import atomic_text


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "c.json"
    for text in ("first, and longer\n", "–\n", ""):
        atomic_text(file, text)
        assert file.read_bytes() == text.encode()
        assert list(file.parent.iterdir()) == [file]


def test_what_fails_leaves_what_stood_there_and_nothing_else(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_text(folder, "text")
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        atomic_text(file, "half \ud800")
    assert file.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [file, folder]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)
    (tmp_path / ".a.json.7").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"a\.json") as failed:
        atomic_text(tmp_path / "a.json", "text")
    assert failed.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []

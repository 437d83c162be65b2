"""Text files that are there whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.folders import whole_file


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole and on the disk, or leave what stood there; its folder is made.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    with whole_file(path) as out:
        out.write(text.encode())

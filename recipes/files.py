"""Text files that are there whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoints.table_file import errors_named, finish_file, sync_folder


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole and on the disk, or leave what stood there; its folder is made.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with errors_named(path):
            with unfinished.open("wb") as out:
                out.write(text.encode())
                finish_file(out)
            unfinished.replace(path)
            sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)

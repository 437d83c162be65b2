"""Text files that are there whole, or not at all; and what stands in those that commands wrote as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoints.storage.atomic import whole_file


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole and on the disk, or leave what stood there; its folder is made.

    Raises:
        OSError: the disk is full, or the like; names the file.
    """
    with whole_file(path) as out:
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

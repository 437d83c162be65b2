"""Rows of local files and hub datasets, with the place each came from for error messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl", ".parquet")
INSTALL = "pip install 'draftsmith[train]'"


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read: `value` is whatever stood there, `place` is "file, row 3" for errors, `name` a default id."""

    value: Any
    place: str
    name: str


def open_source(source: str, *, split: str, revision: str | None, file: str | None) -> Iterator[Row]:
    """The rows of a file, of all files of a folder in sorted order, or of a hub dataset.

    Raises:
        ValueError: nothing to read at `source`, or a file that does not parse (raised when it is reached).
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder_rows(path)
    if path.is_file():
        return _file_rows(path)
    looks_local = path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local:
        raise ValueError(f"no such file or folder: {source}{_nearest(path)}")
    return _hub_rows(source, split, revision, file, _nearest(path) if path.parent.is_dir() else "")


def _nearest(path: Path) -> str:
    """What else lies in the folder of a missing path: the nearest name, or the first parent that is missing too."""
    if not path.parent.is_dir():
        return f" (the folder {path.parent} does not exist)"
    names = sorted(entry.name for entry in path.parent.iterdir())
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.with_name(close[0])}?)" if close else ""


def _folder_rows(folder: Path) -> Iterator[Row]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in SUFFIXES)
    if not files:
        found = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"{folder}: nothing to read, expected files ending in {', '.join(SUFFIXES)}; found "
            + (", ".join(found[:8]) or "an empty folder")
        )
    return (row for path in files for row in _file_rows(path))


def _file_rows(path: Path) -> Iterator[Row]:
    readers = {".json": _json_values, ".jsonl": _jsonl_values, ".parquet": _parquet_values}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}, found {path.suffix or 'no suffix'}")
    return (Row(value, f"{path}, row {number}", f"{path.stem}-{number}") for number, value in reader(path))


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        hint = "; one object a line belongs in a .jsonl file" if error.msg == "Extra data" else ""
        raise ValueError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}{hint}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    if not isinstance(values, list):
        raise ValueError(f"{path}: expected one list of rows, found {type(values).__name__}")
    yield from enumerate(values, start=1)


def _jsonl_values(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number}: not valid JSON: {error.msg}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error}") from error


def _parquet_values(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow: {INSTALL}") from error
    try:
        table = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path}: expected a parquet file, but it is none: {error}") from error
    wanted = {"id", "conversation_id", "conversations", "conversation", "messages"}
    wanted |= {"prompt", "response", "instruction", "input", "output"}
    present = table.schema_arrow.names
    # LMSYS-Chat-1M carries moderation scores several times the size of the text: read only what can be used
    columns = [name for name in present if name in wanted] or present
    number = 0
    for batch in table.iter_batches(batch_size=1024, columns=columns):
        for value in batch.to_pylist():
            number += 1
            yield number, value


def _hub_rows(source: str, split: str, revision: str | None, file: str | None, nearest: str) -> Iterator[Row]:
    missing = f"no such local file or folder: {source}{nearest}"
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{missing}; to load it from the hub: {INSTALL}") from error
    try:
        loaded = datasets.load_dataset(source, split=split, revision=revision, data_files=file)
    except (OSError, RuntimeError) as error:  # offline, unknown, gated: all of them are errors of these two kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{missing}, and the hub could not be reached for it: {reason[0]}") from error
    place = f"{source} ({split})"
    return (Row(value, f"{place}, row {n}", f"{source}-{n}") for n, value in enumerate(loaded, start=1))

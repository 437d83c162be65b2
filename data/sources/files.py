"""Streaming of rows from local JSON, JSONL and Parquet files in constant memory."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ...checkpoints.storage.messages import first_line, install_hint

SUFFIXES = (".json", ".jsonl", ".parquet")
_EXPECTED = f"{', '.join(SUFFIXES)}, .json.gz or .jsonl.gz"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that the `datasets` library writes into a directory of data files."""
_BATCH_ROWS = 256
CHUNK = 1 << 16
_MOST_BLANK = 1_000_000  # empty lines in a row
_LONGEST_LITERAL = 16  # characters: -Infinity, and pairs of \\uXXXX
_BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")

Columns = Callable[[Sequence[str]], Sequence[str]]
"""Function that selects the columns to load from the column names of a table."""
Shard = tuple[int, int]
"""Pair (index, count) that selects the rows with `number % count == index`."""
WHOLE: Shard = (0, 1)
_Rows = Iterator[tuple[int, Callable[[], Any]]]
"""Iterator over the rows of a file: the row number, counted from 1, and a function that parses the row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a data source.

    Attributes:
        value: Parsed value of the row.
        location: File and row number for error messages, such as "file, row 3".
        name: Id of the row if it has no id column.
        number: Number of the row in the whole source, starting at 0.
    """

    value: Any
    location: str
    name: str
    number: int = 0


def local_rows(
    path: Path, shard: Shard = WHOLE, *, split: str | None = None, columns: Columns = lambda names: names
) -> Iterator[Row]:
    """Yield the rows of a shard of a file, or of all data files in a directory (see `data_files`).

    `columns` selects the columns of Parquet files. Raises ValueError if there is no data file or a row is invalid.
    """
    index, count = shard
    number = 0
    for file in data_files(path, split):
        stem = (file.with_suffix("") if file.suffix.lower() == ".gz" else file).stem
        position = "before row 1"
        try:
            for row, parse in _file_rows(file, columns):
                position = f"row {row}"
                if number % count == index:
                    yield Row(parse(), f"{file}, {position}", f"{stem}-{number + 1}", number)
                number += 1
                position = f"after row {row}"
        except (ValueError, EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{file}, {position}: cannot be read: {first_line(error)}") from error


def data_files(path: Path, split: str | None) -> list[Path]:
    """Return the sorted data files of a path. Subdirectories are searched only if a directory has no data files.

    `split` selects files by name (`train.jsonl`, `train-00000-of-00002.parquet`, `train/…`), if any match.
    """
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: expected a file ending in {_EXPECTED}, found {path.suffix or 'no suffix'}")
        return [path]
    files = list(filter(_is_data, sorted(path.iterdir()))) or list(filter(_is_data, sorted(path.rglob("*"))))
    if not files:
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder"
        raise ValueError(f"{path}: no data files: expected files ending in {_EXPECTED}, found {entries}")
    if split is None:
        return files
    named = re.compile(rf"{re.escape(split)}($|[-.])")
    return [file for file in files if any(map(named.match, file.relative_to(path).parts))] or files


def _is_data(path: Path) -> bool:
    is_hidden = path.name.startswith(".") or path.name in _DESCRIPTIONS
    return not is_hidden and path.is_file() and _suffix(path) is not None


def _suffix(path: Path) -> str | None:
    """Return the format suffix of a file, ignoring `.gz`; None if the format is unknown."""
    is_packed = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if is_packed else path).suffix.lower()
    return suffix if suffix in SUFFIXES and not (is_packed and suffix == ".parquet") else None


def _file_rows(path: Path, columns: Columns) -> _Rows:
    suffix = _suffix(path)
    if suffix == ".parquet":
        yield from _parquet_rows(path, columns)
        return
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="\n") as stream:
        if suffix == ".jsonl":
            last = 0
            for row, line in enumerate(stream, start=1):
                if not line.isspace():
                    last = row
                    yield row, partial(json.loads, line)
                elif row - last > _MOST_BLANK:
                    raise ValueError(f"{_MOST_BLANK:,} empty lines in a row")
        else:
            for row, value in enumerate(_json_values(stream), start=1):
                yield row, partial(_same, value)


def _same(value: Any) -> Any:
    return value


def _json_values(stream: TextIO) -> Iterator[Any]:
    """Parse a JSON list, or consecutive JSON values, incrementally. Only one value is kept in memory.

    The `json` module and the `datasets` library can only load such a list as a whole.
    """
    decoder = json.JSONDecoder()
    text = stream.read(CHUNK).lstrip()
    is_list = text.startswith("[")
    at = int(is_list)
    while True:
        at = _BETWEEN_ROWS.match(text, at).end()  # type: ignore[union-attr]
        if is_list and text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            # The error position of an incomplete value is at the end of the text.
            is_cut = error.pos > len(text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
            # Doubling the buffer limits the number of times that a long value is parsed.
            more = stream.read(max(CHUNK, len(text) - at)) if is_cut else ""
            if not more and at == len(text) and not is_list:
                return
            if not more:
                raise
            text, at = text[at:] + more, 0
        else:
            yield value


def _parquet_rows(path: Path, columns: Columns) -> _Rows:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading .parquet requires pyarrow: {install_hint('train')}") from error
    with parquet.ParquetFile(path, memory_map=True) as file:
        batches = file.iter_batches(_BATCH_ROWS, columns=list(columns(file.schema_arrow.names)))
        places = ((batch, number) for batch in batches for number in range(len(batch)))
        for row, (batch, number) in enumerate(places, start=1):
            yield row, partial(_table_row, batch, number)


def _table_row(batch: Any, number: int) -> Any:
    return batch.slice(number, 1).to_pylist()[0]

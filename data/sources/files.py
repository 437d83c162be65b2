"""Rows of local files, as a stream of constant memory, each with the location it came from for error messages."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.storage.messages import first_line, install_hint
from .json_stream import MAX_VALUE, JsonValues, TooLargeError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt")
PACKED = (".gz", ".zst")
EXPECTED = f"{', '.join(SUFFIXES)} (those of JSON and text also with {' or '.join(PACKED)})"
# what `datasets` writes beside its rows
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 28
_MOST_UNPACKED = 200
"""Bytes of a parquet file's column to one of the file, where they are more than `MAX_VALUE`; texts have some ten."""
_DAMAGED = "file cut short or damaged"

Columns = Callable[[Sequence[str]], Sequence[str]]
UNREAD: Any = ...
"""In the place of a value in a column that was not read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `value` is whatever stood there, `location` is "file, row 3" for errors, `name` a default id; `number`
    counts the rows of the whole source from 0."""

    value: Any
    location: str
    name: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows with `number % count == index`: shards neither overlap nor leave a row out."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard is {self.index} of {self.count}, expected 0 to count - 1 of a count of at least 1")

    def rows(self, first: int, end: int) -> range:
        """Its numbers of `first` … `end - 1`."""
        return range(first + (self.index - first) % self.count, end, self.count)


WHOLE = Shard()


class _BrokenError(Exception):
    """A row, or what is left of a file, that cannot be read; `reason` is what it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Cursor:
    """The number of the next row, over all files."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.next = 0

    def claim(self, count: int = 1) -> range:
        """Take the next `count` numbers; those of them that are of the shard."""
        wanted = self.shard.rows(self.next, self.next + count)
        self.next += count
        return wanted


Found = tuple[int, int, Any]
"""The row in its file, from 1; its number; its value, or why there is none (`_BrokenError`)."""


def local_rows(
    path: Path,
    shard: Shard = WHOLE,
    *,
    split: str | None = None,
    columns: Columns = lambda names: names,
    skip_broken: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[Row]:
    """The rows of a file, or of all files of a folder (see `data_files`), that are of the shard.

    `columns` chooses among the column names of a parquet or arrow file. With `skip_broken` what cannot be read is
    counted in `skipped` by reason, else it is an error.

    Raises ValueError: nothing to read at `path`; when it is reached, what cannot be read, unless broken rows are
    skipped.
    """
    cursor = _Cursor(shard)
    for file in data_files(path, split):
        stem = (file.with_suffix("") if file.suffix.lower() in PACKED else file).stem
        for row, number, value in _file_rows(file, cursor, columns):
            if not isinstance(value, _BrokenError):
                yield Row(value, f"{file}, row {row}", f"{stem}-{number + 1}", number)
            elif not skip_broken:
                raise ValueError(str(value))
            elif skipped is not None and number % shard.count == shard.index:
                skipped[value.reason] += 1  # every shard sees the end of a broken file, one of them counts it


def data_files(path: Path, split: str | None) -> list[Path]:
    """The files that are read of a path, in sorted order: a folder's text files where it has no other, its sub-folders
    where it has no file. `split` picks those named after it (`train.jsonl`, `train-00000-of-00002.parquet`, `train/…`),
    where there are any."""
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: expected a file ending in {EXPECTED}, found {path.suffix or 'no suffix'}")
        return [path]
    readable = [file for file in sorted(path.iterdir()) if _is_data(file)]
    if not readable:
        readable = [file for file in sorted(path.rglob("*")) if _is_data(file)]
    files = [file for file in readable if _suffix(file) != ".txt"] or readable
    if not files:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder"
        raise ValueError(f"{path}: nothing to read, expected files ending in {EXPECTED}; found {found}")
    if split is None:
        return files
    named = re.compile(rf"{re.escape(split)}($|[-.])")
    return [file for file in files if any(map(named.match, file.relative_to(path).parts))] or files


def _is_data(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.name in _DESCRIPTIONS
    return not hidden and path.is_file() and _suffix(path) is not None


def _suffix(path: Path) -> str | None:
    """The suffix that says the format, without what it is packed with; None where the format is none of ours."""
    packed = path.suffix.lower() in PACKED
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    return suffix if suffix in SUFFIXES and not (packed and suffix in (".parquet", ".arrow")) else None


def _file_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Found]:
    first, suffix = cursor.next, _suffix(path)
    try:
        if suffix in (".parquet", ".arrow"):
            yield from (_parquet_rows if suffix == ".parquet" else _arrow_rows)(path, cursor, columns)
        else:
            yield from {".json": _json_rows, ".txt": _text_rows}.get(str(suffix), _jsonl_rows)(path, cursor)
        return
    except _BrokenError as error:
        broken = error
    except (EOFError, OSError, zlib.error) as error:
        rows = cursor.next - first
        message = f"{path}, after row {rows}: expected more, but the file is cut short or damaged: {error}"
        broken = _BrokenError(_DAMAGED, message)
    number = cursor.next
    cursor.claim()
    yield 0, number, broken


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked, without the mark that UTF-8 may begin with."""
    stream: Any
    if path.suffix.lower() == ".gz":
        stream = gzip.GzipFile(path, "rb")
    elif path.suffix.lower() == ".zst":
        stream = io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    else:
        stream = path.open("rb")
    with stream:
        begin = stream.peek(4)
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise _BrokenError("not UTF-8 text", f"{path}: expected UTF-8, found UTF-16: iconv -f UTF-16 -t UTF-8")
        if begin.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream


def _broken(location: str, error: ValueError | RecursionError, expected: str) -> _BrokenError:
    """What is wrong with a text that did not parse."""
    if isinstance(error, UnicodeDecodeError):
        reason, what = "not UTF-8 text", f": {error.reason} at byte {error.start}"
    elif isinstance(error, RecursionError):
        reason, what = "not valid JSON", ": nested too deeply"
    else:
        reason, what = "not valid JSON", f": {getattr(error, 'msg', error)}"
    return _BrokenError(reason, f"{location}: {reason}{what}; expected {expected}")


def _too_large(location: str) -> _BrokenError:
    return _BrokenError("too large", f"{location}: a row of more than {MAX_VALUE:,} bytes, the most that is read")


def _jsonl_rows(path: Path, cursor: _Cursor) -> Iterator[Found]:
    with _open(path) as stream:
        for row in itertools.count(1):
            line = stream.readline(MAX_VALUE + 1)
            if not line:
                return
            is_whole = len(line) <= MAX_VALUE
            while not is_whole and line and not line.endswith(b"\n"):
                line = stream.readline(MAX_VALUE)
            number = cursor.next
            if (is_whole and line.isspace()) or not cursor.claim():
                continue
            try:
                value = json.loads(line.decode("utf-8")) if is_whole else _too_large(f"{path}, row {row}")
            except (ValueError, RecursionError) as error:
                value = _broken(f"{path}, row {row}", error, "one JSON object a line")
            yield row, number, value


def _text_rows(path: Path, cursor: _Cursor) -> Iterator[Found]:
    """One file is one document."""
    number = cursor.next
    if not cursor.claim():
        return
    with _open(path) as stream:
        text = stream.read(MAX_VALUE + 1)
        try:
            yield 1, number, {"text": text.decode("utf-8")} if len(text) <= MAX_VALUE else _too_large(str(path))
        except UnicodeDecodeError as error:
            yield 1, number, _broken(f"{path}, row 1", error, "UTF-8")


def _json_rows(path: Path, cursor: _Cursor) -> Iterator[Found]:
    row = 0
    with _open(path) as stream:
        values = JsonValues(stream)
        try:
            for row, (value, is_utf8) in enumerate(values, start=1):
                number = cursor.next
                if cursor.claim():
                    broken = _BrokenError("not UTF-8 text", f"{path}, row {row}: not UTF-8 text")
                    yield row, number, value if is_utf8 else broken
        except TooLargeError as error:
            raise _too_large(f"{path}, after row {row}, line {values.line}") from error
        except (ValueError, RecursionError) as error:
            raise _broken(f"{path}, after row {row}, line {values.line}", error, "one list of rows") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        kind = path.suffix.lower().removeprefix(".")
        raise ValueError(f"{path}: reading {kind} needs pyarrow: {install_hint('train')}") from error
    return pyarrow


@contextmanager
def _arrow_errors(arrow: Any, path: Path) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        expected = f"a file in the {path.suffix.lower().removeprefix('.')} format"
        raise _BrokenError(_DAMAGED, f"{path}: expected {expected}, but: {first_line(error)}") from error


def chosen(columns: Columns, present: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The columns to read, and for the others what a row has in their place."""
    names = list(columns(present))
    return names, {name: UNREAD for name in present if name not in names}


def _parquet_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Found]:
    arrow = _pyarrow(path)
    import pyarrow.parquet as parquet

    row = 0
    with _arrow_errors(arrow, path), parquet.ParquetFile(path) as file:
        names, unread = chosen(columns, file.schema_arrow.names)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if cursor.shard.rows(cursor.next, cursor.next + rows):
                size = _BATCH_BYTES // max(1, _unpacked(path, file.metadata.row_group(group), names))
                size = max(1, min(size, _BATCH_ROWS))  # what stands there once may be the value of each row
                for batch in file.iter_batches(size, row_groups=[group], columns=names):
                    yield from _batch_rows(arrow, row, batch, cursor, unread)
                    row += batch.num_rows
            else:
                cursor.claim(rows)
                row += rows


def _unpacked(path: Path, group: Any, names: Sequence[str]) -> int:
    """Bytes of columns of a row group. Raises _BrokenError for one that could have been made to fill the memory."""
    columns = [group.column(index) for index in range(group.num_columns)]
    columns = [column for column in columns if column.path_in_schema.partition(".")[0] in names]
    for column in columns:
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if size > max(MAX_VALUE, _MOST_UNPACKED * packed):
            what = f"{path}: {packed:,} bytes of its column {column.path_in_schema} unpack to {size:,}"
            raise _BrokenError("too large", f"{what}, expected at most {_MOST_UNPACKED} times as many")
    return sum(column.total_uncompressed_size for column in columns)


def _arrow_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Found]:
    """Record batches, as a file with a footer or, as `datasets` writes them, as a stream."""
    arrow = _pyarrow(path)
    import pyarrow.ipc as ipc

    row = 0
    with _arrow_errors(arrow, path), arrow.memory_map(str(path)) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
        names, unread = chosen(columns, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for whole in batches:
            for at in range(0, whole.num_rows, _BATCH_ROWS):
                batch = whole.select(names).slice(at, _BATCH_ROWS)
                yield from _batch_rows(arrow, row, batch, cursor, unread)
                row += batch.num_rows


def _batch_rows(arrow: Any, row: int, batch: Any, cursor: _Cursor, unread: dict[str, Any]) -> Iterator[Found]:
    first = cursor.next
    wanted = cursor.claim(batch.num_rows)
    if len(wanted) < batch.num_rows:
        batch = batch.take(arrow.array([number - first for number in wanted], "int64"))
    for number, value in zip(wanted, batch.to_pylist(), strict=True):
        yield row + number - first + 1, number, value | unread

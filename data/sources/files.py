"""Rows of local files, as a stream of constant memory, each with the place it came from for error messages."""

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
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...checkpoints.storage.messages import first_line
from .json_stream import CHUNK, JsonText, is_utf8

INSTALL = "pip install 'draftsmith[train]'"
MAX_ROW_BYTES = 64 * 2**20
ROW_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow")
SUFFIXES = (*ROW_SUFFIXES, ".txt")
PACKED = (".gz", ".zst")
EXPECTED = f"{', '.join(SUFFIXES)} (those of JSON and text also with {' or '.join(PACKED)})"
# what `datasets` writes beside its rows
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_BATCH_ROWS = 256

Columns = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One row as read.

    `value` is whatever stood there, `place` is "file, row 3" for errors, `name` a default id; `number` counts the rows
    of the whole source from 0.
    """

    value: Any
    place: str
    name: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a source are wanted, and what becomes of those that cannot be read.

    Rows are numbered from 0 over all files of a source. Wanted are those with `number >= start` and
    `number % count == index`, where `shard` is (index, count): shards neither overlap nor leave a row out. A line or
    JSON value of more than `max_row_bytes` bytes is broken. With `skip_broken` what cannot be read is counted and
    passed over, else it is an error.

    Raises:
        ValueError: a shard that does not exist, a negative start, a limit below 1.
    """

    shard: tuple[int, int] = (0, 1)
    start: int = 0
    skip_broken: bool = False
    max_row_bytes: int = MAX_ROW_BYTES

    def __post_init__(self) -> None:
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard is {index} of {count}, expected 0 to count - 1 of a count of at least 1")
        if self.start < 0:
            raise ValueError(f"start is {self.start}, expected 0 or more")
        if self.max_row_bytes < 1:
            raise ValueError(f"max_row_bytes is {self.max_row_bytes}, expected at least 1")

    def wants(self, number: int) -> bool:
        return number >= self.start and number % self.shard[1] == self.shard[0]

    def wanted(self, first: int, end: int) -> range:
        """The wanted numbers of `first` … `end - 1`."""
        index, count = self.shard
        first = max(first, self.start)
        return range(first + (index - first) % count, end, count)


@dataclass(frozen=True, slots=True)
class _Broken:
    """What could not be read: `reason` to count it under, `message` to raise, the number it holds among the rows."""

    reason: str
    message: str
    number: int


class _UnreadableError(Exception):
    """Nothing more can be read of a file."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Cursor:
    """The number of the next row, over all files."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.next = 0

    def claim(self, count: int = 1) -> range:
        """Take the next `count` numbers; those of them that are wanted."""
        wanted = self.selection.wanted(self.next, self.next + count)
        self.next += count
        return wanted


def local_rows(
    path: Path,
    selection: Selection,
    *,
    split: str | None = None,
    columns: Columns = lambda names: names,
    skipped: Counter[str] | None = None,
) -> Iterator[Row]:
    """The wanted rows of a file, or of all files of a folder in sorted order.

    A folder's text files are read where it has no other, its sub-folders where it has no file. `split` picks the files
    that are named after it (`train.jsonl`, `train-00000-of-00002.parquet`, `train/…`), where there are any. `columns`
    chooses among the column names of a parquet or arrow file. `skipped` receives what was passed over, by reason.

    Raises:
        ValueError: nothing to read at `path`; when it is reached, what cannot be read, unless broken rows are skipped.
    """
    return _wanted_rows(data_files(path, split), selection, columns, Counter() if skipped is None else skipped)


def _wanted_rows(files: list[Path], selection: Selection, columns: Columns, skipped: Counter[str]) -> Iterator[Row]:
    cursor = _Cursor(selection)
    for path in files:
        for found in _file_rows(path, cursor, columns):
            if isinstance(found, Row):
                yield found
            elif not selection.skip_broken:
                raise ValueError(found.message)
            elif selection.wants(found.number):  # every shard sees the end of a broken file, one of them counts it
                skipped[found.reason] += 1


def data_files(path: Path, split: str | None) -> list[Path]:
    """The files that are read of a path, in their order.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: expected a file ending in {EXPECTED}, found {path.suffix or 'no suffix'}")
        return [path]
    readable = [file for file in sorted(path.iterdir()) if _is_data(file)]
    if not readable:
        readable = [file for file in sorted(path.rglob("*")) if _is_data(file)]
    files = [file for file in readable if _suffix(file) != ".txt"] or readable
    if not files:
        found = sorted(entry.name for entry in path.iterdir())
        raise ValueError(
            f"{path}: nothing to read, expected files ending in {EXPECTED}; found "
            + (", ".join(found[:8]) or "an empty folder")
        )
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
    known = suffix in SUFFIXES and not (packed and suffix in (".parquet", ".arrow"))
    return suffix if known else None


def _file_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Row | _Broken]:
    first, suffix = cursor.next, _suffix(path)
    try:
        if suffix in (".jsonl", ".ndjson"):
            yield from _jsonl_rows(path, cursor)
        elif suffix == ".json":
            yield from _json_rows(path, cursor)
        elif suffix == ".txt":
            yield from _text_rows(path, cursor)
        elif suffix == ".parquet":
            yield from _parquet_rows(path, cursor, columns)
        else:
            yield from _arrow_rows(path, cursor, columns)
    except _UnreadableError as error:
        yield _Broken(error.reason, str(error), cursor.next)
        cursor.claim()
    except (EOFError, OSError, zlib.error) as error:
        rows = cursor.next - first
        message = f"{path}, after row {rows}: expected more, but the file is cut short or damaged: {error}"
        yield _Broken("file cut short or damaged", message, cursor.next)
        cursor.claim()


def _row(path: Path, row: int, number: int, value: Any) -> Row:
    return Row(value, f"{path}, row {row}", f"{_stem(path)}-{number + 1}", number)


@lru_cache(maxsize=8)
def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(path.suffix) if path.suffix.lower() in PACKED else path.name).stem


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
            raise _UnreadableError(
                "not UTF-8 text",
                f"{path}: expected UTF-8, found UTF-16 (its byte order mark says so): iconv -f UTF-16 -t UTF-8",
            )
        if begin.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield stream


def _fault(error: ValueError | RecursionError) -> tuple[str, str]:
    """The reason to count a value under that did not parse, and what is wrong with it."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text", f"not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, RecursionError):
        return "not valid JSON", "not valid JSON: nested too deeply"
    return "not valid JSON", f"not valid JSON: {getattr(error, 'msg', error)}"


def _too_long(place: str, size: str, limit: int) -> tuple[str, str]:
    return "row too long", f"{place}: {size}, the limit is {limit:,} bytes a row"


def _jsonl_rows(path: Path, cursor: _Cursor) -> Iterator[Row | _Broken]:
    limit = cursor.selection.max_row_bytes
    with _open(path) as stream:
        for row in itertools.count(1):
            line = stream.readline(limit + 1)
            if not line:
                return
            size = len(line)
            if size > limit and not line.endswith(b"\n"):
                size += _pass_line(stream)
            elif line.isspace():
                continue
            number = cursor.next
            if not cursor.claim():
                continue
            place = f"{path}, row {row}"
            if size > limit:
                yield _Broken(*_too_long(place, f"{size:,} bytes in one line", limit), number)
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                reason, what = _fault(error)
                yield _Broken(reason, f"{place}: {what}; expected one JSON object a line", number)
            else:
                yield _row(path, row, number, value)


def _pass_line(stream: io.BufferedReader) -> int:
    """Read to the end of a line without keeping it; its bytes."""
    size = 0
    while part := stream.readline(CHUNK):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _text_rows(path: Path, cursor: _Cursor) -> Iterator[Row | _Broken]:
    """One file is one document."""
    limit, number = cursor.selection.max_row_bytes, cursor.next
    with _open(path) as stream:
        data = stream.read(limit + 1)
        size = len(data) + sum(len(part) for part in iter(lambda: stream.read(CHUNK), b""))
    if not cursor.claim():
        return
    if size > limit:
        yield _Broken(*_too_long(f"{path}, row 1", f"{size:,} bytes in one document", limit), number)
        return
    try:
        yield _row(path, 1, number, {"text": data.decode("utf-8")})
    except UnicodeDecodeError as error:
        reason, what = _fault(error)
        yield _Broken(reason, f"{path}, row 1: {what}", number)


def _json_rows(path: Path, cursor: _Cursor) -> Iterator[Row | _Broken]:
    """The values of one list, or values one after the other."""
    with _open(path) as stream:
        text = JsonText(stream)
        in_list = text.take("[")
        done = in_list and text.take("]")
        row = 0
        while not done:
            row += 1
            yield from _json_row(path, row, text, cursor)
            done = text.take("]") if in_list else not text.peek()
            if in_list and not done and not text.take(","):
                if not text.peek():
                    raise EOFError("the list does not end")
                raise _UnreadableError(*_misplaced(f"{path}, after row {row}", text, "another row or the end"))
        if text.peek():
            raise _UnreadableError(*_misplaced(f"{path}, after row {row}", text, "nothing after the list of rows"))


def _json_row(path: Path, row: int, text: JsonText, cursor: _Cursor) -> Iterator[Row | _Broken]:
    limit, place = cursor.selection.max_row_bytes, f"{path}, row {row}"
    try:
        value, written = text.value(limit)
    except OverflowError as error:
        raise _UnreadableError(*_too_long(place, f"at least {error.args[0]:,} bytes in one value", limit)) from None
    except (ValueError, RecursionError) as error:
        reason, what = _fault(error)
        raise _UnreadableError(reason, f"{place}: {what}, at line {text.line}; expected one list of rows") from error
    number = cursor.next
    if not cursor.claim():
        return
    size = len(written.encode("utf-8", "surrogateescape")) if len(written) * 4 > limit else 0
    if size > limit:
        yield _Broken(*_too_long(place, f"{size:,} bytes in one value", limit), number)
    elif not is_utf8(written):
        yield _Broken("not UTF-8 text", f"{place}: not UTF-8 text, expected UTF-8 throughout", number)
    else:
        yield _row(path, row, number, value)


def _misplaced(where: str, text: JsonText, expected: str) -> tuple[str, str]:
    return "not valid JSON", f"{where}: not valid JSON at line {text.line}: expected {expected}, found {text.peek()}"


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        kind = path.suffix.lower().removeprefix(".")
        raise ValueError(f"{path}: reading {kind} needs pyarrow: {INSTALL}") from error
    return pyarrow


@contextmanager
def _arrow_errors(arrow: Any, path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        message = f"{path}: expected a file in the {kind} format, but: {first_line(error)}"
        raise _UnreadableError("file cut short or damaged", message) from error


def _parquet_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Row | _Broken]:
    arrow = _pyarrow(path)
    import pyarrow.parquet as parquet

    row = 0
    with _arrow_errors(arrow, path, "parquet"), parquet.ParquetFile(path) as file:
        names = list(columns(file.schema_arrow.names))
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if not cursor.selection.wanted(cursor.next, cursor.next + rows):
                cursor.claim(rows)
            else:
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                    yield from _batch_rows(path, row, batch, cursor)
                    row += batch.num_rows
                    rows -= batch.num_rows
            row += rows


def _arrow_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[Row | _Broken]:
    """Record batches, as a file with a footer or, as `datasets` writes them, as a stream."""
    arrow = _pyarrow(path)
    import pyarrow.ipc as ipc

    row = 0
    with _arrow_errors(arrow, path, "arrow"), arrow.memory_map(str(path)) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
        names = list(columns(reader.schema.names))
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for whole in batches:
            for at in range(0, whole.num_rows, _BATCH_ROWS):
                batch = whole.select(names).slice(at, _BATCH_ROWS)
                yield from _batch_rows(path, row, batch, cursor)
                row += batch.num_rows


def _batch_rows(path: Path, row: int, batch: Any, cursor: _Cursor) -> Iterator[Row]:
    first = cursor.next
    wanted = cursor.claim(batch.num_rows)
    if len(wanted) < batch.num_rows:
        batch = batch.take(_pyarrow(path).array([number - first for number in wanted], "int64"))
    for number, value in zip(wanted, batch.to_pylist(), strict=True):
        yield _row(path, row + number - first + 1, number, value)

"""Rows of local files, streamed in constant memory."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...checkpoints.storage.messages import first_line, install_hint
from ..conversations import encodable

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt")
_TABLES = (".parquet", ".arrow")
_PACKED = (".gz", ".zst")
_EXPECTED = f"{', '.join(SUFFIXES)} (JSON and text also with {' or '.join(_PACKED)})"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that `datasets` writes next to the rows."""
_BATCH_ROWS = 256
CHUNK = 1 << 16
_LONGEST_LITERAL = 16  # characters: -Infinity, and pairs of \\uXXXX
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

Columns = Callable[[Sequence[str]], Sequence[str]]
Shard = tuple[int, int]
"""(index, count): the rows with `number % count == index`."""
WHOLE: Shard = (0, 1)
UNREAD: Any = ...
"""Value of a column that was not read."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a source.

    Attributes:
        value: Parsed value of the row.
        location: "file, row 3", for error messages.
        name: Default id.
        number: Number of the row in the whole source, from 0.
    """

    value: Any
    location: str
    name: str
    number: int = 0


class _BrokenError(Exception):
    """A row, or the rest of a file, that cannot be read; `reason` is the name it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Cursor:
    """Counter of rows over all files, which selects those of a shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.next = 0

    def claim(self, count: int = 1) -> range:
        """Advance by `count` rows; return the numbers of those in the shard."""
        first, (index, shards) = self.next, self.shard
        self.next += count
        return range(first + (index - first) % shards, self.next, shards)


_Found = tuple[int, int, Any]
"""Row in its file, from 1; its number; its value, or the `_BrokenError`."""


def local_rows(
    path: Path,
    shard: Shard = WHOLE,
    *,
    split: str | None = None,
    columns: Columns = lambda names: names,
    skip_broken: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[Row]:
    """Yield the rows of a file, or of the data files of a folder (see `data_files`), that are in the shard.

    `columns` selects among the column names of a Parquet or Arrow file. With `skip_broken` rows that cannot be read are
    counted in `skipped`, by reason.

    Raises:
        ValueError: There is nothing to read, or a row cannot be read and broken rows are not skipped.
    """
    cursor = _Cursor(shard)
    for file in data_files(path, split):
        stem = (file.with_suffix("") if file.suffix.lower() in _PACKED else file).stem
        for row, number, value in _file_rows(file, cursor, columns):
            if not isinstance(value, _BrokenError):
                yield Row(value, f"{file}, row {row}", f"{stem}-{number + 1}", number)
            elif not skip_broken:
                raise ValueError(str(value))
            elif skipped is not None and number % shard[1] == shard[0]:
                skipped[value.reason] += 1  # every shard sees the end of a broken file, one of them counts it


def data_files(path: Path, split: str | None) -> list[Path]:
    """Return the sorted data files of a path.

    The text files of a folder are read if it has no others, its sub-folders if it has no files. `split` selects the
    files named after it (`train.jsonl`, `train-00000-of-00002.parquet`, `train/…`), if there are any.
    """
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: expected a file ending in {_EXPECTED}, found {path.suffix or 'no suffix'}")
        return [path]
    readable = list(filter(_is_data, sorted(path.iterdir()))) or list(filter(_is_data, sorted(path.rglob("*"))))
    files = [file for file in readable if _suffix(file) != ".txt"] or readable
    if not files:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder"
        raise ValueError(f"{path}: nothing to read, expected files ending in {_EXPECTED}; found {found}")
    if split is None:
        return files
    named = re.compile(rf"{re.escape(split)}($|[-.])")
    return [file for file in files if any(map(named.match, file.relative_to(path).parts))] or files


def _is_data(path: Path) -> bool:
    is_hidden = path.name.startswith(".") or path.name in _DESCRIPTIONS
    return not is_hidden and path.is_file() and _suffix(path) is not None


def _suffix(path: Path) -> str | None:
    """Return the suffix that names the format, without that of a compression; None for unknown formats."""
    is_packed = path.suffix.lower() in _PACKED
    suffix = (path.with_suffix("") if is_packed else path).suffix.lower()
    return suffix if suffix in SUFFIXES and not (is_packed and suffix in _TABLES) else None


def _file_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[_Found]:
    first, suffix = cursor.next, _suffix(path)
    try:
        if suffix in _TABLES:
            yield from _table_rows(path, cursor, columns)
        else:
            with _open(path) as stream:
                yield from {".json": _json_rows, ".txt": _text_rows}.get(str(suffix), _jsonl_rows)(path, stream, cursor)
        return
    except _BrokenError as error:
        broken = error
    except (EOFError, OSError, zlib.error) as error:
        message = f"{path}, after row {cursor.next - first}: the file is cut short or damaged: {first_line(error)}"
        broken = _BrokenError("file cut short or damaged", message)
    yield 0, cursor.next, broken
    cursor.claim()


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open the uncompressed bytes of a file, without a byte order mark."""
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
    """Return the error for a text that could not be parsed."""
    if isinstance(error, UnicodeDecodeError):
        reason, cause = "not UTF-8 text", f"{error.reason} at byte {error.start}"
    else:
        reason = "not valid JSON"
        cause = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
    return _BrokenError(reason, f"{location}: {reason}: {cause}; expected {expected}")


def _jsonl_rows(path: Path, stream: BinaryIO, cursor: _Cursor) -> Iterator[_Found]:
    for row, line in enumerate(stream, start=1):
        number = cursor.next
        if line.isspace() or not cursor.claim():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            value = _broken(f"{path}, row {row}", error, "one JSON object a line")
        yield row, number, value


def _text_rows(path: Path, stream: BinaryIO, cursor: _Cursor) -> Iterator[_Found]:
    """Yield the file as one row."""
    number = cursor.next
    if cursor.claim():
        try:
            yield 1, number, {"text": stream.read().decode("utf-8")}
        except UnicodeDecodeError as error:
            yield 1, number, _broken(f"{path}, row 1", error, "UTF-8")


def _json_rows(path: Path, stream: BinaryIO, cursor: _Cursor) -> Iterator[_Found]:
    row = 0
    try:
        for row, value in enumerate(_json_values(stream), start=1):
            number = cursor.next
            if cursor.claim():
                broken = isinstance(value, UnicodeDecodeError)
                yield row, number, _broken(f"{path}, row {row}", value, "UTF-8") if broken else value
    except (ValueError, RecursionError) as error:
        raise _broken(f"{path}, after row {row}", error, "one list of rows") from error


def _json_values(stream: BinaryIO) -> Iterator[Any]:
    """Yield the values of a list, or values one after the other, in the memory of the largest.

    `json` cannot read a list in parts, and `datasets` loads a file with one list whole. Values that are not UTF-8 are
    yielded as their UnicodeDecodeError.
    """
    # a byte that is not UTF-8 becomes a lone surrogate, which no JSON text can contain
    reader = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
    text, at = "", 0

    def read_on() -> bool:
        """Read at least as much as is waiting, so that a long value is tried a few times only; False at the end."""
        nonlocal text, at
        more = reader.read(max(CHUNK, len(text) - at))
        text, at = text[at:] + more, 0
        return bool(more)

    def peek() -> str:
        """Return the next character that is not white space; "" at the end."""
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or not read_on():
                return text[at : at + 1]

    is_list = peek() == "["
    at += is_list
    done = is_list and peek() == "]"
    while not done:
        peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                # the error of a value that goes on is at its end
                is_cut = error.pos > len(text) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
                if not is_cut or not read_on():
                    raise
                continue
            size = end - at
            if end < len(text) or not read_on():  # a number may go on
                break
        written, at = text[at : at + size], at + size
        try:
            if encodable(written) is not written:
                written.encode("utf-8", "surrogateescape").decode("utf-8")
            yield value
        except UnicodeDecodeError as error:
            yield error
        mark = peek()
        done = mark == ("]" if is_list else "")
        if is_list and mark not in ("]", ","):
            raise ValueError(f"expected another row or the end of the list, found {mark or 'the end of the file'}")
        at += is_list and not done
    at += is_list
    if peek():
        raise ValueError(f"expected nothing after the list, found {peek()}")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path}: reading {path.suffix.lower()} needs pyarrow: {install_hint('train')}") from error
    return pyarrow


def split_columns(columns: Columns, present: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the columns to read, and the values of a row in the others."""
    names = list(columns(present))
    return names, {name: UNREAD for name in present if name not in names}


def _table_rows(path: Path, cursor: _Cursor, columns: Columns) -> Iterator[_Found]:
    """Yield the rows of a Parquet file or of an Arrow file with a footer or, as `datasets` writes it, without."""
    arrow = _pyarrow(path)
    import pyarrow.ipc as ipc
    import pyarrow.parquet as parquet

    row = 0
    try:
        with arrow.memory_map(str(path)) as mapped:
            if path.suffix.lower() == ".parquet":
                file = parquet.ParquetFile(mapped)
                names, unread = split_columns(columns, file.schema_arrow.names)
                batches = file.iter_batches(_BATCH_ROWS, columns=names)
            else:
                is_file = mapped.read(6) == b"ARROW1"
                mapped.seek(0)
                reader = ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
                names, unread = split_columns(columns, reader.schema.names)
                read = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                batches = (b.select(names).slice(i, _BATCH_ROWS) for b in read for i in range(0, len(b), _BATCH_ROWS))
            for batch in batches:
                first, wanted = cursor.next, cursor.claim(len(batch))
                if len(wanted) < len(batch):
                    batch = batch.take(arrow.array([number - first for number in wanted], "int64"))
                for number, value in zip(wanted, batch.to_pylist(), strict=True):
                    yield row + number - first + 1, number, value | unread
                row += cursor.next - first
    except (arrow.ArrowException, OSError) as error:
        message = f"{path}: expected a file in the {path.suffix.lower()[1:]} format, but: {first_line(error)}"
        raise _BrokenError("file cut short or damaged", message) from error

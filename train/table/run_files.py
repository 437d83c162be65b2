"""Files that contain sorted runs of token pair counts, and an index of these files, which is replaced atomically.

Shape letters: V vocabulary, E entries (distinct pairs).
"""

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.atomic import atomic_text, finish_file, name_errors
from ...checkpoints.storage.safe_read import load_json
from ...checkpoints.table.file import check_counts, write_array, write_table
from ...checkpoints.table.runs import Run, add_left_counts, key_dtype, merge_runs

INDEX = "counted.json"
_COPY = 1 << 24
_CHUNK = 1 << 18
_CHUNK_OF_RUN = 1 << 11


@dataclass(frozen=True)
class FileArray:
    """One-dimensional array in a file. It is not memory-mapped, because mapped pages count as used memory."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, end, _ = part.indices(self.length)
        offset = self.offset + start * self.dtype.itemsize
        return np.fromfile(self.path, dtype=self.dtype, count=max(end - start, 0), offset=offset)


def write_run(folder: Path, vocab_size: int, parts: Iterable[Run]) -> dict[str, Any]:
    """Write a run to a new file: keys, then counts as uint32. Return the name and size of the file in bytes."""
    path = folder / f"run-{uuid.uuid4().hex[:16]}"  # unique even if a process of an earlier launch is still running
    try:
        with name_errors(path), path.open("wb") as out, TemporaryFile(dir=folder) as counts:
            for keys_E, counts_E in parts:
                check_counts(keys_E, counts_E, vocab_size)
                write_array(out, keys_E)
                write_array(counts, counts_E.astype(np.uint32))
            counts.seek(0)
            shutil.copyfileobj(counts, out, _COPY)
            finish_file(out)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return {"name": path.name, "bytes": path.stat().st_size}


def _open_run(path: Path, vocab_size: int) -> tuple[FileArray, FileArray]:
    dtype = key_dtype(vocab_size)
    entries = path.stat().st_size // (dtype.itemsize + 4)
    counts = FileArray(path, np.dtype(np.uint32), entries * dtype.itemsize, entries)
    return FileArray(path, dtype, 0, entries), counts


def read_index(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the index of a folder, or an empty index if no run was written.

    Raises ValueError if the index or a run is damaged or belongs to a different vocabulary.
    """
    path, advice = folder / INDEX, f"delete {folder} to count again"
    if not path.is_file():
        return {"place": None, "tokens": 0, "documents": 0, "runs": [], "ends": [0] * vocab_size}
    try:
        index = load_json(path, "vocab_size", "runs", "place", "tokens", "documents", "ends")
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from error
    if index["vocab_size"] != vocab_size:
        raise ValueError(f"{folder} has counts for {index['vocab_size']} tokens, but this vocabulary has {vocab_size}")
    for run in index["runs"]:
        file = folder / run["name"]
        size = file.stat().st_size if file.is_file() else 0
        if size != run["bytes"]:
            raise ValueError(f"{file} is damaged: it has {size} bytes, expected {run['bytes']}; {advice}")
    return index


def write_index(folder: Path, vocab_size: int, index: dict[str, Any]) -> None:
    """Replace the index of a folder atomically."""
    atomic_text(folder / INDEX, json.dumps({"vocab_size": vocab_size} | index) + "\n")


def remove_leftovers(folder: Path, index: dict[str, Any]) -> None:
    """Delete the files of runs that are not in the index."""
    known = {run["name"] for run in index["runs"]}
    for path in folder.glob("run-*"):
        if path.name not in known:
            path.unlink(missing_ok=True)


def merge_counts(folders: Sequence[Path], vocab_size: int, path: Path) -> tuple[int, int]:
    """Merge the runs of finished counters into a table file. Return the numbers of tokens and documents.

    Raises ValueError if counts belong to a different vocabulary, or if files are missing or damaged.
    """
    indices = [(folder, read_index(folder, vocab_size)) for folder in folders]
    runs = [_open_run(folder / run["name"], vocab_size) for folder, index in indices for run in index["runs"]]
    tokens, documents = (sum(index[key] for _, index in indices) for key in ("tokens", "documents"))
    unigram_V = sum((np.array(index["ends"]) for _, index in indices), np.zeros(vocab_size, np.int64))

    def parts() -> Iterator[Run]:
        for part in merge_runs(runs, vocab_size, max(_CHUNK, _CHUNK_OF_RUN * len(runs))):
            add_left_counts(unigram_V, part)
            yield part
        if (counted := int(unigram_V.sum())) != tokens:
            raise ValueError(
                f"{', '.join(map(str, folders))}: the files contain {counted} tokens, but {tokens} were counted"
            )

    write_table(path, vocab_size, parts(), unigram_V)  # writes `unigram_V` after the last part
    return tokens, documents

"""Merging what any number of processes counted into a table's file, in ranges of left tokens: V vocabulary, N rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...checkpoints.table.file import write_table
from ...checkpoints.table.runs import Ints, Run, left_sums, merge_runs
from .run_files import FileRun, open_run, read_ends, read_index, write_run

_CHUNK = 1 << 18
_CHUNK_OF_RUN = 1 << 11
_ROWS = 1 << 12
_THREADS = 2


@dataclass(frozen=True)
class Counted:
    """What any number of processes counted: their runs, not yet merged; `ends_V` int64, how often each token was the
    last of a document."""

    vocab_size: int
    runs: tuple[FileRun, ...]
    ends_V: Ints
    tokens: int
    documents: int

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Cut the left tokens into `number` ranges [first, end) of about as many entries to merge, some maybe empty."""
        row_N = np.unique(np.linspace(0, self.vocab_size, _ROWS + 1).astype(np.int64))
        before_N = sum((keys.below(row_N * self.vocab_size) for keys, _ in self.runs), np.zeros_like(row_N))
        inner = row_N[np.searchsorted(before_N, before_N[-1] * np.arange(1, number) // number)]
        return list(pairwise([0, *inner.tolist(), self.vocab_size]))

    def merge(self, parts: Sequence[Path], which: slice = slice(None)) -> None:
        """Merge the range of each of the parts into its file, or of some of them."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="merge") as threads:
            for _ in threads.map(self._merge_part, self.ranges(len(parts))[which], parts[which]):
                pass

    def _merge_part(self, rows: tuple[int, int], part: Path) -> None:
        sides: list[FileRun] = []
        for keys, counts in self.runs:
            first, end = keys.below(np.array(rows) * self.vocab_size).tolist()
            sides.append((keys.part(first, end), counts.part(first, end)))
        chunk = max(_CHUNK, _CHUNK_OF_RUN * len(sides))
        part.parent.mkdir(parents=True, exist_ok=True)
        write_run(part, self.vocab_size, merge_runs(sides, self.vocab_size, chunk))

    def assemble(self, parts: Sequence[Path], path: Path) -> None:
        """Join the files of consecutive ranges to a table's file."""
        runs = [open_run(part, self.vocab_size) for part in parts]

        def stream() -> Iterator[Run]:
            for keys, counts in runs:
                for start in range(0, len(keys), _CHUNK):
                    yield keys[start : start + _CHUNK], counts[start : start + _CHUNK]

        left_V = left_sums(stream(), self.vocab_size)
        unigram_V = left_V + self.ends_V
        if int(unigram_V.sum()) != self.tokens:
            raise ValueError(
                f"the parts hold {int(left_V.sum())} pairs and {int(self.ends_V.sum())} ends of documents; "
                f"{self.tokens} tokens were counted"
            )
        write_table(path, self.vocab_size, stream(), unigram_V)


def counted(folders: Sequence[Path], vocab_size: int, check: bool = True) -> Counted:
    """Everything in the folders of finished counters; with `check` every file is compared with its hash, else with its
    size alone.

    Raises:
        ValueError: counts of another vocabulary; files that are missing or damaged; they are named.
    """
    runs: list[FileRun] = []
    ends_V = np.zeros(vocab_size, dtype=np.int64)
    tokens = documents = 0
    for folder in folders:
        if index := read_index(folder, vocab_size, check):
            runs += [open_run(folder / run["name"], vocab_size) for run in index["runs"]]
            ends_V += read_ends(folder, index, vocab_size)
            tokens, documents = tokens + index["tokens"], documents + index["documents"]
    return Counted(vocab_size, tuple(runs), ends_V, tokens, documents)

"""Counter of neighbouring tokens for corpora of any size: exact, in bounded memory, resumable.

Shape letters: V vocabulary, T tokens, D documents, C ends of documents, E entries (distinct pairs), P pairs.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.table.runs import (
    Ints,
    Run,
    check_documents,
    inner_ends,
    key_dtype,
    merge_runs,
    run_of_keys,
    write_keys,
)
from .run_files import read_index, remove_leftovers, write_index, write_run

_MAX_BUFFER = 1 << 23
_MAX_PAIRS = 1 << 31


class PairCounter(AbstractContextManager["PairCounter"]):
    """Counter of the pairs within documents, which sorts in background threads and keeps its counts in a folder.

    Attributes:
        tokens: Number of tokens counted so far, by earlier processes too.
        documents: Number of documents counted so far, likewise.
        position: JSON value given with the last documents, which says how far the source is read; None at the start.

    Args:
        vocab_size: V.
        folder: Directory of the counts, a new one or one to resume. Unfinished files of a killed process are deleted.
        memory_mb: Mebibytes for counts and for sorting. More memory means fewer and larger runs.
        threads: Number of background threads.

    Raises:
        ValueError: The folder is of another vocabulary or damaged, or another process counts into it.
    """

    def __init__(self, vocab_size: int, folder: Path, memory_mb: float = 512, threads: int = 2) -> None:
        dtype = key_dtype(vocab_size)
        self.vocab_size, self.folder = vocab_size, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(sole_writer(self.folder))
            index = read_index(self.folder, vocab_size)
            remove_leftovers(self.folder, index)
            self._lock = stack.pop_all()
        self._ends_V: Ints = np.array(index["ends"], dtype=np.int64)
        self._runs: list[dict[str, Any]] = index["runs"]
        self.position: Any = index["place"]
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        memory = memory_mb * 2**20
        # An eighth of the memory is for the buffers being sorted, and their part of it for the one being filled. The
        # runs of sorted buffers take about as much. A quarter each is for held runs, for those being merged and for
        # the result.
        size = int(min(max(memory / threads / dtype.itemsize / 8, 1), _MAX_BUFFER))
        self._held = _HeldRuns(self.folder, vocab_size, int(memory / 4 / (dtype.itemsize + 4)))
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="count")
        self._tasks: set[Future[NDArray[Any]]] = set()
        self._keys_T, *self._free = [np.empty(size, dtype) for _ in range(threads + 1)]
        self._filled, self._cross_document = 0, 0

    def add(self, tokens_T: NDArray[Any], starts_D: NDArray[Any], position: Any) -> None:
        """Count consecutive documents.

        Args:
            tokens_T: Tokens of the documents, integers.
            starts_D: Index of the first token of each document, ascending from 0.
            position: JSON value that says how far the source is read after these documents.
        """
        check_documents(tokens_T, starts_D, self.vocab_size, self.documents)
        size = len(tokens_T)
        if size:
            ends_C = np.append(inner_ends(starts_D, size), size - 1)
            np.add.at(self._ends_V, tokens_T[ends_C].astype(np.int64), 1)
            self._fill(tokens_T, ends_C)
        self.tokens += size
        self.documents += len(starts_D)
        self.position = position
        if self._held.spilled:
            self.spill()

    def spill(self) -> None:
        """Write everything counted so far to the disk, together with its position."""
        if self._filled:
            self._send()
        self._free += [task.result() for task in self._tasks]
        self._tasks = set()
        held, _ = self._held.take()
        parts = [part for first in range(self._threads) if (part := held[first :: self._threads])]
        self._held.spilled += self._pool.map(self._held.write, parts)
        self._runs = self._runs + self._held.spilled
        index = {"place": self.position, "tokens": self.tokens, "documents": self.documents, "runs": self._runs}
        write_index(self.folder, self.vocab_size, index | {"ends": self._ends_V.tolist()})
        self._held.spilled = []

    def close(self) -> None:
        """Stop the background threads without spilling; what was spilled stays."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, tokens_T: NDArray[Any], ends_C: Ints) -> None:
        """Write the keys of pairs into the buffer, and send full buffers to the threads."""
        done, pairs = 0, len(tokens_T) - 1
        while done < pairs:
            end = min(done + len(self._keys_T) - self._filled, pairs)
            keys_P = self._keys_T[self._filled : self._filled + end - done]
            write_keys(tokens_T[done : end + 1], self.vocab_size, keys_P)
            first, after = np.searchsorted(ends_C, (done, end))
            keys_P[ends_C[first:after] - done] = 0
            self._cross_document += int(after - first)
            self._filled += end - done
            done = end
            if self._filled == len(self._keys_T):
                self._send()

    def _send(self) -> None:
        """Count the buffer in the background and go on with a free one; raise the errors of finished tasks."""
        task = self._pool.submit(self._held.count, self._keys_T, self._filled, self._cross_document)
        self._tasks.add(task)
        done, self._tasks = wait(self._tasks, 0 if self._free else None, FIRST_COMPLETED)
        self._free += [task.result() for task in done]
        self._keys_T = self._free.pop()
        self._filled = self._cross_document = 0


class _HeldRuns:
    """Runs in memory, shared by the threads of a counter.

    Runs of more than `budget` entries are merged into one, which is written to a file where it takes more than half of
    the budget. Files in `spilled` are not in the index yet.
    """

    def __init__(self, folder: Path, vocab_size: int, budget: int) -> None:
        self.spilled: list[dict[str, Any]] = []
        self._folder, self._vocab_size, self._budget = folder, vocab_size, budget
        self._lock, self._merging = Lock(), Lock()
        self._runs: list[Run] = []
        self._entries = self._pairs = 0

    def count(self, keys_T: NDArray[Any], size: int, cross_document: int) -> NDArray[Any]:
        """Add the run of the first keys of a buffer; return the buffer."""
        self._add(run_of_keys(keys_T[:size], cross_document), size)
        if self._is_full:
            with self._merging:
                if self._is_full:  # unless another thread has merged them meanwhile
                    self._compact()
        return keys_T

    def take(self) -> tuple[list[Run], int]:
        """Remove and return all runs, and their number of pairs."""
        with self._lock:
            taken = self._runs, self._pairs
            self._runs, self._entries, self._pairs = [], 0, 0
        return taken

    def write(self, runs: list[Run]) -> dict[str, Any]:
        """Merge runs into a file; return its name and size."""
        return write_run(self._folder, self._vocab_size, merge_runs(runs, self._vocab_size))

    @property
    def _is_full(self) -> bool:
        return self._entries > self._budget or self._pairs >= _MAX_PAIRS  # counts have 32 bits

    def _add(self, run: Run, pairs: int) -> None:
        with self._lock:
            if len(run[0]):
                self._runs.append(run)
            self._entries += len(run[0])
            self._pairs += pairs

    def _compact(self) -> None:
        runs, pairs = self.take()
        size = sum(len(keys) for keys, _ in runs)  # at most: memory that is never touched costs nothing
        keys_E, counts_E, end = np.empty(size, key_dtype(self._vocab_size)), np.empty(size, np.uint32), 0
        for keys, counts in merge_runs(runs, self._vocab_size):
            start, end = end, end + len(keys)
            keys_E[start:end], counts_E[start:end] = keys, counts
        del runs
        merged = keys_E[:end], counts_E[:end]
        if pairs >= _MAX_PAIRS or end > self._budget // 2:
            self.spilled.append(self.write([merged]))
        else:
            self._add(merged, pairs)

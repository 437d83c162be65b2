"""Exact and resumable counter of adjacent tokens that uses bounded memory for corpora of any size.

Shape letters: V vocabulary, T tokens, D documents, C ends of documents, E entries (distinct pairs), P pairs.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.storage.locks import sole_writer
from ...checkpoints.table.runs import Run, check_documents, inner_ends, key_dtype, merge_runs, run_of_keys, write_keys
from .run_files import read_index, remove_leftovers, write_index, write_run

_MAX_BUFFER = 1 << 23
_MAX_PAIRS = 1 << 31


class PairCounter(AbstractContextManager["PairCounter"]):
    """Counter of token pairs within documents, which sorts in background threads and stores its counts in a folder.

    Attributes:
        tokens: Number of tokens counted so far by this process and by interrupted processes.
        documents: Number of documents counted so far by this process and by interrupted processes.
        position: Progress in the source, as passed to `add` with the last documents. None at the start.

    Args:
        vocab_size: Vocabulary size V.
        folder: Directory of the counts, which may contain earlier counts. Files of interrupted processes are deleted.
        memory_mb: Memory for counting and sorting in mebibytes. More memory results in fewer and larger runs.
        threads: Number of background threads.

    Raises ValueError if the folder belongs to a different vocabulary, is damaged, or is used by another process.
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
        self._ends_V = np.array(index["ends"], dtype=np.int64)
        self._runs: list[dict[str, Any]] = index["runs"]
        self.position: Any = index["place"]
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        share = memory_mb * 2**20 / threads
        # A thread uses an eighth of its share for the keys it sorts, a sixteenth for its part of the buffer being
        # filled, about as much for the resulting run, three eighths for runs, and nearly as much for merging them.
        size = int(min(max(share / dtype.itemsize / 8, 1), _MAX_BUFFER))
        budget = int(share * 3 / 8 / (dtype.itemsize + 4))
        self._workers = [_Worker(self.folder, vocab_size, size, budget) for _ in range(threads)]
        self._keys_T: NDArray[Any] = np.empty(size, dtype)
        self._num_buffered, self._cross_document = 0, 0

    def add(self, tokens_T: NDArray[Any], starts_D: NDArray[Any], position: Any) -> None:
        """Count the token pairs of consecutive documents.

        Args:
            tokens_T: Tokens of the documents, integers.
            starts_D: Index of the first token of each document, ascending from 0.
            position: JSON value that describes the progress in the source after these documents.
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
        if any(worker.spilled for worker in self._workers):
            self.spill()

    def spill(self) -> None:
        """Write all counts to disk, together with the position in the source."""
        if self._num_buffered:
            self._send()
        for worker in self._workers:
            worker.spill()
        for worker in self._workers:
            worker.finish()
        self._runs = self._runs + [run for worker in self._workers for run in worker.spilled]
        index = {"place": self.position, "tokens": self.tokens, "documents": self.documents, "runs": self._runs}
        write_index(self.folder, self.vocab_size, index | {"ends": self._ends_V.tolist()})
        for worker in self._workers:
            worker.spilled = []

    def close(self) -> None:
        """Stop the background threads. Counts that were not written to disk are lost."""
        for worker in self._workers:
            worker.close()
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, tokens_T: NDArray[Any], ends_C: NDArray[np.int64]) -> None:
        """Write token pairs into the buffer as integer keys, and pass full buffers to the worker threads."""
        start, pairs = 0, len(tokens_T) - 1
        while start < pairs:
            end = min(start + len(self._keys_T) - self._num_buffered, pairs)
            keys_P = self._keys_T[self._num_buffered : self._num_buffered + end - start]
            write_keys(tokens_T[start : end + 1], self.vocab_size, keys_P)
            first, after = np.searchsorted(ends_C, (start, end))
            keys_P[ends_C[first:after] - start] = 0
            self._cross_document += int(after - first)
            self._num_buffered += end - start
            start = end
            if self._num_buffered == len(self._keys_T):
                self._send()

    def _send(self) -> None:
        """Pass the buffer to a worker, and continue with the free buffer that the worker returns."""
        worker = next((worker for worker in self._workers if worker.idle), self._workers[0])
        self._keys_T = worker.count(self._keys_T, self._num_buffered, self._cross_document)
        self._num_buffered = self._cross_document = 0
        self._workers.append(self._workers.pop(self._workers.index(worker)))  # the one that is busy longest comes first


class _Worker:
    """Thread that counts one buffer at a time, and stores the counts as sorted runs.

    Runs in memory are merged if they have more than `budget` entries in total, and the merged run is written to a file
    if it has more than half as many. Files in `spilled` are not in the index yet.
    """

    def __init__(self, folder: Path, vocab_size: int, buffer_size: int, budget: int) -> None:
        self.spilled: list[dict[str, Any]] = []
        self._folder, self._vocab_size, self._budget = folder, vocab_size, budget
        self._free_T: NDArray[Any] = np.empty(buffer_size, key_dtype(vocab_size))
        self._runs: list[Run] = []
        self._pairs = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="count")
        self._task: Future[dict[str, Any] | None] | None = None

    @property
    def idle(self) -> bool:
        return self._task is None or self._task.done()

    def count(self, keys_T: NDArray[Any], size: int, cross_document: int) -> NDArray[Any]:
        """Count the first `size` keys of a buffer in the background; return the buffer of the previous task."""
        self.finish()
        self._pairs += size
        self._task = self._thread.submit(self._count, keys_T[:size], cross_document)
        self._free_T, free_T = keys_T, self._free_T
        return free_T

    def spill(self) -> None:
        """Write the runs in memory to a file, in the background."""
        self.finish()
        if self._runs:
            self._task = self._thread.submit(self._spill)

    def finish(self) -> None:
        """Wait for the background task, and raise its exception if it failed."""
        task, self._task = self._task, None
        if task is not None and (run := task.result()):
            self.spilled.append(run)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _count(self, keys_T: NDArray[Any], cross_document: int) -> dict[str, Any] | None:
        run = run_of_keys(keys_T, cross_document)
        if len(run[0]):
            self._runs.append(run)
        full = self._pairs >= _MAX_PAIRS  # a run's counts have 32 bits
        if sum(len(keys) for keys, _ in self._runs) > self._budget:
            self._merge()
            full = full or len(self._runs[0][0]) > self._budget // 2
        return self._spill() if full else None

    def _merge(self) -> None:
        most = sum(len(keys) for keys, _ in self._runs)  # untouched memory is not allocated
        keys_E, counts_E = np.empty(most, key_dtype(self._vocab_size)), np.empty(most, np.uint32)
        end = 0
        for keys, counts in merge_runs(self._runs, self._vocab_size):
            start, end = end, end + len(keys)
            keys_E[start:end], counts_E[start:end] = keys, counts
        self._runs = [(keys_E[:end], counts_E[:end])]

    def _spill(self) -> dict[str, Any]:
        run = write_run(self._folder, self._vocab_size, merge_runs(self._runs, self._vocab_size))
        self._runs, self._pairs = [], 0
        return run

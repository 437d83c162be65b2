"""Counting pairs of neighbours over a corpus of any size: exact, in bounded memory, resumed from the last spill.

Letters: V vocabulary, T tokens, D documents, C documents' ends, E entries (distinct pairs).
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
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
    """Counts pairs of documents as they come, in background threads; what is counted is kept in a folder. `tokens` and
    `documents` were counted so far, by earlier processes too; `position` says how far the source has been read, as
    given with the last documents (None at the start)."""

    def __init__(self, vocab_size: int, folder: Path, memory_mb: float = 512, threads: int = 2) -> None:
        """Open a folder, a new one or one to resume; unfinished files of a killed process are deleted. Counts, and what
        sorting them in so many `threads` takes, have `memory_mb` mebibytes: more means fewer and larger runs.

        Raises ValueError: a folder of another vocabulary, or whose runs are damaged; another process counts into it.
        """
        dtype = key_dtype(vocab_size)
        self.vocab_size = vocab_size
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(sole_writer(self.folder))
            index = read_index(self.folder, vocab_size)
            remove_leftovers(self.folder, index)
            self._lock = stack.pop_all()
        index = index or {"place": None, "tokens": 0, "documents": 0, "runs": [], "ends": [0] * vocab_size}
        self._ends_V: Ints = np.array(index["ends"], dtype=np.int64)
        self._runs: list[dict[str, Any]] = index["runs"]
        self.position: Any = index["place"]
        self.tokens: int = index["tokens"]
        self.documents: int = index["documents"]
        share = memory_mb * 2**20 / threads
        # Of a thread's share an eighth is the buffer of keys that it sorts, and half as much its part of the one being
        # filled; that one's run takes about as much again. Three eighths are for runs, nearly as much for merging them.
        size = int(min(max(share / dtype.itemsize / 8, 1), _MAX_BUFFER))
        budget = int(share * 3 / 8 / (dtype.itemsize + 4))
        self._workers = [_Worker(self.folder, vocab_size, size, budget) for _ in range(threads)]
        self._keys_T: NDArray[Any] = np.empty(size, dtype)
        self._filled, self._cross_document = 0, 0

    def add(self, tokens_T: NDArray[Any], starts_D: NDArray[Any], position: Any) -> None:
        """Count documents that follow each other, and begin in `tokens_T` (integers) at `starts_D`, ascending from 0;
        runs may be spilled, with `position`, a JSON value, as how far the source is read."""
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
        """Write everything counted so far to the disk, together with its position."""
        if self._filled:
            self._send()
        for worker in self._workers:
            worker.spill()
        for worker in self._workers:
            worker.finish()
        runs = self._runs + [run for worker in self._workers for run in worker.spilled]
        progress = {"place": self.position, "tokens": self.tokens, "documents": self.documents}
        write_index(self.folder, self.vocab_size, runs, self._ends_V, progress)
        self._runs = runs
        for worker in self._workers:
            worker.spilled = []

    def close(self) -> None:
        """End the background work without spilling; what was spilled stays."""
        for worker in self._workers:
            worker.close()
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, tokens_T: NDArray[Any], ends_C: Ints) -> None:
        """Put the keys of neighbours into the buffer, and hand over full ones."""
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
        """Have a worker count the buffer, and fill the one that it is done with."""
        worker = next((worker for worker in self._workers if worker.idle), self._workers[0])
        self._keys_T = worker.count(self._keys_T, self._filled, self._cross_document)
        self._filled = self._cross_document = 0
        self._workers.append(self._workers.pop(self._workers.index(worker)))  # the longest busy one comes first


class _Worker:
    """A thread with a buffer of runs, one task at a time: runs are kept as they come, merged into one when there are
    more than `budget` entries, and spilled where more than half of it is still taken after that (`spilled`: on the
    disk, and not yet in the index)."""

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
        """Count a buffer's first keys in the background, when the last task is finished; returns that one's buffer."""
        self.finish()
        self._pairs += size
        self._task = self._thread.submit(self._count, keys_T[:size], cross_document)
        self._free_T, free_T = keys_T, self._free_T
        return free_T

    def spill(self) -> None:
        """Write what is held in the background."""
        self.finish()
        if self._runs:
            self._task = self._thread.submit(self._spill)

    def finish(self) -> None:
        """Wait for the task; raises what it raised."""
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
        """Make one run of all, in memory for as many entries as they have: what is never touched costs nothing."""
        most = sum(len(keys) for keys, _ in self._runs)
        keys_E, counts_E = np.empty(most, key_dtype(self._vocab_size)), np.empty(most, np.uint32)
        end = 0
        for keys, counts in merge_runs(self._runs, self._vocab_size):
            start, end = end, end + len(keys)
            keys_E[start:end], counts_E[start:end] = keys, counts
        self._runs = [(keys_E[:end], counts_E[:end])]

    def _spill(self) -> dict[str, Any]:
        name = f"run-{uuid.uuid4().hex[:16]}"  # that not even a process left over from a killed launch gives
        size = write_run(self._folder / name, self._vocab_size, merge_runs(self._runs, self._vocab_size))
        self._runs, self._pairs = [], 0
        return {"name": name, "bytes": size}

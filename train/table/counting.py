"""Counting pairs of neighbours over a corpus of any size: exact, in bounded memory, by any number of processes.

A `PairCounter` keeps what does not fit its memory as sorted runs in a folder, which is a whole at any time: killed, it
goes on from the last spill. `counted` takes the folders of all processes together; each may merge a range of rows, and
one lays the parts end to end into a table's file. No process ever holds the whole table.

Letters: V vocabulary, T tokens, D documents, C documents' ends, E entries (distinct pairs).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.table.file import write_table
from ...checkpoints.table.runs import (
    Ints,
    Run,
    check_documents,
    inner_ends,
    key_dtype,
    left_sums,
    merge_runs,
    write_keys,
)
from .pile import LocalPile, Pile, RemotePile, Slots, sorting_is_slow
from .run_files import INDEX as INDEX
from .run_files import FileRun, new_name, open_run, read_ends, read_index, remove_leftovers, write_index, write_run

_MAX_SLOT = 1 << 23
_MAX_PAIRS = 1 << 31
_WORTH_PROCESSES = 1 << 18
_CHUNK = 1 << 18
_RUN_CHUNK = 1 << 11


class PairCounter:
    """Counts pairs of documents as they come, in the background; what is counted is kept in a folder.

    Attributes:
        place: how far the source has been read, as given with the last documents; None at the start.
        tokens: tokens counted so far, those of earlier processes included.
        documents: documents counted so far, likewise.
        spilled_bytes: the size of the runs in the folder.
    """

    def __init__(
        self,
        vocab_size: int,
        folder: Path,
        memory_mb: float = 512,
        threads: int = 2,
        processes: bool | None = None,
    ) -> None:
        """Open a folder, a new one or one to go on from; other files in it that this wrote and did not finish go.

        Args:
            memory_mb: mebibytes for counts and what sorting them takes; more means fewer and larger runs.
            threads: how many sort at a time.
            processes: sort in processes of their own instead of threads; None measures whether that is faster here.

        Raises:
            ValueError: settings out of range; a folder of another vocabulary, or whose runs are damaged; another
                process counts into it.
        """
        itemsize = key_dtype(vocab_size).itemsize
        if not memory_mb > 0:
            raise ValueError(f"memory_mb is {memory_mb}, expected more than 0")
        if threads < 1:
            raise ValueError(f"threads is {threads}, expected at least 1")
        self.vocab_size = vocab_size
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, os.close, _lock(self.folder))
        with ExitStack() as refused:
            refused.callback(self._unlock)
            index = read_index(self.folder, vocab_size, check=True)
            remove_leftovers(self.folder, index)
            self._ends_V = read_ends(self.folder, index, vocab_size)
            refused.pop_all()
        said = index or {"place": None, "tokens": 0, "documents": 0, "runs": []}
        self._runs: list[dict[str, Any]] = said["runs"]
        self.place: Any = said["place"]
        self.tokens: int = said["tokens"]
        self.documents: int = said["documents"]
        share = memory_mb * 2**20 / threads
        # Of a thread's share an eighth is the slot that it sorts, and half as much its part of the slot being filled;
        # that one's run takes about as much again. Three eighths are for runs, and nearly as much for merging them.
        self._slot_size = int(min(max(share / itemsize / 8, 1), _MAX_SLOT))
        self._budget = int(share * 3 / 8 / (itemsize + 4))
        self._threads, self._processes = threads, processes
        self._lanes: list[_Lane] = []
        self._slots: Slots | None = None
        self._slot, self._filled, self._strangers = 0, 0, 0
        self._broken = False

    @property
    def spilled_bytes(self) -> int:
        return sum(run["bytes"] for run in self._runs)

    def add(self, tokens_T: NDArray[Any], starts_D: NDArray[Any], place: Any) -> None:
        """Count documents laid end to end; runs may be spilled, with `place` as how far the source has been read.

        Args:
            tokens_T: one dimension of integers.
            starts_D: where each document begins, ascending from 0.
            place: a JSON value that is kept with the counts.

        Raises:
            ValueError: a token outside the vocabulary, named with its document's number; nothing of this call counts.
            OSError: a run could not be written, or a process that counts died (`ChildProcessError`); the folder is as
                it was at the last spill.
            RuntimeError: this counter failed before; open the folder again.
        """
        self._check_usable()
        check_documents(tokens_T, starts_D, self.vocab_size, self.documents)
        size = len(tokens_T)
        self._broken = True  # until all of it is counted
        if size:
            ends_C = np.append(inner_ends(starts_D, size), size - 1)
            np.add.at(self._ends_V, tokens_T[ends_C].astype(np.int64), 1)
            self._fill(tokens_T, ends_C)
        self._broken = False
        self.tokens += size
        self.documents += len(starts_D)
        self.place = place
        if any(lane.waiting for lane in self._lanes):
            self.spill()

    def spill(self) -> None:
        """Put everything counted so far on the disk, together with its place.

        Raises:
            OSError: the disk is full, or the like; what was spilled before is untouched, and this may be tried again.
            ChildProcessError: a process that counts died; what was spilled before is untouched, open the folder again.
        """
        self._check_usable()
        if self._filled:
            self._send()
        for lane in self._lanes:
            lane.spill()
        for lane in self._lanes:
            lane.finish()
        runs = self._runs + [run for lane in self._lanes for run in lane.waiting]
        said = {"place": self.place, "tokens": self.tokens, "documents": self.documents}
        write_index(self.folder, self.vocab_size, runs, self._ends_V, said)
        self._runs = runs
        for lane in self._lanes:
            lane.waiting = []

    def close(self) -> None:
        """End the background work without spilling; what was spilled stays."""
        lanes, self._lanes, self._broken = self._lanes, [], True
        for lane in lanes:
            lane.close()
        self._unlock()

    def __enter__(self) -> PairCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._broken:
            raise RuntimeError(f"the counter of {self.folder} is closed or has failed; open the folder again to go on")

    def _fill(self, tokens_T: NDArray[Any], ends_C: Ints) -> None:
        """Put the keys of neighbours into slots, and send the full ones."""
        done, pairs = 0, len(tokens_T) - 1
        while done < pairs:
            if self._slots is None:
                self._slots = Slots(self._threads + 1, self._slot_size, self.vocab_size)
            end = min(done + self._slot_size - self._filled, pairs)
            room_T = self._slots[self._slot][self._filled : self._filled + end - done]
            write_keys(tokens_T[done : end + 1], self.vocab_size, room_T)
            first, after = np.searchsorted(ends_C, (done, end))
            room_T[ends_C[first:after] - done] = 0
            self._strangers += int(after - first)
            self._filled += end - done
            done = end
            if self._filled == self._slot_size:
                self._send()

    def _send(self) -> None:
        """Have the filled slot counted by a lane, and go on with the slot that this lane is done with."""
        assert self._slots is not None
        if not self._lanes:
            self._lanes = self._new_lanes(self._slots)
        lane = next((lane for lane in self._lanes if lane.idle), self._lanes[0])
        lane.finish()
        self._slot = lane.count(self._slot, self._filled, self._strangers)
        self._filled = self._strangers = 0
        self._lanes.append(self._lanes.pop(self._lanes.index(lane)))  # the longest busy one comes first

    def _new_lanes(self, slots: Slots) -> list[_Lane]:
        remote = self._processes
        if remote is None:
            remote = self._filled >= _WORTH_PROCESSES and sorting_is_slow()
        piles: list[Pile]
        if remote and slots.file >= 0:
            piles = [RemotePile(slots, self._threads + 1, self.vocab_size, self._budget) for _ in range(self._threads)]
        else:
            piles = [LocalPile(slots, self.vocab_size, self._budget) for _ in range(self._threads)]
        return [_Lane(pile, number + 1, self.folder) for number, pile in enumerate(piles)]


class _Lane:
    """A pile with the thread that works on it, one task at a time.

    Attributes:
        waiting: runs that are on the disk and not yet in the index.
    """

    def __init__(self, pile: Pile, slot: int, folder: Path) -> None:
        self.waiting: list[dict[str, Any]] = []
        self._pile, self._slot, self._folder = pile, slot, folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="count")
        self._task: Future[dict[str, Any] | None] | None = None
        self._pairs = 0

    @property
    def idle(self) -> bool:
        return self._task is None or self._task.done()

    def count(self, slot: int, size: int, strangers: int) -> int:
        """Count a slot in the background, when the last task is finished; returns the slot of that, which is free."""
        assert self._task is None
        self._pairs += size
        full = self._pairs >= _MAX_PAIRS  # a run's counts have 32 bits
        self._task = self._thread.submit(_count, self._pile, self._folder, (slot, size, strangers), full)
        self._slot, free = slot, self._slot
        return free

    def spill(self) -> None:
        """Write what the pile holds in the background."""
        self.finish()
        if self._pairs:
            self._task = self._thread.submit(_spill, self._pile, self._folder)

    def finish(self) -> None:
        """Wait for the task; raises what it raised."""
        task, self._task = self._task, None
        if task is not None and (run := task.result()):
            self.waiting.append(run)
            self._pairs = 0

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pile.close()


def _count(pile: Pile, folder: Path, slot: tuple[int, int, int], full: bool) -> dict[str, Any] | None:
    return _spill(pile, folder) if pile.count(*slot) or full else None


def _spill(pile: Pile, folder: Path) -> dict[str, Any]:
    name = new_name("run")
    return {"name": name} | pile.spill(folder / name)


def _lock(folder: Path) -> int:
    """A descriptor that keeps other processes from counting into the folder while it is open."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"another process is counting into {folder}; wait for it") from error
    return descriptor


@dataclass(frozen=True)
class Counted:
    """What any number of processes counted: their runs, not yet merged.

    Attributes:
        runs: keys and counts, read from files slice by slice.
        ends_V: int64, how often each token was the last of a document.
        tokens: tokens counted.
        documents: documents counted.
    """

    vocab_size: int
    runs: tuple[FileRun, ...]
    ends_V: Ints
    tokens: int
    documents: int

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Cut the left tokens into `number` ranges [first, end) of about as many entries to merge, some maybe empty.

        The same for the same folders, in whichever process.

        Raises:
            ValueError: no ranges asked for.
        """
        if number < 1:
            raise ValueError(f"{number} ranges were asked for, expected at least 1")
        wanted_N = np.array([self._entries * part // number for part in range(1, number)], dtype=np.int64)
        first_N, end_N = np.zeros_like(wanted_N), np.full_like(wanted_N, self.vocab_size)
        # The first rows before which lie at least so many entries, all searched for at once.
        while bool((first_N < end_N).any()):
            row_N = (first_N + end_N) // 2
            enough_N = self._before(row_N) >= wanted_N
            end_N = np.where(enough_N, row_N, end_N)
            first_N = np.where(enough_N, first_N, np.minimum(row_N + 1, end_N))
        return list(pairwise([0, *first_N.tolist(), self.vocab_size]))

    def merge_part(self, first_row: int, end_row: int, out: Path) -> None:
        """Merge the pairs whose left token is in [first_row, end_row) into one file, whole or not at all.

        Raises:
            ValueError: a pair seen more often than a table can hold.
            OSError: the disk is full, or the like.
        """
        sides: list[FileRun] = []
        for keys, counts in self.runs:
            first, end = keys.below(np.array([first_row, end_row]) * self.vocab_size).tolist()
            sides.append((keys.part(first, end), counts.part(first, end)))
        chunk = max(_CHUNK, _RUN_CHUNK * len(sides))
        out = Path(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{new_name(out.name)}")
        write_run(partial, self.vocab_size, merge_runs(sides, self.vocab_size, chunk))
        os.replace(partial, out)

    def assemble(self, parts: Sequence[Path], path: Path, metadata: Mapping[str, str] | None = None) -> None:
        """Lay the files of consecutive ranges end to end into a table's file.

        Raises:
            ValueError: parts that are damaged, or of other counts.
            OSError: the disk is full, or the like.
        """
        runs = [open_run(Path(part), self.vocab_size) for part in parts]

        def stream() -> Iterator[Run]:
            for keys, counts in runs:
                for at in range(0, len(keys), _CHUNK):
                    yield keys[at : at + _CHUNK], counts[at : at + _CHUNK]

        left_V = left_sums(stream(), self.vocab_size)
        unigram_V = left_V + self.ends_V
        if int(unigram_V.sum()) != self.tokens:
            raise ValueError(
                f"the parts hold {int(left_V.sum())} pairs and {int(self.ends_V.sum())} ends of documents; "
                f"{self.tokens} tokens were counted"
            )
        write_table(path, self.vocab_size, stream(), unigram_V, metadata=metadata)

    def write(self, path: Path, scratch: Path, threads: int = 2, metadata: Mapping[str, str] | None = None) -> None:
        """Merge and assemble in this process alone; parts go to the folder `scratch` and are deleted.

        Raises:
            ValueError: a pair seen more often than a table can hold.
            OSError: the disk is full, or the like.
        """
        ranges = self.ranges(threads)
        parts = [Path(scratch) / f"part-{number}" for number in range(len(ranges))]
        try:
            with ThreadPoolExecutor(threads) as pool:
                tasks = [pool.submit(self.merge_part, *rows, part) for rows, part in zip(ranges, parts, strict=True)]
                for task in tasks:
                    task.result()
            self.assemble(parts, path, metadata)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)

    @property
    def _entries(self) -> int:
        return sum(len(keys) for keys, _ in self.runs)

    def _before(self, row_N: Ints) -> Ints:
        """Entries of all runs before each row."""
        return sum((keys.below(row_N * self.vocab_size) for keys, _ in self.runs), np.zeros_like(row_N))


def counted(folders: Sequence[Path], vocab_size: int, check: bool = True) -> Counted:
    """Everything in the folders of finished counters, of any number of processes.

    Args:
        check: compare every file with its hash; without, with its size alone.

    Raises:
        ValueError: counts of another vocabulary; files that are missing or damaged; they are named.
    """
    runs: list[FileRun] = []
    ends_V = np.zeros(vocab_size, dtype=np.int64)
    tokens = documents = 0
    for folder in map(Path, folders):
        if index := read_index(folder, vocab_size, check):
            runs += [open_run(folder / run["name"], vocab_size) for run in index["runs"]]
            ends_V += read_ends(folder, index, vocab_size)
            tokens, documents = tokens + index["tokens"], documents + index["documents"]
    return Counted(vocab_size, tuple(runs), ends_V, tokens, documents)

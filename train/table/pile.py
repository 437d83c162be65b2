"""Counting in the background: a pile of runs in memory, here or in a process of its own.

numpy sorts with AVX-512 where it finds it. Some processors (AMD's Zen 4) run the instructions it uses for that five
times slower than AVX2's, and only a new process can be told to leave them: `RemotePile` is that process.

Letters: V vocabulary, T keys of pairs.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from importlib import import_module
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...checkpoints.table.runs import Run, key_dtype, merge_runs, run_of_keys
from .run_files import write_run

_AVX512 = ("AVX512F", "AVX512_SKX", "X86_V4")
"""What the AVX-512 that numpy sorts with is called in its versions."""

_SLOW_SECONDS = 15e-9
"""A key that takes longer to sort is taken as a sign of slow AVX-512; AVX2 takes 6 ns, scalar code 60."""


class Pile(Protocol):
    """Runs of one part of the tokens, not yet on the disk."""

    def count(self, slot: int, size: int, strangers: int) -> bool:
        """Count a slot's first keys, of which `strangers` are no pairs; returns whether it is time to spill."""

    def spill(self, path: Path) -> dict[str, Any]:
        """Write everything as one run and let go of it; returns its entries, bytes and sha256."""

    def close(self) -> None: ...


class Slots:
    """Memory for keys that processes share, in slots of `size` keys.

    Attributes:
        file: what another process opens it by; −1 where there is no such thing.
    """

    def __init__(self, number: int, size: int, vocab_size: int, file: int | None = None) -> None:
        dtype = key_dtype(vocab_size)
        self.size = size
        whole = number * size * dtype.itemsize
        if file is None and sys.platform == "linux" and hasattr(os, "memfd_create"):
            file = os.memfd_create("draftsmith-count")
            os.ftruncate(file, whole)
        self.file = -1 if file is None else file
        self._memory = np.frombuffer(mmap.mmap(self.file, whole), dtype=dtype).reshape(number, size)
        if self.file >= 0:
            weakref.finalize(self, os.close, self.file)

    def __getitem__(self, slot: int) -> NDArray[Any]:
        """Room for keys."""
        keys_T: NDArray[Any] = self._memory[slot]
        return keys_T


class LocalPile:
    """Runs in this process: kept as they come, merged into one when there are more than `budget` entries.

    Where more than half of the budget is still taken after that, it is time to spill: merging again would gain little.
    """

    def __init__(self, slots: Slots, vocab_size: int, budget: int) -> None:
        self._slots, self._vocab_size, self._budget = slots, vocab_size, budget
        self._runs: list[Run] = []

    def count(self, slot: int, size: int, strangers: int) -> bool:
        run = run_of_keys(self._slots[slot][:size], strangers)
        if len(run[0]):
            self._runs.append(run)
        if sum(len(keys) for keys, _ in self._runs) <= self._budget:
            return False
        if len(self._runs) > 1:
            self._runs = [self._merged()]
        return len(self._runs[0][0]) > self._budget // 2

    def _merged(self) -> Run:
        """All runs as one, in memory for as many entries as they have: what of it is never touched costs nothing."""
        most = sum(len(keys) for keys, _ in self._runs)
        # No count exceeds the pairs of a pile, which its owner keeps below 2³².
        keys_E, counts_E = np.empty(most, key_dtype(self._vocab_size)), np.empty(most, np.uint32)
        end = 0
        for keys, counts in merge_runs(self._runs, self._vocab_size):
            start, end = end, end + len(keys)
            keys_E[start:end], counts_E[start:end] = keys, counts
        return keys_E[:end], counts_E[:end]

    def spill(self, path: Path) -> dict[str, Any]:
        written = write_run(path, self._vocab_size, merge_runs(self._runs, self._vocab_size))
        self._runs = []
        return written

    def close(self) -> None:
        self._runs = []


class RemotePile:
    """A `LocalPile` in a process of its own, whose numpy sorts without AVX-512; it ends with its owner.

    Signals to its owner's process group do not reach it: the owner may want to spill before it ends.
    `count` and `spill` raise `ChildProcessError` where the process died.
    """

    def __init__(self, slots: Slots, number: int, vocab_size: int, budget: int) -> None:
        settings = {"file": slots.file, "number": number, "size": slots.size}
        # -P: what lies in the working folder is imported only where this process would import it as well.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(settings | {"vocab_size": vocab_size, "budget": budget})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[slots.file],
            env=_environment(),
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)

    def count(self, slot: int, size: int, strangers: int) -> bool:
        return bool(self._ask("count", slot, size, strangers))

    def spill(self, path: Path) -> dict[str, Any]:
        written: dict[str, Any] = self._ask("spill", str(path))
        return written

    def close(self) -> None:
        self._finalizer()

    def _ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            raise ChildProcessError(f"a process that counts pairs ended with code {code}; start again to go on")
        kind, *answer = json.loads(line)
        if kind == "OSError":
            raise OSError(*answer)
        if kind == "ValueError":
            raise ValueError(*answer)
        return answer[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends when there is nothing more to read."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # it may have died
            pipe.close()
    process.wait()


def _features_to_disable() -> list[str]:
    """AVX-512 as numpy uses it here. What numpy was built to require is not in it: it does not start without."""
    numpy_core = import_module("numpy._core._multiarray_umath")
    return [name for name in _AVX512 if name in numpy_core.__cpu_dispatch__ and numpy_core.__cpu_features__[name]]


def _environment() -> dict[str, str]:
    """This process's environment and path for imports, for a numpy without AVX-512."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": "1",
    }
    if features := _features_to_disable():
        environment.pop("NPY_ENABLE_CPU_FEATURES", None)  # numpy takes only one of the two
        disabled = environment.get("NPY_DISABLE_CPU_FEATURES", "")
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join([*disabled.replace(",", " ").split(), *features])
    return environment


def sorting_is_slow() -> bool:
    """Whether numpy sorts slowly here, with AVX-512 that it may be told to do without."""
    if not _features_to_disable():
        return False
    keys_T = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    seconds = []
    for _ in range(3):
        copy_T = keys_T.copy()
        start = time.thread_time()
        copy_T.sort()
        seconds.append(time.thread_time() - start)
    return min(seconds) > _SLOW_SECONDS * len(keys_T)


def _serve(settings: dict[str, int], requests: IO[bytes], answers: RawIOBase) -> None:
    """Answer a `RemotePile` until it closes its end."""
    slots = Slots(settings["number"], settings["size"], settings["vocab_size"], settings["file"])
    pile = LocalPile(slots, settings["vocab_size"], settings["budget"])
    for line in requests:
        kind, *arguments = json.loads(line)
        answer: list[Any]
        try:
            answer = ["done", pile.count(*arguments) if kind == "count" else pile.spill(Path(*arguments))]
        except OSError as error:
            answer = ["OSError", error.errno, error.strerror, error.filename]
        except ValueError as error:
            answer = ["ValueError", str(error)]
        answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job, its owner decides what they do
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError), open(1, "wb", buffering=0) as answers:  # its owner may be killed
        _serve(json.loads(sys.argv[1]), sys.stdin.buffer, answers)

"""Work of several processes that succeeds in all of them or ends all of them, and signals that end it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from ...checkpoints.storage.messages import words

Found = TypeVar("Found")

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_OF_THE_USER = (FileNotFoundError, ModuleNotFoundError)
"""Besides plain ValueErrors, what the command line reports as wrong input."""


class Interrupted(Exception):  # noqa: N818 - like KeyboardInterrupt, it is no error
    """Training was stopped by a signal after its state was saved; `signal_number` says by which."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class TrainingError(ValueError):
    """Training cannot go on; the last checkpoint is untouched. `blocks`: those that it happened in, where known."""

    def __init__(self, message: str, blocks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.blocks = [int(block) for block in blocks]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device."""
    return isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _NO_MEMORY)


class StopSignals:
    """While entered (in the main thread), SIGINT and SIGTERM only set `received`; a second SIGINT raises
    KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number


class StoppedError(TrainingError):
    """A process ended its work because another one had to; that one reports why. `code`: the exit code of both."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def together(accelerator: Any, work: Callable[[], Found]) -> Found:
    """Do something in all processes, which does not wait for the others. Where one fails all end with its exit code,
    and the main process alone reports why: by what the first process that failed by itself raised (ValueError,
    TrainingError, Interrupted). Raises StoppedError where this is another one, but for signals."""
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import gather_object

    process, is_main = accelerator.process_index, accelerator.is_main_process  # `work` may make another accelerator
    found, error = None, None
    try:
        found = work()
    except (Interrupted, ValueError, OSError, ModuleNotFoundError) as raised:
        error = raised
    mine = None if error is None else _described(error, process)
    try:
        failures = [failure for failure in gather_object([mine]) if failure is not None]
    except RuntimeError:
        # another process, which answers no more, has ended already
        if error is None or mine is None:
            raise
        if not mine[0]:
            raise error from None
        failures = [mine]
    if not failures:
        return found  # type: ignore[return-value]
    first = min(failures, key=lambda failure: failure[0])
    if is_main and error is not None and first == mine:
        raise error
    _, code, text = first
    if code > 128:
        raise Interrupted(code - 128, text)
    if not is_main:
        raise StoppedError(text, code)
    raise TrainingError(text) if code == 1 else ValueError(text)


def _described(error: BaseException, process: int) -> tuple[bool, int, str]:
    """Of a failure: whether it only follows from another, the exit code, and its message."""
    if isinstance(error, Interrupted):
        return False, 128 + error.signal_number, str(error)
    if isinstance(error, _OF_THE_USER):
        return False, 2, words(error)
    if isinstance(error, StoppedError):
        return True, error.code, str(error)
    if isinstance(error, ValueError):
        return False, 1 if isinstance(error, TrainingError) else 2, str(error)
    return False, 1, f"process {process}: {words(error)}"


def on_main(accelerator: Any, work: Callable[[], object]) -> None:
    """Do something in the main process, while the others wait; where it fails all end, see `together`."""
    together(accelerator, lambda: work() if accelerator.is_main_process else None)


def from_main(accelerator: Any, work: Callable[[], Found]) -> Found:
    """What the main process finds out, in all of them; see `on_main`."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None]

    def find() -> None:
        found[0] = work()

    on_main(accelerator, find)
    return broadcast_object_list(found)[0]


def lost_another(error: BaseException) -> bool:
    """Whether it is what a process meets that talks to another one which has ended."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)

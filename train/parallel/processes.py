"""Work of the main process that the others wait for, and signals that end a run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Found = TypeVar("Found")

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class Interrupted(Exception):  # noqa: N818 - like KeyboardInterrupt, it is no error
    """Training was stopped by a signal after its state was saved; `signal_number` says by which."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class TrainingError(ValueError):
    """Training cannot go on; the last checkpoint is untouched."""


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


def on_main(accelerator: Any, work: Callable[[], object]) -> None:
    """Run `work` in the main process while the others wait; if it fails, they end with it."""
    if accelerator.is_main_process:
        work()
    accelerator.wait_for_everyone()


def from_main(accelerator: Any, work: Callable[[], Found]) -> Found:
    """Return in all processes what `work` returns in the main one."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([work() if accelerator.is_main_process else None])[0]


def lost_another(error: BaseException) -> bool:
    """Whether it is what a process meets that talks to another one which has ended."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)

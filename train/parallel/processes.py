"""Handling of signals, errors and the main process in runs of one or several processes."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class Interrupted(Exception):  # noqa: N818 - not an error, like KeyboardInterrupt
    """Exception raised when a signal stopped a command after its state was saved; `signal_number` is the signal."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class TrainingError(ValueError):
    """Exception raised when training cannot continue. The last checkpoint is unchanged."""


def is_out_of_memory(error: BaseException) -> bool:
    """Check if an error means that the host or a device is out of memory."""
    return isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _NO_MEMORY)


class StopSignals:
    """Context manager in which SIGINT and SIGTERM only set `received`. A second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number


def on_main(accelerator: Any, work: Callable[[], object]) -> None:
    """Run `work` in the main process while the other processes wait. If `work` fails, all processes end."""
    if accelerator.is_main_process:
        work()
    accelerator.wait_for_everyone()


def from_main(accelerator: Any, work: Callable[[], Result]) -> Result:
    """Run `work` in the main process and return its result in all processes."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([work() if accelerator.is_main_process else None])[0]


def is_peer_failure(error: BaseException) -> bool:
    """Check if an error was caused by the end of another process of the same run."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)

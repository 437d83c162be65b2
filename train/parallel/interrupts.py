"""Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


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
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


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

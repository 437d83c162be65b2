"""Graceful interruption of commands by signals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ...train.parallel.processes import Interrupted, StopSignals
from .terminal import Advance, bar, log


class Stoppable(StopSignals):
    """Signal handler that stops the command `title` after the current step. `further` is appended to log messages."""

    def __init__(self, title: str, further: str = "; the same command resumes from here") -> None:
        super().__init__()
        self._what, self._further = title, further

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.received is not None

    def check(self, report: bool = True) -> None:
        """Raise Interrupted if a signal has arrived. With `report`, also log a message."""
        if self.received is not None:
            stopped = f"{self._what}: stopped by signal {self.received}{self._further}"
            if report:
                log(stopped)
            raise Interrupted(self.received, stopped)

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Advance]:
        """Show a progress bar that raises Interrupted at the next update after a signal."""
        with bar(title, unit) as advance:

            def watched(done: int, total: int, note: str = "") -> None:
                advance(done, total, note)
                self.check()

            yield watched

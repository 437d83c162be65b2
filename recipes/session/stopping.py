"""Graceful interruption of commands by signals."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...train.parallel.processes import Interrupted, StopSignals
from .terminal import Advance, bar, log


class Stoppable(StopSignals):
    """Signal handler that stops the command `title` after the current step. `further` ends the logged message."""

    def __init__(self, title: str, further: str = "; run the same command again to resume") -> None:
        super().__init__()
        self._what, self._further = title, further

    def __call__(self) -> bool:
        """Return whether a stop signal (SIGINT or SIGTERM) has arrived."""
        return self.received is not None

    def check(self, report: bool = True) -> None:
        """Raise Interrupted if a stop signal has arrived. If `report` is True, also log a message."""
        if self.received is not None:
            stopped = f"{self._what}: stopped by signal {self.received}{self._further}"
            if report:
                log(stopped)
            raise Interrupted(self.received, stopped)

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Advance]:
        """Show a progress bar. After a stop signal, the next update raises Interrupted."""
        with bar(title, unit) as advance:

            def watched(done: int, total: int, note: str = "") -> None:
                advance(done, total, note)
                self.check()

            yield watched

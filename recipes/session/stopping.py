"""Commands that a signal ends between two steps of their work, with what had been finished kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ...train.parallel.processes import Interrupted, StopSignals
from .terminal import Advance, bar, log


class Stoppable(StopSignals):
    """Signals that come meanwhile and end `what` (for people: "evaluate"); `further`: what then is to be done."""

    def __init__(self, what: str, further: str = "; the same command resumes from here") -> None:
        super().__init__()
        self._what, self._further = what, further

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __call__(self) -> bool:
        """Whether one has come."""
        return self.received is not None

    def check(self, report: bool = True) -> None:
        """Log and raise Interrupted once one has come."""
        if self.received is not None:
            stopped = f"{self._what}: stopped by signal {self.received}{self._further}"
            if report:
                log(stopped)
            raise Interrupted(self.received, stopped)

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Advance]:
        """A progress bar that checks at each step."""
        with bar(title, unit) as advance:

            def watched(done: int, total: int, note: str = "") -> None:
                advance(done, total, note)
                self.check()

            yield watched

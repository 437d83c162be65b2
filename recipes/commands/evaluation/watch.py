"""Progress of work that a signal stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ....train.parallel.interrupts import Interrupted, StopSignals
from ...session.terminal import Advance, bar, log


@contextmanager
def stoppable_bar(title: str, unit: str, signals: StopSignals, message: str) -> Iterator[Advance]:
    """A progress bar that raises Interrupted once a signal has come, whose number stands for `{}` in the message."""
    with bar(title, unit) as advance:

        def watched(done: int, total: int, note: str = "") -> None:
            advance(done, total, note)
            stop_if_asked(signals, message)

        yield watched


def stop_if_asked(signals: StopSignals, message: str) -> None:
    """Log and raise Interrupted once a signal has come."""
    if signals.received is not None:
        stopped = message.format(signals.received)
        log(stopped)
        raise Interrupted(signals.received, stopped)

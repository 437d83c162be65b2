"""What a person sees: results on standard output, one line a fact and progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 15.0


def console() -> Console:
    """Standard output, as it is now, so that redirection is noticed; a file is 120 columns wide."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def log(text: str) -> None:
    """One line about what is going on, on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


@contextmanager
def counter(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of work whose amount is not known: `advance(done, second_number)`, a line now and then."""
    advance = _lines(title, unit)
    yield lambda done, _: advance(done, 0)


class Advance(Protocol):
    """Reports how much of the work is done, of how much, and what is next."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def bar(title: str, unit: str) -> Iterator[Advance]:
    """Progress of known work: `advance(done, total, note)`. A bar on a terminal, a line now and then elsewhere.

    The time left goes by what was done since the first call, so that work of an earlier process is not counted.
    """
    if not sys.stderr.isatty():
        yield _lines(title, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, note="")

        def advance_bar(done: int, total: int, note: str = "") -> None:
            if progress.tasks[0].total is None:
                progress.reset(task, completed=done, total=total)
            progress.update(task, completed=done, total=total, note=escape(note))

        yield advance_bar


def _lines(title: str, unit: str) -> Advance:
    start = last = time.monotonic()
    first: int | None = None

    def advance_line(done: int, total: int, note: str = "") -> None:
        nonlocal first, last, start
        now = time.monotonic()
        if first is None:
            first, start = (0, start) if done <= 1 else (done, now)
        if now - last >= _SECONDS_BETWEEN_LINES and done > first:
            last = now
            speed = (done - first) / (now - start)
            of, left = (f" of {total:,}", f"{duration((total - done) / speed)} left") if total else ("", "")
            left = left or f"{speed:,.0f} a second"
            log(f"{title}: {done:,}{of} {unit}, {left}" + (f"; next: {note}" if note else ""))

    return advance_line


def gigabytes(size: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= worth:
            return f"{size / worth:,.2f} {unit}"
    return f"{size:.0f} bytes"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"

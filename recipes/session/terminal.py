"""Output of the commands: results on standard output, log lines and progress on standard error."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from ...checkpoints.storage.messages import escape_control
from ...checkpoints.storage.redaction import redacted

_SECONDS_BETWEEN_LINES = 15.0
_SECONDS_TO_FIRST_LINE = 5.0


class Terminal(Console):
    """Console without markup that escapes control codes and redacts secrets. Pass styled text as `Text`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(escape_control(redacted(text)), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            renderable = renderable.copy()
            renderable.plain = escape_control(renderable.plain)
        return super().render(renderable, options)


def console() -> Terminal:
    """Return a console for standard output. Its width is 120 columns if the output is not a terminal."""
    return Terminal(width=None if sys.stdout.isatty() else 120)


def write_json(text: str) -> None:
    """Write JSON text to standard output, with control characters escaped."""
    sys.stdout.write("".join(c if escape_control(c) == c else json.dumps(c)[1:-1] for c in text))


def log(text: str) -> None:
    """Print a line to standard error."""
    Terminal(stderr=True, soft_wrap=True).print(text)


def counter(title: str, unit: str) -> Callable[..., None]:
    """Return a callback `advance(done)` that logs progress at intervals, for work whose total is unknown."""
    advance = _lines(title, unit)
    return lambda done, *_: advance(done, 0)


class Advance(Protocol):
    """Progress callback that receives the number of finished units, the total, and a note on the next unit."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def bar(title: str, unit: str) -> Iterator[Advance]:
    """Show a progress bar on a terminal, otherwise log progress at intervals. Yield a callback for updates.

    The remaining time is estimated from the progress since the first update, so that resumed work does not count.
    """
    if not sys.stderr.isatty():
        yield _lines(title, unit)
        return
    note_column = TextColumn("{task.fields[note]}", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), note_column)
    with Progress(*columns, *times, console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, note="")

        def advance_bar(done: int, total: int, note: str = "") -> None:
            if progress.tasks[0].total is None:
                progress.reset(task, completed=done, total=total)
            progress.update(task, completed=done, total=total, note=note)

        yield advance_bar


def _lines(title: str, unit: str) -> Advance:
    start = time.monotonic()
    last = start + _SECONDS_TO_FIRST_LINE - _SECONDS_BETWEEN_LINES
    first: int | None = None

    def advance_line(done: int, total: int, note: str = "") -> None:
        nonlocal first, last, start
        now = time.monotonic()
        if first is None:
            first, start = (0, start) if done <= 1 else (done, now)
        if now - last >= _SECONDS_BETWEEN_LINES and done > first:
            last = now
            speed = (done - first) / (now - start)
            of, remaining = (f" of {total:,}", f"{duration((total - done) / speed)} left") if total else ("", "")
            remaining = remaining or f"{speed:,.0f} per second"
            log(f"{title}: {done:,}{of} {unit}, {remaining}" + (f"; next: {note}" if note else ""))

    return advance_line


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"

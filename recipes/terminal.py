"""What a person sees: one line a fact, progress with rate and time left, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_SECONDS_BETWEEN_LINES = 15.0


def console() -> Console:
    """Standard output: for results. Made anew, so that redirection is noticed; a file is 120 columns wide."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def say(text: str) -> None:
    """One line about what is going on, on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


@contextmanager
def counter(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of work whose amount is not known: `advance(done, second_number)`, a line now and then."""
    start = last = time.monotonic()

    def advance(done: int, _: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{title}: {done:,} {unit}, {done / (now - start):,.0f} a second")

    yield advance


@contextmanager
def bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of known work: `advance(done, total)`. A bar on a terminal, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        start = last = time.monotonic()

        def advance_line(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _SECONDS_BETWEEN_LINES and done:
                last = now
                left = (now - start) / done * (total - done)
                say(f"{title}: {done:,} of {total:,} {unit}, {left:.0f} s left")

        yield advance_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)

        def advance_bar(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield advance_bar


def results_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The evaluation as one table, a row a method."""
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in (
        "tokens per step",
        "acceptance rate",
        "tokens/s",
        "speedup",
        "95 % interval",
        "bound",
        "efficiency",
    ):
        table.add_column(heading, justify="right", min_width=max(len(word) for word in heading.split()))
    table.add_column("lossless", no_wrap=True)
    for row in rows:
        interval = row["speedup_interval"]
        table.add_row(
            row["label"],
            f"{row['tokens_per_step']:.2f}",
            "–" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
            f"{row['bound']:.2f}x",
            f"{row['efficiency']:.2f}",
            _lossless(row),
        )
    return table


def _lossless(row: dict[str, Any]) -> str:
    if not row["lossless"]:
        return "no"
    same = row["identical_to_greedy"]
    return "yes" if same is None else f"yes, {same[0]}/{same[1]} same"


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

"""What a person sees: one line a fact, progress with rate and time left, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_SECONDS_BETWEEN_LINES = 15.0


def console() -> Console:
    """Standard output: for results. Made anew, so that redirection is noticed; a file is 120 columns wide."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def log(text: str) -> None:
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
            log(f"{title}: {done:,} {unit}, {done / (now - start):,.0f} a second")

    yield advance


class Advance(Protocol):
    """Says how much of the work is done, of how much, and what is next."""

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
        begun = False

        def advance_bar(done: int, total: int, note: str = "") -> None:
            nonlocal begun
            if not begun:
                begun = True
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
            left = (now - start) / (done - first) * (total - done)
            log(f"{title}: {done:,} of {total:,} {unit}, {duration(left)} left" + (f"; next: {note}" if note else ""))

    return advance_line


_HEADINGS = (
    "tokens\nper step", "accept\nrate", "tokens/s", "speedup", "95 %\ninterval", "bound", "of\nbound", "perpl.",
    "lossless",
)  # fmt: skip
_LONGEST_NAME = 26


def results_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The evaluation as one table, a row a method; it fits into 100 columns. `of bound` is the row's efficiency."""
    table = _table(title, {"method": [row["label"] for row in rows]}, _HEADINGS)
    for row in rows:
        cells = (*_rates(row), f"{row['bound']:.2f}x", f"{row['efficiency']:.2f}", _number(row["perplexity"]))
        table.add_row(escape(row["label"]), *cells, _lossless(row), style=None if row["lossless"] else "dim")
    return table


def categories_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The same by category of prompts, the methods one below the other."""
    names = {
        "method": [row["label"] for row in rows],
        "category": [name for row in rows for name in row["by_category"]],
    }
    table = _table("by category", names, ("prompts", *_HEADINGS[:5], "perpl.", "ROUGE-L"))
    for row in rows:
        for place, (name, part) in enumerate(row["by_category"].items()):
            cells = (*_rates(part), _number(part["perplexity"]), _number(part["rouge_l"]))
            label = "" if place else escape(row["label"])
            table.add_row(label, escape(name) or "–", str(part["prompts"]), *cells)
    return table


def _table(title: str, names: dict[str, list[str]], headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for heading, cells in names.items():
        longest = max(map(len, [heading, *cells]))
        table.add_column(heading, overflow="fold", min_width=min(longest, _LONGEST_NAME // len(names)))
    for heading in headings:
        table.add_column(heading, justify="right", min_width=max(map(len, heading.splitlines())))
    return table


def _rates(part: dict[str, Any]) -> tuple[str, ...]:
    interval = part["speedup_interval"]
    return (
        _number(part["tokens_per_step"]),
        _number(part["acceptance_rate"]),
        f"{part['tokens_per_second']:.0f}",
        f"{part['speedup']:.2f}x",
        "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}",
    )


def _number(value: float | None) -> str:
    """Three digits that count, or a dash."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def _lossless(row: dict[str, Any]) -> str:
    if not row["lossless"]:
        return "no"
    same = row["identical_to_greedy"]
    return "yes" if same is None else f"yes {same[0]}/{same[1]}"


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

"""Python's garbage collector, kept from looking at a large process again and again while rows stream through it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 1_000_000


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Collect only after so many new objects that are still there.

    Rows are freed by their reference counts, without the collector; but every 700 new objects it looks for cycles, and
    often among all that the process has loaded.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

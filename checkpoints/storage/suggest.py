"""Parts of error messages: the nearest right name, the first line of another error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_line(error: Exception) -> str:
    """What an error says in its first line, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

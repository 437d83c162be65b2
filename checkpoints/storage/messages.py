"""Parts of error messages: the nearest right name, somebody else's text, the point of another error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST = 200


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def shown(text: str) -> str:
    """Somebody else's text as a terminal may have it: without codes that move, colour or hide what stands there."""
    return text if text.isprintable() else ascii(text)


def first_line(error: BaseException) -> str:
    """Of an error's message; its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def brief(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"

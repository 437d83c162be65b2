"""JSON values one by one out of a stream, in the memory of one value."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..conversations import encodable

CHUNK = 1 << 16  # of a packed file that is cut short, at most about this much before the cut is lost
MAX_VALUE = 64 << 20  # bytes of a row, characters of a value
_SPACE = re.compile(r"[ \t\r\n]*")
_LONE = re.compile("[\udc80-\udcff]")
_DECODER = json.JSONDecoder()


class TooLargeError(ValueError):
    """A value does not end within `MAX_VALUE`."""


class JsonValues:
    """Iterates over the values of one list, or over values one after the other: (value, whether it is UTF-8).

    Raises EOFError: the text ends within a value or the list; ValueError, RecursionError: it is no JSON, or nested too
    deeply; `line` says where.
    """

    def __init__(self, stream: BinaryIO) -> None:
        # a byte that is not UTF-8 becomes a lone surrogate, which no JSON text can hold
        self._stream = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        self._text, self._at, self._line = "", 0, 1
        self._ended = self._has_lone = False

    @property
    def line(self) -> int:
        """The line of the text, from 1, on which the next value begins."""
        return self._line + self._text.count("\n", 0, self._at)

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        in_list = self._take("[")
        done = in_list and self._take("]")
        while not done:
            yield self._value()
            done = self._take("]") if in_list else not self._peek()
            if in_list and not done and not self._take(","):
                if not self._peek():
                    raise EOFError("the list does not end")
                raise ValueError(f"expected another row or the end, found {self._peek()}")
        if self._peek():
            raise ValueError(f"expected nothing after the list of rows, found {self._peek()}")

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _take(self, mark: str) -> bool:
        """Pass `mark` if it is the next character that is no space."""
        found = self._peek() == mark
        self._at += found
        return found

    def _value(self) -> tuple[Any, bool]:
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # 12 may become 123
                    start, self._at = self._at, end
                    return value, not (self._has_lone and _LONE.search(self._text, start, end))
            except json.JSONDecodeError as error:
                at_end = error.pos >= len(self._text.rstrip()) or error.msg.startswith("Unterminated")
                if self._ended and at_end:
                    raise EOFError(f"{error.msg} at line {self.line}") from error
                if self._ended:
                    raise
                if len(self._text) - self._at > MAX_VALUE:
                    raise TooLargeError from error
            self._read()

    def _read(self) -> None:
        """Read on: as much again as waits, so that a long value is tried a few times only."""
        self._line = self.line
        waiting = self._text[self._at :]
        more = self._stream.read(max(CHUNK, len(waiting)))
        self._ended = not more
        self._text, self._at = waiting + more, 0
        self._has_lone = encodable(self._text) is not self._text

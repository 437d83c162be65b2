"""JSON values one by one out of a stream, in the memory of one value."""

from __future__ import annotations

import codecs
import io
import json
import re
import zlib
from typing import Any

CHUNK = 2**18
_READ = 2**15  # of a packed file that is cut short, at most this much before the cut is lost
_SPACE = re.compile(r"[ \t\r\n]*")
_LONE = re.compile("[\udc80-\udcff]")
# a word, a number or an escape that the end of what was read may have cut
_PARTIAL = re.compile(r"[-+.\w\\]{0,10}\Z")
_DECODER = json.JSONDecoder()


class JsonText:
    """A JSON text of which a piece is held: what was read and is not yet used up.

    `stream` gives UTF-8. A byte that is none becomes a lone surrogate, which no JSON text can hold, so that the value
    it stands in can be told (`is_utf8`) and those after it be read.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._text, self._at, self._line = "", 0, 1
        self._stream, self._ended = stream, False
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._error: Exception | None = None

    @property
    def line(self) -> int:
        """The line of the text, from 1, on which the next value begins."""
        return self._line + self._text.count("\n", 0, self._at)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def take(self, mark: str) -> bool:
        """Pass `mark` if it is the next character that is no space."""
        if self.peek() != mark:
            return False
        self._at += 1
        return True

    def value(self, limit: int) -> tuple[Any, str]:
        """The value that begins here, and the text it was written as.

        Raises:
            EOFError: the text ends within the value.
            OverflowError: the value goes on after `limit` characters.
            ValueError, RecursionError: it is no JSON value, or nested too deeply.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # 12 may become 123
                    start, self._at = self._at, end
                    return value, self._text[start:end]
            except json.JSONDecodeError as error:
                if not (error.msg.startswith("Unterminated") or _PARTIAL.match(self._text, error.pos)):
                    raise
                if self._ended:
                    raise EOFError(f"{error.msg} at line {self.line}") from error
            if len(self._text) - self._at > limit:
                raise OverflowError(len(self._text) - self._at)
            self._more()

    def _more(self) -> None:
        """Read on: as much again as waits, so that a long value is tried a few times only."""
        if self._error is not None:
            raise self._error
        self._line = self.line
        missing = max(CHUNK, len(self._text) - self._at)
        parts = [self._text[self._at :]]
        try:
            while missing > 0 and not self._ended:
                data = self._stream.read1(min(missing, _READ))
                missing -= len(data)
                self._ended = not data
                parts.append(self._decode(data, self._ended))
        except (EOFError, OSError, zlib.error) as error:  # what came before is used first
            self._error = error
        self._text, self._at = "".join(parts), 0


def is_utf8(written: str) -> bool:
    """Whether a text that `JsonText` read was UTF-8 throughout."""
    return written.isascii() or _LONE.search(written) is None

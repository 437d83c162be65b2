"""Helpers for error messages: suggestions, sizes, sanitised strings and summaries of exceptions."""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_LONGEST = 200
_HARMLESS = "\n\t\N{SOFT HYPHEN}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return ` Did you mean 'x'?` for the most similar known name, or an empty string if none is similar enough."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def error_text(error: BaseException) -> str:
    """Return an exception's message without errno; for OSErrors, the file name and the reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return re.sub(r"\[Errno -?\d+\] ", "", str(error))  # in errors wrapped by libraries


def gigabytes(size: float) -> str:
    """Format a number of bytes with a decimal unit, such as `1.50 GB`."""
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= worth:
            return f"{size / worth:,.2f} {unit}"
    return f"{size:.0f} bytes"


def shared_length(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common prefix of two strings, or of two lists of strings."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, and the second if the first ends with a colon."""
    lines = [line.strip() for line in error_text(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def install_hint(extra: str = "") -> str:
    """Return the pip command that installs draftsmith with an extra, from the source checkout if there is one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'draftsmith[{extra}]'" if extra else "pip install draftsmith"
    folder = "." if root == Path.cwd() else str(root)
    return f"pip install -e '{folder}[{extra}]'" if extra else f"pip install -e '{folder}'"


def brief(value: Any) -> str:
    """Return the ASCII representation of a value, truncated if it is long."""
    text = ascii(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def escape_control(text: str) -> str:
    """Replace control and invisible characters by visible symbols, such as "␛" or "�", for safe terminal output."""
    return text if text.isprintable() else "".join(map(_picture, text))


def _picture(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in _HARMLESS:
        return character
    code = ord(character)
    return chr(0x2400 + code if code < 32 else 0x2421 if code == 127 else 0xFFFD)

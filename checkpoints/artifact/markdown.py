"""Words of others in Markdown: names, labels and texts that stand on a page as text, whatever they hold."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jinja2

from .manifest import to_json_safe

_MARKED = re.compile(r"([\\`*_{}\[\]#|~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_PATH = re.compile(r"(?<![\w:/.\\~-])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"<>|,;=:]+){2,}[/\\]?")
_WHOLE_PATH = re.compile(r"(?:~|[A-Za-z]:)?[/\\][^/\\\n].*[/\\]([^/\\\n]+)")
_LONGEST = 400


def environment(folder: Path) -> jinja2.Environment:
    """Templates of Markdown in a folder, with this module's functions as filters."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {each.__name__: each for each in (text, public, line, span, python, shell, number)}
    return made


def text(value: Any) -> str:
    """A value as one line of Markdown that is read as that very text, without folders of the machine it was made on."""
    whole = _WHOLE_PATH.fullmatch(str(to_json_safe(value)))
    found = line(whole[1] if whole else public(str(to_json_safe(value))))
    found = found if len(found) <= _LONGEST else found[:_LONGEST] + "…"
    return _MARKED.sub(r"\\\1", "".join(_ENTITIES.get(character, character) for character in found))


def public(value: str) -> str:
    """A text without the folders of a machine: `/home/me/runs/a.json` becomes `a.json`."""
    return _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], value)


def paths_in(value: str) -> list[str]:
    """The folders and files of a machine that a text names: what `public` shortens."""
    return [found[0].rstrip("`.)]}") for found in _PATH.finditer(value)]


def line(value: Any) -> str:
    """A text on one line, without secrets."""
    return _shown(" ".join(str(to_json_safe(value)).split()))


def span(value: str) -> str:
    """A text in a line of Markdown as code: whole, with no backtick in it that could end it."""
    found = _shown(str(to_json_safe(value)))
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", found)), default=0) + 1)
    space = " " if found.startswith("`") or found.endswith("`") else ""
    return f"{ticks}{space}{found}{space}{ticks}"


def python(value: str) -> str:
    """A text as Python has it, on one line. (JSON alone writes a character above U+FFFF as two that are none.)"""
    found = json.dumps(str(to_json_safe(value)), ensure_ascii=False)
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in found)


def shell(value: str) -> str:
    """A model's name as an argument in bash, on one line; never an option."""
    value = str(to_json_safe(value))
    value = f"./{value}" if value.startswith("-") else value
    if value.isprintable():
        return shlex.quote(value)
    quotes = value.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in quotes) + "'"


def number(value: Any) -> str:
    """A number as people read it; anything else as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(value)


def _shown(value: str) -> str:
    """Characters that cannot be seen, or that turn the order of others around, by their numbers."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in value)

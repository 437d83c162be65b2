"""Words of others in Markdown: names, labels and token texts that stand on a card as text, whatever they hold."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .manifest import to_json_safe

_MARKED = re.compile(r"([\\`*_{}\[\]#|~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_PATH = re.compile(r"(?<![\w:/.\\~-])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"<>|,;=:]+){2,}[/\\]?")
_WHOLE_PATH = re.compile(r"(?:~|[A-Za-z]:)?[/\\][^/\\\n].*[/\\]([^/\\\n]+)")
_LONGEST = 400


def text(value: Any) -> str:
    """A value as one line of Markdown that is read as that very text, without folders of the machine it was made on."""
    whole = _WHOLE_PATH.fullmatch(str(to_json_safe(value)))
    line = _one_line(whole[1] if whole else public(str(to_json_safe(value))))
    line = line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
    return _MARKED.sub(r"\\\1", "".join(_ENTITIES.get(character, character) for character in line))


def public(value: str) -> str:
    """A text without the folders of a machine: `/home/me/runs/a.json` becomes `a.json`."""
    return _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], value)


def paths_in(value: str) -> list[str]:
    """The folders and files of a machine that a text names: what `public` shortens."""
    return [found[0].rstrip("`.)]}") for found in _PATH.finditer(value)]


def fenced(code: str, language: str) -> list[str]:
    """Lines of a block of code; no backticks in it can end it, and it holds no secret."""
    code = str(to_json_safe(code))
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *map(_shown, code.splitlines()), fence]


def span(value: str) -> str:
    """A text in a line of Markdown as code: whole, with no backtick in it that could end it."""
    line = _shown(str(to_json_safe(value)))
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}"


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
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return text(value)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; cells are Markdown already."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def head(values: Mapping[str, str | Sequence[str] | None]) -> list[str]:
    """The block of YAML at a card's top; empty values are left out. Texts are lines: one of theirs could end it."""
    kept: dict[str, str | list[str]] = {}
    for key, value in values.items():
        if isinstance(value, str):
            kept[key] = _one_line(str(to_json_safe(value)))
        elif value:
            kept[key] = [_one_line(str(to_json_safe(each))) for each in value]
    lines = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1 << 20).splitlines()
    return ["---", *lines, "---", ""]


def _one_line(value: str) -> str:
    return _shown(" ".join(value.split()))


def _shown(value: str) -> str:
    """Characters that cannot be seen, or that turn the order of others around, by their numbers."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in value)

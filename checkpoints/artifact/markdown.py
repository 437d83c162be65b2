"""Jinja templates of Markdown, with filters that escape names and texts for Markdown, Python and bash."""

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jinja2

from ..storage.redaction import redacted

_MARKED = re.compile(r"([\\`*_{}\[\]#|~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w:/.\\~-])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\'\"<>|,;=:]+){2,}[/\\]?")


def environment(folder: Path) -> jinja2.Environment:
    """Return the templates in a folder, with this module's functions as filters."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {each.__name__: each for each in (text, public, line, span, python, shell, number)}
    return templates


def text(value: Any) -> str:
    """Return a value as one escaped line of Markdown, without local folders."""
    return _MARKED.sub(r"\\\1", html.escape(line(public(str(value))), quote=False))


def public(value: str) -> str:
    """Return a text without local folders: `/home/me/runs/a.json` becomes `a.json`."""
    return _PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], value)


def line(value: Any) -> str:
    """Return a text on one line, without secrets and unprintable characters."""
    return "".join(one for one in " ".join(redacted(str(value)).split()) if one.isprintable())


def span(value: str) -> str:
    """Return a text as inline code in Markdown."""
    ticks = "``" if "`" in value else "`"
    space = " " if "`" in value else ""
    return f"{ticks}{space}{line(value)}{space}{ticks}"


def python(value: str) -> str:
    """Return a text as a Python literal."""
    return json.dumps(redacted(value), ensure_ascii=False)


def shell(value: str) -> str:
    """Return a model's name as an argument in bash that cannot be taken for an option."""
    return shlex.quote(f"./{value}" if value.startswith("-") else value)


def number(value: Any) -> str:
    """Return a number in readable form, and anything else as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(value)

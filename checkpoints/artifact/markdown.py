"""Jinja environment for Markdown templates, with filters that escape values for Markdown, Python and bash."""

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
    """Return a Jinja environment for the templates in a folder, with this module's functions as filters."""
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
    """Format a value as one line of escaped Markdown, with local paths reduced to file names."""
    return _MARKED.sub(r"\\\1", html.escape(line(public(str(value))), quote=False))


def public(value: str) -> str:
    """Reduce local paths in a string to file names: `/home/me/runs/a.json` becomes `a.json`."""
    return _PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], value)


def line(value: Any) -> str:
    """Format a value as a single line, without secrets or unprintable characters."""
    return "".join(one for one in " ".join(redacted(str(value)).split()) if one.isprintable())


def span(value: str) -> str:
    """Format a string as inline code in Markdown."""
    ticks, space = ("``", " ") if "`" in value else ("`", "")
    return f"{ticks}{space}{line(value)}{space}{ticks}"


def python(value: str) -> str:
    """Format a string as a Python string literal, with secrets redacted."""
    return json.dumps(redacted(value), ensure_ascii=False)


def shell(value: str) -> str:
    """Quote a model's name for bash, so that a leading dash is not parsed as an option."""
    return shlex.quote(f"./{value}" if value.startswith("-") else value)


def number(value: Any) -> str:
    """Format a number with thousands separators or four significant digits, and other values with `text`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(value)

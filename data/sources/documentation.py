"""Question-and-answer conversations built from the docstrings of installed packages.

Source files are parsed, never imported. The same package versions give the same conversations in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sysconfig
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..conversations import Conversation, Turn, rarely_collected

STANDARD_LIBRARY = "python"
_SKIPPED_FOLDERS = {
    "test", "tests", "testing", "_test", "__pycache__", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "turtledemo", "ensurepip", "encodings", "vendor", "_vendor", "vendored", "externals", "benchmarks", "_inductor",
    "_dynamo",
}  # fmt: skip
_MIN_FILE_PROSE, _MIN_FILE_SHARE = 300, 0.1
"""Files with fewer characters, or a smaller share, between triple quotes are not parsed."""
_QUESTIONS = {
    "function": ("What does `{name}` do?", "What is `{name}` for?", "Explain `{name}`.", "Tell me about `{name}`."),
    "class": ("What is `{name}`?", "What is the class `{name}` for?", "Explain `{name}`.", "Describe `{name}`."),
    "module": ("What is the module `{name}` for?", "What does `{name}` provide?", "Tell me about the module `{name}`."),
    "parameters": ("What are its parameters?", "Which arguments does it take?", "What can I pass to it?"),
    "example": ("Show an example.", "Can you give me an example?", "How do I use it?"),
    "notes": ("Is there anything else I should know?", "Are there any notes on it?"),
    "returns": ("What does it return?", "What do I get back?"),
}
_MAX_TURNS = 6
_MAX_PROSE, _MIN_PROSE, _MAX_EXAMPLE = 2400, 40, 1400  # characters

_SECTIONS = {
    **dict.fromkeys(("parameters", "args", "arguments", "attributes"), "parameters"),
    **dict.fromkeys(("returns", "yields"), "returns"),
    **dict.fromkeys(("example", "examples"), "example"),
    **dict.fromkeys(("notes", "note"), "notes"),
}
"""Section of a docstring by its title; the text under other titles is left out."""
_UNDERLINE = re.compile(r"[-=~^*#]{3,}\s*$")
_GOOGLE_TITLE = re.compile(r"\s{0,4}([A-Z][A-Za-z]+(?: [A-Za-z]+)?)\s*:{1,2}\s*$")
_MARKUP = (">>>", "...", "|", "+--", "===", "```", "<", "@", "#", "{{", "$", "..", ":")
_ITEM = re.compile(r"(?:[-*+•]|\d+[.)])\s")
_INLINE = (
    (re.compile(r"\[`~?([^`\]]+)`\](?:\([^)]*\))?"), r"`\1`"),  # links of transformers' documentation
    (re.compile(r":(?:[a-zA-Z]+:)?[a-zA-Z]+:`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`"), r"`\1`"),  # roles
    (re.compile(r"``([^`]+)``"), r"`\1`"),
)


@dataclass(slots=True)
class _Package:
    name: str
    root: Path
    files: list[Path]
    conversations: int = 0
    bytes: int = 0


def documentation_conversations(
    packages: Sequence[str],
    *,
    heldout_share: float = 0.02,
    max_megabytes: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Conversation], list[Conversation], dict[str, Any]]:
    """Build training and held-out conversations from the standard library and top-level packages.

    Each documented public module, class or function gives one conversation of one to three exchanges. An object is
    held out by a hash of its name inside its module. Repeated texts are used once. At most `max_megabytes` (10^6 bytes
    of UTF-8) are read, in an order drawn from `seed` and spread evenly over the packages. `progress` is called with the
    numbers of files read and of all files.

    Returns:
        The training conversations, the held-out conversations and a report for JSON.

    Raises:
        ValueError: A package name is dotted.
    """
    found, skipped = _find_packages(packages, seed)
    train: list[Conversation] = []
    heldout: list[Conversation] = []
    seen: set[bytes] = set()
    duplicates = done = 0
    total = sum(len(package.files) for package in found)
    for package, path in _visit(found, None if max_megabytes is None else max_megabytes * 1e6):
        with rarely_collected():
            documented = list(_file_conversations(package, path))
        for key, conversation in documented:
            digest = _digest(" ".join(conversation.turns[1].text.lower().split()))
            if digest in seen:
                duplicates += 1
                continue
            seen.add(digest)
            (heldout if _unit(f"heldout {key}") < heldout_share else train).append(conversation)
            package.bytes += sum(len(turn.text.encode()) for turn in conversation.turns)
            package.conversations += 1
        done += 1
        if progress is not None:
            progress(done, total)
    report = {
        "packages": {p.name: {"conversations": p.conversations, "bytes": p.bytes} for p in found},
        "skipped": skipped,
        "conversations": len(train) + len(heldout),
        "heldout": len(heldout),
        "bytes": sum(package.bytes for package in found),
        "duplicates": duplicates,
        "complete": done == total,
    }
    return train, heldout, report


def _visit(packages: Sequence[_Package], budget: float | None) -> Iterator[tuple[_Package, Path]]:
    """Yield the files of all packages; under a budget in bytes, the next file of the package with the least text."""
    waiting = {package.name: iter(package.files) for package in packages}
    while waiting and (budget is None or sum(package.bytes for package in packages) < budget):
        package = min((p for p in packages if p.name in waiting), key=lambda p: p.bytes if budget is not None else 0)
        path = next(waiting[package.name], None)
        if path is None:
            del waiting[package.name]
        else:
            yield package, path


def _find_packages(names: Sequence[str], seed: int) -> tuple[list[_Package], list[str]]:
    """Return the standard library and the installed packages, and the names that are not installed."""
    roots = {STANDARD_LIBRARY: Path(sysconfig.get_path("stdlib"))}
    skipped: list[str] = []
    for name in dict.fromkeys(names):
        if not name.isidentifier():  # finding a dotted name would import its parent
            raise ValueError(f"{name!r} is not the name of a top-level package")
        spec = importlib.util.find_spec(name) if name != STANDARD_LIBRARY else None
        if spec is not None and spec.submodule_search_locations:
            roots[name] = Path(next(iter(spec.submodule_search_locations)))
        elif name != STANDARD_LIBRARY:
            skipped.append(name)
    return [_Package(name, root, _source_files(root, seed)) for name, root in roots.items()], skipped


def _source_files(root: Path, seed: int) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [sub for sub in folders if sub.isidentifier() and sub not in _SKIPPED_FOLDERS]
        # transformers generates its modeling_*.py from modular_*.py
        files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(("modular_", "test_"))]
    return sorted(files, key=lambda path: _digest(f"{seed} {path.relative_to(root).as_posix()}"))


def _file_conversations(package: _Package, path: Path) -> Iterator[tuple[str, Conversation]]:
    """Yield (name inside the module, conversation) for each documented object of a source file."""
    try:
        source = path.read_text(encoding="utf-8")
        prose = sum(len(text) for text in re.findall(r'"""(.*?)"""', source, re.DOTALL))
        if prose < _MIN_FILE_PROSE or prose < _MIN_FILE_SHARE * len(source):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the source
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return
    # the public path: scipy/linalg/_basic.py documents scipy.linalg
    parts = [part for part in path.relative_to(package.root).with_suffix("").parts if not part.startswith("_")]
    module = ".".join(parts if package.name == STANDARD_LIBRARY else [package.name, *parts])
    is_private = path.stem.startswith("_") and path.stem != "__init__"
    for local, kind, text in _documented(tree):
        name = f"{module}.{local}" if local and module else local or module
        # a private file describes itself, not the package it is named after; "{" marks a template filled in at import
        if not name or "{" in text[:200] or (kind == "module" and is_private):
            continue
        if (answers := _parse_docstring(inspect.cleandoc(text), kind)) is not None:
            yield local or module, _conversation(name, answers)


def _documented(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name, kind, docstring) of the module, its public classes, functions and methods."""
    if text := ast.get_docstring(tree, clean=False):
        yield "", "module", text
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if text := ast.get_docstring(node, clean=False):
            yield node.name, "class" if isinstance(node, ast.ClassDef) else "function", text
        for child in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
                continue
            if text := ast.get_docstring(child, clean=False):
                yield f"{node.name}.{child.name}", "function", text


def _conversation(name: str, answers: Mapping[str, str]) -> Conversation:
    """Return the conversation that asks for each answer with one of the phrasings in `_QUESTIONS`."""
    turns: list[Turn] = []
    for asked, answer in answers.items():
        if answer and len(turns) < _MAX_TURNS:
            phrasings = _QUESTIONS[asked]
            question = phrasings[int(_unit(f"phrase {name} {phrasings[0]}") * len(phrasings))]
            turns += [Turn("user", question.format(name=name)), Turn("assistant", answer)]
    return Conversation(name, tuple(turns))


def _parse_docstring(text: str, kind: str) -> dict[str, str] | None:
    """Return description (under `kind`), parameters, example, notes and return value of a clean docstring.

    The docstring may be in numpydoc style, Google style or plain prose. None where it holds too little prose.
    """
    sections = _split_sections(text.expandtabs().split("\n"))
    description, notes = _prose(sections["description"]), _prose(sections["notes"])
    if not _is_prose(description):
        return None
    example = _dedent(sections["example"])
    start = next((number for number, line in enumerate(example) if line.startswith(">>>")), len(example))
    return {
        kind: description,
        "parameters": _plain(_whole_lines(_dedent(sections["parameters"]), _MAX_PROSE)),
        "example": _whole_lines(example[start:], _MAX_EXAMPLE),
        "notes": notes if _is_prose(notes) else "",
        "returns": _plain(_whole_lines(_dedent(sections["returns"]), _MAX_PROSE // 2)),
    }


def _split_sections(lines: list[str]) -> dict[str, list[str]]:
    """Return the lines of the description and of each known section."""
    sections = defaultdict[str, list[str]](list)
    is_numpy = any(map(_UNDERLINE.match, lines))
    kind = "description"
    for number, line in enumerate(lines):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        google = None if is_numpy else _GOOGLE_TITLE.match(line)
        if line.strip() and not line.startswith(" ") and _UNDERLINE.match(following):
            kind = _SECTIONS.get(line.strip().lower(), "left out")
        elif google and (google[1].lower() in _SECTIONS or following.startswith(" ")):
            kind = _SECTIONS.get(google[1].lower(), "left out")
        elif not _UNDERLINE.match(line):
            sections[kind].append(line)
    return sections


def _prose(lines: list[str]) -> str:
    """Join the lines of each paragraph and of each list item; leave out directives, tables and doctests."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(_dedent(lines)).strip("\n")):
        if block.startswith((*_MARKUP, "    ")) or "https://" in block:
            continue
        joined: list[str] = []
        for line in map(str.strip, block.split("\n")):
            if joined and not _ITEM.match(line):
                joined[-1] += " " + line
            else:
                joined.append(line)
        if sum(map(len, paragraphs)) + len("\n".join(joined)) > _MAX_PROSE:
            break
        paragraphs.append(_plain("\n".join(joined)))
    while paragraphs and paragraphs[-1].endswith(":"):  # it introduced something that was left out
        paragraphs.pop()
    return "\n\n".join(paragraphs)


def _whole_lines(lines: list[str], limit: int) -> str:
    """Join as many lines as fit into `limit` characters; "" for a text that is too short."""
    sizes = accumulate(len(line) + 1 for line in lines)
    text = "\n".join(line.rstrip() for line, size in zip(lines, sizes, strict=True) if size <= limit).strip()
    return text if len(text) >= _MIN_PROSE else ""


def _plain(text: str) -> str:
    """Remove roles, links and doubled backquotes."""
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text


def _dedent(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def _is_prose(text: str) -> bool:
    """Return whether a text is long enough and mostly letters and spaces."""
    others = len(re.sub(r"[^\W\d_]+|[ \n]+", "", text))
    return len(text) >= _MIN_PROSE and others < 0.22 * len(text) and len(text.split()) >= 6


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _unit(text: str) -> float:
    """Return a number in [0, 1) that depends on the text only."""
    return int.from_bytes(_digest(text), "big") / 2**64

"""The embedded corpus: questions and answers made from the docstrings of installed packages, which are read, never
imported. The same versions give the same conversations in the same order."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..conversations import Conversation, Turn, rarely_collected
from .docstrings import parse_docstring

STANDARD_LIBRARY = "python"
_SKIPPED_FOLDERS = {
    "test", "tests", "testing", "_test", "__pycache__", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "turtledemo", "ensurepip", "encodings", "vendor", "_vendor", "vendored", "externals", "benchmarks", "_inductor",
    "_dynamo",
}  # fmt: skip
_MIN_FILE_PROSE = 300  # characters between triple quotes below which a file is not worth parsing
_MIN_FILE_SHARE = 0.1  # of the file: model code that documents little costs most of the parsing

_TRIPLE_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)
_SIGNATURE = re.compile(r"^\s*\w+\(.*\)\s*->.*$", re.MULTILINE)
_QUESTIONS = {
    "function": ("What does `{name}` do?", "What is `{name}` for?", "Explain `{name}`.", "Tell me about `{name}`."),
    "class": ("What is `{name}`?", "What is the class `{name}` for?", "Explain `{name}`.", "Describe `{name}`."),
    "module": ("What is the module `{name}` for?", "What does `{name}` provide?", "Tell me about the module `{name}`."),
    "parameters": ("What are its parameters?", "Which arguments does it take?", "What can I pass to it?"),
    "example": ("Show an example.", "Can you give me an example?", "How do I use it?"),
    "notes": ("Is there anything else I should know?", "Are there any notes on it?"),
    "returns": ("What does it return?", "What do I get back?"),
}
_MOST_TURNS = 6


@dataclass(slots=True)
class _Package:
    name: str
    files: list[Path]
    root: Path
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
    """Make (train, held-out, report) from the standard library and the given top-level packages.

    Each documented public module, class or function gives one conversation of one to three exchanges. A name is held
    out by a stable hash of what it is called inside its module, and a text is used once. `max_megabytes` (10^6 bytes of
    UTF-8 text, both sides together) stops at a subset chosen by `seed`, spread evenly over the packages.
    `progress(done, total)` counts source files.

    Raises ValueError: a dotted package name.
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
            is_heldout = _unit(f"heldout {key}") < heldout_share
            (heldout if is_heldout else train).append(conversation)
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
    """Every file of every package; under a budget in bytes, always of the package that has given least so far."""
    waiting = {package.name: iter(package.files) for package in packages}
    while waiting and (budget is None or sum(package.bytes for package in packages) < budget):
        package = min((p for p in packages if p.name in waiting), key=lambda p: p.bytes if budget is not None else 0)
        path = next(waiting[package.name], None)
        if path is None:
            del waiting[package.name]
        else:
            yield package, path


def _find_packages(names: Sequence[str], seed: int) -> tuple[list[_Package], list[str]]:
    """The standard library first, then the named packages in the given order; and the names that are not there."""
    found = [_package(STANDARD_LIBRARY, Path(sysconfig.get_path("stdlib")), seed)]
    skipped: list[str] = []
    for name in dict.fromkeys(names):
        if name == STANDARD_LIBRARY:
            continue
        if not name.isidentifier():  # finding a dotted name would import its parent
            raise ValueError(f"{name!r} is no top-level package name")
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            skipped.append(name)
            continue
        found.append(_package(name, Path(next(iter(spec.submodule_search_locations))), seed))
    return found, skipped


def _package(name: str, root: Path, seed: int) -> _Package:
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [sub for sub in folders if sub.isidentifier() and sub not in _SKIPPED_FOLDERS]
        # transformers' modular_*.py are the sources that its modeling_*.py are generated from
        files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(("modular_", "test_"))]
    files.sort(key=lambda path: _digest(f"{seed} {path.relative_to(root).as_posix()}"))
    return _Package(name, files, root)


def _file_conversations(package: _Package, path: Path) -> Iterator[tuple[str, Conversation]]:
    """(name inside the module, conversation) of what one source file documents."""
    try:
        source = path.read_text(encoding="utf-8")
        prose = sum(len(text) for text in _TRIPLE_QUOTED.findall(source))
        if prose < _MIN_FILE_PROSE or prose < _MIN_FILE_SHARE * len(source):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escape sequences
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):
        return
    module = _module_name(package, path)
    is_private = path.stem.startswith("_") and path.stem != "__init__"
    for local, kind, text in _documented(tree):
        if kind == "module" and is_private:  # it is named after its package, but speaks of itself
            continue
        name = f"{module}.{local}" if local and module else local or module
        if not name or "{" in text[:200]:  # a template to be filled in at import
            continue
        parsed = parse_docstring(inspect.cleandoc(text))
        if parsed is not None:
            yield local or module, _conversation(name, {kind: parsed[0]} | parsed[1])


def _module_name(package: _Package, path: Path) -> str:
    """The public path of a file: `scipy/linalg/_basic.py` documents `scipy.linalg`."""
    parts = list(path.relative_to(package.root).with_suffix("").parts)
    if parts[-1] in ("__init__", "__main__"):
        parts.pop()
    parts = [part for part in parts if not part.startswith("_")]
    return ".".join(parts if package.name == STANDARD_LIBRARY else [package.name, *parts])


def _documented(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(name inside the module, kind, docstring) of the module, its public classes, functions and methods."""
    if text := ast.get_docstring(tree, clean=False):
        yield "", "module", text
    for node in tree.body:
        if isinstance(node, ast.Expr) and (added := _added_docstring(node.value)):
            yield added[0], "function", added[1]
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        is_class = isinstance(node, ast.ClassDef)
        if text := ast.get_docstring(node, clean=False):
            yield node.name, "class" if is_class else "function", text
        for child in node.body if is_class else ():
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
                continue
            if text := ast.get_docstring(child, clean=False):
                yield f"{node.name}.{child.name}", "function", text


def _added_docstring(call: ast.expr) -> tuple[str, str] | None:
    """Name and text of `add_docstr(torch.abs, "…")` and `add_newdoc("numpy", "abs", "…")`: documentation of C code."""
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return None
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    texts = [text for argument in call.args for text in _strings(argument)]
    if called == "add_newdoc" and len(texts) == 3:
        return texts[1], texts[2]
    if called in ("add_docstr", "_add_docstr") and len(texts) == 1 and isinstance(call.args[0], ast.Attribute):
        return call.args[0].attr, _SIGNATURE.sub("", texts[0], count=1)
    return None


def _strings(argument: ast.expr) -> list[str]:
    """The string an argument is: itself, the template under `.format(…)` or `%`, or the last of a (name, text) pair."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return [argument.value]
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr == "format":
        # a line that is one placeholder stands for a shared parameter; what braces remain are literal
        return [
            re.sub(r"^\s*\{\w+\}\s*$", "", text, flags=re.MULTILINE).replace("{{", "{").replace("}}", "}")
            for text in _strings(argument.func.value)
        ]
    if isinstance(argument, ast.BinOp):
        return _strings(argument.left)
    return _strings(argument.elts[1]) if isinstance(argument, ast.Tuple) and len(argument.elts) == 2 else []


def _conversation(name: str, answers: Mapping[str, str]) -> Conversation:
    """Of answers by what is asked (see `_QUESTIONS`)."""
    turns: list[Turn] = []
    for asked, answer in answers.items():
        if answer and len(turns) < _MOST_TURNS:
            phrasings = _QUESTIONS[asked]
            question = phrasings[int(_unit(f"phrase {name} {phrasings[0]}") * len(phrasings))]
            turns += [Turn("user", question.format(name=name)), Turn("assistant", answer)]
    return Conversation(name, tuple(turns))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, on every machine and in every process."""
    return int.from_bytes(_digest(text), "big") / 2**64

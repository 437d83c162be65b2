"""Question-and-answer conversations built from the docstrings of installed packages.

Source files are parsed, never imported. The same package versions give the same conversations in the same order.
"""

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
from pathlib import Path
from typing import Any

from ..conversations import Conversation, Turn, collect_rarely

STANDARD_LIBRARY = "python"
_SKIPPED_FOLDERS = {
    "test", "tests", "testing", "_test", "__pycache__", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "turtledemo", "ensurepip", "encodings", "vendor", "_vendor", "vendored", "externals", "benchmarks", "_inductor",
    "_dynamo",
}  # fmt: skip
_MIN_FILE_PROSE, _MIN_FILE_SHARE = 300, 0.1
"""Minimum number of docstring characters in a source file, and minimum share of the file. Other files are skipped."""
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

_SECTIONS: dict[str, str | None] = {
    **dict.fromkeys(
        ("parameters", "args", "arguments", "params", "keyword arguments", "other parameters", "attributes"),
        "parameters",
    ),
    **dict.fromkeys(("returns", "return", "yields"), "returns"),
    **dict.fromkeys(("example", "examples", "usage"), "example"),
    **dict.fromkeys(("notes", "note", "tips"), "notes"),
    **dict.fromkeys((
        "raises", "warns", "warnings", "see also", "references", "methods", "warning", "shape", "citation",
        "copyright", "license", "todo", "versionadded", "authors", "author", "references:", "input", "inputs",
        "output", "outputs", "receives", "signature", "dimensions",
    )),
}  # fmt: skip
"""Kind of docstring section for each section title; None for sections that are dropped."""
_UNDERLINE = re.compile(r"[-=~^*#]{3,}\s*$")
_GOOGLE_TITLE = re.compile(r"\s{0,4}([A-Z][A-Za-z]+(?: [A-Za-z]+)?)\s*:{1,2}\s*$")
_NUMPY_PARAMETER = re.compile(r"([*\w][\w*, .]*?)\s*(?::\s*(.*))?$")
_GOOGLE_PARAMETER = re.compile(r"([*`]{0,3}\w[\w*, `]*?)\s*(?:\((.*?)\))?\s*:\s*(.*)$")
_DIRECTIVE = re.compile(r"(\s*)\.\.(?:\s|$)")
_FIELD = re.compile(r"\s*:(?:param|type|returns?|rtype|raises?|arg|keyword|ivar|cvar)\b[^:]*:")
_MARKUP = (">>>", "...", "|", "+--", "===", "```", "<", "@", "#", "{{", "$")
_ITEM = re.compile(r"(?:[-*+•]|\d+[.)])\s")
_STUMP = re.compile(r"(?:[-*+•]|\d+[.)])\s+(?:\S+\s+){0,4}\S*[^.!?)`'\"]")  # rest of an item without its formula
_INLINE = (
    (re.compile(r"\[`~?([^`\]]+)`\](?:\([^)]*\))?"), r"`\1`"),  # links of transformers' documentation
    (re.compile(r":(?:[a-zA-Z]+:)?[a-zA-Z]+:`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`"), r"`\1`"),  # roles
    (re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}|\[([^\]]+)\]\((?:https?://|[./#])[^)]*\)"), r"\1\2"),
    (re.compile(r" ?\[[\w.]+\]_"), ""),  # citations
    (re.compile(r"(?<=\S) {2,}"), " "),
    (re.compile(r"``([^`]+)``"), r"`\1`"),
    (re.compile(r"\\([*_])"), r"\1"),
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Conversation], list[Conversation], dict[str, Any]]:
    """Build training and held-out conversations from the docstrings of the standard library and of packages.

    Each documented public module, class or function yields one conversation of one to three exchanges. Duplicate texts
    are removed. A hash of an object's name decides whether it is held out. At most about `max_megabytes` (10^6 bytes)
    of text are used, spread evenly over the packages, in a random order given by `seed`. `progress` receives the number
    of parsed files and the total number.

    Returns:
        The training conversations, the held-out conversations and a JSON-serialisable report.

    Raises ValueError if a name is not the name of a top-level package.
    """
    paths, skipped = _find_packages(packages, seed)
    train: list[Conversation] = []
    heldout: list[Conversation] = []
    hashes: set[bytes] = set()
    duplicates = done = 0
    total = sum(len(package.files) for package in paths)
    budget = None if max_megabytes is None else max_megabytes * 1e6
    for done, (package, path) in enumerate(_visit(paths, budget), start=1):
        with collect_rarely():
            documented = list(_file_conversations(package, path))
        for key, conversation in documented:
            digest = _digest(" ".join(conversation.turns[1].text.lower().split()))
            if digest in hashes:
                duplicates += 1
                continue
            hashes.add(digest)
            (heldout if _unit(f"heldout {key}") < heldout_share else train).append(conversation)
            package.bytes += sum(len(turn.text.encode()) for turn in conversation.turns)
            package.conversations += 1
        progress(done, total)
    report = {
        "packages": {p.name: {"conversations": p.conversations, "bytes": p.bytes} for p in paths},
        "skipped": skipped,
        "conversations": len(train) + len(heldout),
        "heldout": len(heldout),
        "bytes": sum(package.bytes for package in paths),
        "duplicates": duplicates,
        "complete": done == total,
    }
    return train, heldout, report


def _visit(packages: Sequence[_Package], budget: float | None) -> Iterator[tuple[_Package, Path]]:
    """Yield the files of all packages. With a budget (bytes), continue with the package that has the least text."""
    waiting = {package.name: iter(package.files) for package in packages}
    while waiting and (budget is None or sum(package.bytes for package in packages) < budget):
        package = min((p for p in packages if p.name in waiting), key=lambda p: p.bytes if budget is not None else 0)
        path = next(waiting[package.name], None)
        if path is None:
            del waiting[package.name]
        else:
            yield package, path


def _find_packages(names: Sequence[str], seed: int) -> tuple[list[_Package], list[str]]:
    """Locate the standard library and packages. Also return the names of packages that are not installed."""
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
    """Yield (name within the module, conversation) for each documented object in a source file."""
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
    # Omit private modules from the path: scipy/linalg/_basic.py documents scipy.linalg.
    parts = [part for part in path.relative_to(package.root).with_suffix("").parts if not part.startswith("_")]
    module = ".".join(parts if package.name == STANDARD_LIBRARY else [package.name, *parts])
    is_private = path.stem.startswith("_") and path.stem != "__init__"
    for local, kind, text in _iterate_docstrings(tree):
        name = f"{module}.{local}" if local and module else local or module
        # Skip module docstrings of private files, and templates with placeholders ("{") that are filled at import.
        if not name or "{" in text[:200] or (kind == "module" and is_private):
            continue
        if (answers := _parse_docstring(inspect.cleandoc(text), kind)) is not None:
            yield local or module, _conversation(name, answers)


def _iterate_docstrings(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name, kind, docstring) of the module, its public classes, functions and methods."""
    if text := ast.get_docstring(tree, clean=False):
        yield "", "module", text
    for node in tree.body:
        if isinstance(node, ast.Expr) and (added := _added_docstring(node.value)):
            yield added[0], "function", added[1]
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if text := ast.get_docstring(node, clean=False):
            yield node.name, "class" if isinstance(node, ast.ClassDef) else "function", text
        for child in node.body if isinstance(node, ast.ClassDef) else ():
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or child.name.startswith("_"):
                continue
            if text := ast.get_docstring(child, clean=False):
                yield f"{node.name}.{child.name}", "function", text


def _added_docstring(call: ast.expr) -> tuple[str, str] | None:
    """Return the name and docstring in a call of `add_docstr(torch.abs, "…")` or `add_newdoc("numpy", "abs", "…")`."""
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return None
    function_name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    texts = [text for argument in call.args for text in _strings(argument)]
    if function_name == "add_newdoc" and len(texts) == 3:
        return texts[1], texts[2]
    if function_name in ("add_docstr", "_add_docstr") and len(texts) == 1 and isinstance(call.args[0], ast.Attribute):
        return call.args[0].attr, re.sub(r"^\s*\w+\(.*\)\s*->.*$", "", texts[0], count=1, flags=re.MULTILINE)
    return None


def _strings(argument: ast.expr) -> list[str]:
    """Return the string literals in an argument: a constant, the template of `.format(…)` or `%`, or a pair's end."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return [argument.value]
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr == "format":
        # Remove lines that are only a placeholder (a shared parameter); other braces are literal.
        return [
            re.sub(r"^\s*\{\w+\}\s*$", "", text, flags=re.MULTILINE).replace("{{", "{").replace("}}", "}")
            for text in _strings(argument.func.value)
        ]
    if isinstance(argument, ast.BinOp):
        return _strings(argument.left)
    return _strings(argument.elts[1]) if isinstance(argument, ast.Tuple) and len(argument.elts) == 2 else []


def _conversation(name: str, answers: Mapping[str, str]) -> Conversation:
    """Build a conversation in which each answer follows a question chosen from `_QUESTIONS`."""
    turns: list[Turn] = []
    for kind, answer in answers.items():
        if answer and len(turns) < _MAX_TURNS:
            phrasings = _QUESTIONS[kind]
            question = phrasings[int(_unit(f"phrase {name} {phrasings[0]}") * len(phrasings))]
            turns += [Turn("user", question.format(name=name)), Turn("assistant", answer)]
    return Conversation(name, tuple(turns))


def _parse_docstring(text: str, kind: str) -> dict[str, str] | None:
    """Parse a docstring (numpydoc style, Google style or plain prose) into the texts of its sections.

    The key of the description is the value of `kind`. The result is None if the docstring contains too little prose.
    """
    lines = text.split("\n")
    is_numpy = any(map(_UNDERLINE.match, lines))
    sections = _split_sections(text.expandtabs().split("\n"), is_numpy)
    description = _prose(sections["description"])
    merged_parameter = re.match(r"`?\w+`? \(.{1,200}?\): ", description)  # from a decorator that extends the docstring
    if not _is_prose(description) or merged_parameter:
        return None
    notes, returns = _prose(_dedent(sections["notes"])), _dedent(sections["returns"])
    return {
        kind: description,
        "parameters": _parameters(_dedent(sections["parameters"])),
        "example": _example(_dedent(sections["example"])),
        "notes": notes if _is_prose(notes) else "",
        "returns": _parameters(returns) if is_numpy else _prose(returns, _MAX_PROSE // 2),
    }


def _split_sections(lines: list[str], is_numpy: bool) -> dict[str, list[str]]:
    """Split the lines of a docstring into the description and the known sections."""
    sections = defaultdict[str, list[str]](list)
    kind: str | None = "description"
    numbered = enumerate(lines)
    for number, line in numbered:
        following = "".join(lines[number + 1 : number + 2])
        underlined = line.strip() and not line.startswith(" ") and _UNDERLINE.match(following)
        google = _GOOGLE_TITLE.match(line)
        title = line.strip().lower().rstrip(":") if underlined else google[1].lower() if google else ""
        if underlined or title in _SECTIONS:
            kind = _SECTIONS.get(title, "description")
            if underlined:
                next(numbered)
            continue
        after_blank = line[:1].strip() and number and not lines[number - 1].strip()
        if kind not in (None, "description") and after_blank and not is_numpy and not line.startswith(">>>"):
            kind = "description" if sections.keys() <= {"description"} else None  # prose ends an indented section
        if kind is not None:
            sections[kind].append(line)
    return sections


def _prose(lines: list[str], limit: int = _MAX_PROSE) -> str:
    """Join the lines of each paragraph, and remove directives, tables, doctests and field lists."""
    paragraphs: list[str] = []
    for text in filter(None, map(_paragraph, _blocks(lines))):
        if sum(map(len, paragraphs)) + len(text) > limit:
            if not paragraphs:  # truncate after a sentence, otherwise between words
                cut = text[:limit]
                end = max(cut.rfind(". "), cut.rfind(".\n"))
                paragraphs.append(cut[: end + 1] if end > limit // 3 else cut.rsplit(" ", 1)[0])
            break
        paragraphs.append(text)
    while paragraphs and paragraphs[-1].endswith(":"):  # it introduced content that was dropped
        paragraphs.pop()
    return "\n\n".join(paragraphs)


def _blocks(lines: list[str]) -> list[list[str]]:
    """Split lines into blocks at blank lines, and remove directives (`..`) with their indented content."""
    blocks: list[list[str]] = [[]]
    directive_indent: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if directive_indent is not None and (not line.strip() or indent > directive_indent):
            continue
        match = _DIRECTIVE.match(line)
        directive_indent = len(match.group(1)) if match else None
        if match or not line.strip() or _UNDERLINE.match(line):
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]


def _paragraph(block: list[str]) -> str:
    """Join the lines of a block into a paragraph or a list with one item per line. Return "" if the block is markup."""
    first, is_list = block[0].lstrip(), bool(_ITEM.match(block[0].lstrip()))
    is_markup = first.startswith(_MARKUP) or _FIELD.match(first) or ("%(" in first and ")s" in first)
    is_literal = not is_list and block[0].startswith("    ")
    if is_markup or is_literal or (len(block) == 1 and "https://" in first):
        return ""
    lines: list[str] = []
    for stripped in map(str.strip, block):
        if lines and not (is_list and _ITEM.match(stripped)):
            lines[-1] += " " + stripped
        else:
            lines.append(stripped)
    text = _plain("\n".join(lines))
    return "" if _STUMP.fullmatch(text) else re.sub(r"::$", ":", text)


def _parameters(lines: list[str]) -> str:
    """Format each parameter as a line "- `name` (type): description"."""
    entries: list[tuple[str, str, list[str]]] = []
    for line in lines:
        if line[:1].strip():
            google, numpy = _GOOGLE_PARAMETER.match(line), _NUMPY_PARAMETER.match(line)
            if google and (google.group(2) is not None or not numpy or len(google.group(3)) > 40):
                entries.append((google.group(1), google.group(2) or "", [google.group(3)]))
            elif numpy:
                entries.append((numpy.group(1), numpy.group(2) or "", []))
        elif entries:
            entries[-1][2].append(line)
    rendered: list[str] = []
    for name, kind, body in entries:
        description = _prose(_dedent(body), 600).replace("\n\n", " ").replace("\n", " ")
        kind = _plain(kind).replace("`", "").strip(" ,")
        if description:
            rendered.append(f"- `{name.strip('`* ')}`" + (f" ({kind})" if kind else "") + f": {description}")
        if sum(map(len, rendered)) > _MAX_PROSE:
            rendered.pop()
            break
    return "\n".join(rendered)


def _example(lines: list[str]) -> str:
    """Return the first doctest of a section, truncated after a complete step."""
    example: list[str] = []
    size = 0
    for line in lines:
        stripped = line.strip()
        if (not example and not stripped.startswith(">>>")) or "xdoctest:" in stripped:
            continue
        is_prose = stripped and not stripped.startswith((">>>", "...")) and not example[-1].strip()
        if (not stripped and size > _MAX_EXAMPLE // 2) or (is_prose and size + len(line) <= _MAX_EXAMPLE):
            break
        if size + len(line) > _MAX_EXAMPLE:
            while example and not example[-1].lstrip().startswith(">>>"):
                example.pop()
            example = example[:-1]
            break
        example.append(line.rstrip().replace("# doctest: +SKIP", "").rstrip())
        size += len(line)
    text = "\n".join(_dedent(example)).strip()
    return text if len(text) >= _MIN_PROSE else ""


def _plain(text: str) -> str:
    """Remove Sphinx roles, links, citations and double backquotes."""
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    return text


def _dedent(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def _is_prose(text: str) -> bool:
    """Check if a text is long enough and consists mostly of letters and spaces."""
    others = len(re.sub(r"[^\W\d_]+|[ \n]+", "", text))
    return len(text) >= _MIN_PROSE and others < 0.22 * len(text) and len(text.split()) >= 6


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _unit(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return int.from_bytes(_digest(text), "big") / 2**64

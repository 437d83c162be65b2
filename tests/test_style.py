"""Language of the library: first words of docstrings, names and the texts of the command line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from draftsmith.recipes.commands.cli import app
from helpers.syntax import parse_file
from typer.main import get_command

ROOT = Path(__file__).parents[1]
ROOMS = ("checkpoints", "data", "decode", "train", "recipes")
FIRST_WORDS = {"What", "Whether", "Of", "How", "That", "Where", "So", "By", "The", "A", "An"}
"""First words that docstrings of functions must not have, since they start with an imperative verb."""
NAMES = {
    *("said", "told", "found", "kept", "made", "held", "opened", "filled", "seen", "meant", "taken", "gone", "asked"),
    *("shown", "wanted", "given", "beside", "together", "aside", "here", "there", "stands", "theirs", "mine", "side"),
    *("words", "hopes", "soup", "place", "why", "where", "how"),
}
"""Participles, pronouns and prepositions that must not be names of functions, arguments or variables."""
UNFINISHED = {f"decode/models/{name}.py" for name in ("lean", "loading", "products/layers", "products/native")}
"""Files whose names are not checked yet."""
PHRASES = re.compile(
    r"tokens a step|texts? at a time|plain decoding|a killed run|goes on|\bbeside\b|nobody|own words|inner states"
    r"|read back|look-up|folder of everything|of it all|own answers|\bgo on\b|documents do not see|\bthin forward",
    re.IGNORECASE,
)
"""Phrases that must be replaced by standard terms."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(room: str) -> Iterator[tuple[Path, Function | ast.ClassDef]]:
    """Yield the functions and classes of a top-level package, with their files."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, Function | ast.ClassDef):
                yield path, node


def is_property(node: Function | ast.ClassDef) -> bool:
    names = {getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property"})


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_public_functions_start_with_a_verb(room: str) -> None:
    odd = []
    for path, node in definitions(room):
        text = ast.get_docstring(node)
        if isinstance(node, Function) and text and not node.name.startswith("_") and not is_property(node):
            first = text.split()[0].strip("`,.:;'\"")
            odd += [f"{path.relative_to(ROOT)}: {node.name}: {text[:60]}"] if first in FIRST_WORDS else []
    assert not odd, "\n".join(odd)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function, class, argument and variable, except annotated class fields."""
    fields = {id(each.target) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
              for each in node.body if isinstance(each, ast.AnnAssign)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id


@pytest.mark.parametrize("room", ROOMS)
def test_functions_and_variables_have_telling_names(room: str) -> None:
    odd = []
    for path in sorted(set((ROOT / room).rglob("*.py")) - {ROOT / file for file in UNFINISHED}):
        for line, name in names(parse_file(path)):
            odd += [f"{path.relative_to(ROOT)}:{line}: {name}"] if name in NAMES else []
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize("room", ROOMS)
def test_texts_use_standard_terms(room: str) -> None:
    odd = []
    for path in sorted(path for kind in ("py", "j2", "html", "yaml") for path in (ROOT / room).rglob(f"*.{kind}")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            odd += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}"] if PHRASES.search(line) else []
    assert not odd, "\n".join(odd)


def test_the_command_line_uses_standard_terms() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        texts = [command.help or "", *(getattr(each, "help", None) or "" for each in command.params)]
        for text in texts:
            assert not PHRASES.search(text), f"{name}: {text}"
        assert re.match(r"[A-Z][a-z]+ ", command.help or ""), name
        if hasattr(command, "commands"):
            continue
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_documents_use_standard_terms() -> None:
    pages = (ROOT / "README.md", *(ROOT / room / "README.md" for room in ROOMS), *(ROOT / "docs").rglob("*.md"))
    for page, text in ((page, page.read_text(encoding="utf-8")) for page in pages):
        for number, line in enumerate(text.splitlines(), 1):
            assert not PHRASES.search(line), f"{page}:{number}: {line}"

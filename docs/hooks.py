"""Hook of MkDocs that replaces `<!-- generated: NAME ARGUMENT -->` by reference text made from the code."""

from __future__ import annotations

import inspect
import re
import runpy
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import griffe
import yaml
from draftsmith.decode.methods import METHODS, method_config, method_variants
from draftsmith.recipes.commands.cli import app
from draftsmith.recipes.schema.data import Section
from draftsmith.recipes.schema.loading import RECIPES
from draftsmith.train import config
from mkdocs.exceptions import PluginError
from pydantic_core import PydanticUndefined
from typer.main import get_command

SETTINGS = griffe.visit(config.__name__, filepath=Path(inspect.getfile(config)), code=inspect.getsource(config))
ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(r"<!-- generated: (\w+)(?: ([\w-]+))? -->")


def on_startup(**_: Any) -> None:
    """Link the package's folders, since mkdocstrings would walk the whole repository, which is the package folder."""
    links = ROOT / "build/api/draftsmith"
    links.mkdir(parents=True, exist_ok=True)
    for source in (ROOT / "__init__.py", *(init.parent for init in ROOT.glob("[!.]*/__init__.py"))):
        (links / source.name).unlink(missing_ok=True)
        (links / source.name).symlink_to(source)


def on_pre_build(config: Any) -> None:
    """Raise an error if a figure differs from its data."""
    figures = runpy.run_path(str(Path(config.docs_dir) / "figures.py"))["FIGURES"]
    if old := [path.name for path, draw in figures.items() if path.read_text(encoding="utf-8") != draw()]:
        raise PluginError(f"{', '.join(old)}: outdated; run `python docs/figures.py`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page."""
    return GENERATED.sub(lambda found: GENERATORS[found[1]](*filter(None, found.groups()[1:])), markdown)


def cell(text: str) -> str:
    """Return text as the content of a table cell."""
    parts = re.sub(r"\s+", " ", text).replace("|", "\\|").strip().split("`")  # odd parts are code
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, or nothing without rows."""
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n" * bool(rows)


def command_line() -> str:
    """Return a section for each command of the command line."""
    group: Any = get_command(app)
    return "".join(describe_command("draftsmith", command) for command in group.commands.values())


def describe_command(program: str, command: Any) -> str:
    """Return the help, the usage, the arguments and the options of a command and of its subcommands."""
    name = f"{program} {command.name}"
    if hasattr(command, "commands"):
        return "".join(describe_command(name, each) for each in command.commands.values())
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    records = [record for each in command.params if (record := each.get_help_record(context))]
    rows = [[f"`{shown}`", cell(text)] for shown, text in records]
    text = inspect.cleandoc(command.help or "").replace(f"`{command.name} ", f"`{name} ")
    return f"## {name}\n\n{text}\n\n```text\n{usage}\n```\n\n" + table(["argument or option", "description"], rows)


def recipes() -> str:
    """Return a section for each kind of recipe, then one for each section of their keys."""
    sections: dict[str, type[Section]] = {}
    text = ""
    for kind, recipe in RECIPES.items():
        text += f"## kind: {kind} {{ #{recipe.__name__.lower()} }}\n\n{describe_section(recipe, sections)}"
    text += "## Sections\n\n"
    written: set[str] = {recipe.__name__ for recipe in RECIPES.values()}
    while missing := [name for name in sections if name not in written]:
        for name in missing:
            written.add(name)
            title = re.sub(r"Section$|^_", "", name)
            text += f"### {title} {{ #{name.lower()} }}\n\n{describe_section(sections[name], sections)}"
    return text


def describe_section(section: type[Section], sections: dict[str, type[Section]]) -> str:
    """Return the table of a section's keys, and add the sections that they hold to `sections`."""
    about = inspect.cleandoc(section.__doc__ or "") if section.__doc__ != Section.__doc__ else ""
    rows = []
    for name, field in section.model_fields.items():
        nested = list(nested_sections(field.annotation))
        sections.update({each.__name__: each for each in nested})
        default = "required" if field.default is PydanticUndefined and not field.default_factory else default_of(field)
        kind = " or ".join(f"[section](#{each.__name__.lower()})" for each in nested) or f"{type_of(field.annotation)}"
        if limits := [f"{SIGNS[sign]} {value:g}" for sign, value in limits_of(field)]:
            kind += " " + ", ".join(limits)
        text = field.description or dataclass_doc(section, name)
        if not text:
            text = inspect.cleandoc(nested[0].__doc__ or "").split("\n\n")[0] if nested else "Kind of the recipe."
        rows.append([f"`{name}`", cell(kind), cell(default), cell(text)])
    return about + "\n\n" + table(["key", "type", "default", "description"], rows)


SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def limits_of(field: Any) -> Iterator[tuple[str, float]]:
    """Yield the limits of a number, as pydantic keeps them."""
    for rule in field.metadata:
        yield from ((sign, getattr(rule, sign)) for sign in SIGNS if hasattr(rule, sign))


def default_of(field: Any) -> str:
    """Return the default of a field as it is written in YAML."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "defaults of the section"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    return f"`{text}`"


def nested_sections(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections in an annotation."""
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from nested_sections(part)


def type_of(annotation: Any) -> str:
    """Return the name of a type as users of YAML know it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        return type_of(parts[0])
    if origin in (list, tuple):
        return f"list of {type_of(parts[0])}"
    if origin is dict:
        return f"mapping of {type_of(parts[1])}"
    if parts:
        return " or ".join(dict.fromkeys(type_of(part) for part in parts if part is not type(None)))
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def dataclass_doc(section: type[Section], name: str) -> str:
    """Return the documentation of a key that a section took over from a dataclass of `train.config`."""
    for base in section.__mro__:
        members = SETTINGS.members.get(base.__name__.lstrip("_"))
        member = members.members.get(name) if members is not None else None
        if member is not None and member.docstring:
            return str(member.docstring.value)
    return ""


def methods_table() -> str:
    """Return the table of all methods."""
    rows = []
    for name, method in METHODS.items():
        lossless = ["yes" if method.lossless else "no"]
        for options in (options for variant, options in method_variants() if variant == name and method.lossless):
            if not method_config(name, options).is_lossless:
                lossless += [f"no with `{key}: {choice}`" for key, choice in options.items()]
        summary = (method.__doc__ or "").partition("\n")[0].removesuffix(".")
        rows.append([f"`{name}`", summary, ", ".join(lossless)])
    return table(["method", "drafts", "lossless"], rows)


def options_table(name: str) -> str:
    """Return the table of the options in which a method differs from the one that it extends."""
    method, rows = METHODS[name], list[list[str]]()
    bases = [each for each in METHODS.values() if each is method.__mro__[1]]
    known = {each.name: each.default for base in bases for each in fields(base)} or {"drafter": 1}
    hints = typing.get_type_hints(method, include_extras=True)
    for each in fields(method):
        if each.name not in known or known[each.name] != each.default:
            hint, doc = typing.get_args(hints[each.name])
            choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            values = ", ".join(f"**{choice}**" if choice == each.default else choice for choice in choices)
            rows.append([f"`{each.name}`", values or str(each.default).lower(), cell(doc)])
    return table(["option", "default", "description"], rows)


GENERATORS: dict[str, Callable[..., str]] = {
    "cli": command_line,
    "recipes": recipes,
    "methods": methods_table,
    "options": options_table,
}

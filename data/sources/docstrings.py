"""One docstring (numpydoc, Google style or plain prose) to sentences without markup."""

from __future__ import annotations

import re
from collections import defaultdict

MAX_DESCRIPTION = 2400  # characters; a paragraph is never cut in the middle unless it alone is longer
MAX_PARAMETERS = 2400
MAX_EXAMPLE = 1400
MIN_DESCRIPTION = 40

_PARAMETERS = ("parameters", "args", "arguments", "params", "keyword arguments", "other parameters", "attributes")
_SKIPPED = (
    "raises", "warns", "warnings", "see also", "references", "methods", "warning", "shape",
    "citation", "copyright", "license", "todo", "versionadded", "authors", "author", "references:", "input", "inputs",
    "output", "outputs", "receives", "signature", "dimensions",
)  # fmt: skip
_KINDS: dict[str, str | None] = {
    **dict.fromkeys(_PARAMETERS, "parameters"),
    **dict.fromkeys(("returns", "return", "yields"), "returns"),
    **dict.fromkeys(("example", "examples", "usage"), "example"),
    **dict.fromkeys(("notes", "note", "tips"), "notes"),
    **dict.fromkeys(_SKIPPED),
}
SECTIONS = ("parameters", "example", "notes", "returns")
"""Of sections that are kept, besides the description."""

_UNDERLINE = re.compile(r"^[-=~^*#]{3,}\s*$")
_GOOGLE = re.compile(r"^\s{0,4}([A-Z][A-Za-z]+(?: [A-Za-z]+)?)\s*:{1,2}\s*$")
_ROLE = re.compile(r":(?:[a-zA-Z]+:)?[a-zA-Z]+:`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}|\[([^\]]+)\]\((?:https?://|[./#])[^)]*\)")
_HF_LINK = re.compile(r"\[`~?([^`\]]+)`\](?:\([^)]*\))?")
_DOUBLE = re.compile(r"``([^`]+)``")
_DIRECTIVE = re.compile(r"^(\s*)\.\.(?:\s|$)")
_FIELD = re.compile(r"^\s*:(?:param|type|returns?|rtype|raises?|arg|keyword|ivar|cvar)\b[^:]*:", re.MULTILINE)
_NUMPY_PARAMETER = re.compile(r"^([*\w][\w*, .]*?)\s*(?::\s*(.*))?$")
_CITATION = re.compile(r" ?\[[\w.]+\]_")
_MARKUP = (">>>", "...", "|", "+--", "===", "```", "<", "@", "#", "{{", "$")
_ITEM = re.compile(r"(?:[-*+•]|\d+[.)])\s")
_STUMP = re.compile(r"(?:[-*+•]|\d+[.)])\s+(?:\S+\s+){0,4}\S*[^.!?)`'\"]")  # what is left of an item whose formula went
_TYPED_PARAMETER = re.compile(r"^`?\w+`? \(.{1,200}?\): ")  # a fragment that a decorator merges into a parameter list
_LETTERS_AND_SPACES = re.compile(r"[^\W\d_]+|[ \n]+")
_GOOGLE_PARAMETER = re.compile(r"^([*`]{0,3}\w[\w*, `]*?)\s*(?:\((.*?)\))?\s*:\s*(.*)$")


def parse_docstring(text: str) -> tuple[str, dict[str, str]] | None:
    """Description, and the other sections of `SECTIONS` (empty where there is none), of a docstring that went through
    `inspect.cleandoc`; None where no prose is left to teach."""
    is_numpy = any(map(_UNDERLINE.match, text.split("\n")))
    sections = _sections(text.expandtabs().split("\n"), is_numpy)
    description = _prose(sections["description"], MAX_DESCRIPTION)
    if len(description) < MIN_DESCRIPTION or not _is_prose(description) or _TYPED_PARAMETER.match(description):
        return None
    parameters, example, notes, returns = (_dedent(sections[kind]) for kind in SECTIONS)
    noted = _prose(notes, MAX_DESCRIPTION)
    return description, {
        "parameters": _parameters(parameters),
        "example": _example(example),
        "notes": noted if len(noted) >= MIN_DESCRIPTION and _is_prose(noted) else "",
        "returns": _parameters(returns) if is_numpy else _prose(returns, MAX_DESCRIPTION // 2),
    }


def _sections(lines: list[str], is_numpy: bool) -> dict[str, list[str]]:
    """Lines by kind of section: description and `SECTIONS` (others are left out)."""
    sections = defaultdict[str, list[str]](list)
    kind: str | None = "description"
    numbered = enumerate(lines)
    for number, line in numbered:
        following = "".join(lines[number + 1 : number + 2])
        underlined = line.strip() and not line.startswith(" ") and _UNDERLINE.match(following)
        google = _GOOGLE.match(line)
        title = line.strip().lower().rstrip(":") if underlined else google[1].lower() if google else ""
        if underlined or title in _KINDS:
            kind = _KINDS.get(title, "description")
            if underlined:
                next(numbered)
            continue
        after_blank = line[:1].strip() and number and not lines[number - 1].strip()
        if kind not in (None, "description") and after_blank and not is_numpy and not line.startswith(">>>"):
            kind = "description" if sections.keys() <= {"description"} else None  # prose ends an indented section
        if kind is not None:
            sections[kind].append(line)
    return sections


def _inline(text: str) -> str:
    """Take roles, links and doubled backquotes out of a piece of reStructuredText or Markdown."""
    text = _HF_LINK.sub(r"`\1`", text)
    text = _ROLE.sub(lambda match: f"`{match.group(1)}`", text)
    text = _LINK.sub(lambda match: match.group(1) or match.group(2), text)
    text = re.sub(r"(?<=\S) {2,}", " ", _CITATION.sub("", text))
    return _DOUBLE.sub(r"`\1`", text).replace("\\*", "*").replace("\\_", "_")


def _prose(lines: list[str], limit: int) -> str:
    """Paragraphs with their lines joined; directives, tables, doctests and field lists left out."""
    paragraphs: list[str] = []
    for block in _blocks(lines):
        joined = _paragraph(block)
        if not joined:
            continue
        if sum(map(len, paragraphs)) + len(joined) > limit:
            if not paragraphs:
                paragraphs.append(_cut_sentence(joined, limit))
            break
        paragraphs.append(joined)
    while paragraphs and paragraphs[-1].endswith(":"):  # it announced something that was left out
        paragraphs.pop()
    return "\n\n".join(paragraphs)


def _paragraph(block: list[str]) -> str:
    """One block as a paragraph (or a list, one item a line); "" where it is markup rather than prose."""
    first = block[0].lstrip()
    is_markup = first.startswith(_MARKUP) or _FIELD.match(first) or ("%(" in first and ")s" in first)
    if is_markup or (len(block) == 1 and "https://" in first):
        return ""
    is_list = bool(_ITEM.match(first))
    if not is_list and block[0].startswith("    "):
        return ""  # an indented literal block
    lines: list[str] = []
    for stripped in map(str.strip, block):
        if lines and not (is_list and _ITEM.match(stripped)):
            lines[-1] += " " + stripped
        else:
            lines.append(stripped)
    joined = _inline("\n".join(lines))
    return "" if _STUMP.fullmatch(joined) else re.sub(r"::$", ":", joined)


def _blocks(lines: list[str]) -> list[list[str]]:
    """Blocks of lines between blank ones; a `.. directive` goes with everything indented below it."""
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


def _parameters(lines: list[str]) -> str:
    """One line for each parameter: "- `name` (type): what it does."."""
    entries: list[tuple[str, str, list[str]]] = []
    for line in lines:
        if line[:1].strip():
            google = _GOOGLE_PARAMETER.match(line)
            numpy = _NUMPY_PARAMETER.match(line)
            if google and (google.group(2) is not None or not numpy or len(google.group(3)) > 40):
                entries.append((google.group(1), google.group(2) or "", [google.group(3)]))
            elif numpy:
                entries.append((numpy.group(1), numpy.group(2) or "", []))
        elif entries:
            entries[-1][2].append(line)
    shown: list[str] = []
    for name, kind, body in entries:
        what = _prose(_dedent(body), 600).replace("\n\n", " ").replace("\n", " ")
        if not what:
            continue
        kind = _inline(kind).replace("`", "").strip(" ,")
        shown.append(f"- `{name.strip('`* ')}`" + (f" ({kind})" if kind else "") + f": {what}")
        if sum(map(len, shown)) > MAX_PARAMETERS:
            shown.pop()
            break
    return "\n".join(shown)


def _example(lines: list[str]) -> str:
    """The first doctest of the section, whole steps only, as Python at a prompt."""
    kept: list[str] = []
    size = 0
    for line in lines:
        stripped = line.strip()
        if (not kept and not stripped.startswith(">>>")) or "xdoctest:" in stripped:
            continue
        if not stripped and size > MAX_EXAMPLE // 2:
            break
        if size + len(line) > MAX_EXAMPLE:
            while kept and not kept[-1].lstrip().startswith(">>>"):
                kept.pop()
            kept = kept[:-1]
            break
        if stripped and not stripped.startswith((">>>", "...")) and not kept[-1].strip():
            break  # prose after the doctest
        kept.append(line.rstrip().replace("# doctest: +SKIP", "").rstrip())
        size += len(line)
    text = "\n".join(_dedent(kept)).strip()
    return text if len(text) >= 40 else ""


def _dedent(lines: list[str]) -> list[str]:
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    margin = min(indents, default=0)
    return [line[margin:] for line in lines]


def _cut_sentence(text: str, limit: int) -> str:
    cut = text[:limit]
    end = max(cut.rfind(". "), cut.rfind(".\n"))
    return cut[: end + 1] if end > limit // 3 else cut.rsplit(" ", 1)[0]


def _is_prose(text: str) -> bool:
    """Mostly letters and spaces, several words, little mathematics."""
    others = len(_LETTERS_AND_SPACES.sub("", text))
    return others < 0.22 * len(text) and len(text.split()) >= 6

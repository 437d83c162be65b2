"""Conversion of HTML to Markdown and of escaped Markdown to plain Markdown, except in code."""

import re
from collections.abc import Callable
from typing import Any

from ...checkpoints.storage.messages import install_hint

# Tag names that are almost always HTML. Other names may also be placeholders ("about <title>"), prompt markers
# (<article>) or special tokens (</s>), and count as HTML only if one of these tags is present.
SURE = (
    "a|abbr|b|blockquote|body|br|button|center|dd|del|div|dl|dt|em|figure|font|form|h[1-6]|head|hr|html|i|iframe|img|ins"
    "|kbd|li|meta|nav|ol|p|pre|script|span|strong|style|sub|sup|svg|table|tbody|td|tfoot|th|thead|tr|tt|ul"
)
UNSURE = (
    "address|article|aside|caption|cite|code|col|colgroup|details|dfn|fieldset|figcaption|footer|g|header|input|label"
    "|link|main|option|path|picture|rect|samp|section|select|small|source|summary|textarea|title|video"
)
ATTRIBUTES = r"""(?:\s++[\w:@.-]++(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s"'<>=]++))?+)"""
# `List<i>` and `<a>` in programs are not tags: short names must be separate, anchors must have attributes.
SURE_TAG = re.compile(
    rf"</(?:{SURE})\s*>|(?<!\w)<[bip]\s*/?>|<a{ATTRIBUTES}++\s*>|<(?![abip]\s*/?>|a\b)(?:{SURE}){ATTRIBUTES}*+\s*/?>",
    re.IGNORECASE,
)
ANY_TAG = re.compile(
    rf"{SURE_TAG.pattern}|</?(?:{UNSURE}){ATTRIBUTES}*+\s*/?>|<!--(?s:(?!<!--).)*?-->|<!doctype\b[^<>]*+>",
    re.IGNORECASE,
)

CODE = r"(?P<fence>`{3,}|^[ ]{0,3}~{3,})(?s:.*?)(?:(?P=fence)|\Z)|(?P<tick>`{1,2})[^`\n]+(?P=tick)"
TABLE_ROW = r"^[ \t]*\|.*\|[ \t]*$"  # cells of Markdown tables may only break lines with <br>
FORMULA = r"\\\[(?s:(?!\\\[).)*?\\\]|\\\((?s:(?!\\\().)*?\\\)|\$\$[^$]+\$\$"
CODE_SPAN = re.compile(CODE, re.MULTILINE)
NO_HTML = re.compile(f"{CODE}|{TABLE_ROW}", re.MULTILINE)
NO_ESCAPES = re.compile(f"{CODE}|{FORMULA}", re.MULTILINE)
ESCAPES = re.compile(r"(?<!\\)\\([_*#~])|^([ \t]*)\\([-+=>])|^([ \t]*\d+)\\(?=\.\s)", re.MULTILINE)
AMPERSAND = re.compile(r"&(?!#?\w+;)")


def unescape_markdown(text: str) -> str:
    r"""Remove escapes that HTML converters add: `\_`, `\*`, `\#`, `\~`; at line starts `\-`, `\+`, `\=`, `\>`, `1\.`.

    Code, formulas and all other backslashes are unchanged.
    """
    if "\\" not in text:
        return text
    return _rewrite_around(NO_ESCAPES, text, lambda prose: ESCAPES.sub(r"\1\2\3\4", prose))


def holds_html(text: str) -> bool:
    """Check if a text contains HTML tags outside of code and Markdown tables."""
    if "<" not in text or not SURE_TAG.search(text):
        return False
    return SURE_TAG.search(_rewrite_around(NO_HTML, text, str, keep=False)) is not None


def html_to_markdown(text: str) -> str:
    """Convert the HTML elements of a text to Markdown, and keep code and the text between elements unchanged.

    Texts without tags, and texts whose tags are nested too deeply for the parser, are returned unchanged. Raises
    ValueError if markdownify is not installed.
    """
    if not holds_html(text):
        return text
    marker = next((mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in text), None)
    if marker is None:  # the text uses all private-use characters
        return text
    code: list[str] = []

    def protect(match: re.Match[str]) -> str:
        code.append(match[0])
        return f"{marker}{len(code) - 1}{marker}"

    try:
        converted = _convert(_only_tags(NO_HTML.sub(protect, text)))
    except RecursionError:
        return text
    return re.sub(f"{marker}(\\d+){marker}", lambda match: code[int(match[1])], converted)


def _rewrite_around(protected: re.Pattern[str], text: str, rewrite: Callable[[str], str], keep: bool = True) -> str:
    """Apply `rewrite` to text outside of protected parts. If `keep` is False, replace these parts by spaces."""
    pieces, end = [], 0
    for match in protected.finditer(text):
        pieces += [rewrite(text[end : match.start()]), match[0] if keep else " "]
        end = match.end()
    return "".join([*pieces, rewrite(text[end:])])


def _only_tags(text: str) -> str:
    """Escape text that an HTML parser would mistake for tags or entities: `a < b`, `List<int>`, `?x=1&lt=2`."""
    return _rewrite_around(ANY_TAG, text, lambda prose: AMPERSAND.sub("&amp;", prose).replace("<", "&lt;"))


def _convert(html: str) -> str:
    try:
        from bs4 import BeautifulSoup, NavigableString, Tag
        from markdownify import MarkdownConverter
    except ImportError as error:
        raise ValueError(f"`html: markdown` requires the package markdownify: {install_hint('clean')}") from error
    document: Any = BeautifulSoup(html, "html.parser")
    for useless in document(["button", "script", "style", "svg", "head"]):
        useless.decompose()
    for block in document("pre"):  # ChatGPT's pages: <pre><div><span>python</span><code>…</code></div></pre>
        if block.code:
            block.replace_with(_plain_block(document, block))
    converter = MarkdownConverter(
        heading_style="atx",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        code_language_callback=lambda block: block.get("lang", ""),
    )
    pieces = [""]
    for node in document.children:
        if isinstance(node, Tag):
            _append(pieces, converter.convert_soup(node))
        elif type(node) is NavigableString:  # excludes subclasses: comments, doctypes
            _append(pieces, str(node))
    return "".join(pieces).strip("\n")


def _plain_block(document: Any, block: Any) -> Any:
    """Convert a code block to a <pre> element that contains only the code; its `lang` attribute is the language."""
    code = block.code.extract()
    named = [name.removeprefix("language-") for name in code.get("class", []) if name.startswith("language-")]
    language = named[0] if named else block.get_text().strip()
    plain = document.new_tag("pre", attrs={"lang": language if re.fullmatch(r"[\w+#.-]{1,20}", language) else ""})
    plain.string = code.get_text()
    return plain


def _append(pieces: list[str], right: str) -> None:
    """Append converted text to a list, separated from the previous item by at most one blank line."""
    above, below = pieces[-1].rstrip("\n"), right.lstrip("\n")
    if not above or not below:
        pieces[-1] += right
        return
    breaks = max(len(pieces[-1]) - len(above), len(right) - len(below))
    pieces[-1] = above + "\n" * min(2, breaks)
    pieces.append(below)

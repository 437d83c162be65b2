"""Conversion of HTML and escaped Markdown, and text that is left unchanged."""

import pytest
from draftsmith.data.cleaning.markup import holds_html, html_to_markdown, unescape_markdown

pytest.importorskip("markdownify")

MARKDOWN = [
    ("<h2>Title</h2><p>one<br>two</p>", "## Title\n\none  \ntwo"),
    ("before\n\n- kept   as is\n\n<p>x</p>\nafter", "before\n\n- kept   as is\n\nx\n\nafter"),
    ("<ul><li>use `a_b`</li><li>**b**</li></ul>", "- use `a_b`\n- **b**"),
    ("<b>1</b> &lt; 2 & a < b in `<p>` of List<int>", "**1** < 2 & a < b in `<p>` of List<int>"),
    (
        "<pre><span>python</span><button>Copy code</button><div><code>x_1 = <i>a</i>\n  y</code></div></pre>",
        "```python\nx_1 = a\n  y\n```",
    ),
    ("<p>a</p><section><p>b</p></section><article>c</article>", "a\n\nb\n\nc"),
    ("<!-- note --><em>a</em>", "*a*"),
    ("<p>\ue000 `x` \ue000</p>", "\ue000 `x` \ue000"),
]


@pytest.mark.parametrize(("html", "markdown"), MARKDOWN)
def test_html_becomes_markdown(html: str, markdown: str) -> None:
    assert holds_html(html)
    assert html_to_markdown(html) == markdown


NO_HTML = [
    "a < b and c > d <= e <- f",
    "#include <iostream>\nstd::vector<i> x; List<int> y; Map<a> z",
    "write about <title> in <article>text</article> of <language>",
    "</s> <s> <|im_end|> ASSISTANT:",
    "in `<div>` and ``<b>x</b>``",
    "```html\n<p>a</p>\n```  \n\n\n\nx &amp; y",
    "~~~\n<br>\n~~~",
    "unclosed\n```\n<p>a</p>",
    "| a<br>b | c |",
    "mail <me@example.com> or <https://example.com>",
]


@pytest.mark.parametrize("text", NO_HTML)
def test_text_without_tags_is_unchanged(text: str) -> None:
    assert not holds_html(text)
    assert html_to_markdown(text) == text


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        (r"a\_b \*c\* C\# \~d", "a_b *c* C# ~d"),
        ("1\\. one\n  \\- two\n\\> three\n\\+ four\n\\=", "1. one\n  - two\n> three\n+ four\n="),
        (r"x\-y 2\.5 c:\.git \n \\_ \"q\" \' \`", r"x\-y 2\.5 c:\.git \n \\_ \"q\" \' \`"),
        (r"`a\_b` c\_d", r"`a\_b` c_d"),
        ("```\na\\_b\n```\nc\\_d", "```\na\\_b\n```\nc_d"),
        (r"\[x\_1\] \(y\_2\) $$z\_3$$ w\_4", r"\[x\_1\] \(y\_2\) $$z\_3$$ w_4"),
        (r"\[ open, not a formula \_", r"\[ open, not a formula _"),
    ],
)
def test_escapes_are_removed_outside_of_code_and_formulas(escaped: str, plain: str) -> None:
    assert unescape_markdown(escaped) == plain

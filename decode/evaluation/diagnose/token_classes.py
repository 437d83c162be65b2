"""What kind of text a token is, one class a token.

A class depends on the text around the token (in a fence everything is code), so whole texts are classified.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

SPECIAL, NON_ASCII, CODE, WHITESPACE, DIGITS = "special", "non-ASCII", "code", "whitespace", "digits"
PUNCTUATION, NAME, WORD, CONTINUATION = "punctuation", "name", "word", "continuation"

CLASSES = (
    SPECIAL,  # of the template or of the tokenizer, such as the end of a turn
    NON_ASCII,  # a character beyond ASCII, or a part of one
    CODE,  # inside a fence or backticks, or with symbols of code
    WHITESPACE,  # spaces and line ends alone
    DIGITS,  # holds a digit
    PUNCTUATION,  # neither letters nor digits
    NAME,  # begins a word with a capital, inside a sentence
    WORD,  # begins any other word
    CONTINUATION,  # continues a word
)

_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_QUOTED = re.compile(r"`[^`\n]+(?:`|\Z)")
_SYMBOLS = re.compile(r"[{}\[\]<>=_\\|&^~@$]|\(\)|->|::|//")
_SENTENCE_ENDS = ".!?:;\n"
_BEFORE_SENTENCES = " \t\"'(*-#>"
_SEEN = 16
"""Letters before a token that its class may depend on."""


def classify(pieces: Sequence[str], special: Sequence[bool]) -> list[str]:
    """The class of each token of an answer, one of `CLASSES`; the first that fits, in their order. `pieces` are the
    texts that the tokens add, one after another; "" for a token that ends inside a character."""
    assert len(pieces) == len(special)
    text = "".join(pieces)
    inside = _code_letters(text)
    classes, start = [], 0
    for piece, is_special in zip(pieces, special, strict=True):
        classes.append(SPECIAL if is_special else _class_of(piece, text[max(0, start - _SEEN) : start], inside, start))
        start += len(piece)
    return classes


def _code_letters(text: str) -> bytearray:
    """1 for each letter inside a fence or backticks, the marks included."""
    inside = bytearray(len(text))
    for found in _FENCED.finditer(text):
        inside[found.start() : found.end()] = b"\1" * (found.end() - found.start())
    outside = _FENCED.sub(lambda found: "\n" * len(found[0]), text)
    for found in _QUOTED.finditer(outside):
        inside[found.start() : found.end()] = b"\1" * (found.end() - found.start())
    return inside


def _class_of(piece: str, before: str, inside: bytearray, start: int) -> str:
    if not piece or not piece.isascii():
        return NON_ASCII
    if not piece.strip():
        return WHITESPACE
    first = len(piece) - len(piece.lstrip())
    if inside[start + first] or _SYMBOLS.search(piece):
        return CODE
    if any(letter.isdigit() for letter in piece):
        return DIGITS
    if not any(letter.isalpha() for letter in piece):
        return PUNCTUATION
    return _word_class(piece, before)


def _word_class(piece: str, before: str) -> str:
    """Of a token that holds letters."""
    joined = piece[0].isalpha() or piece[0] == "'"
    if joined and before and before[-1].isalnum():
        return CONTINUATION
    letter = next(index for index, letter in enumerate(piece) if letter.isalpha())
    if not piece[letter].isupper():
        return WORD
    whole = before + piece[:letter]
    before = whole.rstrip(_BEFORE_SENTENCES)
    return WORD if not before or before[-1] in _SENTENCE_ENDS else NAME


def token_texts(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Return the text that each of `ids` adds after the ids `before`.

    A character of several tokens belongs to the last of them; the others have an empty text.
    """

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts, settled, unfinished = list[str](), list(before)[-8:], list[int]()
    for token in ids:
        unfinished.append(token)
        text = decode([*settled, *unfinished])[len(decode(settled)) :]
        if text.endswith("\ufffd"):
            texts.append("")
        else:
            texts.append(text)
            settled, unfinished = unfinished, []
    return texts

"""Options of cleaning: what may be said, its default and its meaning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .contamination import FIRST_WORDS

CHOICES = {
    "leading_assistant": ("cut", "drop"),
    "trailing_user": ("cut", "drop"),
    "empty": ("cut", "drop"),
    "non_alternating": ("drop", "merge"),
    "unknown_roles": ("drop", "cut"),
    "html": ("keep", "markdown", "drop"),
    "escaped_markdown": ("keep", "unescape"),
}
DUPLICATES = ("id", "first-exchange")


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Options of cleaning; without any, whole exchanges are kept as they were written.

    Lists may be given for tuples and a dictionary for `roles`, as they come from YAML or JSON; `dataclasses.asdict`
    gives plain values.

    Raises:
        ValueError: a choice or a number that is not allowed, with what is.
    """

    leading_assistant: str = "cut"
    """Answers before the first question: "cut" them, or "drop" the conversation."""
    trailing_user: str = "cut"
    """Questions after the last answer: "cut" or "drop"."""
    empty: str = "cut"
    """Messages without text: "cut" them together with their question or answer, or "drop" the conversation."""
    non_alternating: str = "drop"
    """Neighbouring messages of one role: "drop" the conversation, or "merge" them with a blank line between."""
    unknown_roles: str = "drop"
    """Roles that the table does not know: "drop" the conversation, or "cut" the message, the question before it and
    the answer after it."""
    roles: tuple[tuple[str, str], ...] = ()
    """More roles as (written, meant) pairs, where meant is "user", "assistant" or "system"."""
    html: str = "keep"
    """HTML outside of code: "keep" it, turn it into "markdown" (needs markdownify), or "drop" the conversation."""
    escaped_markdown: str = "keep"
    r"""Backslashes such as `\_` outside of code: "keep" them or "unescape"."""
    drop_blocked: bool = False
    """Drop conversations with an answer that begins with one of `BLOCKED_ANSWERS`."""
    min_exchanges: int = 1
    """Drop conversations of fewer exchanges."""
    min_characters: int = 0
    """Drop conversations whose answers have fewer characters in all."""
    duplicates: tuple[str, ...] = ()
    """Keep the first conversation of each "id", of each "first-exchange" (question and answer), or both."""
    languages: tuple[str, ...] = ()
    """Keep these languages only, by ISO 639 code; "und" is what cannot be told, "zxx" what is no language (needs
    py3langid)."""
    drop_languages: tuple[str, ...] = ()
    """Drop these languages."""
    contamination: tuple[str, ...] = ()
    """Names of evaluation sets: drop conversations whose questions share a run of words with a text of them."""
    contamination_words: int = 13
    """Words in such a run; a shorter evaluation text counts where it is contained whole."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        for name in ("duplicates", "languages", "drop_languages", "contamination"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for value in self.duplicates:
            _check_choice("duplicates", value, DUPLICATES)
        object.__setattr__(self, "roles", _role_pairs(self.roles))
        for name, least in (("min_exchanges", 1), ("min_characters", 0), ("contamination_words", FIRST_WORDS)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}, expected a whole number of {least} or more")
        if not isinstance(self.drop_blocked, bool):
            raise ValueError(f"drop_blocked is {self.drop_blocked!r}, expected true or false")
        if both := sorted(set(self.languages) & set(self.drop_languages)):
            raise ValueError(f"{both[0]!r} is in `languages` and in `drop_languages`")


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected {' or '.join(allowed)}{nearest_name(value, allowed)}")


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"{name} is {value!r}, expected a list of names")
    return tuple(value)


def _role_pairs(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in pairs):
        raise ValueError(f"roles is {value!r}, expected a dictionary or (written, meant) pairs")
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(role, str) for role in pair):
            raise ValueError(f"roles holds {pair!r}, expected a (written, meant) pair of names")
        _check_choice(f"roles: {pair[0]!r}", pair[1], ("user", "assistant", "system"))
    return tuple(sorted((written, meant) for written, meant in pairs))


def nearest_name(value: Any, known: Iterable[str]) -> str:
    """(did you mean …?)" with the nearest of `known`, or nothing."""
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

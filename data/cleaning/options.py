"""Options of cleaning: what may be said, its default and its meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...checkpoints.storage.messages import did_you_mean
from .contamination import FIRST_WORDS

Cut = Literal["cut", "drop"]
Duplicate = Literal["id", "first-exchange"]
Roles = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Options of cleaning; without any, whole exchanges are kept as they were written.

    Lists may be given for tuples and a dictionary for `roles`, as they come from YAML or JSON; `dataclasses.asdict`
    gives plain values.

    Raises:
        ValueError: a choice or a number that is not allowed, with what is.
    """

    leading_assistant: Cut = "cut"
    """Answers before the first question: "cut" them, or "drop" the conversation."""
    trailing_user: Cut = "cut"
    """Questions after the last answer: "cut" or "drop"."""
    empty: Cut = "cut"
    """Messages without text: "cut" them together with their question or answer, or "drop" the conversation."""
    non_alternating: Literal["drop", "merge"] = "drop"
    """Neighbouring messages of one role: "drop" the conversation, or "merge" them with a blank line between."""
    unknown_roles: Literal["drop", "cut"] = "drop"
    """Roles that the table does not know: "drop" the conversation, or "cut" the message, the question before it and
    the answer after it."""
    roles: Roles = ()
    """More roles as (written, meant) pairs, where meant is "user", "assistant" or "system"."""
    html: Literal["keep", "markdown", "drop"] = "keep"
    """HTML outside of code: "keep" it, turn it into "markdown" (needs markdownify), or "drop" the conversation."""
    escaped_markdown: Literal["keep", "unescape"] = "keep"
    r"""Backslashes such as `\_` outside of code: "keep" them or "unescape"."""
    drop_blocked: bool = False
    """Drop conversations with an answer that begins with one of `BLOCKED_ANSWERS`."""
    min_exchanges: int = 1
    """Drop conversations of fewer exchanges."""
    min_characters: int = 0
    """Drop conversations whose answers have fewer characters in all."""
    duplicates: tuple[Duplicate, ...] = ()
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
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal:
                _check_choice(name, value, get_args(hint))
            elif get_origin(hint) is tuple and hint != Roles:
                if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
                    raise ValueError(f"{name} is {value!r}, expected a list of names")
                object.__setattr__(self, name, tuple(value))
            elif hint != Roles and type(value) is not hint:
                raise ValueError(f"{name} is {value!r}, expected {hint.__name__}")
        for kind in self.duplicates:
            _check_choice("duplicates", kind, get_args(Duplicate))
        object.__setattr__(self, "roles", _role_pairs(self.roles))
        for name, least in (("min_exchanges", 1), ("min_characters", 0), ("contamination_words", FIRST_WORDS)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        if both := sorted(set(self.languages) & set(self.drop_languages)):
            raise ValueError(f"{both[0]!r} is in `languages` and in `drop_languages`")


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected {' or '.join(allowed)}.{did_you_mean(str(value), allowed)}")


def _role_pairs(value: Any) -> Roles:
    try:
        pairs = sorted((str(written), str(meant)) for written, meant in dict(value).items())
    except (TypeError, ValueError):
        raise ValueError(f"roles is {value!r}, expected a dictionary or (written, meant) pairs") from None
    for written, meant in pairs:
        _check_choice(f"roles: {written!r}", meant, ("user", "assistant", "system"))
    return tuple(pairs)

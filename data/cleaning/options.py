"""Options of cleaning: what may be said, its default and its meaning."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .contamination import FIRST_WORDS


class Cleaning(BaseModel):
    """Options of cleaning; without any, whole exchanges are kept as they were written. Raises ValueError: an option
    that there is not, or a choice or a number that is not allowed, with what is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    non_alternating: Literal["drop", "merge"] = "drop"
    """Neighbouring messages of one role: "drop" the conversation, or "merge" them with a blank line between."""
    unknown_roles: Literal["drop", "cut"] = "drop"
    """Roles that the table does not know: "drop" the conversation, or "cut" the message, the question before it and
    the answer after it."""
    roles: dict[str, Literal["user", "assistant", "system"]] = {}
    """More roles, as they are written, and what they mean."""
    html: Literal["keep", "markdown", "drop"] = "keep"
    """HTML outside of code: "keep" it, turn it into "markdown" (needs markdownify), or "drop" the conversation."""
    escaped_markdown: Literal["keep", "unescape"] = "keep"
    r"""Backslashes such as `\_` outside of code: "keep" them or "unescape"."""
    drop_blocked: bool = False
    """Drop conversations with an answer that begins with one of `BLOCKED_ANSWERS`."""
    min_exchanges: int = Field(1, ge=1)
    """Drop conversations of fewer exchanges."""
    min_characters: int = Field(0, ge=0)
    """Drop conversations whose answers have fewer characters in all."""
    duplicates: tuple[Literal["id", "first-exchange"], ...] = ()
    """Keep the first conversation of each "id", of each "first-exchange" (question and answer), or both."""
    languages: tuple[str, ...] = ()
    """Keep these languages only, by ISO 639 code; "und" is what cannot be told, "zxx" what is no language (needs
    py3langid)."""
    contamination: tuple[str, ...] = ()
    """Names of evaluation sets: drop conversations whose questions share a run of words with a text of them."""
    contamination_words: int = Field(13, ge=FIRST_WORDS)
    """Words in such a run; a shorter evaluation text counts where it is contained whole."""

"""Chat templates: programs in jinja that somebody wrote, rendered within limits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

_MOST_LINES = 1_000_000
"""Lines of the program made of a template; published templates run some thousand for a conversation."""
_LONGEST = 1 << 20
_ONE_DAY = "26 Jul 2024"  # what Llama 3 says where it is not told the date; today's would be another text tomorrow
_FAULTS = (ValueError, TypeError, ArithmeticError, MemoryError, LookupError, AttributeError, RecursionError)
"""What a template ends in, beside jinja2's own errors."""


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, prompt: bool, tools: list[Any] | None = None
) -> str:
    """A conversation as a tokenizer's own chat template writes it, with the tools that may be called; `prompt`: up to
    where the next answer begins.

    Raises ValueError: a template that fails, does not end, or writes more than 2²⁰ characters.
    """
    from jinja2 import TemplateError

    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != "<template>":
            return None
        lines += 1
        if lines > _MOST_LINES:
            raise ValueError(f"it does not end within {_MOST_LINES:,} lines")
        return count

    tracing = sys.gettrace()
    sys.settrace(count)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools or None, tokenize=False, add_generation_prompt=prompt, date_string=_ONE_DAY
        )
    except (TemplateError, *_FAULTS) as error:
        raise ValueError(f"the chat template cannot be rendered: {str(error) or type(error).__name__}") from error
    finally:
        sys.settrace(tracing)
    if len(text) > _LONGEST:
        raise ValueError(f"the chat template writes {len(text):,} characters, expected at most {_LONGEST:,}")
    return str(text)

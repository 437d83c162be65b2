"""Rendering of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DATE = "26 Jul 2024"  # Llama 3's default; today's date would render another text tomorrow
_FAULTS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, prompt: bool, tools: list[Any] | None = None
) -> str:
    """Render a conversation with a tokenizer's own chat template.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages with `role` and `content`.
        prompt: Whether to end where the next answer begins.
        tools: Tools that may be called.

    Raises:
        ValueError: The template fails.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools or None, tokenize=False, add_generation_prompt=prompt, date_string=_DATE
        )
    except (TemplateError, *_FAULTS) as error:
        raise ValueError(f"the chat template cannot be rendered: {str(error) or type(error).__name__}") from error
    return str(text)

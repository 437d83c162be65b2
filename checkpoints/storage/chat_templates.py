"""Rendering of chat templates."""

import re
import resource
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import psutil  # type: ignore[import-untyped]

_DATE = "2024-07-26"  # default of Llama 3's template; with the current date, results would not be reproducible
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_FAULTS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
_MAX_BYTES = 2 << 30  # maximum additional memory for rendering


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    prompt: bool,
    tools: list[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with a tokenizer's own chat template.

    Messages have `role` and `content`. With `prompt`, the prefix of the next assistant message is appended
    (`add_generation_prompt`). `options` are template variables, such as `enable_thinking`; `date` sets the current date
    (default: 2024-07-26). Raises ValueError if the template fails.
    """
    from jinja2 import TemplateError

    variables, (soft, hard) = dict(options or {}), resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _MAX_BYTES, hard))
    try:
        today = date.fromisoformat(str(variables.pop("date", _DATE)))
        source = tokenizer.get_chat_template(tools=tools or None)
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            chat_template=_TODAY.sub(lambda match: repr(today.strftime(match[2])), source),
            tokenize=False,
            add_generation_prompt=prompt,
            **{"date_string": f"{today:%d %b %Y}"} | variables,
        )
    except MemoryError as error:
        raise ValueError(f"the chat template cannot be rendered: it takes more than {_MAX_BYTES >> 30} GiB") from error
    except (TemplateError, *_FAULTS) as error:
        raise ValueError(f"the chat template cannot be rendered: {str(error) or type(error).__name__}") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return str(text)

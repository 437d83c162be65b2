"""Chat templates, represented by the fixed strings around the messages of a conversation.

A tokenizer's own chat template (Jinja) is converted to this form: marker strings are rendered as messages, and the
rendered text is split at the markers.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...checkpoints.storage.chat_templates import render_chat
from ...checkpoints.storage.messages import did_you_mean, shared_length
from ..conversations import Turn, tool_text
from .encoding import first_token, special_strings

OWN = "tokenizer"
"""Template name that selects the tokenizer's own chat template."""

_LEAVE_OUT = "Remove the column `tools` and the tool calls from the rows, or use another template"
_SYSTEM, _QUESTIONS, _ANSWERS = "xSYSTEMx", ("xASKx1", "xASKx2", "xASKx3"), ("xTELLx1", "xTELLx2", "xTELLx3")


@dataclass(frozen=True, slots=True)
class Template:
    """Chat template that consists of fixed strings around messages. See `get_template`.

    A conversation is rendered as `start`, question, `middle`, answer, `end`, `after`, `next`, question, `middle` ….
    With a system prompt, `system[0]`, the prompt and `system[1]` replace `start`. If `system` is None, the prompt and a
    blank line precede the first question. `{bos}` and `{eos}` stand for the tokenizer's tokens. The BOS token that a
    tokenizer adds is prepended unless `writes_bos` is set. The tokenizer must have all `special_tokens`. A trailing
    space of a fixed string is tokenized together with the next message.
    """

    name: str
    start: str
    system: tuple[str, str] | None
    next: str
    middle: str
    end: str  # supervised, with the answer
    after: str = ""
    strips: tuple[bool, bool] = (False, False)  # questions, answers: remove the white space around them
    writes_bos: bool = False
    special_tokens: tuple[str, ...] = ()
    jinja: str = ""
    """Jinja source of a chat template that cannot be expressed as fixed strings (see `chat.ChatLayout`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Variables that are passed to the tokenizer's chat template."""
    parts: bool = False
    """Whether the content of messages must be a list of parts, as for multimodal models."""

    def messages(self, turns: Sequence[Turn]) -> tuple[str | None, list[str], list[str]]:
        """Split turns into system prompt, questions and answers, and strip white space as the template does.

        The turns are an optional system turn, followed by alternating user and assistant turns.
        """
        system = turns[0].text if turns and turns[0].role == "system" else None
        texts = [turn.text for turn in (turns if system is None else turns[1:])]
        questions, answers = texts[::2], texts[1::2]
        if self.strips[0]:
            system, questions = system and system.strip(), [text.strip() for text in questions]
        if self.strips[1]:
            answers = [text.strip() for text in answers]
        return system, questions, answers


VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        # the FastChat template of the same name
        Template(
            name="vicuna-v1.1",
            start=f"{VICUNA_SYSTEM} USER: ",
            system=("", " USER: "),
            next="USER: ",
            middle=" ASSISTANT: ",
            end="{eos}",
        ),
        # Meta's chat_completion: each exchange is between {bos} and {eos}, and the first one contains the system prompt
        Template(
            name="llama-2-chat",
            start="{bos}[INST] ",
            system=("{bos}[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
            next="{bos}[INST] ",
            middle=" [/INST] ",
            end=" {eos}",
            strips=(True, True),
            writes_bos=True,
        ),
        Template(
            name="chatml",
            start="<|im_start|>user\n",
            system=("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"),
            next="<|im_start|>user\n",
            middle="<|im_end|>\n<|im_start|>assistant\n",
            end="<|im_end|>",
            after="\n",
            special_tokens=("<|im_start|>", "<|im_end|>"),
        ),
        # format of the `text` column of tatsu-lab/alpaca; follow-up questions become new instructions
        Template(
            name="alpaca",
            start=f"{ALPACA_SYSTEM}\n\n### Instruction:\n",
            system=("", "\n\n### Instruction:\n"),
            next="\n\n### Instruction:\n",
            middle="\n\n### Response:\n",
            end="{eos}",
        ),
        # no fixed strings: for translation, summarization and plain text
        Template(name="plain", start="", system=("", "\n"), next="", middle="\n", end="{eos}"),
        # T5: inputs and outputs end with {eos}; the system prompt is the task prefix
        Template(name="t5", start="", system=("", " "), next="", middle="{eos}", end="{eos}"),
    )
}


CHATML_JINJA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Jinja source of `chatml`, for the `chat_template` of a tokenizer."""


def get_template(name: str, tokenizer: Any = None, options: Mapping[str, Any] | None = None) -> Template:
    """Return a template by name; "tokenizer" selects the tokenizer's own template, which receives `options`.

    Raises ValueError if the name is unknown, the tokenizer's template is unusable, or `options` do not apply.
    """
    if name == OWN:
        return own_template(tokenizer, options or {})
    if options:
        raise ValueError(f"`template_options` require `template: {OWN}`, got {name!r}: remove {dict(options)}")
    if name not in TEMPLATES:
        known = [*TEMPLATES, OWN]
        raise ValueError(f"no template {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return TEMPLATES[name]


def fill_tokens(template: Template, tokenizer: Any) -> Template:
    """Replace {eos} and {bos} with the tokenizer's tokens. Raises ValueError if a required token is missing."""
    known = special_strings(tokenizer)
    if lacking := [text for text in template.special_tokens if text not in known]:
        raise ValueError(f"template {template.name} requires special tokens that the tokenizer lacks: {lacking}")

    def fill(text: str) -> str:
        for name, token in (("{eos}", tokenizer.eos_token), ("{bos}", tokenizer.bos_token)):
            if name in text and token is None:
                raise ValueError(f"template {template.name} requires {name}, which the tokenizer does not define")
            text = text.replace(name, token or "")
        return text

    names = ("start", "next", "middle", "end", "after")
    texts: dict[str, Any] = {name: fill(getattr(template, name)) for name in names}
    system = None if template.system is None else (fill(template.system[0]), fill(template.system[1]))
    return replace(template, system=system, **texts)


def own_template(tokenizer: Any, options: Mapping[str, Any]) -> Template:
    """Convert the chat template of a tokenizer to fixed strings, or keep its Jinja source if that is not possible.

    Raises:
        ValueError: The tokenizer has no chat template, or its template cannot render a question and an answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: set another `template`, such as chatml")
    chat = _Chat(tokenizer, dict(options))
    try:
        return _constant_texts(chat)
    except ValueError:
        chat, suffix = _find_message_form(chat)
        return Template(
            name=OWN,
            start="",
            system=("", "") if _render_system(chat) else None,
            next="",
            middle="",
            end=suffix[: max(0, first_token(suffix, tokenizer)[1])],
            writes_bos=True,
            jinja=str(tokenizer.chat_template),
            options=chat.options,
            parts=chat.parts,
        )


def _find_message_form(chat: "_Chat") -> "tuple[_Chat, str]":
    """Find the message format of a chat template. Return the chat and the text after an answer, or "" if unknown.

    A template may require a system prompt or lists of parts. Raises ValueError if no format can be rendered.
    """
    for system, parts in ((None, False), (None, True), (_SYSTEM, False), (_SYSTEM, True)):
        tried = replace(chat, parts=parts)
        with suppress(ValueError):
            return tried, _split_at(tried.render(1, prompt=False, system=system), _ANSWERS[0])[1]
    if _QUESTIONS[0].lower() not in (prompt := chat.render(1, prompt=True)).lower():
        _split_at(prompt, _QUESTIONS[0])  # raises the error
    return chat, ""


def _constant_texts(chat: "_Chat") -> Template:
    """Convert a chat template to fixed strings.

    Raises:
        ValueError: The template rewrites earlier turns, adds text before an answer that is not part of the prompt, or
            does not end an answer with a special token.
    """
    prompts = [chat.render(turns, prompt=True) for turns in (1, 2, 3)]
    wholes = [chat.render(turns, prompt=False) for turns in (1, 2, 3)]
    for earlier, later in zip([*prompts, *wholes[:2]], [*wholes, *prompts[1:]], strict=True):
        if not later.startswith(earlier):
            raise _rewrites(earlier, later)
    start, middle = _split_at(prompts[0], _QUESTIONS[0])
    lead, tail = _split_at(wholes[0].removeprefix(prompts[0]), _ANSWERS[0])
    if lead not in ("", " "):
        raise ValueError(f"the chat template adds {lead!r} before an answer, which is missing from its prompt")
    first, end = first_token(tail, chat.tokenizer)
    if tail[first:end] not in special_strings(chat.tokenizer):
        raise ValueError(f"template 'tokenizer': the chat template ends an answer with {tail!r}, not a special token")
    following, padded = prompts[1].removeprefix(wholes[0]), chat.render(1, prompt=False, pad="  ")
    template = Template(
        name=OWN,
        start=start,
        system=_system(chat),
        next=_split_at(following, _QUESTIONS[1])[0],
        middle=middle + lead,
        end=tail[:end],
        after=tail[end:],
        strips=(f"  {_QUESTIONS[0]}  " not in padded, f"  {_ANSWERS[0]}  " not in padded),
        writes_bos=True,
        options=chat.options,
    )
    _check(template, chat)
    return template


def with_tools(template: Template, tokenizer: Any, tools: str) -> Template:
    """Return the tokenizer's own template for conversations with these tools (JSON list).

    Raises ValueError if `template` is not the tokenizer's own, does not render the tools before the first question, or
    does not render calls and results as `<tool_call>` and `<tool_response>`.
    """
    tool_list = json.loads(tools)
    if template.name != OWN:
        raise ValueError(f"template {template.name} does not support tools: use `template: tokenizer`")
    chat = _Chat(tokenizer, template.options, tool_list)
    start, _ = _split_at(chat.render(1, prompt=True), _QUESTIONS[0])
    template = replace(template, start=start, system=_system(chat))
    _check(template, chat)
    check_calls(tokenizer, template, tools)
    return template


def check_calls(tokenizer: Any, template: Template, tools: str) -> None:
    """Raise ValueError if a chat template ignores tools or does not render tool calls as `<tool_call>`."""
    parsed = json.loads(tools)
    chat, call = _Chat(tokenizer, template.options, parsed, template.parts), {"name": "xNAMEx", "arguments": {"x": 1}}
    if parsed and chat.render(1, prompt=True) == replace(chat, tools=None).render(1, prompt=True):
        raise ValueError(f"template 'tokenizer': the chat template does not support tools. {_LEAVE_OUT}")
    question = {"role": "user", "content": _QUESTIONS[0]}
    call_message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    rendered = chat.of([question, call_message, {"role": "tool", "content": _QUESTIONS[1]}], prompt=True)
    written = {"role": "assistant", "content": tool_text("tool_call", json.dumps(call))}
    response = {"role": "user", "content": tool_text("tool_response", _QUESTIONS[1])}
    if rendered != (expected := chat.of([question, written, response], prompt=True)):
        same = max(0, shared_length(rendered, expected) - 20)
        difference = f"{rendered[same:]!r}, expected {expected[same:]!r}"
        raise ValueError(f"template 'tokenizer': the chat template renders tool calls as {difference}. {_LEAVE_OUT}")


def _check(template: Template, chat: "_Chat") -> None:
    """Raise ValueError if the fixed strings and the chat template render three exchanges differently."""
    for system in (None, _SYSTEM) if template.system is not None else (None,):
        rebuilt, whole = _render_constants(template, system), chat.render(3, prompt=False, system=system)
        if rebuilt != whole:
            raise _rewrites(rebuilt, whole)


def _render_constants(template: Template, system: str | None) -> str:
    """Render three exchanges with the fixed strings."""
    text = template.start if system is None or template.system is None else system.join(template.system)
    for number in range(3):
        text += template.next if number else ""
        text += _QUESTIONS[number] + template.middle + _ANSWERS[number] + template.end + template.after
    return text


@dataclass(frozen=True)
class _Chat:
    """Chat template of a tokenizer with its variables and tools, used to render marker messages."""

    tokenizer: Any
    options: dict[str, Any]
    tools: list[Any] | None = None
    parts: bool = False

    def of(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        messages = in_parts(messages) if self.parts else messages
        return render_chat(self.tokenizer, messages, prompt=prompt, tools=self.tools, options=self.options)

    def render(self, exchanges: int, *, prompt: bool, system: str | None = None, pad: str = "") -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        for number in range(exchanges):
            messages.append({"role": "user", "content": pad + _QUESTIONS[number] + pad})
            messages.append({"role": "assistant", "content": pad + _ANSWERS[number] + pad})
        return self.of(messages[: len(messages) - prompt], prompt=prompt)


def _split_at(text: str, mark: str) -> tuple[str, str]:
    before, separator, suffix = text.partition(mark)
    if not separator or mark in suffix:
        raise ValueError(f"template 'tokenizer': the chat template does not render a message exactly once: {text!r}")
    return before, suffix


def _render_system(chat: _Chat) -> str:
    """Render a system prompt and a question. Return "" if the template does not support system prompts."""
    with suppress(ValueError):  # such as Gemma's: "system role not supported"
        text = chat.render(1, prompt=True, system=_SYSTEM)
        return text if _SYSTEM in text else ""
    return ""


def _system(chat: _Chat) -> tuple[str, str] | None:
    if not (text := _render_system(chat)):
        return None
    before, suffix = _split_at(text, _SYSTEM)
    return before, _split_at(suffix, _QUESTIONS[0])[0]


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the content of each message to a list with one text part."""
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


def _rewrites(earlier: str, later: str) -> ValueError:
    same = shared_length(earlier, later)
    window = slice(max(0, same - 20), same + 40)
    return ValueError(
        "template 'tokenizer': the chat template changes earlier turns when later ones are added, so that they cannot "
        f"be trained in one document: {earlier[window]!r} becomes {later[window]!r}"
    )

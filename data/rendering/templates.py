"""Chat templates by name: the constant texts around the messages of a conversation.

A template is data. `data/rendering/render.py` makes ids of it turn by turn.
"""

from __future__ import annotations

from typing import Any

from ...checkpoints.storage.messages import did_you_mean
from .chat_template import OWN, Template, own_template

__all__ = ["ALPACA_SYSTEM", "CHATML_JINJA", "OWN", "TEMPLATES", "VICUNA_SYSTEM", "Template", "get_template"]

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
        # FastChat's conversation of that name
        Template(
            name="vicuna-v1.1",
            start=f"{VICUNA_SYSTEM} USER: ",
            system=("", " USER: "),
            next="USER: ",
            middle=" ASSISTANT: ",
            end="{eos}",
        ),
        # Meta's chat_completion: every exchange between {bos} and {eos}, the system text inside the first
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
        # the `text` column of tatsu-lab/alpaca; later questions follow as further instructions
        Template(
            name="alpaca",
            start=f"{ALPACA_SYSTEM}\n\n### Instruction:\n",
            system=("", "\n\n### Instruction:\n"),
            next="\n\n### Instruction:\n",
            middle="\n\n### Response:\n",
            end="{eos}",
        ),
        # no words of its own: for translation, summaries and bare text
        Template(name="plain", start="", system=("", "\n"), next="", middle="\n", end="{eos}"),
        # T5's own: what the encoder reads ends as what the decoder writes; a system text is the task's prefix
        Template(name="t5", start="", system=("", " "), next="", middle="{eos}", end="{eos}"),
    )
}


CHATML_JINJA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""`chatml` as transformers and servers want it: a tokenizer's `chat_template`."""


def get_template(name: str, tokenizer: Any = None) -> Template:
    """The template of that name; `tokenizer` is asked for its own where the name is "tokenizer". Raises ValueError: no
    such template (the message gives the nearest name and all of them); a tokenizer without a chat template, or with one
    whose turns cannot be told apart."""
    if name == OWN:
        return own_template(tokenizer)
    if name not in TEMPLATES:
        known = [*TEMPLATES, OWN]
        raise ValueError(f"no template {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return TEMPLATES[name]

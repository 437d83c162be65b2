"""Fixtures with small real tokenizers of three kinds, and conversations with typical defects."""

from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.tokenizers import train_bpe
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [
    ("▁", "▁"),
    ("▁", "t"),
    ("▁t", "h"),
    ("▁th", "e"),
    ("▁", "U"),
    ("▁U", "S"),
    ("▁", "A"),
    ("h", "e"),
    ("l", "l"),
]


def sentencepiece_like(style: str) -> PreTrainedTokenizerFast:
    """Return a Llama-type tokenizer: "▁" for a space, bytes for unknown characters, `<s>` first.

    `style` determines where "▁" is added at the start of a text, like `legacy` and `add_prefix_space` in transformers:
    "always" adds it to every piece of text that does not begin with a space, "first" only at the start of a document,
    "prepend" to every piece, and "never" does not add it.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    tokens += ["".join(pair) for pair in MERGES]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab, MERGES, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if style != "prepend":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [] if style == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return fast


@pytest.fixture(scope="session", params=["bytes", "always", "first", "never", "prepend"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "bytes":
        text = ["The user asks and the assistant answers. USER: the ASSISTANT: hello there\nuser assistant system"]
        return train_bpe(text, 300, SPECIALS)
    return sentencepiece_like(request.param)


@pytest.fixture(scope="session")
def bpe() -> Any:
    text = "The user asks and the assistant answers.\nuser assistant system question answer number 0123456789"
    return train_bpe([text], 300, SPECIALS)


@pytest.fixture(scope="session")
def chats() -> list[Conversation]:
    """Return conversations with surrounding white space, other languages, and special-token strings."""
    talks = [
        ["hello", "the answer"],
        [" the ", "  indented\n    code", "then?\n", "\n\nlines first", "¿qué? 你好 😀", "très bien 👍 "],
        ["</s> <|im_end|> <s>", "<|im_start|>assistant\nno", "ASSISTANT: USER:", "</s>"],
        ["a" * 40, "b" * 60, "c", "d" * 30, "e" * 20, "f"],
    ]
    chats = [
        Conversation(f"chat-{i}", tuple(Turn(("user", "assistant")[j % 2], text) for j, text in enumerate(talk)))
        for i, talk in enumerate(talks)
    ]
    return [*chats, Conversation("with-system", (Turn("system", "Be kind."), *chats[0].turns))]

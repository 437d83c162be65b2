"""Do two tokenizers cut text alike? Compared by what they do with texts, added tokens and ends of sequences.

Pieces are compared by their texts, so that a token with another id is not reported again for every text it occurs in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ..storage.chat_templates import render_chat
from .sides import Finding, Side, both, refused, works_but

_TEXTS = (
    *("Hello, world!", "def f(x):\n    return  x\n\n\tif  x :\n        pass  ", "1234567890 3.14 -2e10 1,000"),
    *("'s 'll don't I'm", " leading and trailing ", "a" * 300, "!" * 40 + "=" * 70, "\u2581a \u2581\u2581b"),
    "na\u00efve nai\u0308ve \ufb01 \u2126 \uff21 \u00bd \u0627\u0644\u0639 \u4e2d\u6587 \ud55c\uae00 \u00e9",
    "\U0001f600\U0001f468\u200d\U0001f469 \u00a0\u3000\u200b\u2028\ufeff \x07 \r\n\r",
    *(" " * n + "x" + " " * n + "y" for n in (1, 2, 3, 4, 8, 15)),
)
_AROUND = ("a {} b", "a{}b", "a  {}  b", "\n{}\n", "x{}")
_FLAGS = attrgetter("lstrip", "rstrip", "single_word", "normalized", "special")
_TAILS = ("hello", " hello", "\nUSER: hello", "\n\n", "  x", "1")
_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is a draft? "},
    {"role": "assistant", "content": "A guess."},
    {"role": "user", "content": "And then?"},
)
_LEARNED = "prompts come from the target's tokenizer: if the drafter was trained with its own, it knows other ids"
_TEMPLATE = (
    "prompts come from the target's chat template: if the drafter was trained with its own, it drafts chats less well"
)


def tokenizer_findings(target: Side, drafter: Side) -> list[Finding]:
    """In what the tokenizers differ, except for their tokens and the special ones' ids; both sides have one."""
    mine, theirs = target.tokenizer, drafter.tokenizer
    shared = [*_ends(mine, theirs), *_vocabulary_type(mine, theirs), *_chat_template(mine, theirs)]
    return [*_encoding(target, drafter), *shared]


def _encoding(target: Side, drafter: Side) -> Iterator[Finding]:
    """The first text that they cut differently, and what they make of it from there on."""
    for text in _probes(target, drafter):
        mine, theirs = _pieces(target.tokenizer, text), _pieces(drafter.tokenizer, text)
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
            start = max(0, min(same, len(mine), len(theirs)) - 1)
            few, other = (" ".join(map(repr, side[start : start + 5])) for side in (mine, theirs))
            what = f"{_short(text)} is cut differently"
            yield Finding("encoding", what, few, other, works_but(_LEARNED))
            return


def _probes(target: Side, drafter: Side) -> Iterator[str]:
    """Texts; a longer text after the end of a turn; tokens that are found in a text before it is cut, within one."""
    yield from _TEXTS
    known = target.vocab.keys() & drafter.vocab.keys()
    mine: Any = target.tokenizer
    theirs: Any = drafter.tokenizer
    ends = mine.convert_ids_to_tokens(end_ids(target))
    yield from (end + tail for end in ends if end in known for tail in _TAILS)
    flags = [{one.content: _FLAGS(one) for one in each.added_tokens_decoder.values()} for each in (mine, theirs)]
    probed = set[Any]()  # of tokens that are treated alike on both sides one is enough; there may be thousands
    for token in flags[0] | flags[1]:
        pair = tuple(one.get(token) for one in flags)
        if token in known and (pair[0] != pair[1] or pair not in probed):
            probed.add(pair)
            yield from (around.format(token) for around in _AROUND)


def _pieces(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]


def _short(value: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def end_ids(side: Side) -> list[int]:
    """Ids that end a sequence, wherever the side says so."""
    found: list[int] = []
    for holder in (side.tokenizer, side.config, side.generation):
        value = getattr(holder, "eos_token_id", None)
        found += [] if value is None else value if isinstance(value, list) else [value]
    return list(dict.fromkeys(found))


def _ends(target: Any, drafter: Any) -> Iterator[Finding]:
    """Whether each puts its BOS before a text, and its EOS behind it."""
    mine, theirs = wrapping(target), wrapping(drafter)
    if mine != theirs:
        effects = works_but(_LEARNED) | refused("both must add BOS, or neither, and the same for EOS", "llama.cpp")
        values = both(lambda side: "adds " + (" and ".join(side) or "nothing"), mine, theirs)
        yield Finding("bos and eos around a text", "one adds what the other does not", *values, effects)


def wrapping(tokenizer: Any) -> list[str]:
    """Which of `bos` and `eos` a tokenizer puts around every text."""
    ids = list(tokenizer("a", verbose=False).input_ids)
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    adds = {"bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]}
    return [name for name, state in adds.items() if state and len(ids) > len(bare)]


def _vocabulary_type(target: Any, drafter: Any) -> Iterator[Finding]:
    mine, theirs = (_llama_cpp_type(tokenizer) for tokenizer in (target, drafter))
    if mine is not None and theirs is not None and mine != theirs:
        effects = refused(f"its vocabulary types differ, {mine} and {theirs}", "llama.cpp")
        yield Finding("vocabulary type", "llama.cpp has another type for each", mine, theirs, effects)


def _llama_cpp_type(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    if model["type"] == "BPE":
        return "SPM" if model.get("byte_fallback") else "BPE"
    return {"Unigram": "UGM", "WordPiece": "WPM"}.get(model["type"])


def _chat_template(target: Any, drafter: Any) -> Iterator[Finding]:
    """How a conversation is written, where both have a template."""
    if not getattr(target, "chat_template", None) or not getattr(drafter, "chat_template", None):
        return
    rendered = both(_rendered, target, drafter)
    if rendered[0] != rendered[1]:
        same = next((i for i, (a, b) in enumerate(zip(*rendered, strict=False)) if a != b), min(map(len, rendered)))
        values = both(lambda text: _short(text[max(0, same - 12) : same + 28]), *rendered)
        what = f"a conversation is written differently, from character {same} on"
        yield Finding("chat template", what, *values, works_but(_TEMPLATE))


def _rendered(tokenizer: Any) -> str:
    """A conversation as the template writes it, without its system text where that is refused."""
    problem = ""
    for messages in (_CHAT, _CHAT[1:]):
        try:
            return render_chat(tokenizer, messages, prompt=True)
        except ValueError as error:
            problem = f"({error})"
    return problem

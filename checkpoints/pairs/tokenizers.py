"""Do two tokenizers cut text alike? Compared by what they do, and by what they say of themselves.

Pieces are compared by their texts, so that a token with another id is not reported again for every text it occurs in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..storage.messages import shown
from .sides import BUT, CONSUMERS, REFUSED, Effect, Finding, Side, both

_TEXTS = (
    *("Hello, world!", "def f(x):\n    return  x\n\n\tif  x :\n        pass  ", "1234567890 3.14 -2e10 1,000"),
    *("'s 'll don't I'm", " leading and trailing ", "a" * 300, "!" * 40 + "=" * 70, "\u2581a \u2581\u2581b"),
    "na\u00efve nai\u0308ve \ufb01 \u2126 \uff21 \u00bd \u0627\u0644\u0639 \u4e2d\u6587 \ud55c\uae00 \u00e9",
    "\U0001f600\U0001f468\u200d\U0001f469 \u00a0\u3000\u200b\u2028\ufeff \x07 \r\n\r",
    *(" " * n + "x" + " " * n + "y" for n in (1, 2, 3, 4, 8, 15)),
)
_TAILS = ("hello", " hello", "\nUSER: hello", "\n\n", "  x", "1")
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_OPTIONS = ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens")
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is a draft? "},
    {"role": "assistant", "content": "A guess."},
    {"role": "user", "content": "And then?"},
)
_ONE_DAY = "26 Jul 2024"  # for templates that write today's date
_OF_TEMPLATES = (ValueError, TypeError, ArithmeticError, MemoryError, LookupError, AttributeError)
"""What a template ends in, beside jinja2's own errors: it is a program that somebody wrote."""
_LEARNED = Effect(
    BUT, "prompts come from the target's tokenizer: if the drafter was trained with its own, it knows other ids"
)
_TEMPLATE = Effect(
    BUT,
    "prompts come from the target's chat template: if the drafter was trained with its own, it drafts chats less well",
)


def tokenizer_findings(target: Side, drafter: Side) -> list[Finding]:
    """In what the tokenizers differ, except for their tokens and the special ones' ids; both sides have one."""
    mine, theirs = target.tokenizer, drafter.tokenizer
    found = [*_added_tokens(mine, theirs), *_after_end(target, drafter), *_encoding(mine, theirs)]
    found += [*_ends(mine, theirs), *_vocabulary_type(mine, theirs)]
    settings = setting_differences(mine, theirs)
    if settings and not any(finding.check in ("text after the end", "encoding") for finding in found):
        values = both(lambda place: "; ".join(f"{one[0]} {_short(one[place])}" for one in settings), 1, 2)
        found.append(Finding("tokenizer settings", "they differ, and no text of the probe shows it", *values))
    return [*found, *_chat_template(mine, theirs)]


def setting_differences(target: Any, drafter: Any) -> list[tuple[str, Any, Any]]:
    """Name, the target's and the drafter's value of each setting that is not the same."""
    mine, theirs = _settings(target), _settings(drafter)
    return [
        (name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)
    ]


def _settings(tokenizer: Any) -> dict[str, Any]:
    found = {name: getattr(tokenizer, name, tokenizer.init_kwargs.get(name)) for name in _OPTIONS}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        model = state["model"]
        found |= {f"model.{name}": model.get(name) for name in ("type", "merges", "byte_fallback", "ignore_merges")}
        found |= {name: state.get(name) for name in _PARTS}
    return {name: value for name, value in found.items() if value is not None or name in _PARTS}


def _pieces(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]


def _first_difference(target: Any, drafter: Any, texts: Iterable[str]) -> tuple[str, str, str] | None:
    """The first text that they cut differently, and what they make of it from there on."""
    for text in texts:
        mine, theirs = _pieces(target, text), _pieces(drafter, text)
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
            start = max(0, min(same, len(mine), len(theirs)) - 1)
            return text, _few(mine, start), _few(theirs, start)
    return None


def _few(pieces: list[str], start: int) -> str:
    return " ".join(map(repr, pieces[start : start + 5]))


def _causes(target: Any, drafter: Any) -> str:
    names = []
    for name, mine, theirs in setting_differences(target, drafter):
        if name == "model.merges" and mine and theirs:
            first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "the end")
            names.append(f"merges, from {first} on")
        elif isinstance(mine, (dict, list)) or isinstance(theirs, (dict, list)):
            names.append(name)
        else:
            names.append(f"{name} ({_short(mine)}, {_short(theirs)})")
    return f"; they differ in {', '.join(names)}" if names else ""


def _short(value: Any) -> str:
    text = shown(json.dumps(value, ensure_ascii=False))
    return "unset" if value is None else text if len(text) <= 60 else text[:57] + "…"


def _encoding(target: Any, drafter: Any) -> Iterator[Finding]:
    seen = _first_difference(target, drafter, _TEXTS)
    if seen is not None:
        text, mine, theirs = seen
        what = f"{_short(text)} is cut differently{_causes(target, drafter)}"
        yield Finding("encoding", what, mine, theirs, dict.fromkeys(CONSUMERS, _LEARNED))


def _after_end(target: Side, drafter: Side) -> Iterator[Finding]:
    """What follows an end of sequence or of a turn in the ids of a longer text."""
    mine, theirs = target.tokenizer, drafter.tokenizer
    assert mine is not None
    assert theirs is not None
    ends = mine.convert_ids_to_tokens(end_ids(target))
    known = [end for end in ends if end in mine.get_vocab() and end in theirs.get_vocab()]
    plain = [tail for tail in _TAILS if _pieces(mine, tail) == _pieces(theirs, tail)]  # others are `encoding`'s
    seen = _first_difference(mine, theirs, (end + tail for end in known for tail in plain))
    if seen is not None:
        text, one, other = seen
        what = f"{_short(text)} is cut differently, its parts are not{_causes(mine, theirs)}"
        yield Finding("text after the end", what, one, other, dict.fromkeys(CONSUMERS, _LEARNED))


def end_ids(side: Side) -> list[int]:
    """Ids that end a sequence, wherever the side says so."""
    found: list[int] = []
    for holder in (side.tokenizer, side.config, side.generation):
        value = getattr(holder, "eos_token_id", None)
        found += [] if value is None else value if isinstance(value, list) else [value]
    return list(dict.fromkeys(found))


def _added_tokens(target: Any, drafter: Any) -> Iterator[Finding]:
    """Tokens that are found in a text before it is cut, and their flags."""
    mine, theirs = (_flags(tokenizer) for tokenizer in (target, drafter))
    known = set(target.get_vocab()) & set(drafter.get_vocab())
    differing = [text for text in {**mine, **theirs} if text in known and mine.get(text) != theirs.get(text)]
    if not differing:
        return
    first = differing[0]
    probes = (f"a {first} b", f"a{first}b", f"a  {first}  b", f"\n{first}\n", first.upper(), f"x{first}")
    seen = _first_difference(target, drafter, probes)
    effect = "no text of the probe shows it" if seen is None else f"so {_short(seen[0])} is cut differently"
    values = both(lambda side: "; ".join(f"{text!r}: {_named(side.get(text))}" for text in differing[:3]), mine, theirs)
    what = f"{len(differing)} {'tokens have' if len(differing) > 1 else 'token has'} other flags; {effect}"
    yield Finding("added tokens", what, *values, {} if seen is None else dict.fromkeys(CONSUMERS, _LEARNED))


def _flags(tokenizer: Any) -> dict[str, dict[str, bool]]:
    added = tokenizer.added_tokens_decoder.values()
    return {token.content: {flag: bool(getattr(token, flag)) for flag in _FLAGS} for token in added}


def _named(flags: dict[str, bool] | None) -> str:
    if flags is None:
        return "not added"
    return ", ".join(flag for flag, state in flags.items() if state) or "no flags"


def _ends(target: Any, drafter: Any) -> Iterator[Finding]:
    """Whether each puts its BOS before a text, and its EOS behind it."""
    mine, theirs = (_wrapping(tokenizer) for tokenizer in (target, drafter))
    if mine == theirs:
        return
    effects = dict.fromkeys(CONSUMERS, _LEARNED)
    effects["llama.cpp"] = Effect(REFUSED, "both must add BOS, or neither, and the same for EOS")
    values = both(lambda side: "adds " + (" and ".join(side) or "nothing"), mine, theirs)
    yield Finding("bos and eos around a text", "one adds what the other does not", *values, effects)


def _wrapping(tokenizer: Any) -> list[str]:
    ids = list(tokenizer("a", verbose=False).input_ids)
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False).input_ids)
    if len(ids) == len(bare):
        return []
    adds = {"bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]}
    return [name for name, state in adds.items() if state]


def wrapped_by(tokenizer: Any, name: str) -> bool:
    """Whether it puts its `bos` before every text, or its `eos` behind."""
    return name in _wrapping(tokenizer)


def _vocabulary_type(target: Any, drafter: Any) -> Iterator[Finding]:
    mine, theirs = (_llama_cpp_type(tokenizer) for tokenizer in (target, drafter))
    if mine != theirs and None not in (mine, theirs):
        effect = Effect(REFUSED, f"its vocabulary types differ, {mine} and {theirs}")
        yield Finding(
            "vocabulary type", "llama.cpp has another type for each", str(mine), str(theirs), {"llama.cpp": effect}
        )


def _llama_cpp_type(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    if model["type"] == "BPE":
        return "SPM" if model.get("byte_fallback") else "BPE"
    return {"Unigram": "UGM", "WordPiece": "WPM"}.get(model["type"])


def _chat_template(target: Any, drafter: Any) -> Iterator[Finding]:
    mine, theirs = (getattr(tokenizer, "chat_template", None) for tokenizer in (target, drafter))
    if mine == theirs:
        return
    if not mine or not theirs:
        values = both(lambda one: "none" if not one else "one", mine, theirs)
        yield Finding("chat template", "only one of them has one", *values)
        return
    rendered = both(_rendered, target, drafter)
    if rendered[0] == rendered[1]:
        return
    same = next((i for i, (a, b) in enumerate(zip(*rendered, strict=False)) if a != b), min(map(len, rendered)))
    values = both(lambda text: _short(text[max(0, same - 12) : same + 28]), *rendered)
    what = f"a conversation is written differently, from character {same} on"
    yield Finding("chat template", what, *values, dict.fromkeys(CONSUMERS, _TEMPLATE))


def _rendered(tokenizer: Any) -> str:
    """A conversation as the template writes it, without its system text where that is refused."""
    from jinja2 import TemplateError

    problem = ""
    for messages in (_CHAT, _CHAT[1:]):
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, date_string=_ONE_DAY
                )
            )
        except (TemplateError, *_OF_TEMPLATES) as error:
            problem = f"(cannot be rendered: {str(error) or type(error).__name__})"
    return problem

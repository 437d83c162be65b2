"""A drafter of another tokenizer brought to its target's tokens.

It proposes the tokens alone that both have: its distribution over those, which no exact verifier minds (token-level
intersection: Timor et al. 2025, arXiv 2502.05202). Of a token that it lacks it reads the mean of the embeddings of the
tokens that it would write it with (fast vocabulary transfer: Gee et al. 2022, arXiv 2402.09977).
"""

from __future__ import annotations

import json
from typing import Any

Row = int | tuple[int, ...] | None
"""A row of the drafter; the mean of some; or None: nothing is known of it."""


def translated(target: Any, drafter: Any, rows: int) -> list[Row] | None:
    """For each id of the target's tokenizer the drafter's row that means the same, or its rows that together do, of so
    many. None where a tokenizer is of a kind whose tokens' bytes are not known here."""
    mine, theirs = _bytes_of(target), _bytes_of(drafter)
    if mine is None or theirs is None:
        return None
    numbers = {text: number for number, text in sorted(theirs.items(), reverse=True) if number < rows}
    same = {number: numbers[text] for number, text in mine.items() if text in numbers}
    special = {str(text): number for text, number in drafter.get_vocab().items() if number not in theirs}
    for text, number in target.get_vocab().items():
        if number not in mine and special.get(str(text), rows) < rows:
            same[number] = special[str(text)]
    for role in ("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id"):
        number, other = getattr(target, role), getattr(drafter, role)
        if number is not None and other is not None and other < rows:
            same.setdefault(number, other)
    longest = max(map(len, numbers), default=0)
    found: list[Row] = [None] * (max(target.get_vocab().values()) + 1)
    for text, number in target.get_vocab().items():
        found[number] = (
            same.get(number) if number in same else _cut(mine.get(number, str(text).encode()), numbers, longest)
        )
    return found


def _cut(text: bytes, numbers: dict[bytes, int], longest: int) -> Row:
    """The longest known beginning, again and again; None where there is none."""
    found, at = [], 0
    while at < len(text):
        size = next((n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in numbers), 0)
        if not size:
            return None
        found.append(numbers[text[at : at + size]])
        at += size
    return tuple(found) or None


def _bytes_of(tokenizer: Any) -> dict[int, bytes] | None:
    """What each token but the special ones writes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    kinds = {part.get("type") for part in _parts(state.get("pre_tokenizer")) + _parts(state.get("decoder"))}
    model = state.get("model", {})
    if "ByteLevel" in kinds:
        letters = _byte_letters()
    elif model.get("type") in ("BPE", "Unigram") and (model.get("byte_fallback") or "Metaspace" in kinds):
        letters = None
    else:
        return None
    special = {token["id"] for token in state["added_tokens"] if token["special"]}
    plain = {token["id"]: token["content"].encode() for token in state["added_tokens"] if not token["special"]}
    found: dict[int, bytes] = {}
    of_bytes: dict[int, bytes] = {}
    for text, number in tokenizer.get_vocab().items():
        if number not in special:
            is_byte = letters is None and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
            (of_bytes if is_byte else found)[number] = plain.get(number) or _written(text, letters)
    letters_alone = set(found.values())  # a letter that is a token is never written by its bytes
    found |= {number: text for number, text in of_bytes.items() if text not in letters_alone}
    return {number: text for number, text in found.items() if text}


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A step of a tokenizer, or the steps that it is a sequence of."""
    if step is None:
        return []
    return [step, *step.get("pretokenizers", []), *step.get("decoders", [])]


def _written(text: str, letters: dict[str, int] | None) -> bytes:
    if letters is not None:
        return bytes(letters[letter] for letter in text) if all(letter in letters for letter in text) else text.encode()
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The bytes by the letters that stand for them in byte-level tokenizers, since GPT-2's: themselves if they can be
    seen, else those from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}

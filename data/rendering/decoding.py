"""Ids to text, in pieces that say what they say in their place."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import numpy as np

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class PieceDecoder:
    """Decodes pieces from the middle of documents, special tokens and all."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # behind another token, because a decoder takes the space off the start of a text
        self._anchor = list(tokenizer("a", add_special_tokens=False).input_ids)
        self._anchor_text = self._plain([self._anchor])[0]

    def decode(self, pieces: list[list[int]]) -> list[str]:
        """The text of each piece."""
        return [text.removeprefix(self._anchor_text) for text in self._plain([self._anchor + ids for ids in pieces])]

    def careful(self, ids: list[int]) -> str:
        """The text of a piece that may begin or end inside a character.

        A decoder gives up all of a row of byte tokens ("<0xE4>") for one broken character; here only that is lost.
        """
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        texts = []
        for is_byte, group in groupby(
            zip(map(str, tokens), ids, strict=True), lambda pair: bool(_BYTE.fullmatch(pair[0]))
        ):
            members = list(group)
            if is_byte:
                texts.append(bytes(int(token[3:5], 16) for token, _ in members).decode("utf-8", "replace"))
            else:
                texts += self.decode([[number for _, number in members]])
        return "".join(texts)

    def round_trip(self, text: str) -> str:
        """A text as the tokenizer gives it back: the same, unless it changes texts (normal forms, unknown words)."""
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return self.decode([list(encoded.input_ids)])[0]

    def _plain(self, pieces: list[list[int]]) -> list[str]:
        if self._backend is not None:
            return list(self._backend.decode_batch(pieces, skip_special_tokens=False))
        return [decoded(self._tokenizer, ids) for ids in pieces]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of a whole document."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def alike(one: str, other: str) -> int:
    """How many characters two texts share at their beginnings."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def vocabulary_size(tokenizer: Any) -> int:
    """How many ids there are; with gaps between added tokens, more than there are tokens."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def special_flags(tokenizer: Any) -> np.ndarray:
    """Flags bool [vocabulary]: special tokens that no text is encoded to (as unknown characters are to `unk`)."""
    flags = np.zeros(vocabulary_size(tokenizer), dtype=bool)
    flags[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        flags[unknown] = False
    return flags

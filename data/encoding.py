"""Text pieces to ids such that pieces joined as ids say what the same pieces joined as text say.

Tokenizers differ in what they do at the start of a text. Byte-level BPE does nothing. A sentencepiece model puts a
space ("▁") before it, always or unless there is one. A piece in the middle of a document must allow for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SENTINEL = "\n"


class PieceEncoder:
    """Encodes pieces as plain text (special-token strings in them stay text) and knows the special ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bare, spaced = self.plain(["a", " a"])
        starts_word = tokenizer.convert_ids_to_tokens(bare)[0].startswith(("▁", "Ġ"))
        self._always_adds_space = starts_word and bare != spaced
        self._adds_space = starts_word
        self._sentinel = self.plain([_SENTINEL])[0] if starts_word else []
        bos = tokenizer.bos_token_id
        with_specials = list(tokenizer("a").input_ids)
        adds_bos = bos is not None and with_specials[:1] == [bos] and bare[:1] != [bos]
        self.bos: list[int] = [bos] if adds_bos else []

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text by itself, as at the start of a document (without special tokens)."""
        if not texts:
            return []
        # a fast tokenizer keeps its own batches on all cores; the other arguments save it work that nobody reads
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(encoded["input_ids"])

    def continuing(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text in the middle of a document after one space, which the ids include."""
        if self._always_adds_space:
            return self.plain(texts)
        return self.plain([f" {text}" for text in texts])

    def unprefixed(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text in the middle of a document with nothing before it."""
        if not self._adds_space:
            return self.plain(texts)
        # encoded behind a line break, whose ids are then taken off, the text gets no "▁" of its own
        skip = len(self._sentinel)
        encoded = self.plain([_SENTINEL + text for text in texts])
        for number, ids in enumerate(encoded):
            if ids[:skip] == self._sentinel:
                encoded[number] = ids[skip:]
            else:  # the line break merged with what follows it
                encoded[number] = self.plain([texts[number]])[0]
        return encoded

    def constant(self, text: str) -> list[int]:
        """Ids of a template's own text by itself; [] for ""."""
        return self.plain([text])[0] if text else []

    def after_special(self, special: str, text: str) -> list[int]:
        """Ids of a template's own `text` as the tokenizer writes it behind the special token `special`."""
        if not text:
            return []
        ids = list(self._tokenizer(special + text, add_special_tokens=False, split_special_tokens=False).input_ids)
        assert ids[0] == self._tokenizer.convert_tokens_to_ids(special), (special, ids)
        return ids[1:]

    def special_id(self, text: str, template: str) -> int:
        """The id of a special token by its text.

        Raises:
            ValueError: the tokenizer does not hold `text` as one special token.
        """
        number = self._tokenizer.get_vocab().get(text)
        added = self._tokenizer.added_tokens_decoder
        if number is None or number not in added or not added[number].special:
            raise ValueError(f"template {template} needs {text} as one special token, which this tokenizer lacks")
        return int(number)

    def eos_id(self, template: str) -> int:
        """The end-of-sequence id.

        Raises:
            ValueError: the tokenizer has none.
        """
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"template {template} ends an answer with the end-of-sequence token; this tokenizer has none"
            )
        return int(self._tokenizer.eos_token_id)

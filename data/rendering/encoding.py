"""Tokenization of text in pieces. The concatenated ids are equal to the ids of the whole text.

Some sentencepiece tokenizers add a space ("▁") before a text, depending on the preceding text (options `legacy` and
`add_prefix_space` in transformers). The encoding of a piece therefore depends on the kind of preceding text (`After`).

Shape suffixes: T tokens.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np

_SENTINEL = "\n"
_NOTHING = np.empty(0, dtype=np.int32)
_LEADS = ("", " ", "  ", "    ", "\n", "\t", "\n\n    ", "a ", "1")
# Texts for checking that sentencepiece and the tokenizer return the same ids.
_PROBES = (
    *("", " ", "def f(x):\n    return  x\n\n\tif  x :\n        pass  ", "1234567890 3.14 -2e10", "'s 'll don't I'm"),
    *("</s> <s> <unk> <0x0A> <|im_end|>", "\u2581a \u2581\u2581b", "a" * 300, "!" * 40 + "=" * 70 + "-" * 33),
    "na\u00efve nai\u0308ve \ufb01 \u2126 \uff21 \u00bd \u1e9b\u0323 \u0627\u0644\u0639 \u4e2d\u6587 \ud55c\uae00",
    "\U0001f600\U0001f468\u200d\U0001f469 \u00a0\u3000\u200b\u2028\ufeff \u0000 \x07 \r\n\r",
    *(" " * n + "x" for n in range(1, 40)),
    *("y" + " " * n for n in (1, 2, 3, 7, 17, 33)),
)


class After(Enum):
    """Kind of the text before a piece, which affects how the piece is tokenized."""

    NOTHING = "nothing"  # the piece is at the start of the document
    SPECIAL = "special"  # a special token
    SPACE = "space"  # other text and one space, which is encoded with the piece
    TEXT = "text"  # other text without a space


def special_strings(tokenizer: Any) -> list[str]:
    """Return the strings of all special tokens."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def first_token(text: str, tokenizer: Any) -> tuple[int, int]:
    """Return the span of the first special token in a text, or of the first added token if there is none.

    Some fine-tuned models have an `<|im_end|>` that is not special. The span is (-1, -1) if no token is found.
    """
    tokens = (token.content for token in tokenizer.added_tokens_decoder.values())
    added = [token for token in tokens if len(token.strip()) > 2]  # excludes runs of white space
    for known in (special_strings(tokenizer), added):
        if places := [(text.find(token), -len(token)) for token in known if token in text]:
            start, length = min(places)
            return start, start - length
    return -1, -1


class PieceEncoder:
    """Tokenizer of text pieces that encodes the strings of special tokens as ordinary text.

    If `own` is True, the tokenizer's backend is copied, so that another thread can use the original.
    """

    def __init__(self, tokenizer: Any, *, own: bool = False) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if own and self._backend is not None:
            self._backend = type(self._backend).from_str(self._backend.to_str())
        self._pieces: Callable[[list[str]], list[np.ndarray]] | None = None
        bare, spaced = (ids.tolist() for ids in self._encode_raw(["a", " a"]))
        starts_word = tokenizer.convert_ids_to_tokens(bare)[0].startswith(("▁", "Ġ"))
        self._always_adds_space = starts_word and bare != spaced
        self._adds_space = starts_word
        self._sentinel = self._encode_raw([_SENTINEL])[0].tolist() if starts_word else []
        self._adds_space_after_special = starts_word and self._probe_after_special(bare)
        self._pieces = self._sentencepiece()
        bos = tokenizer.bos_token_id
        with_specials = list(tokenizer("a").input_ids)
        adds_bos = bos is not None and with_specials[:1] == [bos] and bare[:1] != [bos]
        self.bos: list[int] = [bos] if adds_bos else []

    def encode(self, texts: Sequence[str], after: Sequence[After]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize pieces that follow texts of kinds `after`. Return ids, int32 [T], and piece boundaries, int64."""
        encoded = self._encode_raw([self._prepared(*piece) for piece in zip(texts, after, strict=True)])
        if self._adds_space:
            for number, before in enumerate(after):
                if self._is_bare(before):
                    encoded[number] = self._without_sentinel(encoded[number], texts[number])
        starts = np.fromiter(accumulate(map(len, encoded), initial=0), np.int64, len(encoded) + 1)
        return np.concatenate([_NOTHING, *encoded]), starts

    def one(self, text: str, after: After) -> list[int]:
        """Return the token ids of a single piece; an empty list for an empty string."""
        return list(self.encode([text], [after])[0].tolist()) if text else []

    def template(self, text: str, before: str = "") -> list[int]:
        """Tokenize a constant template text, including special tokens, as if it followed the token `before`."""
        if not text:
            return []
        ids = list(self.tokenizer(before + text, add_special_tokens=False, split_special_tokens=False).input_ids)
        if not before:
            return ids
        assert ids[0] == self.tokenizer.convert_tokens_to_ids(before), (before, ids)
        return ids[1:]

    def _encode_raw(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids (int32) of texts at the start of a document, without adding special tokens."""
        if not texts:
            return []
        if self._pieces is not None and len(texts) > 1:
            return self._pieces(texts)
        if self._backend is None:
            encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
            return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        # Calling the backend directly is faster. transformers sets the same options.
        if not self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = True
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _sentencepiece(self) -> Callable[[list[str]], list[np.ndarray]] | None:
        """Return a faster encoder that uses sentencepiece, or None if its ids differ from the tokenizer's."""
        file = getattr(self.tokenizer, "sentencepiece_file", None)
        if file is None or self._backend is None:
            return None
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=file)
        skip = 0 if self._always_adds_space else 1  # the space that some models add before every text

        def encode(texts: list[str]) -> list[np.ndarray]:
            bare = [text[skip:] if text.startswith(" ") else text for text in texts]
            encoded = list(processor.encode(bare, num_threads=-1, return_type="numpy"))
            for number, text in enumerate(bare):
                if not text or text[0] == "\u2581":  # the added space depends on the model for these
                    encoded[number] = self._encode_raw([texts[number]])[0]
            return encoded

        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        probes = [lead + text for lead in _LEADS for text in (*_PROBES, *added, *(f"a{text} b" for text in added))]
        same = all(np.array_equal(*pair) for pair in zip(encode(probes), self._encode_raw(probes), strict=True))
        return encode if same else None

    def _prepared(self, text: str, after: After) -> str:
        if after is After.SPACE and not self._always_adds_space:
            return " " + text
        if self._adds_space and self._is_bare(after):
            # With a line break before it, the text gets no "▁". The ids of the line break are removed later.
            return _SENTINEL + text
        return text

    def _is_bare(self, after: After) -> bool:
        """Check if the tokenizer must not add a space before a piece that follows text of kind `after`."""
        return after is After.TEXT or (after is After.SPECIAL and not self._adds_space_after_special)

    def _without_sentinel(self, ids: np.ndarray, text: str) -> np.ndarray:
        skip = len(self._sentinel)
        # If the line break has merged with the text, encode only the text.
        return ids[skip:] if ids[:skip].tolist() == self._sentinel else self._encode_raw([text])[0]

    def _probe_after_special(self, bare: list[int]) -> bool:
        special = self.tokenizer.eos_token or self.tokenizer.bos_token
        return special is None or self.template("a", special) == bare

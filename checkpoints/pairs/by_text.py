"""Translation of token ids between the tokenizers of target and drafter, by decoding to text and re-encoding."""

from collections.abc import Sequence
from typing import Any

_TAIL = 8
"""Number of context tokens that are re-encoded with a draft, because they affect its tokenization."""
_UNFINISHED = "\ufffd"
"""Replacement character that incomplete UTF-8 sequences are decoded to."""


class TextTranslation:
    """Implementation of `decode.proposers.by_text.Translation` for two tokenizers. Special tokens are ignored."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._target, self._drafter = target, drafter
        begins = drafter.bos_token_id
        self._begins = [] if begins is None else [begins]
        self._least = self._begins or [drafter.eos_token_id if drafter.eos_token_id is not None else 0]

    def to_drafter(self, ids: Sequence[int]) -> list[int]:
        text = self._text(self._target, ids).rstrip(_UNFINISHED)
        return [*self._begins, *self._drafter(text, add_special_tokens=False, verbose=False).input_ids] or self._least

    def to_target(self, ids: Sequence[int], own: Sequence[int], draft: Sequence[int]) -> list[int]:
        tail, before = self._text(self._target, ids[-_TAIL:]), self._text(self._drafter, own[-_TAIL:])
        written = self._text(self._drafter, [*own[-_TAIL:], *draft])
        if tail.endswith(_UNFINISHED) or not written.startswith(before):
            return []
        more = written[len(before) :].rstrip(_UNFINISHED)
        cut = self._target(tail + more, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [number for number, (_, end) in enumerate(cut.offset_mapping) if end > len(tail)]
        if starts and cut.offset_mapping[starts[0]][0] >= len(tail):
            return list(cut.input_ids[starts[0] :])
        # a token spans the border of context and draft, so the draft is encoded separately
        return list(self._target(more, add_special_tokens=False, verbose=False).input_ids)

    def _text(self, tokenizer: Any, ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

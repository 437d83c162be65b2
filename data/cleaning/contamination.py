"""Is a text part of an evaluation set? Runs of words, whatever their case and punctuation, looked up by hash."""

from __future__ import annotations

import re
from collections.abc import Iterable

FIRST_WORDS = 4
# Chinese, Japanese and Korean write without spaces, or with few: there each character counts as a word.
CHARACTERS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
WORD = re.compile(rf"[{CHARACTERS}]|[^\W{CHARACTERS}]+")


class EvaluationTexts:
    """An index of evaluation texts: about 160 bytes a word.

    A text is found by any run of `run_words` of its words, or, where it is shorter than that, by all of its words in a
    row. One of fewer than `FIRST_WORDS` words ("flashlight") is found only where nothing else is said.
    """

    def __init__(self, texts: Iterable[str], run_words: int) -> None:
        self._whole: set[int] = set()
        self._starts: set[int] = set()
        self._runs: dict[int, set[int]] = {}
        for words in map(_words, texts):
            if len(words) < FIRST_WORDS:
                self._whole.add(hash(tuple(words)))
                continue
            length = min(run_words, len(words))
            runs = self._runs.setdefault(length, set())
            for start in range(len(words) - length + 1):
                runs.add(hash(tuple(words[start : start + length])))
                self._starts.add(hash(tuple(words[start : start + FIRST_WORDS])))
        self._whole.discard(hash(()))

    def found_in(self, text: str) -> bool:
        """True where `text` holds one of the evaluation texts, or a run of one."""
        words = _words(text)
        if len(words) < FIRST_WORDS:
            return hash(tuple(words)) in self._whole
        starts = map(hash, zip(words, words[1:], words[2:], words[3:], strict=False))
        return any(
            hash(tuple(words[i : i + length])) in runs
            for i, start in enumerate(starts)
            if start in self._starts
            for length, runs in self._runs.items()
        )


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())

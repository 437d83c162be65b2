"""What the linter finds: the names of faults and notices, the report, and a document shown in colour."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .decoding import alike, decoded, special_flags, vocabulary_size
from .render import Rendered

if TYPE_CHECKING:
    from rich.text import Text

NOTHING_TRAINED = "nothing trained"
EVERYTHING_TRAINED = "everything trained"  # but for a first token, which nothing predicts; right for bare text alone
USER_TEXT_TRAINED = "user text trained"  # or the template's, or the system's: whatever the assistant did not say
ANSWER_DIFFERS = "answer differs"  # an answer is not trained whole, or is not the conversation's
MISSING_END = "missing end of turn"  # the end of an answer that was not cut is not there, or not trained
SPECIAL_TOKEN_INSIDE = "special token inside a message"
OUTSIDE_VOCABULARY = "token outside the vocabulary"
CONTEXT_DIFFERS = "context differs"  # around right answers stands something else than questions and template
BROKEN_SPANS = "broken spans"  # empty, overlapping, out of order or outside the document
FAULTS = (
    NOTHING_TRAINED,
    EVERYTHING_TRAINED,
    USER_TEXT_TRAINED,
    ANSWER_DIFFERS,
    MISSING_END,
    SPECIAL_TOKEN_INSIDE,
    OUTSIDE_VOCABULARY,
    CONTEXT_DIFFERS,
    BROKEN_SPANS,
)
ANSWER_CUT = "answer cut"
QUESTION_CUT = "question cut"
SPECIAL_TOKEN_TEXT = "special-token text"  # such as "</s>" in what a user typed, which stays text
EMPTY_ANSWER = "empty answer"
NOTICES = (ANSWER_CUT, QUESTION_CUT, SPECIAL_TOKEN_TEXT, EMPTY_ANSWER)

TRAINED_STYLE, SPECIAL_STYLE, TRAINED_SPECIAL_STYLE = "bold green", "dim", "dim green"

_EXAMPLE_IDS = 5
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(slots=True)
class LintReport:
    """What was found in documents. `clean` of them have no fault; notices are counted, and are no faults.

    `examples` holds the ids of the first five conversations of each finding.
    """

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    clean: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def clean_share(self) -> float | None:
        """Documents without faults ÷ documents; None where there are none."""
        return self.clean / self.documents if self.documents else None

    @property
    def trained_share(self) -> float | None:
        """Trained tokens ÷ tokens; None where there are none."""
        return self.trained_tokens / self.tokens if self.tokens else None

    def merge(self, other: LintReport) -> None:
        """Add the counts of other documents (of another rank, another worker)."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.clean += other.clean
        self.findings.update(other.findings)
        for name, ids in other.examples.items():
            self._add_examples(name, ids)

    def add(self, document: Rendered, findings: Iterable[str]) -> None:
        """Count one document with its findings."""
        findings = tuple(findings)
        self.documents += 1
        self.tokens += len(document.ids)
        if BROKEN_SPANS in findings:
            self.trained_tokens += int(document.trainable().sum())
        else:
            self.trained_tokens += sum([end - start for start, end in document.spans])
        self.clean += not (findings and any(name in FAULTS for name in findings))
        for name in findings:
            self.findings[name] += 1
            self._add_examples(name, [document.conversation.id])

    def failures(self, min_clean_share: float, min_trained_share: float) -> list[str]:
        """What lies below its floor, a message each with both numbers; [] where all is well.

        Raises:
            ValueError: a floor that is not between 0 and 1.
        """
        messages = []
        for title, name, share, floor, counts in (
            ("documents without faults", "min_clean_share", self.clean_share, min_clean_share, self._of_documents()),
            ("trained tokens", "min_trained_share", self.trained_share, min_trained_share, self._of_tokens()),
        ):
            if not 0.0 <= floor <= 1.0:
                raise ValueError(f"{name} is {floor}, expected a share between 0 and 1")
            if share is None and floor > 0:
                messages.append(f"{title}: there are no documents, the floor is {100 * floor:.6g} %")
            elif share is not None and share < floor:
                messages.append(f"{title}: {100 * share:.6g} % ({counts}), the floor is {100 * floor:.6g} %")
        return messages

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        found = {
            kind: {
                name: {"documents": self.findings[name], "examples": list(self.examples[name])}
                for name in names
                if self.findings[name]
            }
            for kind, names in (("faults", FAULTS), ("notices", NOTICES))
        }
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "trained_share": self.trained_share,
            "clean": self.clean,
            "clean_share": self.clean_share,
            **found,
        }

    def summary(self) -> str:
        """One line: `120 documents, 90,112 tokens, 61.0 % trained; 2 documents with faults (2 answer differs); …`."""
        share = "none" if self.trained_share is None else f"{self.trained_share:.1%}".replace("%", " %")
        parts = [f"{self.documents:,} documents, {self.tokens:,} tokens, {share} trained"]
        faulty = self.documents - self.clean
        parts.append(f"{faulty:,} documents with faults{self._listed(FAULTS)}" if faulty else "no faults")
        if any(self.findings[name] for name in NOTICES):
            parts.append(f"notices{self._listed(NOTICES)}")
        return "; ".join(parts)

    def _listed(self, names: Sequence[str]) -> str:
        return " (" + ", ".join(f"{self.findings[n]:,} {n}" for n in names if self.findings[n]) + ")"

    def _of_documents(self) -> str:
        return f"{self.clean:,} of {self.documents:,}"

    def _of_tokens(self) -> str:
        return f"{self.trained_tokens:,} of {self.tokens:,}"

    def _add_examples(self, name: str, ids: Iterable[str]) -> None:
        kept = self.examples.setdefault(name, [])
        for conversation_id in ids:
            if len(kept) < _EXAMPLE_IDS and conversation_id not in kept:  # parts of one conversation are one example
                kept.append(conversation_id)


def colour(document: Rendered, tokenizer: Any, *, max_characters: int = 4000) -> Text:
    """The text of a document with trained tokens in green and special tokens dim, to be printed with rich.

    It is the text that decoding all ids gives, with control characters as their pictures ("␛"). Of one over
    `max_characters` the middle is left out, with a mark "… 812 tokens …" there. Ids outside the vocabulary are not
    shown.

    Raises:
        ValueError: `max_characters` below 2.
    """
    from rich.text import Text

    if max_characters < 2:
        raise ValueError(f"max_characters is {max_characters}, expected at least 2")
    known = (document.ids >= 0) & (document.ids < vocabulary_size(tokenizer))
    ids, trained = document.ids[known].tolist(), document.trainable()[known]
    style = trained + 2 * special_flags(tokenizer)[ids]
    whole = decoded(tokenizer, ids)

    def place(tokens: int) -> int:
        # a character whose tokens are of two styles has that of the last
        return alike(whole, decoded(tokenizer, ids[:tokens]))

    bounds = [0, *(np.flatnonzero(np.diff(style)) + 1).tolist(), len(ids)]
    hidden = (len(ids), len(ids))
    if len(whole) > max_characters:
        first = bisect_left(range(len(ids)), max_characters // 2 + 1, key=place) - 1
        then = bisect_left(range(len(ids)), len(whole) - max_characters // 2, key=place)
        hidden = (max(0, first), then)
        bounds = sorted({*bounds, *hidden})
    text = Text()
    styles = ("", TRAINED_STYLE, SPECIAL_STYLE, TRAINED_SPECIAL_STYLE)
    for start, end in pairwise(bounds):
        if start == hidden[0] < end:
            text.append(f"… {hidden[1] - hidden[0]:,} tokens …", "reverse")
        if not hidden[0] <= start < hidden[1] and start < end:
            last = len(whole) if end == len(ids) else place(end)
            text.append(whole[place(start) : last].translate(_VISIBLE), styles[style[start]])
    return text

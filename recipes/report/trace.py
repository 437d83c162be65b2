"""Rendering of a trace on the terminal, one line per step (figure 1 of Leviathan et al., arXiv 2211.17192).

Each token is shown as accepted, rejected, corrected, added or cut off. Without colours, tokens carry marks:
`»[-rejected-]{+corrected+}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ...checkpoints.storage.messages import pictured

if TYPE_CHECKING:  # Reports are made without the libraries that decode.
    from ...decode.evaluation.trace import TracedStep

_KINDS = {
    "accepted": ("green", "", "", "drafted and kept; ◌: a part of a character"),
    "rejected": ("red strike", "[-", "-]", "drafted and rejected; +2: two more siblings rejected"),
    "corrected": ("bold blue", "{+", "+}", "the target's own token in place of it"),
    "added": ("cyan underline", "{", "}", "the target's token after an accepted or empty draft"),
    "cut": ("dim", "(", ")", "accepted, but after the end of the text: a stop token or the limit"),
}
"""Style, marks and meaning of each kind of token."""
_SHOWN = str.maketrans({"\n": "↵", "\t": "⇥"})
_BEFORE = 60
"""Number of characters of the preceding text shown before a step."""


class TokenTexts:
    """Incremental detokenizer: the text that each token adds after the ids `before`.

    If a token ends inside a character, the character belongs to the token that completes it. Joined, with `rest` at the
    end, the texts are those of all ids together.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = list(before)[-8:]
        self._open: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty while a character is unfinished."""
        text = self._added([*self._open, token])
        if text.endswith("\ufffd"):
            self._open.append(token)
            return ""
        self._settled, self._open = [*self._open, token], []
        return text

    def would_add(self, token: int) -> str:
        """Return the text of a token that is not kept; an unfinished character is U+FFFD."""
        return self._added([*self._open, token])

    def rest(self) -> str:
        """Return the unfinished end of the text: part of a character, or a U+FFFD of the text itself."""
        return self._added(self._open) if self._open else ""

    def _added(self, ids: list[int]) -> str:
        return self._decode([*self._settled, *ids])[len(self._decode(self._settled)) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def visible(text: str) -> str:
    """Replace line ends and control characters by pictures."""
    return pictured(text.translate(_SHOWN))


def legend(marks: bool) -> Text:
    """Return the line that explains styles or marks."""
    line = Text("legend: ")
    for kind, (style, start, end, meaning) in _KINDS.items():
        line.append(f"{start}{kind}{end}" if marks else kind, style).append(f" ({meaning})  ", "dim")
    return line


def trace_lines(steps: Sequence[TracedStep], tokenizer: Any, prompt: Sequence[int], marks: bool) -> list[Text]:
    """Return a line per step and a summary.

    A step's line has its number, accepted and proposed tokens, the end of the text before it, and its tokens; of
    several rejected or cut tokens only the first, with the number of the others.
    """
    texts, before, kept = TokenTexts(tokenizer, prompt), "", 0
    lines = []
    for number, step in enumerate(steps, 1):
        tail = visible(before)
        line = Text(f"{number:4} {len(step.accepted):2}/{step.proposed:<3}", no_wrap=False)
        line.append(("…" + tail[-_BEFORE:]) if len(tail) > _BEFORE else tail, "dim").append("»" if marks else "")
        pairs = zip(step.accepted, step.refused_before, strict=True)
        tokens = [("accepted", texts.add(token), more) for token, more in pairs]
        if step.rejected:
            tokens.append(("rejected", texts.would_add(step.rejected[0]), len(step.rejected) - 1))
        if step.next_id is not None:
            tokens.append(("corrected" if step.rejected else "added", texts.add(step.next_id), 0))
        if step.cut:
            tokens.append(("cut", texts.would_add(step.cut[0]), len(step.cut) - 1))
        for kind, text, more in tokens:
            style, start, end, _ = _KINDS[kind]
            piece = visible(text) or "◌"
            line.append(f"{start}{piece}{end}" if marks else piece, style)
            line.append(f"+{more}" if more else "", "dim red")
        before += "".join(text for kind, text, _ in tokens if kind not in ("rejected", "cut"))
        kept += len(step.accepted) + (step.next_id is not None)
        lines.append(line)
    proposed, cut = sum(step.proposed for step in steps), sum(len(step.cut) for step in steps)
    summary = f"{kept} tokens in {len(steps)} steps"
    summary += f", {sum(len(step.accepted) for step in steps)} of {proposed} draft tokens kept" if proposed else ""
    return [*lines, Text(summary + (f", {cut} accepted but after the end" if cut else ""))]

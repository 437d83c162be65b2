"""A trace for people: each token shown as what it was, accepted, rejected, corrected, added or cut off.

As in figure 1 of Leviathan et al. (arXiv 2211.17192): a line a step. Where a
terminal has no colour, `»[-rejected-]{+corrected+}` is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ...checkpoints.storage.messages import pictured

if TYPE_CHECKING:  # a report is made without the libraries that decode
    from ...decode.evaluation.trace import TracedStep

KINDS = ("accepted", "rejected", "corrected", "added", "cut")
_STYLES = {"accepted": "green", "rejected": "red strike", "corrected": "bold blue", "added": "cyan underline"}
_STYLES["cut"] = "dim"
_MARKS = {"accepted": ("", ""), "rejected": ("[-", "-]"), "corrected": ("{+", "+}"), "added": ("{", "}")}
_MARKS["cut"] = ("(", ")")
_NOT_KEPT = ("rejected", "cut")
_MEANINGS = {
    "accepted": "drafted and kept; ◌: a part of a character",
    "rejected": "drafted and refused; +2: so many more siblings refused",
    "corrected": "the target's own token in place of it",
    "added": "the target's token after a draft that was kept whole, or where none was made",
    "cut": "accepted, but behind the end of the text: a stop token or the limit",
}
_SHOWN = str.maketrans({"\n": "↵", "\t": "⇥"})
_PENDING = "\ufffd"
_PART = "◌"
_BEFORE = 60
"""Letters of the text before a step that stand on its line."""


class TokenTexts:
    """Texts of tokens one after another, behind the ids `before`: what each adds, given those before it.

    Where a token ends inside a character, the character goes to the token that completes it. A U+FFFD of the text's own
    looks unfinished until the text goes on. Joined, with `rest` behind them, the texts are those of all ids
    together.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = list(before)[-8:]
        self._open: list[int] = []

    def add(self, token: int) -> str:
        """The text that a token adds; empty while a character is unfinished."""
        text = self._added([*self._open, token])
        if text.endswith(_PENDING):
            self._open.append(token)
            return ""
        self._settled, self._open = [*self._open, token], []
        return text

    def would_add(self, token: int) -> str:
        """The same for a token that is not kept; an unfinished character is shown as such."""
        return self._added([*self._open, token])

    def rest(self) -> str:
        """What the text ends in beyond what was added: a character left unfinished, or a U+FFFD of its own."""
        return self._added(self._open) if self._open else ""

    def _added(self, ids: list[int]) -> str:
        before = self._decode(self._settled)
        return self._decode([*self._settled, *ids])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def describe_steps(steps: Iterable[TracedStep], tokenizer: Any, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Steps as texts: `{"proposed": n, "accepted": n, "cut": n, "tokens": [{"kind", "text", "more"}]}`, `more` only
    where siblings of a token were refused too, or tokens behind it cut off; `cut` only where any were."""
    texts = TokenTexts(tokenizer, prompt)
    traced: list[dict[str, Any]] = []
    for step in steps:
        tokens = []
        for token, passed in zip(step.accepted, step.refused_before, strict=True):
            tokens.append(_token("accepted", texts.add(token), passed))
        if step.rejected:
            # the first stands for the others: of a tree they are its siblings, of a chain they follow it
            tokens.append(_token("rejected", texts.would_add(step.rejected[0]), len(step.rejected) - 1))
        if step.next_id is not None:
            tokens.append(_token("corrected" if step.rejected else "added", texts.add(step.next_id), 0))
        if step.cut:
            tokens.append(_token("cut", texts.would_add(step.cut[0]), len(step.cut) - 1))
        cut = {"cut": len(step.cut)} if step.cut else {}
        traced.append({"proposed": step.proposed, "accepted": len(step.accepted), **cut, "tokens": tokens})
    kept = [token for token in traced[-1]["tokens"] if token["kind"] not in _NOT_KEPT] if traced else []
    if kept and texts.rest():
        kept[-1]["text"] += texts.rest()
    return traced


def _token(kind: str, text: str, more: int) -> dict[str, Any]:
    return {"kind": kind, "text": text} | ({"more": more} if more else {})


def kept_text(steps: Iterable[Mapping[str, Any]]) -> str:
    """The text that was decoded."""
    return "".join(token["text"] for step in steps for token in step["tokens"] if token["kind"] not in _NOT_KEPT)


def visible(text: str) -> str:
    """Line ends and control characters as pictures, so that a text stays on its line and moves no cursor."""
    return pictured(text.translate(_SHOWN))


def _shown(token: Mapping[str, Any]) -> str:
    return visible(token["text"]) or _PART


def step_line(number: int, before: str, step: Mapping[str, Any], marks: bool) -> Text:
    """One step: its number, accepted of proposed tokens, the end of the text so far, and what became of each token;
    with `marks` around tokens, for terminals without styles."""
    line = Text(f"{number:4} {step['accepted']:2}/{step['proposed']:<3}", no_wrap=False)
    tail = visible(before)
    line.append(("…" + tail[-_BEFORE:]) if len(tail) > _BEFORE else tail, "dim")
    if marks:
        line.append("»")
    for token in step["tokens"]:
        start, end = _MARKS[token["kind"]] if marks else ("", "")
        more = f"+{token['more']}" if token.get("more") else ""
        line.append(start + _shown(token) + end, _STYLES[token["kind"]])
        line.append(more, "dim red")
    return line


def show_trace(traced: Mapping[str, Any], console: Console) -> None:
    """A trace on the terminal: a line a step, and what the marks mean."""
    marks = console.color_system is None or console.no_color
    legend = Text("legend: ")
    for kind in KINDS:
        start, end = _MARKS[kind] if marks else ("", "")
        legend.append(f"{start}{kind}{end}", _STYLES[kind]).append(f" ({_MEANINGS[kind]})  ", "dim")
    console.print(legend)
    for prompt in traced["prompts"]:
        console.print(Text(f"\n{traced['row']['label']}: {visible(prompt['prompt'])}", "bold"))
        before = ""
        for number, step in enumerate(prompt["steps"], 1):
            console.print(step_line(number, before, step, marks))
            before += kept_text([step])
        console.print(_summary(prompt["steps"]))


def _summary(steps: Sequence[Mapping[str, Any]]) -> str:
    tokens = sum(token["kind"] not in _NOT_KEPT for step in steps for token in step["tokens"])
    accepted, proposed, cut = (sum(step.get(key, 0) for step in steps) for key in ("accepted", "proposed", "cut"))
    share = f", {accepted} of {proposed} draft tokens kept" if proposed else ""
    share += f", {cut} accepted but behind the end" if cut else ""
    return f"{tokens} tokens in {len(steps)} steps{share}"

"""Chat templates: a conversation as token ids with a trainable flag beside every id.

Ids are built turn by turn and never found again in a re-tokenised string, so a label cannot slip. What users write
is encoded as plain text: a message that contains "</s>" or "<|im_end|>" never becomes a special token.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from .conversations import Conversation, Turn
from .encoding import PieceEncoder

_BATCH_CONVERSATIONS = 256


@dataclass(slots=True)
class Rendered:
    """One document: `ids` [T] token ids and `trainable` [T], True for the assistant's words and its end of turn."""

    ids: list[int]
    trainable: list[bool]


@dataclass(frozen=True, slots=True)
class Template:
    """The constant texts around the messages of a conversation; get one by name from `get_template`.

    `system` stands where a conversation brings no system text of its own. A lead comes before each message of its
    role (behind `<|im_start|>` where that is among the special tokens). With `spaced` a message follows its lead
    after one space, and `end` closes only the assistant's messages; without, it follows directly, and `end` and
    `after_end` close every message. `end` "{eos}" is the tokenizer's own end of sequence.
    """

    name: str
    system: str | None
    system_lead: str
    user_lead: str
    user_after: str  # tokenised together with the message, for the two may share a token
    assistant_lead: str
    end: str
    after_end: str
    spaced: bool
    special_tokens: tuple[str, ...] = ()

    def render(self, conversation: Conversation, tokenizer: Any) -> Rendered:
        """Ids and flags of a whole conversation, however long.

        Raises:
            ValueError: the turns are not [system], user, assistant, …; the tokenizer lacks a needed special token.
        """
        return next(render_all([conversation], tokenizer, self, None))

    def prompt(self, turns: Sequence[Turn], tokenizer: Any) -> list[int]:
        """Ids [T] to generate the next answer from: exactly those `render` gives before that answer's first token.

        Raises:
            ValueError: the turns are not [system], user, assistant, …, user; a special token is missing.
        """
        layout = _Layout(self, tokenizer)
        head, exchanges = _exchanges("prompt", tuple(turns), ends_with="user")
        encoded = iter(layout.encode([(head, exchanges)]))
        head_ids = next(encoded)
        document = layout.start(head_ids)
        for number in range(len(exchanges)):
            question = next(encoded)
            answer = next(encoded) if number + 1 < len(exchanges) else None
            layout.add(document, layout.exchange(question, answer, first=number == 0))
        return document.ids


VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

TEMPLATES: dict[str, Template] = {
    "vicuna-v1.1": Template(
        name="vicuna-v1.1",
        system=VICUNA_SYSTEM,
        system_lead="",
        user_lead="USER:",
        user_after=" ASSISTANT:",
        assistant_lead="",
        end="{eos}",
        after_end="",
        spaced=True,
    ),
    "chatml": Template(
        name="chatml",
        system=None,
        system_lead="system\n",
        user_lead="user\n",
        user_after="",
        assistant_lead="assistant\n",
        end="<|im_end|>",
        after_end="\n",
        spaced=False,
        special_tokens=("<|im_start|>", "<|im_end|>"),
    ),
}


def get_template(name: str) -> Template:
    """The template of that name.

    Raises:
        ValueError: no such template; the message gives the nearest name and all of them.
    """
    if name not in TEMPLATES:
        close = difflib.get_close_matches(name, TEMPLATES, n=1, cutoff=0.4)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"no template {name!r}{hint} known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def render_all(
    conversations: Iterable[Conversation], tokenizer: Any, template: Template, max_tokens: int | None
) -> Iterator[Rendered]:
    """Render many conversations, tokenising hundreds of messages in one call.

    A conversation over `max_tokens` becomes several documents, split between exchanges, each with the system text at
    its start. An exchange too long by itself is cut at `max_tokens`, and left out if nothing trainable remains.
    With `max_tokens` None nothing is split.

    Raises:
        ValueError: as `Template.render`; `max_tokens` that is not positive.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    layout = _Layout(template, tokenizer)
    remaining = iter(conversations)
    while batch := list(islice(remaining, _BATCH_CONVERSATIONS)):
        parsed = [_exchanges(c.id, c.turns, ends_with="assistant") for c in batch]
        encoded = iter(layout.encode(parsed))
        for _, exchanges in parsed:
            head_ids = next(encoded)
            yield from layout.documents(head_ids, [(next(encoded), next(encoded)) for _ in exchanges], max_tokens)


def _exchanges(
    name: str, turns: tuple[Turn, ...], ends_with: Literal["user", "assistant"]
) -> tuple[Turn | None, list[list[Turn]]]:
    """Split turns into the system turn, if any, and [user, assistant] pairs (the last may lack its answer)."""
    head = turns[0] if turns and turns[0].role == "system" else None
    rest = turns[1:] if head else turns
    roles = [turn.role for turn in rest]
    alternating = [("user", "assistant")[i % 2] for i in range(len(rest))]
    if roles != alternating or not roles or roles[-1] != ends_with:
        shown = ", ".join(turn.role for turn in turns[:8]) or "no turns"
        raise ValueError(f"{name}: expected [system], user, assistant, … ending with {ends_with}, found {shown}")
    return head, [list(rest[i : i + 2]) for i in range(0, len(rest), 2)]


class _Layout:
    """A template with its constants as ids of one tokenizer."""

    def __init__(self, template: Template, tokenizer: Any) -> None:
        self.template = template
        self.encoder = PieceEncoder(tokenizer)
        specials = {text: self.encoder.special_id(text, template.name) for text in template.special_tokens}
        start = [specials["<|im_start|>"]] if "<|im_start|>" in specials else []
        self.end = specials[template.end] if template.end in specials else self.encoder.eos_id(template.name)
        encode = self.encoder.constant
        self.system_lead = start + encode(template.system_lead)
        self.user_lead = start + encode(template.user_lead)
        self.first_user_lead = self.encoder.continuing([template.user_lead])[0] if template.spaced else self.user_lead
        self.assistant_lead = start + encode(template.assistant_lead)
        self.after_end = self.encoder.after_special(template.end, template.after_end)

    def encode(self, parsed: Sequence[tuple[Turn | None, list[list[Turn]]]]) -> list[list[int]]:
        """Ids of every message, flat: for each conversation its head (system or []), then question, answer, …"""
        template = self.template
        texts: list[str] = []
        is_head: list[bool] = []
        for head, exchanges in parsed:
            texts.append(head.text if head else template.system or "")
            is_head.append(True)
            for exchange in exchanges:
                for turn in exchange:
                    texts.append(turn.text + (template.user_after if turn.role == "user" else ""))
                    is_head.append(False)
        if not template.spaced:
            return self.encoder.unprefixed(texts)
        heads = self.encoder.plain([text for text, head_flag in zip(texts, is_head, strict=True) if head_flag])
        others = self.encoder.continuing([text for text, flag in zip(texts, is_head, strict=True) if not flag])
        from_heads, from_others = iter(heads), iter(others)
        return [next(from_heads) if flag else next(from_others) for flag in is_head]

    def start(self, head_ids: list[int]) -> Rendered:
        """A new document: beginning of sequence and system text, nothing of it trainable."""
        ids = list(self.encoder.bos)
        if head_ids and self.template.spaced:
            ids += head_ids
        elif head_ids:
            ids += [*self.system_lead, *head_ids, self.end, *self.after_end]
        return Rendered(ids, [False] * len(ids))

    def exchange(self, question: list[int], answer: list[int] | None, *, first: bool) -> Rendered:
        """One exchange; without an answer it ends where the assistant is to begin."""
        ids = [*(self.first_user_lead if first else self.user_lead), *question]
        if not self.template.spaced:
            ids += [self.end, *self.after_end]
        ids += self.assistant_lead
        flags = [False] * len(ids)
        if answer is not None:
            ids += [*answer, self.end, *self.after_end]
            flags += [True] * (len(answer) + 1) + [False] * len(self.after_end)
        return Rendered(ids, flags)

    @staticmethod
    def add(document: Rendered, part: Rendered) -> None:
        document.ids += part.ids
        document.trainable += part.trainable

    def documents(
        self, head_ids: list[int], exchanges: Sequence[tuple[list[int], list[int]]], max_tokens: int | None
    ) -> Iterator[Rendered]:
        """The conversation in one document, or in several of at most `max_tokens`."""
        limit = max_tokens if max_tokens is not None else sum(len(q) + len(a) + 64 for q, a in exchanges) + 4096
        document = self.start(head_ids)
        is_empty = True
        for question, answer in exchanges:
            part = self.exchange(question, answer, first=is_empty)
            if not is_empty and len(document.ids) + len(part.ids) > limit:
                yield from self._cut(document, max_tokens)
                document, is_empty = self.start(head_ids), True
                part = self.exchange(question, answer, first=True)
            self.add(document, part)
            is_empty = False
        yield from self._cut(document, max_tokens)

    @staticmethod
    def _cut(document: Rendered, max_tokens: int | None) -> Iterator[Rendered]:
        document = Rendered(document.ids[:max_tokens], document.trainable[:max_tokens])
        if max_tokens is None or any(document.trainable):
            yield document

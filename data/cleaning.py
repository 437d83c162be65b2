"""From what was written to clean exchanges, each cut and each drop under its name."""

from __future__ import annotations

from typing import Any

from .conversations import Conversation, CorpusReport, Dialogue, Turn

USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "assistant", "chatgpt", "bing", "bard")
ROLES: dict[str, str] = {
    **dict.fromkeys(USER_ROLES, "user"),
    **dict.fromkeys(ASSISTANT_ROLES, "assistant"),
    "system": "system",
}


def clean(dialogue: Dialogue, report: CorpusReport) -> Conversation | None:
    """Alternating whole exchanges, or None after counting why there are none."""
    report.rows += 1
    changes: list[str] = []
    turns = _clean(list(dialogue.messages), changes, report)
    if turns is None:
        return None
    report.kept += 1
    report.changed.update(changes)
    return Conversation(dialogue.id, turns)


def _clean(messages: list[tuple[str, Any]], changes: list[str], report: CorpusReport) -> tuple[Turn, ...] | None:
    """Alternating whole exchanges, or None after counting why there are none; `changes` receives what was cut."""
    turns: list[Turn] = []
    for written_role, content in messages:
        role = ROLES.get(written_role) if isinstance(written_role, str) else None
        if role is None:
            report.dropped["unmapped role"] += 1
            report.unmapped_roles[str(written_role)] += 1
            return None
        if content is not None and not isinstance(content, str):
            report.dropped["content is not text"] += 1
            return None
        text = content or ""
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # half an emoji: no UTF-8 exists for it
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            _note(changes, "broken characters replaced")
        turns.append(Turn(role, text))

    system: list[Turn] = []
    if turns and turns[0].role == "system":
        system, turns = turns[:1], turns[1:]
        if not system[0].text.strip():
            system = []
            _note(changes, "empty messages cut")
    turns = _trim(turns, changes)
    if any(not turn.text.strip() for turn in turns):
        turns = _trim(_without_empty(turns), changes)
        _note(changes, "empty messages cut")
    if not _alternates(turns):
        report.dropped["roles do not alternate"] += 1
        return None
    if not turns:
        report.dropped["no whole exchange"] += 1
        return None
    return (*system, *turns)


def _trim(turns: list[Turn], changes: list[str]) -> list[Turn]:
    """Cut leading assistant turns (nothing asked for them) and trailing user turns (nothing answers them)."""
    start, end = 0, len(turns)
    while start < end and turns[start].role == "assistant":
        start += 1
    while end > start and turns[end - 1].role == "user":
        end -= 1
    if start:
        _note(changes, "leading assistant turns cut")
    if end < len(turns):
        _note(changes, "trailing user turns cut")
    return turns[start:end]


def _without_empty(turns: list[Turn]) -> list[Turn]:
    """Drop empty messages so that alternation stays right.

    Where the turns alternate, an empty message takes its partner with it (an answer to nothing, or a question
    without an answer, teaches nonsense). Where they do not, the empty message itself may be what is too much.
    """
    if not _alternates(turns):
        return [turn for turn in turns if turn.text.strip()]
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [turn for pair in pairs if all(message.text.strip() for message in pair) for turn in pair]


def _alternates(turns: list[Turn]) -> bool:
    """True for user, assistant, user, assistant, … with an even count."""
    expected = ("user", "assistant")
    return len(turns) % 2 == 0 and all(turn.role == expected[i % 2] for i, turn in enumerate(turns))


def _note(changes: list[str], reason: str) -> None:
    if reason not in changes:
        changes.append(reason)

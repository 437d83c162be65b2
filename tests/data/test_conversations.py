"""Streams of conversations: order, numbers, limits, and written files."""

import json
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import Conversation, Turn, write_conversations
from draftsmith.data.sources.reading import open_dialogues, read_conversations


def _jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _roles(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_rows_are_numbered_in_every_form_and_shard(tmp_path: Path) -> None:
    turns = _roles(("user", "hello"), ("assistant", "hi"))["messages"]
    rows = ["hello", turns, {"messages": turns}, {"prompt": "a", "response": "b"}, {"text": "c"}, {"turns": ["d"]}]
    _jsonl(tmp_path / "a.jsonl", *rows)
    _jsonl(tmp_path / "b.jsonl", *rows)
    names = [f"{'a' if number <= 6 else 'b'}-{number}" for number in range(1, 13)]
    assert [dialogue.id for dialogue in open_dialogues(str(tmp_path))] == names
    assert [dialogue.id for dialogue in open_dialogues(str(tmp_path), shard=(1, 5))] == names[1::5]
    chats = read_conversations(str(tmp_path), shard=(0, 2))
    assert [(chat.id, len(chat.turns)) for chat in chats] == [("a-3", 2), ("a-5", 1), ("b-9", 2), ("b-11", 1)]
    summaries = _jsonl(tmp_path / "c.jsonl", *[{"article": "a", "highlights": "b"}] * 3)
    assert [dialogue.id for dialogue in open_dialogues("cnn-dailymail", path=summaries)] == ["c-1", "c-2", "c-3"]


def test_conversations_survive_a_round_trip(tmp_path: Path) -> None:
    turns = (Turn("system", "s"), Turn("user", "zwei\nZeilen"), Turn("assistant", "é </s>"))
    conversations = [Conversation("first", turns), Conversation("second", turns[1:])]
    path = tmp_path / "new" / "out.jsonl"
    assert write_conversations(conversations, path) == 2
    assert list(read_conversations(str(path))) == conversations

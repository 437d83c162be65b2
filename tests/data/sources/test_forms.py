"""Detection of the columns of a row, including null values and unknown forms."""

import json
import re
from pathlib import Path
from typing import Any

import draftsmith
import pytest
from draftsmith.data.conversations import CorpusReport, Dialogue
from draftsmith.data.sources.files import Row
from draftsmith.data.sources.forms import read_dialogue
from draftsmith.data.sources.reading import read_conversations
from hypothesis import given, settings
from hypothesis import strategies as st

ASKED = (("user", "hello"), ("assistant", "hi"))
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]


def read(value: Any) -> Dialogue:
    return read_dialogue(Row(value, "data.jsonl, row 7", "data-7", 6))


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"conversation": MESSAGES, "turn": 1, "openai_moderation": []}, "conversation", ASKED),
        ({"prompt": "hello", "messages": MESSAGES}, "messages", ASKED),
        ({"user_query": "hello", "chatgpt_response": "hi"}, "user_query + chatgpt_response", ASKED),
        ({"instruction": "hello", "input": " ", "output": "hi", "text": "…"}, "instruction + output + input", ASKED),
        ({"prompt": ["one?", "two?"], "category": "math"}, "prompt", (("user", "one?"), ("user", "two?"))),
        ({"goal": "one?", "sol1": "a", "sol2": "b"}, "goal", (("user", "one?"),)),
        ({"question": "one?", "answers": ["a"]}, "question", (("user", "one?"),)),
        ({"messages": [{"role": "user", "content": PARTS}]}, "messages", (("user", "hel\nlo"),)),
        # null values: a table of mixed forms, missing texts, a tool call
        ({"messages": None, "prompt": "hello", "response": "hi", "text": None}, "prompt + response", ASKED),
        ({"instruction": None, "output": "hi"}, "instruction + output", (("user", None), ("assistant", "hi"))),
        ({"messages": None}, "messages", ()),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", (("assistant", None),)),
        ({"conversations": [{"from": None, "value": None}]}, "conversations", ((None, None),)),
    ],
)  # fmt: skip
def test_forms_are_detected_by_their_columns(row: Any, form: str, messages: tuple[Any, ...]) -> None:
    dialogue = read(row)
    assert dialogue.messages == messages
    assert dialogue.form == form


@pytest.mark.parametrize(
    ("columns", "identity"),
    [
        ({"id": 3}, "3"), ({"conversation_id": "c", "id": None}, "c"), ({"question_id": 81}, "81"),
        ({"conversation_hash": "h"}, "h"), ({"id": None}, "data-7"), ({}, "data-7"),
    ],
)  # fmt: skip
def test_ids_are_those_of_the_row_or_its_position(columns: dict[str, Any], identity: str) -> None:
    assert read({"messages": [], **columns}).id == identity


@pytest.mark.parametrize(
    ("columns", "references"),
    [
        ({"reference": "a"}, ("a",)), ({"reference": ["a", None, "b", ""]}, ("a", "b")), ({"answers": [["a"], "b"]},
        ("a", "b")), ({"reference": None}, ()), ({"reference": {"a": 1}}, ()), ({}, ()),
    ],
)  # fmt: skip
def test_references_and_category(columns: dict[str, Any], references: tuple[str, ...]) -> None:
    dialogue = read({"question": "q", "category": "math", **columns})
    assert dialogue.references == references
    assert dialogue.category == "math"
    assert read({"question": "q", "category": 5}).category == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["messages", "conversations", "role", "from", "value", "content", "prompt", "response", "turns",
                         "instruction", "input", "output", "type", "text", "id", "category", "reference", "question"])
        | st.text(max_size=3),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(JSON)
def test_invalid_rows_raise_errors_with_their_position(value: Any) -> None:
    try:
        dialogue = read(value)
    except ValueError as error:
        assert str(error).startswith("data.jsonl, row 7: ")  # noqa: PT017
    else:
        assert all(len(pair) == 2 for pair in dialogue.messages)
        assert isinstance(dialogue.id, str)


PAGE = Path(draftsmith.__path__[0]) / "docs" / "how-to" / "row-formats.md"
ITEMS = re.findall(r"^- (`.+?)(?=\n- |\n\n)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
FORMS = [re.fullmatch(r"`(.+?)`: (.+) is read as (.+)", " ".join(item.split())) for item in ITEMS]
TABLE = [form.groups() for form in FORMS]


@pytest.mark.parametrize(("form", "written", "turns"), TABLE, ids=[form for form, _, _ in TABLE])
def test_documented_forms_are_read(form: str, written: str, turns: str, tmp_path: Path) -> None:
    source, report = tmp_path / "rows.jsonl", CorpusReport()
    rows = [span for span in re.findall(r"`(.+?)`", written) if span[0] in '{["']
    source.write_text("".join(json.dumps(json.loads(row)) + "\n" for row in rows))
    options = {"tools": True, "questions": True, "report": report}
    (conversation,) = read_conversations(str(source), **options)
    expected = [span.replace("\\n", "\n").partition(" ") for span in re.findall(r"`(.+?)`", turns)]
    assert [(turn.role, turn.text) for turn in conversation.turns] == [(role, text) for role, _, text in expected]
    assert (report.forms, report.rows, report.kept) == ({form: 1}, 1, 1)

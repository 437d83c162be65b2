"""Rows in many forms and with many defects: what survives, what is counted, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import (
    Conversation,
    CorpusReport,
    Turn,
    write_conversations,
)
from draftsmith.data.sources.reading import numbered_conversations, open_dialogues, read_conversations


def _jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _roles(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def _read(source: str) -> tuple[list[tuple[tuple[str, str], ...]], CorpusReport]:
    report = CorpusReport()
    turns = [tuple((t.role, t.text) for t in c.turns) for c in read_conversations(source, report=report)]
    assert report.rows == report.kept + sum(report.dropped.values())
    assert report.kept == len(turns)
    return turns, report


HELLO = (("user", "hello"), ("assistant", "hi"))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
        {"conversation": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}], "turn": 1},
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]},
        {"prompt": "hello", "response": "hi"},
        {"instruction": "hello", "input": "", "output": "hi"},
        {"instruction": "hello", "output": "hi"},
    ],
    ids=["sharegpt", "lmsys", "openai", "prompt", "instruction-empty-input", "instruction"],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_every_form_in_every_format_says_the_same(row: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps([row]), encoding="utf-8")
    elif suffix == ".jsonl":
        _jsonl(path, row)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    assert _read(str(path))[0] == [HELLO]


def test_instruction_and_input_are_one_question(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "a.jsonl", {"instruction": "Translate.", "input": "cat", "output": "chat"})
    assert _read(source)[0] == [(("user", "Translate.\n\ncat"), ("assistant", "chat"))]


@pytest.mark.parametrize(
    ("pairs", "kept"),
    [
        ([("assistant", "x"), ("user", "hello"), ("assistant", "hi")], HELLO),
        ([("user", "hello"), ("assistant", "hi"), ("user", "bye")], HELLO),
        ([("user", "hello"), ("assistant", "hi"), ("user", " "), ("assistant", "lost")], HELLO),
        ([("user", "lost"), ("assistant", ""), ("user", "hello"), ("assistant", "hi")], HELLO),
        ([("user", ""), ("user", "hello"), ("assistant", "hi")], HELLO),
        ([("user", "hello"), ("assistant", None), ("assistant", "hi")], HELLO),
        ([("system", "be kind"), ("user", "hello"), ("assistant", "hi")], (("system", "be kind"), *HELLO)),
        ([("system", ""), ("user", "hello"), ("assistant", "hi")], HELLO),
        ([("system", "be kind"), ("assistant", "x"), ("user", "hello"), ("assistant", "hi")],
         (("system", "be kind"), *HELLO)),
        ([("bard", "x"), ("human", "hello"), ("chatgpt", "hi")], HELLO),
    ],
)  # fmt: skip
def test_cuts_leave_whole_exchanges(
    pairs: list[tuple[str, Any]], kept: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    turns, report = _read(_jsonl(tmp_path / "a.jsonl", _roles(*pairs)))
    assert turns == [kept]
    if len(kept) < len(pairs):
        assert report.changed, "a cut must be counted"


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([("user", "a"), ("user", "b"), ("assistant", "c")], "roles do not alternate"),
        ([("user", "a"), ("assistant", "b"), ("assistant", "c")], "roles do not alternate"),
        ([("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "c"), ("assistant", "d")],
         "roles do not alternate"),
        ([("user", "a")], "no whole exchange"),
        ([("assistant", "a")], "no whole exchange"),
        ([("user", ""), ("assistant", "a")], "no whole exchange"),
        ([], "no whole exchange"),
        ([("user", "a"), ("function_call", "f()"), ("assistant", "c")], "unmapped role"),
        ([("user", [{"type": "image"}]), ("assistant", "c")], "content is not text"),
    ],
)  # fmt: skip
def test_what_cannot_be_mended_is_dropped_by_name(pairs: list[tuple[str, Any]], reason: str, tmp_path: Path) -> None:
    turns, report = _read(_jsonl(tmp_path / "a.jsonl", _roles(*pairs), _roles(*HELLO)))
    assert turns == [HELLO]
    assert dict(report.dropped) == {reason: 1}
    assert dict(report.unmapped_roles) == ({"function_call": 1} if reason == "unmapped role" else {})
    assert reason in report.summary()
    assert report.as_dict()["dropped"] == {reason: 1}


def test_half_an_emoji_becomes_encodable(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "smile \\ud83d", "response": "whole \\ud83d\\ude00"}\n', encoding="utf-8")
    turns, report = _read(str(path))
    assert turns == [(("user", "smile \ufffd"), ("assistant", "whole \U0001f600"))]
    assert report.changed == {"broken characters replaced": 1}


def test_a_folder_is_its_files_in_sorted_order(tmp_path: Path) -> None:
    _jsonl(tmp_path / "b.jsonl", {"prompt": "3", "response": "x"})
    _jsonl(tmp_path / "a.jsonl", {"prompt": "1", "response": "x"}, {"prompt": "2", "response": "x"})
    (tmp_path / "notes.txt").write_text("not data")
    found = list(read_conversations(str(tmp_path)))
    assert [c.turns[0].text for c in found] == ["1", "2", "3"]
    assert len({c.id for c in found}) == 3


def test_a_row_keeps_its_number_in_every_form_and_shard(tmp_path: Path) -> None:
    turns = _roles(*HELLO)["messages"]
    rows = ["hello", turns, {"messages": turns}, {"prompt": "a", "response": "b"}, {"text": "c"}, {"turns": ["d"]}]
    _jsonl(tmp_path / "a.jsonl", *rows)
    _jsonl(tmp_path / "b.jsonl", *rows)
    assert [dialogue.number for dialogue in open_dialogues(str(tmp_path))] == [*range(12)]
    assert [dialogue.number for dialogue in open_dialogues(str(tmp_path), shard=(1, 5))] == [1, 6, 11]
    numbered = numbered_conversations(str(tmp_path), shard=(0, 2))
    assert [(number, len(chat.turns)) for number, chat in numbered] == [(2, 2), (4, 1), (8, 2), (10, 1)]
    summaries = _jsonl(tmp_path / "c.jsonl", *[{"article": "a", "highlights": "b"}] * 3)
    assert [dialogue.number for dialogue in open_dialogues("cnn-dailymail", path=summaries)] == [0, 1, 2]


def test_limit_counts_conversations_not_rows(tmp_path: Path) -> None:
    rows = [_roles(("user", "a")), *[{"prompt": str(i), "response": "x"} for i in range(5)]]
    report = CorpusReport()
    found = list(read_conversations(_jsonl(tmp_path / "a.jsonl", *rows), limit=2, report=report))
    assert [c.turns[0].text for c in found] == ["0", "1"]
    assert (report.rows, report.kept) == (3, 2)
    assert list(read_conversations(str(tmp_path / "a.jsonl"), limit=0)) == []


def test_written_conversations_read_back_equal(tmp_path: Path) -> None:
    turns = (Turn("system", "s"), Turn("user", "zwei\nZeilen"), Turn("assistant", "é </s>"))
    conversations = [Conversation("first", turns), Conversation("second", turns[1:])]
    path = tmp_path / "new" / "out.jsonl"
    assert write_conversations(conversations, path) == 2
    assert list(read_conversations(str(path))) == conversations


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def broken() -> Any:
        yield Conversation("a", (Turn("user", "q"), Turn("assistant", "a")))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_conversations(broken(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    _jsonl(tmp_path / "sharegpt_train.jsonl")
    with pytest.raises(ValueError, match=r"no such file.*did you mean .*sharegpt_train\.jsonl"):
        read_conversations(str(tmp_path / "sharegpt_trian.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[{]", r"a\.json, row 1: not valid JSON: .*at line 1; expected one list of rows"),
        (
            "a.json",
            '{"prompt": "a", "response": "b"}\n{"prompt": ',
            r"a\.json, after row 1: expected more, but .*cut short",
        ),
        ("a.json", '{"data": [1]}', r"a\.json, row 1: the columns data fit no known form"),
        ("a.json", "[7]", r"a\.json, row 1: expected an object, found int"),
        (
            "a.jsonl",
            '{"prompt": "a", "response": "b"}\n{"pro',
            r"a\.jsonl, row 2: not valid JSON.*one JSON object a line",
        ),
        ("a.jsonl", '{"prompt": "a", "response": "b"}\n[1]\n', r"a\.jsonl, row 2: expected an object, found list"),
        (
            "a.jsonl",
            '{"query": "a", "reply": "b"}',
            r"row 1: the columns query, reply fit no.*prompt or question \+ response",
        ),
        ("a.jsonl", '{"messages": "hello"}', r"row 1: `messages` must be a list of messages, found str"),
        ("a.jsonl", '{"messages": [{"who": "me"}]}', r"row 1: message 1 of `messages` must be .* found who"),
        ("a.parquet", "PAR0 nothing", r"a\.parquet: expected a file in the parquet format"),
        ("a.csv", "a,b", r"a\.csv: expected a file ending in .*\.parquet.*, found \.csv"),
    ],
)
def test_errors_say_where_and_what_was_expected(name: str, content: str, message: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_conversations(str(tmp_path / name)))


def test_a_folder_with_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(ValueError, match=r"nothing to read, expected .*\.parquet.*; found README\.md"):
        read_conversations(str(tmp_path))


def test_importing_needs_neither_datasets_nor_pyarrow() -> None:
    code = (
        "import sys; sys.modules['datasets'] = sys.modules['pyarrow'] = None\n"
        "import draftsmith.data.conversations, draftsmith.data.sources.documentation\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.shared
def test_real_sharegpt_keeps_its_share(shared_data: Path) -> None:
    turns, report = _read(str(shared_data / "sharegpt" / "sharegpt_v3_sample_800.json"))
    assert report.rows == 800
    assert 0.97 < len(turns) / report.rows < 1.0  # 987 of 1,000 on a larger sample
    assert 0.30 < report.changed["leading assistant turns cut"] / report.rows < 0.38


@pytest.mark.shared
def test_lmsys_parquet_reads_without_its_moderation_columns(shared_data: Path) -> None:
    found = list(read_conversations(str(shared_data / "lmsys_like"), limit=50))
    assert len(found) == 50
    assert all(c.turns[0].role == "user" and c.turns[-1].role == "assistant" for c in found)

"""Regeneration writes every conversation once, even if it is killed and resumed."""

import asyncio
import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data.conversations import Conversation, Turn
from draftsmith.data.regeneration import Answer, Failure, Question, RegenerationReport, Store, keyed, regenerate
from draftsmith.data.sources.reading import read_conversations

Outcome = Answer | Failure | None
SETTINGS = {"target": "echo", "temperature": 0.0}


def conversation(name: str, *questions: str, system: str | None = None) -> Conversation:
    turns = [Turn("system", system)] if system else []
    for question in questions:
        turns += [Turn("user", question), Turn("assistant", f"somebody else's answer to {question}")]
    return Conversation(name, tuple(turns))


def echo(question: Question) -> Answer:
    """Answer with a text that repeats the question and the context."""
    return Answer(" / ".join(turn.text for turn in question.turns))


def run(
    path: Path, conversations: Sequence[Conversation], answer: Callable[[Question], Outcome] = echo, **options: Any
) -> RegenerationReport:
    async def answers(question: Question) -> Outcome:
        return answer(question)

    with Store(path, SETTINGS) as store:
        return asyncio.run(regenerate(conversations, store, answers, **options))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def errors(path: Path) -> list[dict[str, Any]]:
    return rows(path.with_name(path.name + ".errors.jsonl"))


def test_answers_are_replaced_and_questions_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "out.jsonl"
    talks = [conversation("a", "one", "two"), conversation("b", "three", system="be brief"), conversation("c", "four")]
    report = run(out, talks, system="be kind")
    assert (report.written, report.failed, report.answers) == (3, 0, 4)
    assert [(talk.id, [(turn.role, turn.text) for turn in talk.turns]) for talk in read_conversations(str(out))] == [
        ("a", [("system", "be kind"), ("user", "one"), ("assistant", "be kind / one"),
               ("user", "two"), ("assistant", "be kind / one / be kind / one / two")]),
        ("b", [("system", "be brief"), ("user", "three"), ("assistant", "be brief / three")]),
        ("c", [("system", "be kind"), ("user", "four"), ("assistant", "be kind / four")]),
    ]  # fmt: skip
    assert rows(out)[0]["finish"] == ["stop", "stop"]


def test_identical_rows_are_all_answered(tmp_path: Path) -> None:
    twice = [conversation("a", "one"), conversation("b", "one"), conversation("a", "one"), conversation("a", "other")]
    assert len({key for key, _ in keyed(twice)}) == 4
    # keys depend neither on the position in the source nor on rows in between
    assert {key for key, _ in keyed(reversed(twice))} == {key for key, _ in keyed(twice)}
    out = tmp_path / "out.jsonl"
    run(out, twice[:2])
    run(out, twice)
    assert sorted(row["id"] for row in rows(out)) == ["a", "a", "a", "b"]


@pytest.mark.parametrize("keep", [False, True])
def test_cut_answers_are_dropped_unless_kept(tmp_path: Path, keep: bool) -> None:
    def limited(question: Question) -> Answer:
        text = question.turns[-1].text
        return Answer(f"answer to {text}", "length" if "long" in text else "stop")

    out = tmp_path / "out.jsonl"
    talks = [conversation("late", "short", "long", "more"), conversation("first", "long"), conversation("whole", "ok")]
    report = run(out, talks, limited, keep_cut=keep)
    written = {row["id"]: [message["content"] for message in row["messages"]] for row in rows(out)}
    if keep:
        assert written["late"] == ["short", "answer to short", "long", "answer to long", "more", "answer to more"]
        assert {row["id"]: row["finish"] for row in rows(out)}["late"] == ["stop", "length", "stop"]
        assert (report.written, report.failed, dict(report.cut)) == (3, 0, {})
        return
    assert written == {"late": ["short", "answer to short"], "whole": ["ok", "answer to ok"]}
    assert rows(out)[0]["cut"] == "answer 2: token limit reached"
    assert "cut" not in rows(out)[1]
    assert (report.written, report.failed, dict(report.cut)) == (2, 1, {"token limit": 1})
    assert [(row["id"], row["error"]) for row in errors(out)] == [("first", "answer 1: token limit reached")]


def test_empty_answers_and_failures_keep_earlier_exchanges(tmp_path: Path) -> None:
    def moody(question: Question) -> Outcome:
        text = question.turns[-1].text
        if text == "silence":
            return Answer(" \n")
        return Failure("600 tokens, and 512 fit", lasting=True) if text == "huge" else Answer("yes")

    out = tmp_path / "out.jsonl"
    talks = [conversation("a", "x", "silence"), conversation("b", "x", "y", "huge", "z"), conversation("c", "huge")]
    talks.append(Conversation("d", (Turn("assistant", "bare text"),)))
    report = run(out, talks, moody, keep_cut=True)
    assert {row["id"]: len(row["messages"]) for row in rows(out)} == {"a": 2, "b": 4}
    assert dict(report.cut) == {"empty answer": 1, "request failed": 1}
    failed = {row["id"]: row["error"] for row in errors(out)}
    assert failed == {"c": "answer 1: 600 tokens, and 512 fit", "d": "the conversation has no question"}
    assert report.failed == 2


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    talks = [conversation("a", "één"), conversation("b", "zwei – drei")]
    run(out, talks)
    whole = out.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        out.write_bytes(whole[:end])
        with Store(out, SETTINGS) as store:
            assert len(store) == 1
        assert out.read_bytes() == whole[:start]
    assert run(out, talks).written == 1
    assert out.read_bytes() == whole


def test_other_files_are_refused_and_unchanged(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "a", "messages": []}\n')
    with pytest.raises(ValueError, match=r"out\.jsonl\.json"):
        Store(out, SETTINGS)
    out.unlink()
    run(out, [conversation("a", "one")])
    whole = out.read_text()
    for line in ("a line of somebody else", "[]"):
        out.write_text(f"{whole}{line}\n{whole}")
        with pytest.raises(ValueError, match=r"out\.jsonl, row 2"):
            Store(out, SETTINGS)
    assert out.read_text() == f"{whole}[]\n{whole}"
    out.with_name("out.jsonl.json").write_text("{")
    with pytest.raises(ValueError, match=r"out\.jsonl\.json"):
        Store(out, SETTINGS)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Store(out, {"target": "a mistake"}):
        pass
    run(out, [conversation("a", "one")])  # nothing had been written with the other settings
    with pytest.raises(ValueError, match=r"temperature 0\.0.* 0\.7"):
        Store(out, SETTINGS | {"temperature": 0.7, "target": "echo"})
    with pytest.raises(ValueError, match=r"system None.*'be kind'"):
        Store(out, SETTINGS | {"system": "be kind"})
    with pytest.raises(ValueError, match=r"temperature 0\.0.* None"):
        Store(out, {"target": "echo"})


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    out, limits = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(out, SETTINGS) as store:
        store.add("a", "0" * 32, [Turn("user", "x" * 300)], [])
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                store.add("b", "1" * 32, [Turn("user", "y" * 300)], [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        store.add("c", "2" * 32, [Turn("user", "z")], [])
    assert [row["id"] for row in rows(out)] == ["a", "c"]

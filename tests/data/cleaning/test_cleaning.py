"""Cleaning options and their counts, consistent reports, and exchanges that are kept unchanged."""

import json
from itertools import pairwise
from typing import Any

import pytest
from draftsmith.data.cleaning.cleaner import BLOCKED_ANSWERS, ROLES, Cleaner, Cleaning, EvaluationTexts
from draftsmith.data.conversations import CorpusReport, Dialogue
from hypothesis import given, settings
from hypothesis import strategies as st

Pairs = list[tuple[Any, Any]]
HELLO: Pairs = [("user", "hello"), ("assistant", "hi")]
MORE: Pairs = [("user", "and now?"), ("assistant", "we go on")]


def clean_all(
    dialogues: list[Pairs], texts: list[str] | tuple[str, ...] = (), ids: list[str] | None = None, **options: Any
) -> tuple[list[Pairs | None], CorpusReport]:
    """Clean dialogues, check that the counts of the report add up, and return the dialogues and the report."""
    report = CorpusReport()
    cleaner = Cleaner(Cleaning(**options), report, texts)
    names = ids or [f"row-{i}" for i in range(len(dialogues))]
    conversations = [
        cleaner(Dialogue(name, tuple(pairs), "here")) for name, pairs in zip(names, dialogues, strict=True)
    ]  # fmt: skip
    cleaned = [None if one is None else [(turn.role, turn.text) for turn in one.turns] for one in conversations]
    assert report.rows == len(dialogues) == report.kept + sum(report.dropped.values())
    assert report.kept == sum(one is not None for one in cleaned)
    return cleaned, report


def clean_one(pairs: Pairs, **options: Any) -> tuple[Pairs | None, dict[str, int], dict[str, int]]:
    """Clean a dialogue; return its messages, the reason for dropping it, and the reasons for changes."""
    (cleaned,), report = clean_all([pairs], **options)
    return cleaned, dict(report.dropped), dict(report.changed)


CUT = [
    ({}, [("assistant", "x"), *HELLO], HELLO, "leading assistant turns removed"),
    ({}, [("system", "s"), ("assistant", "x"), *HELLO], [("system", "s"), *HELLO], "leading assistant turns removed"),
    ({}, [*HELLO, ("user", "bye"), ("user", "bye?")], HELLO, "trailing user turns removed"),
    ({}, [("user", "lost"), ("assistant", None), *HELLO], HELLO, "empty messages removed"),
    ({}, [("user", ""), *HELLO], HELLO, "empty messages removed"),
    ({}, [("user", "a"), ("assistant", ""), ("user", ""), ("assistant", "b"), ("user", ""), *HELLO], HELLO,
     "empty messages removed"),
    ({}, [("system", ""), ("system", "s"), *HELLO], [("system", "s"), *HELLO], "empty messages removed"),
    ({}, [("user", "smile \ud83d"), HELLO[1]], [("user", "smile \ufffd"), HELLO[1]], "invalid characters replaced"),
    ({"non_alternating": "merge"}, [("user", "a"), ("user", "b"), ("assistant", "c")],
     [("user", "a\n\nb"), ("assistant", "c")], "consecutive messages merged"),
    ({"non_alternating": "merge"}, [("system", "s"), ("system", "t"), *HELLO], [("system", "s\n\nt"), *HELLO],
     "consecutive messages merged"),
    ({"unknown_roles": "cut"}, [*HELLO, ("user", "q"), ("tool", "t"), ("assistant", "a"), *MORE], [*HELLO, *MORE],
     "unmapped roles removed"),
    ({"unknown_roles": "cut"}, [("tool", "t"), ("system", "s"), *HELLO, (None, None)], [("system", "s"), *HELLO],
     "unmapped roles removed"),
    ({"html": "markdown"}, [("user", "<p>hello <b>you</b></p>"), HELLO[1]], [("user", "hello **you**"), HELLO[1]],
     "HTML to Markdown"),
    ({"escaped_markdown": "unescape"}, [("user", r"snake\_case"), HELLO[1]], [("user", "snake_case"), HELLO[1]],
     "escaped Markdown unescaped"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "pairs", "expected", "reason"), CUT)
def test_cuts_are_counted_by_reason(options: dict[str, str], pairs: Pairs, expected: Pairs, reason: str) -> None:
    assert clean_one(pairs, **options) == (expected, {}, {reason: 1})


DROPPED = [
    ({}, [("user", "a"), ("user", "b"), ("assistant", "c")], "roles do not alternate"),
    *(({"non_alternating": mode}, [*HELLO, ("system", "s"), *MORE], "system message after the first turn")
      for mode in ("drop", "merge")),
    ({}, [("user", "a"), ("assistant", ""), ("user", ""), ("assistant", "b")], "no complete exchange"),
    ({}, [], "no complete exchange"),
    ({"unknown_roles": "cut"}, [("user", "a"), ("tool", "b"), ("assistant", "c")], "no complete exchange"),
    ({}, [*HELLO, ("tool", "t")], "unmapped role tool"),
    ({}, [*HELLO, (["user"], "t")], "unmapped role ['user']"),
    ({}, [("user", [{"type": "image"}]), HELLO[1]], "content is not text"),
    ({}, [("text", None)], "empty"),
    ({"drop_blocked": True}, [HELLO[0], ("assistant", "!Too many requests in 1 hour. Try again later.")],
     "blocked answer"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "pairs", "reason"), DROPPED)
def test_drops_are_counted_by_reason(options: dict[str, Any], pairs: Pairs, reason: str) -> None:
    assert clean_one(pairs, **options) == (None, {reason: 1}, {})


def test_bare_text_is_one_answer_without_a_question() -> None:
    options = {"roles": {"system": "user", "assistant": "user"}}
    assert clean_one([("text", " once\nupon ")], **options) == ([("assistant", " once\nupon ")], {}, {})


def test_roles_are_mapped_and_unknown_ones_are_named() -> None:
    written = [("KING", "q"), ("bot", "a")]
    assert clean_one(written, roles={"KING": "user", "bot": "assistant"})[0] == [("user", "q"), ("assistant", "a")]
    clean, report = clean_all([written, [("user", "q"), ("bot", "a")], [*HELLO, (None, "x")], [*HELLO, ("\ud800", "")]])
    assert clean == [None] * 4
    assert report.dropped == {f"unmapped role {role}": 1 for role in ("KING", "bot", "None", "\ufffd")}


def test_reports_of_two_workers_add_up() -> None:
    dialogues = [HELLO, [], [("assistant", "x"), *MORE], [("tool", "t")], [*HELLO, ("user", ""), ("assistant", "x")]]
    (_, whole), (_, first), (_, second) = clean_all(dialogues), clean_all(dialogues[:2]), clean_all(dialogues[2:])
    first.merge(second)
    assert first == whole
    assert json.loads(json.dumps(first.as_dict())) == whole.as_dict()


def test_duplicates_refer_to_kept_conversations() -> None:
    other = [HELLO[0], ("assistant", "go away")]
    dialogues = [HELLO, [*HELLO, *MORE], other, other]
    ids = ["a", "b", "a", "c"]
    assert clean_all(dialogues, ids=ids)[1].kept == 4
    cleaned, report = clean_all(dialogues, ids=ids, duplicates=["id"])
    assert [one is not None for one in cleaned] == [True, True, False, True]
    assert report.dropped == {"duplicate id": 1}
    cleaned, report = clean_all(dialogues, ids=ids, duplicates=["first-exchange"])
    assert [one is not None for one in cleaned] == [True, False, True, False]
    assert report.dropped == {"duplicate first exchange": 2}
    blocked = [*HELLO, MORE[0], ("assistant", BLOCKED_ANSWERS[0])]
    cleaned, report = clean_all([blocked, HELLO], duplicates=["first-exchange"], drop_blocked=True)
    assert report.dropped == {"blocked answer": 1}, "the first one was dropped, so the second is no duplicate"
    texts: list[Pairs] = [[("text", "a")], [("text", "a")], [("text", "b")]]
    assert clean_all(texts, duplicates=["first-exchange"])[1].dropped == {"duplicate first exchange": 1}


SPOKEN: dict[str, Pairs] = {
    "en": [("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris.")],
    "de": [("user", "Wie spät ist es jetzt in Berlin?"), ("assistant", "Es ist kurz nach drei Uhr.")],
    "zh": [("user", "你好，今天的天气怎么样？"), ("assistant", "今天的天气非常好。")],
    "und": [("user", "2+2"), ("assistant", "4")],
}


def test_languages_are_kept_or_dropped_by_code() -> None:
    pytest.importorskip("py3langid")
    cleaned, report = clean_all(list(SPOKEN.values()), languages=["en", "und"])
    assert [one is not None for one in cleaned] == [True, False, False, True]
    assert report.dropped == {"language de": 1, "language zh": 1}
    code = "```\nimport numpy as np\nfor line in lines: print(line, end='')\n```\n" * 9
    answered = [SPOKEN["de"][0], ("assistant", code + "Das Programm liest alle Zeilen und schreibt sie wieder hin.")]
    assert clean_one([("system", "You are a helpful assistant. " * 40), *answered], languages=["de"])[1] == {}
    with pytest.raises(ValueError, match=r"'eng'.*'en'.*und"):
        Cleaner(Cleaning(languages=("de", "eng")), CorpusReport())


LONG = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences."
SHORT = "Who wrote the Iliad?"


def test_contaminated_conversations_are_dropped_by_their_questions() -> None:
    dialogues = [
        [("user", "tell me: " + LONG), ("assistant", "aloha")],
        [("user", "I have a question"), ("assistant", LONG)],
        [*HELLO, ("user", SHORT), ("assistant", "Homer")],
        [("system", SHORT), *HELLO],
        [("text", "Q: " + SHORT)],
    ]
    cleaned, report = clean_all(dialogues, [LONG, SHORT], contamination=["mt-bench"])
    assert [one is None for one in cleaned] == [True, False, True, False, True]
    assert report.dropped == {"contamination": 3}
    assert clean_all([[("user", " ".join(LONG.split()[:5])), HELLO[1]]], [LONG], contamination=["a"])[1].kept == 1
    options = {"contamination": ["a"], "contamination_words": 5}
    assert clean_all([[("user", " ".join(LONG.split()[:5])), HELLO[1]]], [LONG], **options)[1].kept == 0


ANY_TEXT = st.text(max_size=8) | st.text(st.characters(categories=["Cs", "Lu"]), max_size=3)
CONTENTS = st.sampled_from(["", " ", None, "</s>", "USER: x ASSISTANT:", "<b>y</b>", "\\_", 3, ["x"], {"a": None}])
MESSAGES = st.tuples(st.sampled_from([*ROLES, "tool", "text", "", None, 7]), ANY_TEXT | CONTENTS)
TALKING = st.tuples(st.sampled_from(["user", "gpt"]), ANY_TEXT | st.sampled_from(["", None]))
DIALOGUES = st.lists(MESSAGES, max_size=6) | st.lists(TALKING, max_size=9)
OPTIONS = st.fixed_dictionaries(
    {
        "non_alternating": st.sampled_from(["drop", "merge"]),
        "unknown_roles": st.sampled_from(["drop", "cut"]),
        "html": st.sampled_from(["keep", "markdown"]),
        "escaped_markdown": st.sampled_from(["keep", "unescape"]),
        "duplicates": st.sampled_from([(), ("id",), ("id", "first-exchange")]),
    }
)


def assert_well_formed(messages: Pairs) -> None:
    roles = [role for role, _ in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    assert turns == ["assistant"] or turns == ["user", "assistant"] * (len(turns) // 2) != []
    for _, text in messages:
        assert text.strip()
        text.encode()


@given(st.lists(DIALOGUES, max_size=3), st.lists(ANY_TEXT, min_size=3, max_size=3), OPTIONS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_dialogue_is_cleaned_with_a_consistent_report(dialogues: list[Pairs], ids: list[str], options: Any) -> None:
    cleaned, report = clean_all(dialogues, ids=ids[: len(dialogues)], **options)
    json.dumps(report.as_dict(), ensure_ascii=False).encode()
    for one in cleaned:
        if one is not None:
            assert_well_formed(one)


def mended(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def adjacent(question: str, answer: str, source: Pairs) -> bool:
    """Return whether an answer follows its question in the source, with only empty messages in between."""
    spoken = [(ROLES.get(role) if isinstance(role, str) else None, mended(text)) for role, text in source]
    for start in (i for i, message in enumerate(spoken) if message == ("user", question)):
        after = spoken[start + 1 :]
        for end in (i for i, message in enumerate(after) if message == ("assistant", answer)):
            roles = [role for role, text in after[:end] if not text or (isinstance(text, str) and text.isspace())]
            if roles == ["user"] * roles.count("user") + ["assistant"] * roles.count("assistant") and len(roles) == end:
                return True
    return False


@given(DIALOGUES, st.sampled_from(["drop", "cut"]))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_kept_exchanges_were_adjacent(source: Pairs, unknown_roles: str) -> None:
    cleaned = clean_one(source, unknown_roles=unknown_roles)[0]
    for (asker, question), (answerer, answer) in pairwise(cleaned or []):
        if (asker, answerer) == ("user", "assistant"):
            assert adjacent(question, answer, source)


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=9), max_size=4),
    st.lists(st.sampled_from("abc"), max_size=14),
    st.integers(4, 6),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_index_equals_a_full_search(texts: list[list[str]], words: list[str], run: int) -> None:
    def inside(part: list[str]) -> bool:
        return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))

    expected = any(
        words == text
        if 0 < len(text) < 4
        else any(inside(text[i : i + run]) for i in range(max(1, len(text) - run + 1)))
        for text in texts
        if text
    )
    assert EvaluationTexts(map(" ".join, texts), run).found_in(" ".join(words)) is expected
